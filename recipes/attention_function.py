"""Attention's autograd Function over our own paths: it saves the output and the logsumexp, and no scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradscope.kernels.attention import sinks as sink
from gradscope.kernels.attention.launch import backward, forward
from gradscope.kernels.once import first_derivative_only


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Arguments of the Function that are no tensors; as kernels/attention/options.py has them."""

    scale: float
    is_causal: bool
    dropout_p: float
    softcap: float | None
    left: int | None
    right: int | None
    backend: str  # "cpu" or "triton"


class AttentionFunction(torch.autograd.Function):
    """Attention of q [batch, heads, queries, size], k and v [batch, kv heads, keys, size], bias, slopes, seed
    and sinks."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        alibi: Tensor | None,
        seed: Tensor | None,
        sinks: Tensor | None,
        settings: AttentionSettings,
    ) -> Tensor:
        out, logsumexp = forward(
            q,
            k,
            v,
            bias,
            alibi,
            seed,
            settings.scale,
            settings.is_causal,
            settings.dropout_p,
            settings.softcap,
            settings.left,
            settings.right,
            settings.backend,
        )
        if sinks is not None:
            out, logsumexp = sink.absorb(out, logsumexp, sinks)
        ctx.save_for_backward(q, k, v, bias, alibi, out, logsumexp, seed, sinks)
        ctx.settings = settings
        return out

    @staticmethod
    @first_derivative_only("attention", 'backend="math" supports second derivatives')
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, alibi, out, logsumexp, seed, sinks = ctx.saved_tensors
        settings: AttentionSettings = ctx.settings
        wants = ctx.needs_input_grad
        dq, dk, dv, dbias = backward(
            grad_out,
            q,
            k,
            v,
            bias,
            alibi,
            out,
            logsumexp,
            seed,
            settings.scale,
            settings.is_causal,
            settings.dropout_p,
            settings.softcap,
            settings.left,
            settings.right,
            wants[3],
            settings.backend,
        )
        grads = (dq, dk, dv, dbias)
        dsinks = sink.gradient(grad_out, out, logsumexp, sinks) if wants[6] else None
        given = (grad if wanted else None for grad, wanted in zip(grads, wants, strict=False))
        return *given, None, None, dsinks, None
