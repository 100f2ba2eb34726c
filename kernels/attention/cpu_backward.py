"""Attention's backward on the CPU: the probabilities of a block again from the logsumexp, then its share of gradients.

Method: Dao, Fu, Ermon, Rudra and Ré, FlashAttention (arXiv:2205.14135), algorithm 4. With do the gradient of the output
o, D_i = Σ do_i o_i (which dropout leaves true) and z the dropout's factors:

    dv = (z p)ᵀ do        ds = p (z (do vᵀ) - D)        dbias = ds        dq = scale · ds k        dk = scale · dsᵀ q

where ds is multiplied by 1 - tanh² before dq and dk, with a soft-cap.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.attention.cpu_blocks import Block, BlockWork, bias_part, grouped_bias, heads_of, rows_of
from gradscope.kernels.attention.dropout import zero_dropped
from gradscope.kernels.attention.layout import empty_as
from gradscope.kernels.attention.options import AttentionOptions


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    options: AttentionOptions,
    seed: Tensor | None,
    wants_bias_grad: bool,
    *,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and, where wanted, of the bias.

    Args:
        grad_out: as ``out``, any strides.
        out, logsumexp: what forward returned for the same arguments.
        into: where to write the gradients of q, k and v, of their shapes and dtype, any strides: views of one buffer,
            say. None allocates.

    Returns:
        dq, dk and dv in their dtypes, laid out as q, k and v; dbias of the bias's shape and dtype.
    """
    dq, dk, dv = into or tuple(empty_as(x, *x.shape[1:]) for x in (q, k, v))
    work = BlockWork(q, k, bias, options, seed)
    bias_sum = grouped_sum = None
    if wants_bias_grad and bias is not None and bias.dtype != torch.bool:
        bias_sum = torch.zeros(bias.shape, dtype=work.dtype, device=bias.device)
        grouped_sum = grouped_bias(bias_sum, work.kv_heads)
    if logsumexp.numel() and k.shape[2]:
        sides = tuple(x.unflatten(1, (work.kv_heads, work.repeats)) for x in (q, grad_out, out, logsumexp))
        rows_into = dq.unflatten(1, (work.kv_heads, work.repeats))
        for batch, heads in work.groups():
            _group(work, batch, heads, sides, k, v, rows_into, dk, dv, grouped_sum)
    else:
        for gradient in (dq, dk, dv):
            gradient.zero_()
    return dq, dk, dv, None if bias is None or bias_sum is None else bias_sum.to(bias.dtype)


def _group(
    work: BlockWork,
    batch: slice,
    heads: slice,
    sides: tuple[Tensor, ...],
    k: Tensor,
    v: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    bias_sum: Tensor | None,
) -> None:
    """The gradients of some key heads and of the query heads that read them."""
    keys, values = (heads_of(x, batch, heads, work.dtype) for x in (k, v))
    key_sum, value_sum = torch.zeros_like(keys), torch.zeros_like(values)
    for block in work.query_blocks(batch, heads):
        queries, grads, outs, logsums = (rows_of(x, block, work.dtype) for x in sides)
        queries = queries * work.options.scale
        dots = (grads * outs).sum(2, keepdim=True)
        if work.options.dropout_p > 0:
            grads = grads * work.options.keep_scale()
        # A row that sees no key has the logsumexp -inf; from +inf all its probabilities come out 0.
        logsums = logsums.masked_fill(torch.isneginf(logsums), torch.inf)[..., None]
        row_sum = torch.zeros_like(queries)
        for part in work.key_blocks(block):
            own = part.keys
            slopes, weights = _slopes(work, part, queries, grads, dots, logsums, keys[:, own], values[:, own], bias_sum)
            value_sum[:, own].baddbmm_(weights.transpose(1, 2), grads)
            key_sum[:, own].baddbmm_(slopes.transpose(1, 2), queries)
            row_sum.baddbmm_(slopes, keys[:, own])
        place = (block.batch, block.heads, slice(None), block.queries)
        dq[place] = row_sum.mul_(work.options.scale).view(dq[place].shape)
    dk[batch, heads] = key_sum.view(dk[batch, heads].shape)
    dv[batch, heads] = value_sum.view(dv[batch, heads].shape)


def _slopes(
    work: BlockWork,
    block: Block,
    queries: Tensor,
    grads: Tensor,
    dots: Tensor,
    logsums: Tensor,
    keys: Tensor,
    values: Tensor,
    bias_sum: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The gradient of a block of scaled q kᵀ [group, row, key], and the weights that values were summed with.

    Adds the gradient of the bias to ``bias_sum``. Both results are scratch memory.
    """
    shape = (queries.shape[0], queries.shape[1], keys.shape[1])
    tanh = None if work.options.softcap is None else work.scratch("tanh", shape)
    weights = work.scores(queries, keys, block, tanh).sub_(logsums).exp_()
    slopes = work.scratch("slopes", shape)
    if work.options.dropout_p > 0:
        used, kept = work.drop(weights, block, "slopes", work.scratch("used", shape))
        torch.bmm(grads, values.transpose(1, 2), out=slopes)
        zero_dropped(slopes, kept, slopes)
    else:
        used = weights
        torch.bmm(grads, values.transpose(1, 2), out=slopes)
    slopes.sub_(dots).mul_(weights)
    if bias_sum is not None:
        into = bias_part(bias_sum, block)
        into += slopes.view(work.shape(block)).sum_to_size(into.shape)
    if tanh is not None:
        slopes.mul_(tanh.square_().neg_().add_(1))
    return slopes, used
