"""Attention scores are computed in float16 before scaling, and only then cast to float32 for the softmax.

Example::

    scores = q @ k.transpose(-2, -1)                       # float16: at most 65504
    weights = F.softmax((scores / math.sqrt(d)).float(), dim=-1).half()

Pattern: a product in float16 whose factors were neither scaled nor normalised (rotary positions change no length), then
what does not change its size, a softmax over the last dimension, and a product of that. A float32 softmax comes too
late: the product has overflowed by then. Evidence: the inner dimension d, whose products are summed before anything is
divided by √d; and the size of the float32 scores, where there are some. Estimate: the bytes of the float32 result of
the softmax, which is saved for backward in addition to its float16 copy.

Source: PyTorch, Automatic Mixed Precision package, "Autocast op reference" (softmax in float32);
torch.nn.functional.scaled_dot_product_attention; M. Shoeybi et al., Megatron-LM (apply_query_key_layer_scaling).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.findings import Estimate, make_finding
from gradscope.ops import BATCHED_MATMULS, RESHAPES_OR_FLATTEN, SCALES, names
from gradscope.recording.graph import Node, Value
from gradscope.tables import Finding
from gradscope.units import count as counted
from gradscope.units import size as size_text

# Between the matmul and the softmax: the scores themselves, whatever their dtype.
_KEEPS = RESHAPES_OR_FLATTEN | SCALES | names("add clamp contiguous float masked_fill sub to type where")

# Between a projection and the matmul: another shape of the same numbers.
_FORMS = (
    {"chunk", "contiguous", "expand", "flatten", "float", "getitem", "half", "mT", "movedim", "permute", "reshape"}
    | {"repeat_interleave", "split", "squeeze", "swapaxes", "to", "transpose", "type", "type_as", "unbind", "unflatten"}
    | {"unsqueeze", "view", "view_as_complex", "view_as_real"}
)

# Where both factors come from one of these, nothing keeps their matmuls small.
_UNSCALED = {"linear", "matmul", "addmm", "conv1d"}

# Rotary positions: what is multiplied with, by its maker or its name.
_TURNS = {"cos", "polar", "sin"}
_TURN_NAMES = ("cos", "freqs", "sin")

_FLOAT16_MOST = 65504


@dataclass(frozen=True)
class _Scores:
    product: Node
    inner: int
    scaled: bool  # between the matmul and the softmax
    upcast: Value | None  # the scores in float32


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each line of matmuls."""
    lines: defaultdict[str | None, list[_Scores]] = defaultdict(list)
    for call in case.facts.calls:
        scores = _scores(call) if call.op == "softmax" else None
        if scores is not None:
            lines[scores.product.source].append(scores)
    for source, found in lines.items():
        yield _finding(case, source, found)


def _finding(case: Case, source: str | None, found: list[_Scores]) -> Finding:
    inner = max(each.inner for each in found)
    # A recomputed forward pass is recorded too: the largest of a layer stands for all.
    upcasts: dict[str | None, int] = {}
    for each in found:
        if each.upcast is not None:
            upcasts[each.product.layer] = max(upcasts.get(each.product.layer, 0), 4 * each.upcast.elements)
    scaled = any(each.scaled for each in found)
    when = "before scaling" if scaled else "without scaling"
    message = f"Attention scores are computed in float16 {when} and may overflow"
    evidence = (
        f"each score sums {counted(inner)} products of unscaled values; the largest float16 value is {_FLOAT16_MOST}"
    )
    advice = "Use scaled_dot_product_attention, which scales in float32 and does not store the scores"
    advice += ", or scale the queries first." if scaled else "."
    extra = 0
    if upcasts:
        message += "; the scores are then copied to float32 for the softmax"
        size = sum(upcasts.values())
        evidence += f"; the float32 scores take {size_text(size)} in addition to the float16 ones"
        extra = size if any(each.product.grad for each in found) else 0
    return make_finding(
        RULE.name,
        case,
        Estimate(bytes=extra),
        severity="warning" if upcasts else "info",
        layers=(each.product.layer for each in found),
        line=source,
        message=message,
        evidence=evidence,
        advice=advice,
        code=f"y = F.scaled_dot_product_attention(q, k, v{'' if scaled else ', scale=1.0'})",
    )


def _scores(softmax: Node) -> _Scores | None:
    """Return the scores of a softmax that a matmul made in float16 of unscaled factors."""
    if not softmax.inputs or not softmax.outputs:
        return None
    last = len(softmax.inputs[0].shape) - 1
    if softmax.argument(1, "dim") not in (-1, last) or not _meets_values(softmax.outputs[0], last):
        return None
    upcast = next((each for each in (softmax.outputs[0], softmax.inputs[0]) if each.dtype == torch.float32), None)
    made = _product_before(softmax.inputs[0])
    if made is None:
        return None
    product, scaled = made
    factors = _factors(product)
    if len(factors) != 2 or product.outputs[0].dtype != torch.float16:
        return None
    if not all(each.dtype == torch.float16 or product.autocast for each in factors):
        return None
    if not all(_is_unscaled(each) for each in factors):
        return None
    return _Scores(product, _inner(product, factors), scaled, upcast)


def _product_before(scores: Value) -> tuple[Node, bool] | None:
    """The matmul that made the scores, and whether they were scaled since."""
    waiting, seen = [(scores, False)], set[Node]()
    while waiting:
        tensor, scaled = waiting.pop()
        call = tensor.producer
        if call is None or call in seen:
            continue
        seen.add(call)
        if call.op in BATCHED_MATMULS:
            return call, scaled
        if call.op not in _KEEPS:
            continue
        # Of several, one may be a bias, and where is given the mask first.
        same = [each for each in call.inputs if each.dtype != torch.bool and each.shape[-2:] == tensor.shape[-2:]]
        if call.op not in RESHAPES_OR_FLATTEN:
            same = [each for each in same if each.shape == tensor.shape]
        waiting += [(each, scaled or call.op in SCALES) for each in reversed(same)]
    return None


def _factors(product: Node) -> tuple[Value, ...]:
    if product.op != "baddbmm":
        return product.inputs
    # The sums are multiplied with alpha while they are float32.
    return product.inputs[1:] if product.kwargs.get("alpha", 1) == 1 else ()


def _inner(product: Node, factors: tuple[Value, ...]) -> int:
    """The size of the dimension that is summed over."""
    first = factors[0].shape
    if product.op == "rmatmul":
        return first[-2]
    if product.op == "einsum" and isinstance(product.args[0], str):
        letters, _, made = product.args[0].replace(" ", "").partition("->")
        names = letters.split(",")[0]
        summed = [size for size, name in zip(first, names, strict=False) if name not in made]
        if made and "." not in letters and summed:
            return max(summed)
    return first[-1]


def _meets_values(weights: Value, last: int) -> bool:
    """Check that the softmax's result goes into a matmul: it is attention's and not, say, the loss's."""
    calls = weights.users
    for _ in range(4):  # dropout, a cast, a view
        if any(call.op in BATCHED_MATMULS for call in calls):
            return last >= 2
        calls = [
            user for call in calls if call.op in _FORMS | {"dropout"} for made in call.outputs for user in made.users
        ]
    return False


def _is_unscaled(tensor: Value) -> bool:
    """Check that the factor is the plain output of a projection, turned or not; where that cannot be told, no."""
    while tensor.producer is not None:
        call = tensor.producer
        if call.op in _UNSCALED:
            return True
        if call.op in {"cat", "stack"}:
            parts = [each for each in call.inputs if each.elements]  # a cache may be empty at first
            return bool(parts) and all(_is_unscaled(each) for each in parts)
        if call.op in {"add", "sub"}:
            return len(call.inputs) == 2 and all(_is_turned(each) for each in call.inputs)
        if call.op == "mul" and tensor.dtype.is_complex:
            return _is_turned(tensor)
        if call.op not in _FORMS | {"neg"} or not call.inputs:
            return False
        tensor = call.inputs[0]
    return False


def _is_turned(tensor: Value) -> bool:
    """Check that the tensor is an unscaled one times sines or cosines."""
    call = tensor.producer
    if call is None or call.op != "mul" or len(call.inputs) != 2:
        return False
    one, other = call.inputs
    return any(_is_turn(turn) and _is_unscaled(turned) for turn, turned in ((other, one), (one, other)))


def _is_turn(tensor: Value) -> bool:
    while tensor.producer is not None:
        call = tensor.producer
        if call.op in _TURNS:
            return True
        enlarged = call.op == "mul" and len(call.inputs) == 1 and _factor(call) >= 1
        if not (enlarged or call.op in _FORMS | {"cat", "stack"}) or not call.inputs:
            return False
        tensor = call.inputs[0]
    name = (tensor.parameter or "").rpartition(".")[2]
    return not tensor.requires_grad and any(part in name for part in _TURN_NAMES)


def _factor(call: Node) -> float:
    return max((each for each in call.args if isinstance(each, (int, float))), default=0.0)


RULE = Rule("float16-softmax", "float16 attention scores that may overflow", find, beyond_numbers=True)
