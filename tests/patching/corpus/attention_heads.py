# ruff: noqa: N806 -- the names and the steps are those of the code that is imitated
"""Attention with heads folded, left out, grouped, or of two lengths."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.patching.corpus.attention_base import HEADS, WIDTH, Projections, spelling, two_lengths


class FoldedThreeDimensions(Projections):
    """[batch · heads, tokens, size], matmul and a mask without a batch."""

    def forward(self, x):
        B, T, C = x.shape
        H, D = self.num_heads, self.head_dim
        q = self.q_proj(x).view(B, T, H, D).transpose(1, 2).contiguous().view(B * H, T, D)
        k = self.k_proj(x).view(B, T, H, D).transpose(1, 2).contiguous().view(B * H, T, D)
        v = self.v_proj(x).view(B, T, H, D).transpose(1, 2).contiguous().view(B * H, T, D)
        q = q / (C ** (1 / 4))
        k = k / (C ** (1 / 4))
        dot = torch.bmm(q, k.transpose(1, 2))
        assert dot.size() == (B * H, T, T)
        indices = torch.triu_indices(T, T, offset=1)  # mask out the upper half of the dot matrix
        dot[..., indices[0], indices[1]] = float("-inf")
        dot = F.softmax(dot, dim=2)
        out = torch.bmm(dot, v).view(B, H, T, D)
        return self.out_proj(out.transpose(1, 2).contiguous().view(B, T, H * D))


class SingleHead(nn.Module):
    """[batch, tokens, size] without an axis for heads."""

    def __init__(self, dim=WIDTH):
        super().__init__()
        self.to_q = nn.Linear(dim, 40, bias=False)
        self.to_k = nn.Linear(dim, 40, bias=False)
        self.to_v = nn.Linear(dim, 32, bias=False)
        self.proj = nn.Linear(32, dim)
        self.register_buffer("mask", torch.ones(64, 64).tril())

    def forward(self, x):
        n = x.shape[1]
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        attn = q @ k.mT * k.shape[-1] ** -0.5
        attn = attn.masked_fill(self.mask[:n, :n].logical_not(), -torch.inf)
        attn = attn.softmax(-1)
        return self.proj(attn @ v)


class Head(nn.Module):
    """one head of self-attention"""

    def __init__(self, n_embd, head_size, block_size, dropout):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        B, T, C = x.shape  # noqa: RUF059
        k = self.key(x)  # (B,T,hs)
        q = self.query(x)  # (B,T,hs)
        # compute attention scores ("affinities")
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5  # (B, T, hs) @ (B, hs, T) -> (B, T, T)
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))  # (B, T, T)
        wei = F.softmax(wei, dim=-1)  # (B, T, T)
        wei = self.dropout(wei)
        # perform the weighted aggregation of the values
        v = self.value(x)  # (B,T,hs)
        out = wei @ v  # (B, T, T) @ (B, T, hs) -> (B, T, hs)
        return out  # noqa: RET504


class ListOfHeads(nn.Module):
    """multiple heads of self-attention in parallel"""

    def __init__(self, num_heads=HEADS, n_embd=WIDTH, block_size=32, dropout=0.1):
        super().__init__()
        head_size = n_embd // num_heads
        self.heads = nn.ModuleList([Head(n_embd, head_size, block_size, dropout) for _ in range(num_heads)])
        self.proj = nn.Linear(head_size * num_heads, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        out = torch.cat([h(x) for h in self.heads], dim=-1)
        return self.dropout(self.proj(out))


class CrossAttention(Projections):
    """Queries of one sequence, keys and values of another that is longer."""

    def forward(self, x, context):
        B, T, C = x.shape
        S = context.size(1)
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(context).view(B, S, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(context).view(B, S, self.num_heads, self.head_dim).transpose(1, 2)
        attn = torch.matmul(q, k.transpose(-2, -1)) * self.scale
        attn = torch.softmax(attn, dim=-1)
        attn = F.dropout(attn, p=self.dropout, training=self.training)
        out = torch.matmul(attn, v).transpose(1, 2).reshape(B, T, C)
        return self.out_proj(out)


class CrossAttentionPackedContext(nn.Module):
    """Keys and values of one projection of the context; a latent learns to ask."""

    def __init__(self, dim=WIDTH, heads=HEADS, dim_head=12, latents=7):
        super().__init__()
        inner = dim_head * heads
        self.heads, self.scale = heads, dim_head**-0.5
        self.latents = nn.Parameter(torch.randn(latents, dim))
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(dim, inner * 2, bias=False)
        self.to_out = nn.Linear(inner, dim)

    def forward(self, context):
        b, h = context.shape[0], self.heads
        x = self.latents[None].expand(b, -1, -1)
        q = self.to_q(x)
        k, v = self.to_kv(context).chunk(2, dim=-1)

        # b n (h d) -> (b h) n d
        q, k, v = map(  # noqa: C417
            lambda t: t.reshape(b, -1, h, t.shape[-1] // h).transpose(1, 2).flatten(0, 1),
            (q, k, v),
        )
        sim = torch.einsum("b i d, b j d -> b i j", q, k) * self.scale
        attn = sim.softmax(dim=-1)
        out = torch.einsum("b i j, b j d -> b i d", attn, v)
        out = out.reshape(b, h, -1, out.shape[-1]).transpose(1, 2).flatten(2)
        return self.to_out(out)


class Grouped(nn.Module):
    """6 query heads, 3 key heads, 8 features each; the sizes only."""

    def __init__(self, dim=WIDTH, n_heads=6, n_kv_heads=3):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.n_rep = n_heads // n_kv_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)


class GroupedRepeatInterleave(Grouped):
    def forward(self, x):
        B, T, C = x.shape
        q = self.wq(x).view(B, T, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(B, T, self.n_kv_heads, self.head_dim).transpose(1, 2)

        k = k.repeat_interleave(self.n_rep, dim=1)
        v = v.repeat_interleave(self.n_rep, dim=1)

        att = (q @ k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        mask = torch.tril(torch.ones(T, T, dtype=torch.bool, device=x.device))
        att = att.masked_fill(~mask, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.wo((att @ v).transpose(1, 2).contiguous().view(B, T, C))


def repeat_kv(x, n_rep):
    """torch.repeat_interleave(x, dim=2, repeats=n_rep)"""
    bs, slen, n_kv_heads, head_dim = x.shape
    if n_rep == 1:
        return x
    return (
        x[:, :, :, None, :]
        .expand(bs, slen, n_kv_heads, n_rep, head_dim)
        .reshape(bs, slen, n_kv_heads * n_rep, head_dim)
    )


class GroupedExpand(Grouped):
    def forward(self, x, mask=None):
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.wq(x), self.wk(x), self.wv(x)

        xq = xq.view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = xk.view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xv = xv.view(bsz, seqlen, self.n_kv_heads, self.head_dim)

        # repeat k/v heads if n_kv_heads < n_heads
        keys = repeat_kv(xk, self.n_rep)
        values = repeat_kv(xv, self.n_rep)

        xq = xq.transpose(1, 2)
        keys = keys.transpose(1, 2)
        values = values.transpose(1, 2)
        scores = torch.matmul(xq, keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores + mask
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, values)
        output = output.transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.wo(output)


class GroupedFiveDimensions(Grouped):
    """Nothing is repeated: the group is an axis of its own, and einsum broadcasts over it."""

    def forward(self, x):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_kv_heads, self.n_rep, self.head_dim)
        k = self.wk(x).view(B, T, self.n_kv_heads, self.head_dim)
        v = self.wv(x).view(B, T, self.n_kv_heads, self.head_dim)
        qk = torch.einsum("bqhmd,bkhd->bhmqk", q, k) * self.head_dim**-0.5
        qk = qk + torch.triu(qk.new_full((T, T), -float("inf")), diagonal=1)
        w = torch.softmax(qk, dim=-1)
        attn = torch.einsum("bhmqk,bkhd->bqhmd", w, v)
        return self.wo(attn.reshape(B, T, -1))


class MultiQuery(nn.Module):
    """One key head for all query heads, by broadcasting."""

    def __init__(self, dim=WIDTH, heads=HEADS):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * self.head_dim)
        self.o = nn.Linear(dim, dim)

    def forward(self, x):
        B, T, C = x.shape
        q = self.q(x).view(B, T, self.heads, self.head_dim).transpose(1, 2)
        k, v = self.kv(x).split(self.head_dim, dim=-1)
        k, v = k.unsqueeze(1), v.unsqueeze(1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        return self.o((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(B, T, C))


def _with_additive():
    x = torch.randn(2, 20, WIDTH)
    return {"x": x, "mask": torch.full((1, 1, 20, 20), float("-inf")).triu(diagonal=1)}


ENTRIES = [
    spelling("heads folded into the batch, masked by indices", FoldedThreeDimensions),
    spelling("a single head", SingleHead),
    spelling("a list of single heads", ListOfHeads, tuple((f"heads.{i}", "attention") for i in range(HEADS))),
    spelling("cross-attention", CrossAttention, batch=two_lengths),
    spelling("cross-attention of latents, folded", CrossAttentionPackedContext),
    spelling("grouped heads by repeat_interleave", GroupedRepeatInterleave),
    spelling("grouped heads by expand, mask", GroupedExpand, batch=_with_additive),
    spelling("grouped heads by expand, no mask", GroupedExpand),
    spelling("grouped heads as an axis", GroupedFiveDimensions),
    spelling("one key head for all", MultiQuery),
]
