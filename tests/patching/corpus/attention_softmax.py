# ruff: noqa: N806 -- the names and the steps are those of the code that is imitated
"""Attention whose softmax, casts, dropout and helpers are spelled in different ways."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.patching.corpus.attention_base import HEADS, WIDTH, Projections, spelling, with_causal


class SoftmaxModule(Projections):
    def __init__(self):
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)
        self.attn_drop = nn.Dropout(0.1)

    def forward(self, x):
        B, N, C = x.shape
        q = self.q_proj(x).reshape(B, N, self.num_heads, C // self.num_heads).permute(0, 2, 1, 3)
        k = self.k_proj(x).reshape(B, N, self.num_heads, C // self.num_heads).permute(0, 2, 1, 3)
        v = self.v_proj(x).reshape(B, N, self.num_heads, C // self.num_heads).permute(0, 2, 1, 3)
        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        attn = self.softmax(dots)
        attn = self.attn_drop(attn)
        out = torch.matmul(attn, v)
        return self.out_proj(out.transpose(1, 2).reshape(B, N, C))


class SoftmaxDimThree(Projections):
    """A positive dimension, by keyword."""

    def forward(self, x):
        B, N, C = x.shape
        q = self.q_proj(x).reshape(B, N, self.num_heads, C // self.num_heads).permute(0, 2, 1, 3)
        k = self.k_proj(x).reshape(B, N, self.num_heads, C // self.num_heads).permute(0, 2, 1, 3)
        v = self.v_proj(x).reshape(B, N, self.num_heads, C // self.num_heads).permute(0, 2, 1, 3)
        attn = torch.softmax(input=q @ k.permute(0, 1, 3, 2) * self.scale, dim=3)
        return self.out_proj((attn @ v).permute(0, 2, 1, 3).reshape(B, N, C))


class SoftmaxInFloat(Projections):
    """.float() before, .type_as after."""

    def forward(self, x):
        bsz, seqlen, _ = x.shape
        xq, xk, xv = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        xq = xq.view(bsz, seqlen, self.num_heads, self.head_dim)
        xk = xk.view(bsz, seqlen, self.num_heads, self.head_dim)
        xv = xv.view(bsz, seqlen, self.num_heads, self.head_dim)
        xq, xk, xv = xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2)
        scores = torch.matmul(xq, xk.transpose(2, 3)) / math.sqrt(self.head_dim)
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, xv)  # (bs, n_local_heads, seqlen, head_dim)
        return self.out_proj(output.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class SoftmaxDtype(Projections):
    """The tensor's method with a dtype, and .to(v) back; dropout last of all."""

    def forward(self, x):
        bsz, seqlen, _ = x.shape
        q = self.q_proj(x).view(bsz, seqlen, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(bsz, seqlen, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(bsz, seqlen, self.num_heads, self.head_dim).transpose(1, 2)
        p = (q @ k.transpose(-2, -1) * self.scale).softmax(-1, dtype=torch.float32).to(v)
        p = nn.functional.dropout(p, self.dropout, self.training)
        return self.out_proj((p @ v).transpose(1, 2).reshape(bsz, seqlen, -1))


class DropoutModuleFromArgument(Projections):
    """No scale by name: a power of the size, in the middle of an expression over several lines."""

    def __init__(self):
        super().__init__(dropout=0.2)
        self.drop = nn.Dropout(p=self.dropout)

    def forward(self, x):
        B, T, C = x.shape  # noqa: RUF059
        heads = lambda y: y.view(B, T, self.num_heads, self.head_dim).transpose(1, 2)  # noqa: E731
        queries, keys, values = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        weights = self.drop(
            F.softmax(
                (queries @ keys.transpose(-1, -2))  # (B, H, T, T)
                * (self.head_dim ** (-0.5)),
                dim=-1,
            )
        )
        y = weights @ values  # (B, H, T, D)
        y = y.permute(0, 2, 1, 3)
        y = y.flatten(start_dim=2)
        return self.out_proj(y)


def attention(query, key, value, mask=None, dropout=None):
    "Compute 'Scaled Dot Product Attention'"
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = scores.softmax(dim=-1)
    if dropout is not None:
        p_attn = dropout(p_attn)
    return torch.matmul(p_attn, value), p_attn


def clones(module, n):
    "Produce N identical layers."
    return nn.ModuleList([type(module)(module.in_features, module.out_features) for _ in range(n)])


class MultiHeadedAttention(nn.Module):
    """The helper's weights are thrown away."""

    def __init__(self, h=HEADS, d_model=WIDTH, dropout=0.1):
        super().__init__()
        assert d_model % h == 0
        # We assume d_v always equals d_k
        self.d_k = d_model // h
        self.h = h
        self.linears = clones(nn.Linear(d_model, d_model), 4)
        self.dropout = nn.Dropout(p=dropout)

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            # Same mask applied to all h heads.
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)

        # 1) Do all the linear projections in batch from d_model => h x d_k
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]

        # 2) Apply attention on all the projected vectors in batch.
        x, _ = attention(query, key, value, mask=mask, dropout=self.dropout)

        # 3) "Concat" using a view and apply a final linear.
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


class MultiHeadedAttentionKept(MultiHeadedAttention):
    """As first published: the weights stay on the module, for pictures."""

    def __init__(self):
        super().__init__()
        self.attn = None

    def forward(self, query, key, value, mask=None):
        if mask is not None:
            mask = mask.unsqueeze(1)
        nbatches = query.size(0)
        query, key, value = [
            lin(x).view(nbatches, -1, self.h, self.d_k).transpose(1, 2)
            for lin, x in zip(self.linears, (query, key, value), strict=False)
        ]
        x, self.attn = attention(query, key, value, mask=mask, dropout=self.dropout)
        x = x.transpose(1, 2).contiguous().view(nbatches, -1, self.h * self.d_k)
        return self.linears[-1](x)


def _one_for_three():
    batch = with_causal()
    x = batch["x"]
    return x, x, x, batch["mask"].view(1, *batch["mask"].shape)


def _one_for_three_unmasked():
    x = with_causal()["x"]
    return x, x, x


def dot_product_attention(q, k, v):
    """The output alone."""
    weights = F.softmax(q @ k.transpose(-2, -1) / q.size(-1) ** 0.5, dim=-1)
    return weights @ v


class HelperFunction(Projections):
    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        y = dot_product_attention(q, k, v)
        return self.out_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class HelperMethod(Projections):
    """_attn, split_heads and merge_heads as methods."""

    def __init__(self):
        super().__init__()
        self.attn_dropout = nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(40, 40)).view(1, 1, 40, 40))

    def _attn(self, q, k, v):
        w = torch.matmul(q, k)
        w = w / math.sqrt(v.size(-1))
        nd, ns = w.size(-2), w.size(-1)
        mask = self.bias[:, :, ns - nd : ns, :ns]
        w = w.masked_fill(mask == 0, float("-inf"))
        w = nn.functional.softmax(w, dim=-1)
        w = self.attn_dropout(w)
        return torch.matmul(w, v)

    def merge_heads(self, x):
        x = x.permute(0, 2, 1, 3).contiguous()
        new_x_shape = (*x.size()[:-2], x.size(-2) * x.size(-1))
        return x.view(*new_x_shape)

    def split_heads(self, x, k=False):
        new_x_shape = (*x.size()[:-1], self.num_heads, x.size(-1) // self.num_heads)
        x = x.view(*new_x_shape)
        if k:
            return x.permute(0, 2, 3, 1)  # (batch, head, head_features, seq_length)
        return x.permute(0, 2, 1, 3)

    def forward(self, x):
        query = self.split_heads(self.q_proj(x))
        key = self.split_heads(self.k_proj(x), k=True)
        value = self.split_heads(self.v_proj(x))
        a = self._attn(query, key, value)
        a = self.merge_heads(a)
        return self.out_proj(a)


class NestedFunction(Projections):
    """The whole pattern stands in a function inside forward."""

    def forward(self, x):
        B, T, C = x.shape

        def attend(q, k, v):
            scores = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
            return torch.einsum("bhij,bhjd->bhid", scores.softmax(dim=-1), v)

        q, k, v = (
            layer(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(attend(q, k, v).transpose(1, 2).reshape(B, T, C))


class ScaledDotProductAttention(nn.Module):
    """Scaled Dot-Product Attention"""

    def __init__(self, temperature, attn_dropout=0.1):
        super().__init__()
        self.temperature = temperature
        self.dropout = nn.Dropout(attn_dropout)

    def forward(self, q, k, v, mask=None):
        attn = torch.matmul(q / self.temperature, k.transpose(2, 3))

        if mask is not None:
            attn = attn.masked_fill(mask == 0, -1e9)

        attn = self.dropout(F.softmax(attn, dim=-1))
        return torch.matmul(attn, v)


class AttentionAsModule(nn.Module):
    """The pattern is a module of its own."""

    def __init__(self, n_head=HEADS, d_model=WIDTH, d_k=16, d_v=12):
        super().__init__()
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
        self.attention = ScaledDotProductAttention(temperature=d_k**0.5)

    def forward(self, x, mask=None):
        sz_b, length = x.size(0), x.size(1)

        # Separate different heads: b x lq x n x dv
        q = self.w_qs(x).view(sz_b, length, self.n_head, self.d_k)
        k = self.w_ks(x).view(sz_b, length, self.n_head, self.d_k)
        v = self.w_vs(x).view(sz_b, length, self.n_head, self.d_v)

        # Transpose for attention dot product: b x n x lq x dv
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

        if mask is not None:
            mask = mask.unsqueeze(0).unsqueeze(1)  # For head axis broadcasting.

        q = self.attention(q, k, v, mask=mask)
        q = q.transpose(1, 2).contiguous().view(sz_b, length, -1)
        return self.fc(q)


class WeightsOnRequest(Projections):
    """The weights are returned where the caller asks, which this one does not."""

    def forward(self, x, output_attentions=False):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        attention_scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        attention_probs = nn.functional.softmax(attention_scores, dim=-1)
        context = torch.matmul(attention_probs, v)
        context = self.out_proj(context.permute(0, 2, 1, 3).contiguous().view(B, T, C))
        return (context, attention_probs) if output_attentions else (context,)


ENTRIES = [
    spelling("softmax as a module", SoftmaxModule),
    spelling("softmax over dimension 3 by keyword", SoftmaxDimThree),
    spelling("softmax of .float(), .type_as", SoftmaxInFloat),
    spelling("softmax with dtype, .to(v)", SoftmaxDtype),
    spelling("dropout module around several lines", DropoutModuleFromArgument),
    # The helper returns its weights, for other callers of the file: they are computed for those who read them.
    spelling("annotated helper, weights thrown away, causal", MultiHeadedAttention, batch=_one_for_three),
    spelling("annotated helper, weights thrown away, no mask", MultiHeadedAttention, batch=_one_for_three_unmasked),
    spelling("annotated helper, weights kept", MultiHeadedAttentionKept, batch=_one_for_three),
    spelling("helper function", HelperFunction),
    spelling("helper method", HelperMethod),
    spelling("nested function", NestedFunction),
    spelling("module of its own", AttentionAsModule, (("attention", "attention"),), with_causal),
    spelling("weights on request", WeightsOnRequest),
]
