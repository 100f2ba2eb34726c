"""RMSNorm and LayerNorm written by hand, as people write them."""

from __future__ import annotations

import torch
import torch.nn as nn

from tests.patching.corpus.entry import Entry

WIDTH, HIDDEN, TOKENS, BATCH = 40, 56, 20, 2


class Net(nn.Module):
    """A layer, the norm, a layer."""

    def __init__(self, norm):
        super().__init__()
        self.inp = nn.Linear(WIDTH, HIDDEN)
        self.norm = norm
        self.out = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.out(self.norm(self.inp(x)))


def tokens():
    return torch.randn(BATCH, TOKENS, WIDTH)


# --------------------------------------------------------------------------------------------------------------------
# RMSNorm
# --------------------------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """As in the first Llama code: computed in float32, cast back, then weighted."""

    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


class VarianceRMSNorm(nn.Module):
    """As in Hugging Face's Llama, T5 and Mistral."""

    def __init__(self, hidden_size, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden_size) + 0.5)
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class GemmaRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.randn(dim) * 0.1)

    def forward(self, x):
        output = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps)
        # x * w on the unit-offset weight
        output = output * (1.0 + self.weight)
        return output  # noqa: RET504


class NormScaled(nn.Module):
    """The root mean square as a vector norm over the root of the width; eps is a floor, hence tiny."""

    def __init__(self, d, p=-1.0, eps=0.0):
        super().__init__()
        self.d, self.eps = d, eps
        self.scale = nn.Parameter(torch.rand(d) + 0.5)

    def forward(self, x):
        rms_x = x.norm(2, dim=-1, keepdim=True) * self.d ** (-1.0 / 2)
        x_normed = x / (rms_x + self.eps)
        return self.scale * x_normed


def rms_norm(x, eps=1e-6):
    """No weight at all: purely functional."""
    return x / torch.sqrt(torch.mean(torch.square(x), dim=-1, keepdim=True) + eps)


class WithoutWeight(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.o = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.o(rms_norm(self.q(x)))


class InlineInBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.g = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.w = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x):
        ms = (x**2).mean(dim=-1, keepdim=True)
        x = x * (ms + 1e-8) ** -0.5 * self.g
        return self.w(x)


# --------------------------------------------------------------------------------------------------------------------
# LayerNorm
# --------------------------------------------------------------------------------------------------------------------


class LayerNorm(nn.Module):
    def __init__(self, ndim, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(ndim) + 0.5)
        self.bias = nn.Parameter(torch.randn(ndim) * 0.1)
        self.eps = eps

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        var = x.var(-1, keepdim=True, unbiased=False)
        return self.weight * (x - mean) / torch.sqrt(var + self.eps) + self.bias


class BertLayerNorm(nn.Module):
    """TF style, epsilon inside the square root."""

    def __init__(self, hidden_size, eps=1e-12):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden_size) + 0.5)
        self.bias = nn.Parameter(torch.randn(hidden_size) * 0.1)
        self.variance_epsilon = eps

    def forward(self, x):
        u = x.mean(-1, keepdim=True)
        s = (x - u).pow(2).mean(-1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.variance_epsilon)
        return self.weight * x + self.bias


class VarMean(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(n) + 0.5)
        self.beta = nn.Parameter(torch.zeros(n))

    def forward(self, x):
        var, mean = torch.var_mean(x, dim=-1, keepdim=True, correction=0)
        return (x - mean) * torch.rsqrt(var + 1e-5) * self.gamma + self.beta


class BiasedStd(nn.Module):
    """The biased deviation, without an epsilon."""

    def __init__(self, n):
        super().__init__()
        self.a = nn.Parameter(torch.rand(n) + 0.5)
        self.b = nn.Parameter(torch.randn(n) * 0.1)

    def forward(self, x):
        centred = x - x.mean(dim=-1, keepdim=True)
        std = x.std(dim=-1, keepdim=True, unbiased=False)
        return self.a * centred / std + self.b


class SquareOfMean(nn.Module):
    """E[x^2] - E[x]^2, without weight or bias."""

    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        mean_x2 = (x**2).mean(dim=-1, keepdim=True)
        var = mean_x2 - mean**2
        x_norm = (x - mean) / torch.sqrt(var + 1e-5)
        return x_norm  # noqa: RET504


RMS, LAYER = (("norm", "rms_norm"),), (("norm", "layer_norm"),)


class OptionalWeight(nn.Module):
    """As in many diffusion models: ``elementwise_affine`` decides whether there is a weight."""

    def __init__(self, dim, eps=1e-6, affine=True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.rand(dim) + 0.5) if affine else None

    def forward(self, x):
        variance = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + self.eps)
        if self.weight is not None:
            x = x * self.weight
        return x


class UnitOffset(nn.Module):
    """As in Gemma's own code: a flag says what the weight is added to."""

    def __init__(self, dim, eps=1e-6, add_unit_offset=True):
        super().__init__()
        self.eps, self.add_unit_offset = eps, add_unit_offset
        self.weight = nn.Parameter(torch.rand(dim))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        x = self._norm(x.float()).type_as(x)
        if self.add_unit_offset:
            return x * (1 + self.weight)
        return x * self.weight


class BothOrNone(OptionalWeight):
    def forward(self, x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        if self.weight is not None:
            x = self.weight * x + 0.5 * self.weight
        return x


ENTRIES = [
    Entry("rms_float_type_as", lambda: (Net(RMSNorm(HIDDEN)), tokens()), RMS),
    Entry("rms_variance_pow", lambda: (Net(VarianceRMSNorm(HIDDEN)), tokens()), RMS),
    Entry("rms_weight_plus_one", lambda: (Net(GemmaRMSNorm(HIDDEN)), tokens()), RMS),
    Entry("rms_by_vector_norm", lambda: (Net(NormScaled(HIDDEN)), tokens()), RMS),
    Entry("rms_function_no_weight", lambda: (WithoutWeight(), tokens()), (("", "rms_norm"),)),
    Entry("rms_inline_power", lambda: (InlineInBlock(), tokens()), (("", "rms_norm"),)),
    Entry("rms_optional_weight", lambda: (Net(OptionalWeight(HIDDEN)), tokens()), RMS),
    Entry("rms_plus_one_by_a_flag", lambda: (Net(UnitOffset(HIDDEN)), tokens()), RMS),
    Entry("layer_norm_optional_weight", lambda: (Net(BothOrNone(HIDDEN)), tokens()), LAYER),
    Entry("layer_norm_var_biased", lambda: (Net(LayerNorm(HIDDEN)), tokens()), LAYER),
    Entry("layer_norm_second_moment", lambda: (Net(BertLayerNorm(HIDDEN)), tokens()), LAYER),
    Entry("layer_norm_var_mean", lambda: (Net(VarMean(HIDDEN)), tokens()), LAYER),
    Entry("layer_norm_std_biased", lambda: (Net(BiasedStd(HIDDEN)), tokens()), LAYER),
    Entry("layer_norm_square_of_mean", lambda: (Net(SquareOfMean()), tokens()), LAYER),
]
