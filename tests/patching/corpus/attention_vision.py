# ruff: noqa: N806, RET504 -- the names and the steps are those of the code that is imitated
"""Attention of image models: helpers that add a mask where there is one, windows with biases of their positions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.patching.corpus.attention_base import squares
from tests.patching.corpus.entry import Entry

ATTENTION = (("", "attention"),)
SIDE, WINDOW, HEADS = 8, 4, 3


@torch.fx.wrap
def maybe_add_mask(scores, attn_mask=None):
    return scores if attn_mask is None else scores + attn_mask


class TimmAttention(nn.Module):
    """Standard Multi-head Self Attention module with QKV projection."""

    def __init__(self, dim=48, num_heads=3, qkv_bias=True, qk_norm=False, attn_drop=0.1, proj_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.attn_dim = self.num_heads * self.head_dim
        self.scale = self.head_dim**-0.5
        self.fused_attn = False
        self.qkv = nn.Linear(dim, self.attn_dim * 3, bias=qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = nn.Identity()
        self.proj = nn.Linear(self.attn_dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x, attn_mask=None, is_causal=False):
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)

        if self.fused_attn:
            x = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=attn_mask,
                dropout_p=self.attn_drop.p if self.training else 0.0,
                is_causal=is_causal,
            )
        else:
            q = q * self.scale
            attn = q @ k.transpose(-2, -1)
            attn = maybe_add_mask(attn, attn_mask)
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            x = attn @ v

        x = x.transpose(1, 2).reshape(B, N, self.attn_dim)
        x = self.norm(x)
        x = self.proj(x)
        x = self.proj_drop(x)
        return x


class TimmNormed(TimmAttention):
    def __init__(self):
        super().__init__(qk_norm=True, attn_drop=0.0)


def add_where_given(scores, bias):
    """Another spelling of the same."""
    if bias is not None:
        scores = scores + bias
    return scores


class TimmByIf(TimmAttention):
    def forward(self, x, attn_mask=None):
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = add_where_given(bias=attn_mask, scores=attn)
        attn = self.attn_drop(attn.softmax(dim=-1))
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, self.attn_dim))


class MaskedByIf(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = TimmByIf()

    def forward(self, x):
        return self.attn(x, attn_mask=torch.arange(x.shape[1]).expand(x.shape[1], -1) * -0.1)


def add_twice(scores, bias):
    return scores * 2.0 if bias is None else scores + bias


class ScaledByHelper(TimmAttention):
    """What the helper does without a mask is not nothing."""

    def forward(self, x, attn_mask=None):
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        attn = add_twice((q * self.scale) @ k.transpose(-2, -1), attn_mask)
        attn = self.attn_drop(attn.softmax(dim=-1))
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, self.attn_dim))


class TimmMasked(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = TimmAttention()

    def forward(self, x):
        mask = torch.zeros(x.shape[1], x.shape[1])
        mask[:, -1] = float("-inf")
        return self.attn(x, attn_mask=mask)


def window_partition(x, window_size):
    B, H, W, C = x.shape
    x = x.view(B, H // window_size, window_size, W // window_size, window_size, C)
    windows = x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window_size, window_size, C)
    return windows


def relative_index():
    coords = torch.stack(torch.meshgrid(torch.arange(WINDOW), torch.arange(WINDOW), indexing="ij")).flatten(1)
    relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0) + WINDOW - 1
    return relative[..., 0] * (2 * WINDOW - 1) + relative[..., 1]


class SwinWindow(nn.Module):
    """Swin's and timm's: the mask of the windows is added through a view."""

    def __init__(self, dim=48, num_heads=HEADS):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * WINDOW - 1) ** 2, num_heads))
        self.register_buffer("relative_position_index", relative_index())
        self.qkv = nn.Linear(dim, dim * 3)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x, mask=None):
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]

        q = q * self.scale
        attn = q @ k.transpose(-2, -1)

        relative_position_bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(
            WINDOW * WINDOW, WINDOW * WINDOW, -1
        )
        relative_position_bias = relative_position_bias.permute(2, 0, 1).contiguous()
        attn = attn + relative_position_bias.unsqueeze(0)

        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, self.num_heads, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, self.num_heads, N, N)
            attn = self.softmax(attn)
        else:
            attn = self.softmax(attn)

        attn = self.attn_drop(attn)

        x = (attn @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj(x)


class SwinBlock(nn.Module):
    def __init__(self, shift):
        super().__init__()
        self.attn, self.shift = SwinWindow(), shift
        mask = torch.zeros(SIDE * SIDE // WINDOW**2, WINDOW**2, WINDOW**2)
        mask[1::2, :, : WINDOW * 2] = -100.0
        self.register_buffer("attn_mask", mask if shift else None)

    def forward(self, x):
        B, _, C = x.shape
        x = x.view(B, SIDE, SIDE, C)
        if self.shift:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        windows = window_partition(x, WINDOW).view(-1, WINDOW * WINDOW, C)
        return self.attn(windows, mask=self.attn_mask)


def shifted_window_attention(
    input,
    qkv_weight,
    proj_weight,
    relative_position_bias,
    window_size,
    num_heads,
    shift_size,
    attention_dropout=0.0,
    qkv_bias=None,
    proj_bias=None,
    training=True,
):
    B, H, W, C = input.shape
    x = F.pad(input, (0, 0, 0, (-W) % window_size[1], 0, (-H) % window_size[0]))
    _, pad_H, pad_W, _ = x.shape
    shift_size = shift_size.copy()
    if sum(shift_size) > 0:
        x = torch.roll(x, shifts=(-shift_size[0], -shift_size[1]), dims=(1, 2))

    num_windows = (pad_H // window_size[0]) * (pad_W // window_size[1])
    x = x.view(B, pad_H // window_size[0], window_size[0], pad_W // window_size[1], window_size[1], C)
    x = x.permute(0, 1, 3, 2, 4, 5).reshape(B * num_windows, window_size[0] * window_size[1], C)

    qkv = F.linear(x, qkv_weight, qkv_bias)
    qkv = qkv.reshape(x.size(0), x.size(1), 3, num_heads, C // num_heads).permute(2, 0, 3, 1, 4)
    q, k, v = qkv[0], qkv[1], qkv[2]
    q = q * (C // num_heads) ** -0.5
    attn = q.matmul(k.transpose(-2, -1))
    attn = attn + relative_position_bias

    if sum(shift_size) > 0:
        attn_mask = x.new_zeros((pad_H, pad_W))
        h_slices = ((0, -window_size[0]), (-window_size[0], -shift_size[0]), (-shift_size[0], None))
        w_slices = ((0, -window_size[1]), (-window_size[1], -shift_size[1]), (-shift_size[1], None))
        count = 0
        for h in h_slices:
            for w in w_slices:
                attn_mask[h[0] : h[1], w[0] : w[1]] = count
                count += 1
        attn_mask = attn_mask.view(pad_H // window_size[0], window_size[0], pad_W // window_size[1], window_size[1])
        attn_mask = attn_mask.permute(0, 2, 1, 3).reshape(num_windows, window_size[0] * window_size[1])
        attn_mask = attn_mask.unsqueeze(1) - attn_mask.unsqueeze(2)
        attn_mask = attn_mask.masked_fill(attn_mask != 0, -100.0).masked_fill(attn_mask == 0, 0.0)
        attn = attn.view(x.size(0) // num_windows, num_windows, num_heads, x.size(1), x.size(1))
        attn = attn + attn_mask.unsqueeze(1).unsqueeze(0)
        attn = attn.view(-1, num_heads, x.size(1), x.size(1))

    attn = F.softmax(attn, dim=-1)
    attn = F.dropout(attn, p=attention_dropout, training=training)

    x = attn.matmul(v).transpose(1, 2).reshape(x.size(0), x.size(1), C)
    return F.linear(x, proj_weight, proj_bias)


class TorchvisionShifted(nn.Module):
    def __init__(self, shift=0, dim=48):
        super().__init__()
        self.window_size, self.shift_size, self.num_heads = [WINDOW, WINDOW], [shift, shift], HEADS
        self.attention_dropout = 0.1
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.relative_position_bias_table = nn.Parameter(torch.randn((2 * WINDOW - 1) ** 2, HEADS))
        self.register_buffer("relative_position_index", relative_index().flatten())

    def get_relative_position_bias(self):
        N = self.window_size[0] * self.window_size[1]
        bias = self.relative_position_bias_table[self.relative_position_index]
        return bias.view(N, N, -1).permute(2, 0, 1).contiguous().unsqueeze(0)

    def forward(self, x):
        relative_position_bias = self.get_relative_position_bias()
        return shifted_window_attention(
            x,
            self.qkv.weight,
            self.proj.weight,
            relative_position_bias,
            self.window_size,
            self.num_heads,
            shift_size=self.shift_size,
            attention_dropout=self.attention_dropout,
            qkv_bias=self.qkv.bias,
            proj_bias=self.proj.bias,
            training=self.training,
        )


def entry(name, model, sites=ATTENTION, shape=(2, SIDE * SIDE, 48)):
    return Entry(name, lambda: (model(), torch.randn(shape)), sites, squares)


ENTRIES = [
    entry("timm", TimmAttention),
    entry("timm_normed", TimmNormed),
    entry("timm_masked", TimmMasked, (("attn", "attention"),)),
    entry("timm_by_if", TimmByIf),
    entry("timm_masked_by_if", MaskedByIf, (("attn", "attention"),)),
    entry("timm_with_another_helper", ScaledByHelper),
    entry("swin", lambda: SwinBlock(0), (("attn", "attention"),)),
    entry("torchvision_swin", TorchvisionShifted, ATTENTION, (2, SIDE, SIDE, 48)),
    entry("swin_shifted", lambda: SwinBlock(2), (("attn", "attention"),)),
    entry("torchvision_swin_shifted", lambda: TorchvisionShifted(2), ATTENTION, (2, SIDE, SIDE, 48)),
]
