# ruff: noqa: N806 -- the names and the steps are those of the code that is imitated
"""Attention whose scores are soft-capped, ``cap · tanh(scores / cap)``, and what only looks like it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.patching.corpus.attention_base import TOKENS, WIDTH, Projections, spelling, tokens
from tests.patching.corpus.entry import Entry


class Capped(Projections):
    """Gemma 2's steps, one a line; what lies between is each model's own."""

    cap: float | None = 5.0

    def qkv(self, x):
        B, T, _ = x.shape
        return [
            f(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        ]

    def merge(self, y):
        return self.out_proj(y.transpose(1, 2).reshape(y.size(0), -1, WIDTH))

    def forward(self, x):
        q, k, v = self.qkv(x)
        attn_weights = torch.matmul(q, k.transpose(2, 3)) * self.scale
        if self.cap is not None:
            attn_weights = attn_weights / self.cap
            attn_weights = torch.tanh(attn_weights)
            attn_weights = attn_weights * self.cap
        hidden = torch.ones(TOKENS, TOKENS).triu(1).bool()
        attn_weights = attn_weights.masked_fill(hidden, float("-inf"))
        attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.merge(torch.matmul(attn_weights, v))


class OneLine(Capped):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = 5.0 * torch.tanh(q @ k.mT * self.scale / 5.0)
        return self.merge(scores.softmax(-1) @ v)


class InPlace(Capped):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = q @ k.mT * self.scale
        scores = scores.div_(self.cap).tanh_().mul(self.cap)
        return self.merge(scores.softmax(-1) @ v)


class TimesInverse(Capped):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = torch.tanh(q @ k.mT * self.scale * (1 / self.cap)) * self.cap
        return self.merge(scores.softmax(-1) @ v)


def cap_scores(scores, cap=5.0):
    scores = scores / cap
    return torch.tanh(scores) * cap


def cap_more(scores, cap):
    cap = cap + 1.0
    return cap * torch.tanh(scores / cap)


def cap_twice_told(scores, cap, above):
    return above * torch.tanh(scores / cap)


class InHelper(Capped):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = cap_scores(q @ k.mT * self.scale, self.cap)
        return self.merge(scores.softmax(-1) @ v)


class InHelperByDefault(Capped):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = q @ k.mT * self.scale
        return self.merge(F.softmax(cap_scores(scores=scores), dim=-1) @ v)


class InMethod(Capped):
    def capped(self, scores, cap):
        return cap * torch.tanh(scores / cap)

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = q @ k.mT * self.scale
        scores = self.capped(scores, cap=self.cap)
        return self.merge(scores.softmax(-1) @ v)


class HelperBindsAnew(Capped):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = cap_more(q @ k.mT * self.scale, self.cap)
        return self.merge(scores.softmax(-1) @ v)


class HelperIsHandedTwo(Capped):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = cap_twice_told(q @ k.mT * self.scale, self.cap, 4.0)
        return self.merge(scores.softmax(-1) @ v)


class OtherInverse(Capped):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = 5.0 * torch.tanh(q @ k.mT * self.scale * 0.25)
        return self.merge(scores.softmax(-1) @ v)


class OnesAbove(Capped):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = 5.0 * torch.tanh(5.0 / (q @ k.mT * self.scale))
        return self.merge(scores.softmax(-1) @ v)


class TwoNumbers(Capped):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = 5.0 * torch.tanh(q @ k.mT * self.scale / 4.0)
        return self.merge(scores.softmax(-1) @ v)


class MaskBelow(Capped):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = (q @ k.mT * self.scale).masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), -1e9)
        scores = 5.0 * torch.tanh(scores / 5.0)
        return self.merge(scores.softmax(-1) @ v)


class ScaledAbove(Capped):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = 5.0 * torch.tanh(q @ k.mT / 5.0) * self.scale
        return self.merge(scores.softmax(-1) @ v)


class CappedTwice(Capped):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = 5.0 * torch.tanh(q @ k.mT * self.scale / 5.0)
        scores = 3.0 * torch.tanh(scores / 3.0)
        return self.merge(scores.softmax(-1) @ v)


class Negative(Capped):
    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = -5.0 * torch.tanh(q @ k.mT * self.scale / -5.0)
        return self.merge(scores.softmax(-1) @ v)


def _refused(name, model, reason):
    return Entry(name, lambda: (model(), tokens()), refused=reason)


ENTRIES = [
    spelling("soft-cap as Gemma 2 has it", Capped),
    spelling("soft-cap on one line, no mask", OneLine),
    spelling("soft-cap in place", InPlace),
    spelling("soft-cap by the inverse", TimesInverse),
    spelling("soft-cap in a helper", InHelper),
    spelling("soft-cap in a helper that has the number", InHelperByDefault),
    spelling("soft-cap in a method that is handed the number", InMethod),
    _refused("like_soft_cap_in_a_helper_that_binds_it_anew", HelperBindsAnew, "uses is set in cap_more"),
    _refused("like_soft_cap_of_two_numbers_in_a_helper", HelperIsHandedTwo, "one positive number"),
    _refused("like_soft_cap_of_another_inverse", OtherInverse, "one positive number"),
    Entry("like_soft_cap_of_the_inverse_scores", lambda: (OnesAbove(), tokens())),
    _refused("like_soft_cap_of_two_numbers", TwoNumbers, "one positive number"),
    _refused("like_mask_below_a_soft_cap", MaskBelow, "mask is applied before"),
    _refused("like_scale_above_a_soft_cap", ScaledAbove, "again after the soft-cap"),
    _refused("like_two_soft_caps", CappedTwice, "again after the soft-cap"),
    _refused("like_negative_soft_cap", Negative, "one positive number"),
]
