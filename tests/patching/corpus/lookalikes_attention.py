"""What looks like attention that a recipe could take, and is not, or not without care.

An entry without sites must be left alone, or refused for the reason given. An entry with both sites and a reason may be
patched there if the result and every gradient stay exact, or be refused with that reason; no other site is right.
"""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.patching.corpus.entry import Entry

HEADS, SIZE, TOKENS, BATCH = 4, 10, 20, 2
WIDTH = HEADS * SIZE


def tokens():
    return torch.randn(BATCH, TOKENS, WIDTH)


class Attention(nn.Module):
    """Projections and a causal mask; what lies between is each model's own."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.attn_drop = nn.Dropout(dropout)
        self.register_buffer("mask", torch.tril(torch.ones(TOKENS, TOKENS)).view(1, 1, TOKENS, TOKENS))

    def qkv(self, x):
        B, T, _ = x.shape  # noqa: N806
        return [f(x).view(B, T, HEADS, SIZE).transpose(1, 2) for f in (self.query, self.key, self.value)]

    def merge(self, y):
        return self.proj(y.transpose(1, 2).reshape(y.size(0), -1, WIDTH))


# --------------------------------------------------------------------------------------------------------------------
# Masks
# --------------------------------------------------------------------------------------------------------------------


class SlidingWindow(Attention):
    def __init__(self, window=6):
        super().__init__()
        causal = torch.ones(TOKENS, TOKENS).tril()
        self.register_buffer("window", (causal - causal.tril(-window)).bool())

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(SIZE)
        att = att.masked_fill(~self.window, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)


class SeesOneAhead(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        T = x.size(1)  # noqa: N806
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        mask = torch.tril(torch.ones(T, T, device=x.device), diagonal=1)  # one token of the future is seen
        att = att.masked_fill(mask[None, None] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)


class StrictlyBefore(Attention):
    """Nobody sees himself: the first row is masked throughout, and with a finite fill it is an average."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        T = x.size(1)  # noqa: N806
        scores = q @ k.transpose(-2, -1) / math.sqrt(SIZE)
        mask = torch.tril(torch.ones(T, T, dtype=torch.bool, device=x.device), -1)
        scores = scores.masked_fill(mask.logical_not(), -1e9)
        return self.merge(scores.softmax(-1) @ v)


class AlmostCausal(Attention):
    """Causal but for one entry."""

    def __init__(self):
        super().__init__()
        self.mask[0, 0, 3, 11] = 1

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = att.masked_fill(self.mask == 0, float("-inf"))
        att = self.attn_drop(att.softmax(dim=-1))
        return self.merge(att @ v)


class WeakFill(Attention):
    """The fill is small: masked tokens still count."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = att.masked_fill(self.mask == 0, -3.0)
        return self.merge(F.softmax(att, dim=-1) @ v)


class LearntBias(Attention):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, HEADS, TOKENS, TOKENS) * 0.1)

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = att + self.bias
        att = att.masked_fill(self.mask == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)


class RelativeTable(Attention):
    """A small table of biases by distance, gathered: its gradient is a sum over the diagonals."""

    def __init__(self):
        super().__init__()
        self.relative = nn.Embedding(2 * TOKENS - 1, HEADS)

    def forward(self, x):
        q, k, v = self.qkv(x)
        pos = torch.arange(x.size(1), device=x.device)
        bias = self.relative(pos[:, None] - pos[None, :] + TOKENS - 1).permute(2, 0, 1)
        att = torch.einsum("bhid,bhjd->bhij", q, k) * SIZE**-0.5 + bias
        att = att.softmax(dim=-1)
        return self.merge(torch.einsum("bhij,bhjd->bhid", att, v))


class MaskAfterSoftmax(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = F.softmax((q @ k.transpose(-2, -1)) / math.sqrt(SIZE), dim=-1)
        att = att.masked_fill(self.mask == 0, 0.0)  # the rows no longer sum to one
        return self.merge(att @ v)


class MaskMultipliedIn(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) / math.sqrt(SIZE)
        att = att * self.mask  # a score of 0 is no mask
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)


class MaskFromData(Attention):
    """Padding comes from the input's values, another mask each step."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        pad = x[..., 0] < -1.0
        att = (q @ k.transpose(-2, -1)) / math.sqrt(SIZE)
        att = att.masked_fill(pad[:, None, None, :], torch.finfo(att.dtype).min)
        att = att.softmax(dim=-1)
        return self.merge(att @ v)


# --------------------------------------------------------------------------------------------------------------------
# Weights that somebody else sees
# --------------------------------------------------------------------------------------------------------------------


class WeightsReturned(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = att.masked_fill(self.mask == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v), att


class WeightsStored(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = att.masked_fill(self.mask == 0, float("-inf"))
        self.attn = F.softmax(att, dim=-1)  # for the plot
        return self.merge(self.attn @ v)


class WeightsListed(Attention):
    def __init__(self):
        super().__init__()
        self.maps = []

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = att.masked_fill(self.mask == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        if len(self.maps) < 2:
            self.maps.append(att.detach())
        return self.merge(att @ v)


class ScoresRead(Attention):
    """A statistic of the scores is returned: nothing of size T x T lives on, but something was read."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        largest = att.detach().abs().amax()
        att = att.masked_fill(self.mask == 0, float("-inf")).softmax(-1)
        return self.merge(att @ v), largest


class InnerModules(Attention):
    def __init__(self):
        super().__init__()
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = att.masked_fill(self.mask == 0, float("-inf"))
        att = self.attn_drop(self.softmax(att))
        return self.merge(att @ v)


class Seen(list):
    """A hook that keeps what it saw of each call."""

    def __call__(self, module, args, output):
        self.append(output.detach().mean())


def hook_on_softmax():
    model = InnerModules()
    model.softmax.register_forward_hook(Seen())
    return model, tokens()


def hook_on_dropout():
    model = InnerModules()
    model.attn_drop.register_forward_hook(lambda module, args, output: output * 0.5)  # and it changes the result
    return model, tokens()


def backward_hook_on_softmax():
    model = InnerModules()
    model.softmax.register_full_backward_hook(lambda module, grad_input, grad_output: (grad_input[0] * 2,))
    return model, tokens()


class TensorHook(Attention):
    """A hook on the weights' gradient."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = ((q @ k.transpose(-2, -1)) * SIZE**-0.5).softmax(dim=-1)
        att.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return self.merge(att @ v)


# --------------------------------------------------------------------------------------------------------------------
# Another function of the scores
# --------------------------------------------------------------------------------------------------------------------


class SoftmaxOverQueries(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = F.softmax(att, dim=-2)  # slots compete for the inputs
        return self.merge(att @ v)


class SoftmaxOverHeads(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = F.softmax(att, dim=1)
        return self.merge(att @ v)


class SigmoidAttention(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5 - math.log(x.size(1))
        att = torch.sigmoid(att)
        return self.merge(att @ v)


class SoftmaxOne(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        top = att.amax(-1, keepdim=True).detach()
        e = torch.exp(att - top)
        att = e / (torch.exp(-top) + e.sum(dim=-1, keepdim=True))  # exp(x) / (1 + sum exp(x))
        return self.merge(att @ v)


class TopK(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        kth = att.topk(5, dim=-1).values[..., -1:]
        att = att.masked_fill(att < kth, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)


class Renormalised(Attention):
    """Dropped weights are made up for: rows sum to one again."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = self.attn_drop(((q @ k.transpose(-2, -1)) * SIZE**-0.5).softmax(-1))
        att = att / att.sum(-1, keepdim=True)
        return self.merge(att @ v)


class DropoutBeforeSoftmax(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = self.attn_drop(att)
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)


class DropoutByTensor(Attention):
    """The rate is a buffer that a schedule changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("p", torch.tensor(0.15))

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = ((q @ k.transpose(-2, -1)) * SIZE**-0.5).softmax(dim=-1)
        att = F.dropout(att, self.p, self.training)
        return self.merge(att @ v)


class DropoutByHand(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = ((q @ k.transpose(-2, -1)) * SIZE**-0.5).softmax(dim=-1)
        if self.training:
            keep = torch.bernoulli(torch.full_like(att[:, :, :, :1], 0.9))  # whole rows, and not scaled up
            att = att * keep
        return self.merge(att @ v)


class DropoutAlways(Attention):
    """Dropout in eval too."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = ((q @ k.transpose(-2, -1)) * SIZE**-0.5).softmax(dim=-1)
        att = F.dropout(att, p=0.1, training=True)
        return self.merge(att @ v)


class Temperature(Attention):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = q @ k.transpose(-2, -1) / self.temperature
        att = att.masked_fill(self.mask == 0, float("-inf"))
        return self.merge(F.softmax(att, dim=-1) @ v)


class ScalePerHead(Attention):
    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.full((HEADS, 1, 1), 1.1))

    def forward(self, x):
        q, k, v = self.qkv(x)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        att = q @ k.transpose(-2, -1) * self.logit_scale.exp()
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)


class TalkingHeads(Attention):
    """The heads mix between the scores and the weights."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.eye(HEADS) + 0.1)

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = torch.einsum("hg,bgij->bhij", self.mix, att)
        return self.merge(att.softmax(-1) @ v)


class WeightsOfWeights(Attention):
    """The output is the product with the transposed weights."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = ((q @ k.transpose(-2, -1)) * SIZE**-0.5).softmax(-1)
        return self.merge(att.transpose(-2, -1) @ v)


class Detached(Attention):
    """No gradient flows through the weights."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = ((q @ k.transpose(-2, -1)) * SIZE**-0.5).softmax(-1)
        return self.merge(att.detach() @ v)


class SquaredScale(Attention):
    """Scaled twice; both must count."""

    def forward(self, x):
        q, k, v = self.qkv(x)
        q = q * SIZE**-0.5
        att = (q @ k.transpose(-2, -1)) / math.sqrt(SIZE)
        return self.merge(att.softmax(-1) @ v)


# --------------------------------------------------------------------------------------------------------------------
# Changes in place, branches, second derivatives
# --------------------------------------------------------------------------------------------------------------------


class QueriesChanged(Attention):
    """Queries and keys are frozen, so that autograd does not mind the change in between."""

    def __init__(self):
        super().__init__()
        for module in (self.query, self.key):
            module.requires_grad_(False)

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = q @ k.transpose(-2, -1)
        q.mul_(0.5)
        att = F.softmax(att * SIZE**-0.5, dim=-1)
        y = att @ v
        return self.merge(y + q)


class ValuesChanged(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        v += 0.1  # after the scores, before the product
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)


class WeightsChangedThroughView(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = self.attn_drop(((q @ k.transpose(-2, -1)) * SIZE**-0.5).softmax(dim=-1))
        first = att[:, 0]
        att.mul_(self.mask)  # in place after the softmax: `first` sees it
        return self.merge(att @ v), first.mean()


class MaskChangedLater(Attention):
    """The mask is causal in the first step and another after it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("allowed", self.mask.bool().clone())

    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = att.masked_fill(~self.allowed, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = self.merge(att @ v)
        self.allowed[..., 2, 9] = True
        return y


class BranchOnScores(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        if att.max() > 1.0:  # data decides
            att = att.clamp(max=1.0)
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)


class GradientPenalty(Attention):
    """Differentiates its own output with respect to its input, and that is differentiated again."""

    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            q, k, v = self.qkv(x)
            att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
            att = att.masked_fill(self.mask == 0, float("-inf")).softmax(-1)
            y = self.merge(att @ v)
            (grad,) = torch.autograd.grad(y.square().mean(), x, create_graph=True)
        return y.mean() + 10.0 * grad.square().sum()


class PlainCausal(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x)
        att = (q @ k.transpose(-2, -1)) * SIZE**-0.5
        att = att.masked_fill(self.mask == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        return self.merge(att @ v)


def smoothness(output, batch):
    """A penalty on the derivative of the output by the input."""
    (grad,) = torch.autograd.grad(output.square().mean(), batch, create_graph=True)
    return output.mean() + 10.0 * grad.square().sum()


def of_both(output, batch):
    """Both results count."""
    y, other = output
    return (y * batch).mean() + other.square().mean()


def either(name, model, reason, recipe="attention", **more):
    """May be patched exactly or refused."""
    return Entry(name, lambda: (model(), tokens()), (("", recipe),), refused=reason, **more)


def refused(name, model, reason, **more):
    """Must be left alone."""
    return Entry(name, lambda: (model(), tokens()), refused=reason, **more)


ENTRIES = [
    either("like_sliding_window", SlidingWindow, "mask"),
    either("like_tril_plus_one", SeesOneAhead, "mask"),
    either("like_tril_minus_one", StrictlyBefore, "mask"),
    either("like_causal_but_one_entry", AlmostCausal, "mask"),
    either("like_weak_fill", WeakFill, "mask"),
    either("like_learnt_bias", LearntBias, "bias"),
    either("like_relative_bias_table", RelativeTable, "bias"),
    refused("like_mask_after_softmax", MaskAfterSoftmax, "mask"),
    refused("like_mask_multiplied_in", MaskMultipliedIn, "mask"),
    either("like_mask_from_data", MaskFromData, "mask"),
    refused("like_weights_returned", WeightsReturned, "kept", loss=of_both),
    refused("like_weights_stored", WeightsStored, "kept"),
    refused("like_weights_listed", WeightsListed, "read"),
    refused("like_scores_read", ScoresRead, "read"),
    Entry("like_hook_on_softmax", hook_on_softmax, refused="hook"),
    Entry("like_hook_on_dropout", hook_on_dropout, refused="hook"),
    Entry("like_backward_hook_on_softmax", backward_hook_on_softmax, refused="hook"),
    refused("like_hook_on_weights_gradient", TensorHook, "hook"),
    refused("like_softmax_over_queries", SoftmaxOverQueries, "dimension"),
    refused("like_softmax_over_heads", SoftmaxOverHeads, "dimension"),
    refused("like_sigmoid_attention", SigmoidAttention, "softmax"),
    refused("like_softmax_one", SoftmaxOne, "softmax"),
    refused("like_top_k", TopK, "scores"),
    refused("like_renormalised_after_dropout", Renormalised, "weights"),
    refused("like_dropout_before_softmax", DropoutBeforeSoftmax, "dropout"),
    either("like_dropout_rate_tensor", DropoutByTensor, "dropout"),
    refused("like_dropout_by_hand", DropoutByHand, "weights"),
    either("like_dropout_always", DropoutAlways, "dropout", train=False),
    either("like_temperature_parameter", Temperature, "scale"),
    either("like_scale_per_head", ScalePerHead, "scale"),
    refused("like_talking_heads", TalkingHeads, "scores"),
    refused("like_transposed_weights", WeightsOfWeights, "weights"),
    refused("like_detached_weights", Detached, "detach"),
    either("like_scaled_twice", SquaredScale, "scale"),
    refused("like_queries_changed_in_place", QueriesChanged, "in place"),
    either("like_values_changed_in_place", ValuesChanged, "in place"),
    refused("like_weights_changed_in_place", WeightsChangedThroughView, "in place", loss=of_both),
    either("like_mask_changed_later", MaskChangedLater, "mask"),
    refused("like_branch_on_scores", BranchOnScores, "branch"),
    refused("like_gradient_penalty_inside", GradientPenalty, "second derivative"),
    Entry(
        "like_gradient_penalty_in_loss",
        lambda: (PlainCausal(), tokens().requires_grad_()),
        loss=smoothness,
        refused="second derivative",
    ),
]
