"""Loss and gradients of linear layer and cross-entropy; one node of a compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.cross_entropy.targets import require_classes
from gradscope.kernels.cross_entropy.terms import Terms, accumulate_dtype
from gradscope.kernels.linear_cross_entropy.chunked import Wanted, chunked, counted
from gradscope.kernels.linear_cross_entropy.chunks import chunk_rows
from gradscope.kernels.opaque import opaque


def product_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """In which the products are taken, where torch takes them in ``dtype``.

    On the CPU float16 and bfloat16 are computed in float32: without units for them a product takes up to 100 times as
    long, and with autocast there is nothing to convert.
    """
    return accumulate_dtype(dtype) if device_type == "cpu" else dtype


def _fake(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    input_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
    logits_wanted: bool,
    logits_dtype: torch.dtype,
    sums_wanted: bool,
    memory_budget: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    sums = accumulate_dtype(logits_dtype)

    def gradient(tensor: Tensor | None, wanted: bool) -> Tensor:
        if tensor is None or not wanted:
            return input.new_empty(0)
        return input.new_empty(tensor.shape, dtype=sums if sums_wanted else tensor.dtype)

    return (
        input.new_empty(target.shape, dtype=sums),
        gradient(input, input_wanted),
        gradient(linear_weight, weight_wanted),
        gradient(linear_bias, bias_wanted),
        input.new_empty((input.shape[0], linear_weight.shape[0]) if logits_wanted else (0,), dtype=logits_dtype),
    )


@opaque("linear_cross_entropy", _fake)
def losses_and_gradients(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    input_wanted: bool,
    weight_wanted: bool,
    bias_wanted: bool,
    logits_wanted: bool,
    logits_dtype: torch.dtype,
    sums_wanted: bool,
    memory_budget: int | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss of each row; where they are wanted the gradients of ``Σ scale · loss``, and the logits.

    Args:
        input: [rows, features].
        linear_weight: [classes, features].
        target: [rows].
        linear_bias: [classes], or None.
        weight, ignore_index, label_smoothing, z_loss, softcap: see gradscope.kernels.cross_entropy.terms.
        scale: a scalar tensor, or [rows]; None for 1.
        input_wanted, weight_wanted, bias_wanted: which gradients are.
        logits_wanted: whether the logits are, in ``logits_dtype``.
        logits_dtype: of torch's logits; see :func:`product_dtype`.
        sums_wanted: whether the gradients are left as they were summed, in float32 or float64.
        memory_budget: see chunks.py.
        backend: "cpu" or "triton".

    Returns:
        Loss, the three gradients, logits; empty where they are not wanted.

    Raises:
        ValueError: on the CPU, a target that is neither a class nor ignored.
    """
    require_classes("linear_cross_entropy", target, linear_weight.shape[0], ignore_index)
    terms = Terms(weight, ignore_index, label_smoothing, z_loss, softcap)
    device = input.device.type
    dtype = product_dtype(logits_dtype, device)
    wanted = Wanted(input_wanted, weight_wanted, bias_wanted, logits_dtype if logits_wanted else None)
    rows = chunk_rows(input.shape[0], linear_weight.shape[0], dtype.itemsize, device, memory_budget)
    with torch.autocast(device, enabled=False):
        found = (counted if device == "cpu" else chunked)(
            input.to(dtype),
            linear_weight.to(dtype),
            target,
            None if linear_bias is None else linear_bias.to(dtype),
            terms,
            scale,
            wanted,
            rows,
            backend,
        )

    def result(gradient: Tensor | None, like: Tensor | None) -> Tensor:
        if gradient is None or like is None:
            return input.new_empty(0)
        return gradient.to(accumulate_dtype(logits_dtype) if sums_wanted else like.dtype)

    return (
        found.loss,
        result(found.input, input),
        result(found.linear_weight, linear_weight),
        result(found.linear_bias, linear_bias),
        input.new_empty(0, dtype=logits_dtype) if found.logits is None else found.logits,
    )
