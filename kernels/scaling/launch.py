"""Scales a tensor in place by a scalar that lies in memory."""

from __future__ import annotations

from torch import Tensor

from gradscope.kernels.on_device import on_device

_BLOCK = 4096
# Enough to fill a device; where the factor is 1 each ends at once, and 100,000 of them would take 0.1 ms to start.
_PROGRAMS = 1024


def scale_in_place(values: Tensor, factor: Tensor, extra: Tensor | None = None, *, backend: str = "torch") -> Tensor:
    """``values *= factor * extra``, skipped where that is 1; returns ``values``.

    Args:
        values: any shape, of a floating dtype; where it is not contiguous it is left to torch.
        factor: a scalar tensor on its device.
        extra: likewise; None for 1.
    """
    if backend == "triton" and values.is_contiguous() and values.numel():
        from gradscope.kernels.scaling.triton_kernels import scale_all

        with on_device(values):
            scale_all[(min((values.numel() + _BLOCK - 1) // _BLOCK, _PROGRAMS),)](
                values,
                factor,
                factor if extra is None else extra,
                values.numel(),
                HAS_EXTRA=extra is not None,
                BLOCK=_BLOCK,
            )
        return values
    by = factor if extra is None else factor * extra
    if values.device.type == "cpu":
        return values if float(by) == 1.0 else values.mul_(by)
    # With dimensions: a scalar tensor would be rounded to the dtype of the values first.
    return values.mul_(by.reshape((1,) * values.dim()))
