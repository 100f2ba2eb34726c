"""What a matcher finds: the calls that go, the one tensor that stays, and the call that makes it instead."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from gradscope.kernels import pays
from gradscope.recording.graph import Node, Value


@dataclass(frozen=True, eq=False)
class Of:
    """The text of an operand: a tensor that was there before."""

    value: Value
    role: str  # a name for it, where it needs one
    suffix: str = ""  # a method's call behind it: ".transpose(-2, -1)"
    bracketed: bool = False  # it stands beside an operator
    again: bool = False  # it is spelled a second time: evaluating it twice must do no harm


@dataclass(frozen=True, eq=False)
class Scalar:
    """The text of a number that a call was given, by its position among the tensors and numbers, or by name.

    ``otherwise`` is what stands there where the call leaves it out.
    """

    node: Node
    position: int
    name: str = ""
    otherwise: str = ""
    asked: bool = False  # another call was given the same number: it must be what it was, though it is read anew


@dataclass(frozen=True, eq=False)
class Setting:
    """The text of an attribute of the module that made a call, as in ``self.drop.p``; else of an argument."""

    node: Node
    attribute: str
    scalar: Scalar | Of


@dataclass(frozen=True, eq=False)
class Called:
    """The text of the module that made a call: ``self.head`` in ``self.head(x)``."""

    node: Node


@dataclass(frozen=True, eq=False)
class Layer:
    """The text of the module that made a call, which is handed on whole: it may hold modules, as a Sequential does.

    Unless ``certain``, the text may name something that only the run can tell: it is called there as it is.
    """

    node: Node
    certain: bool = True


@dataclass(frozen=True, eq=False)
class Given:
    """The text of a call's arguments, as they are written: ``x`` in ``self.head(x)``.

    Without a ``caller`` the call must be the operation's own, with no more than ``positional`` arguments by position
    and those of ``names`` by name; the first ``skipped`` are left out.
    """

    node: Node
    positional: int = 1
    names: frozenset[str] = frozenset()
    skipped: int = 0


@dataclass(frozen=True, eq=False)
class Size:
    """The text of one of the sizes that a view was given: the ``position``-th of ``count``, which was ``number``.

    Where the source leaves it to torch, that of ``rest``; the number itself would be wrong in a model of another size.
    """

    node: Node
    position: int
    count: int
    number: int
    rest: tuple[Piece, ...] = ()


@dataclass(frozen=True, eq=False)
class FromSizes:
    """Pieces of a number that may come from the last size, ``size``, of a tensor that is no longer made.

    Where it does, and from nothing else, ``otherwise`` says the same.
    """

    pieces: tuple[Piece, ...]
    size: int
    otherwise: str


Piece = str | Of | Scalar | Setting | Called | Layer | Given | Size | FromSizes


@dataclass(frozen=True, eq=False)
class Argument:
    """One argument of the new call; without a name it is positional."""

    name: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, eq=False)
class Like:
    """The shape of a tensor that is no longer made, by tensors that still are."""

    shape: tuple[int, ...]
    sizes: tuple[tuple[Value, int] | None, ...]  # of each dimension: a tensor that has it, and at which of its own
    dtype: Value  # a tensor of its dtype and device


@dataclass(frozen=True, eq=False)
class Beside:
    """A tensor on the way to the output that another function gives as well, where the source reads it later."""

    value: Value
    function: str  # of gradscope.recipes: it gives (output, value)
    arguments: tuple[Argument, ...] = ()  # more than the match has
    cast: Node | None = None  # the last on the way to it: the dtype is asked for


@dataclass(eq=False)
class Match:
    """One occurrence of a pattern in a recording."""

    recipe: str
    function: str  # of gradscope.recipes
    arguments: tuple[Argument, ...]
    nodes: frozenset[Node]
    output: Value
    optional: frozenset[Node] = frozenset()  # calls that only make what the pattern no longer needs: a mask's
    helpers: tuple[str, ...] = ()  # other functions of gradscope.recipes that the arguments call
    suffix: str = ""  # written behind the call: ".transpose(1, 2)"
    reasons: list[str] = field(default_factory=list)  # why it cannot be replaced; empty: it can
    idle: str = ""  # why it would be right and gain nothing, at this size
    fixed: tuple[Scalar, ...] = ()  # where these are not spelled as numbers, `otherwise` is the better way
    like: Like | None = None  # the shape of what is made on the way, for statements that ask for it
    lengths: tuple[tuple[Value, int], tuple[Value, int]] | None = None  # sizes that must be equal: tensor, dimension
    rows: tuple[Value, Value] | None = None  # the second must have the first's sizes but the last, or 1 in its place
    forms: tuple[tuple[Value, str], ...] = ()  # what is asked of a tensor's shape: ".dim() == 3"
    otherwise: Match | None = None  # what to do where the source does not allow this
    less: Match | None = None  # a part of it that is a pattern as well, where the source does not allow the whole
    beside: tuple[Beside, ...] = ()  # what can be given beside the output
    given: Beside | None = None  # which of them is; the function and the arguments are those for it
    also: Node | None = None  # a later call of the output: the new call gives its result too, before the output

    def giving(self) -> list[Match]:
        """The same match, giving each of what it can give beside the output."""
        return [
            dataclasses.replace(
                self, function=each.function, arguments=(*self.arguments, *each.arguments), beside=(), given=each
            )
            for each in self.beside
        ]

    @property
    def last(self) -> Node:
        """The call whose result stays."""
        assert self.output.producer is not None
        return self.output.producer

    @property
    def later(self) -> frozenset[Node]:
        """The call behind the output whose result is given too."""
        return frozenset() if self.also is None else frozenset({self.also})

    @property
    def inner(self) -> list[Value]:
        """The tensors that would no longer be made."""
        return [value for node in self.nodes for value in node.outputs if value is not self.output]


# Why a place is left alone although a recipe could take it: ``backend="auto"`` would run torch's own there.


def why_idle(recipe: str, on: Value, **amounts: int) -> str:
    """Say why the recipe gains nothing at these sizes on the CPU; empty where it may, and on other devices.

    Args:
        recipe: as kernels/pays.py names its rule.
        on: any tensor of the place.
        amounts: of the units of that rule.
    """
    if on.device.type != "cpu":
        return ""
    return pays.against(recipe, **amounts) or ""
