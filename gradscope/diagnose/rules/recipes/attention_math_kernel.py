"""Torch's attention silently falls back to the math kernel where its fused kernels do not support a call.

Example::

    F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)  # on a CPU: all scores, several times

    y, _ = self.attention(x, x, x)  # nn.MultiheadAttention: need_weights is True unless it is told otherwise

Pattern: the math kernel among a layer's operations, and an argument of the layer's call that the others do not take; in
nn.MultiheadAttention the softmax of scores, because of its dropout or of weights that no call reads.
Evidence: the call's line, forward and backward, and the scores that it keeps. Estimate: both ways run alone where
``gradscope.plan`` finds the place; else 0.8 of what the layer spends on scores outside the matmuls (0.3 to 0.95; in
nn.MultiheadAttention 0.4 to 0.95), minus the matmul that another kernel recomputes in backward; with a learned bias
0.4 (0 to 0.9). Silent on the CPU where so few scores are done sooner at once.

Source: PyTorch, aten/src/ATen/native/transformers/sdp_utils_cpp.h and cuda/sdp_utils.cpp: what each kernel refuses;
torch.nn.attention.sdpa_kernel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradscope.diagnose.case import Case, Rule, layers_of
from gradscope.diagnose.findings import Estimate, is_of_a_library, make_finding, parts_of, shape_text
from gradscope.diagnose.rules.recipes.attention import (
    FEWEST_SCORES,
    NO_DROPOUT,
    NO_GRADIENT,
    OF_LEARNT_PASSES,
    is_causal_mask,
    saved_of_passes,
    scores_kept,
    why_math,
)
from gradscope.diagnose.rules.recipes.places import finding_of
from gradscope.diagnose.worth import ops_ns
from gradscope.ops import ATTENTION
from gradscope.recording.graph import Node
from gradscope.tables import Finding, PlaceFact
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import size as size_text

_RECIPE = "from gradscope.recipes import attention"
_MODULE_CALL = "multi_head_attention_forward"
_OF_SCORES = ("softmax", "dropout", "bernoulli", "mul", "div", "masked", "add", "where", "empty_like", "fill")
_WITHOUT_DROPOUT = (
    '[setattr(part, "dropout", 0.0) for part in model.modules() if isinstance(part, nn.MultiheadAttention)]'
)

# Of the time of the passes over scores: low, likely, high.
_OF_PASSES = (0.4, 0.8, 0.95)


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each line with torch's attention that ran as plain operations."""
    places = {index: place for place in case.facts.places if place.supported for index in place.calls}
    found: defaultdict[tuple[str | None, str], list[Node]] = defaultdict(list)
    for call in case.facts.calls:
        place = places.get(call.index)
        if call.op != ATTENTION or not call.grad or (place is not None and is_causal_mask(case, place)):
            continue  # attention-explicit-mask tells of a causal one
        why = why_math(case, call)
        if why:
            found[call.source, why].append(call)
    for (source, why), calls in found.items():
        known = list(dict.fromkeys(places[call.index] for call in calls if call.index in places))
        finding = _finding(case, source, why, calls, known)
        if finding is not None:
            yield finding
    yield from _of_modules(case)


def _of_modules(case: Case) -> Iterator[Finding]:
    """One for each line with nn.MultiheadAttention, or a Transformer of torch's, that makes scores."""
    found: defaultdict[tuple[str | None, bool, bool], list[Node]] = defaultdict(list)
    for call in case.facts.calls:
        if call.op == _MODULE_CALL and call.grad and _scores(call) >= FEWEST_SCORES and _runs_softmax(case, call):
            asked = call.argument(15, "need_weights", True) is not False and len(call.outputs) > 1
            dropped = bool(call.argument(10, "dropout_p", 0.0)) and call.argument(13, "training", True) is not False
            dropped = dropped and call.outputs[0].device.type == "cpu"
            read = asked and bool(call.outputs[1].users)
            if not read and (asked or dropped):
                found[call.source, asked, dropped].append(call)
    for (source, asked, dropped), calls in found.items():
        yield _finding_of_modules(case, source, calls, asked=asked, dropped=dropped)


def _finding_of_modules(
    case: Case, source: str | None, calls: Sequence[Node], *, asked: bool, dropped: bool
) -> Finding:
    layers = tuple(dict.fromkeys(path for call in calls for path in _modules(case, call)))
    passes = ops_ns(case, layers, lambda name: any(part in name.lower() for part in _OF_SCORES))
    kept = scores_kept(case, {source}, [_form(call) for call in calls])
    whys, advice = [], []
    if asked:
        whys.append("it returns attention weights that nothing reads")
        advice.append("Pass `need_weights=False`")
    if dropped:
        whys.append(NO_DROPOUT)
        advice.append("Set its attention dropout to 0 if training allows it (residual dropout can stay)")
    form, one = shape_text(_form(calls[0])), _scores(calls[0]) // _area(calls[0])
    evidence = f"{counted(one)} score matrices of shape {form} per call"
    if len(calls) > 1:
        evidence += f", {counted(len(calls))} calls"
    if passes:
        evidence += f"; softmax, masks and dropout take {time_text(passes)} per step in forward and backward"
    if kept:
        evidence += f", and {size_text(kept)} of scores are saved for backward"
    return make_finding(
        RULE.name,
        case,
        parts_of(passes, _OF_PASSES, kept),
        layers=layers,
        line=source,
        message=f"MultiheadAttention stores the full score matrix for backward: {' and '.join(whys)}",
        evidence=evidence,
        advice=f"{'. '.join(advice)}.",
        code="attention(query, key, value, need_weights=False)" if asked else _WITHOUT_DROPOUT,
        cost_ns=passes,
    )


def _form(call: Node) -> tuple[int, int]:
    """Return the queries and keys: the first dimension of both, whatever ``batch_first`` is."""
    return call.inputs[0].shape[0], call.inputs[1].shape[0]


def _area(call: Node) -> int:
    queries, keys = _form(call)
    return max(queries * keys, 1)


def _scores(call: Node) -> int:
    """Return how many there are: heads of all sequences."""
    query, heads = call.inputs[0], call.argument(4, "num_heads", 1)
    sequences = query.shape[1] if len(query.shape) == 3 else 1
    return _area(call) * sequences * (heads if isinstance(heads, int) else 1)


def _modules(case: Case, call: Node) -> list[str]:
    return [path for path in layers_of(case, call) if case.layers[path].class_name.endswith("MultiheadAttention")]


def _runs_softmax(case: Case, call: Node) -> bool:
    rows = (row for path in _modules(case, call) for row in case.ops.get((path, "forward"), ()))
    return any("softmax" in row.name for row in rows)


def _finding(
    case: Case, source: str | None, why: str, calls: Sequence[Node], places: Sequence[PlaceFact]
) -> Finding | None:
    message = f"Attention falls back to torch's math kernel, which stores the full score matrix: {why}"
    spent = case.lines_ns([source] if source else [])
    kept = _kept(case, calls)
    evidence = "torch ran aten::_scaled_dot_product_attention_math"
    if spent:
        evidence += f"; the line takes {time_text(spent)} per step in forward and backward"
    if kept:
        evidence += f", and saves {size_text(kept)} of scores for backward"
    if places:  # both ways may have been run alone
        found = finding_of(
            case,
            RULE.name,
            places,
            places[0].source,
            message,
            otherwise=lambda case, _: _estimate(case, calls, spent, why),
        )
        return None if found is None else replace(found, line=source, evidence=evidence)
    if is_of_a_library(source) and why != NO_DROPOUT:
        return None  # nothing there is a setting
    estimate = _estimate(case, calls, spent, why)
    advice, code = (
        "Call attention from gradscope.recipes with the same arguments: it does not store the score matrix.",
        _RECIPE,
    )
    if is_of_a_library(source) and why == NO_DROPOUT:
        advice = "Set the model's attention dropout to 0 if training allows it: this line is in an installed package."
        code = "config.attention_dropout = 0.0  # in other models: attn_pdrop, attention_probs_dropout_prob"
    return make_finding(
        RULE.name,
        case,
        estimate,
        layers=(call.layer for call in calls),
        line=source,
        message=message,
        evidence=evidence,
        recipe="attention" if code == _RECIPE else None,
        advice=advice,
        code=code,
        cost_ns=spent,
    )


def _estimate(case: Case, calls: Sequence[Node], spent: int, why: str) -> Estimate | None:
    """Estimate by the time of softmax, masks and dropout: another kernel makes no pass for these."""
    layers, kept = {call.layer for call in calls}, _kept(case, calls)
    if why == NO_GRADIENT:
        return saved_of_passes(case, layers, spent, kept, OF_LEARNT_PASSES)
    return saved_of_passes(case, layers, spent, kept)


def _kept(case: Case, calls: Sequence[Node]) -> int:
    """Return the bytes of tensors the size of the scores."""
    lines = {call.source for call in calls}
    return scores_kept(case, lines, [(call.inputs[0].shape[-2], call.inputs[1].shape[-2]) for call in calls])


RULE = Rule("attention-math-kernel", "torch attention that falls back to the math kernel, and why", find)
