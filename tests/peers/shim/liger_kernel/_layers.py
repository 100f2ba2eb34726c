"""Norms, SwiGLU and rotary embedding under Liger-Kernel's names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gradscope.recipes import add_rms_norm, layer_norm, rms_norm, rope, swiglu


def _scale(weight: Tensor | None, offset: float, casting_mode: str) -> Tensor | None:
    """The weight that the recipe is given: Gemma's is an offset from one, in float32."""
    if weight is None or not offset:
        return weight
    return (weight.float() if casting_mode == "gemma" else weight) + offset


class RMSNorm:
    """``gradscope.recipes.rms_norm``; it overwrites nobody's gradient, so ``in_place`` asks for nothing."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor | None,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> Tensor:
        return rms_norm(input, input.shape[-1:], _scale(weight, offset, casting_mode), eps)


class FusedAddRMSNorm:
    """``gradscope.recipes.add_rms_norm``."""

    @staticmethod
    def apply(
        X: Tensor,
        R: Tensor,
        W: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
    ) -> tuple[Tensor, Tensor]:
        return add_rms_norm(X, R, _scale(W, offset, casting_mode), eps)


class LayerNorm:
    """``gradscope.recipes.layer_norm``."""

    @staticmethod
    def apply(input: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return layer_norm(input, input.shape[-1:], weight, bias, eps)


class SiLUMul:
    """``gradscope.recipes.swiglu``, with Falcon-H1's multipliers around it."""

    @staticmethod
    def apply(gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        found = swiglu(gate if gate_multiplier == 1.0 else gate * gate_multiplier, up)
        return found if down_multiplier == 1.0 else found * down_multiplier


class Rope:
    """``gradscope.recipes.rope`` of queries and keys."""

    @staticmethod
    def apply(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None = None, unsqueeze_dim: int = 1
    ) -> Any:
        return rope((q, k), cos, sin)


def liger_layer_norm(X: Tensor, W: Tensor, B: Tensor, eps: float) -> Tensor:
    """Layer normalisation by keyword."""
    return LayerNorm.apply(X, W, B, eps)


def liger_rms_norm(X: Tensor, W: Tensor | None, eps: float, **settings: Any) -> Tensor:
    """RMS normalisation by keyword."""
    return RMSNorm.apply(X, W, eps, **settings)


def liger_swiglu(a: Tensor, b: Tensor) -> Tensor:
    """SwiGLU by keyword."""
    return SiLUMul.apply(a, b)


class LayerNormModule(nn.Module):
    """Layer normalisation over the last dimension."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(hidden_size)), nn.Parameter(torch.zeros(hidden_size))
        self.eps = eps

    def forward(self, input: Tensor) -> Tensor:
        """The input, normalised."""
        return LayerNorm.apply(input, self.weight, self.bias, self.eps)


class RMSNormModule(nn.Module):
    """RMS normalisation over the last dimension."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, elementwise_affine: bool = True, **settings: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size)) if elementwise_affine else None
        self.eps, self.settings = eps, settings

    def forward(self, input: Tensor) -> Tensor:
        """The input, normalised."""
        return RMSNorm.apply(input, self.weight, self.eps, **self.settings)


class AddRMSNormModule(nn.Module):
    """RMS normalisation of a sum, and the sum."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, **settings: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps, self.settings = eps, settings

    def forward(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised sum, and the sum."""
        return FusedAddRMSNorm.apply(input, residual, self.weight, self.eps, **self.settings)


def _linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(rows, columns, bias=False)


class LlamaMLP(nn.Module):
    """Gate and up by layers of their own."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj, self.down_proj = (
            _linear(hidden, inner),
            _linear(hidden, inner),
            _linear(inner, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class FalconMLP(LlamaMLP):
    """Llama's, with a factor before the gate and one behind the layer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.multipliers = config.mlp_multipliers

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        return self.down_proj(SiLUMul.apply(self.gate_proj(x), self.up_proj(x), *self.multipliers))


class PackedMLP(nn.Module):
    """Phi-3's: gate and up by one layer, so one packed tensor."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_up_proj = _linear(config.hidden_size, 2 * config.intermediate_size)
        self.down_proj = _linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] to [..., hidden]."""
        return self.down_proj(swiglu(self.gate_up_proj(x)))


class Experts(nn.Module):
    """A mixture of packed MLPs, one expert after the other."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        count, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, inner))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """[tokens, hidden] to [tokens, hidden], by the ``experts`` [tokens, k] with their ``weights``."""
        found = torch.zeros_like(x)
        for number in range(len(self.gate_up_proj)):
            tokens, place = torch.where(experts == number)
            inner = swiglu(nn.functional.linear(x[tokens], self.gate_up_proj[number]))
            outer = nn.functional.linear(inner, self.down_proj[number])
            found = found.index_add(0, tokens, outer * weights[tokens, place, None])
        return found
