"""Heads split from one projection are merged by copies: the result, and the three gradients in backward.

Example::

    q, k, v = self.c_attn(x).split(width, dim=2)
    ...  # view, transpose
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = y.transpose(1, 2).contiguous().view(batch, tokens, width)

Pattern: torch's attention without a mask between the views of one packed tensor and the merging of its heads. Evidence:
copies of these lines. Estimate: both ways run alone at the recorded shapes.

Source: T. Dao, flash-attn, ``flash_attn_qkvpacked_func``: "faster than separate calls, as it avoids the concatenation
of the gradients of Q, K, V".
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.rules.recipes.attention import attention_call, is_given_mask, why_math
from gradscope.diagnose.rules.recipes.places import found_places, lines_of, nothing
from gradscope.tables import Finding, PlaceFact
from gradscope.units import size as size_text


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each line that merges heads."""
    places = {place.source: place for place in case.facts.places if place.recipe == "packed_attention"}
    for finding in found_places(case, RULE.name, {"packed_attention"}, _message, wanted=_copies, otherwise=nothing):
        copied = _copied(case, places[str(finding.line)])
        if copied == 0 or (finding.predicted_saving_ns is None and finding.predicted_saving_bytes is None):
            continue
        copies = "" if copied is None else f"; {size_text(copied)} are copied there per step"
        yield replace(finding, evidence=f"{finding.evidence}{copies}")


def _copies(case: Case, place: PlaceFact) -> bool:
    """Check that the place is torch's attention with no more to mend than the copies around it."""
    call = attention_call(case, place)
    return call is not None and not is_given_mask(call) and not why_math(case, call)


def _copied(case: Case, place: PlaceFact) -> int | None:
    """Return bytes; None where memory was not measured."""
    if case.run.memory is None:
        return None
    lines = set(lines_of(case, [place]))
    return sum(row.bytes for row in case.run.memory.copies if row.line in lines)


def _message(place: PlaceFact) -> str:
    return "Merging heads copies them, and backward concatenates the query, key and value gradients"


RULE = Rule("heads-copied", "copies that split and merge heads around torch's attention", find)
