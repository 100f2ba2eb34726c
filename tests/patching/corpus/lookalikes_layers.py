"""What looks like an activation, a norm, a residual or a rope that a recipe could take, and is another function.

As in lookalikes_attention: with sites and a reason, either is right, and no other site is.
"""

from __future__ import annotations

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.patching.corpus.activations import HIDDEN, MLP
from tests.patching.corpus.entry import Entry
from tests.patching.corpus.lookalikes_attention import of_both
from tests.patching.corpus.norms import Net, tokens
from tests.patching.corpus.residuals import Mixer, uneven
from tests.patching.corpus.ropes import SIZE, Projections, angles, rotate_half
from tests.patching.corpus.ropes import tokens as rope_tokens

WIDTH = 40

# --------------------------------------------------------------------------------------------------------------------
# Activations
# --------------------------------------------------------------------------------------------------------------------


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class OffConstant(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.04 * x**3)))


class OffRoot(nn.Module):
    """0.8 for sqrt(2 / pi) = 0.7979."""

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3))))


class SquareForCube(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 2))))


class ErfWithoutRoot(nn.Module):
    def forward(self, x):
        return x * 0.5 * (1.0 + torch.erf(x / 2.0))


class ErfOfAnother(nn.Module):
    """The gate is another tensor's: x times the distribution at its mean."""

    def forward(self, x):
        centre = x - x.mean(dim=-1, keepdim=True)
        return x * 0.5 * (1.0 + torch.erf(centre / math.sqrt(2.0)))


class LearntConstant(nn.Module):
    def __init__(self):
        super().__init__()
        self.cubic = nn.Parameter(torch.tensor(0.044715))

    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + self.cubic * x**3)))


class HalfTheChannels(nn.Module):
    def forward(self, x):
        a, b = x[..., : HIDDEN // 2], x[..., HIDDEN // 2 :]
        a = 0.5 * a * (1 + torch.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)))
        return torch.cat([a, b], dim=-1)


class DistributionUsedTwice(nn.Module):
    def forward(self, x):
        cdf = 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))
        self.open_gates = cdf.detach()  # looked at by the training script
        return x * cdf


class GeluByHand(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)


class ReGLU(Gated):
    def forward(self, x):
        return self.down(F.relu(self.gate(x)) * self.up(x))


class SigmoidGate(Gated):
    def forward(self, x):
        return self.down(torch.sigmoid(self.gate(x)) * self.up(x))


class SwishWithBeta(Gated):
    def __init__(self):
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(1.2))

    def forward(self, x):
        g = self.gate(x)
        return self.down(g * torch.sigmoid(self.beta * g) * self.up(x))


class SiluReturned(Gated):
    def forward(self, x):
        g = F.silu(self.gate(x))
        return self.down(g * self.up(x)), g.mean()


class OneUp(Gated):
    """The other operand is one number a token: a broadcast."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SwigluTwiceDifferentiated(Gated):
    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = self.down(F.silu(self.gate(x)) * self.up(x))
            (g,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return g.square().mean()


# --------------------------------------------------------------------------------------------------------------------
# Norms
# --------------------------------------------------------------------------------------------------------------------


class OverTokens(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)


class OverBoth(nn.Module):
    """One number for all tokens of a sequence."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-6)


class EpsOutside(nn.Module):
    def __init__(self, eps=1e-2):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.eps = eps

    def forward(self, x):
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class SumForMean(nn.Module):
    """The length, not the root mean square."""

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


class StatisticsDetached(nn.Module):
    def forward(self, x):
        rms = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6).detach()
        return x * rms


class StatisticsStored(nn.Module):
    """The inverse deviation is kept for others."""

    def forward(self, x):
        self.rstd = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * self.rstd


class PartialRms(nn.Module):
    """The statistics of a quarter of the features for all of them."""

    def forward(self, x):
        partial = x[..., : HIDDEN // 4]
        return x * torch.rsqrt(partial.pow(2).mean(-1, keepdim=True) + 1e-6)


class WeightUnderAConditionInTheSquares(nn.Module):
    """What is weighted under a condition is read again: it is not normalised alone."""

    def __init__(self):
        super().__init__()
        self.eps, self.weight = 1e-6, nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            x = x * scale * self.weight
        return x * scale.sqrt()


class AnnotatedLayerNorm(nn.Module):
    """Unbiased deviation, eps outside: not torch's layer norm."""

    def __init__(self, features, eps=1e-6):
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(features))
        self.b_2 = nn.Parameter(torch.zeros(features))
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        std = x.std(-1, keepdim=True)
        return self.a_2 * (x - mean) / (std + self.eps) + self.b_2


class UnbiasedVariance(nn.Module):
    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-1, keepdim=True)
        return (x - mean) / torch.sqrt(var + 1e-5)


class BatchStatistics(nn.Module):
    """BatchNorm by hand: statistics over batch and tokens in training, running ones else."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(HIDDEN)), nn.Parameter(torch.zeros(HIDDEN))
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(HIDDEN))
        self.register_buffer("running_var", torch.ones(HIDDEN))

    def forward(self, x):
        if self.training:
            xmean = x.mean((0, 1), keepdim=True)
            xvar = x.var((0, 1), keepdim=True)
            with torch.no_grad():
                self.running_mean = (1 - self.momentum) * self.running_mean + self.momentum * xmean.view(-1)
                self.running_var = (1 - self.momentum) * self.running_var + self.momentum * xvar.view(-1)
        else:
            xmean, xvar = self.running_mean, self.running_var
        xhat = (x - xmean) / torch.sqrt(xvar + 1e-5)
        return self.gamma * xhat + self.beta


class WeightBeforeNorm(nn.Module):
    """The weight stands inside: the statistics are of the weighted input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, x):
        x = x * self.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class WrongMean(nn.Module):
    """The mean that is taken off is not the one of the variance."""

    def forward(self, x):
        median = x.median(dim=-1, keepdim=True).values
        var = x.var(-1, keepdim=True, unbiased=False)
        return (x - median) / torch.sqrt(var + 1e-5)


# --------------------------------------------------------------------------------------------------------------------
# Residuals
# --------------------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = Mixer()
        self.drop = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(WIDTH)


class LearntScale(Residual):
    def __init__(self):
        super().__init__()
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x):
        x = x + self.gamma * self.drop(self.mix(x))
        return self.norm(x)


class Subtracted(Residual):
    def forward(self, x):
        return self.norm(x - self.drop(self.mix(x)))


class DropoutOfSum(Residual):
    def forward(self, x):
        return self.norm(self.drop(x + self.mix(x)))


class DropPath(Residual):
    """Whole samples are dropped."""

    def forward(self, x):
        y = self.mix(x)
        if self.training:
            keep = torch.rand(x.size(0), 1, 1, device=x.device) < 0.9
            y = y * keep / 0.9
        return self.norm(x + y)


class NormOverTokens(Residual):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(20)

    def forward(self, x):
        x = x + self.drop(self.mix(x))
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class SumChangedBetween(Residual):
    def forward(self, x):
        h = x + self.drop(self.mix(x))
        h[:, 0] = 0.0  # the first token is cleared before the norm
        return self.norm(h)


class SharedDropout(Residual):
    """What was dropped is used twice."""

    def forward(self, x):
        y = self.drop(self.mix(x))
        return self.norm(x + y) + y


class BroadcastResidual(Residual):
    """The residual is one vector for all tokens."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return self.norm(self.query + self.drop(self.mix(x)))


def hooked_dropout():
    model = Hooked()
    model.drop.register_forward_hook(lambda module, args, output: output.clamp(-0.2, 0.2))
    return model, tokens()


class Hooked(Residual):
    def forward(self, x):
        return self.norm(x + self.drop(self.mix(x)))


# --------------------------------------------------------------------------------------------------------------------
# Ropes
# --------------------------------------------------------------------------------------------------------------------


class Halves(Projections):
    def __init__(self):
        super().__init__()
        emb = torch.cat([angles(SIZE)] * 2, dim=-1)
        self.register_buffer("cos", emb.cos())
        self.register_buffer("sin", emb.sin())


def swap_halves(x):
    """No minus: a reflection, not a rotation."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x2, x1), dim=-1)


class NotARotation(Halves):
    def forward(self, x):
        q, k, v = self.heads(x)
        q = q * self.cos + swap_halves(q) * self.sin
        k = k * self.cos + swap_halves(k) * self.sin
        return self.attend(q, k, v)


class WrongOrder(Halves):
    """cat((x1, -x2)): the halves stay where they are."""

    def forward(self, x):
        q, k, v = self.heads(x)
        q1, q2 = q.chunk(2, -1)
        k1, k2 = k.chunk(2, -1)
        q = q * self.cos + torch.cat((q1, -q2), -1) * self.sin
        k = k * self.cos + torch.cat((k1, -k2), -1) * self.sin
        return self.attend(q, k, v)


class Backwards(Halves):
    """cat((x2, -x1)): a rotation the other way, which is one with -sin."""

    def forward(self, x):
        q, k, v = self.heads(x)
        q1, q2 = q.chunk(2, -1)
        k1, k2 = k.chunk(2, -1)
        q = q * self.cos + torch.cat((q2, -q1), -1) * self.sin
        k = k * self.cos + torch.cat((k2, -k1), -1) * self.sin
        return self.attend(q, k, v)


class MixedLayouts(Projections):
    """A table for pairs of neighbours with a rotation of halves: a known mistake, and theirs to keep."""

    def __init__(self):
        super().__init__()
        self.register_buffer("cos", angles(SIZE).cos().repeat_interleave(2, -1))
        self.register_buffer("sin", angles(SIZE).sin().repeat_interleave(2, -1))

    def forward(self, x):
        q, k, v = self.heads(x)
        q = q * self.cos + rotate_half(q) * self.sin
        k = k * self.cos + rotate_half(k) * self.sin
        return self.attend(q, k, v)


class LearntFrequencies(Projections):
    def __init__(self):
        super().__init__()
        self.inv_freq = nn.Parameter(1.0 / (100.0 ** (torch.arange(0, SIZE, 2).float() / SIZE)))

    def forward(self, x):
        q, k, v = self.heads(x)
        freqs = torch.arange(x.size(1)).float()[:, None] * self.inv_freq
        emb = torch.cat((freqs, freqs), dim=-1)
        cos, sin = emb.cos(), emb.sin()  # with a gradient
        q = q * cos + rotate_half(q) * sin
        k = k * cos + rotate_half(k) * sin
        return self.attend(q, k, v)


class OverTheHeads(Projections):
    """A table over the heads, not the tokens."""

    def __init__(self):
        super().__init__()
        emb = torch.cat([angles(SIZE)[:3]] * 2, dim=-1)[None, :, None]
        self.register_buffer("cos", emb.cos())
        self.register_buffer("sin", emb.sin())

    def forward(self, x):
        q, k, v = self.heads(x)
        q = q * self.cos + rotate_half(q) * self.sin
        k = k * self.cos + rotate_half(k) * self.sin
        return self.attend(q, k, v)


class HalfSin(Halves):
    """sin of the same angle is added to cos of another: no rotation, yet linear."""

    def forward(self, x):
        q, k, v = self.heads(x)
        q = q * self.cos + rotate_half(k) * self.sin  # the keys' halves with the queries
        k = k * self.cos + rotate_half(k) * self.sin
        return self.attend(q, k, v)


def refused(name, build, reason, *sites, loss=None):
    return Entry(name, build, sites, loss=loss, refused=reason)


GELU, NORM = ("act", "gelu"), ("norm", "rms_norm")
SWIGLU, ADD, ROPE = ("", "swiglu"), ("", "add_norm"), ("", "rope")


def penalised(output, batch):
    """Differentiates the activation twice."""
    (g,) = torch.autograd.grad(output.square().sum(), batch, create_graph=True)
    return g.square().mean()


ENTRIES = [
    refused("like_quick_gelu", lambda: (MLP(QuickGELU()), tokens()), "constant"),
    refused("like_gelu_off_constant", lambda: (MLP(OffConstant()), tokens()), "constant"),
    refused("like_gelu_off_root", lambda: (MLP(OffRoot()), tokens()), "constant"),
    refused("like_gelu_square_for_cube", lambda: (MLP(SquareForCube()), tokens()), "constant"),
    refused("like_gelu_erf_without_root", lambda: (MLP(ErfWithoutRoot()), tokens()), "constant"),
    refused("like_gelu_erf_of_another_tensor", lambda: (MLP(ErfOfAnother()), tokens()), "another"),
    refused("like_gelu_learnt_constant", lambda: (MLP(LearntConstant()), tokens()), "constant"),
    refused("like_gelu_half_the_channels", lambda: (MLP(HalfTheChannels()), tokens()), "slice", GELU),
    refused("like_gelu_distribution_kept", lambda: (MLP(DistributionUsedTwice()), tokens()), "read"),
    Entry(
        "like_gelu_twice_differentiated", lambda: (MLP(GeluByHand()), tokens().requires_grad_()), (GELU,),
        loss=penalised, refused="second derivative",
    ),
    refused("like_reglu", lambda: (ReGLU(), tokens()), "silu"),
    refused("like_sigmoid_gate", lambda: (SigmoidGate(), tokens()), "silu"),
    refused("like_swish_with_beta", lambda: (SwishWithBeta(), tokens()), "silu"),
    refused("like_silu_returned", lambda: (SiluReturned(), tokens()), "read", loss=of_both),
    refused("like_swiglu_broadcast", lambda: (OneUp(), tokens()), "shape"),
    refused("like_swiglu_twice_differentiated", lambda: (SwigluTwiceDifferentiated(), tokens()), "second derivative"),
    refused("like_rms_over_tokens", lambda: (Net(OverTokens()), tokens()), "dimension"),
    refused("like_rms_over_two_dimensions", lambda: (Net(OverBoth()), tokens()), "dimension", NORM),
    refused("like_rms_eps_outside", lambda: (Net(EpsOutside()), tokens()), "eps"),
    refused("like_rms_sum_for_mean", lambda: (Net(SumForMean()), tokens()), "mean", NORM),
    refused("like_rms_statistics_detached", lambda: (Net(StatisticsDetached()), tokens()), "detach"),
    refused("like_rms_statistics_stored", lambda: (Net(StatisticsStored()), tokens()), "kept"),
    refused("like_rms_of_a_part", lambda: (Net(PartialRms()), tokens()), "another"),
    refused("like_rms_weight_before", lambda: (Net(WeightBeforeNorm()), tokens()), "weight", NORM),
    refused(
        "like_rms_weight_under_a_condition",
        lambda: (Net(WeightUnderAConditionInTheSquares()), tokens()),
        "the scale is read again",
    ),
    refused("like_layer_norm_annotated", lambda: (Net(AnnotatedLayerNorm(HIDDEN)), tokens()), "unbiased"),
    refused("like_layer_norm_unbiased", lambda: (Net(UnbiasedVariance()), tokens()), "unbiased"),
    refused("like_layer_norm_of_median", lambda: (Net(WrongMean()), tokens()), "mean"),
    refused("like_batch_norm_by_hand", lambda: (Net(BatchStatistics()), tokens()), "dimension"),
    refused("like_residual_learnt_scale", lambda: (LearntScale(), tokens()), "dropout", ADD, loss=uneven),
    refused("like_residual_subtracted", lambda: (Subtracted(), tokens()), "sum", loss=uneven),
    refused("like_dropout_of_the_sum", lambda: (DropoutOfSum(), tokens()), "dropout", loss=uneven),
    refused("like_drop_path", lambda: (DropPath(), tokens()), "dropout", ADD, loss=uneven),
    refused("like_norm_over_tokens", lambda: (NormOverTokens(), tokens()), "dimension", loss=uneven),
    refused("like_sum_changed_in_place", lambda: (SumChangedBetween(), tokens()), "in place", loss=uneven),
    refused("like_dropped_used_twice", lambda: (SharedDropout(), tokens()), "read", ADD, loss=uneven),
    refused("like_residual_broadcast", lambda: (BroadcastResidual(), tokens()), "shape", loss=uneven),
    refused("like_hook_on_residual_dropout", hooked_dropout, "hook", ADD, loss=uneven),
    refused("like_rope_reflection", lambda: (NotARotation(), rope_tokens()), "rotation"),
    refused("like_rope_halves_in_place", lambda: (WrongOrder(), rope_tokens()), "rotation"),
    refused("like_rope_backwards", lambda: (Backwards(), rope_tokens()), "rotation", ROPE),
    refused("like_rope_mixed_layouts", lambda: (MixedLayouts(), rope_tokens()), "table"),
    refused("like_rope_learnt_frequencies", lambda: (LearntFrequencies(), rope_tokens()), "gradient"),
    refused("like_rope_over_heads", lambda: (OverTheHeads(), rope_tokens()), "table"),
    refused("like_rope_of_two_tensors", lambda: (HalfSin(), rope_tokens()), "rotation", ROPE),
]  # fmt: skip
