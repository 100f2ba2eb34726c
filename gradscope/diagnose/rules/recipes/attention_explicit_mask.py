"""A mask tensor is read for every score although it is causal, so no kernel can skip the masked half, or although it
masks nothing.

Example::

    mask = torch.tril(torch.ones(T, T, dtype=torch.bool, device=x.device))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # is_causal=True

Pattern: a call of torch's attention whose mask was causal in the recorded step, every number of it; or all true, or
all zeros where it is added. To leave such a mask out is advised only where no batch can make it another: it is made of
sizes and fixed numbers, or a buffer's part, and the whole buffer is so (a window's is causal where it is short). One
that hides nothing and may be padding of other batches is left alone.

Evidence: time of the call's line, forward and backward. Estimate: both ways run alone at the recorded shapes, where
``gradscope.plan`` finds the place. Else 0.3 of the line's time for a causal mask (range 0.1 to 0.5: half of the scores
are not needed) and 0.1 for one that hides nothing (0 to 0.35: on a busy CPU torch's attention took 1 to 1.5 times as
long with one).

Source: PyTorch, torch.nn.functional.scaled_dot_product_attention (``is_causal``; the FlashAttention and cuDNN kernels
take no such mask); T. Dao, FlashAttention-2 (arXiv:2307.08691), 3.1: blocks above the diagonal are skipped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.findings import make_finding, parts_of, several
from gradscope.diagnose.rules.recipes.attention import ATTENTION_RECIPES, attention_call, is_causal_mask, is_given_mask
from gradscope.diagnose.rules.recipes.places import found_places, put_in
from gradscope.ops import ATTENTION
from gradscope.recording.graph import Node
from gradscope.tables import Finding, PlaceFact
from gradscope.units import ns as time_text
from gradscope.units import size as size_text

# Low, likely, high: parts of the line's time.
_GAINS = {"causal": (0.1, 0.3, 0.5), "open": (0.0, 0.1, 0.35)}

# What a recipe is given where it cannot tell that the mask is always causal.
_LOOKS = "attention_mask("

_MESSAGES = {
    "causal": "Attention gets its causal mask as a tensor, so no kernel can skip the masked half",
    "open": "Attention gets a mask that masks nothing, but it is still read for every score",
}
_ADVICE = {
    "causal": "Pass `is_causal=True` instead of the mask.",
    "open": "Remove the mask: the fastest kernels do not take one.",
}
_CODE = {
    "causal": "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
    "open": "y = F.scaled_dot_product_attention(q, k, v)",
}


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each line with torch's attention and a mask that need not be there."""

    def advice(place: PlaceFact) -> str:
        if not _is_certain(case, place):
            return put_in(place)
        if _LOOKS in place.new_text:
            return (
                "Pass `is_causal=True` instead of the mask. Or run `gradscope fix FILE` to swap in and "
                f"verify {place.recipe}, which checks the mask in every step."
            )
        return f"{_ADVICE['causal']} {put_in(place)}"

    def message(place: PlaceFact) -> str:
        if _is_certain(case, place):
            return _MESSAGES["causal"]
        return "Attention gets its mask as a tensor; it was causal in this step, so half of the scores are not needed"

    yield from found_places(case, RULE.name, ATTENTION_RECIPES, message, wanted=is_causal_mask, advice=advice)
    known = {index for place in case.facts.places if _holds(case, place) for index in place.calls}
    calls: defaultdict[tuple[str | None, str], list[Node]] = defaultdict(list)
    for call in case.facts.calls:
        if call.op == ATTENTION and call.mask in _GAINS and call.index not in known and is_given_mask(call):
            calls[call.source, call.mask].append(call)
    for (source, mask), found in calls.items():
        yield _finding(case, source, mask, found)


def _holds(case: Case, place: PlaceFact) -> bool:
    """Check that the place was told of, or looked at and not worth it."""
    return place.recipe in ATTENTION_RECIPES and place.supported and is_causal_mask(case, place)


def _is_certain(case: Case, place: PlaceFact) -> bool:
    call = attention_call(case, place)
    return "is_causal=True" in place.new_text or (call is not None and call.mask == "causal")


def _finding(case: Case, source: str | None, mask: str, calls: Sequence[Node]) -> Finding:
    spent = case.lines_ns([source] if source is not None else [])
    # The line may be one function's that attention with other masks goes through too.
    every = [call for call in case.facts.calls if call.op == ATTENTION and call.source == source]
    part = spent * sum(map(_scores, calls)) / max(sum(map(_scores, every)), 1)
    largest = max(_bytes(call) for call in calls)
    evidence = f"a {size_text(largest)} mask in {several(len(calls), 'call')}"
    if spent:
        evidence += f"; the line takes {time_text(spent)} per step in forward and backward"
    return make_finding(
        RULE.name,
        case,
        parts_of(part, _GAINS[mask]),
        layers=(call.layer for call in calls),
        line=source,
        message=_MESSAGES[mask],
        evidence=evidence,
        advice=_ADVICE[mask],
        code=_CODE[mask],
        cost_ns=round(part),
    )


def _scores(call: Node) -> int:
    """Return how many the call makes or goes over."""
    return call.inputs[0].elements // max(call.inputs[0].shape[-1], 1) * int(call.inputs[1].shape[-2])


def _bytes(call: Node) -> int:
    """Return the bytes of a mask of queries times keys, the least that it has."""
    mask = call.argument(3, "attn_mask")
    size = 1 if mask.dtype == torch.bool else 4 if mask.dtype == torch.float32 else 2
    return int(call.inputs[0].shape[-2]) * int(call.inputs[1].shape[-2]) * size


RULE = Rule("attention-explicit-mask", "an attention mask tensor that is causal or masks nothing", find, edits=True)
