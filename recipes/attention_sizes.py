"""Where torch's own operations are the better choice for attention on the CPU, and the mask that they are then given.

What torch's attention has no argument for, a window, ALiBi or a mask beside a causal one, is one mask there. That reads
and hides what our blocks would leave out, which costs less than blocks do as long as there are few scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels import pays
from gradscope.kernels.attention.options import accumulate_dtype
from gradscope.recipes.attention_arguments import Arguments

# A window that leaves at most this part of the scores pays from fewer on: see the rules of kernels/pays.py.
_NARROW = 0.25


def against_own(given: Arguments) -> str | None:
    """Why torch's own operations are the better choice than our blocks; None where they are not.

    Without a rule in half precision, which nothing has measured: there our blocks add up in float32.
    """
    rule = _rule(given)
    if rule is None or given.q.dtype not in (torch.float32, torch.float64) or 0 in (*given.q.shape, given.k.shape[2]):
        return None
    batch, heads, queries, _ = given.q.shape
    return pays.against(rule, scores=batch * heads * queries * given.k.shape[2])


def _rule(given: Arguments) -> str | None:
    """The name that kernels/pays.py has for these options; None where there is none."""
    if given.softcap is not None or given.sinks is not None:  # sinks are not measured: as many plain passes as a cap
        return "attention with a soft-cap"
    if given.wants_bias_grad:
        return "attention with a learnt bias" + (" and dropout" if given.dropout_p > 0 else "")
    masked = given.bias is not None or given.extras() is not None
    if given.dropout_p > 0:
        return "attention with dropout" + (" and a mask" if masked else "")
    if (given.left is not None or given.right is not None) and _is_narrow(given):
        return "attention with a narrow window"
    if given.alibi is not None:
        return "attention with ALiBi"
    if given.left is not None or given.right is not None or (given.bias is not None and given.is_causal):
        return "attention with a combined mask"
    return "attention with wide values" if given.q.shape[3] != given.v.shape[3] else None


def _is_narrow(given: Arguments) -> bool:
    """By the window's own width, whatever lies beyond the ends."""
    keys = given.k.shape[2]
    left = keys if given.left is None else given.left
    right = 0 if given.is_causal else keys if given.right is None else given.right
    return left + right + 1 <= _NARROW * keys


def one_mask(given: Arguments) -> Tensor | None:
    """Mask, causal mask, window and ALiBi as one mask that torch's attention takes: boolean, or added to the scores."""
    seen = _seen(given)
    bias = given.bias
    if given.alibi is not None:
        row, column = _positions(given)
        # In the dtype of the scores: torch's kernel for the CPU reads what it adds as if it were of the query's.
        slopes = given.alibi.to(accumulate_dtype(given.q.dtype))
        added = -slopes[..., None, None] * (row - column).abs()
        added = added if added.dim() == 4 else added[None]
        if bias is None or bias.dtype != torch.bool:
            bias = added if bias is None else bias + added
        else:
            bias = added.masked_fill(~bias, -torch.inf)
    if seen is None:
        return bias
    if bias is None:
        return seen[None, None]
    return bias & seen if bias.dtype == torch.bool else bias.masked_fill(~seen, -torch.inf)


def _seen(given: Arguments) -> Tensor | None:
    """[queries, keys] by causal mask and window; None where neither hides anything."""
    right = 0 if given.is_causal else given.right
    row, column = _positions(given)
    seen = None
    if given.left is not None:
        seen = column >= row - given.left
    if right is not None:
        below = column <= row + right
        seen = below if seen is None else seen & below
    return seen


def _positions(given: Arguments) -> tuple[Tensor, Tensor]:
    device = given.q.device
    return torch.arange(given.q.shape[2], device=device)[:, None], torch.arange(given.k.shape[2], device=device)
