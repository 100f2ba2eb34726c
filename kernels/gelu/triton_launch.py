"""Launches the Triton kernels; each is one node of a compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.on_device import on_device
from gradscope.kernels.opaque import opaque

ROWS = 4
COLUMNS = 256
GROUPS = 128  # programs over the rows in backward: their sums are written and read again, 4 bytes a column each


def _rows_of(tensor: Tensor) -> Tensor:
    """[rows, columns] whose columns lie side by side; a view where that can be."""
    flat = tensor.reshape(-1, tensor.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _fake_forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return x.new_empty(x.shape)


@opaque("bias_gelu", _fake_forward)
def forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """The unit of ``x + bias``, summed in float32; reads once and writes once.

    Args:
        x: [..., features], of float32, float16 or bfloat16.
        bias: [features].
        approximate: "none" or "tanh".

    Returns:
        Contiguous, of the shape and dtype of ``x``.
    """
    from gradscope.kernels.gelu.triton_kernels import forward as kernel

    output = x.new_empty(x.shape)
    if not x.numel():
        return output
    flat = _rows_of(x)
    rows, columns = flat.shape
    with on_device(x):
        kernel[(-(-rows // ROWS), -(-columns // COLUMNS))](
            flat,
            bias.contiguous(),
            output,
            rows,
            columns,
            flat.stride(0),
            TANH=approximate == "tanh",
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
    return output


def _fake_backward(upstream: Tensor, x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


@opaque("bias_gelu_backward", _fake_backward)
def backward(upstream: Tensor, x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` and ``bias``; the latter summed in float32, in an order that does not change."""
    from gradscope.kernels.gelu.triton_kernels import backward as kernel

    gradient = x.new_empty(x.shape)
    if not x.numel():
        return gradient, torch.zeros_like(bias)
    flat, given = _rows_of(x), _rows_of(upstream)
    rows, columns = flat.shape
    per_group = -(-rows // (GROUPS * ROWS)) * ROWS
    groups = -(-rows // per_group)
    sums = torch.empty((groups, columns), dtype=torch.float32, device=x.device)
    with on_device(x):
        kernel[(groups, -(-columns // COLUMNS))](
            given,
            flat,
            bias.contiguous(),
            gradient,
            sums,
            rows,
            columns,
            given.stride(0),
            flat.stride(0),
            per_group,
            TANH=approximate == "tanh",
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
    return gradient, sums.sum(0).to(bias.dtype)
