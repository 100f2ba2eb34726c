"""A batch of another size, made of the rows of the user's own.

The errors raised here are reasons, without a full stop: :mod:`gradscope.fitting.sources` says what to do instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from gradscope.errors import WorkloadError
from gradscope.fitting.leaves import leaves, mapped

_Named = tuple[str, torch.Tensor]


def samples_in(batch: Any) -> int:
    """The batch size of ``batch``: the first dimension that its tensors have in common.

    Tensors with another first dimension are taken for something that all samples share, a mask of T x T for one.

    Raises:
        WorkloadError: there is no tensor, no common first dimension, or one that may be the batch's by chance only.
    """
    tensors = [(name, leaf) for name, leaf in leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        raise WorkloadError("it holds no tensor with a dimension")
    firsts = Counter(tensor.shape[0] for _, tensor in tensors)
    size = next(iter(firsts)) if len(firsts) == 1 else _commonest(firsts, tensors)
    if size == 0:
        raise WorkloadError("it holds no samples: the first dimension of its tensors is 0")
    _check_chance(size, tensors)
    return size


def _commonest(firsts: Counter[int], tensors: Sequence[_Named]) -> int:
    """The first dimension of most tensors; of two as common, the one that is not a later dimension of the other's."""
    several = Counter({size: count for size, count in firsts.items() if size != 1})  # 1 is for broadcasting
    most = max(several.values())
    leading = [size for size, count in several.items() if count == most]
    if len(leading) > 1:
        # A mask of T x T beside sequences of B x T: T is a length, for it is one elsewhere.
        leading = [size for size in leading if not any(size in tensor.shape[1:] for _, tensor in tensors)]
    if len(leading) == 1:
        return leading[0]
    raise WorkloadError(f"its tensors have no first dimension in common ({_shapes(tensors)})")


def _check_chance(size: int, tensors: Sequence[_Named]) -> None:
    """Refuse a square of the batch size beside a tensor that has it as its second dimension too."""
    for name, tensor in tensors:
        if size == 1 or tuple(tensor.shape) != (size, size):
            continue
        for other_name, other in tensors:
            alike = other.dim() == 2 and other.dtype == tensor.dtype
            if tuple(other.shape[:2]) == (size, size) and not alike:
                raise WorkloadError(
                    f"{name} is {_shape(tensor)} and {other_name} {_shape(other)}: "
                    f"the first dimension of {name} may be the batch's or the sequence's"
                )


def scaled(batch: Any, samples: int, size: int) -> Any:
    """``batch`` of ``samples`` samples with ``size`` instead: its first rows, or all of them again and again.

    Rows are copied, so that token numbers stay valid and the small batch does not hold the memory of the large one.
    Strides keep their order, and gaps between rows stay, for they decide what the model has to copy.
    """

    def change(_: str, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == samples:
            return _rows(leaf, size)
        return leaf

    return mapped(batch, change)


def _rows(tensor: torch.Tensor, size: int) -> torch.Tensor:
    with torch.no_grad():
        plain = tensor.detach()
        if plain.stride(0) == 0 and plain.shape[0] > 1:
            return plain[:1].expand(size, *plain.shape[1:])
        which = torch.arange(size, device=plain.device) % plain.shape[0]
        rows = _empty_like(plain, size).copy_(plain.index_select(0, which))
    return rows.requires_grad_(tensor.requires_grad)


def _empty_like(tensor: torch.Tensor, size: int) -> torch.Tensor:
    shape, strides = (size, *tensor.shape[1:]), tensor.stride()
    within = sum(stride * (length - 1) for stride, length in zip(strides[1:], shape[1:], strict=True))
    repeated = any(stride == 0 and length > 1 for stride, length in zip(strides, shape, strict=True))
    if strides[0] > within and not repeated:  # rows lie one after the other
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)
    order = sorted(range(tensor.dim()), key=lambda k: -strides[k])
    return torch.empty_permuted(shape, order, dtype=tensor.dtype, device=tensor.device)


def _shapes(tensors: Sequence[_Named]) -> str:
    shown = [f"{name} {_shape(tensor)}" for name, tensor in tensors[:4]]
    return ", ".join(shown) + (", ..." if len(tensors) > 4 else "")


def _shape(tensor: torch.Tensor) -> str:
    return " x ".join(str(length) for length in tensor.shape)
