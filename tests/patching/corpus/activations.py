"""GELU, bias + GELU and SwiGLU written by hand, as people write them."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from tests.patching.corpus.entry import Entry

WIDTH, HIDDEN, TOKENS, BATCH = 40, 56, 20, 2


def tokens():
    return torch.randn(BATCH, TOKENS, WIDTH)


class MLP(nn.Module):
    """Two layers around an activation that is a module or a function."""

    def __init__(self, act):
        super().__init__()
        self.c_fc = nn.Linear(WIDTH, HIDDEN)
        self.act = act
        self.c_proj = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


# --------------------------------------------------------------------------------------------------------------------
# GELU by tanh
# --------------------------------------------------------------------------------------------------------------------


class NewGELU(nn.Module):
    """The tanh approximation, https://arxiv.org/abs/1606.08415"""

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class CubeByPower(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        h = self.fc1(x)
        h = 0.5 * h * (1 + torch.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        return self.fc2(h)


def gelu_by_products(x):
    return x * 0.5 * (1.0 + torch.tanh(0.7978845608 * x * (1.0 + 0.044715 * x * x)))


class FactoredCube(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense_h_to_4h = nn.Linear(WIDTH, HIDDEN)
        self.dense_4h_to_h = nn.Linear(HIDDEN, WIDTH)

    def forward(self, hidden_states):
        return self.dense_4h_to_h(gelu_by_products(self.dense_h_to_4h(hidden_states)))


class CubeByProducts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.coefficient = math.sqrt(2 / math.pi)

    @staticmethod
    def gelu(x, c):
        inner = c * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + inner.tanh())

    def forward(self, x):
        return self.down(self.gelu(self.up(x), self.coefficient))


class StepByStep(nn.Module):
    """cdf first, as in the original BERT code."""

    def forward(self, x):
        # the Gaussian's cumulative distribution, nearly
        cdf = 0.5 * (
            1.0
            + torch.tanh(
                math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3))  # cube by pow
            )
        )
        return x * cdf


# --------------------------------------------------------------------------------------------------------------------
# GELU by erf
# --------------------------------------------------------------------------------------------------------------------


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


class ErfFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(WIDTH, HIDDEN)
        self.output = nn.Linear(HIDDEN, WIDTH)
        self.intermediate_act_fn = gelu

    def forward(self, hidden_states):
        hidden_states = self.dense(hidden_states)
        hidden_states = self.intermediate_act_fn(hidden_states)
        return self.output(hidden_states)


class SpecialErf(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rsqrt2", torch.tensor(1 / math.sqrt(2)), persistent=False)

    def forward(self, x):
        return 0.5 * x * (1 + torch.special.erf(x * self.rsqrt2))


class ErfInline(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        x = self.w1(x)
        x = (x * (1 + (x * 0.7071067811865476).erf())) / 2
        return self.w2(x)


class GELUModule(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        phi = (1.0 + torch.erf(input / np.sqrt(2.0))) * 0.5
        return input * phi


# --------------------------------------------------------------------------------------------------------------------
# Bias + GELU
# --------------------------------------------------------------------------------------------------------------------


def bias_gelu(bias, y):
    x = bias + y
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class ParallelMLP(nn.Module):
    """The bias is kept apart from the product so that it can be added with the activation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, WIDTH) * 0.1)
        self.bias = nn.Parameter(torch.randn(HIDDEN) * 0.1)
        self.dense_4h_to_h = nn.Linear(HIDDEN, WIDTH)

    def forward(self, hidden_states):
        intermediate_parallel, bias_parallel = F.linear(hidden_states, self.weight), self.bias
        intermediate_parallel = bias_gelu(bias_parallel, intermediate_parallel)
        return self.dense_4h_to_h(intermediate_parallel)


class SkipBias(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.bias = nn.Parameter(torch.randn(HIDDEN) * 0.1)
        self.proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return self.proj(F.gelu(self.fc(x) + self.bias))


class BiasTanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(WIDTH, HIDDEN) * 0.1)
        self.b_in = nn.Parameter(torch.randn(HIDDEN) * 0.1)
        self.w_out = nn.Parameter(torch.randn(HIDDEN, WIDTH) * 0.1)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x):
        pre = torch.einsum("btd,dh->bth", x, self.w_in) + self.b_in
        return torch.einsum("bth,hd->btd", self.act(pre), self.w_out)


# --------------------------------------------------------------------------------------------------------------------
# SwiGLU
# --------------------------------------------------------------------------------------------------------------------


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, HIDDEN, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class GatedMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj  # noqa: RET504


class Chunked(nn.Module):
    def __init__(self):
        super().__init__()
        self.w12 = nn.Linear(WIDTH, 2 * HIDDEN)
        self.w3 = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        x12 = self.w12(x)
        x1, x2 = x12.chunk(2, dim=-1)
        hidden = F.silu(x1) * x2
        return self.w3(hidden)


class SigmoidByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, HIDDEN)
        self.value = nn.Linear(WIDTH, HIDDEN)
        self.out = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        g = self.gate(x)
        swish = g * torch.sigmoid(g)
        return self.out(swish * self.value(x))


class SwiGLU(nn.Module):
    """Value first, then the gate: the second half goes through silu."""

    def forward(self, x):
        x, gate = x.chunk(2, dim=-1)
        return F.silu(gate) * x


class UpFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.gate = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        up, gate = self.up(x), self.gate(x)
        return self.down(
            up
            # swish of the gate
            * torch.nn.functional.silu(gate)
        )


def swiglu(packed):
    half = packed.shape[-1] // 2
    a, b = packed[..., :half], packed[..., half:]
    return a / (1 + torch.exp(-a)) * b


class HelperSplit(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, 2 * HIDDEN)
        self.proj = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.proj(swiglu(self.fc(x)))


def packed_mlp():
    return nn.Sequential(nn.Linear(WIDTH, 2 * HIDDEN), SwiGLU(), nn.Linear(HIDDEN, WIDTH))


GELU, BIAS, SWIGLU = (("", "gelu"),), (("", "bias_gelu"),), (("", "swiglu"),)
ENTRIES = [
    Entry("gelu_tanh_module", lambda: (MLP(NewGELU()), tokens()), (("act", "gelu"),)),
    Entry("gelu_tanh_numpy_inline", lambda: (CubeByPower(), tokens()), GELU),
    Entry("gelu_tanh_factored_function", lambda: (FactoredCube(), tokens()), GELU),
    Entry("gelu_tanh_products_static_method", lambda: (CubeByProducts(), tokens()), GELU),
    Entry("gelu_tanh_cdf_multiline", lambda: (MLP(StepByStep()), tokens()), (("act", "gelu"),)),
    Entry("gelu_erf_function", lambda: (ErfFunction(), tokens()), GELU),
    Entry("gelu_erf_special_buffer", lambda: (MLP(SpecialErf()), tokens()), (("act", "gelu"),)),
    Entry("gelu_erf_inline_half_last", lambda: (ErfInline(), tokens()), GELU),
    Entry("gelu_erf_phi_module", lambda: (MLP(GELUModule()), tokens()), (("act", "gelu"),)),
    Entry("gelu_two_layers", lambda: (nn.Sequential(MLP(NewGELU()), MLP(NewGELU())), tokens()),
          (("0.act", "gelu"), ("1.act", "gelu"))),
    Entry("bias_gelu_function", lambda: (ParallelMLP(), tokens()), BIAS),
    Entry("bias_gelu_added_inline", lambda: (SkipBias(), tokens()), BIAS),
    Entry("bias_gelu_tanh_module", lambda: (BiasTanh(), tokens()), BIAS),
    Entry("swiglu_one_line", lambda: (FeedForward(), tokens()), SWIGLU),
    Entry("swiglu_silu_module", lambda: (GatedMLP(), tokens()), SWIGLU),
    Entry("swiglu_chunk", lambda: (Chunked(), tokens()), SWIGLU),
    Entry("swiglu_sigmoid_by_hand", lambda: (SigmoidByHand(), tokens()), SWIGLU),
    Entry("swiglu_packed_module_gate_second", lambda: (packed_mlp(), tokens()), (("1", "swiglu"),)),
    Entry("swiglu_up_first", lambda: (UpFirst(), tokens()), SWIGLU),
    Entry("swiglu_exp_by_hand_slices", lambda: (HelperSplit(), tokens()), SWIGLU),
]  # fmt: skip
