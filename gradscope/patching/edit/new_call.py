"""The text of the call that replaces a match, its arguments spelled as in the user's source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from dataclasses import dataclass

from torch import nn

from gradscope.ops import CASTS
from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.callees import made_in_place, setting_of
from gradscope.patching.edit.expressions import (
    bound_between,
    is_of_last_size,
    number_of,
    only_forms,
    operand_of,
    resolved_number,
    shape_queries,
    size_of,
    still_holds,
)
from gradscope.patching.edit.imports import RecipeNames
from gradscope.patching.edit.side_effects import is_hooked
from gradscope.patching.edit.source import Refusal
from gradscope.patching.edit.syntax import bound_names, names_in, reads_only, targets, walked, within
from gradscope.patching.match.match import (
    Called,
    FromSizes,
    Given,
    Layer,
    Match,
    Of,
    Piece,
    Scalar,
    Setting,
    Size,
)
from gradscope.recording.graph import Node, Recording
from gradscope.tree import children_of


class NewCall:
    """The call of a recipe that replaces ``match``.

    Args:
        calls: the function that is edited.
        parts: the statements that make the match's tensors, and are removed.
        recipes: the names of the recipes in the file.
        taken: names that other edits of the function bind.

    Attributes:
        hoisted: assignments that a removed statement leaves behind, for what cannot be evaluated later.
        spelled: the expressions that the new text repeats.
        unchanged: the end of the text, where it is the end of the last call's too, as it was written.

    Raises:
        Refusal: an argument has no spelling.
    """

    def __init__(
        self, match: Match, calls: CallSites, parts: list[ast.stmt], recipes: RecipeNames, taken: frozenset[str]
    ) -> None:
        self.match, self.calls, self.parts, self.recipes = match, calls, parts, recipes
        self.source, self.stays, self.statement = calls.source, calls.stays, calls.statement
        self.hoisted: dict[ast.stmt, list[str]] = {}
        self.spelled: list[ast.AST] = []
        self.unchanged = ""
        self._names: dict[ast.expr, str] = {}
        self._taken = self.source.file.identifiers | taken
        self._given_parts: list[str] = []  # of one argument that is several, as they were written
        self._helpers = {name: recipes.name(name) for name in (match.function, *match.helpers)}
        self._arguments = list(self._spell_arguments())

    def _spell_arguments(self) -> Iterator[str]:
        equals = self.source.file.style.equals
        for argument in self.match.arguments:
            text = "".join(self._piece(piece) for piece in argument.pieces)
            text = _plain(text.replace(" if True else 0.0", ""))
            if argument.name == "**":
                yield f"**{text}"
            elif not argument.name:
                yield text
            elif text != "None":
                yield f"{argument.name}{equals}{text}"

    def text(self, *, guarded: bool, assigned: str = "", last: str = "") -> str:
        """Return what replaces the last call; on several lines where one would be too long.

        Args:
            guarded: it will stand in a block of its own.
            assigned: of a call that gives two tensors, the ``names =`` in front of it.
            last: one more argument.
        """
        arguments, file = [*self._arguments, *([last] if last else [])], self.source.file
        head, end = f"{self._helpers[self.match.function]}(", ")" if assigned else f"){self.match.suffix}"
        text = f"{head}{', '.join(arguments)}{end}"
        if arguments[-1].startswith("\n"):  # as they were written
            text = f"{head}{', '.join(arguments[:-1])}{',' if arguments[1:] else ''}{arguments[-1]}{end}"
        outer, step = file.indent(self.statement), file.step(self.statement)
        moved = len(step) if guarded else 0
        fits = len(outer) + len(assigned) + len(text) + moved <= file.style.width
        if (fits if assigned else self._fits(text, moved)) or any("\n" in part for part in self._given_parts):
            return text
        apart = [part for each in arguments for part in (self._given_parts if self._is_given(each) else [each])]
        lines = "".join(f"{outer}{step}{argument},\n" for argument in apart)
        return f"{head}\n{lines}{outer}{end}"

    def _fits(self, text: str, moved: int) -> bool:
        """Return whether the line is no longer than the file's others, or than it was."""
        file, home = self.source.file, self.statement
        behind = file.text[file.end(self.stays) : file.line_starts[(self.stays.end_lineno or 0) + 1]]
        if home.end_lineno == self.stays.end_lineno:
            behind = file.text[file.end(self.stays) : file.end(home)]
        start = file.text[file.line_starts[self.stays.lineno] : file.start(self.stays)].decode()
        if isinstance(self.stays, ast.AugAssign):
            start += f"{file.of(self.stays.target)} = "
        lines = f"{start}{text}{behind.decode().rstrip()}".split("\n")
        held = (home.end_col_offset or 0) if home.lineno == home.end_lineno else 0
        return max(map(len, lines)) + moved <= max(file.style.width, held + moved)

    def _is_given(self, argument: str) -> bool:
        return bool(self._given_parts) and argument == ", ".join(self._given_parts)

    def _piece(self, piece: Piece) -> str:
        if isinstance(piece, str):
            return self._helpers.get(piece) or self.source.file.style.of_text(piece)
        if isinstance(piece, Of):
            return self._operand(piece)
        if isinstance(piece, Size):
            return self._size(piece)
        if isinstance(piece, FromSizes):
            return self._from_sizes(piece)
        if isinstance(piece, Layer):
            return self._layer(piece)
        if isinstance(piece, Given):
            return self._given(piece)
        if isinstance(piece, (Setting, Called)):
            text = self._of_module(piece)
            if text is not None:
                return text
            assert isinstance(piece, Setting)
            if isinstance(piece.scalar, Of):
                return self._operand(piece.scalar)
            piece = piece.scalar
        found = number_of(piece, self.calls)
        return found if isinstance(found, str) else self._spelled(found, piece.name or "number", piece.node)

    def _size(self, piece: Size, *, bracketed: bool = False) -> str:
        size = size_of(piece, self.calls)
        if size is not None:
            text = self._spelled(size, "size", piece.node)
            return f"({text})" if bracketed and isinstance(size, ast.BinOp) and not text.isidentifier() else text
        if not piece.rest:
            raise Refusal(f"line {self.stays.lineno}: torch infers a size of {piece.node.op}")
        parts = (
            self._size(each, bracketed=True) if isinstance(each, Size) else self._piece(each) for each in piece.rest
        )
        return "".join(parts)

    def _operand(self, piece: Of) -> str:
        expression, at = operand_of(piece.value, self.match.nodes | self.match.later, self.calls)
        if piece.again and expression not in self._names and not reads_only(expression):
            raise Refusal(f"line {expression.lineno}: {piece.role} would be computed twice")
        text = self._spelled(expression, piece.role, at)
        plain = text.isidentifier() or isinstance(expression, (ast.Name, ast.Call, ast.Attribute, ast.Subscript))
        return f"{text if plain or not (piece.suffix or piece.bracketed) else f'({text})'}{piece.suffix}"

    def _of_module(self, piece: Setting | Called) -> str | None:
        module = self.calls.module(piece.node)
        if module is None and isinstance(piece, Setting) and self.calls.is_of_parent(piece.node):
            return f"{self.calls.frame.code.co_varnames[0]}.{piece.attribute}"
        if module is None and isinstance(piece, Setting):
            made = made_in_place(self.calls.expression(piece.node), piece.node.caller, self.calls)
            if made is not None:
                return self._of_new_module(piece, made)
        if module is None:
            if isinstance(piece, Called):
                raise Refusal(f"{piece.node.op} is not called by a module")
            return None
        call = self.calls.expression(piece.node)
        called = self.calls.called_module(call, piece.node) if isinstance(call, ast.Call) else None
        text = self.source.file.of(module)
        if isinstance(module, ast.Name) and not still_holds(module, self.calls):
            raise Refusal(f"{text} refers to a different module where the result is computed")
        if is_hooked(called):
            raise Refusal(f"{text} has hooks, which would no longer be called")
        if isinstance(called, nn.Module) and any(children_of(called)):
            raise Refusal(f"{text} contains submodules")
        if isinstance(piece, Setting) and piece.node.caller is not called:
            raise Refusal(f"{text} is not a torch module, so its behavior is not known")
        self.spelled.append(module)
        return f"{text}.{piece.attribute}" if isinstance(piece, Setting) else text

    def _of_new_module(self, piece: Setting, made: ast.Call) -> str:
        """Return the setting as it is written where the module is made, or its default."""
        module, scalar = piece.node.caller, piece.scalar
        assert isinstance(module, nn.Module)
        if piece.attribute == "training":
            return "True"
        found = setting_of(piece.attribute, made, module)
        if found is not None:
            return self._spelled(found, piece.attribute, piece.node)
        return scalar.otherwise if isinstance(scalar, Scalar) and scalar.otherwise else "None"

    def _from_sizes(self, piece: FromSizes) -> str:
        for part in piece.pieces:
            expression = resolved_number(part, self.calls) if isinstance(part, Scalar) else ""
            if isinstance(expression, ast.expr) and self._no_longer_bound(expression):
                assert isinstance(part, Scalar)
                if not is_of_last_size(expression, part.node, piece.size, self.calls):
                    break
                return piece.otherwise
        return "".join(self._piece(part) for part in piece.pieces)

    @property
    def names(self) -> set[str]:
        """The names that ``hoisted`` binds."""
        return set(self._names.values())

    def _no_longer_bound(self, expression: ast.expr) -> set[str]:
        """Return the names in ``expression`` that a removed statement above it binds."""
        start = self.source.file.start(expression)
        before = [part for part in self.parts if self.source.file.start(part) < start and not within(part, expression)]
        return names_in(expression) & {name for part in before for name in bound_names(part)}

    def _layer(self, piece: Layer) -> str:
        call = self.calls.expression(piece.node)
        called = self.calls.called_module(call) if isinstance(call, ast.Call) else None
        local = isinstance(call, ast.Call) and isinstance(call.func, (ast.Name, ast.Subscript)) and called is None
        if not isinstance(call, ast.Call) or not (called is piece.node.caller or (local and not piece.certain)):
            raise Refusal(f"line {self.stays.lineno}: cannot tell which module is called")
        text = self.source.file.of(call.func)
        if is_hooked(piece.node.caller):
            raise Refusal(f"{text} has hooks, which need its output")
        self.spelled.append(call.func)
        return text

    def _given(self, piece: Given) -> str:
        call = self.calls.expression(piece.node)
        if not isinstance(call, ast.Call):
            raise Refusal(f"cannot tell how {piece.node.op} is called")
        if piece.node.caller is None and not self.calls.is_call_of(call, piece.node):
            raise Refusal(f"{piece.node.op} is not called by its own name")
        names = {keyword.arg for keyword in call.keywords}
        starred = None in names or any(isinstance(argument, ast.Starred) for argument in call.args)
        if starred or len(call.args) > piece.positional or not names <= piece.names or len(call.args) < piece.skipped:
            raise Refusal(f"line {call.lineno}: cannot interpret the arguments of {piece.node.op}")
        if call is not self.stays:
            raise Refusal(f"{piece.node.op} is part of another expression")
        file = self.source.file
        parts: list[ast.expr | ast.keyword] = [*call.args[piece.skipped :], *call.keywords]
        if not parts:
            return ""
        self.spelled += parts
        self._given_parts = [self.source.file.of(part) for part in parts]
        if self.match.arguments[-1].pieces == (piece,):  # up to the bracket, with comments and line breaks
            text = file.text[file.end(call.func) : file.end(call) - 1].partition(b"(")[2].decode()
            if not piece.skipped:
                self.unchanged = f"{text})"
                return text
            return file.text[file.start(parts[0]) : file.end(call) - 1].decode()
        return file.text[file.start(parts[0]) : file.end(parts[-1])].decode()

    def _spelled(self, expression: ast.expr, role: str, at: Node) -> str:
        """Return the text of ``expression``, or a new name for it where it must be evaluated earlier."""
        text = self._text_of(expression)
        self.spelled.append(expression)
        home = self.source.statement(expression)
        if at is self.match.also:
            first, last = self.source.file.start(self.stays), self.source.file.start(expression)
            if not reads_only(expression) or bound_between(expression, first, last, self.calls):
                raise Refusal(f"line {expression.lineno}: {text} may differ from its value on line {self.stays.lineno}")
        if home is self.statement and within(self.stays, expression):
            return _wrapped(text, expression)
        if isinstance(expression, ast.Name):
            holds = self._holds_again(expression) or (
                still_holds(expression, self.calls) and self._same_now(expression, at)
            )
        else:
            holds = still_holds(expression, self.calls)
        if holds:
            return _wrapped(text, expression)
        if expression not in self._names:
            name = role
            while name in self._taken:
                name += "_"
            self._taken.add(name)
            self._names[expression] = name
            self.hoisted.setdefault(home, []).append(f"{name} = {_wrapped(text, expression)}")
        return self._names[expression]

    def _text_of(self, expression: ast.expr) -> str:
        """Return ``expression`` as it is written, but with ``scores.dtype`` asked of the query."""
        text, gone = self.source.file.of(expression), self._no_longer_bound(expression)
        if not gone:
            return text
        if not only_forms(expression, gone):
            raise Refusal(f"line {expression.lineno} reads {min(gone)}, which would no longer exist")
        start, written = self.source.file.start(expression), text.encode()
        asked = shape_queries(expression, gone, self.match, self.calls)
        for old, new in sorted(asked, key=lambda each: self.source.file.start(each[0]), reverse=True):
            first, last = self.source.file.start(old) - start, self.source.file.end(old) - start
            written = written[:first] + new.encode() + written[last:]
        return written.decode()

    def _holds_again(self, name: ast.Name) -> bool:
        """Return whether only removed statements bind ``name`` anew: ``x`` in ``x = self.drop(x)``."""
        file = self.source.file
        here, there = file.start(name), file.start(self.stays)
        stored = [each for each in self.source.names(name.id) if not isinstance(each.ctx, ast.Load)]
        homes = {self.source.statement(each) for each in stored} - {self.statement}
        between = [home for home in homes if file.end(home) > here and file.start(home) < there]
        return bool(between) and all(home in self.parts for home in between)

    def _same_now(self, name: ast.Name, at: Node) -> bool:
        """Return whether ``name``, which the call ``at`` read, still holds the same tensor at the last call."""
        then, now = at.place_in(self.calls.frame), self.match.last.place_in(self.calls.frame)
        assert then is not None and now is not None
        old, new = then.names.get(name.id), now.names.get(name.id)
        return old is new or (old is not None and new is not None and old.content == new.content)


def _wrapped(text: str, expression: ast.expr) -> str:
    """Return ``text`` in brackets where a line break inside would otherwise end it."""
    return f"({text})" if "\n" in text and isinstance(expression, (ast.BinOp, ast.BoolOp, ast.Compare)) else text


def _plain(text: str) -> str:
    """Return ``1.0 / (f(x))`` and ``n ** 0.5 * (f(x))`` without the brackets."""
    head, bracket, rest = text.partition("1.0 / (" if text.startswith("1.0 / (") else " ** 0.5 * (")
    if not bracket or not rest.endswith(")"):
        return text
    try:
        inner = ast.parse(rest[:-1].strip(), mode="eval").body
    except SyntaxError:  # the brackets are not a pair
        return text
    atom = isinstance(inner, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant))
    return f"{head}{bracket[:-1]}{rest[:-1].strip()}" if atom and "\n" not in text else text


# A new call that gives two tensors: the one that stays, and another that the model reads as well.
#
# A pair's other tensor is made on the way to the output (attention's weights); a second result is what a later call
# makes of the output (the norm of a sum).


_SIMPLE = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)
_WITH_AUGMENTED = (*_SIMPLE, ast.AugAssign)
_UNDER = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.BoolOp, ast.NamedExpr)


class NoPair(Refusal):
    """The call cannot give two tensors; what a user is told is why it cannot give the output alone."""


@dataclass(frozen=True)
class Pair:
    """How the two results are called, and what reads the first of them."""

    output: str
    name: str
    target: ast.Name | None  # the name that is bound to the output alone already
    read: str  # what stands in the output's place, where there is no such name
    dtype: str  # the argument that says the dtype of the second; empty where it is the softmax's own


def pair_of(match: Match, calls: CallSites, parts: list[ast.stmt], spelled: set[str], taken: Set[str]) -> Pair | None:
    """Return the names of what ``match`` gives, where that is more than its output; else None.

    Args:
        parts: the statements that make the match's tensors.
        spelled: the names that the new call reads.
        taken: those that no new one may have.

    Raises:
        NoPair: the tensor beside the output has no name of its own, or the call cannot stand in an assignment.
    """
    if match.given is None:
        return None
    own, stays = calls.statement, calls.stays
    name = _name_of(match, calls, parts)
    cast = match.given.cast
    dtype = "" if cast is None else _dtype_of(calls.expression(cast), parts, spelled)
    if not isinstance(own, _SIMPLE) or not isinstance(stays, ast.expr):
        raise NoPair(f"line {own.lineno} is neither an assignment nor a return")
    target = own.targets[0] if isinstance(own, ast.Assign) and len(own.targets) == 1 else None
    if name in targets(own):
        raise NoPair(f"line {own.lineno} reassigns {name}")
    if isinstance(target, ast.Name) and own.value is stays and not match.suffix:
        return Pair(target.id, name, target, target.id, dtype)
    file = calls.source.file
    if file.text[file.line_starts[own.lineno] : file.start(own)].strip():
        raise NoPair(f"line {own.lineno} contains several statements")
    for part in walked(own):
        if not isinstance(part, ast.expr) or file.end(part) > file.start(stays):
            continue
        if not isinstance(getattr(part, "ctx", None), ast.Store) and not reads_only(part):
            raise NoPair(f"line {own.lineno} evaluates something else before the output")
    output = "attended"
    while output in file.identifiers | taken:
        output += "_"
    return Pair(output, name, None, f"{output}{match.suffix}", dtype)


def _name_of(match: Match, calls: CallSites, parts: list[ast.stmt]) -> str:
    """Return the name that holds the tensor when the output is made."""
    assert match.given is not None
    maker = match.given.value.producer
    assert maker is not None
    made = calls.expression(maker)
    parts = sorted(parts, key=calls.source.file.start)
    for place, part in enumerate(parts):
        if isinstance(part, ast.Assign) and part.value is made and len(part.targets) == 1:
            (target,) = part.targets
            if isinstance(target, ast.Name) and not any(target.id in targets(each) for each in parts[place + 1 :]):
                return target.id
    raise NoPair(f"the result of {maker.op} is not assigned to a variable")


def _dtype_of(cast: ast.expr | ast.stmt, parts: list[ast.stmt], spelled: set[str]) -> str:
    """Return the argument for the dtype that a cast says: an operand's, or that of the scores and the result."""
    asked = [part.value for part in walked(cast) if isinstance(part, ast.Attribute) and part.attr == "dtype"]
    if isinstance(cast, ast.Call) and isinstance(cast.func, ast.Attribute) and cast.func.attr == "type_as":
        asked += cast.args
    name = asked[0].id if len(asked) == 1 and isinstance(asked[0], ast.Name) else ""
    if name in spelled:
        return f"weights_dtype={name}.dtype"
    makers = [part for part in parts if name in targets(part) and part.lineno < cast.lineno]
    if not makers or any(_casts(part) for maker in makers for part in walked(maker)):
        raise NoPair(f"line {cast.lineno} casts to a dtype that no operand has")
    return 'weights_dtype="result"'


def _casts(part: ast.AST) -> bool:
    """Check that a piece of source may change a dtype."""
    return isinstance(part, ast.Attribute) and part.attr in {*CASTS, "dtype"}


@dataclass(frozen=True)
class Second:
    """Where the later call stands, what its result is called, and the assignment's target that becomes two."""

    expression: ast.expr
    name: str
    target: ast.Name


def second_of(match: Match, recording: Recording, calls: CallSites, *, conditional: bool) -> Second | None:
    """Return the later call of ``match``; None where there is none.

    ``conditional``: the match ran under a condition.

    Raises:
        Refusal: it is not certain that it is made of the same tensor whenever it runs.
    """
    node = match.also
    if node is None:
        return None
    source, own = calls.source, calls.statement
    expression = calls.expression(node)
    if conditional:
        raise Refusal(f"line {own.lineno} runs under a separate condition")
    if not isinstance(own, ast.Assign) or len(own.targets) != 1 or own.value is not calls.stays:
        raise Refusal(f"line {own.lineno} does not assign the sum to a variable")
    target = own.targets[0]
    if not isinstance(target, ast.Name) or not isinstance(expression, ast.Call) or node.grad != match.last.grad:
        raise Refusal(f"line {own.lineno} does not assign the sum to a variable")
    home, block = source.statement(expression), calls.block
    if home not in block or block.index(home) <= block.index(own) or not isinstance(home, _WITH_AUGMENTED):
        raise Refusal(f"line {expression.lineno} does not always run after line {own.lineno}")
    above: ast.AST = expression
    while above is not home:
        above = source.file.parents[above]
        if isinstance(above, _UNDER):
            raise Refusal(f"line {expression.lineno} contains a condition, a lambda or a comprehension")
    read = expression.args[0] if expression.args else None
    if not isinstance(read, ast.Name) or read.id != target.id:
        raise Refusal(f"line {expression.lineno} normalizes a tensor other than {target.id}")
    _check_between(match, recording, block[block.index(own) + 1 : block.index(home)], target.id)
    name = f"normed_{target.id}"
    while name in source.file.identifiers:
        name += "_"
    return Second(expression, name, target)


def _check_between(match: Match, recording: Recording, statements: list[ast.stmt], name: str) -> None:
    """Raise Refusal where a statement between the calls binds ``name``, or a call changes what the later reads."""
    for statement in statements:
        stored = [part for part in walked(statement) if isinstance(part, ast.Name) and part.id == name]
        if any(not isinstance(part.ctx, ast.Load) for part in stored):
            raise Refusal(f"line {statement.lineno} reassigns {name}")
        if not isinstance(statement, _WITH_AUGMENTED) and name in names_in(statement):
            raise Refusal(f"line {statement.lineno} uses {name} under a condition")
    assert match.also is not None
    storages = {value.storage for value in match.also.inputs}
    for node in recording.nodes[match.last.index + 1 : match.also.index]:
        if node.changed & storages:
            raise Refusal(f"{node.op} modifies in place a tensor that {match.also.op} reads")
