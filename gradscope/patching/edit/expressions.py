"""Expressions of a function for operands, numbers and shapes of recorded calls, and whether they still hold later."""

from __future__ import annotations

import ast
import inspect
from types import BuiltinFunctionType, ModuleType

from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.source import FunctionSource, Refusal
from gradscope.patching.edit.syntax import (
    INLINE,
    SHAPE_ATTRIBUTES,
    SHAPE_METHODS,
    is_fixed,
    names_in,
    parts_read,
    reads_only,
    walked,
    within,
)
from gradscope.patching.match.match import Match, Scalar, Size
from gradscope.recording.graph import Frame, Node, Value


def operand_of(value: Value, users: frozenset[Node], calls: CallSites) -> tuple[ast.expr, Node]:
    """Return an expression for ``value`` in one of the calls ``users``, and that call; names come before calls."""
    found: list[tuple[ast.expr, Node]] = []
    for user in sorted(users, key=lambda node: node.index):
        if value in user.inputs:
            found += [(part, user) for part in parts_read(calls.expression(user)) if calls.denotes(part, value, user)]
    if not found:
        raise Refusal(f"no expression in {calls.frame.code.co_name} is the tensor that {_user(value, users)} reads")
    return min(found, key=lambda pair: not isinstance(pair[0], ast.Name))


def number_of(scalar: Scalar, calls: CallSites) -> ast.expr | str:
    """Return the expression of a number that a call was given; a text where none stands in this function."""
    node, expression = scalar.node, calls.spelled(scalar.node)
    inline = node.places[0].frame.code.co_name in INLINE
    if node.places[0].frame is not calls.frame and node.caller is None and not inline:
        return _number_below(scalar, calls)
    if isinstance(expression, ast.AugAssign) and scalar.position == 1:
        return expression.value
    if isinstance(expression, ast.Assign) and node.op == "setitem" and scalar.position == 2:
        plain = all(isinstance(target, (ast.Subscript, ast.Name)) for target in expression.targets)
        if plain:
            return expression.value
    for sides in _sides(expression):
        for side, other in (sides, sides[::-1]):
            if any(calls.denotes(side, value, node) for value in node.inputs):
                return other
    if isinstance(expression, ast.Call) and calls.is_call_of(expression, node):
        found = _argument(expression, node, scalar, calls)
        if found is not None:
            return found
        if scalar.otherwise:
            return scalar.otherwise
    raise Refusal(f"cannot tell how the call of {node.op} specifies its {scalar.name or 'number'}")


def _number_below(scalar: Scalar, calls: CallSites) -> ast.expr | str:
    """Return the expression of a number that a helper is handed, writes down, or reads from the same module."""
    inner = scalar.node.places[0].frame
    source = FunctionSource.of(inner.code, {calls.source.file.name: calls.source.file})
    texts = CallSites(source, inner, [node for node in calls.nodes if node.place_in(inner) is not None], scalar.node)
    found = number_of(scalar, texts)
    if isinstance(found, (str, ast.Constant)):
        return found if isinstance(found, str) else source.file.of(found)
    given = handed(found, scalar.node, source, calls.frame, calls.source)
    if given is not None:
        return given if within(calls.source.definition, given) else source.file.of(given)
    part: ast.expr = found
    while isinstance(part, ast.Attribute):
        part = part.value
    own = inner.owner is not None and inner.owner is calls.frame.owner
    names = {each.id for each in (part,) if isinstance(each, ast.Name)} | set(_first(calls))
    if not own or names != set(inner.code.co_varnames[:1]) or isinstance(found, ast.Name):
        raise Refusal(f"the number that {scalar.node.op} uses is set in {inner.code.co_name}")
    if any(
        isinstance(each.ctx, ast.Store)
        for text in (calls.source, source)
        for name in names
        for each in text.names(name)
    ):
        raise Refusal(f"{min(names)} is reassigned")
    return source.file.of(found)


def size_of(size: Size, calls: CallSites) -> ast.expr | None:
    """Return the expression of one of a view's sizes; None where it is left to torch.

    Raises:
        Refusal: it is not spelled in the function itself, where the new code can read it.
    """
    call = calls.innermost(size.node)
    if not isinstance(call, ast.Call) or call.keywords:
        raise Refusal(f"a size of {size.node.op} cannot be found in the code")
    sizes = sizes_of(size.node, calls)
    stars = [index for index, each in enumerate(sizes) if isinstance(each, ast.Starred)]
    if not stars and len(sizes) == size.count:
        found = sizes[size.position]
    elif stars and size.count - size.position < len(sizes) - stars[-1]:
        found = sizes[size.position - size.count]
    else:
        raise Refusal(f"line {call.lineno}: cannot tell which size this is")
    if is_left(found):
        return None
    if names_in(found) & _bound_inside(found, calls) or not reads_only(found):
        raise Refusal(f"line {found.lineno}: {calls.source.file.of(found)} cannot be evaluated again")
    return found


def sizes_of(node: Node, calls: CallSites) -> list[ast.expr]:
    """Return the sizes that a view was given, as written, perhaps with a star; none where that is not plain."""
    call = calls.innermost(node)
    if not isinstance(call, ast.Call) or call.keywords:
        return []
    # "view(sizes)" and "unflatten(dim, sizes)" as a method; a function has the tensor before.
    skipped = int(not _is_method(call.func, calls)) + int(node.op == "unflatten")
    sizes = call.args[skipped:]
    return _spread(sizes[0], calls) if len(sizes) == 1 else sizes


def is_left(size: ast.expr) -> bool:
    """Return whether it is the -1 of a size that is left to torch."""
    return isinstance(size, ast.UnaryOp) and ast.unparse(size) == "-1"


def _bound_inside(expression: ast.expr, calls: CallSites) -> set[str]:
    """Return the names that lambdas and comprehensions around an expression bind."""
    found: set[str] = set()
    part: ast.AST = expression
    while not isinstance(part, ast.stmt):
        part = calls.source.file.parents[part]
        if isinstance(part, ast.Lambda):
            found |= {each.arg for each in walked(part.args) if isinstance(each, ast.arg)}
        elif isinstance(part, (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
            found |= {name for each in part.generators for name in names_in(each.target)}
    return found


def _first(calls: CallSites) -> tuple[str, ...]:
    """Return the name of the frame's own module."""
    return calls.frame.code.co_varnames[:1] if calls.frame.owner is not None else ()


def _spread(expression: ast.expr, calls: CallSites) -> list[ast.expr]:
    """Return the parts of a tuple, or of the one that is all a name is ever bound to."""
    if isinstance(expression, ast.Name):
        expression = calls.source.value_of(expression) or expression
    return expression.elts if isinstance(expression, (ast.Tuple, ast.List)) else [expression]


def resolved_number(scalar: Scalar, calls: CallSites) -> ast.expr | str:
    """Return the expression of a number; of a name that is bound once, what it is bound to."""
    found = number_of(scalar, calls)
    return calls.source.value_of(found) or found if isinstance(found, ast.Name) else found


def is_of_last_size(expression: ast.expr, at: Node, size: int, calls: CallSites) -> bool:
    """Return whether a number is made of the last size, ``size``, of tensors alone."""
    place = at.place_in(calls.frame)
    if not still_holds(expression, calls):
        return False
    for part in walked(expression):
        if not isinstance(part, ast.Name):
            continue
        value = place.names.get(part.id) if place is not None else None
        if value is None:
            held = calls.frame.globals.get(part.id)
            if part.id in calls.frame.code.co_varnames or not isinstance(held, (ModuleType, BuiltinFunctionType)):
                return False
        elif (
            size_read(part, calls.source) not in {-1, len(value.shape) - 1}
            or value.shape[-1] != size
            or value.shape.count(size) != 1
        ):
            return False
    return True


def _argument(call: ast.Call, node: Node, scalar: Scalar, calls: CallSites) -> ast.expr | None:
    """Return the argument of a call by its name, or by its position where a function or a method is called."""
    for keyword in call.keywords:
        if keyword.arg is None:
            raise Refusal(f"{node.op} is called with **")
        if scalar.name and keyword.arg == scalar.name:
            return keyword.value
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        raise Refusal(f"{node.op} is called with *")
    if calls.called_module(call) is not None:
        return None if scalar.name else (call.args[scalar.position] if scalar.position < len(call.args) else None)
    position = scalar.position
    if scalar.name:
        try:
            names = list(inspect.signature(node.function).parameters)
        except (TypeError, ValueError):  # a builtin: its arguments come as they were written
            names = []
        position = names.index(scalar.name) if scalar.name in names else position
    index = position - 1 if _is_method(call.func, calls) else position
    return call.args[index] if 0 <= index < len(call.args) else None


def _is_method(function: ast.expr, calls: CallSites) -> bool:
    """Return whether ``function`` is ``x.f`` of a tensor and not ``torch.f`` of a module."""
    if not isinstance(function, ast.Attribute):
        return False
    root: ast.expr = function.value
    while isinstance(root, ast.Attribute):
        root = root.value
    return not (
        isinstance(root, ast.Name)
        and root.id not in calls.frame.code.co_varnames
        and isinstance(calls.frame.globals.get(root.id), ModuleType)
    )


def still_holds(expression: ast.expr, calls: CallSites) -> bool:
    """Return whether ``expression``, read again before the last call, is what it was: names and shapes alone."""
    if not reads_only(expression):
        return False
    here = calls.source.file.start(expression)
    there = calls.source.file.start(calls.stays)
    return not bound_between(expression, here, there, calls)


def bound_between(expression: ast.AST, here: int, there: int, calls: CallSites) -> bool:
    """Return whether a statement between ``here`` and ``there`` binds a name or an attribute in ``expression``.

    Offsets in the file; the statement that holds the last call binds its names after it.
    """
    names = {part.id for part in walked(expression) if isinstance(part, ast.Name)}
    attributes = {part.attr for part in walked(expression) if isinstance(part, ast.Attribute)}
    own = calls.statement
    others = [node for name in names for node in calls.source.bound_otherwise.get(name, [])]
    for other in [*calls.source.bindings, *others]:
        same = isinstance(other, ast.Name) and other.id in names
        same = same or (isinstance(other, ast.Attribute) and other.attr in attributes) or other in others
        if not same or calls.source.statement(other) is own:
            continue
        if calls.source.file.end(calls.source.statement(other)) > here and calls.source.file.start(other) < there:
            return True
    return False


def size_read(name: ast.Name, source: FunctionSource) -> int | None:
    """Return the dimension whose size is read of a tensor: ``x.size(-1)``, ``x.shape[-1]``; None where it is not."""
    parents = source.file.parents
    attribute = parents[name]
    if not isinstance(attribute, ast.Attribute):
        return None
    reader = parents[attribute]
    index: ast.expr | None = None
    if attribute.attr == "size" and isinstance(reader, ast.Call) and len(reader.args) == 1 and not reader.keywords:
        index = reader.args[0]
    elif attribute.attr == "shape" and isinstance(reader, ast.Subscript):
        index = reader.slice
    try:
        found = ast.literal_eval(index) if index is not None else None
    except ValueError:
        return None
    return found if isinstance(found, int) else None


def _sides(expression: ast.AST | None) -> list[tuple[ast.expr, ast.expr]]:
    """Return left and right of an operator; nothing of any other expression."""
    if isinstance(expression, ast.BinOp):
        return [(expression.left, expression.right)]
    if isinstance(expression, ast.Compare) and len(expression.ops) == 1:
        return [(expression.left, expression.comparators[0])]
    return []


def _user(value: Value, users: frozenset[Node]) -> str:
    return next((user.op for user in users if value in user.inputs), "the pattern")


def handed(
    found: ast.expr, node: Node, inside: FunctionSource, frame: Frame, source: FunctionSource
) -> ast.expr | None:
    """Return what the function of ``frame`` passes a helper for ``found``, an argument of the helper's.

    Of an argument that is left out, its default, where that is written as a number. None where ``found`` is no
    argument, or may be bound anew, or how it is handed on is not plain.

    Args:
        node: a call in the helper.
        inside: the helper.
        source: of ``frame``.
    """
    if len(node.places) < 2 or node.places[1].frame is not frame or not isinstance(found, ast.Name):
        return None
    name, call = found.id, source.at(node.places[1].span)
    stored = any(not isinstance(each.ctx, ast.Load) for each in inside.names(name))
    if stored or name in inside.bound_otherwise or name in inside.not_local or not isinstance(call, ast.Call):
        return None
    given, called = inside.definition.args, call.func
    names = [each.arg for each in (*given.posonlyargs, *given.args)]
    defaults = dict(zip(reversed(names), reversed(given.defaults), strict=False))
    defaults |= {each.arg: at for each, at in zip(given.kwonlyargs, given.kw_defaults, strict=True) if at is not None}
    if isinstance(called, ast.Attribute) and node.places[0].frame.owner is not None:  # a module's own method
        names = names[1:]
    elif not isinstance(called, ast.Name):
        return None
    if any(isinstance(each, ast.Starred) for each in call.args) or any(each.arg is None for each in call.keywords):
        return None
    written = dict(zip(names, call.args, strict=False)) | {each.arg or "": each.value for each in call.keywords}
    if name in written:
        return written[name]
    default = defaults.get(name)
    return default if default is not None and is_fixed(default) else None


# Queries of a removed tensor's shape, dtype or device, which another tensor answers instead.


_CASTS = frozenset({"to", "type_as"})


def is_asked_for_form(node: Node, value: Value) -> bool:
    """Return whether ``node`` reads the dtype and device of ``value`` alone, as ``mask.to(scores)`` does."""
    return node.op in _CASTS and len(node.inputs) == 2 and node.inputs[0] is not value


def only_forms(statement: ast.AST, names: set[str]) -> bool:
    """Return whether ``names`` occur in ``statement`` as ``x.shape``, ``x.size(...)``, ``y.to(x)`` and so on alone."""
    return all(_asked(part) for part in _uses(statement, names))


def _uses(statement: ast.AST, names: set[str]) -> list[tuple[ast.Name, ast.AST | None, ast.AST | None]]:
    """Return each occurrence, with what stands around it and around that."""
    found: list[tuple[ast.Name, ast.AST | None, ast.AST | None]] = []

    def walk(node: ast.AST, above: ast.AST | None, higher: ast.AST | None) -> None:
        if isinstance(node, ast.Name) and node.id in names:
            found.append((node, above, higher))
        for child in ast.iter_child_nodes(node):
            walk(child, node, above)

    walk(statement, None, None)
    return found


def _asked(use: tuple[ast.Name, ast.AST | None, ast.AST | None]) -> bool:
    name, above, higher = use
    if not isinstance(name.ctx, ast.Load) or not isinstance(above, ast.Attribute):
        return _is_cast(name, above)
    if above.attr in SHAPE_ATTRIBUTES:
        return True
    called = isinstance(higher, ast.Call) and higher.func is above
    return called and above.attr in SHAPE_METHODS


def _is_cast(name: ast.Name, above: ast.AST | None) -> bool:
    """Return whether ``name`` is the ``x`` of ``y.to(x)``."""
    if not isinstance(above, ast.Call) or above.args != [name] or above.keywords:
        return False
    return isinstance(above.func, ast.Attribute) and above.func.attr in _CASTS


def shape_queries(statement: ast.AST, inner: set[str], match: Match, calls: CallSites) -> list[tuple[ast.AST, str]]:
    """Return the parts of ``statement`` that ask one of the names ``inner`` for its shape, and their new text.

    Raises:
        Refusal: no tensor that stays has that shape, dtype or device.
    """
    return [_asked_elsewhere(name, above, higher, match, calls) for name, above, higher in _uses(statement, inner)]


def _asked_elsewhere(
    name: ast.Name, above: ast.AST | None, higher: ast.AST | None, match: Match, calls: CallSites
) -> tuple[ast.AST, str]:
    assert isinstance(above, (ast.Attribute, ast.Call)) and higher is not None
    reason = f"line {name.lineno} reads the shape of {name.id}, which would no longer exist"
    like = match.like
    held = {
        place.names[name.id]
        for node in match.nodes
        if (place := node.place_in(calls.frame)) is not None and name.id in place.names
    }
    held = {value for value in held if value in match.inner}
    if like is None or not held or any(value.shape != like.shape for value in held):
        raise Refusal(reason)
    if isinstance(above, ast.Call) or above.attr in {"dtype", "device"}:
        if any(value.dtype != like.dtype.dtype or value.device != like.dtype.device for value in held):
            raise Refusal(reason)
        other = _name_of(like.dtype, name, match, calls)
        return (name, other) if isinstance(above, ast.Call) else (above, f"{other}.{above.attr}")
    index = None
    if above.attr == "shape" and isinstance(higher, ast.Subscript) and higher.value is above:
        index = _number(higher.slice)
    elif above.attr == "size" and isinstance(higher, ast.Call) and len(higher.args) == 1:
        index = _number(higher.args[0])
    size = like.sizes[index] if index is not None and -len(like.shape) <= index < len(like.shape) else None
    if size is None:
        raise Refusal(reason)
    value, dimension = size
    return higher, f"{_name_of(value, name, match, calls)}.size({dimension})"


def _name_of(value: Value, near: ast.Name, match: Match, calls: CallSites) -> str:
    """Return a name that holds ``value`` where ``near`` is read."""
    expression, at = operand_of(value, match.nodes, calls)
    file = calls.source.file
    here, there = sorted([file.start(near), file.start(calls.expression(at))])
    plain = isinstance(expression, ast.Name) and not bound_between(expression, here, there, calls)
    if not plain or names_in(expression) & {near.id}:
        raise Refusal(f"line {near.lineno} reads the shape of {near.id}, which would no longer exist")
    return file.of(expression)


def _number(expression: ast.expr) -> int | None:
    try:
        found = ast.literal_eval(expression)
    except ValueError:
        return None
    return found if isinstance(found, int) else None
