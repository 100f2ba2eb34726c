"""Unfused attention stores the full score matrix for backward and makes many passes over it.

Example::

    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
    y = F.softmax(att, dim=-1) @ v

Pattern: matmuls, softmax and the operations between them, as ``gradscope.plan`` finds them in the recorded step: any
spelling. Where no recipe can replace it, as in the code of a library or in another layout: a softmax over the last
dimension of a matmul of two activations, with no more than scales, masks and dropout before the next matmul. Not where
attention in one kernel, run alone at these shapes, takes longer: on a CPU with few keys, say.
Evidence: time of these lines, forward and backward, and what they save for backward: queries · keys elements per head,
two to four times. Estimate: both ways run alone at the recorded shapes; where that would take too long, or cannot be,
0.8 of what these layers spend on scores outside the matmuls (0.3 to 0.95), minus the matmul that a fused kernel
recomputes in backward: a sixth of the matmuls' time.

Source: T. Dao et al., FlashAttention (arXiv:2205.14135); M. Rabe and C. Staats, Self-attention does not need O(n²)
memory (arXiv:2112.05682).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.findings import Estimate, is_of_a_library, make_finding, shape_text, where
from gradscope.diagnose.rules.recipes.attention import (
    ATTENTION_RECIPES,
    FEWEST_SCORES,
    attention_call,
    saved_of_passes,
    scores_kept,
)
from gradscope.diagnose.rules.recipes.places import as_in_the_step, by_micro_run, found_places, lines_of, loses
from gradscope.ops import BATCHED_MATMULS
from gradscope.recording.graph import Node
from gradscope.tables import Finding, PlaceFact
from gradscope.units import ns as time_text
from gradscope.units import size as size_text

_MESSAGE = "Unfused attention: the full score matrix is stored for backward"

# What scores go through before the softmax, and weights after it.
_BEFORE = frozenset(
    {"mul", "div", "add", "sub", "masked_fill", "where", "to", "float", "type", "type_as", "view", "reshape", "clamp"}
)
_AFTER = frozenset(
    {
        "dropout",
        "to",
        "type",
        "type_as",
        "half",
        "bfloat16",
        "view",
        "reshape",
        "transpose",
        "permute",
        "mT",
        "contiguous",
    }
)
_LONGEST = 12  # calls between the matmuls
_FEWEST_KEYS = 32

# What transformers calls its own switch.
_SWITCH = "attn_implementation"
# How a reason goes on for code of that library that has no other.
_NOTHING = "nothing to do: "


@dataclass(frozen=True, slots=True)
class _ByHand:
    """The calls of one attention, softmax first, and the matmuls at both ends."""

    softmax: Node
    calls: tuple[Node, ...]
    reason: str  # why no recipe can be put in; empty where it is not known


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each place of unfused attention."""
    places = {(place.recipe, place.source): place for place in case.facts.places if _by_hand(case, place)}
    for told in found_places(
        case, RULE.name, ATTENTION_RECIPES, lambda place: _MESSAGE, wanted=_by_hand, otherwise=_beside_products
    ):
        place = places[str(told.recipe), str(told.line)]
        yield replace(told, line=_line(case, place), evidence=told.evidence + _sliced(case, place))
    found: defaultdict[str | None, list[_ByHand]] = defaultdict(list)
    for each in _without_recipe(case):
        found[each.softmax.source].append(each)
    for source, attentions in found.items():
        made = _finding(case, source, attentions)
        if made is not None:
            yield made


def calls_without_recipe(case: Case) -> set[int]:
    """Return the indices of what this rule finds beside the places of recipes: its dropout goes with it."""
    return {call.index for each in _without_recipe(case) for call in each.calls}


def _line(case: Case, place: PlaceFact) -> str:
    """Return the softmax's line, where a reader looks for scores, if the recipe changes that file."""
    file = place.source.rpartition(":")[0]
    softmax = (call.source for call in map(case.call, place.calls) if call.op == "softmax" and call.source is not None)
    return next((source for source in softmax if source.rpartition(":")[0] == file), place.source)


def _sliced(case: Case, place: PlaceFact) -> str:
    """Check that q, k and v are cut off by indices: slices-zero-filled leaves them to this finding."""
    calls = [call for call in map(case.call, place.calls) if call.op == "getitem" and call.grad and call.inputs]
    parts = [call for call in calls if call.inputs[0].requires_grad and call.inputs[0].producer is not None]
    wholes = {call.inputs[0].storage for call in parts}
    count = len(parts) // max(len(wholes), 1)
    lines = sorted({call.source for call in parts if call.source is not None})
    if count < 2:
        return ""
    return (
        f"; one tensor is indexed {count} times on {where(lines)}: backward zero-fills a "
        "full-size gradient for each slice"
    )


def _by_hand(case: Case, place: PlaceFact) -> bool:
    return attention_call(case, place) is None


def _beside_products(case: Case, places: Sequence[PlaceFact]) -> Estimate | None:
    """Return the time of what the recipes would replace beside its matmuls."""
    calls = [case.call(index) for place in places for index in place.calls]
    return _passes(case, calls, lines_of(case, places))


def _passes(case: Case, calls: Sequence[Node], lines: Sequence[str]) -> Estimate | None:
    """Estimate by the time of softmax, masks, scales and dropout: kernels make no pass for these."""
    return saved_of_passes(case, {call.layer for call in calls}, case.lines_ns(lines), _kept(case, calls, lines))


def _kept(case: Case, calls: Sequence[Node], lines: Sequence[str]) -> int:
    """Return the bytes of scores that the lines keep for backward."""
    scores = [output.shape for call in calls if call.op == "softmax" for output in call.outputs]
    return scores_kept(case, lines, scores) if scores else 0


def _without_recipe(case: Case) -> Iterator[_ByHand]:
    """Find unfused attention that no recipe can replace."""
    places = [place for place in case.facts.places if place.recipe in ATTENTION_RECIPES]
    known = {index for place in places if place.supported or place.idle for index in place.calls}
    reasons = {index: place.reasons[0] for place in places if place.reasons for index in place.calls}
    for call in case.facts.calls:
        if call.op == "softmax" and call.index not in known and _is_large(call):
            before, after = _before(call), _after(call)
            if before and after:
                calls = (*before, call, *after)
                reason = next((reasons[each.index] for each in calls if each.index in reasons), "")
                yield _ByHand(call, calls, reason)


def _is_large(call: Node) -> bool:
    """Check that a softmax is over the last dimension, with a gradient, and so large that another kernel is faster."""
    if not call.grad or not call.outputs or not call.outputs[0].requires_grad:
        return False
    shape = call.outputs[0].shape
    last = call.argument(1, "dim") in (-1, len(shape) - 1)
    return last and len(shape) >= 3 and min(shape[-2:]) >= _FEWEST_KEYS and call.outputs[0].elements >= FEWEST_SCORES


def _before(call: Node) -> list[Node]:
    """Walk from the softmax's input back to the matmul of two activations; empty where other calls intervene."""
    found: list[Node] = []
    scores = call.inputs[0]
    while len(found) < _LONGEST and scores.producer is not None:
        maker = scores.producer
        found.append(maker)
        if maker.op in BATCHED_MATMULS:
            return found if _of_activations(maker) else []
        same = [each for each in maker.inputs if each.elements == scores.elements and each.requires_grad]
        # A bias that gets a gradient: torch's kernels do not all give it one.
        if maker.op not in _BEFORE or not same or sum(each.requires_grad for each in maker.inputs) > 1:
            return []
        scores = same[0]
    return []


def _after(call: Node) -> list[Node]:
    """Walk from the softmax to the matmul with the values, the weights' only reader; else empty."""
    found: list[Node] = []
    while len(found) < _LONGEST:
        users = call.outputs[0].users if call.outputs else []
        if len(users) != 1:
            return []
        call = users[0]
        found.append(call)
        if call.op in BATCHED_MATMULS:
            return found if _of_activations(call) else []
        if call.op not in _AFTER:
            return []
    return []


def _of_activations(product: Node) -> bool:
    """Check that a matmul is no layer's: both its factors are made in the step and get a gradient."""
    given = product.inputs[-2:]
    return len(given) == 2 and all(each.requires_grad and each.parameter is None for each in given)


def _estimate(case: Case, attentions: Sequence[_ByHand], lines: Sequence[str]) -> Estimate | None:
    """Estimate by micro-runs with torch's attention, or by passes over scores; None: nothing to gain."""
    calls = [call for each in attentions for call in each.calls]
    indices = {call.index for call in calls}
    places = [place for place in case.facts.places if place.recipe == "attention"]
    places = [place for place in places if not indices.isdisjoint(place.calls)]
    alone = by_micro_run(places)
    if alone is None:
        return _passes(case, calls, lines) or Estimate(0, 0, 0)
    return None if loses(alone, case.lines_ns(lines)) else as_in_the_step(case, places, lines, alone)


def _drops_on_cpu(attentions: Sequence[_ByHand]) -> bool:
    """Check that weights are dropped on a CPU, where torch's own attention has no kernel for that."""
    calls = [call for each in attentions for call in each.calls if call.op == "dropout"]
    return any(
        call.argument(1, "p", 0.5) != 0 and call.argument(2, "training", True) and call.outputs[0].device.type == "cpu"
        for call in calls
    )


def _is_masked(attentions: Sequence[_ByHand]) -> bool:
    """Check that a tensor hides scores, or is added to them."""
    calls = [call for each in attentions for call in each.calls]
    added = (call for call in calls if call.op in {"add", "sub"} and len(call.inputs) > 1)
    return any(call.op in {"masked_fill", "where"} for call in calls) or any(added)


def _finding(case: Case, source: str | None, attentions: Sequence[_ByHand]) -> Finding | None:
    calls = [call for each in attentions for call in each.calls]
    lines = sorted({call.source for call in calls if call.source is not None})
    layers = tuple(dict.fromkeys(each.softmax.layer for each in attentions if each.softmax.layer is not None))
    estimate = _estimate(case, attentions, lines)
    if estimate is None:
        return None
    shape = shape_text(attentions[0].softmax.outputs[0].shape)
    evidence = f"scores of shape {shape} on {where(lines)}"
    spent = case.lines_ns(lines)
    if spent:
        evidence += f", {time_text(spent)} per step in forward and backward"
    if len(layers) > 1:
        evidence += f", in {len(layers)} layers"
    kept = _kept(case, calls, lines)
    if kept:
        evidence += f"; {size_text(kept)} of scores are saved for backward"
    reason = attentions[0].reason
    advice = "Call torch's scaled_dot_product_attention with query, key and value as [batch, heads, tokens, size]."
    mask, says = "", "pass is_causal=True for a causal mask"
    if _is_masked(attentions):
        mask, says = (
            ", attn_mask=mask",
            "pass is_causal=True instead of a causal mask; in a boolean mask, True means attend",
        )
    code = f"y = F.scaled_dot_product_attention(q, k, v{mask})  # batch, heads, tokens, size; {says}"
    if _drops_on_cpu(attentions):
        advice = (
            "Call attention from gradscope.recipes with query, key and value as [batch, heads, "
            "tokens, size]: torch has no fused CPU kernel with dropout."
        )
        code = f"y = attention(q, k, v{mask}, dropout_p=p)  # batch, heads, tokens, size; {says}"
    if _SWITCH in reason:
        if _drops_on_cpu(attentions):  # that would run as plain operations as well
            return None
        advice = f"Load the model with {_SWITCH}='sdpa', which uses torch's scaled_dot_product_attention."
        code = f'AutoModel.from_pretrained(name, {_SWITCH}="sdpa")'
    elif reason:
        evidence += f"; no recipe can replace it: {reason.partition(_NOTHING)[0].removesuffix('; ')}"
    if _NOTHING in reason:
        advice, code = f"No option changes this: {reason.partition(_NOTHING)[2]}.", ""
    elif source is not None and not reason and is_of_a_library(source):
        advice = (
            "This code is in an installed package: check whether it has an option to use torch's "
            "scaled_dot_product_attention."
        )
        code = ""
    return make_finding(
        RULE.name,
        case,
        estimate,
        layers=layers,
        line=source,
        message=_MESSAGE,
        evidence=evidence,
        advice=advice,
        code=code,
        cost_ns=spent,
    )


RULE = Rule("attention-by-hand", "unfused attention, which stores the full score matrix", find)
