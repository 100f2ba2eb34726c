"""The autograd Functions below recipes/norm.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscope.kernels.dropout import cpu as cpu_dropout
from gradscope.kernels.norm import cpu, triton_launch
from gradscope.kernels.once import first_derivative_only


@dataclass(frozen=True, slots=True)
class NormSettings:
    """Settings of one normalisation."""

    eps: float
    p: float  # share that is dropped
    centred: bool  # layer normalisation; else RMS normalisation
    backend: str  # "cpu" or "triton"


class RMSNorm(torch.autograd.Function):
    """Of rows [rows, features] on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, most: float) -> Tensor:
        ctx.most = most
        output, factor = cpu.rms_forward(x, weight, eps, most)
        ctx.save_for_backward(x, factor, weight)
        return output

    @staticmethod
    @first_derivative_only("rms_norm", 'backend="torch" supports second derivatives')
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, factor, weight = ctx.saved_tensors
        found, of_weight = cpu.rms_backward(upstream, x, factor, weight, ctx.needs_input_grad[1], ctx.most)
        return found, None if of_weight is None else of_weight.to(weight.dtype), None, None


class LayerNorm(torch.autograd.Function):
    """Of rows [rows, features] on the CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        output, mean, factor = torch.native_layer_norm(x, x.shape[1:], weight, bias, eps)
        ctx.save_for_backward(x, mean, factor, weight, bias)
        return output

    @staticmethod
    @first_derivative_only("layer_norm", 'backend="torch" supports second derivatives')
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        return *cpu.layer_backward(upstream, *ctx.saved_tensors), None


class AddNorm(torch.autograd.Function):
    """The normalised sum of input and residual [..., features], and the sum.

    They are made rows in here: without dropout input and residual are given one tensor as their gradient, and a view of
    it for each would not tell autograd that they share it.

    Kept are the sum, which lives on as the residual of what follows, a seed and a number or two for each row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        settings: NormSettings,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        means, shape = None, x.shape
        ctx.dtypes = x.dtype, residual.dtype
        wide = torch.promote_types(*ctx.dtypes)
        x, residual = (each.reshape(-1, shape[-1]).to(wide) for each in (x, residual))
        if settings.backend == "triton":
            output, stream, means, factors = triton_launch.forward(
                x, residual, weight, bias, seed, settings.eps, settings.p, settings.centred
            )
        else:
            stream = x + residual if seed is None else cpu_dropout.dropout(x, seed, settings.p).add_(residual)
            if settings.centred:
                output, means, factors = torch.native_layer_norm(stream, stream.shape[1:], weight, bias, settings.eps)
            else:
                output, factors = cpu.rms_forward(stream, weight, settings.eps)
        output, stream = output.view(shape), stream.view(shape)
        ctx.save_for_backward(stream, means, factors, weight, bias, seed)
        if not any(ctx.needs_input_grad[:2]):  # only the parameters learn, which the sum is not made of
            ctx.mark_non_differentiable(stream)
        ctx.settings = settings
        return output, stream

    @staticmethod
    @first_derivative_only("add_layer_norm or add_rms_norm", 'backend="torch" supports second derivatives')
    def backward(
        ctx: Any, upstream: Tensor | None, passed: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None, None]:
        stream, means, factors, weight, bias, seed = ctx.saved_tensors
        settings: NormSettings = ctx.settings
        shape = stream.shape
        if upstream is None and passed is None:
            return None, None, None, None, None, None
        stream = stream.view(-1, shape[-1])
        # Without an upstream the normalised rows were not used.
        upstream = torch.zeros_like(stream) if upstream is None else upstream.reshape(-1, shape[-1])
        passed = None if passed is None else passed.reshape(-1, shape[-1])
        if settings.backend == "triton":
            found, of_x, of_weight, of_bias = triton_launch.backward(
                upstream,
                passed,
                stream,
                weight,
                seed,
                means,
                factors,
                settings.p,
                settings.centred,
                bias is not None,
            )
        else:
            found, of_weight, of_bias = _on_cpu(ctx, upstream, stream, means, factors, weight, bias)
            if passed is not None:
                found.add_(passed)
            of_x = found if seed is None else cpu_dropout.dropout(found, seed, settings.p)
        found, (first, second) = found.view(shape), ctx.dtypes
        return (
            (found if seed is None else of_x.view(shape)).to(first),
            found.to(second),
            None if weight is None else of_weight.to(weight.dtype),
            None if bias is None else of_bias.to(bias.dtype),
            None,
            None,
        )


def _on_cpu(
    ctx: Any,
    upstream: Tensor,
    stream: Tensor,
    means: Tensor | None,
    factors: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Any, Any]:
    """Gradients through the normalisation; the first is newly made."""
    if means is None:
        return *cpu.rms_backward(upstream, stream, factors, weight, weight is not None), None
    return cpu.layer_backward(upstream, stream, means, factors, weight, bias)
