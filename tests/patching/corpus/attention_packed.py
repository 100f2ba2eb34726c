# ruff: noqa: N806 -- the names and the steps are those of the code that is imitated
"""Attention behind one projection of q, k and v: packed_attention where the chain stands in one forward."""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.patching.corpus.attention_base import HEADS, WIDTH, Packed, spelling

_PACKED = (("", "packed_attention"),)


class SplitByHand(Packed):
    def __init__(self):
        super().__init__()
        self.attn_dropout = nn.Dropout(self.dropout)
        self.resid_dropout = nn.Dropout(self.dropout)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x):
        B, T, C = x.size()  # batch size, sequence length, embedding dimensionality (n_embd)

        # calculate query, key, values for all heads in batch and move head forward to be the batch dim
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)

        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v  # (B, nh, T, T) x (B, nh, T, hs) -> (B, nh, T, hs)
        y = y.transpose(1, 2).contiguous().view(B, T, C)  # re-assemble all head outputs side by side

        # output projection
        y = self.resid_dropout(self.c_proj(y))
        return y  # noqa: RET504


class SplitThenSdpa(Packed):
    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None, dropout_p=self.dropout if self.training else 0, is_causal=True
        )
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


class ChunkAndMap(nn.Module):
    """chunk, then a lambda over the three."""

    def __init__(self, dim=WIDTH, heads=HEADS, dim_head=16, dropout=0.1):
        super().__init__()
        inner_dim = dim_head * heads
        self.heads = heads
        self.scale = dim_head**-0.5
        self.norm = nn.LayerNorm(dim)
        self.attend = nn.Softmax(dim=-1)
        self.dropout = nn.Dropout(dropout)
        self.to_qkv = nn.Linear(dim, inner_dim * 3, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, dim), nn.Dropout(dropout))

    def forward(self, x):
        b, n, _ = x.shape
        x = self.norm(x)

        qkv = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = map(lambda t: t.reshape(b, n, self.heads, -1).transpose(1, 2), qkv)  # noqa: C417

        dots = torch.matmul(q, k.transpose(-1, -2)) * self.scale

        attn = self.attend(dots)
        attn = self.dropout(attn)

        out = torch.matmul(attn, v)
        out = out.transpose(1, 2).reshape(b, n, -1)
        return self.to_out(out)


class ReshapePermuteUnbind(nn.Module):
    def __init__(self, dim=WIDTH, num_heads=HEADS, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=True)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q = q * self.scale
        attn = q @ k.transpose(-2, -1)
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = attn @ v
        x = x.transpose(1, 2).reshape(B, N, C)
        x = self.proj(x)
        x = self.proj_drop(x)
        return x  # noqa: RET504


class ReshapePermuteIndex(ReshapePermuteUnbind):
    """qkv[0], qkv[1], qkv[2]: torchscript cannot use a tensor as a tuple."""

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]  # make torchscript happy (cannot use tensor as tuple)

        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)

        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(x))


class ViewPermuteIterate(Packed):
    """A tensor taken apart by tuple assignment."""

    def __init__(self):
        super().__init__()
        self.register_buffer("future", torch.ones(32, 32, dtype=torch.bool).triu(1))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.c_attn(x).view(b, t, 3, self.n_head, c // self.n_head).permute(2, 0, 3, 1, 4)
        att = q @ k.transpose(-2, -1) / math.sqrt(c // self.n_head)
        att = att.masked_fill(self.future[:t, :t], float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class UnbindEinsum(Packed):
    """Heads on axis 2 throughout; the merge is einsum's output and a flatten."""

    def forward(self, x):
        qkv = self.c_attn(x).unflatten(-1, (3, self.n_head, -1))
        q, k, v = qkv.unbind(dim=2)
        softmax_scale = 1.0 / math.sqrt(q.shape[-1])
        scores = torch.einsum("bthd,bshd->bhts", q, k * softmax_scale)
        seqlen = x.shape[1]
        # "triu_tril_cuda_template" not implemented for 'BFloat16': so we have to construct the mask in float
        causal_mask = torch.triu(torch.full((seqlen, seqlen), -10000.0, device=scores.device), 1)
        # adding is faster than masked_fill_ (idk why, just better kernel I guess)
        scores = scores + causal_mask.to(dtype=scores.dtype)
        attention = torch.softmax(scores, dim=-1, dtype=v.dtype)
        attention_drop = F.dropout(attention, self.dropout if self.training else 0.0)
        output = torch.einsum("bhts,bshd->bthd", attention_drop, v)
        return self.c_proj(output.flatten(-2))


class SlicesOfTheProjection(Packed):
    def forward(self, x):
        B, T, C = x.shape
        qkv = self.c_attn(x)
        q = qkv[:, :, :C]
        k = qkv[:, :, C : 2 * C]
        v = qkv[..., 2 * C :]
        q, k, v = [t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v)]
        y = (q @ k.transpose(-2, -1) * (C // self.n_head) ** -0.5).softmax(-1) @ v
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Conv1D(nn.Module):
    """A linear layer whose weight is [inputs, outputs], as the first GPTs have it."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.1)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        size_out = (*x.size()[:-1], self.nf)
        x = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return x.view(size_out)


class TransposedProjection(nn.Module):
    """What projects is not nn.Linear; the key comes transposed out of its permute."""

    def __init__(self, nx=WIDTH, n_head=HEADS, n_ctx=32):
        super().__init__()
        self.split_size, self.n_head = nx, n_head
        self.register_buffer("bias", torch.tril(torch.ones(n_ctx, n_ctx)).view(1, 1, n_ctx, n_ctx))
        self.c_attn = Conv1D(nx * 3, nx)
        self.c_proj = Conv1D(nx, nx)

    def forward(self, x):
        x = self.c_attn(x)
        query, key, value = x.split(self.split_size, dim=2)
        new_x_shape = (*query.size()[:-1], self.n_head, query.size(-1) // self.n_head)
        query = query.view(new_x_shape).permute(0, 2, 1, 3)
        key = key.view(new_x_shape).permute(0, 2, 3, 1)  # (batch, head, head_features, seq_length)
        value = value.view(new_x_shape).permute(0, 2, 1, 3)
        w = torch.matmul(query, key) / math.sqrt(value.size(-1))
        nd, ns = w.size(-2), w.size(-1)
        w = w.masked_fill(self.bias[:, :, ns - nd : ns, :ns] == 0, -1e10)
        a = torch.matmul(w.softmax(dim=-1), value)
        a = a.permute(0, 2, 1, 3).contiguous()
        a = a.view(*a.size()[:-2], a.size(-2) * a.size(-1))
        return self.c_proj(a)


class TorchSplitSdpa(nn.Module):
    """6 query heads and 3 key heads in one projection, SDPA with enable_gqa."""

    def __init__(self, dim=WIDTH, n_head=6, n_local_heads=3):
        super().__init__()
        self.dim, self.n_head, self.n_local_heads, self.head_dim = dim, n_head, n_local_heads, dim // n_head
        self.wqkv = nn.Linear(dim, (n_head + 2 * n_local_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x):
        bsz, seqlen, _ = x.shape
        kv_size = self.n_local_heads * self.head_dim
        q, k, v = torch.split(self.wqkv(x), [self.dim, kv_size, kv_size], dim=-1)
        q = q.view(bsz, seqlen, self.n_head, self.head_dim)
        k = k.view(bsz, seqlen, self.n_local_heads, self.head_dim)
        v = v.view(bsz, seqlen, self.n_local_heads, self.head_dim)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        y = y.transpose(1, 2).contiguous().view(bsz, seqlen, self.dim)
        return self.wo(y)


class HeadsBeforeParts(Packed):
    """[heads, 3, size] in the projection: not packed as the recipe has it, so attention alone."""

    def forward(self, x):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, self.n_head, 3 * C // self.n_head).permute(0, 2, 1, 3)
        q, k, v = qkv.chunk(3, dim=-1)
        d_k = q.size()[-1]
        attn_logits = torch.matmul(q, k.transpose(-2, -1))
        attn_logits = attn_logits / math.sqrt(d_k)
        attention = F.softmax(attn_logits, dim=-1)
        values = torch.matmul(attention, v)
        values = values.permute(0, 2, 1, 3)  # [Batch, SeqLen, Head, Dims]
        values = values.reshape(B, T, C)
        return self.c_proj(values)


class HelpersAround(Packed):
    """The heads are split and merged by methods, so the chain is not in one forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(32, 32, dtype=torch.bool)).view(1, 1, 32, 32))
        self.attn_dropout = nn.Dropout(0.1)

    def _split_heads(self, tensor, num_heads, attn_head_size):
        new_shape = (*tensor.size()[:-1], num_heads, attn_head_size)
        tensor = tensor.view(new_shape)
        return tensor.permute(0, 2, 1, 3)  # (batch, head, seq_length, head_features)

    def _merge_heads(self, tensor, num_heads, attn_head_size):
        tensor = tensor.permute(0, 2, 1, 3).contiguous()
        return tensor.view((*tensor.size()[:-2], num_heads * attn_head_size))

    def _attn(self, query, key, value):
        attn_weights = torch.matmul(query, key.transpose(-1, -2))
        attn_weights = attn_weights / (value.size(-1) ** 0.5)
        causal_mask = self.bias[:, :, : query.size(-2), : key.size(-2)]
        attn_weights = torch.where(causal_mask, attn_weights, torch.finfo(attn_weights.dtype).min)
        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        attn_weights = self.attn_dropout(attn_weights)
        return torch.matmul(attn_weights, value)

    def forward(self, hidden_states):
        query, key, value = self.c_attn(hidden_states).split(self.n_embd, dim=2)
        head_dim = self.n_embd // self.n_head
        query = self._split_heads(query, self.n_head, head_dim)
        key = self._split_heads(key, self.n_head, head_dim)
        value = self._split_heads(value, self.n_head, head_dim)
        attn_output = self._attn(query, key, value)
        attn_output = self._merge_heads(attn_output, self.n_head, head_dim)
        return self.c_proj(attn_output)


ENTRIES = [
    spelling("packed, split", SplitByHand, _PACKED),
    spelling("packed, split, SDPA", SplitThenSdpa, _PACKED),
    spelling("packed, chunk and map", ChunkAndMap, _PACKED),
    spelling("packed, reshape permute unbind", ReshapePermuteUnbind, _PACKED),
    spelling("packed, reshape permute index", ReshapePermuteIndex, _PACKED),
    spelling("packed, view permute iterate", ViewPermuteIterate, _PACKED),
    spelling("packed, unbind einsum", UnbindEinsum, _PACKED),
    spelling("packed, slices", SlicesOfTheProjection, _PACKED),
    spelling("packed, projection by addmm", TransposedProjection, _PACKED),
    spelling("packed, grouped, SDPA", TorchSplitSdpa, _PACKED),
    spelling("packed, heads before parts", HeadsBeforeParts),
    spelling("packed, helpers around", HelpersAround),
]
