"""What a replacement is expected to save: a match's calls and the recipe's call, run on made-up operands.

Forward and backward find the cache as the rest of the step leaves it: before each, as much memory is read as the step
makes elsewhere. An estimate: the whole step is measured by :mod:`gradscope.patching.prove.verify`, and that decides.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradscope import recipes
from gradscope.ops import LOSSES
from gradscope.patching.match.graph import filled, is_view, remade
from gradscope.patching.match.match import (
    Argument,
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
from gradscope.patching.sites import Site
from gradscope.recording.graph import Node, Value
from gradscope.trace.memory import peaks_bytes
from gradscope.tree import parameters_of

# A match's calls, and the recipe's call in their place, run again on made-up operands.


# More than the caches of most processors hold for two threads; reading it takes 2 to 4 ms.
CACHE_BYTES = 32 << 20

# What these save is saved by the loss that reads their result: it is run with them.
_LAZY = frozenset({"lazy_linear"})


class Replay:
    """Both ways to make one match's output, forward and backward.

    Views around the match are made in both: what one of them copies depends on how the match reads and writes.
    """

    def __init__(self, match: Match) -> None:
        self.match, self.nodes = match, ordered(match)
        self.behind = _readers(match.output) if match.function in _LAZY else _views_of(match)
        self.also = [] if match.also is None else [match.also]
        output = self.behind[-1].output if self.behind else match.output
        self.outputs = [*(node.output for node in self.also), output]
        every = [*self.nodes, *self.also, *self.behind]
        made = {value for node in every for value in node.outputs}
        read = [value for node in every for value in node.inputs]
        read += [value for argument in match.arguments for piece in argument.pieces for value in _values(piece)]
        self.before = _views_before(value for value in dict.fromkeys(read) if value not in made)
        shown = {node.output for node in self.before}
        roots = [node.inputs[0] for node in self.before]
        with torch.no_grad():
            given = (value for value in dict.fromkeys([*read, *roots]) if value not in made | shown)
            self.given = {value: _operand(value) for value in given}
        self.held: dict[Value, Tensor] = {}
        self.modules: list[nn.Module] = []
        self._check()

    def original(self) -> None:
        """Run forward and backward of the match's calls."""
        self._backward(self._replayed())

    def recipe(self) -> None:
        """Run forward and backward of the recipe."""
        self._backward(self._called())

    def kept_bytes(self) -> int:
        """Return what the original saves for backward beyond the recipe.

        An operand counts where the recipe alone saves it: of one that the original saves, other calls may do so too.
        """
        (old, old_given), (new, new_given) = self._kept(self._replayed), self._kept(self._called)
        return old - new - sum(size for place, size in new_given.items() if place not in old_given)

    def _kept(self, make: Callable[[], list[Tensor]]) -> tuple[int, dict[int, int]]:
        """Return the bytes of what is made and saved, and the storages of operands that are."""
        held: dict[int, torch.UntypedStorage] = {}  # alive until they are counted, for no other to get their place

        def pack(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()  # the tensor itself would hold its own graph in a cycle
            held[storage.data_ptr()] = storage

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda none: none):
            outputs = make()
        there = [tensor for module in self.modules for tensor in parameters_of(module)]
        for tensor in (*there, *outputs):  # what reads the output saves it as well
            held.pop(tensor.untyped_storage().data_ptr(), None)
        operands = {tensor.untyped_storage().data_ptr() for tensor in self.given.values()}
        given = {place: storage.nbytes() for place, storage in held.items() if place in operands}
        return sum(storage.nbytes() for storage in held.values()) - sum(given.values()), given

    def times_ns(self, rounds: int, cache: Tensor) -> tuple[int, int]:
        """Return the median times of the original and of the recipe, forward and backward, in turns.

        Args:
            cache: read before each forward and each backward.
        """
        times: tuple[list[int], list[int]] = ([], [])
        for _ in range(rounds):
            for found, make in zip(times, (self._replayed, self._called), strict=True):
                forward, outputs = _timed(make, cache)
                backward, _ = _timed(lambda outputs=outputs: self._backward(outputs), cache)  # type: ignore[misc]
                found.append(forward + backward)
        return round(statistics.median(times[0])), round(statistics.median(times[1]))

    def _check(self) -> None:
        """Raise where the two do not make what was recorded."""
        for outputs in (self._replayed(), self._called()):
            for made, output in zip(outputs, self.outputs, strict=True):
                if tuple(made.shape) != output.shape or made.dtype != output.dtype:
                    raise ValueError("the output differs from the recorded one")

    def _backward(self, outputs: list[Tensor]) -> None:
        leaves = [tensor for tensor in self.given.values() if tensor.requires_grad]
        leaves += [tensor for module in self.modules for tensor in parameters_of(module) if tensor.requires_grad]
        outputs = [output for output in outputs if output.requires_grad]
        if outputs and leaves:
            torch.autograd.grad(outputs, leaves, [torch.ones_like(output) for output in outputs], allow_unused=True)

    def _replayed(self) -> list[Tensor]:
        held = self._run(self.before, dict(self.given))
        held = self._run([*self.nodes, *self.also, *self.behind], held, self.outputs)
        return [held[output] for output in self.outputs]

    def _run(
        self, nodes: list[Node], held: dict[Value, Tensor], wanted: list[Value] | None = None
    ) -> dict[Value, Tensor]:
        """Run calls; with ``wanted`` nothing else is held behind its last reader, as in the step."""
        last = {value: number for number, node in enumerate(nodes) for value in node.inputs}
        for number, node in enumerate(nodes):
            args, kwargs = filled(node.args, held.__getitem__), filled(node.kwargs, held.__getitem__)
            with torch.set_grad_enabled(node.grad):
                result = node.function(*args, **kwargs)
            made = [args[0]] if node.op == "setitem" else _tensors(result)
            held |= dict(zip(node.outputs, made, strict=True))
            if wanted is not None:
                del args, kwargs, result, made
                done = [each for each in (*node.inputs, *node.outputs) if last.get(each, -1) <= number]
                for value in set(done) - set(wanted):
                    held.pop(value, None)
        return held

    def _called(self) -> list[Tensor]:
        self.modules.clear()
        self.held = self._run(self.before, dict(self.given))
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
        held = self._run(self.behind, {**self.held, **dict(results)})
        return [held[output] for output in self.outputs]

    def _argument(self, argument: Argument) -> list[Any]:
        """Return an argument's value; several where it stands for the arguments of a call."""
        names: dict[str, Any] = {name: getattr(recipes, name) for name in (self.match.function, *self.match.helpers)}
        text = "".join(self._text(piece, names) for piece in argument.pieces)
        values: list[Any] = eval(f"[{text}]", names)  # noqa: S307 (a matcher's own text)
        return values

    def _text(self, piece: Piece, names: dict[str, Any]) -> str:
        """Return the piece's text, with a name of its own for each value, which goes into ``names``."""
        if isinstance(piece, (str, Size)):
            return piece if isinstance(piece, str) else str(piece.number)
        if isinstance(piece, FromSizes):
            return "".join(self._text(part, names) for part in piece.pieces)
        name = f"_{len(names)}"
        if isinstance(piece, Of):
            names[name] = self.held[piece.value]
            return f"{name}{piece.suffix}"
        if isinstance(piece, (Called, Layer)):
            names[name] = piece.node.caller
            assert piece.node.caller is not None
            self.modules.append(piece.node.caller)
            return name
        if isinstance(piece, Given):
            wanted = piece.node.args[piece.skipped : piece.skipped + piece.positional]
            names[name] = filled(wanted, self.held.__getitem__)
            return f"*{name}"
        if isinstance(piece, Setting):
            # As it was in the step, where that is recorded: a model may be in evaluation since.
            recorded = _number(piece.scalar) if isinstance(piece.scalar, Scalar) else None
            if recorded is None and hasattr(piece.node.caller, piece.attribute):
                names[name] = getattr(piece.node.caller, piece.attribute)
                return name
            return self._text(piece.scalar, names)
        scalar = piece
        found = _number(scalar)
        weight = scalar.node.args[scalar.position : scalar.position + 1]
        if found is None and weight and isinstance(weight[0], Value) and weight[0] in self.held:
            found = self.held[weight[0]]
        if found is None:
            return scalar.otherwise
        names[name] = found
        return name


def _values(piece: Piece) -> list[Value]:
    """Return the tensors that a piece is the text of."""
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
    """Make a leaf like the recorded tensor; the tensor itself where its content matters: a mask's, a number's."""
    tensor = remade(value) if not value.requires_grad or value.alive else None
    if tensor is None:
        tensor = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        if value.strides is not None:
            tensor = torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=value.device)
        tensor = tensor.normal_() if value.dtype.is_floating_point else tensor.zero_()
    return tensor.detach().requires_grad_(value.requires_grad)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in _tensors(part)] if isinstance(result, (tuple, list)) else []


def _readers(value: Value) -> list[Node]:
    """Return the calls from ``value`` to the losses that read it, in their order."""
    found: set[Node] = set()
    waiting = [value]
    while waiting:
        for node in waiting.pop().users:
            if node not in found:
                found.add(node)
                waiting += node.outputs if node.op not in LOSSES else ()
    return sorted(found, key=lambda node: node.index)


def _timed(run: Callable[[], Any], cache: Tensor) -> tuple[int, Any]:
    cache.sum()
    if cache.is_cuda:
        torch.cuda.synchronize(cache.device)
    start = time.perf_counter_ns()
    result = run()
    if cache.is_cuda:
        torch.cuda.synchronize(cache.device)
    return time.perf_counter_ns() - start, result


def _views_of(match: Match) -> list[Node]:
    """Return the views that the output is handed on by, one after the other, as long as it has one reader."""
    found: list[Node] = []
    value = match.output
    while match.also is None and len(value.users) == 1 and is_view(value.users[0]) and len(value.users[0].outputs) == 1:
        found.append(value.users[0])
        value = found[-1].output
    return found


def _views_before(values: Iterable[Value]) -> list[Node]:
    """Return the views that made these values, in their order."""
    found: set[Node] = set()
    for value in values:
        while value.requires_grad and value.producer is not None and is_view(value.producer):
            found.add(value.producer)
            value = value.producer.inputs[0]
    return sorted(found, key=lambda node: node.index)


def ordered(match: Match) -> list[Node]:
    """Return the calls of a match, with those that may go too, in the order of the run."""
    return sorted(match.nodes | match.optional, key=lambda node: node.index)


FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Saving:
    """An estimate for a site in one step; negative is a loss."""

    ns: int | None  # forward and backward; None: it could not be run alone
    bytes: int  # at the peak; where it could not be run alone, what the match keeps for backward
    old_ns: int | None = None  # of the calls that would go, in the same run
    kept_bytes: int | None = None  # less saved for backward; None: not measured


def predict(sites: Iterable[Site], rounds: int = FEWEST_ROUNDS, elsewhere: int = CACHE_BYTES) -> dict[Site, Saving]:
    """Predict the saving of each site, also of one that is refused; the same work on the same shapes is run once.

    Args:
        rounds: of each way, in turns. Of one, peaks are not measured: what is saved for backward stands for them.
        elsewhere: bytes that the step makes outside of the site.
    """
    found: dict[Site, Saving] = {}
    known: dict[object, Saving] = {}
    for site in sites:
        match = site.matches[0]
        key = _work(match)
        if key not in known:
            known[key] = measured(match, rounds, elsewhere)
        times, one = len(site.matches), known[key]
        found[site] = Saving(
            ns=None if one.ns is None else one.ns * times,
            # What lives on its way does so in one call at a time.
            bytes=one.bytes * times if one.kept_bytes is None else one.kept_bytes * (times - 1) + one.bytes,
            old_ns=None if one.old_ns is None else one.old_ns * times,
            kept_bytes=None if one.kept_bytes is None else one.kept_bytes * times,
        )
    return found


def _work(match: Match) -> object:
    """Return a key that is equal for the same calls on the same shapes."""
    calls = tuple(
        (node.op, repr(node.kwargs.keys()), tuple((value.shape, value.dtype) for value in node.inputs))
        for node in ordered(match)
    )
    return match.recipe, match.function, calls


def measured(match: Match, rounds: int, elsewhere: int) -> Saving:
    """Measure the saving of one call of the match; by the bytes that it keeps where it cannot be run alone."""
    try:
        with torch.random.fork_rng(_devices()), torch.enable_grad():
            replay, device = Replay(match), match.output.device
            saved_bytes = kept = replay.kept_bytes()
            if rounds > 1:
                before, after = peaks_bytes([replay.original, replay.recipe], device)
                saved_bytes = before - after
            old_ns, new_ns = replay.times_ns(rounds, torch.ones(min(elsewhere, CACHE_BYTES) // 4, device=device))
    except Exception:  # what a matcher, the user's operands or the device may raise has no end
        return Saving(None, kept_bytes(match))
    return Saving(old_ns - new_ns, saved_bytes, old_ns, kept)


def kept_bytes(match: Match) -> int:
    """Return the bytes of tensors that would no longer be made and that backward may need, each storage once."""
    sizes: dict[int, int] = {}
    made = {value for node in match.nodes for value in node.outputs}
    outside = {value.storage for node in match.nodes for value in node.inputs if value not in made}
    for value in match.inner:
        if value.requires_grad and value.storage not in outside:
            sizes[value.storage] = max(sizes.get(value.storage, 0), value.bytes)
    return sum(sizes.values())


def _devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
