# ruff: noqa: N806 -- the names and the steps are those of the code that is imitated
"""Attention in windows that are folded into the batch: a mask for each window is laid over the unfolded scores."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.patching.corpus.attention_base import squares
from tests.patching.corpus.entry import Entry

ATTENTION = (("", "attention"),)
SAMPLES, WINDOWS, HEADS, TOKENS, WIDTH = 2, 4, 3, 9, 24


def window_mask(windows=WINDOWS, tokens=TOKENS):
    """-100 between tokens of different regions, as Swin has it; the first window has a single region."""
    region = (torch.arange(tokens)[None] * torch.arange(windows)[:, None]) // tokens
    apart = region[:, None] - region[:, :, None]
    return apart.float().masked_fill(apart != 0, -100.0)


class Windows(nn.Module):
    """Projections and a mask of the windows; what lies between is each model's own."""

    def __init__(self, drop=0.1):
        super().__init__()
        self.num_heads, self.scale = HEADS, (WIDTH // HEADS) ** -0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_drop = nn.Dropout(drop)
        self.register_buffer("attn_mask", window_mask())

    def heads(self, x):
        B, N, C = x.shape
        return self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)

    def merge(self, x):
        return self.proj(x.transpose(1, 2).flatten(2))


class Biased(Windows):
    """A learnt bias of positions, too."""

    def __init__(self, drop=0.1):
        super().__init__(drop)
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))


class Timm(Biased):
    """The number of windows is the mask's, the samples are left to torch."""

    def forward(self, x):
        q, k, v = self.heads(x)
        N = q.shape[2]
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = attn + self.bias.unsqueeze(0)
        num_win = self.attn_mask.shape[0]
        attn = attn.view(-1, num_win, self.num_heads, N, N) + self.attn_mask.unsqueeze(1).unsqueeze(0)
        attn = attn.view(-1, self.num_heads, N, N)
        attn = self.attn_drop(attn.softmax(dim=-1))
        return self.merge(attn @ v)


class Indexed(Biased):
    """The mask is spread by an index, and the scores are reshaped."""

    def forward(self, x):
        q, k, v = self.heads(x)
        B_, N, nW = q.size(0), q.size(2), self.attn_mask.size(0)
        attn = (q @ k.transpose(-2, -1)) * self.scale + self.bias
        attn = attn.reshape(B_ // nW, nW, self.num_heads, N, N)
        attn = attn + self.attn_mask[None, :, None]
        attn = F.softmax(attn.reshape(B_, self.num_heads, N, N), dim=-1)
        return self.merge(self.attn_drop(attn) @ v)


class Unflattened(Windows):
    """By unflatten and flatten, and the softmax stands before the windows are folded again."""

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = torch.matmul(q, k.mT) * self.scale
        scores = scores.unflatten(0, (-1, len(self.attn_mask))) + self.attn_mask[:, None]
        return self.merge(torch.matmul(scores.softmax(-1).flatten(0, 1), v))


class Sized(Windows):
    """The sizes are given as one tuple."""

    def forward(self, x):
        q, k, v = self.heads(x)
        B_, H, N, _ = q.shape
        nW = self.attn_mask.shape[0]
        scores = (q @ k.transpose(2, 3)) * self.scale
        scores = scores.view((B_ // nW, nW, H, N, N)) + self.attn_mask.view(1, nW, 1, N, N)
        scores = scores.view((B_, H, N, N))
        return self.merge(torch.softmax(scores, dim=3) @ v)


class Boolean(Windows):
    """Keys of other regions are hidden altogether."""

    def forward(self, x):
        q, k, v = self.heads(x)
        B_, H, N, _ = q.shape
        nW = self.attn_mask.shape[0]
        scores = (q @ k.transpose(-2, -1)) * self.scale
        scores = scores.view(B_ // nW, nW, H, N, N)
        scores = scores.masked_fill(self.attn_mask[None, :, None] != 0, float("-inf"))
        scores = scores.view(B_, H, N, N)
        return self.merge(scores.softmax(-1) @ v)


class Cosine(Biased):
    """Swin 2: a scale a head, and the mask is added twice."""

    def __init__(self):
        super().__init__(drop=0.0)
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(HEADS, 1, 1)))

    def forward(self, x, mask):
        query_layer, key_layer, v = self.heads(x)
        B_, H, N, _ = query_layer.shape
        attn = nn.functional.normalize(query_layer, dim=-1) @ nn.functional.normalize(
            key_layer, dim=-1, eps=1e-12
        ).transpose(-2, -1)
        logit_scale = torch.clamp(self.logit_scale, max=4.6).exp()
        attn = attn * logit_scale
        attn = attn + (16 * torch.sigmoid(self.bias)).unsqueeze(0)
        if mask is not None:
            nW = mask.shape[0]
            attn = attn.view(B_ // nW, nW, H, N, N) + mask.unsqueeze(1).unsqueeze(0)
            attn = attn + mask.unsqueeze(1).unsqueeze(0)
            attn = attn.view(-1, H, N, N)
        return self.merge(self.attn_drop(F.softmax(attn, dim=-1)) @ v)


class EachItsOwn(Windows):
    """A bias that differs for each window of each sample comes first."""

    def forward(self, x, own):
        q, k, v = self.heads(x)
        B_, H, N, _ = q.shape
        nW = self.attn_mask.shape[0]
        attn = (q @ k.transpose(-2, -1)) * self.scale + own
        attn = attn.view(B_ // nW, nW, H, N, N) + self.attn_mask[:, None]
        attn = attn.view(B_, H, N, N)
        return self.merge(attn.softmax(-1) @ v)


class WindowsLast(Windows):
    """Heads are taken apart, not the batch: a mask for each group of heads."""

    def __init__(self):
        super().__init__()
        self.num_heads = 4
        self.register_buffer("of_groups", torch.randn(2, TOKENS, TOKENS))

    def forward(self, x):
        q, k, v = self.heads(x)
        B_, H, N, _ = q.shape
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.view(B_, 2, H // 2, N, N) + self.of_groups[:, None]
        attn = attn.view(B_, H, N, N)
        return self.merge(attn.softmax(-1) @ v)


class TwoFolds(Windows):
    """Windows of two kinds."""

    def forward(self, x):
        q, k, v = self.heads(x)
        B_, H, N, _ = q.shape
        nW = self.attn_mask.shape[0]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = (attn.view(B_ // nW, nW, H, N, N) + self.attn_mask[:, None]).view(B_, H, N, N)
        attn = attn.view(B_ // 2, 2, H, N, N) + self.attn_mask[:2, None]
        attn = attn.view(B_, H, N, N)
        return self.merge(attn.softmax(-1) @ v)


class HeadsToo(Windows):
    """The heads are folded into the batch as well."""

    def forward(self, x):
        q, k, v = (each.flatten(0, 1) for each in self.heads(x))
        B_, N, H = x.shape[0], x.shape[1], self.num_heads
        nW = self.attn_mask.shape[0]
        attn = (torch.bmm(q, k.transpose(1, 2)) * self.scale).view(B_, H, N, N)
        attn = attn.view(B_ // nW, nW, H, N, N) + self.attn_mask[:, None]
        attn = attn.view(B_, H, N, N).softmax(-1).view(B_ * H, N, N)
        return self.merge(torch.bmm(attn, v).view(B_, H, N, -1))


class ScaledAfter(Windows):
    """What the mask adds is scaled as well."""

    def forward(self, x):
        q, k, v = self.heads(x)
        B_, H, N, _ = q.shape
        nW = self.attn_mask.shape[0]
        attn = (q @ k.transpose(-2, -1)).view(B_ // nW, nW, H, N, N) + self.attn_mask[:, None]
        attn = attn.view(B_, H, N, N) * self.scale
        return self.merge(attn.softmax(-1) @ v)


class Kept(Windows):
    """The weights are read later."""

    def forward(self, x):
        q, k, v = self.heads(x)
        B_, H, N, _ = q.shape
        nW = self.attn_mask.shape[0]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.view(B_ // nW, nW, H, N, N) + self.attn_mask[:, None]
        attn = attn.view(B_, H, N, N).softmax(-1)
        return self.merge(attn @ v), attn.mean(1)


def windows():
    return torch.randn(SAMPLES * WINDOWS, TOKENS, WIDTH)


def entry(name, model, sites=ATTENTION, refused="", batch=windows):
    return Entry(f"windows: {name}", lambda: (model(), batch()), sites, squares, refused)


ENTRIES = [
    entry("timm", Timm),
    entry("an index", Indexed),
    entry("unflatten", Unflattened),
    entry("a tuple of sizes", Sized),
    entry("boolean", Boolean),
    entry("cosine", Cosine, batch=lambda: (windows(), window_mask())),
    entry("each its own", EachItsOwn, batch=lambda: (windows(), torch.randn(8, 1, TOKENS, TOKENS))),
    entry("one for all", EachItsOwn, batch=lambda: (windows(), torch.randn(1, HEADS, TOKENS, TOKENS))),
    entry("groups of heads", WindowsLast, (), "reshapes the scores other than"),
    entry("two folds", TwoFolds, (), "the windows are unfolded from the batch more than once"),
    entry("heads too", HeadsToo, (), "both heads and windows are folded into the batch"),
    entry("scaled after", ScaledAfter, (), "a mask is added before the scores are scaled"),
    entry("kept", Kept, (), "the result of softmax is also read by mean"),
]
