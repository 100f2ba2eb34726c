"""Attention written out holds the scores of all queries and keys, and passes over them again and again.

Example::

    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
    y = F.softmax(att, dim=-1) @ v

Pattern: products, softmax and what stands between, as ``gradscope.plan`` finds them in the recorded step: any spelling.
Evidence: time of these lines, forward and backward, and what they keep for backward: queries · keys numbers a head, two
to four times. Estimate: both ways run alone at the recorded shapes.

Source: T. Dao et al., FlashAttention (arXiv:2205.14135); M. Rabe and C. Staats, Self-attention does not need O(n²)
memory (arXiv:2112.05682).
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.places import found_places
from gradscope.tables import Finding, PlaceFact

_SDPA = "scaled_dot_product_attention"


def find(case: Case) -> Iterator[Finding]:
    """One for each line of attention by hand."""
    yield from found_places(case, RULE.name, {"attention", "packed_attention"}, _message, wanted=_by_hand)


def _by_hand(case: Case, place: PlaceFact) -> bool:
    return all(case.call(index).op != _SDPA for index in place.calls)


def _message(place: PlaceFact) -> str:
    return "attention is written out: it makes and keeps the scores of every query and key"


RULE = Rule("attention-by-hand", "attention that makes and keeps all scores", find)
