# ruff: noqa: N806 -- the names and the steps are those of the code that is imitated
"""Attention under masks and biases that are made, given and applied in different ways."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.patching.corpus.attention_base import (
    HEADS,
    TOKENS,
    WIDTH,
    Projections,
    spelling,
    tokens,
    with_causal,
    with_padding,
)


class BoolTriuBuffer(Projections):
    def __init__(self):
        super().__init__()
        self.register_buffer("causal_mask", torch.triu(torch.ones(40, 40, dtype=torch.bool), diagonal=1))

    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        att = att.masked_fill(self.causal_mask[:T, :T], float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.out_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class WhereFinfoMin(Projections):
    """A boolean buffer, torch.where, and a mask value made a tensor of the scores' dtype and device."""

    def __init__(self):
        super().__init__()
        max_positions = 40
        self.register_buffer(
            "bias",
            torch.tril(torch.ones((max_positions, max_positions), dtype=torch.bool)).view(
                1, 1, max_positions, max_positions
            ),
            persistent=False,
        )

    def forward(self, hidden_states):
        shape = (*hidden_states.shape[:-1], self.num_heads, self.head_dim)
        query = self.q_proj(hidden_states).view(shape).transpose(1, 2)
        key = self.k_proj(hidden_states).view(shape).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)

        attn_weights = torch.matmul(query, key.transpose(-1, -2))
        attn_weights = attn_weights / torch.full(
            [], value.size(-1) ** 0.5, dtype=attn_weights.dtype, device=attn_weights.device
        )
        # if only "normal" attention layer implements causal mask
        query_length, key_length = query.size(-2), key.size(-2)
        causal_mask = self.bias[:, :, key_length - query_length : key_length, :key_length]
        mask_value = torch.finfo(attn_weights.dtype).min
        # Need to be a tensor, otherwise we get error: `RuntimeError: expected scalar type float but found double`.
        mask_value = torch.full([], mask_value, dtype=attn_weights.dtype, device=attn_weights.device)
        attn_weights = torch.where(causal_mask, attn_weights.to(attn_weights.dtype), mask_value)

        attn_weights = nn.functional.softmax(attn_weights, dim=-1)
        # Downcast (if necessary) back to V's dtype (if in mixed-precision) -- No-Op otherwise
        attn_weights = attn_weights.type(value.dtype)
        attn_output = torch.matmul(attn_weights, value)
        attn_output = attn_output.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)
        return self.out_proj(attn_output)


class OnesLikeScores(Projections):
    """The mask has the scores' own form."""

    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        seen = torch.ones_like(att).tril()
        y = F.softmax(att.masked_fill(seen == 0, float("-inf")), dim=-1) @ v
        return self.out_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class FullLikeScores(Projections):
    """What is added has the scores' own form."""

    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        att = att + torch.full_like(att, float("-inf")).triu(1)
        y = F.softmax(att, dim=-1) @ v
        return self.out_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class WherePlain(Projections):
    """torch.where with a Python number."""

    def forward(self, x):
        b, t, c = x.shape
        q = self.q_proj(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.num_heads, self.head_dim).transpose(1, 2)
        visible = torch.ones(t, t, device=x.device).tril().bool()
        scores = q @ k.transpose(-1, -2) * self.scale
        probs = torch.where(visible, scores, float("-inf")).softmax(dim=-1)
        return self.out_proj((probs @ v).transpose(1, 2).reshape(b, t, c))


class AdditiveInfinity(Projections):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", self.build_causal_mask(32))

    @staticmethod
    def build_causal_mask(context_length):
        # lazily create causal attention mask; pytorch uses additive attention mask: fill with -inf
        mask = torch.empty(context_length, context_length)
        mask.fill_(float("-inf"))
        mask.triu_(1)  # zero out the lower diagonal
        return mask

    def forward(self, x):
        bs, slen, _ = x.shape
        xq, xk, xv = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        xq = xq.view(bs, slen, self.num_heads, self.head_dim).transpose(1, 2)
        xk = xk.view(bs, slen, self.num_heads, self.head_dim).transpose(1, 2)
        xv = xv.view(bs, slen, self.num_heads, self.head_dim).transpose(1, 2)
        scores = torch.matmul(xq, xk.transpose(2, 3)) / math.sqrt(self.head_dim)
        scores = scores + self.mask[:slen, :slen]
        scores = F.softmax(scores.float(), dim=-1).type_as(xq)
        output = torch.matmul(scores, xv)
        output = output.transpose(1, 2).contiguous().view(bs, slen, -1)
        return self.out_proj(output)


class AdditiveBillion(Projections):
    """(1 - mask) * -1e9, mask lower triangular."""

    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        look_ahead = torch.tril(torch.ones(T, T, device=x.device))
        logits = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        logits += (1.0 - look_ahead) * -1e9
        weights = torch.softmax(logits, dim=-1)
        weights = F.dropout(weights, self.dropout, self.training)
        return self.out_proj(torch.matmul(weights, v).transpose(1, 2).reshape(B, T, C))


class TimesMaskMinusTenThousand(Projections):
    """The first GPT's way: w * b - 1e4 * (1 - b)."""

    def __init__(self):
        super().__init__()
        self.register_buffer("b", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).permute(0, 2, 1, 3)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).permute(0, 2, 3, 1)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).permute(0, 2, 1, 3)
        w = torch.matmul(q, k)
        w = w / math.sqrt(v.size(-1))
        b = self.b[:, :, : w.size(-2), : w.size(-1)]
        w = w * b + -1e4 * (1 - b)
        w = nn.Softmax(dim=-1)(w)
        a = torch.matmul(w, v)
        a = a.permute(0, 2, 1, 3).contiguous()
        return self.out_proj(a.view(B, T, C))


class AdditiveFinfoMin(Projections):
    """A float mask of finfo.min above the diagonal, made in each forward."""

    def forward(self, hidden_states):
        bsz, q_len, _ = hidden_states.size()
        query_states = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)

        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scale

        mask = torch.full((q_len, q_len), torch.finfo(attn_weights.dtype).min, device=hidden_states.device)
        mask_cond = torch.arange(mask.size(-1), device=hidden_states.device)
        mask.masked_fill_(mask_cond < (mask_cond + 1).view(mask.size(-1), 1), 0)
        attn_weights = attn_weights + mask[None, None, :, :]

        # upcast attention to fp32
        attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query_states.dtype)
        attn_weights = nn.functional.dropout(attn_weights, p=self.dropout, training=self.training)
        attn_output = torch.matmul(attn_weights, value_states)

        if attn_output.size() != (bsz, self.num_heads, q_len, self.head_dim):
            raise ValueError(f"`attn_output` should not be of size {attn_output.size()}")

        attn_output = attn_output.transpose(1, 2).contiguous()
        attn_output = attn_output.reshape(bsz, q_len, self.embed_dim)
        return self.out_proj(attn_output)


class TrilOnTheFly(Projections):
    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        att = q @ k.transpose(-2, -1) * C**-0.5
        att = att.masked_fill(torch.tril(torch.ones(T, T, device=x.device)) == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.out_proj((att @ v).transpose(1, 2).reshape(B, T, C))


class TriuOnTheFly(Projections):
    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        mask = torch.triu(torch.ones(T, T), diagonal=1).bool().to(x.device)
        att = torch.matmul(q, k.transpose(-2, -1)) * self.scale
        att[:, :, mask] = float("-inf")
        att = att.softmax(dim=-1)
        return self.out_proj(torch.matmul(att, v).transpose(1, 2).reshape(B, T, C))


class TriuMaskedFill(Projections):
    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        att = torch.matmul(q, k.transpose(-2, -1)) * self.scale
        att = att.masked_fill(
            torch.triu(torch.ones(T, T, device=x.device), diagonal=1).bool(),  # the future
            -float("inf"),
        )
        att = torch.softmax(att, dim=-1)
        return self.out_proj(torch.matmul(att, v).transpose(1, 2).reshape(B, T, C))


class ArangeComparison(Projections):
    """Invert, broadcast: True is visible until ``~``."""

    def causal_mask(self, seq_len, device):
        i = torch.arange(seq_len, device=device)
        return i[:, None] >= i[None, :]

    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * self.scale
        att = att.masked_fill(~self.causal_mask(T, x.device), torch.finfo(att.dtype).min)
        att = att.softmax(dim=-1)
        return self.out_proj((att @ v).transpose(1, 2).reshape(B, T, C))


class MaskArgument(Projections):
    """Called with a mask, with one that is all ones, or with None."""

    def forward(self, x, mask=None):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.head_dim)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -1e9)
        p_attn = scores.softmax(dim=-1)
        return self.out_proj(torch.matmul(p_attn, v).transpose(1, 2).contiguous().view(B, T, C))


class AdditiveMaskArgument(Projections):
    def forward(self, hidden_states, attention_mask=None):
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)
        query_states = self.q_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        key_states = self.k_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.scale
        if attention_mask is not None:  # no matter the length, we just slice it
            causal_mask = attention_mask[:, :, :, : key_states.shape[-2]]
            attn_weights = attn_weights + causal_mask
        attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query_states.dtype)
        attn_output = torch.matmul(attn_weights, value_states).transpose(1, 2).contiguous()
        return self.out_proj(attn_output.reshape(*input_shape, -1).contiguous())


def _four_dimensional_mask():
    mask = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)
    return {"hidden_states": tokens(), "attention_mask": mask[None, None].repeat(2, 1, 1, 1)}


class KeyPaddingMask(Projections):
    def forward(self, x, key_padding_mask=None):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        attn_weights = (q * self.scale) @ k.transpose(-2, -1)
        if key_padding_mask is not None:
            # don't attend to padding symbols
            attn_weights = attn_weights.masked_fill(
                key_padding_mask.unsqueeze(1).unsqueeze(2).to(torch.bool),
                float("-inf"),
            )
        attn_weights = F.softmax(attn_weights, dim=-1)
        attn_weights = F.dropout(attn_weights, p=self.dropout, training=self.training)
        return self.out_proj((attn_weights @ v).transpose(1, 2).reshape(B, T, C))


class CausalAndPadding(Projections):
    """Two masks, one after the other."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(32, 32)).view(1, 1, 32, 32))

    def forward(self, x, key_padding_mask):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = att.masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
        att = F.softmax(att, dim=-1)
        y = att @ v
        return self.out_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Alibi(Projections):
    """A fixed slope a head times the distance, added under the causal mask."""

    def __init__(self):
        super().__init__()
        self.register_buffer("m", self.get_slopes(self.num_heads))
        self.register_buffer("mask", torch.tril(torch.ones(1, 1, 32, 32)))

    @staticmethod
    def get_slopes(num_heads):
        x = (2**8) ** (1 / num_heads)
        return torch.tensor([1 / x ** (i + 1) for i in range(num_heads)]).unsqueeze(-1).unsqueeze(-1)

    def forward(self, x):
        batch_size, seq_len, _ = x.shape
        key = self.k_proj(x).view(batch_size, seq_len, self.num_heads, -1).permute(0, 2, 3, 1)
        query = self.q_proj(x).view(batch_size, seq_len, self.num_heads, -1).transpose(1, 2)
        value = self.v_proj(x).view(batch_size, seq_len, self.num_heads, -1).transpose(1, 2)

        positions = torch.arange(seq_len)[None, :] - torch.arange(seq_len)[:, None]
        bias = (self.m * positions).unsqueeze(0)
        score = torch.matmul(query, key) / math.sqrt(self.head_dim) + bias
        score = score.masked_fill(self.mask[:, :, :seq_len, :seq_len] == 0, float("-inf"))
        attn = F.softmax(score, dim=-1)
        out = torch.matmul(attn, value)
        out = out.transpose(1, 2).reshape(batch_size, seq_len, -1)
        return self.out_proj(out)


class RelativePositionTable(nn.Module):
    """A window's table of biases, one a head and offset, that learns."""

    def __init__(self, dim=WIDTH, window_size=(4, 5), num_heads=HEADS):
        super().__init__()
        self.window_size = window_size  # Wh, Ww
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        entries = (2 * window_size[0] - 1) * (2 * window_size[1] - 1)
        self.relative_position_bias_table = nn.Parameter(torch.randn(entries, num_heads) * 0.02)
        grid = torch.meshgrid(torch.arange(window_size[0]), torch.arange(window_size[1]), indexing="ij")
        coords = torch.stack(grid).flatten(1)
        relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
        relative[:, :, 0] += window_size[0] - 1
        relative[:, :, 1] += window_size[1] - 1
        relative[:, :, 0] *= 2 * window_size[1] - 1
        self.register_buffer("relative_position_index", relative.sum(-1))
        self.query = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, dim * 2)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x):
        B_, N, C = x.shape
        q = self.query(x).reshape(B_, N, self.num_heads, C // self.num_heads).permute(0, 2, 1, 3)
        k, v = self.kv(x).reshape(B_, N, 2, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)

        q = q * self.scale
        attn = q @ k.transpose(-2, -1)

        relative_position_bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(
            self.window_size[0] * self.window_size[1], self.window_size[0] * self.window_size[1], -1
        )  # Wh*Ww,Wh*Ww,nH
        relative_position_bias = relative_position_bias.permute(2, 0, 1).contiguous()  # nH, Wh*Ww, Wh*Ww
        attn = attn + relative_position_bias.unsqueeze(0)
        attn = self.softmax(attn)

        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj(x)


ENTRIES = [
    spelling("masked_fill of a bool triu buffer", BoolTriuBuffer),
    spelling("where with finfo.min as a tensor", WhereFinfoMin),
    spelling("where with -inf as a number", WherePlain),
    spelling("masked_fill by ones_like(scores).tril()", OnesLikeScores),
    spelling("full_like(scores, -inf).triu(1) added", FullLikeScores),
    spelling("additive -inf buffer", AdditiveInfinity),
    spelling("additive -1e9 in place", AdditiveBillion),
    spelling("times mask minus 1e4", TimesMaskMinusTenThousand),
    spelling("additive finfo.min on the fly", AdditiveFinfoMin),
    spelling("tril on the fly", TrilOnTheFly),
    spelling("triu on the fly, assigned by index", TriuOnTheFly),
    spelling("triu on the fly, masked_fill", TriuMaskedFill),
    spelling("arange comparison", ArangeComparison),
    spelling("mask argument, causal", MaskArgument, batch=with_causal),
    spelling("mask argument, None", MaskArgument),
    spelling("additive mask argument, causal", AdditiveMaskArgument, batch=_four_dimensional_mask),
    spelling("additive mask argument, None", AdditiveMaskArgument),
    spelling("key padding mask", KeyPaddingMask, batch=with_padding),
    spelling("key padding mask, None", KeyPaddingMask),
    spelling("causal and padding masks", CausalAndPadding, batch=with_padding),
    spelling("alibi", Alibi),
    spelling("relative position table that learns", RelativePositionTable),
]
