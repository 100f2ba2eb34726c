"""Attention whose weights somebody may read: returned to callers that drop them, stored, or used."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

HEADS, SIZE, TOKENS = 3, 8, 6
WIDTH = HEADS * SIZE


class Attention(nn.Module):
    """What the models share; each has an ``attend`` of its own, whose second result its ``forward`` drops."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout, self.scale = nn.Dropout(0.0), SIZE**-0.5
        self.register_buffer("mask", torch.ones(TOKENS, TOKENS).tril())
        self.output_attentions, self.weighed, self.factor = False, 0.0, 1.0

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        y, weights = self.attend(q, k, v)
        y = self.proj(y.transpose(1, 2).reshape(b, t, WIDTH))
        return y + self.weighed * weights.square().mean() if self.weighed else y


class Returned(Attention):
    def attend(self, q, k, v):
        weights = torch.matmul(q, k.transpose(-2, -1)) * self.scale
        weights = weights.masked_fill(self.mask == 0, float("-inf"))
        weights = F.softmax(weights, dim=-1)
        weights = self.dropout(weights)
        y = torch.matmul(weights, v)
        return y, weights


class ReturnedAtOnce(Attention):
    def attend(self, q, k, v):
        scores = torch.matmul(q, k.transpose(-2, -1)) * self.scale
        p_attn = scores.softmax(dim=-1)
        return torch.matmul(p_attn, v), p_attn


class BeforeDropout(Attention):
    def attend(self, q, k, v):
        weights = F.softmax((q @ k.transpose(-2, -1)) * self.scale, dim=-1)
        dropped = self.dropout(weights)
        return (dropped @ v).contiguous(), weights


class InFloat32(Attention):
    """As Llama has it."""

    def attend(self, q, k, v):
        weights = torch.matmul(q, k.transpose(2, 3)) * self.scale
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
        weights = F.dropout(weights, p=self.dropout.p, training=self.training)
        output = torch.matmul(weights, v)
        output = output.contiguous()
        return output, weights


class QueriesInFloat32(Attention):
    """As GPT-J has it: in a model of another dtype the values keep theirs."""

    def attend(self, q, k, v):
        q = q.to(torch.float32)
        k = k.to(torch.float32)
        weights = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        weights = F.softmax(weights, dim=-1)
        weights = weights.to(v.dtype)
        weights = self.dropout(weights)
        return torch.matmul(weights, v), weights


class AsScores(Attention):
    """As T5 has it."""

    def attend(self, q, k, v):
        scores = torch.matmul(q, k.transpose(3, 2)) * self.scale
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        weights = F.dropout(weights, p=self.dropout.p, training=self.training)
        return torch.matmul(weights, v), weights


class Stored(Attention):
    def attend(self, q, k, v):
        weights = F.softmax((q @ k.transpose(-2, -1)) * self.scale, dim=-1)
        y = weights @ v
        self.seen = weights
        return y, weights


class UnderACondition(Attention):
    def attend(self, q, k, v):
        weights = (q @ k.transpose(-2, -1)) * self.scale
        if self.factor != 1.0:
            weights = weights * self.factor
        weights = F.softmax(weights, dim=-1)
        y = weights @ v
        return y, weights


class Listed(Attention):
    def attend(self, q, k, v):
        weights = F.softmax((q @ k.transpose(-2, -1)) * self.scale, dim=-1)
        y = weights @ v
        kept = [weights]
        return y, kept[0]


FOUND = (
    Returned,
    ReturnedAtOnce,
    BeforeDropout,
    InFloat32,
    QueriesInFloat32,
    AsScores,
    Stored,
    UnderACondition,
    Listed,
)


class Scores(Attention):
    """What is returned is no weights: the scores."""

    def attend(self, q, k, v):
        scores = (q @ k.transpose(-2, -1)) * self.scale
        return F.softmax(scores, dim=-1) @ v, scores


class Scaled(Attention):
    def attend(self, q, k, v):
        weights = F.softmax((q @ k.transpose(-2, -1)) * self.scale, dim=-1)
        y = weights @ v
        weights = weights * 2.0
        return y, weights


class Detached(Attention):
    """Somebody reads them at once."""

    def attend(self, q, k, v):
        weights = F.softmax((q @ k.transpose(-2, -1)) * self.scale, dim=-1)
        y = weights @ v
        return y, weights.mean(1)


class ChangedInPlace(Attention):
    def attend(self, q, k, v):
        weights = F.softmax((q @ k.transpose(-2, -1)) * self.scale, dim=-1)
        y = weights.clone() @ v
        weights.mul_(2.0)
        return y, weights


class AlwaysFloat32(Attention):
    """A dtype that is written: the weights' own."""

    def attend(self, q, k, v):
        weights = F.softmax((q @ k.transpose(-2, -1)) * self.scale, dim=-1, dtype=torch.float32)
        y = weights.to(v.dtype) @ v
        return y, weights


class CastToFloat32(Attention):
    def attend(self, q, k, v):
        weights = F.softmax((q @ k.transpose(-2, -1)) * self.scale, dim=-1).to(torch.float32)
        y = weights.to(v.dtype) @ v
        return y, weights


class WithoutAName(Attention):
    def attend(self, q, k, v):
        self.seen = F.softmax((q @ k.transpose(-2, -1)) * self.scale, dim=-1)
        return self.seen @ v, self.seen


class Around(Attention):
    """Something else is evaluated before the product in the same statement."""

    def attend(self, q, k, v):
        weights = F.softmax((q @ k.transpose(-2, -1)) * self.scale, dim=-1)
        return (self.mask.add_(0).sum() * 0 + torch.matmul(weights, v)), weights


class InALoop(Attention):
    def attend(self, q, k, v):
        y, weights = 0, None
        for _ in (0, 1):
            before = weights
            weights = F.softmax((q @ k.transpose(-2, -1)) * self.scale, dim=-1)
            y = y + weights @ v
        return y, weights if before is None else before


LIKE = (
    Scores,
    Scaled,
    Detached,
    ChangedInPlace,
    AlwaysFloat32,
    CastToFloat32,
    WithoutAName,
    Around,
    InALoop,
)
