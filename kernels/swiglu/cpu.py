"""On the CPU a few rows at a time, so that what is between the operands and the results stays in the cache.

With s the logistic function of the gate, silu = gate s, and

    d gate = d up s (1 + gate (1 - s)),   d up = d silu

where d is the upstream gradient: what torch's silu_backward makes of ``d up``.
"""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 18  # elements, 1 MiB of float32: smaller ones cost more in starting threads than the cache saves


def forward(gate: Tensor, up: Tensor, output: Tensor) -> None:
    """Fill ``output``; all [rows, features], of one floating dtype."""
    for part in _parts(gate):
        torch.ops.aten.silu.out(gate[part], out=output[part])
        output[part].mul_(up[part])


def backward(upstream: Tensor, gate: Tensor, up: Tensor, gate_gradient: Tensor, up_gradient: Tensor) -> None:
    """Fill both gradients; all [rows, features]."""
    for part in _parts(gate):
        given, inner = upstream[part], gate[part]
        torch.ops.aten.silu.out(inner, out=up_gradient[part])
        up_gradient[part].mul_(given)
        torch.ops.aten.silu_backward.grad_input(given * up[part], inner, grad_input=gate_gradient[part])


def _parts(rows: Tensor) -> list[slice]:
    step = max(1, CHUNK // max(1, rows.shape[1]))
    return [slice(start, start + step) for start in range(0, rows.shape[0], step)]
