"""The two operands as rows, whether they came apart or side by side in one tensor."""

from __future__ import annotations

from torch import Tensor


def as_rows(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Two tensors [rows, features]; views where the leading dimensions allow it.

    Args:
        gate: [..., features]; with ``up=None`` [..., 2 features], the gate first.
        up: of the shape of ``gate``; None where it is the second half of that.
    """
    if up is None:
        both = gate.flatten(0, -2) if gate.dim() > 1 else gate[None]
        first, second = both.chunk(2, dim=1) if both.shape[1] else (both, both)
        return first, second
    if gate.dim() == 1:
        return gate[None], up[None]
    return gate.flatten(0, -2), up.flatten(0, -2)


def output_shape(gate: Tensor, up: Tensor | None) -> list[int]:
    """The shape of the result."""
    return [*gate.shape[:-1], gate.shape[-1] // 2] if up is None else list(gate.shape)
