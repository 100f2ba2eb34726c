"""What attention does beside its tensors; all paths read it, and mean the same by it.

With query i and key j counted from 0 on both sides (so that a causal mask begins at the top left, as SDPA documents):

    s_ij = scale · q_i · k_j                       q is scaled before the product: the scores cannot overflow first
    s_ij = softcap · tanh(s_ij / softcap)          with soft-cap
    s_ij = s_ij + bias_ij - slope · |i - j|        with a bias, with ALiBi
    s_ij = -inf                                    unless j is in query i's band, and bias_ij is not False
    p    = softmax(s) over j, and over the head's sink where there are; all 0 where every s_ij is -inf
    o_i  = Σ_j keep_ij / (1 - dropout_p) · p_ij · v_j

The logsumexp of a row is log Σ_j exp(s_ij): -inf where every s_ij is. Dropout leaves it alone. Query head h reads
key head h // (query heads / key heads).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOptions:
    """Everything but q, k, v, the bias or mask, and the seed of the dropout."""

    scale: float
    kv_heads: int  # query heads are a multiple of it
    is_causal: bool = False  # j <= i
    dropout_p: float = 0.0  # in [0, 1]; a seed is given where it is above 0
    softcap: float | None = None  # above 0
    window: tuple[int | None, int | None] | None = None  # (left, right): i - left <= j <= i + right; None is no limit
    alibi: Tensor | None = None  # slopes, float32 or float64, contiguous, [query heads] or [batch, query heads]
    sinks: Tensor | None = None  # [query heads]; the kernels leave it to sinks.py

    def band(self) -> tuple[int | None, int | None]:
        """(left, right) of window and causal mask together: i - left <= j <= i + right; None is no limit."""
        left, right = self.window or (None, None)
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        return left, right

    def keep_scale(self) -> float:
        """The factor that kept probabilities are multiplied by; 0 where everything is dropped."""
        return 0.0 if self.dropout_p >= 1 else 1 / (1 - self.dropout_p)


def default_scale(head_size: int) -> float:
    """``1 / sqrt(head size)``, as SDPA's."""
    return 1 / math.sqrt(head_size) if head_size else 1.0


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, sums and logsumexp: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
