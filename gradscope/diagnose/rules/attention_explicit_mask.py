"""A causal mask that is given as a tensor is read for every score, and no kernel can skip the half that it hides.

Example::

    mask = torch.tril(torch.ones(T, T, dtype=torch.bool, device=x.device))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # is_causal=True

Pattern: a call of torch's attention whose mask was causal in the recorded step, every number of it. Evidence: time of
the call's line, forward and backward. Estimate: both ways run alone at the recorded shapes.

Source: PyTorch, torch.nn.functional.scaled_dot_product_attention (``is_causal``; the FlashAttention and cuDNN kernels
take no such mask); T. Dao, FlashAttention-2 (arXiv:2307.08691), 3.1: blocks above the diagonal are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.places import found_places, is_causal_mask, put_in
from gradscope.tables import Finding, PlaceFact


def find(case: Case) -> Iterator[Finding]:
    """One for each line with torch's attention and a mask that is causal."""
    recipes = {"attention", "packed_attention"}
    yield from found_places(case, RULE.name, recipes, _message, wanted=is_causal_mask, advice=_advice)


def _message(place: PlaceFact) -> str:
    return "attention is given a causal mask as a tensor: no kernel can skip the half that it hides"


def _advice(place: PlaceFact) -> str:
    return f"Leave the mask out and say is_causal=True. {put_in(place)}"


RULE = Rule("attention-explicit-mask", "a causal mask given as a tensor, where is_causal=True would do", find)
