"""Attention over a packed projection, whose gradient is written in place; two nodes of a compiled graph.

The products are those of kernels/attention; here its gradients of q, k and v are views of one buffer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.attention import cpu_backward, cpu_forward, triton_launch
from gradscope.kernels.attention.options import AttentionOptions, accumulate_dtype
from gradscope.kernels.heads import cpu
from gradscope.kernels.heads.layout import merge_heads, qkv_views, split_heads
from gradscope.kernels.opaque import opaque


def _forward_fake(
    qkv: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    heads: int,
    kv_heads: int,
    is_causal: bool,
    dropout_p: float,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    batch, tokens, width = qkv.shape
    size = width // (heads + 2 * kv_heads)
    shape = (0,) if without_logsumexp(qkv, bias, dropout_p, backend) else (batch, heads, tokens)
    logsumexp = qkv.new_empty(shape, dtype=accumulate_dtype(qkv.dtype))
    return qkv.new_empty(batch, tokens, heads * size), logsumexp


@opaque("packed_attention", _forward_fake)
def forward(
    qkv: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    heads: int,
    kv_heads: int,
    is_causal: bool,
    dropout_p: float,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Output with merged heads, and logsumexp.

    Args:
        qkv: [batch, tokens, (heads + 2 · kv heads) · size], any strides.
        bias: boolean or floating, broadcastable to [batch, heads, tokens, tokens].
        seed: one int64 on the device, where there is dropout.
        backend: "cpu" or "triton".

    Returns:
        [batch, tokens, heads · size] in ``qkv``'s dtype and [batch, heads, tokens] in float32 (float64: float64), both
        contiguous. The logsumexp has no elements where backward does without it.
    """
    q, k, v = qkv_views(qkv, heads, kv_heads)
    if without_logsumexp(qkv, bias, dropout_p, backend):
        merged = qkv.new_empty(*qkv.shape[:2], heads * q.shape[3])
        cpu.forward(q, k, v, scale, is_causal, split_heads(merged, heads))
        return merged, qkv.new_empty(0)
    run = triton_launch.forward if backend == "triton" else cpu_forward.forward
    out, logsumexp = run(q, k, v, bias, AttentionOptions(scale, kv_heads, is_causal, dropout_p), seed)
    return merge_heads(out).contiguous(), logsumexp.contiguous()


def _backward_fake(
    grad_out: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    out: Tensor | None,
    logsumexp: Tensor,
    heads: int,
    kv_heads: int,
    is_causal: bool,
    dropout_p: float,
    scale: float,
    backend: str,
    wants_bias: bool,
) -> tuple[Tensor, Tensor]:
    dbias = torch.empty_like(bias) if bias is not None and wants_bias else qkv.new_empty(0)
    return qkv.new_empty(qkv.shape), dbias


@opaque("packed_attention_backward", _backward_fake)
def backward(
    grad_out: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    out: Tensor | None,
    logsumexp: Tensor,
    heads: int,
    kv_heads: int,
    is_causal: bool,
    dropout_p: float,
    scale: float,
    backend: str,
    wants_bias: bool,
) -> tuple[Tensor, Tensor]:
    """Gradient of ``qkv``, contiguous, and of the bias where it is wanted (else of no elements).

    Args:
        grad_out: as ``out``, any strides.
        out, logsumexp: what :func:`forward` returned; no output is needed :func:`without_logsumexp`.
        others: as there.
    """
    packed = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    views, into = qkv_views(qkv, heads, kv_heads), qkv_views(packed, heads, kv_heads)
    if without_logsumexp(qkv, bias, dropout_p, backend):
        cpu.backward(split_heads(grad_out, heads), *views, scale, is_causal, *into)
        return packed, qkv.new_empty(0)
    assert out is not None
    run = triton_launch.backward if backend == "triton" else cpu_backward.backward
    _, _, _, dbias = run(
        split_heads(grad_out, heads),
        *views,
        bias,
        split_heads(out, heads),
        logsumexp,
        AttentionOptions(scale, kv_heads, is_causal, dropout_p),
        seed,
        wants_bias,
        into=into,
    )
    return packed, qkv.new_empty(0) if dbias is None else dbias


def without_logsumexp(qkv: Tensor, bias: Tensor | None, dropout_p: float, backend: str) -> bool:
    """Check that cpu.py computes the attention: its backward needs neither output nor logsumexp."""
    return backend == "cpu" and bias is None and not dropout_p and qkv.dtype in (torch.float32, torch.float64)
