"""What :mod:`gradscope.recipes.linear_cross_entropy` accepts, and what it would do with it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gradscope.kernels import pays
from gradscope.kernels.check import (
    dtype_text,
    refuse,
    require_dtype,
    require_one_of,
    require_range,
    require_same_device,
    shape_text,
)
from gradscope.kernels.choice import BackendChoice, choose
from gradscope.kernels.support import autocasts, why_no_triton

NAME = "linear_cross_entropy"
IGNORED = -100  # the target that counts for nothing where ignore_index is None
REASONS = {
    "triton": "cuBLAS matmuls over a few chunks of rows; one kernel turns a chunk's logits into their gradient",
    "cpu": "torch matmuls over chunks of rows within the memory budget; their gradient overwrites the logits",
    "torch": "torch.nn.functional.linear and cross_entropy, which store the full logits",
}


def explain(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    memory_budget: int | None = None,
    backend: str = "auto",
) -> BackendChoice:
    """What would run with these arguments, and why."""
    _check_products(input, linear_weight, linear_bias)
    _check_target(input, linear_weight, target, ignore_index)
    classes = linear_weight.shape[0]
    if weight is not None and tuple(weight.shape) != (classes,):
        refuse(NAME, "weight", shape_text(weight), f"({classes},)")
    if weight is not None and weight.requires_grad:
        refuse(NAME, "weight", "a tensor that requires a gradient", "one that does not: no gradient is computed for it")
    require_same_device(
        NAME, ("input", input), linear_weight=linear_weight, target=target, linear_bias=linear_bias, weight=weight
    )
    require_one_of(NAME, "reduction", reduction, ("mean", "sum", "none"))
    require_range(NAME, "label_smoothing", max(label_smoothing, 0.0), 0.0, 1.0)
    require_range(NAME, "z_loss", z_loss, 0.0, float("inf"), open_high=True)
    if softcap is not None:
        require_range(NAME, "softcap", softcap, 0.0, float("inf"), open_low=True, open_high=True)
    if memory_budget is not None:
        require_range(NAME, "memory_budget", memory_budget, 1, float("inf"), open_high=True)

    unusual = "the target contains probabilities" if target.is_floating_point() else None
    if linear_weight.dim() > 2:
        unusual = "the loss has several positions per input"
    double = "only the other backends support float64" if input.dtype == torch.float64 else None
    on_cpu = None if input.device.type == "cpu" else f"the tensors are on {input.device}"
    extras = "it does not support z_loss, softcap and memory_budget"
    plain = not z_loss and softcap is None and memory_budget is None
    few = _against_size(input, linear_weight) if plain and on_cpu is None and backend == "auto" else None
    against = {
        "triton": unusual or double or why_no_triton(input.device),
        "cpu": unusual or on_cpu or few,
        "torch": None if plain else extras,
    }
    return choose(NAME, backend, REASONS, against)


def _against_size(input: Tensor, linear_weight: Tensor) -> str | None:
    rows = math.prod(input.shape[:-1])
    return pays.against(NAME, logits=rows * linear_weight.shape[0], rows=rows)


def logits_dtype(input: Tensor) -> torch.dtype:
    """In which ``torch.nn.functional.linear`` would give the logits: autocast's dtype, or the input's."""
    device = input.device.type
    if autocasts(device) and input.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return input.dtype


def _check_products(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> None:
    require_dtype(NAME, "input", input)
    require_dtype(NAME, "linear_weight", linear_weight)
    if linear_weight.dim() < 2:
        refuse(NAME, "linear_weight", shape_text(linear_weight), "(classes, features)")
    if linear_weight.shape[0] == 0:
        refuse(NAME, "linear_weight", shape_text(linear_weight), "at least one class")
    features = linear_weight.shape[-1]
    if input.dim() == 0 or input.shape[-1] != features:
        refuse(NAME, "input", shape_text(input), f"(..., {features}) for linear_weight {shape_text(linear_weight)}")
    if linear_weight.dim() > 2 and input.dim() != 2:
        refuse(NAME, "input", shape_text(input), "(batch, features) where linear_weight has more than two dimensions")
    mixed = autocasts(input.device.type) and input.dtype != torch.float64
    for name, tensor in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if tensor is None or tensor.dtype == input.dtype:
            continue
        if not mixed or tensor.dtype == torch.float64 or not tensor.is_floating_point():
            refuse(NAME, name, f"of dtype {dtype_text(tensor.dtype)}", f"{dtype_text(input.dtype)}, as input is")
    if linear_bias is not None and linear_bias.shape != linear_weight.shape[:-1]:
        refuse(NAME, "linear_bias", shape_text(linear_bias), f"{tuple(linear_weight.shape[:-1])}")


def _check_target(input: Tensor, linear_weight: Tensor, target: Tensor, ignore_index: int | None) -> None:
    batch, positions = tuple(input.shape[:-1]), tuple(linear_weight.shape[1:-1])
    expected = (*batch, *positions)
    if target.is_floating_point():
        expected = (*batch, linear_weight.shape[0], *positions)
        if ignore_index is not None:
            refuse(NAME, "ignore_index", ignore_index, "None if target contains probabilities")
    elif target.dtype not in (torch.int64, torch.uint8):
        refuse(NAME, "target", f"of dtype {dtype_text(target.dtype)}", "int64 or uint8, or probabilities")
    if tuple(target.shape) != expected:
        shapes = f"input {shape_text(input)} and linear_weight {shape_text(linear_weight)}"
        refuse(NAME, "target", shape_text(target), f"{expected} for {shapes}")
