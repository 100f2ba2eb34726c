"""Torch's attention falls silently to plain operations where its other kernels lack what a call asks for.

Example::

    F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)  # on a CPU: all scores, several times

Pattern: the math kernel among a layer's operations, and an argument of the layer's call that the others do not take.
Evidence: the call's line, forward and backward, and the scores that it keeps. Estimate: both ways run alone where
``gradscope.plan`` finds the place; else what the layer spends on scores beside the products.

Source: PyTorch, aten/src/ATen/native/transformers/sdp_utils_cpp.h and cuda/sdp_utils.cpp: what each kernel refuses;
torch.nn.attention.sdpa_kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradscope.diagnose.case import Case, Rule, severity_of
from gradscope.diagnose.places import SDPA, Estimate, finding_of, is_causal_mask, ops_ns, scores_kept, why_math
from gradscope.tables import CallFact, Finding, PlaceFact
from gradscope.units import ns as time_text
from gradscope.units import size as size_text

# With dropout on the CPU the recipe took 75 ms where torch took 288, of which its products took about 100.
_OF_PASSES = 0.8


def find(case: Case) -> Iterator[Finding]:
    """One for each line with torch's attention that ran as plain operations."""
    places = {index: place for place in case.facts.places if place.supported for index in place.calls}
    found: defaultdict[tuple[str | None, str], list[CallFact]] = defaultdict(list)
    for call in case.facts.calls:
        place = places.get(call.index)
        if call.op != SDPA or not call.grad or (place is not None and is_causal_mask(case, place)):
            continue  # attention-explicit-mask tells of a causal one
        why = why_math(case, call)
        if why:
            found[call.source, why].append(call)
    for (source, why), calls in found.items():
        known = list(dict.fromkeys(places[call.index] for call in calls if call.index in places))
        finding = _finding(case, source, why, calls, known)
        if finding is not None:
            yield finding


def _finding(
    case: Case, source: str | None, why: str, calls: Sequence[CallFact], places: Sequence[PlaceFact]
) -> Finding | None:
    message = f"torch's attention runs as plain operations, which make and keep all scores: {why}"
    spent = case.lines_ns([source] if source else [])
    kept = _kept(case, calls)
    evidence = "torch ran aten::_scaled_dot_product_attention_math"
    if spent:
        evidence += f"; the line takes {time_text(spent)} of a step, forward and backward"
    if kept:
        evidence += f", and keeps {size_text(kept)} of scores"
    if places:  # both ways may have been run alone
        found = finding_of(
            case, RULE.name, places, places[0].source, message, otherwise=lambda case, _: _estimate(case, calls, spent)
        )
        return None if found is None else replace(found, line=source, evidence=evidence)
    estimate = _estimate(case, calls, spent)
    return Finding(
        rule=RULE.name,
        severity=severity_of(estimate.ns if estimate is not None else 0, case),
        layers=tuple(dict.fromkeys(call.layer for call in calls if call.layer is not None)),
        line=source,
        message=message,
        evidence=evidence,
        recipe="attention",
        predicted_saving_ns=None if estimate is None else estimate.ns,
        predicted_saving_bytes=kept or None,
        advice="Call attention of gradscope.recipes with the same arguments: it makes no scores.",
        code="from gradscope.recipes import attention",
        predicted_low_ns=None if estimate is None else estimate.low,
        predicted_high_ns=None if estimate is None else estimate.high,
    )


def _estimate(case: Case, calls: Sequence[CallFact], spent: int) -> Estimate | None:
    """What softmax, masks and dropout take: another kernel makes no pass of its own for these."""
    passes = ops_ns(case, {call.layer for call in calls}, lambda name: "mm" not in name.lower() and name != "(python)")
    found = min(passes, spent)
    return Estimate(round(found * _OF_PASSES), round(found * 0.4), found, _kept(case, calls)) if found else None


def _kept(case: Case, calls: Sequence[CallFact]) -> int:
    """Bytes of tensors the size of the scores."""
    lines = {call.source for call in calls}
    return scores_kept(case, lines, [(call.inputs[0].shape[-2], call.inputs[1].shape[-2]) for call in calls])


RULE = Rule("attention-math-kernel", "torch's attention that runs as plain operations, and why", find)
