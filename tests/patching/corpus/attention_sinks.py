# ruff: noqa: N806 -- the names and the steps are those of the code that is imitated
"""Attention with sinks: a learnt number a head is one more column of the softmax; and what only looks like it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.patching.corpus.attention_base import BATCH, HEADS, TOKENS, WIDTH, Projections, squares, tokens
from tests.patching.corpus.entry import Entry

ATTENTION = (("", "attention"),)


class Sinks(Projections):
    """Projections and the sinks; what lies between is each model's own."""

    def __init__(self, dropout=0.1):
        super().__init__(dropout=dropout)
        self.sinks = nn.Parameter(torch.linspace(-1.0, 2.0, self.num_heads))
        self.drop = nn.Dropout(dropout)

    def qkv(self, x):
        B, T, _ = x.shape
        return [
            f(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        ]

    def merge(self, y):
        return self.out_proj(y.transpose(1, 2).reshape(y.size(0), -1, WIDTH))

    def causal(self, x):
        T = x.size(1)
        return torch.full((T, T), float("-inf"), dtype=x.dtype).triu(1)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask

    sinks = module.sinks.reshape(1, -1, 1, 1).expand(query.shape[0], -1, query.shape[-2], -1)
    combined_logits = torch.cat([attn_weights, sinks], dim=-1)

    combined_logits = combined_logits - combined_logits.max(dim=-1, keepdim=True).values
    probs = F.softmax(combined_logits, dim=-1, dtype=combined_logits.dtype)
    scores = probs[..., :-1]  # we drop the sink here
    attn_weights = nn.functional.dropout(scores, p=dropout, training=module.training).to(value.dtype)
    attn_output = torch.matmul(attn_weights, value)
    attn_output = attn_output.transpose(1, 2).contiguous()
    return attn_output, attn_weights


class GptOss(Sinks):
    """transformers' eager path, whose weights are returned."""

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x)
        attn_output, attn_weights = eager_attention_forward(
            self, q, k, v, mask, dropout=self.dropout if self.training else 0.0, scaling=self.scale
        )
        return self.out_proj(attn_output.reshape(*x.shape[:-1], -1).contiguous()), attn_weights


class InOneLine(Sinks):
    """As flint and inkling have it."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        attn = q @ k.transpose(-2, -1) * self.scale + self.causal(x)
        sinks = self.sinks.view(1, -1, 1, 1).expand(*attn.shape[:-1], 1)
        attn = F.softmax(torch.cat([attn, sinks], dim=-1).float(), dim=-1)[..., :-1].to(v.dtype)
        return self.merge(self.drop(attn) @ v)


class IndexedSinks(Sinks):
    """Sinks are spread by an index and repeated; dropout comes before the column is dropped."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        B, T, _ = x.shape
        scores = (q @ k.mT) * self.scale
        scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
        logits = torch.concat((scores, self.sinks[None, :, None, None].repeat(B, 1, T, 1)), dim=3)
        probs = self.drop(torch.softmax(logits, dim=-1))
        return self.merge(probs[:, :, :, :-1] @ v)


class SinksOfFourDimensions(Sinks):
    """The parameter has the form of the column, and there is no mask."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(1, self.num_heads, 1, 1))

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = (q @ k.mT) * self.scale
        scores = torch.cat([scores, self.sinks.expand(x.size(0), -1, x.size(1), -1)], -1)
        return self.merge(scores.softmax(-1)[..., :-1] @ v)


class Shifted(Sinks):
    """No sinks: the largest of each row is taken off for numerical stability."""

    def __init__(self):
        super().__init__()
        del self.sinks

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = (q @ k.mT) * self.scale + self.causal(x)
        scores = scores - scores.amax(dim=-1, keepdim=True).detach()
        return self.merge(scores.softmax(-1) @ v)


class Filled(Sinks):
    """A number in the place of hidden scores: of a row in which it hides all, the weight is all the sink's."""

    fill = -1e9

    def forward(self, x, mask):
        q, k, v = self.qkv(x)
        scores = ((q @ k.mT) * self.scale).masked_fill(mask, self.fill)
        sinks = self.sinks.view(1, -1, 1, 1).expand(x.size(0), -1, x.size(1), 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.merge(weights @ v)


class MadeSinks(Sinks):
    """The sinks are computed from others."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        sinks = F.softplus(self.sinks)
        scores = torch.cat(
            [(q @ k.mT) * self.scale, sinks.reshape(1, -1, 1, 1).expand(x.size(0), -1, x.size(1), 1)], -1
        )
        weights = scores.softmax(-1)[..., :-1]
        return self.merge(weights @ v)


# --------------------------------------------------------------------------------------------------------------------
# What is left alone
# --------------------------------------------------------------------------------------------------------------------


class NotDropped(Sinks):
    """The column has a value of its own."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.randn(1, self.num_heads, 1, self.head_dim))

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = torch.cat(
            [(q @ k.mT) * self.scale, self.sinks.view(1, -1, 1, 1).expand(x.size(0), -1, x.size(1), 1)], -1
        )
        weights = scores.softmax(-1)
        return self.merge(weights @ torch.cat([v, self.own.expand(x.size(0), -1, -1, -1)], 2))


class OfEachQuery(Sinks):
    """The column is another number for each query."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, HEADS)
        del self.sinks

    def forward(self, x):
        q, k, v = self.qkv(x)
        sinks = self.gate(x).transpose(1, 2).unsqueeze(-1)
        scores = torch.cat([(q @ k.mT) * self.scale, sinks], -1)
        return self.merge(scores.softmax(-1)[..., :-1] @ v)


class OfEachSample(Sinks):
    """One number a sample."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(BATCH))

    def forward(self, x):
        q, k, v = self.qkv(x)
        sinks = self.sinks.view(-1, 1, 1, 1).expand(-1, HEADS, x.size(1), 1)
        scores = torch.cat([(q @ k.mT) * self.scale, sinks], -1)
        return self.merge(scores.softmax(-1)[..., :-1] @ v)


class ScaledTogether(Sinks):
    """The sinks are scaled as well."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = (
            torch.cat([q @ k.mT, self.sinks.view(1, -1, 1, 1).expand(x.size(0), -1, x.size(1), 1)], -1) * self.scale
        )
        return self.merge(scores.softmax(-1)[..., :-1] @ v)


class ShiftedBefore(Sinks):
    """The largest is taken off the scores alone: the sinks weigh otherwise."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = (q @ k.mT) * self.scale
        scores = scores - scores.max(dim=-1, keepdim=True)[0]
        scores = torch.cat([scores, self.sinks.view(1, -1, 1, 1).expand(x.size(0), -1, x.size(1), 1)], -1)
        return self.merge(scores.softmax(-1)[..., :-1] @ v)


class LastKeyDropped(Sinks):
    """A key like the others weighs, and its value is left out."""

    def __init__(self):
        super().__init__()
        del self.sinks

    def forward(self, x):
        q, k, v = self.qkv(x)
        weights = ((q @ k.mT) * self.scale).softmax(-1)[..., :-1]
        return self.merge(weights @ v[:, :, :-1])


class FirstDropped(Sinks):
    """The column is the last, and the first key is dropped."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = torch.cat(
            [(q @ k.mT) * self.scale, self.sinks.view(1, -1, 1, 1).expand(x.size(0), -1, x.size(1), 1)], -1
        )
        return self.merge(scores.softmax(-1)[..., 1:] @ v)


class ReadLater(Sinks):
    """How much the sinks take is read."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = torch.cat(
            [(q @ k.mT) * self.scale, self.sinks.view(1, -1, 1, 1).expand(x.size(0), -1, x.size(1), 1)], -1
        )
        probs = scores.softmax(-1)
        return self.merge(probs[..., :-1] @ v), probs[..., -1].mean()


class OfMean(Sinks):
    """The mean is taken off: a softmax does not see that either, which the matcher does not know."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        scores = torch.cat(
            [(q @ k.mT) * self.scale, self.sinks.view(1, -1, 1, 1).expand(x.size(0), -1, x.size(1), 1)], -1
        )
        scores = scores - scores.mean(dim=-1, keepdim=True)
        return self.merge(scores.softmax(-1)[..., :-1] @ v)


def masked():
    return {"x": tokens(), "mask": torch.full((1, 1, TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)}


def entry(name, model, sites=ATTENTION, refused="", batch=tokens):
    return Entry(f"sinks: {name}", lambda: (model(), batch()), sites, squares, refused)


_JUST_BEFORE = "a column that was not concatenated to the scores just before the softmax"
_OF_HEADS = "is not one number per head"

ENTRIES = [
    entry("gpt-oss", GptOss, batch=masked),
    entry("gpt-oss without a mask", GptOss),
    entry("in one line", InOneLine),
    entry("indexed", IndexedSinks),
    entry("four dimensions", SinksOfFourDimensions),
    entry("filled", Filled, batch=lambda: (tokens(), torch.rand(TOKENS, TOKENS) < 0.3)),
    entry("computed", MadeSinks),
    entry("none, shifted", Shifted),
    entry("not dropped", NotDropped, (), "a column is concatenated to the scores but not dropped"),
    entry("of each query", OfEachQuery, (), _OF_HEADS),
    entry("of each sample", OfEachSample, (), _OF_HEADS),
    entry("scaled together", ScaledTogether, (), "and modified with them before the softmax"),
    entry("shifted before", ShiftedBefore, ()),
    entry("last key dropped", LastKeyDropped, (), _JUST_BEFORE),
    entry("first dropped", FirstDropped, ()),
    entry("read later", ReadLater, (), "also read by getitem"),
    entry("off the mean", OfMean, ()),
]
