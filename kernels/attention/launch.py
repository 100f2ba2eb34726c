"""Forward and backward by our own paths; each is one node of a compiled graph."""

from __future__ import annotations

from torch import Tensor

from gradscope.kernels.attention import cpu_backward, cpu_forward, triton_launch
from gradscope.kernels.attention.layout import empty_as
from gradscope.kernels.attention.options import AttentionOptions, accumulate_dtype
from gradscope.kernels.opaque import opaque


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    alibi: Tensor | None,
    seed: Tensor | None,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    softcap: float | None,
    left: int | None,
    right: int | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    logsumexp = q.new_empty(q.shape[:3], dtype=accumulate_dtype(q.dtype))
    return empty_as(q, q.shape[1], q.shape[2], v.shape[3]), logsumexp


@opaque("attention", _fake_forward)
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    alibi: Tensor | None,
    seed: Tensor | None,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    softcap: float | None,
    left: int | None,
    right: int | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp, as cpu_forward.py has them.

    Args:
        q, k, v, bias, seed: as there.
        alibi, scale, is_causal, dropout_p, softcap: as options.py has them.
        left, right: the window; None is no limit.
        backend: "cpu" or "triton".
    """
    path = triton_launch if backend == "triton" else cpu_forward
    options = AttentionOptions(scale, k.shape[1], is_causal, dropout_p, softcap, (left, right), alibi)
    return path.forward(q, k, v, bias, options, seed)


def _fake_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    alibi: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor | None,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    softcap: float | None,
    left: int | None,
    right: int | None,
    wants_bias_grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (empty_as(x, *x.shape[1:]) for x in (q, k, v))
    return dq, dk, dv, bias.new_empty(bias.shape) if wants_bias_grad and bias is not None else q.new_empty(0)


@opaque("attention_backward", _fake_backward)
def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    alibi: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    seed: Tensor | None,
    scale: float,
    is_causal: bool,
    dropout_p: float,
    softcap: float | None,
    left: int | None,
    right: int | None,
    wants_bias_grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and bias, as cpu_backward.py has them; the last is empty where it is not wanted."""
    path = triton_launch if backend == "triton" else cpu_backward
    options = AttentionOptions(scale, k.shape[1], is_causal, dropout_p, softcap, (left, right), alibi)
    dq, dk, dv, dbias = path.backward(grad_out, q, k, v, bias, out, logsumexp, options, seed, wants_bias_grad)
    return dq, dk, dv, q.new_empty(0) if dbias is None else dbias
