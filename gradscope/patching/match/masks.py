"""Masks as a recording has them: what is hidden, by what, and whether a mask made on the fly is always causal."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import torch

from gradscope.ops import ATTENTION, CASTS, COPIES
from gradscope.patching.match.graph import number, remade
from gradscope.patching.match.match import Scalar
from gradscope.patching.match.products import leads_to_product
from gradscope.recording.graph import Frame, Node, Recording, Value

# A number that stands for minus infinity: far enough below any score that its weight is 0.
HIDDEN = -1e4


# With fewer queries a mask that hides what is far behind, or shows one key ahead, may look causal.
_TELLING = 4


@dataclass(frozen=True, eq=False)
class Mask:
    """One mask laid over the scores."""

    value: Value
    hides: str  # "zero", "nonzero"; "" where it is added
    fill: float = 0.0  # what hidden scores become
    negative: bool = False  # it is subtracted
    rank: int = 0  # dimensions of the scores then
    positions: tuple[Value, Value] | None = None  # rows and columns that are hidden, where it is given so

    @property
    def finite(self) -> bool:
        """Return whether a row in which all is hidden keeps equal weights."""
        return bool(self.hides) and math.isfinite(self.fill)

    def is_bias(self) -> bool:
        """Return whether it is added for its own sake, and hides nothing."""
        if self.value.requires_grad:
            return True
        tensor = remade(self.value)
        return tensor is not None and bool((tensor != 0).any()) and bool((tensor > 0.1 * HIDDEN).all())

    def is_causal_now(self, shape: tuple[int, int]) -> bool:
        """Return whether it was causal in the recorded run."""
        tensor = remade(self.value) if self.positions is None else None
        return tensor is not None and is_causal(tensor, self.hides, shape)


@dataclass(frozen=True)
class Made:
    """How a causal mask is made on the fly."""

    nodes: frozenset[Node]
    fixed: tuple[Scalar, ...]  # numbers that must be spelled as such: another number makes another mask
    infinite: bool  # what is hidden is minus infinity

    def is_of_scores(self, pattern: Set[Node]) -> bool:
        """Return whether it has the shape of the scores that ``pattern`` makes, however many keys there are."""
        makers = [node for node in self.nodes if node.op in _LIKE | _FILLED | _PLACES and node.output.shape != ()]
        asked = [node.inputs[0] for node in makers if node.op in _LIKE]
        return len(asked) == len(makers) and all(leads_to_product(each) and each.producer in pattern for each in asked)


_FORMS = frozenset(
    {"view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as", "view_as", "reshape_as"}
    | {"bool", "int", "long", "byte", "float32", "int8", "uint8", "detach", *CASTS, *COPIES}
)
_FILLED = frozenset({"ones", "zeros", "full", "empty", "new_ones", "new_zeros", "new_full", "new_empty"})
_LIKE = frozenset({"ones_like", "zeros_like", "full_like", "empty_like"})
_PLACES = frozenset({"arange", "triu_indices", "tril_indices", "tensor"})
_COMPARED = frozenset(
    {"eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "rsub", "mul", "neg", "logical_not", "logical_and", "logical_or"}
)


def causal(mask: Mask, shape: tuple[int, int], frame: Frame) -> Made | None:
    """Return how ``mask`` is made under ``frame``, where it is causal for every length and not for this one alone."""
    nodes: set[Node] = set()
    fixed: list[Scalar] = []
    if min(shape) < _TELLING:
        return None
    for value in mask.positions or (mask.value,):
        if not _made(value, frame, nodes, fixed):
            return None
    if mask.positions is not None:
        rows, columns = (remade(each) for each in mask.positions)
        if rows is None or columns is None or rows.dim() != 1 or shape[0] != shape[1]:
            return None
        tensor = torch.zeros(shape)
        tensor[rows.cpu(), columns.cpu()] = 1.0
    else:
        found = remade(mask.value)
        if found is None:
            return None
        if found.dim() > 2:  # of the scores' own shape, as ones_like(scores) gives it
            every = found.flatten(0, -3)
            if not len(every) or not bool((every == every[:1]).all()):
                return None
            found = every[0]
        tensor = -found if mask.negative else found
    if not is_causal(tensor, mask.hides, shape):
        return None
    infinite = mask.fill == -math.inf if mask.hides else bool(torch.isinf(tensor).any())
    return Made(frozenset(nodes), tuple(fixed), infinite)


def is_causal(mask: torch.Tensor, hides: str, shape: tuple[int, int]) -> bool:
    """Return whether a mask hides exactly what comes after, for as many queries as keys."""
    rows, columns = shape
    if rows != columns or rows < 2 or tuple(mask.shape[-2:]) != shape or mask.numel() != rows * columns:
        return False
    mask = mask.reshape(shape)
    if hides:
        seen = mask != 0 if hides == "zero" else mask == 0
    else:
        seen, hidden = mask == 0, mask <= HIDDEN
        if not bool((seen | hidden).all()):
            return False
    return bool(torch.equal(seen, torch.ones_like(seen).tril()))


def _made(value: Value, frame: Frame, nodes: set[Node], fixed: list[Scalar]) -> bool:
    """Return whether ``value`` is made under ``frame`` from sizes and fixed numbers alone."""
    left = [value]
    while left:
        node = left.pop().producer
        if node is None or node.place_in(frame) is None or not node.places:
            return False
        if node in nodes:
            continue
        nodes.add(node)
        if node.op in _LIKE or (node.op.startswith("new_") and node.op in _FILLED):
            continue
        if node.op in _FILLED | _PLACES:
            if not _made_alone(node, fixed):
                return False
            continue
        if not node.inputs:
            return False
        if not (_plain_index(node) if node.op == "getitem" else _numbers_fixed(node, fixed)):
            return False
        left += reversed(_read(node))
    return True


def _read(node: Node) -> tuple[Value, ...]:
    """Return what the content depends on."""
    return node.inputs[:1] if node.op in {"type_as", "expand_as", "view_as", "reshape_as", "to"} else node.inputs


def _may_be_fixed(given: Any) -> bool:
    """Return whether a number may be in a causal mask of any length: a larger one is a window's, or an offset."""
    return number(given) in (-1.0, 0.0, 1.0)


def _made_alone(node: Node, fixed: list[Scalar]) -> bool:
    if node.inputs:
        return False
    numbers = [each for each in node.args if isinstance(each, (int, float))]
    if node.op == "arange" and (len(numbers) > 1 or "start" in node.kwargs or "step" in node.kwargs):
        if len(numbers) == 1:
            return False
        if not all(_may_be_fixed(node.argument(*each)) for each in ((0, "start", 0), (2, "step", 1))):
            return False
        fixed += [Scalar(node, 0, "start"), Scalar(node, 2, "step", "1")]
    if node.op in {"full", "tensor"}:
        given = node.argument(int(node.op == "full"), "fill_value" if node.op == "full" else "data")
        if number(given) is None:
            return False
        if not deep(given):
            if not _may_be_fixed(given):
                return False
            fixed.append(Scalar(node, int(node.op == "full"), "fill_value" if node.op == "full" else "data"))
    if node.op in {"triu_indices", "tril_indices"}:
        fixed.append(Scalar(node, 2, "offset", "0"))
        return _may_be_fixed(node.argument(2, "offset", 0))
    return True


def _numbers_fixed(node: Node, fixed: list[Scalar]) -> bool:
    """Return whether the operation is one whose numbers matter only as ``fixed``, which they are added to."""
    if node.op in _FORMS:
        return True
    if node.op in {"triu", "tril"}:
        fixed.append(Scalar(node, 1, "diagonal", "0"))
        return _may_be_fixed(node.argument(1, "diagonal", 0))
    if node.op in {"masked_fill", "where", "fill"}:
        return all(number(each) in (0.0, 1.0) or deep(each) for each in node.args if isinstance(each, (int, float)))
    if node.op in _COMPARED and not node.kwargs:
        numbers = {position: each for position, each in enumerate(node.args) if isinstance(each, (int, float))}
        fixed += [Scalar(node, position) for position, each in numbers.items() if not deep(each)]
        return all(deep(each) or _may_be_fixed(each) for each in numbers.values())
    return False


def deep(given: Any) -> bool:
    """Return whether a number hides, as its own or as its opposite."""
    found = number(given)
    return found is not None and abs(found) >= -HIDDEN


def _plain_index(node: Node) -> bool:
    """Return whether it is an index that only adds dimensions, or takes the rows or columns of ``triu_indices``."""
    index = node.args[1]
    made = node.inputs[0].producer
    if isinstance(index, int) and made is not None and made.op in {"triu_indices", "tril_indices"}:
        return True
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or part == slice(None) for part in parts)


def uniform(given: Any) -> tuple[float | None, frozenset[Node]]:
    """The number that a fill is, and the calls that only make a tensor of it; None where it is not one."""
    if not isinstance(given, Value):
        return number(given), frozenset()
    node = given.producer
    if node is not None and node.op in {"full_like", "new_full"} and node.outputs == (given,):
        return number(node.argument(2 if node.op == "new_full" else 1, "fill_value")), frozenset({node})
    if given.shape == ():
        return number(given), frozenset()
    return None, frozenset()


def times_mask(
    node: Node, scores: Value, bias: Value, shape: tuple[int, int]
) -> tuple[Value, Mask, frozenset[Node]] | None:
    """Match ``scores * mask - 10000 * (1 - mask)``, of a mask of ones and zeros that is causal.

    The scores before, the mask, and the calls besides the sum ``node``.
    """
    times, minus = scores.producer, bias.producer
    if times is None or minus is None or times.op != "mul" or minus.op != "mul" or len(times.inputs) != 2:
        return None
    depths = [found for found in map(number, minus.args) if found is not None]
    inverse = minus.inputs[0].producer
    if len(depths) != 1 or len(minus.inputs) != 1 or inverse is None or inverse.op not in {"rsub", "sub"}:
        return None
    if len(inverse.args) != 2 or len(inverse.inputs) != 1:
        return None
    mask = inverse.inputs[0]
    if inverse.args != ((mask, 1) if inverse.op == "rsub" else (1, mask)) or mask not in times.inputs:
        return None
    fill = -depths[0] if node.op == "sub" else depths[0]
    made = Mask(mask, "zero", fill, rank=len(scores.shape))
    if fill > HIDDEN or not made.is_causal_now(shape):
        return None
    below = times.inputs[0] if times.inputs[1] is mask else times.inputs[1]
    return below, made, frozenset({times, minus, inverse})


# What a mask that attention is given says on every batch: one that depends on the batch says nothing certain.


CAUSAL, OPEN = "causal", "open"

# Different ones that are remembered while a recording is read.
_MOST_KNOWN = 4

_SPREAD = frozenset({"expand", "expand_as"})
_RESHAPED = frozenset(
    {"view", "reshape", "unsqueeze", "squeeze", "getitem", "narrow", "bool", "float", "float32", "half", "bfloat16"}
    | {"detach", "eq", "ne", "logical_not", *_SPREAD, *CASTS, *COPIES}
)
_OF_ONE_NUMBER = frozenset(
    {"ones", "zeros", "ones_like", "zeros_like", "new_ones", "new_zeros", "full", "full_like", "new_full"}
)


def note_masks(recording: Recording) -> None:
    """Write down, on each call of torch's attention, what its mask says; names must be known, see recording.naming."""
    masks = _Masks()
    for node in recording.nodes:
        if node.op == ATTENTION:
            node.mask = masks.what_it_says(node)


class _Masks:
    """Reads the masks of one recording."""

    def __init__(self) -> None:
        self._known: list[tuple[torch.Tensor, bool]] = []  # each block may have a buffer of the same content

    def what_it_says(self, node: Node) -> str | None:
        """Return CAUSAL or OPEN (nothing is hidden or added), as a call of torch's attention is given it.

        None: something else, or it may be another with the next batch.
        """
        mask = node.argument(3, "attn_mask")
        if not isinstance(mask, Value) or mask.requires_grad or len(node.inputs) < 3:
            return None
        while mask.producer is not None and mask.producer.op in _SPREAD:
            mask = mask.producer.inputs[0]
        shape = (node.inputs[0].shape[-2], node.inputs[1].shape[-2])
        hides = "zero" if mask.dtype is torch.bool else ""
        root = _root(mask)
        if root is None or (root.producer is None and (root.parameter is None or root.requires_grad)):
            frame = node.places[-1].frame if node.places else None
            given = Mask(mask, hides, -math.inf)
            return CAUSAL if frame is not None and causal(given, shape, frame) is not None else None
        whole, part = remade(root), remade(mask)
        if whole is None or part is None:
            return None
        if _is_open(part) and (root.producer is not None or _is_even(whole)):
            return OPEN
        if root.producer is not None or min(shape) < _TELLING or not is_causal(part, hides, shape):
            return None
        return CAUSAL if self._is_causal(whole) else None

    def _is_causal(self, buffer: torch.Tensor) -> bool:
        """Return whether it is so at its full length: a window's is causal at a shorter one."""
        for known, answer in self._known:
            if known.dtype is buffer.dtype and known.device == buffer.device and torch.equal(known, buffer):
                return answer
        shape = (buffer.shape[-2], buffer.shape[-1]) if buffer.dim() >= 2 else (0, 0)
        answer = any(is_causal(buffer, hides, shape) for hides in ("zero", "nonzero", ""))
        if len(self._known) < _MOST_KNOWN:
            self._known.append((buffer, answer))
        return answer


def _root(mask: Value) -> Value | None:
    """Return what the mask is a view of: a tensor that was there before, or one of a single number."""
    while mask.producer is not None:
        node = mask.producer
        if node.op in _OF_ONE_NUMBER:
            return None if node.changed else mask
        if node.op not in _RESHAPED or node.changed or len(node.inputs) != 1:
            return None
        mask = node.inputs[0]
    return mask


def _is_open(mask: torch.Tensor) -> bool:
    return bool(mask.all()) if mask.dtype is torch.bool else not bool(mask.any())


def _is_even(buffer: torch.Tensor) -> bool:
    """Return whether all its numbers are one: then so is every part."""
    return bool((buffer == buffer.flatten()[:1]).all())
