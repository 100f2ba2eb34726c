"""From a match to an edit of the source: which statements go, what is written instead, and whether that is allowed."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from gradscope.patching.match import Called, Match, Of, Piece, Setting
from gradscope.patching.record import Frame, Node, Recording
from gradscope.patching.refusal import Refusal
from gradscope.patching.source import FunctionSource
from gradscope.patching.texts import Texts

# Around these, what a recorded run did says too little about the next.
_HIDES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Await, ast.Yield)
_BRANCHES = (ast.IfExp, ast.BoolOp)

_WIDTH = 100


@dataclass(frozen=True)
class Replacement:
    """Bytes of a file that become others."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Edit:
    """What one match changes in one function."""

    source: FunctionSource
    recipe: str
    line: int  # of the expression that stays
    replacements: tuple[Replacement, ...]
    imports: tuple[tuple[str, str], ...]  # (function of gradscope.recipes, the name it has in this file)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal where the same is done to the same text."""
        return (self.source.file.name, self.recipe, self.replacements, self.imports)


def edit_of(match: Match, recording: Recording, frame: Frame, source: FunctionSource) -> Edit:
    """The edit of ``frame``'s function that replaces ``match``.

    Raises:
        Refusal: the source does more than the match, or not only when the match does.
    """
    if match.optional:
        wider = dataclasses.replace(match, nodes=match.nodes | match.optional, optional=frozenset())
        try:
            return _Region(wider, recording, frame, source).edit()
        except Refusal:
            pass
    return _Region(match, recording, frame, source).edit()


class _Region:
    def __init__(self, match: Match, recording: Recording, frame: Frame, source: FunctionSource) -> None:
        self.match, self.frame, self.source = match, frame, source
        self.nodes = recording.nodes
        self.executed = recording.executed_in(frame)
        self.texts = Texts(source, frame, self.executed, match.last)
        self.stays = self.texts.expression(match.last)
        self.statement = source.statement(self.stays)
        self.conditions: list[tuple[ast.expr, bool]] = []
        self.taken_statements: list[ast.stmt] = []  # inside conditions
        self.hoisted: dict[ast.stmt, list[str]] = {}
        self.names: dict[ast.expr, str] = {}
        self.taken = set(source.file.identifiers)

    def edit(self) -> Edit:
        if match_reasons := self.match.reasons:
            raise Refusal("; ".join(match_reasons))
        if self.frame.suspends:
            raise Refusal("a generator or coroutine is not edited")
        self._check_dynamic()
        gone = self._statements()
        self._check_names(gone)
        call, imports = self._call()
        replacements = [self._removal(statement) for statement in gone]
        replacements.append(self._kept(call))
        replacements.sort(key=lambda part: part.start)
        if self.conditions:
            replacements = [self._guarded(gone, replacements)]
        return Edit(self.source, self.match.recipe, self.stays.lineno, tuple(replacements), imports)

    def _guarded(self, gone: list[ast.stmt], replacements: list[Replacement]) -> Replacement:
        """The new statements where the conditions are as they were; else the old ones."""
        file = self.source.file
        for statement in [*gone, self.statement]:
            for part in ast.walk(statement):
                if isinstance(part, (ast.Constant, ast.JoinedStr)) and part.lineno != part.end_lineno:
                    raise Refusal(f"line {part.lineno}: a text of several lines cannot be indented")
        start = file.line_starts[gone[0].lineno]
        end = file.line_starts[(self.statement.end_lineno or 0) + 1]
        if file.text[file.end(self.statement) : end].strip().startswith(b";"):
            raise Refusal(f"line {self.statement.lineno} holds several statements")
        old = file.text[start:end]
        moved = [Replacement(part.start - start, part.end - start, part.text) for part in replacements]
        indent = " " * self.statement.col_offset
        tests = dict.fromkeys(_spelled_condition(file.of(test), test, outcome) for test, outcome in self.conditions)
        new = edited(old, moved)
        lines = [f"{indent}if {' and '.join(tests)}:", *_indented(new), f"{indent}else:", *_indented(old)]
        return Replacement(start, end, "\n".join(lines) + "\n")

    def _check_dynamic(self) -> None:
        """What the pattern makes on the way is seen by nobody else."""
        known = {
            value.content
            for node in self.match.nodes
            for value in node.inputs
            if value.producer not in self.match.nodes
        }
        known.add(self.match.output.content)
        for value in self.match.inner:
            others = [user for user in value.users if user not in self.match.nodes]
            if others:
                raise Refusal(f"the result of {_maker(value.producer)} is also read by {others[0].op}")
            if value.alive and value.content not in known:
                raise Refusal(f"the result of {_maker(value.producer)} is kept after the run: it is returned or stored")
        self._check_changes()

    def _check_changes(self) -> None:
        """What the pattern reads stays as it is until the result is made, and the pattern changes only its own."""
        inner = {*self.match.inner, self.match.output}
        outside = {value.storage for node in self.match.nodes for value in node.inputs if value not in inner}
        changing = [node for node in self.nodes[: self.match.last.index + 1] if node.changed]
        for node in self.match.nodes:
            if node.changed & outside:
                raise Refusal(f"{node.op} changes a tensor in place that was there before")
            for value in node.inputs:
                for other in changing:
                    late = other.index > node.index and value.storage in other.changed
                    if late and other not in self.match.nodes:
                        raise Refusal(f"{other.op} changes in place what {node.op} read")

    def _statements(self) -> list[ast.stmt]:
        """The statements before the last, of its own block, that only serve the match."""
        own = {self.source.statement(self.texts.expression(node)) for node in self.match.nodes}
        own.discard(self.statement)
        block = self.source.block(self.statement)
        gone: list[ast.stmt] = []
        for statement in sorted(own, key=self.source.file.start):
            self._check_plain(statement)
            top = self._top(statement, block)
            if block.index(top) > block.index(self.statement):
                raise Refusal(f"line {top.lineno} stands behind the result: the pattern spans two rounds of a loop")
            if top not in gone:
                gone.append(top)
                if isinstance(top, ast.If):
                    self._take_branch(top, own)
        self._check_plain(self.stays)
        gone += self._between(gone, block)
        for statement in gone:
            for part in self._simple(statement):
                self._check_only_serves(part)
        return sorted(gone, key=block.index)

    def _top(self, statement: ast.stmt, block: list[ast.stmt]) -> ast.stmt:
        """The statement of ``block`` that is or holds ``statement``, over conditions only."""
        top: ast.AST = statement
        while top not in block:
            top = self.source.file.parents[top]
            if not isinstance(top, ast.If):
                raise Refusal(f"line {statement.lineno} runs in a loop, a with or a try of its own")
        assert isinstance(top, ast.stmt)
        return top

    def _take_branch(self, branch: ast.If, own: set[ast.stmt]) -> None:
        """The side of a condition that ran, which must hold nothing but the pattern."""
        inside = [bool(own & set(_statements_in(side))) for side in (branch.body, branch.orelse)]
        if all(inside):
            raise Refusal(f"line {branch.lineno}: both sides of a condition ran")
        self._assume(branch.test, inside[0])
        for statement in branch.body if inside[0] else branch.orelse:
            if isinstance(statement, ast.If):
                if own & set(_statements_in([statement])):
                    self._take_branch(statement, own)
                else:
                    self._skip_branch(statement)
            elif statement not in own:
                if not self._hands_on(statement):
                    raise Refusal(f"line {statement.lineno} does something else under the same condition")
                self.taken_statements.append(statement)
            else:
                self.taken_statements.append(statement)

    def _skip_branch(self, branch: ast.If) -> None:
        """A condition whose side would change an inner tensor, and that did not run."""
        if branch.orelse:
            raise Refusal(f"line {branch.lineno}: which side of the condition ran is not known")
        lines = range(branch.body[0].lineno, (branch.end_lineno or 0) + 1)
        for node in self.executed:
            place = node.place_in(self.frame)
            if place is not None and place.span is not None and place.span.line in lines:
                raise Refusal(f"line {branch.lineno}: a condition held in the pattern")
        if not any(_calls_something(statement) for statement in branch.body):
            raise Refusal(f"line {branch.lineno}: whether the condition held is not known")
        self._assume(branch.test, False)

    def _assume(self, test: ast.expr, outcome: bool) -> None:
        """The new code is for this outcome; else the old one runs."""
        if not self.texts.holds(test):
            raise Refusal(f"line {test.lineno}: the condition cannot be asked earlier")
        self.conditions.append((test, outcome))

    def _simple(self, statement: ast.stmt) -> list[ast.stmt]:
        if not isinstance(statement, ast.If):
            return [statement]
        return [part for part in self.taken_statements if part in set(_statements_in([statement]))]

    def _check_plain(self, node: ast.AST) -> None:
        for part in ast.walk(node):
            if isinstance(part, (*_HIDES, *_BRANCHES)):
                made = [other for other in self.match.nodes if _within(part, self.texts.expression(other))]
                if made or isinstance(part, _HIDES):
                    raise Refusal(f"line {getattr(part, 'lineno', 0)} holds a condition, a lambda or a comprehension")
        if self.source.inside(self.stays, _HIDES):
            raise Refusal(f"line {self.stays.lineno} stands in a lambda or a comprehension")
        above: ast.AST = self.stays
        while not isinstance(above, ast.stmt):
            above = self.source.file.parents[above]
            if isinstance(above, _BRANCHES):
                raise Refusal(f"line {self.stays.lineno} runs under a condition of its own")

    def _between(self, gone: list[ast.stmt], block: list[ast.stmt]) -> list[ast.stmt]:
        """Statements between that touch inner tensors: handed on unchanged, or under a condition that did not hold."""
        if not gone:
            return []
        targets = {name for statement in gone for part in self._simple(statement) for name in self._bound(part)}
        first, last = min(map(block.index, gone)), block.index(self.statement)
        found = []
        for statement in block[first:last]:
            used = {part.id for part in ast.walk(statement) if isinstance(part, ast.Name)}
            if statement in gone or not targets & used:
                continue
            if isinstance(statement, ast.If):
                self._skip_branch(statement)
            elif not self._hands_on(statement):
                names = ", ".join(sorted(targets & used))
                raise Refusal(f"line {statement.lineno} uses {names} on another path")
            found.append(statement)
        return found

    def _hands_on(self, statement: ast.stmt) -> bool:
        """Whether it is ``x = self.drop(x)`` where drop is the identity."""
        call = statement.value if isinstance(statement, ast.Assign) else None
        module = self.texts.called_module(call) if isinstance(call, ast.Call) else None
        if type(module) is not nn.Identity or _hooked(module):
            return False
        assert isinstance(call, ast.Call)
        return len(call.args) == 1 and isinstance(call.args[0], ast.Name) and _targets(statement) == {call.args[0].id}

    def _bound(self, statement: ast.stmt) -> set[str]:
        """The names whose tensors a statement makes or, in place, changes."""
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            function = statement.value.func
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                return {function.value.id}
        return _targets(statement)

    def _check_only_serves(self, statement: ast.stmt) -> None:
        """Nothing but inner tensors comes out of a statement that goes."""
        if not self._bound(statement):
            raise Refusal(f"line {statement.lineno} assigns to more than a name")
        for node in self.executed:
            place = node.place_in(self.frame)
            found = self.source.at(place.span) if place is not None else None
            if found is None or self.source.statement(found) is not statement or node in self.match.nodes:
                continue
            if node.changed or not node.outputs:
                raise Refusal(f"line {statement.lineno} also calls {node.op}")
            self._check_feeds(node, statement)

    def _check_feeds(self, node: Node, statement: ast.stmt) -> None:
        """A call beside the pattern, in a statement that goes, may only make what the pattern reads."""
        for value in node.outputs:
            for user in value.users:
                place = user.place_in(self.frame)
                found = self.source.at(place.span) if place is not None else None
                if user not in self.match.nodes and (found is None or self.source.statement(found) is not statement):
                    raise Refusal(f"line {statement.lineno} also makes what {user.op} reads")

    def _check_names(self, gone: list[ast.stmt]) -> None:
        """Names that are no longer bound are not read any more."""
        file = self.source.file
        begin = min((file.start(statement) for statement in gone), default=file.start(self.statement))
        rebound = _targets(self.statement)
        parts = [part for statement in gone for part in self._simple(statement)]
        for name in sorted({name for part in parts for name in self._bound(part)}):
            if any(part.lineno for part, _ in self.conditions for used in ast.walk(part) if _is_name(used, name)):
                raise Refusal(f"a condition asks for {name}, which is not made any more")
            for other in self.source.names(name):
                home = self.source.statement(other)
                if any(_within(statement, other) for statement in gone) or _within(self.stays, other):
                    continue
                before = file.start(other) < begin
                looping = self.source.inside(self.stays, (ast.For, ast.While, ast.AsyncFor))
                if before and not looping:
                    continue
                if before and isinstance(other.ctx, ast.Load) and not self._bound_before(other, name):
                    raise Refusal(f"{name} is read again in the next round of the loop")
                if before:
                    continue
                if home is self.statement and isinstance(other.ctx, ast.Store):
                    continue
                if name in rebound and not (home is self.statement and isinstance(other.ctx, ast.Load)):
                    continue
                if isinstance(other.ctx, ast.Store) and not isinstance(home, ast.AugAssign):
                    continue
                if self._bound_between(other, name):
                    continue
                raise Refusal(f"{name} is read again on line {other.lineno}")
            self._check_nested(name)

    def _bound_before(self, read: ast.Name, name: str) -> bool:
        """Whether an assignment in the same block stands between the loop's start and ``read``."""
        home = self.source.statement(read)
        block = self.source.block(home)
        return any(name in _targets(statement) for statement in block[: block.index(home)])

    def _bound_between(self, read: ast.Name, name: str) -> bool:
        """Whether the name is bound anew, for certain, between the result and ``read``."""
        home: ast.AST = self.source.statement(read)
        while home is not self.source.definition:
            if isinstance(home, ast.stmt):
                block = self.source.block(home)
                for statement in block[: block.index(home)]:
                    if self.source.file.start(statement) > self.source.file.start(self.statement) and (
                        name in _targets(statement) and not isinstance(statement, ast.AugAssign)
                    ):
                        return True
            home = self.source.file.parents[home]
        return False

    def _check_nested(self, name: str) -> None:
        for part in ast.walk(self.source.definition):
            if isinstance(part, (ast.Global, ast.Nonlocal)) and name in part.names:
                raise Refusal(f"{name} is not a local name")
            nested = isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef))
            nested = nested and part is not self.source.definition
            if nested and any(_is_name(inner, name) for inner in ast.walk(part)):
                raise Refusal(f"{name} is also a name inside a nested function")
            if isinstance(part, ast.Name) and part.id in {"locals", "eval", "exec", "vars"}:
                raise Refusal(f"{part.id}() may read any name")

    def _call(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        imports = tuple((name, self._unused(name)) for name in (self.match.function, *self.match.helpers))
        called = dict(imports)
        arguments = []
        for argument in self.match.arguments:
            text = "".join(self._piece(piece, called) for piece in argument.pieces)
            text = text.replace(" if True else 0.0", "")
            arguments.append(
                f"**{text}" if argument.name == "**" else f"{argument.name}={text}" if argument.name else text
            )
        head = f"{called[self.match.function]}("
        text = f"{head}{', '.join(arguments)}){self.match.suffix}"
        indent = self.stays.col_offset
        if indent + len(text) > _WIDTH:
            inner = " " * (self.statement.col_offset + 4)
            lines = "".join(f"{inner}{argument},\n" for argument in arguments)
            text = f"{head}\n{lines}{' ' * self.statement.col_offset}){self.match.suffix}"
        return text, imports

    def _unused(self, name: str) -> str:
        """The recipe's own name, or a longer one where the file uses that already."""
        return name if name not in self.source.file.identifiers else f"gradscope_{name}"

    def _piece(self, piece: Piece, called: dict[str, str]) -> str:
        if isinstance(piece, str):
            return called.get(piece, piece)
        if isinstance(piece, Of):
            expression, at = self.texts.operand(piece.value, self.match.nodes)
            text = self._spelled(expression, piece.role, at)
            plain = text.isidentifier() or isinstance(expression, (ast.Name, ast.Call, ast.Attribute, ast.Subscript))
            return f"{text if plain or not piece.suffix else f'({text})'}{piece.suffix}"
        if isinstance(piece, (Setting, Called)):
            module = self.texts.module(piece.node)
            if module is not None:
                call = self.texts.expression(piece.node)
                if isinstance(call, ast.Call) and _hooked(self.texts.called_module(call)):
                    raise Refusal(f"{self.source.file.of(module)} has hooks, which would no longer be called")
                attribute = f".{piece.attribute}" if isinstance(piece, Setting) else ""
                return f"{self.source.file.of(module)}{attribute}"
            if isinstance(piece, Called):
                raise Refusal(f"{piece.node.op} is not called by a module")
            piece = piece.scalar
        found = self.texts.scalar(piece)
        return found if isinstance(found, str) else self._spelled(found, piece.name or "number", piece.node)

    def _spelled(self, expression: ast.expr, role: str, at: Node) -> str:
        """The expression's text, or a new name for it where it must be evaluated earlier."""
        text = self.source.file.of(expression)
        home = self.source.statement(expression)
        if home is self.statement and _within(self.stays, expression):
            return _wrapped(text, expression)
        if self.texts.holds(expression) and (not isinstance(expression, ast.Name) or self._same_now(expression, at)):
            return _wrapped(text, expression)
        if expression not in self.names:
            name = role
            while name in self.taken:
                name += "_"
            self.taken.add(name)
            self.names[expression] = name
            self.hoisted.setdefault(home, []).append(f"{name} = {text}")
        return self.names[expression]

    def _same_now(self, name: ast.Name, at: Node) -> bool:
        """Whether a name that the call ``at`` read still holds the same tensor when the last call is made."""
        then, now = at.place_in(self.frame), self.match.last.place_in(self.frame)
        assert then is not None and now is not None
        old, new = then.names.get(name.id), now.names.get(name.id)
        return old is new or (old is not None and new is not None and old.content == new.content)

    def _kept(self, call: str) -> Replacement:
        file = self.source.file
        hoisted = self.hoisted.pop(self.statement, [])
        if hoisted:
            raise Refusal(f"line {self.statement.lineno} evaluates an operand that cannot be moved")
        if isinstance(self.stays, ast.AugAssign):
            call = f"{file.of(self.stays.target)} = {call}"
        return Replacement(file.start(self.stays), file.end(self.stays), call)

    def _removal(self, statement: ast.stmt) -> Replacement:
        file = self.source.file
        start, end = file.start(statement), file.end(statement)
        inside = [part for part in self.hoisted if part in set(_statements_in([statement]))]
        lines = [line for part in inside for line in self.hoisted.pop(part)]
        if lines:
            return Replacement(start, end, ("\n" + " " * statement.col_offset).join(lines))
        line_start, line_end = file.line_starts[statement.lineno], file.line_starts[(statement.end_lineno or 0) + 1]
        if file.text[line_start:start].strip():
            raise Refusal(f"line {statement.lineno} holds several statements")
        rest = file.text[end:line_end].strip()
        if rest and not rest.startswith(b"#"):
            raise Refusal(f"line {statement.lineno} holds several statements")
        return Replacement(line_start, line_end, "")


def edited(text: bytes, replacements: Iterable[Replacement]) -> bytes:
    """``text`` with its replacements made.

    Raises:
        Refusal: two of them overlap.
    """
    end = len(text) + 1
    for part in sorted(set(replacements), key=lambda part: (part.start, part.end), reverse=True):
        if part.end > end:
            raise Refusal("two patterns overlap in the source")
        text = text[: part.start] + part.text.encode() + text[part.end :]
        end = part.start
    return text


def _indented(text: bytes) -> list[str]:
    return [f"    {line}" if line.strip() else line for line in text.decode().rstrip("\n").split("\n")]


_OPPOSITE = {ast.Is: "is not", ast.IsNot: "is", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in"}


def _spelled_condition(text: str, test: ast.expr, outcome: bool) -> str:
    """The condition, or its opposite, to stand beside others in an ``and``."""
    simple = isinstance(test, (ast.Name, ast.Attribute, ast.Compare, ast.Call, ast.UnaryOp, ast.Subscript))
    if outcome:
        return text if simple else f"({text})"
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return text.removeprefix("not").strip()
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in _OPPOSITE:
        left, right = ast.unparse(test.left), ast.unparse(test.comparators[0])
        return f"{left} {_OPPOSITE[type(test.ops[0])]} {right}"
    return f"not {text}" if isinstance(test, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"not ({text})"


def _statements_in(statements: list[ast.stmt]) -> list[ast.stmt]:
    return [part for statement in statements for part in ast.walk(statement) if isinstance(part, ast.stmt)]


def _calls_something(statement: ast.stmt) -> bool:
    """Whether running it would have been recorded, as far as the text tells."""
    return any(isinstance(part, (ast.Call, ast.BinOp, ast.AugAssign)) for part in ast.walk(statement))


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _within(outer: ast.AST, inner: ast.AST) -> bool:
    return any(part is inner for part in ast.walk(outer))


def _targets(statement: ast.AST) -> set[str]:
    """The names that an assignment binds; none where it binds anything else."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, (ast.AugAssign, ast.AnnAssign)):
        targets = [statement.target]
    else:
        return set()
    found: set[str] = set()
    for target in targets:
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        if not all(isinstance(part, ast.Name) for part in parts):
            return set()
        found |= {part.id for part in parts if isinstance(part, ast.Name)}
    return found


def _hooked(module: object) -> bool:
    """Whether somebody watches the calls of a module."""
    return isinstance(module, nn.Module) and bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _wrapped(text: str, expression: ast.expr) -> str:
    """In brackets where a line break inside would otherwise end it; a call's arguments need none otherwise."""
    return f"({text})" if "\n" in text and isinstance(expression, (ast.BinOp, ast.BoolOp, ast.Compare)) else text


def _maker(node: Node | None) -> str:
    return "an input" if node is None else node.op
