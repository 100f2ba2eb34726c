"""Rotary position embedding as people write it. Attention is torch's own, so that nothing else is to be found."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.patching.corpus.entry import Entry

HEADS, SIZE, TOKENS, BATCH = 3, 16, 20, 2
WIDTH = HEADS * SIZE


def tokens():
    return torch.randn(BATCH, TOKENS, WIDTH)


class Projections(nn.Module):
    """Queries, keys and values (batch, heads, tokens, size); and what comes after them."""

    def __init__(self):
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def heads(self, x):
        return [p(x).view(*x.shape[:2], HEADS, SIZE).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)]

    def attend(self, q, k, v):
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def angles(size, base=10000.0):
    inv_freq = 1.0 / (base ** (torch.arange(0, size, 2).float() / size))
    return torch.outer(torch.arange(TOKENS).float(), inv_freq)


# --------------------------------------------------------------------------------------------------------------------
# Halves
# --------------------------------------------------------------------------------------------------------------------


def rotate_half(x):
    """Rotates half the hidden dims of the input."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


class RotaryTables(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000.0 ** (torch.arange(0, SIZE, 2).float() / SIZE)), persistent=False)

    @torch.no_grad()
    def forward(self, x, position_ids):
        inv_freq_expanded = self.inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
        position_ids_expanded = position_ids[:, None, :].float()
        freqs = (inv_freq_expanded.float() @ position_ids_expanded.float()).transpose(1, 2)
        emb = torch.cat((freqs, freqs), dim=-1)
        return emb.cos().to(dtype=x.dtype), emb.sin().to(dtype=x.dtype)


class DecoderAttention(Projections):
    """cos and sin are arguments."""

    def forward(self, hidden_states, position_embeddings):
        query_states, key_states, value_states = self.heads(hidden_states)
        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        return self.attend(query_states, key_states, value_states)


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary_emb = RotaryTables()
        self.self_attn = DecoderAttention()

    def forward(self, hidden_states):
        position_ids = torch.arange(hidden_states.shape[1], device=hidden_states.device).unsqueeze(0)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        return self.self_attn(hidden_states, position_embeddings)


class BufferTables(Projections):
    """cos and sin are buffers, cut to the sequence; queries and keys inline."""

    def __init__(self):
        super().__init__()
        emb = torch.cat([angles(SIZE)] * 2, dim=-1)
        self.register_buffer("cos_cached", emb.cos()[None, None], persistent=False)
        self.register_buffer("sin_cached", emb.sin()[None, None], persistent=False)

    def forward(self, x):
        q, k, v = self.heads(x)
        seq_len = x.shape[1]
        cos, sin = self.cos_cached[:, :, :seq_len], self.sin_cached[:, :, :seq_len]
        q = q * cos + torch.cat([-q[..., SIZE // 2 :], q[..., : SIZE // 2]], dim=-1) * sin
        k = k * cos + torch.cat([-k[..., SIZE // 2 :], k[..., : SIZE // 2]], dim=-1) * sin
        return self.attend(q, k, v)


class Rotary(nn.Module):
    """Two products a half, then one cat; called for the queries and for the keys."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cos", angles(SIZE).cos())
        self.register_buffer("sin", angles(SIZE).sin())

    def forward(self, x):
        T = x.size(-2)  # noqa: N806
        cos, sin = self.cos[:T], self.sin[:T]
        x1, x2 = x.chunk(2, dim=-1)
        y1 = x1 * cos - x2 * sin
        y2 = x2 * cos + x1 * sin
        return torch.cat((y1, y2), dim=-1).type_as(x)


class WithRotaryModule(Projections):
    def __init__(self):
        super().__init__()
        self.rotary = Rotary()

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.attend(self.rotary(q), self.rotary(k), v)


# --------------------------------------------------------------------------------------------------------------------
# Pairs
# --------------------------------------------------------------------------------------------------------------------


def apply_interleaved(x, cos, sin):
    x1, x2 = x[..., ::2], x[..., 1::2]
    # even and odd features are the two parts of a pair
    rotated = torch.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1)
    return rotated.flatten(-2)


class Interleaved(Projections):
    def __init__(self):
        super().__init__()
        self.register_buffer("freqs", angles(SIZE))

    def forward(self, x):
        q, k, v = self.heads(x)
        cos, sin = self.freqs[: x.size(1)].cos(), self.freqs[: x.size(1)].sin()
        q, k = apply_interleaved(q, cos, sin), apply_interleaved(k, cos, sin)
        return self.attend(q, k, v)


def rotate_every_two(x):
    x1 = x[:, :, :, ::2]
    x2 = x[:, :, :, 1::2]
    x = torch.stack((-x2, x1), dim=-1)
    return x.flatten(-2)


class EveryTwo(Projections):
    def __init__(self):
        super().__init__()
        self.register_buffer("sin", torch.repeat_interleave(angles(SIZE).sin(), 2, 1))
        self.register_buffer("cos", torch.repeat_interleave(angles(SIZE).cos(), 2, 1))

    def forward(self, hidden):
        query, key, value = self.heads(hidden)
        query = (query * self.cos) + (rotate_every_two(query) * self.sin)
        key = (key * self.cos) + (rotate_every_two(key) * self.sin)
        return self.attend(query, key, value)


def precompute_freqs_cis(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    freqs = torch.outer(torch.arange(end), freqs)
    return torch.polar(torch.ones_like(freqs), freqs)  # complex64


def reshape_for_broadcast(freqs_cis, x):
    return freqs_cis.view(*[d if i == 1 or i == x.ndim - 1 else 1 for i, d in enumerate(x.shape)])


def apply_rotary_emb(xq, xk, freqs_cis):
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = reshape_for_broadcast(freqs_cis, xq_)
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


class Complex(Projections):
    """Tokens before heads while turning, as in the first Llama code."""

    def __init__(self):
        super().__init__()
        self.freqs_cis = precompute_freqs_cis(SIZE, TOKENS)  # no buffer: a plain attribute

    def forward(self, x):
        bsz, seqlen, _ = x.shape
        xq, xk, xv = (p(x).view(bsz, seqlen, HEADS, SIZE) for p in (self.q_proj, self.k_proj, self.v_proj))
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis=self.freqs_cis[:seqlen])
        return self.attend(xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2))


class Partial(Projections):
    """Only the first part of each head is turned."""

    def __init__(self, rotary_ndims=8):
        super().__init__()
        self.rotary_ndims = rotary_ndims
        emb = torch.cat((angles(rotary_ndims), angles(rotary_ndims)), dim=-1)
        self.register_buffer("cos", emb.cos())
        self.register_buffer("sin", emb.sin())

    def forward(self, x):
        query, key, value = self.heads(x)
        query_rot, query_pass = query[..., : self.rotary_ndims], query[..., self.rotary_ndims :]
        key_rot, key_pass = key[..., : self.rotary_ndims], key[..., self.rotary_ndims :]
        query_rot = query_rot * self.cos + rotate_half(query_rot) * self.sin
        key_rot = key_rot * self.cos + rotate_half(key_rot) * self.sin
        query = torch.cat((query_rot, query_pass), dim=-1)
        key = torch.cat((key_rot, key_pass), dim=-1)
        return self.attend(query, key, value)


ROPE = (("", "rope"),)
ENTRIES = [
    Entry("rope_helper_of_both", lambda: (Decoder(), tokens()), (("self_attn", "rope"),)),
    Entry("rope_buffers_inline", lambda: (BufferTables(), tokens()), ROPE),
    Entry("rope_module_called_twice", lambda: (WithRotaryModule(), tokens()), (("rotary", "rope"),)),
    Entry("rope_interleaved_stack", lambda: (Interleaved(), tokens()), ROPE),
    Entry("rope_every_two", lambda: (EveryTwo(), tokens()), ROPE),
    Entry("rope_complex", lambda: (Complex(), tokens()), ROPE),
    Entry("rope_partial", lambda: (Partial(), tokens()), ROPE),
]
