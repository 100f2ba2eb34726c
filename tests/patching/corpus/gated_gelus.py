"""Units gated by GELU, as T5 v1.1, Gemma and diffusers' transformers have them, and what looks like one."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F

from tests.patching.corpus.entry import Entry

WIDTH, HIDDEN = 24, 40


def tokens():
    return torch.randn(2, 7, WIDTH)


class GELUActivation(nn.Module):
    def forward(self, input):
        return F.gelu(input)


class PytorchGELUTanh(nn.Module):
    def forward(self, input):
        return F.gelu(input, approximate="tanh")


ACT2FN = {"gelu": GELUActivation, "gelu_pytorch_tanh": PytorchGELUTanh, "gelu_torch": nn.GELU, "relu": nn.ReLU}


class T5DenseGatedActDense(nn.Module):
    """T5 v1.1's gated-gelu: the activation's result and the linear one have names."""

    def __init__(self, act):
        super().__init__()
        self.wi_0 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.wi_1 = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.wo = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.1)
        self.act = ACT2FN[act]()

    def forward(self, hidden_states):
        hidden_gelu = self.act(self.wi_0(hidden_states))
        hidden_linear = self.wi_1(hidden_states)
        hidden_states = hidden_gelu * hidden_linear
        hidden_states = self.dropout(hidden_states)

        # To make 8bit quantization work the weights are kept in float32
        if (
            isinstance(self.wo.weight, torch.Tensor)
            and hidden_states.dtype != self.wo.weight.dtype
            and self.wo.weight.dtype != torch.int8
        ):
            hidden_states = hidden_states.to(self.wo.weight.dtype)

        return self.wo(hidden_states)


class GemmaMLP(nn.Module):
    def __init__(self, act="gelu_pytorch_tanh"):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.act_fn = ACT2FN[act]()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class GemmaOfGoogle(nn.Module):
    """The reference code, with the function's own name of the approximation."""

    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN)
        self.up_proj = nn.Linear(WIDTH, HIDDEN)
        self.down_proj = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        gate = self.gate_proj(x)
        gate = F.gelu(gate, approximate="tanh")
        up = self.up_proj(x)
        fuse = gate * up
        return self.down_proj(fuse)


class GEGLU(nn.Module):
    """diffusers': what is gated comes first."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(WIDTH, HIDDEN * 2)

    def gelu(self, gate):
        return F.gelu(gate)

    def forward(self, hidden_states):
        hidden_states = self.proj(hidden_states)
        hidden_states, gate = hidden_states.chunk(2, dim=-1)
        return hidden_states * self.gelu(gate)


class GateFirst(GEGLU):
    """The same halves, and the first is the gate."""

    def forward(self, hidden_states):
        gate, hidden_states = self.proj(hidden_states).chunk(2, dim=-1)
        return hidden_states * self.gelu(gate)


class FeedForward(nn.Module):
    """CompVis's."""

    def __init__(self, gated=None):
        super().__init__()
        self.net = nn.Sequential(gated or CompVisGEGLU(), nn.Dropout(0.1), nn.Linear(HIDDEN, WIDTH))

    def forward(self, x):
        return self.net(x)


class CompVisGEGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(WIDTH, HIDDEN * 2)

    def forward(self, x):
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * F.gelu(gate)


class UpReadLater(GemmaOfGoogle):
    def forward(self, x):
        up = self.up_proj(x)
        y = F.gelu(self.gate_proj(x)) * up
        return self.down_proj(y) + up.mean(-1, keepdim=True)


class ByConfiguration(GemmaOfGoogle):
    """Which approximation it is is a setting of the model."""

    def __init__(self):
        super().__init__()
        self.approximate = "tanh"

    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x), approximate=self.approximate) * self.up_proj(x))


# --------------------------------------------------------------------------------------------------------------------
# What looks like it
# --------------------------------------------------------------------------------------------------------------------


class WithACondition(nn.Module):
    """diffusers' own helper: on another device it does something else."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(WIDTH, HIDDEN * 2)

    def forward(self, hidden_states):
        hidden_states, gate = self.proj(hidden_states).chunk(2, dim=-1)
        return hidden_states * self.gelu(gate)

    def gelu(self, gate):
        if gate.device.type == "mps":
            return F.gelu(gate.to(dtype=torch.float32)).to(dtype=gate.dtype)
        return F.gelu(gate)


class ReGLU(GemmaOfGoogle):
    def forward(self, x):
        return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))


class SquaredReLU(GemmaOfGoogle):
    """Primer's, with no gate."""

    def forward(self, x):
        return self.down_proj(F.relu(self.up_proj(x)) ** 2)


class SquaredByName(GemmaOfGoogle):
    def forward(self, x):
        return self.down_proj(torch.square(torch.relu(self.up_proj(x))))


class Bilinear(GemmaOfGoogle):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.up_proj(x))


class OfItself(GemmaOfGoogle):
    """One tensor is gate and gated: its gradient is a sum of both."""

    def forward(self, x):
        gate = self.gate_proj(x)
        return self.down_proj(F.gelu(gate) * gate)


class BothActivated(GemmaOfGoogle):
    def forward(self, x):
        gate = F.gelu(self.gate_proj(x))
        return self.down_proj(gate * gate)


class GateReadLater(GemmaOfGoogle):
    """What GELU made is read again: it is kept in any case."""

    def forward(self, x):
        gate = F.gelu(self.gate_proj(x))
        y = gate * self.up_proj(x)
        return self.down_proj(y) + gate.mean(-1, keepdim=True)


class ChangedBetween(GemmaOfGoogle):
    """The gate is changed in place after GELU has read it."""

    def forward(self, x):
        with torch.no_grad():
            gate = self.gate_proj(x)
            hidden = F.gelu(gate)
            gate.mul_(2)
        return self.down_proj(hidden * self.up_proj(x)) + gate.mean()


class OfASum(GemmaOfGoogle):
    def forward(self, x):
        return self.down_proj(F.gelu(self.gate_proj(x)) + self.up_proj(x))


def entry(name, build, sites=(), **more):
    return Entry(name, lambda: (build(), tokens()), sites, **more)


ROOT = (("", "geglu"),)
ENTRIES = [
    entry("geglu_t5_exact", lambda: T5DenseGatedActDense("gelu"), ROOT),
    entry("geglu_t5_tanh", lambda: T5DenseGatedActDense("gelu_pytorch_tanh"), ROOT),
    entry("geglu_t5_torch", lambda: T5DenseGatedActDense("gelu_torch"), ROOT),
    entry("geglu_gemma_tanh", GemmaMLP, ROOT),
    entry("geglu_gemma_exact", lambda: GemmaMLP("gelu"), ROOT),
    entry("geglu_gemma_reference_tanh", GemmaOfGoogle, ROOT),
    entry("geglu_diffusers", GEGLU, ROOT),
    entry("geglu_diffusers_gate_first", GateFirst, ROOT),
    entry("geglu_compvis", FeedForward, (("net.0", "geglu"),)),
    entry("geglu_diffusers_block", lambda: FeedForward(GEGLU()), (("net.0", "geglu"),)),
    entry("geglu_up_read_later", UpReadLater, ROOT),
    entry("geglu_by_configuration_tanh", ByConfiguration, ROOT),
    entry("like_geglu_with_a_condition", WithACondition, refused="another call"),
    entry("like_geglu_reglu", ReGLU, refused="relu"),
    entry("like_geglu_reglu_configured", lambda: GemmaMLP("relu"), refused="relu"),
    entry("like_geglu_squared_relu", SquaredReLU, refused="relu"),
    entry("like_geglu_squared_by_name", SquaredByName, refused="relu"),
    entry("like_geglu_bilinear", Bilinear, refused="no activation"),
    entry("like_geglu_of_itself", OfItself, refused="itself"),
    entry("like_geglu_both_activated", BothActivated, refused="itself"),
    entry("like_geglu_gate_read_later", GateReadLater, refused="read"),
    entry("like_geglu_gate_changed", ChangedBetween, refused="in place"),
    entry("like_geglu_of_a_sum", OfASum, refused="sum"),
]
