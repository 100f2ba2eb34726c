# ruff: noqa: N806 -- the names and the steps are those of the code that is imitated
"""scaled_dot_product_attention: given a causal mask as a tensor it is a site, given is_causal it is none."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.patching.corpus.attention_base import Projections, spelling, two_lengths, with_padding


class FloatMaskBuffer(Projections):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(32), persistent=False)

    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:T, :T])
        return self.out_proj(out.transpose(1, 2).reshape(B, T, C))


class BoolMaskOnTheFly(Projections):
    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        mask = torch.tril(torch.ones(T, T, dtype=torch.bool, device=x.device))
        out = nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            mask,  # True takes part
            0.0,
        )
        return self.out_proj(out.transpose(1, 2).reshape(B, T, C))


class MaskArgument(Projections):
    """The caller gives [1, 1, T, T], and the scale is the caller's too."""

    def forward(self, x, attn_mask):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=0.2)
        return self.out_proj(out.transpose(1, 2).reshape(B, T, C))


def _bool_mask():
    return torch.randn(2, 20, 48), torch.ones(20, 20).tril().bool()[None, None]


class IsCausal(Projections):
    def forward(self, x):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(out.transpose(1, 2).reshape(B, T, C))


class CrossPlain(Projections):
    def forward(self, x, context):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(context).view(B, -1, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(context).view(B, -1, self.num_heads, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).reshape(B, T, C))


class PaddingMask(Projections):
    """A mask that is not causal is what SDPA's argument is for."""

    def forward(self, x, key_padding_mask):
        B, T, C = x.shape
        q = self.q_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        mask = ~key_padding_mask[:, None, None, :]
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(out.transpose(1, 2).reshape(B, T, C))


ENTRIES = [
    spelling("SDPA, float causal mask", FloatMaskBuffer),
    spelling("SDPA, bool causal mask", BoolMaskOnTheFly),
    spelling("SDPA, causal mask argument", MaskArgument, batch=_bool_mask),
    spelling("SDPA, is_causal", IsCausal, ()),
    spelling("SDPA, cross-attention without a mask", CrossPlain, (), two_lengths),
    spelling("SDPA, padding mask", PaddingMask, (), with_padding),
]
