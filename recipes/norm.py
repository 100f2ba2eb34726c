"""Normalisation, alone or after dropout and the addition to a residual stream."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gradscope.kernels import pays
from gradscope.kernels.check import refuse
from gradscope.kernels.choice import BackendChoice, choose, explained_by
from gradscope.kernels.norm.cpu import SUMMED
from gradscope.kernels.norm.triton_launch import LARGEST
from gradscope.recipes.norm_added import AddLayerNorm, AddRMSNorm, add_layer_norm, add_rms_norm
from gradscope.recipes.norm_checks import (
    applied,
    check,
    composed,
    default_eps,
    is_apart,
    of_length,
    of_one_dtype,
    why_no_number,
    why_not_cpu,
)
from gradscope.recipes.norm_function import LayerNorm, RMSNorm
from gradscope.recipes.recipe import Recipe

__all__ = ["ABOUT", "AddLayerNorm", "AddRMSNorm", "add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]

ABOUT = Recipe(
    name="norm",
    title="RMS and layer normalization, alone or after dropout and a residual add",
    functions=("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"),
    modules=("AddRMSNorm", "AddLayerNorm"),
    replaces=(
        "F.rms_norm(x, ...) on a CPU; x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight",
        "F.normalize(x, dim=-1) * x.shape[-1] ** 0.5 * weight",
        "residual = residual + F.dropout(x, p); F.layer_norm(residual, ...), or F.rms_norm",
    ),
    saves=(
        "The dropout mask; on a GPU, the extra passes over the sum between the three operations; "
        "on a CPU, where torch runs RMS norm unfused, most of its time and memory."
    ),
    limits=(
        "layer_norm alone is torch's kernel on every device; so is rms_norm alone on a GPU and in compiled graphs.",
        "layer_norm with exact=True takes longer than torch's own: it replaces an unfused norm.",
        "Second derivatives are not supported.",
        f"On a GPU, rows of up to {LARGEST} features; float64 falls back to torch.",
        "On a CPU, add_layer_norm uses torch's kernel and saves only the mask.",
    ),
    backends=(("triton", "add_* on a GPU"), ("cpu", "a CPU"), ("torch", "any device")),
    sources=(
        "B. Zhang and R. Sennrich, Root Mean Square Layer Normalization, 2019, arXiv:1910.07467",
        "J. Ba et al., Layer Normalization, 2016, arXiv:1607.06450",
        "T. Dao, flash-attention: dropout, residual addition and normalisation in one kernel",
    ),
)

_LAYER_REASONS = {
    "cpu": f"torch's kernel, {SUMMED} rows at a time: a float32 sum over thousands of rows is inexact",
    "torch": "torch.nn.functional.layer_norm reads and writes once",
}
_AS_EXACT = "torch's sums over the rows are exact enough: exact=True is for higher accuracy"

_REASONS = {
    "cpu": "a few rows at a time in the cache; torch runs it unfused on a CPU",
    "torch": "torch.nn.functional.rms_norm",
}


def _explain_rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | Tensor | None = None,
    *,
    promote: bool = False,
    least: float | Tensor | None = None,
    backend: str = "auto",
) -> BackendChoice:
    """What :func:`rms_norm` would do with these arguments, and why."""
    check("rms_norm", input, normalized_shape, weight=None if is_apart(promote, input.dtype, weight) else weight)
    autocast = "autocast chooses the dtype" if torch.is_autocast_enabled(input.device.type) else None
    if least is not None and eps != 0:
        refuse("rms_norm", "eps", eps, "0 with least: rows are divided by their norm then")
    few = pays.against("rms_norm", elements=input.numel()) if backend == "auto" else None
    no_number = why_no_number(eps) or why_no_number(least)
    return choose("rms_norm", backend, _REASONS, {"cpu": no_number or autocast or why_not_cpu(input) or few})


def _plain_rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | Tensor | None = None,
    *,
    promote: bool = False,
    least: float | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    if is_apart(promote, input.dtype, weight):
        return applied(_plain_rms_norm(input, normalized_shape, None, eps, least=least), weight)
    if least is not None:
        return of_length(input, normalized_shape, weight, least)
    if isinstance(eps, Tensor):
        return composed(input, normalized_shape, weight, None, eps, centred=False)
    return functional.rms_norm(input, list(normalized_shape), weight, eps)


@explained_by(_explain_rms_norm, _plain_rms_norm, _REASONS)
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | Tensor | None = None,
    *,
    promote: bool = False,
    least: float | Tensor | None = None,
    backend: str = "auto",
) -> Tensor | None:
    """Compute :func:`torch.nn.functional.rms_norm`: by it on a GPU, without its intermediate results on a CPU.

    Args:
        input: [..., *normalized_shape]; float16, bfloat16, float32 or float64.
        normalized_shape: the trailing dimensions that are normalised together.
        weight: of that shape; of the input's dtype or float32. None for ones.
        eps: added to the mean square; None for that of float32, of float64 for float64 inputs, as torch takes it.
            A tensor, of one number or one for each feature, gets a gradient.
        promote: a weight of another dtype promotes the result, as in plain operations: bfloat16 by float32 is float32.
        least: with eps=0, rows are divided by a length of no less than this, and of ``F.normalize(x, dim=-1, eps=least)
            * sqrt(n)`` have the gradients too: the form of RMS normalisation that is scaled unit vectors.
        backend: "auto", "cpu" or "torch"; ``rms_norm.explain`` tells what "auto" takes.

    Returns:
        The input's shape, and its dtype unless ``promote``.

    Raises:
        ValueError: a shape, dtype, device or setting does not fit.
    """
    if is_apart(promote, input.dtype, weight):
        normal = rms_norm(input, normalized_shape, None, eps, least=least, backend=backend)  # type: ignore[arg-type]
        return applied(normal, weight)
    choice = _explain_rms_norm(input, normalized_shape, weight, eps, least=least, backend=backend)
    if choice.backend == "torch" or isinstance(eps, Tensor) or isinstance(least, Tensor):
        return None
    rows = input.reshape(-1, math.prod(normalized_shape))
    flat = None if weight is None else weight.reshape(-1)
    most = math.sqrt(rows.shape[1]) / least if least is not None and least > 0 else math.inf
    return RMSNorm.apply(rows, flat, default_eps(input, None, eps), most).view(input.shape)  # type: ignore[no-untyped-call]


def _explain_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | Tensor = 1e-5,
    *,
    exact: bool = False,
    promote: bool = False,
    backend: str = "auto",
) -> BackendChoice:
    """What :func:`layer_norm` would do with these arguments, and why."""
    if is_apart(promote, input.dtype, weight, bias):
        weight = bias = None
    check("layer_norm", input, normalized_shape, weight=weight, bias=bias)
    autocast = "autocast chooses the dtype" if torch.is_autocast_enabled(input.device.type) else None
    why = why_no_number(eps) or autocast or why_not_cpu(input)
    if why is None and (weight is None or input.dtype != torch.float32):
        why = "there is no long float32 sum"
    if why is None and input.numel() <= SUMMED * math.prod(normalized_shape):
        why = f"up to {SUMMED} rows torch's sums are as exact"
    if why is None and backend == "auto" and not exact:
        why = _AS_EXACT
    return choose("layer_norm", backend, _LAYER_REASONS, {"cpu": why})


def _plain_layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | Tensor = 1e-5,
    *,
    exact: bool = False,
    promote: bool = False,
    backend: str = "auto",
) -> Tensor:
    if is_apart(promote, input.dtype, weight, bias):
        return applied(_plain_layer_norm(input, normalized_shape, None, None, eps), weight, bias)
    if isinstance(eps, Tensor):
        return composed(input, normalized_shape, weight, bias, eps, centred=True)
    return functional.layer_norm(input, list(normalized_shape), *of_one_dtype(input.dtype, weight, bias), eps)


@explained_by(_explain_layer_norm, _plain_layer_norm, _LAYER_REASONS)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | Tensor = 1e-5,
    *,
    exact: bool = False,
    promote: bool = False,
    backend: str = "auto",
) -> Tensor | None:
    """Compute :func:`torch.nn.functional.layer_norm` by itself; on a CPU its weight's gradient can be more exact.

    Torch adds them up row by row in one float32, a norm of plain operations does not. With ``exact=True`` they are as
    exact as those, so that it can stand in the place of such a norm; that takes longer than torch's own.

    Args:
        exact: on a CPU add up the gradients of float32 weight and bias as exactly as plain operations do.
        backend: "auto", "cpu" (what exact=True takes) or "torch"; ``layer_norm.explain`` tells what "auto" takes.

    The other arguments, result and errors are those of :func:`rms_norm`, with a ``bias`` like the weight.
    """
    if is_apart(promote, input.dtype, weight, bias):
        normal = layer_norm(input, normalized_shape, None, None, eps, backend=backend)  # type: ignore[arg-type]
        return applied(normal, weight, bias)
    choice = _explain_layer_norm(input, normalized_shape, weight, bias, eps, exact=exact, backend=backend)
    if choice.backend == "torch" or isinstance(eps, Tensor):
        return None
    rows = input.reshape(-1, math.prod(normalized_shape))
    flat = (None if each is None else each.reshape(-1) for each in (weight, bias))
    return LayerNorm.apply(rows, *flat, eps).view(input.shape)  # type: ignore[no-untyped-call]
