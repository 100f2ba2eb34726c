"""Dropout by either path; one node of a compiled graph."""

from __future__ import annotations

from torch import Tensor

from gradscope.kernels.dropout import cpu
from gradscope.kernels.dropout.counter import threshold
from gradscope.kernels.on_device import on_device
from gradscope.kernels.opaque import opaque

_BLOCK = 1024


def _fake(x: Tensor, seed: Tensor, p: float, backend: str) -> Tensor:
    return x.new_empty(x.shape)


@opaque("dropout", _fake)
def dropout(x: Tensor, seed: Tensor, p: float, backend: str) -> Tensor:
    """As :func:`gradscope.kernels.dropout.cpu.dropout`; the same seed gives the same mask by either backend.

    Args:
        x: any shape and strides; of float32, float16 or bfloat16 for ``backend="triton"``.
        seed: a scalar int64 tensor on its device.
        p: share that is dropped, in [0, 1).
        backend: "cpu" or "triton".
    """
    if backend == "cpu":
        return cpu.dropout(x, seed, p)
    from gradscope.kernels.dropout.triton_kernels import dropout as kernel

    output = x.new_empty(x.shape)
    if x.numel():
        with on_device(x):
            kernel[(-(-x.numel() // _BLOCK),)](
                x.contiguous(), seed, output, x.numel(), threshold(p), 1 / (1 - p), BLOCK=_BLOCK
            )
    return output
