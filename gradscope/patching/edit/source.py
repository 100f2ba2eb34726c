"""The source text of a function as a tree, proof that it is what ran, how its file is written, and what replaces it."""

from __future__ import annotations

import ast
import io
import linecache
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, TypeVar

from gradscope.patching.edit.syntax import walked, within
from gradscope.recording.graph import Span

Definition = ast.FunctionDef | ast.AsyncFunctionDef
_Node = TypeVar("_Node", bound=ast.AST)


@dataclass(eq=False)
class SourceFile:
    """A module's text."""

    name: str  # as in code.co_filename
    text: bytes  # in UTF-8, whatever the file is in, for so ast counts columns; lines end in "\n"
    tree: ast.Module
    newline: str = "\n"  # the file's own
    functions: dict[CodeType, FunctionSource] = field(default_factory=dict)  # those that were asked for
    compiled: dict[tuple[ast.AST, bytes, frozenset[str]], CodeType] = field(default_factory=dict)  # from edited text
    methods: dict[tuple[Any, ...], FunctionType] = field(default_factory=dict)  # that modules with the same sites share
    others: list[list[str] | None] = field(default_factory=list)  # what imports.py found, where that was asked

    @classmethod
    def read(cls, name: str) -> SourceFile:
        """Read and parse a file. Raises Refusal where there is no source."""
        lines = linecache.getlines(name)
        try:
            text = decoded(Path(name).read_bytes())[0] if Path(name).is_file() else "".join(lines)
            if not text:
                raise Refusal(f"no source code: {name}")
            newline = "\r\n" if "\r\n" in text else "\n"
            text = text.replace("\r\n", "\n")
            return cls(name, text.encode(), ast.parse(text), newline)
        except (SyntaxError, ValueError, OSError) as error:
            raise Refusal(f"cannot read the source of {name}: {error}") from error

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The node above each node."""
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def outside_definitions(self) -> tuple[ast.AST, ...]:
        """The nodes that stand in no function and no class, those that define one among them."""
        found: list[ast.AST] = [self.tree]
        for node in found:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found += ast.iter_child_nodes(node)
        return tuple(found)

    @cached_property
    def defined(self) -> dict[str, list[Definition]]:
        """The functions of each name, methods and those inside others among them."""
        found: defaultdict[str, list[Definition]] = defaultdict(list)
        for node in ast.walk(self.tree):
            if isinstance(node, Definition):
                found[node.name].append(node)
        return dict(found)

    @cached_property
    def declared_global(self) -> frozenset[str]:
        """The names that some function of it declares ``global``."""
        return frozenset(name for node in ast.walk(self.tree) if isinstance(node, ast.Global) for name in node.names)

    @cached_property
    def line_starts(self) -> list[int]:
        """Return the offset in bytes of each line, from line 1."""
        starts = [0, 0]
        for line in self.text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    @cached_property
    def codes(self) -> list[CodeType]:
        """Return every code object of a fresh compilation."""
        return list(_nested(compile(self.tree, self.name, "exec", dont_inherit=True)))

    @cached_property
    def style(self) -> Style:
        """Return how it is written."""
        return Style.of(self.text.decode(), self.tree)

    @cached_property
    def bound(self) -> Counter[str]:
        """Return how often each name is bound anywhere in it."""
        found: Counter[str] = Counter()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                found[node.id] += 1
            elif isinstance(node, ast.arg):
                found[node.arg] += 1
            else:
                found.update(bound_without_a_name(node))
        return found

    @cached_property
    def identifiers(self) -> set[str]:
        """Return every name that occurs anywhere in it."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                found.update(node.names)
            else:
                found.update(bound_without_a_name(node))
        return found

    def start(self, node: ast.AST) -> int:
        """Return the offset of a node's first byte."""
        return self.line_starts[_int(node, "lineno")] + _int(node, "col_offset")

    def end(self, node: ast.AST) -> int:
        """Return the offset behind a node's last byte."""
        return self.line_starts[_int(node, "end_lineno")] + _int(node, "end_col_offset")

    def indent(self, statement: ast.stmt) -> str:
        """Return what stands before the line of a statement: spaces or tabs."""
        start = self.line_starts[statement.lineno]
        line = self.text[start : self.line_starts[statement.lineno + 1]].decode()
        return line[: len(line) - len(line.lstrip(" \t\f"))]

    def step(self, statement: ast.stmt) -> str:
        """Return by what a block inside is indented further, as the block around ``statement`` is."""
        above = self.parents[statement]
        while not isinstance(above, ast.stmt):
            if isinstance(above, ast.Module):
                return "    "
            above = self.parents[above]
        own, outer = self.indent(statement), self.indent(above)
        return own.removeprefix(outer) if own.startswith(outer) and len(own) > len(outer) else "    "

    def of(self, node: ast.AST) -> str:
        """A node's text."""
        return self.text[self.start(node) : self.end(node)].decode()


def decoded(source: bytes) -> tuple[str, str]:
    """Return the text of a Python file, and the encoding that it is in: by its mark, its comment or UTF-8.

    Raises:
        SyntaxError, UnicodeDecodeError: it is in none, or not in that.
    """
    encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
    return source.decode(encoding), encoding


@dataclass(eq=False)
class FunctionSource:
    """One function in its file."""

    file: SourceFile
    definition: Definition
    spans: dict[Span, list[ast.expr | ast.stmt]] = field(default_factory=dict)

    @classmethod
    def of(cls, code: CodeType, files: dict[str, SourceFile]) -> FunctionSource:
        """The source of ``code``; ``files`` are those read before.

        Raises:
            Refusal: there is none, or it is not what was compiled.
        """
        if code.co_name == "<lambda>":
            raise Refusal("a lambda cannot be edited")
        file = files.get(code.co_filename)
        if file is None:
            file = files[code.co_filename] = SourceFile.read(code.co_filename)
        if code not in file.functions:
            file.functions[code] = cls._found(code, file)
        return file.functions[code]

    @classmethod
    def _found(cls, code: CodeType, file: SourceFile) -> FunctionSource:
        twins = [
            twin
            for twin in file.codes
            if twin.co_qualname == code.co_qualname and twin.co_firstlineno == code.co_firstlineno
        ]
        if not any(_same(twin, code) for twin in twins):
            raise Refusal(f"the source of {code.co_qualname} changed after import, or was generated by other code")
        for node in ast.walk(file.tree):
            if isinstance(node, Definition) and node.name == code.co_name:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if first == code.co_firstlineno:
                    made = cls(file, node)
                    for part in ast.walk(node):
                        if isinstance(part, (ast.expr, ast.stmt)):
                            for span in _spans(part):
                                made.spans.setdefault(span, []).append(part)
                    return made
        raise Refusal(f"the definition of {code.co_qualname} was not found in {code.co_filename}")

    def at(self, span: Span | None) -> ast.expr | ast.stmt | None:
        """Return the expression, or augmented assignment, that a call at ``span`` evaluates.

        An expression statement has its expression's span; the expression is meant. What is iterated over in a
        comprehension stands at the comprehension; a tuple of names stands where it is unpacked into them.
        """
        return self._evaluated.get(span)

    @cached_property
    def _evaluated(self) -> dict[Span | None, ast.expr | ast.stmt]:
        made = (ast.BinOp, ast.UnaryOp, ast.Call, ast.Subscript, ast.Attribute, ast.Compare)
        others = (ast.AugAssign, ast.Assign, ast.ListComp, ast.GeneratorExp, ast.Tuple, ast.List)
        found: dict[Span | None, ast.expr | ast.stmt] = {}
        for kinds in (made, others):
            for span, nodes in self.spans.items():
                node = next((node for node in nodes if isinstance(node, kinds)), None)
                if node is not None:
                    found.setdefault(span, node)
        return found

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement around a node."""
        while not isinstance(node, ast.stmt):
            node = self.file.parents[node]
        return node

    def block(self, statement: ast.stmt) -> list[ast.stmt]:
        """Return the list of statements that ``statement`` is one of."""
        parent = self.file.parents[statement]
        for _, value in ast.iter_fields(parent):
            if isinstance(value, list) and statement in value:
                return value
        raise AssertionError(f"{ast.dump(statement)} has no block")

    def names(self, name: str) -> list[ast.Name]:
        """Return every occurrence of a local name."""
        return self._names.get(name, [])

    @cached_property
    def _names(self) -> dict[str, list[ast.Name]]:
        found: defaultdict[str, list[ast.Name]] = defaultdict(list)
        for node in walked(self.definition):
            if isinstance(node, ast.Name):
                found[node.id].append(node)
        return dict(found)

    @cached_property
    def bindings(self) -> list[ast.AST]:
        """Return every name, attribute and item that is assigned to or deleted."""
        return [
            node for node in walked(self.definition) if isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
        ]

    @cached_property
    def bound_otherwise(self) -> dict[str, list[ast.AST]]:
        """Return what binds a name without being one, by that name: an import, a definition, ``except``, ``case``."""
        found: defaultdict[str, list[ast.AST]] = defaultdict(list)
        for node in walked(self.definition):
            if node is not self.definition:
                for name in bound_without_a_name(node):
                    found[name].append(node)
        return dict(found)

    def assignments(self, name: ast.Name) -> list[ast.Assign]:
        """Return the assignments that may have bound ``name`` where it is read; none where something else may have.

        Of several, or where the name is an argument too, all must stand in one block, and it be read there: else
        another of them counts next time.
        """
        homes = [self.statement(each) for each in self.names(name.id) if isinstance(each.ctx, ast.Store)]
        found = [home for home in homes if isinstance(home, ast.Assign)]
        other = name.id in self.bound_otherwise or name.id in self.not_local
        if not found or len(found) != len(homes) or other or any(self.inside(each, _SCOPES) for each in found):
            return []
        if name.id not in self.arguments and len(found) == 1:
            return found
        block = self.block(found[0])
        apart = any(each not in block for each in found) or min(map(self.file.start, found)) > self.file.start(name)
        return [] if apart or not any(within(each, name) for each in block) else found

    def bound_on_all_ways(self, name: ast.Name) -> ast.Assign | None:
        """Return the last assignment before ``name`` is read, where every way to it passes that one; else None.

        Other branches may bind the name otherwise: ``if kind == "regression": loss = MSELoss() ... else: loss = ...``.
        """
        if name.id in self.bound_otherwise or name.id in self.not_local:
            return None
        homes = {self.statement(each) for each in self.names(name.id) if not isinstance(each.ctx, ast.Load)}
        reader: ast.AST = self.statement(name)
        if reader in homes or any(self.inside(each, _SCOPES) for each in (name, *homes)):
            return None
        while isinstance(reader, ast.stmt):
            for before in reversed([each for each in self.block(reader) if each.lineno < reader.lineno]):
                if any(within(before, home) for home in homes):
                    return before if isinstance(before, ast.Assign) else None
            above = self.file.parents.get(reader)
            reader = above if isinstance(above, (ast.If, ast.With)) else self.file.tree
        return None

    def value_of(self, name: ast.Name) -> ast.expr | None:
        """Return what ``name`` is bound to where it is read, by the only assignment that may have bound it."""
        homes = self.assignments(name)
        single = len(homes) == 1 and len(homes[0].targets) == 1 and isinstance(homes[0].targets[0], ast.Name)
        return homes[0].value if single else None

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The names of the function's own."""
        given = self.definition.args
        each = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
        return frozenset(argument.arg for argument in each)

    @cached_property
    def not_local(self) -> set[str]:
        """Return the names that are declared global or nonlocal."""
        return {
            name
            for part in walked(self.definition)
            if isinstance(part, (ast.Global, ast.Nonlocal))
            for name in part.names
        }

    @cached_property
    def nested(self) -> list[ast.AST]:
        """The functions, lambdas and classes in it."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
        return [part for part in walked(self.definition) if isinstance(part, kinds) and part is not self.definition]

    def inside(self, node: ast.AST, kinds: tuple[type[ast.AST], ...]) -> bool:
        """Return whether a node of ``kinds`` stands between ``node`` and the function."""
        while node is not self.definition:
            node = self.file.parents[node]
            if isinstance(node, kinds) and node is not self.definition:
                return True
        return False


def _spans(node: ast.expr | ast.stmt) -> Iterator[Span]:
    """Yield the node's span, and where it is another what the compiler gives it.

    A method of what ends on a later line than it begins is called from the method's name on.
    """
    assert node.end_lineno is not None and node.end_col_offset is not None
    yield Span(node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
    method = node.func if isinstance(node, ast.Call) else node
    if isinstance(method, ast.Attribute) and method.lineno != method.end_lineno:
        assert method.end_lineno is not None and method.end_col_offset is not None
        begin = method.end_col_offset - len(method.attr)
        yield Span(method.end_lineno, node.end_lineno, begin, node.end_col_offset)


_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def bound_without_a_name(node: ast.AST) -> list[str]:
    """Return the names that ``node`` binds and that no ``ast.Name`` in it holds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(each.asname or each.name).partition(".")[0] for each in node.names]
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        return [node.name] if node.name else []
    return [node.rest] if isinstance(node, ast.MatchMapping) and node.rest else []


def _int(node: ast.AST, name: str) -> int:
    value: int = getattr(node, name)
    return value


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _same(one: CodeType, other: CodeType) -> bool:
    """Return whether two code objects do the same, line for line."""
    plain = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    if any(getattr(one, name) != getattr(other, name) for name in plain):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    for left, right in zip(one.co_consts, other.co_consts, strict=True):
        if isinstance(left, CodeType) and isinstance(right, CodeType):
            if not _same(left, right):
                return False
        elif type(left) is not type(right) or repr(left) != repr(right):
            return False
    return list(one.co_positions()) == list(other.co_positions())


# How a file is written: the length of its lines, its quotes, the spaces around ``=``; for text that is added to it.


_NARROW, _WIDE = 79, 120
_LONG_TEXT = 40  # a line that holds such a string says nothing about the length that its author likes
_NO_CODE = frozenset({tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT})


@dataclass(frozen=True)
class Style:
    """A file's own; of a file that does not tell, what formatters write."""

    width: int = 88
    quote: str = '"'
    equals: str = "="  # between a keyword argument's name and its value

    @classmethod
    def of(cls, text: str, tree: ast.Module) -> Style:
        """The style of a module's ``text``, which ``tree`` is of."""
        try:
            tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
        except (tokenize.TokenError, SyntaxError):  # a form feed where it does not expect one
            return cls()
        return cls(_width(tokens), _quote(tokens), _equals(text, tree))

    def of_text(self, text: str) -> str:
        """Return a piece of code that was written with ``"`` and ``=`` in the file's style."""
        if self.equals != "=":
            text = re.sub(r"\b(\w+)=(?!=)", rf"\1{self.equals}", text)
        return text.replace('"', self.quote)


def _width(tokens: list[tokenize.TokenInfo]) -> int:
    """Return the length of the longest line of code, in reason."""
    ends: Counter[int] = Counter()
    skipped: set[int] = set()
    for token in tokens:
        if token.type == tokenize.STRING and (token.start[0] != token.end[0] or len(token.string) > _LONG_TEXT):
            skipped.update(range(token.start[0], token.end[0] + 1))
        elif token.type not in _NO_CODE:
            ends[token.end[0]] = max(ends[token.end[0]], token.end[1])
    longest = max((end for line, end in ends.items() if line not in skipped), default=0)
    return min(max(longest, _NARROW), _WIDE)


def _quote(tokens: list[tokenize.TokenInfo]) -> str:
    texts = [token.string.lstrip("rRbBuUfF") for token in tokens if token.type == tokenize.STRING]
    short = Counter(text[0] for text in texts if not text.startswith(('"""', "'''")))
    return "'" if short["'"] > short['"'] else '"'


def _equals(text: str, tree: ast.Module) -> str:
    lines = text.encode().splitlines()  # as ast counts them
    spaced: Counter[bool] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg is not None:
            rest = lines[node.lineno - 1][node.col_offset :].decode(errors="replace")
            spaced[rest.startswith(f"{node.arg} = ")] += 1
    return " = " if spaced[True] > spaced[False] else "="


# Bytes of a file that become others, the reason why none do, and what is asked before they run.


class Refusal(Exception):
    """Why a match is left alone, as the plan shows it."""


@dataclass(frozen=True)
class Replacement:
    """Bytes of a file that become others."""

    start: int
    end: int
    text: str
    tidies: bool = False  # removes a line that is empty or a comment: two edits may do the same


def edited(text: bytes, replacements: Iterable[Replacement]) -> bytes:
    """Return ``text`` with ``replacements`` made.

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


def moved_by(start: int, replacements: Iterable[Replacement]) -> list[Replacement]:
    """Return ``replacements`` for a text that begins at ``start``."""
    return [Replacement(each.start - start, each.end - start, each.text, each.tidies) for each in replacements]


@dataclass(frozen=True)
class SourceGuard:
    """What an expression was in the recorded run, and must be for the new code."""

    expression: ast.expr
    test: str  # source of the condition
