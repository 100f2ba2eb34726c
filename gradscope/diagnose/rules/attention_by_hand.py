"""Attention written out holds the scores of all queries and keys, and passes over them again and again.

Example::

    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
    y = F.softmax(att, dim=-1) @ v

Pattern: products, softmax and what stands between, as ``gradscope.plan`` finds them in the recorded step: any spelling.
Evidence: time of these lines, forward and backward, and what they keep for backward: queries · keys numbers a head, two
to four times. Estimate: both ways run alone at the recorded shapes; where that would take too long, all that these
layers spend on scores beside the products.

Source: T. Dao et al., FlashAttention (arXiv:2205.14135); M. Rabe and C. Staats, Self-attention does not need O(n²)
memory (arXiv:2112.05682).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.places import Estimate, attention_call, found_places, lines_of, ops_ns, scores_kept
from gradscope.tables import Finding, PlaceFact


def find(case: Case) -> Iterator[Finding]:
    """One for each line of attention by hand."""
    yield from found_places(
        case, RULE.name, {"attention", "packed_attention"}, _message, wanted=_by_hand, otherwise=_beside_products
    )


def _by_hand(case: Case, place: PlaceFact) -> bool:
    return attention_call(case, place) is None


def _message(place: PlaceFact) -> str:
    return "attention is written out: it makes and keeps the scores of every query and key"


def _beside_products(case: Case, places: Sequence[PlaceFact]) -> Estimate | None:
    """What the layers' softmax, masks, scales and dropout take: the kernels make no pass of their own for these."""
    layers = {case.call(index).layer for place in places for index in place.calls}
    passes = ops_ns(case, layers, lambda name: "mm" not in name.lower() and name != "(python)")
    lines = lines_of(case, places)
    spent = case.lines_ns(lines)
    found = min(passes, spent)
    calls = [case.call(index) for place in places for index in place.calls]
    scores = [output.shape for call in calls if call.op == "softmax" for output in call.outputs]
    kept = scores_kept(case, lines, scores) if scores else 0
    return Estimate(found, round(found * 0.6), spent, kept) if found else None


RULE = Rule("attention-by-hand", "attention that makes and keeps all scores", find)
