"""Launches the Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.cross_entropy.terms import Terms
from gradscope.kernels.cross_entropy.triton_kernels import losses as kernel
from gradscope.kernels.on_device import on_device

# Two or more 16-byte loads a thread and turn. Rows are read twice: those of all programs that run at once must lie in
# the second-level cache, so where rows are long one program with all warps takes a multiprocessor.
LARGEST_BLOCK = 8192
LONG_ROW = 128 << 10  # bytes; three programs on each of 132 multiprocessors hold 50 MB of such rows


def losses(logits: Tensor, target: Tensor, terms: Terms, scale: Tensor | None, gradient: Tensor | None) -> Tensor:
    """Compute what :func:`gradscope.kernels.cross_entropy.cpu.losses` does, but for float64."""
    import triton

    batch, classes, positions = logits.shape
    found = torch.empty((batch, positions), dtype=torch.float32, device=logits.device)
    if not found.numel():
        return found
    weight = None if terms.weight is None else terms.weight.float().contiguous()
    into = logits if gradient is None else gradient  # a pointer that is not used must be one all the same
    many = classes * logits.element_size() > LONG_ROW
    block = min(triton.next_power_of_2(classes), 2 * LARGEST_BLOCK if many else LARGEST_BLOCK)
    with on_device(logits):
        kernel[(batch * positions,)](
            logits,
            target,
            found if weight is None else weight,
            found if weight is None else weight.sum(),
            found if scale is None else scale.float(),
            found,
            into,
            classes,
            positions,
            *logits.stride(),
            *target.stride(),
            *into.stride(),
            *(scale.stride() if scale is not None and scale.dim() else (0, 0)),
            terms.ignore_index,
            terms.label_smoothing,
            terms.z_loss,
            1.0 if terms.softcap is None else terms.softcap,
            HAS_WEIGHT=weight is not None,
            HAS_SCALE=scale is not None,
            HAS_SOFTCAP=terms.softcap is not None,
            HAS_SMOOTHING=terms.label_smoothing > 0,
            WANTED=gradient is not None,
            BLOCK=block,
            LANES=_lanes(logits, into),
            num_warps=32 if many else min(max(block // 256, 4), 16),
            # Sums of terms that cancel are exact as written: joined, one of two equal products would not be rounded.
            enable_fp_fusion=False,
        )
    return found


def _lanes(logits: Tensor, gradient: Tensor) -> int:
    """Elements in 16 bytes, where both tensors can be read and written so; else 1."""
    same = logits.stride() == gradient.stride() and logits.stride(1) == 1
    whole = logits.data_ptr() % 16 == 0 == gradient.data_ptr() % 16
    return 16 // logits.element_size() if same and whole else 1
