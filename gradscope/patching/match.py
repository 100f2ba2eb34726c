"""What a matcher finds: the calls that go, the one tensor that stays, and the call that makes it instead."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradscope.patching.record import Node, Value


@dataclass(frozen=True, eq=False)
class Of:
    """The text of an operand: a tensor that was there before."""

    value: Value
    role: str  # a name for it, where it needs one
    suffix: str = ""  # a method's call behind it: ".transpose(-2, -1)"


@dataclass(frozen=True, eq=False)
class Scalar:
    """The text of a number that a call was given, by its position among the tensors and numbers, or by name.

    ``otherwise`` is what stands there where the call leaves it out.
    """

    node: Node
    position: int
    name: str = ""
    otherwise: str = ""


@dataclass(frozen=True, eq=False)
class Setting:
    """The text of an attribute of the module that made a call, as in ``self.drop.p``; else of a scalar argument."""

    node: Node
    attribute: str
    scalar: Scalar


@dataclass(frozen=True, eq=False)
class Called:
    """The text of the module that made a call: ``self.head`` in ``self.head(x)``."""

    node: Node


Piece = str | Of | Scalar | Setting | Called


@dataclass(frozen=True, eq=False)
class Argument:
    """One argument of the new call; without a name it is positional."""

    name: str
    pieces: tuple[Piece, ...]


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

    @property
    def last(self) -> Node:
        """The call whose result stays."""
        assert self.output.producer is not None
        return self.output.producer

    @property
    def inner(self) -> list[Value]:
        """The tensors that would no longer be made."""
        return [value for node in self.nodes for value in node.outputs if value is not self.output]
