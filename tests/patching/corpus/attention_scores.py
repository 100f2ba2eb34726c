# ruff: noqa: N806 -- the names and the steps are those of the code that is imitated
"""Attention whose scores, scale and product are spelled in different ways."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import einsum, nn

from tests.patching.corpus.attention_base import HEADS, TOKENS, WIDTH, Projections, spelling


class MatmulDivided(Projections):
    def forward(self, x):
        batch_size, seq_len, _ = x.size()
        q = self.q_proj(x).view(batch_size, seq_len, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch_size, seq_len, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch_size, seq_len, self.num_heads, self.head_dim).transpose(1, 2)

        # scaled dot-product
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        attn = F.softmax(scores, dim=-1)
        attn = F.dropout(attn, p=self.dropout, training=self.training)
        context = torch.matmul(attn, v)

        context = context.transpose(1, 2).contiguous().view(batch_size, seq_len, self.embed_dim)
        return self.out_proj(context)


class AtTimesScale(Projections):
    def __init__(self):
        super().__init__()
        self.attn_dropout = nn.Dropout(self.dropout)
        self.register_buffer("tril", torch.tril(torch.ones(32, 32)))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q = q.view(B, T, self.num_heads, -1).transpose(1, 2)
        k = k.view(B, T, self.num_heads, -1).transpose(1, 2)
        v = v.view(B, T, self.num_heads, -1).transpose(1, 2)
        wei = q @ k.transpose(-2, -1) * self.scale  # (B, nh, T, T)
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        wei = self.attn_dropout(wei)
        out = wei @ v
        out = out.transpose(1, 2).reshape(B, T, C)
        return self.out_proj(out)


class EinsumHeadsFirst(nn.Module):
    """Names and layout of the many small vision and protein repositories that use einsum throughout."""

    def __init__(self, dim=WIDTH, heads=HEADS, dim_head=12):
        super().__init__()
        inner_dim = heads * dim_head
        self.heads = heads
        self.scale = dim_head**-0.5
        self.to_q = nn.Linear(dim, inner_dim, bias=False)
        self.to_kv = nn.Linear(dim, inner_dim * 2, bias=False)
        self.to_out = nn.Linear(inner_dim, dim)

    def forward(self, x):
        b, n, _ = x.shape
        h = self.heads
        q = self.to_q(x)
        k, v = self.to_kv(x).chunk(2, dim=-1)
        q, k, v = (t.reshape(b, n, h, -1).permute(0, 2, 1, 3) for t in (q, k, v))

        q = q * self.scale
        sim = einsum("b h i d, b h j d -> b h i j", q, k)

        mask_value = -torch.finfo(sim.dtype).max
        causal_mask = torch.ones((n, n), dtype=torch.bool, device=x.device).triu(1)
        sim = sim.masked_fill(causal_mask, mask_value)

        attn = sim.softmax(dim=-1)

        out = einsum("b h i j, b h j d -> b h i d", attn, v)
        out = out.permute(0, 2, 1, 3).reshape(b, n, -1)
        return self.to_out(out)


class EinsumHeadsLast(nn.Module):
    """Heads stay on axis 2; the scale is the root of the whole width and stands inside the softmax."""

    def __init__(self, embed_size=WIDTH, heads=HEADS):
        super().__init__()
        self.embed_size = embed_size
        self.heads = heads
        self.head_dim = embed_size // heads
        self.values = nn.Linear(embed_size, embed_size)
        self.keys = nn.Linear(embed_size, embed_size)
        self.queries = nn.Linear(embed_size, embed_size)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, values, keys, query, mask):
        # Get number of training examples
        N = query.shape[0]
        value_len, key_len, query_len = values.shape[1], keys.shape[1], query.shape[1]

        values = self.values(values)
        keys = self.keys(keys)
        queries = self.queries(query)

        # Split the embedding into self.heads different pieces
        values = values.reshape(N, value_len, self.heads, self.head_dim)
        keys = keys.reshape(N, key_len, self.heads, self.head_dim)
        queries = queries.reshape(N, query_len, self.heads, self.head_dim)

        # queries: (N, query_len, heads, head_dim), keys: (N, key_len, heads, head_dim)
        energy = torch.einsum("nqhd,nkhd->nhqk", [queries, keys])

        if mask is not None:
            energy = energy.masked_fill(mask == 0, float("-1e20"))

        attention = torch.softmax(energy / (self.embed_size ** (1 / 2)), dim=3)

        out = torch.einsum("nhql,nlhd->nqhd", [attention, values]).reshape(N, query_len, self.heads * self.head_dim)
        return self.fc_out(out)


def _four_arguments():
    x = torch.randn(2, TOKENS, WIDTH)
    return x, x, x, torch.tril(torch.ones(TOKENS, TOKENS)).expand(2, 1, TOKENS, TOKENS)


class EinsumBqhd(Projections):
    def forward(self, x):
        b, t = x.shape[:2]
        q = self.q_proj(x).view(b, t, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(b, t, self.num_heads, self.head_dim)
        v = self.v_proj(x).view(b, t, self.num_heads, self.head_dim)
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * self.scale
        pos = torch.arange(t, device=x.device)
        logits = torch.where(pos[None, :] <= pos[:, None], logits, torch.tensor(float("-inf"), device=x.device))
        weights = torch.softmax(logits, dim=-1)
        y = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        return self.out_proj(y.flatten(2))


class EinsumThreeDimensions(nn.Module):
    def __init__(self, dim=WIDTH, inner=40):
        super().__init__()
        self.query = nn.Linear(dim, inner)
        self.key = nn.Linear(dim, inner)
        self.value = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        affinity = torch.einsum("bid,bjd->bij", q, k) / q.shape[-1] ** 0.5
        return torch.einsum("bij,bjd->bid", affinity.softmax(-1), v)


class Baddbmm(nn.Module):
    """Heads folded into the batch; an uninitialised tensor is added with beta 0."""

    def __init__(self, query_dim=WIDTH, heads=HEADS, dim_head=16):
        super().__init__()
        inner_dim = dim_head * heads
        self.scale = dim_head**-0.5
        self.heads = heads
        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(0.1))

    def head_to_batch_dim(self, tensor):
        batch_size, seq_len, dim = tensor.shape
        tensor = tensor.reshape(batch_size, seq_len, self.heads, dim // self.heads)
        return tensor.permute(0, 2, 1, 3).reshape(batch_size * self.heads, seq_len, dim // self.heads)

    def batch_to_head_dim(self, tensor):
        batch_size, seq_len, dim = tensor.shape
        tensor = tensor.reshape(batch_size // self.heads, self.heads, seq_len, dim)
        return tensor.permute(0, 2, 1, 3).reshape(batch_size // self.heads, seq_len, dim * self.heads)

    def forward(self, hidden_states):
        query = self.head_to_batch_dim(self.to_q(hidden_states))
        key = self.head_to_batch_dim(self.to_k(hidden_states))
        value = self.head_to_batch_dim(self.to_v(hidden_states))

        baddbmm_input = torch.empty(
            query.shape[0], query.shape[1], key.shape[1], dtype=query.dtype, device=query.device
        )
        attention_scores = torch.baddbmm(
            baddbmm_input,
            query,
            key.transpose(-1, -2),
            beta=0,
            alpha=self.scale,
        )
        attention_probs = attention_scores.softmax(dim=-1)

        hidden_states = torch.bmm(attention_probs, value)
        hidden_states = self.batch_to_head_dim(hidden_states)
        return self.to_out(hidden_states)


class BaddbmmMask(Projections):
    """The additive mask is baddbmm's first argument."""

    def __init__(self):
        super().__init__()
        mask = torch.full((32, 32), float("-inf")).triu(1)
        self.register_buffer("future", mask, persistent=False)

    def forward(self, x):
        bsz, tgt_len, embed_dim = x.shape
        q = self.q_proj(x).view(bsz, tgt_len, self.num_heads, self.head_dim).transpose(1, 2).flatten(0, 1)
        k = self.k_proj(x).view(bsz, tgt_len, self.num_heads, self.head_dim).transpose(1, 2).flatten(0, 1)
        v = self.v_proj(x).view(bsz, tgt_len, self.num_heads, self.head_dim).transpose(1, 2).flatten(0, 1)
        attn_weights = torch.baddbmm(self.future[:tgt_len, :tgt_len], q * self.scale, k.transpose(-2, -1))
        attn_weights = F.dropout(F.softmax(attn_weights, dim=-1), self.dropout, self.training)
        attn = torch.bmm(attn_weights, v)
        attn = attn.view(bsz, self.num_heads, tgt_len, self.head_dim).transpose(1, 2).reshape(bsz, tgt_len, embed_dim)
        return self.out_proj(attn)


class BmmQueryScaled(Projections):
    """Time first, heads folded into the batch, the query scaled where it is projected."""

    def forward(self, query):
        tgt_len, bsz, embed_dim = query.size()
        q = self.q_proj(query)
        k = self.k_proj(query)
        v = self.v_proj(query)
        q *= self.scale

        q = q.contiguous().view(tgt_len, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        k = k.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)
        v = v.contiguous().view(-1, bsz * self.num_heads, self.head_dim).transpose(0, 1)

        attn_weights = torch.bmm(q, k.transpose(1, 2))
        assert list(attn_weights.size()) == [bsz * self.num_heads, tgt_len, tgt_len]
        attn_weights = F.softmax(attn_weights, dim=-1)
        attn_weights = F.dropout(attn_weights, p=self.dropout, training=self.training)
        attn = torch.bmm(attn_weights, v)
        attn = attn.transpose(0, 1).contiguous().view(tgt_len, bsz, embed_dim)
        return self.out_proj(attn)


class BmmMethod(Projections):
    """The query is scaled, with its projection, long before the product."""

    def forward(self, hidden_states):
        bsz, tgt_len, _ = hidden_states.size()
        proj_shape = (bsz * self.num_heads, -1, self.head_dim)
        query_states = self.q_proj(hidden_states) * self.scale
        key_states = self.k_proj(hidden_states).view(bsz, -1, self.num_heads, self.head_dim).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(bsz, -1, self.num_heads, self.head_dim).transpose(1, 2)
        query_states = query_states.view(bsz, tgt_len, self.num_heads, self.head_dim).transpose(1, 2).contiguous()

        query_states = query_states.view(*proj_shape)
        key_states = key_states.reshape(*proj_shape)
        value_states = value_states.reshape(*proj_shape)
        attn_weights = query_states.bmm(key_states.transpose(1, 2))
        attn_weights = attn_weights.softmax(dim=-1)
        attn_output = attn_weights.bmm(value_states)

        attn_output = attn_output.view(bsz, self.num_heads, tgt_len, self.head_dim)
        attn_output = attn_output.transpose(1, 2)
        attn_output = attn_output.reshape(bsz, tgt_len, self.embed_dim)
        return self.out_proj(attn_output)


class QuarterPowers(nn.Module):
    """Channels before positions, and both operands scaled by size ** -0.25, as diffusion models do."""

    def __init__(self, channels=WIDTH, num_heads=HEADS):
        super().__init__()
        self.num_heads = num_heads
        self.norm = nn.GroupNorm(4, channels)
        self.qkv = nn.Conv1d(channels, channels * 3, 1)
        self.proj_out = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        qkv = self.qkv(self.norm(x))
        bs, width, length = qkv.shape
        ch = width // (3 * self.num_heads)
        q, k, v = qkv.reshape(bs * self.num_heads, ch * 3, length).split(ch, dim=1)
        scale = 1 / math.sqrt(math.sqrt(ch))
        weight = torch.einsum("bct,bcs->bts", q * scale, k * scale)  # More stable with f16 than dividing afterwards
        weight = torch.softmax(weight.float(), dim=-1).type(weight.dtype)
        a = torch.einsum("bts,bcs->bct", weight, v)
        h = self.proj_out(a.reshape(bs, -1, length))
        return x + h


class QuarterPowersByHeads(Projections):
    """The same scale on [batch, tokens, heads, size], as speech models do."""

    def forward(self, x):
        n_batch, n_ctx, n_state = x.shape
        scale = (n_state // self.num_heads) ** -0.25
        q = self.q_proj(x).view(n_batch, n_ctx, self.num_heads, -1).permute(0, 2, 1, 3) * scale
        k = self.k_proj(x).view(n_batch, n_ctx, self.num_heads, -1).permute(0, 2, 3, 1) * scale
        v = self.v_proj(x).view(n_batch, n_ctx, self.num_heads, -1).permute(0, 2, 1, 3)

        qk = q @ k
        mask = torch.empty(n_ctx, n_ctx, device=x.device).fill_(float("-inf")).triu_(1)
        qk = qk + mask
        qk = qk.float()

        w = F.softmax(qk, dim=-1).to(q.dtype)
        return self.out_proj((w @ v).permute(0, 2, 1, 3).flatten(start_dim=2))


class QueryDivided(Projections):
    def forward(self, x):
        B, T, C = x.shape
        split = lambda t: t.reshape(B, T, self.num_heads, C // self.num_heads).transpose(1, 2)  # noqa: E731
        query, key, value = split(self.q_proj(x)), split(self.k_proj(x)), split(self.v_proj(x))
        query = query / math.sqrt(query.size(-1))
        att = torch.matmul(query, key.transpose(2, 3))
        att = att.softmax(-1)
        return self.out_proj(torch.matmul(att, value).transpose(1, 2).reshape(B, T, C))


class NoScale(Projections):
    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(3, 2))
        scores = F.dropout(F.softmax(scores, dim=-1), p=0.1, training=self.training)
        return self.out_proj(torch.matmul(scores, v).transpose(1, 2).contiguous().view(B, T, C))


class KeyScaled(Projections):
    """The key carries the scale, and comes transposed out of its permute."""

    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).reshape(B, T, self.num_heads, self.head_dim).permute(0, 2, 1, 3)
        k = self.k_proj(x).reshape(B, T, self.num_heads, self.head_dim).permute(0, 2, 3, 1).mul(self.scale)
        v = self.v_proj(x).reshape(B, T, self.num_heads, self.head_dim).permute(0, 2, 1, 3)
        p = torch.softmax(q.matmul(k), -1)
        return self.out_proj(p.matmul(v).permute(0, 2, 1, 3).reshape(B, T, C))


class OneLiner(Projections):
    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (f(x).view(b, t, self.num_heads, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj((F.softmax(q @ k.mT / self.head_dim**0.5, dim=-1) @ v).transpose(1, 2).reshape(b, t, c))


class EachStepALine(Projections):
    """One name, assigned again and again."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.triu(torch.ones(32, 32), diagonal=1))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        b, num_tokens, d_out = x.shape

        keys = self.k_proj(x)  # Shape: (b, num_tokens, d_out)
        queries = self.q_proj(x)
        values = self.v_proj(x)

        # Unroll last dim: (b, num_tokens, d_out) -> (b, num_tokens, num_heads, head_dim)
        keys = keys.view(b, num_tokens, self.num_heads, self.head_dim)
        values = values.view(b, num_tokens, self.num_heads, self.head_dim)
        queries = queries.view(b, num_tokens, self.num_heads, self.head_dim)

        keys = keys.transpose(1, 2)
        queries = queries.transpose(1, 2)
        values = values.transpose(1, 2)

        attn_scores = queries @ keys.transpose(2, 3)

        # Original mask truncated to the number of tokens and converted to boolean
        mask_bool = self.mask.bool()[:num_tokens, :num_tokens]

        # Use the mask to fill attention scores
        attn_scores.masked_fill_(mask_bool, -torch.inf)

        attn_weights = torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1)
        attn_weights = self.drop(attn_weights)

        context_vec = (attn_weights @ values).transpose(1, 2)
        context_vec = context_vec.contiguous().view(b, num_tokens, d_out)
        return self.out_proj(context_vec)


def _channels_first():
    return torch.randn(2, WIDTH, TOKENS)


def _time_first():
    return torch.randn(TOKENS, 2, WIDTH)


ENTRIES = [
    spelling("matmul divided by sqrt", MatmulDivided),
    spelling("@ times self.scale", AtTimesScale),
    spelling("einsum heads first", EinsumHeadsFirst),
    spelling("einsum heads last, scale inside softmax", EinsumHeadsLast, batch=_four_arguments),
    spelling("einsum bqhd,bkhd->bhqk", EinsumBqhd),
    spelling("einsum of three dimensions", EinsumThreeDimensions),
    spelling("baddbmm with beta 0", Baddbmm),
    spelling("baddbmm adds the mask", BaddbmmMask),
    spelling("bmm, query scaled in place", BmmQueryScaled, batch=_time_first),
    spelling("bmm as a method, projection scaled", BmmMethod),
    spelling("quarter powers, channels first", QuarterPowers, batch=_channels_first),
    spelling("quarter powers by heads", QuarterPowersByHeads),
    spelling("query divided by sqrt", QueryDivided),
    spelling("no scale", NoScale),
    spelling("key scaled and permuted", KeyScaled),
    spelling("one-liner", OneLiner),
    spelling("each step a line, masked in place", EachStepALine),
]
