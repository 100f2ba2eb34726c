"""What a replacement is expected to save: the calls of its match and the recipe's call, each alone on made-up operands.

An estimate: alone, both find a warmer cache than in the step, and what lies around them does not count. The whole step
is measured by :mod:`gradscope.patching.verify`, and that measurement decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradscope import recipes
from gradscope.patching.gains import compare_work
from gradscope.patching.graph import remade
from gradscope.patching.match import Argument, Called, FromSizes, Given, Layer, Match, Of, Piece, Scalar, Setting, Size
from gradscope.patching.recording import Node, Value
from gradscope.patching.sites import Site

_ROUNDS = 3

# What these save is saved by the loss that reads their result: it is run with them.
_LAZY = frozenset({"lazy_linear"})
_LOSSES = frozenset({"cross_entropy", "nll_loss"})


@dataclass(frozen=True)
class Saving:
    """An estimate for one call of a site's module; negative is a loss."""

    ns: int | None  # forward and backward; None: it could not be run alone
    bytes: int  # at the peak; where it could not be run alone, what the match keeps for backward


def predict(sites: Iterable[Site]) -> dict[Site, Saving]:
    """The expected saving of each supported site; the same work on the same shapes is run once."""
    found: dict[Site, Saving] = {}
    known: dict[object, Saving] = {}
    for site in sites:
        if not site.supported:
            continue
        match = site.matches[0]
        key = _work(match)
        if key not in known:
            known[key] = _saving(match)
        rounds = _rounds(site)
        one = known[key]
        found[site] = Saving(None if one.ns is None else round(one.ns * rounds), round(one.bytes * rounds))
    return found


def _work(match: Match) -> object:
    """Equal for the same calls on the same shapes."""
    calls = tuple(
        (node.op, repr(node.kwargs.keys()), tuple((value.shape, value.dtype) for value in node.inputs))
        for node in _ordered(match)
    )
    return match.recipe, match.function, calls


def _rounds(site: Site) -> float:
    """How often the site runs in one call of its module."""
    calls = {
        place.frame.index for match in site.matches for place in match.last.places if place.frame.owner is site.module
    }
    return len(site.matches) / max(len(calls), 1)


def _saving(match: Match) -> Saving:
    try:
        with torch.random.fork_rng(_devices()), torch.enable_grad():
            replay = _Replay(match)
            gain = compare_work(replay.original, replay.recipe, replay.switch, match.output.device, _ROUNDS)
    except Exception:  # what a matcher, the user's operands or the device may raise has no end
        return Saving(None, kept_bytes(match))
    return Saving(gain.saved_ns, gain.saved_bytes)


def kept_bytes(match: Match) -> int:
    """Memory of the tensors that would no longer be made and that backward may need, each storage once."""
    sizes: dict[int, int] = {}
    made = {value for node in match.nodes for value in node.outputs}
    outside = {value.storage for node in match.nodes for value in node.inputs if value not in made}
    for value in match.inner:
        if value.requires_grad and value.storage not in outside:
            size = math.prod(value.shape) * value.dtype.itemsize
            sizes[value.storage] = max(sizes.get(value.storage, 0), size)
    return sum(sizes.values())


class _Replay:
    """Both ways to make one match's output, forward and backward."""

    def __init__(self, match: Match) -> None:
        self.match, self.nodes = match, _ordered(match)
        self.behind = _readers(match.output) if match.function in _LAZY else []
        self.also = [] if match.also is None else [match.also]
        output = self.behind[-1].output if self.behind else match.output
        self.outputs = [*(node.output for node in self.also), output]
        every = [*self.nodes, *self.also, *self.behind]
        made = {value for node in every for value in node.outputs}
        read = [value for node in every for value in node.inputs]
        read += [value for argument in match.arguments for piece in argument.pieces for value in _values(piece)]
        with torch.no_grad():
            self.given = {value: _operand(value) for value in dict.fromkeys(read) if value not in made}
        self.modules: list[nn.Module] = []
        self._check()

    def switch(self, new: bool) -> None:
        """Both share nothing that would have to be changed."""

    def original(self) -> None:
        self._backward(self._replayed())

    def recipe(self) -> None:
        self._backward(self._called())

    def _check(self) -> None:
        """The two make what was recorded."""
        for outputs in (self._replayed(), self._called()):
            for made, output in zip(outputs, self.outputs, strict=True):
                if tuple(made.shape) != output.shape or made.dtype != output.dtype:
                    raise ValueError("another output than the recorded one")

    def _backward(self, outputs: list[Tensor]) -> None:
        leaves = [tensor for tensor in self.given.values() if tensor.requires_grad]
        leaves += [tensor for module in self.modules for tensor in module.parameters() if tensor.requires_grad]
        outputs = [output for output in outputs if output.requires_grad]
        if outputs and leaves:
            torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs], allow_unused=True)

    def _replayed(self) -> list[Tensor]:
        return self._run([*self.nodes, *self.also, *self.behind], dict(self.given))

    def _run(self, nodes: list[Node], held: dict[Value, Tensor]) -> list[Tensor]:
        for node in nodes:
            args, kwargs = _filled(node.args, held), _filled(node.kwargs, held)
            with torch.set_grad_enabled(node.grad):
                result = node.function(*args, **kwargs)
            made = [args[0]] if node.op == "setitem" else _tensors(result)
            held |= dict(zip(node.outputs, made, strict=True))
        return [held[output] for output in self.outputs]

    def _called(self) -> list[Tensor]:
        self.modules.clear()
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in self.match.arguments:
            values = self._argument(argument)
            if argument.name == "**":
                kwargs |= values[0]
            elif argument.name:
                kwargs[argument.name] = values[0]
            else:
                args += values
        result = getattr(recipes, self.match.function)(*args, **kwargs)
        made = eval(f"result{self.match.suffix}", {"result": result})  # noqa: S307 (a matcher's own text)
        values = [*(node.output for node in self.also), self.match.output]
        results = zip(values, made if self.also else [made], strict=True)
        return self._run(self.behind, {**self.given, **dict(results)})

    def _argument(self, argument: Argument) -> list[Any]:
        """Its value; more than one where it stands for the arguments of a call."""
        names: dict[str, Any] = {name: getattr(recipes, name) for name in (self.match.function, *self.match.helpers)}
        text = "".join(self._text(piece, names) for piece in argument.pieces)
        values: list[Any] = eval(f"[{text}]", names)  # noqa: S307 (a matcher's own text)
        return values

    def _text(self, piece: Piece, names: dict[str, Any]) -> str:
        """The piece's text, with a name of its own for each value, which goes into ``names``."""
        if isinstance(piece, (str, Size)):
            return piece if isinstance(piece, str) else str(piece.number)
        if isinstance(piece, FromSizes):
            return "".join(self._text(part, names) for part in piece.pieces)
        name = f"_{len(names)}"
        if isinstance(piece, Of):
            names[name] = self.given[piece.value]
            return f"{name}{piece.suffix}"
        if isinstance(piece, (Called, Layer)):
            names[name] = piece.node.caller
            assert piece.node.caller is not None
            self.modules.append(piece.node.caller)
            return name
        if isinstance(piece, Given):
            wanted = piece.node.args[piece.skipped : piece.skipped + piece.positional]
            names[name] = _filled(wanted, self.given)
            return f"*{name}"
        if isinstance(piece, Setting) and hasattr(piece.node.caller, piece.attribute):
            names[name] = getattr(piece.node.caller, piece.attribute)
            return name
        if isinstance(piece, Setting):
            return self._text(piece.scalar, names)
        scalar = piece
        found = _number(scalar)
        weight = scalar.node.args[scalar.position : scalar.position + 1]
        if found is None and weight and isinstance(weight[0], Value) and weight[0] in self.given:
            found = self.given[weight[0]]
        if found is None:
            return scalar.otherwise
        names[name] = found
        return name


def _values(piece: Piece) -> list[Value]:
    """The tensors that a piece is the text of."""
    if isinstance(piece, Of):
        return [piece.value]
    return _values(piece.scalar) if isinstance(piece, Setting) else []


def _number(scalar: Scalar) -> Any:
    node = scalar.node
    if scalar.name and scalar.name in node.kwargs:
        return node.kwargs[scalar.name]
    found = node.args[scalar.position] if scalar.position < len(node.args) else None
    return None if isinstance(found, Value) else found


def _operand(value: Value) -> Tensor:
    """A tensor like the recorded one, a leaf; the same where its content matters: a mask's, a number's."""
    tensor = remade(value) if not value.requires_grad or value.alive else None
    if tensor is None:
        tensor = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        if value.strides is not None:
            tensor = torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=value.device)
        tensor = tensor.normal_() if value.dtype.is_floating_point else tensor.zero_()
    return tensor.detach().requires_grad_(value.requires_grad)


def _filled(argument: Any, held: dict[Value, Tensor]) -> Any:
    """A recorded argument with tensors in the places of values."""
    if isinstance(argument, Value):
        return held[argument]
    if isinstance(argument, (tuple, list)):
        return type(argument)(_filled(part, held) for part in argument)
    if isinstance(argument, dict):
        return {name: _filled(part, held) for name, part in argument.items()}
    return argument


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in _tensors(part)] if isinstance(result, (tuple, list)) else []


def _readers(value: Value) -> list[Node]:
    """The calls from ``value`` to the losses that read it, in their order."""
    found: set[Node] = set()
    waiting = [value]
    while waiting:
        for node in waiting.pop().users:
            if node not in found:
                found.add(node)
                waiting += node.outputs if node.op not in _LOSSES else ()
    return sorted(found, key=lambda node: node.index)


def _ordered(match: Match) -> list[Node]:
    return sorted(match.nodes | match.optional, key=lambda node: node.index)


def _devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
