"""Normalisation after dropout and the addition to a residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradscope.kernels import pays
from gradscope.kernels.check import refuse, require_dtype, require_range, require_same_device, shape_text
from gradscope.kernels.choice import BackendChoice, choose, explained_by
from gradscope.kernels.dropout.counter import draw_seed
from gradscope.kernels.norm.triton_launch import LARGEST
from gradscope.kernels.support import why_no_triton
from gradscope.recipes.norm_checks import (
    applied,
    check,
    composed,
    default_eps,
    is_apart,
    of_one_dtype,
    why_no_number,
    why_not_cpu,
)
from gradscope.recipes.norm_function import AddNorm, NormSettings

_REASONS = {
    "triton": "one kernel per pass; the dropout mask is computed from a seed",
    "cpu": "the dropout mask is computed from a seed; the normalized input is recomputed in backward",
    "torch": "three torch operations",
}


def _explain_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | Tensor = 1e-5,
    dropout_p: float = 0.0,
    training: bool = True,
    *,
    promote: bool = False,
    backend: str = "auto",
) -> BackendChoice:
    """What :func:`add_layer_norm` would do with these arguments, and why."""
    if _is_apart(promote, input, residual, weight, bias):
        weight = bias = None
    return _choose_added("add_layer_norm", input, residual, weight, bias, eps, dropout_p, training, backend)


def _plain_add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | Tensor = 1e-5,
    dropout_p: float = 0.0,
    training: bool = True,
    *,
    promote: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    if _is_apart(promote, input, residual, weight, bias):
        normal, stream = _plain_add_layer_norm(input, residual, None, None, eps, dropout_p, training)
        return applied(normal, weight, bias), stream
    stream = _stream(input, residual, dropout_p, training)
    if isinstance(eps, Tensor):
        return composed(stream, stream.shape[-1:], weight, bias, eps, centred=True), stream
    normal = functional.layer_norm(stream, stream.shape[-1:], *of_one_dtype(stream.dtype, weight, bias), eps)
    return (normal if normal.dtype is stream.dtype else normal.to(stream.dtype)), stream


@explained_by(_explain_add_layer_norm, _plain_add_layer_norm, _REASONS)
def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float | Tensor = 1e-5,
    dropout_p: float = 0.0,
    training: bool = True,
    *,
    promote: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor] | None:
    """``h = residual + dropout(input)``, normalised over the last dimension, and ``h``.

    Dropout keeps a seed, as :func:`gradscope.recipes.dropout.dropout` does. A second derivative raises
    ``RuntimeError``, save with ``backend="torch"``.

    Args:
        input: [..., features]; float16, bfloat16, float32 or float64.
        residual: of the same shape. Another dtype, as that of a float32 stream under autocast, is promoted as torch
            promotes the sum; each gets its gradient in its own.
        weight, bias: [features], of the sum's dtype or float32; None for ones and zeros.
        eps: added to the variance.
        dropout_p: share of the input that is dropped while training, in [0, 1].
        training: without it nothing is dropped.
        promote: a weight or bias of another dtype promotes the normalised sum, as in plain operations.
        backend: "auto", "triton", "cpu" or "torch"; ``add_layer_norm.explain`` tells what "auto" takes.

    Returns:
        The normalised sum, and the sum: the residual of what follows. Both of the input's shape and, unless
        ``promote``, the sum's dtype, also under autocast.

    Raises:
        ValueError: a shape, dtype, device or setting does not fit.
    """
    if _is_apart(promote, input, residual, weight, bias):
        both = add_layer_norm(input, residual, None, None, eps, dropout_p, training, backend=backend)  # type: ignore[arg-type]
        normal, stream = both
        return applied(normal, weight, bias), stream
    choice = _explain_add_layer_norm(input, residual, weight, bias, eps, dropout_p, training, backend=backend)
    if choice.backend == "torch" or isinstance(eps, Tensor):
        return None
    p = dropout_p if training else 0.0
    if choice.backend == "cpu":
        weight, bias = of_one_dtype(torch.promote_types(input.dtype, residual.dtype), weight, bias)
    return _added(input, residual, weight, bias, NormSettings(eps, p, True, choice.backend))


def _explain_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    *,
    promote: bool = False,
    backend: str = "auto",
) -> BackendChoice:
    """What :func:`add_rms_norm` would do with these arguments, and why."""
    weight = None if _is_apart(promote, input, residual, weight) else weight
    return _choose_added("add_rms_norm", input, residual, weight, None, eps, dropout_p, training, backend)


def _plain_add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    *,
    promote: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    if _is_apart(promote, input, residual, weight):
        normal, stream = _plain_add_rms_norm(input, residual, None, eps, dropout_p, training)
        return applied(normal, weight), stream
    stream = _stream(input, residual, dropout_p, training)
    if isinstance(eps, Tensor):
        return composed(stream, stream.shape[-1:], weight, None, eps, centred=False), stream
    if weight is not None and weight.dtype is not stream.dtype:  # torch warns of another dtype
        weight = weight.to(stream.dtype)
    normal = functional.rms_norm(stream, stream.shape[-1:], weight, eps)
    return (normal if normal.dtype is stream.dtype else normal.to(stream.dtype)), stream


@explained_by(_explain_add_rms_norm, _plain_add_rms_norm, _REASONS)
def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | Tensor | None = None,
    dropout_p: float = 0.0,
    training: bool = True,
    *,
    promote: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor] | None:
    """Add and normalise as :func:`add_layer_norm`, by the root of the mean square: without a mean and a bias.

    ``eps`` is added to the mean square; None stands for the dtype's own, as for :func:`rms_norm`.
    """
    if _is_apart(promote, input, residual, weight):
        both = add_rms_norm(input, residual, None, eps, dropout_p, training, backend=backend)  # type: ignore[arg-type]
        normal, stream = both
        return applied(normal, weight), stream
    choice = _explain_add_rms_norm(input, residual, weight, eps, dropout_p, training, backend=backend)
    if choice.backend == "torch" or isinstance(eps, Tensor):
        return None
    p = dropout_p if training else 0.0
    return _added(
        input, residual, weight, None, NormSettings(default_eps(input, residual, eps), p, False, choice.backend)
    )


def _is_apart(promote: bool, input: Tensor, residual: Tensor, *parameters: Tensor | None) -> bool:
    return promote and is_apart(promote, torch.promote_types(input.dtype, residual.dtype), *parameters)


def _stream(input: Tensor, residual: Tensor, p: float, training: bool) -> Tensor:
    """The sum by torch's operations; a call of dropout takes its time also where it drops nothing."""
    return residual + (functional.dropout(input, p, training) if p and training else input)


def _added(
    input: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, settings: NormSettings
) -> tuple[Tensor, Tensor]:
    seed = draw_seed(input.device) if settings.p else None
    output, stream = AddNorm.apply(input, residual, weight, bias, seed, settings)  # type: ignore[no-untyped-call]
    return output, stream


class _AddNormModule(nn.Module):
    """The base of both modules: parameters, settings and dropout."""

    def __init__(
        self,
        features: int,
        eps: float | None,
        dropout_p: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.features, self.eps, self.dropout_p = features, eps, dropout_p
        self.weight = nn.Parameter(torch.ones(features, device=device, dtype=dtype))

    def extra_repr(self) -> str:
        """Size and settings."""
        return f"{self.features}, eps={self.eps}, dropout_p={self.dropout_p}"


class AddRMSNorm(_AddNormModule):
    """:func:`add_rms_norm` as a module that owns the weight; called with input and residual, returns both results."""

    def __init__(
        self,
        features: int,
        eps: float | None = None,
        dropout_p: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, eps, dropout_p, device, dtype)

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised sum, and the sum."""
        return add_rms_norm(input, residual, self.weight, self.eps, self.dropout_p, self.training)


class AddLayerNorm(_AddNormModule):
    """:func:`add_layer_norm` as a module that owns weight and bias."""

    eps: float

    def __init__(
        self,
        features: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(features, eps, dropout_p, device, dtype)
        self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype))

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised sum, and the sum."""
        return add_layer_norm(input, residual, self.weight, self.bias, self.eps, self.dropout_p, self.training)


def _against_size(name: str, input: Tensor, p: float, training: bool) -> str | None:
    drops = " with dropout" if p and training else ""
    return pays.against(f"{name}{drops}", elements=input.numel())


def _choose_added(
    name: str,
    input: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | Tensor | None,
    p: float,
    training: bool,
    backend: str,
) -> BackendChoice:
    if not input.dim():
        refuse(name, "input", "a scalar", "[..., features]")
    require_dtype(name, "input", input)
    require_dtype(name, "residual", residual)
    wide = torch.promote_types(input.dtype, residual.dtype)
    check(name, input, input.shape[-1:], wide, weight=weight, bias=bias)
    if residual.shape != input.shape:
        refuse(name, "residual", shape_text(residual), f"{tuple(input.shape)}, as input")
    require_same_device(name, ("input", input), residual=residual)
    require_range(name, "dropout_p", p, 0.0, 1.0)
    neither = "dropout with p=1 drops the whole input" if p == 1 and training else why_no_number(eps)
    no_triton = neither
    if no_triton is None and wide == torch.float64:
        no_triton = "only the other backends support float64"
    elif input.shape[-1] > LARGEST:
        no_triton = f"a row has {input.shape[-1]} features, and it supports at most {LARGEST}"
    elif not input.numel():
        no_triton = "there is nothing to normalize"
    few = _against_size(name, input, p, training) if backend == "auto" else None
    against = {"triton": no_triton or why_no_triton(input.device), "cpu": neither or why_not_cpu(input) or few}
    return choose(name, backend, _REASONS, against)
