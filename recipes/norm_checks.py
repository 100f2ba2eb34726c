"""What the functions of recipes/norm.py ask of their arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gradscope.kernels.check import dtype_text, refuse, require_dtype, require_same_device, shape_text


def default_eps(input: Tensor, residual: Tensor | None, eps: float | None) -> float:
    """``eps``, or what torch takes for None of the input, or of its sum with a residual."""
    if eps is not None:
        return eps
    dtype = input.dtype if residual is None else torch.promote_types(input.dtype, residual.dtype)
    return torch.finfo(torch.promote_types(dtype, torch.float32)).eps  # of what torch computes in


def check(
    name: str, input: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None, **parameters: Tensor | None
) -> None:
    """Raise ``ValueError`` unless input, trailing shape and parameters of that shape fit.

    Args:
        dtype: of what is normalised, where it is not the input.
    """
    require_dtype(name, "input", input)
    dtype = input.dtype if dtype is None else dtype
    size = tuple(shape)
    if not size or tuple(input.shape[-len(size) :]) != size:
        refuse(name, "normalized_shape", size, f"the last dimensions of input {shape_text(input)}")
    for argument, tensor in parameters.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != size:
            refuse(name, argument, shape_text(tensor), str(size))
        if tensor.dtype not in (dtype, torch.float32):
            expected = " or ".join(dict.fromkeys((dtype_text(dtype), "float32")))
            refuse(name, argument, f"of dtype {dtype_text(tensor.dtype)}", expected)
    require_same_device(name, ("input", input), **parameters)


def is_apart(promote: bool, dtype: torch.dtype, *parameters: Tensor | None) -> bool:
    """Check that parameters of another dtype meet what is normalised in ``dtype`` in operations that promote it."""
    return promote and any(each is not None and each.dtype != dtype for each in parameters)


def of_one_dtype(dtype: torch.dtype, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Weight and bias as torch's kernel takes them, forward and backward: of what is normalised, or both wider."""
    if all(each is None or each.dtype is dtype for each in (weight, bias)):
        return weight, bias
    wide = torch.promote_types(dtype, torch.float32)
    if weight is None and bias is not None:
        weight = torch.ones_like(bias, dtype=wide)
    return None if weight is None else weight.to(wide), None if bias is None else bias.to(wide)


def applied(normal: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> Tensor:
    """The normalised tensor times weight plus bias, as torch promotes them."""
    normal = normal if weight is None else normal * weight
    return normal if bias is None else normal + bias


def why_not_cpu(input: Tensor) -> str | None:
    """Why the path for the CPU cannot be taken, in words; None where it can."""
    if input.device.type != "cpu":
        return f"the tensors are on {input.device}"
    if torch.compiler.is_compiling():
        return "inside a compiled graph the compiler fuses it"
    if not input.numel():
        return "there is nothing to normalize"
    return None


def why_no_number(eps: float | Tensor | None) -> str | None:
    """Why no kernel can be taken for this ``eps``; None where one can."""
    return "eps is a tensor, which may require a gradient" if isinstance(eps, Tensor) else None


def composed(
    input: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: Tensor,
    *,
    centred: bool,
) -> Tensor:
    """Return the norm made of plain operations, for an ``eps`` that may want a gradient, which torch's do not take."""
    last = tuple(range(-len(shape), 0))
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    if centred:
        wide = wide - wide.mean(last, keepdim=True)
    normal = wide * torch.rsqrt(wide.square().mean(last, keepdim=True) + eps)
    normal = normal.to(input.dtype)
    normal = normal if weight is None else normal * weight
    return (normal if bias is None else normal + bias).to(input.dtype)


def of_length(input: Tensor, shape: Sequence[int], weight: Tensor | None, least: float | Tensor) -> Tensor:
    """Return rows over their length, or ``least`` where they are shorter, times the root of their size and weight."""
    rows = input.flatten(-len(shape))
    unit = functional.normalize(rows, dim=-1, eps=least)  # type: ignore[arg-type]
    normal = (unit * math.sqrt(rows.shape[-1])).view(input.shape)
    return normal if weight is None else (normal * weight).to(normal.dtype)
