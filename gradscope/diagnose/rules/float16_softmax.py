"""Attention scores are multiplied in float16 before they are scaled, and then made float32 for the softmax.

Example::

    scores = q @ k.transpose(-2, -1)                       # float16: at most 65504
    weights = F.softmax((scores / math.sqrt(d)).float(), dim=-1).half()

Pattern: a product in float16 whose factors were neither scaled nor normalised, then what does not change its size,
a softmax over the last dimension, and a product of that. Evidence: the inner dimension d, whose products are summed
before anything is divided by √d; and the size of the float32 scores, where there are some. Estimate: the bytes of the
float32 result of the softmax, which backward keeps beside its float16 copy.

Source: PyTorch, Automatic Mixed Precision package, "Autocast op reference" (softmax in float32);
torch.nn.functional.scaled_dot_product_attention; M. Shoeybi et al., Megatron-LM (apply_query_key_layer_scaling).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from gradscope.diagnose.case import Case, Rule
from gradscope.tables import CallFact, Finding, TensorFact
from gradscope.units import count as counted
from gradscope.units import size as size_text

_PRODUCTS = {"bmm", "einsum", "matmul", "rmatmul"}

# Between the product and the softmax: the scores themselves, whatever their dtype.
_KEEPS = {"add", "clamp", "contiguous", "div", "float", "masked_fill", "mul", "sub", "to", "type", "where"}

# Between a projection and the product: another form of the same numbers.
_FORMS = {
    "chunk",
    "contiguous",
    "expand",
    "flatten",
    "getitem",
    "half",
    "mT",
    "movedim",
    "permute",
    "repeat_interleave",
    "reshape",
    "split",
    "squeeze",
    "swapaxes",
    "to",
    "transpose",
    "unbind",
    "unflatten",
    "unsqueeze",
    "view",
}

# Where both factors come from one of these, nothing keeps their products small.
_UNSCALED = {"linear", "matmul", "addmm", "conv1d"}

_FLOAT16_MOST = 65504


@dataclass(frozen=True)
class _Scores:
    product: CallFact
    inner: int
    upcast: TensorFact | None  # the scores in float32


def find(case: Case) -> Iterator[Finding]:
    """One for each line of products."""
    lines: defaultdict[str | None, list[_Scores]] = defaultdict(list)
    for call in case.facts.calls:
        scores = _scores(case, call) if call.op == "softmax" else None
        if scores is not None:
            lines[scores.product.source].append(scores)
    for source, found in lines.items():
        yield _finding(source, found)


def _finding(source: str | None, found: list[_Scores]) -> Finding:
    inner = max(each.inner for each in found)
    # A recomputed forward pass is recorded too: the largest of a layer stands for all.
    upcasts: dict[str | None, int] = {}
    for each in found:
        if each.upcast is not None:
            upcasts[each.product.layer] = max(upcasts.get(each.product.layer, 0), 4 * each.upcast.elements)
    message = "attention scores are multiplied in float16 before they are scaled, and may overflow"
    evidence = (
        f"each score is a sum of {counted(inner)} products of unscaled numbers; the largest float16 is {_FLOAT16_MOST}"
    )
    advice = (
        "Use scaled_dot_product_attention, which scales in float32 and keeps no scores, or scale the queries first."
    )
    extra = None
    if upcasts:
        message += "; then they are copied to float32 for the softmax"
        extra = sum(upcasts.values())
        evidence += f"; the float32 scores are {size_text(extra)}, beside the float16 ones"
    return Finding(
        rule=RULE.name,
        severity="warning" if upcasts else "info",
        layers=tuple(dict.fromkeys(each.product.layer for each in found if each.product.layer is not None)),
        line=source,
        message=message,
        evidence=evidence,
        predicted_saving_bytes=extra,
        advice=advice,
        code="y = F.scaled_dot_product_attention(q, k, v)",
    )


def _scores(case: Case, softmax: CallFact) -> _Scores | None:
    """Of a softmax over scores that a product made in float16 of unscaled factors."""
    if not softmax.inputs or not softmax.outputs:
        return None
    last = len(softmax.inputs[0].shape) - 1
    if softmax.argument(1, "dim") not in (-1, last) or not _meets_values(case, softmax.outputs[0], last):
        return None
    upcast = next((each for each in (softmax.outputs[0], softmax.inputs[0]) if each.dtype == "float32"), None)
    product = _product_before(case, softmax.inputs[0])
    if product is None or len(product.inputs) != 2 or product.outputs[0].dtype != "float16":
        return None
    if not all(each.dtype == "float16" or product.autocast for each in product.inputs):
        return None
    if not all(_is_unscaled(case, each) for each in product.inputs):
        return None
    return _Scores(product, product.inputs[0].shape[-1], upcast)


def _product_before(case: Case, tensor: TensorFact) -> CallFact | None:
    while tensor.producer is not None:
        call = case.call(tensor.producer)
        if call.op in _PRODUCTS:
            return call
        same = [each for each in call.inputs if each.shape == tensor.shape]
        if call.op not in _KEEPS or not same:
            return None
        # where(mask, scores, value) is given the mask first.
        tensor = next((each for each in same if each.dtype != "bool"), same[0])
    return None


def _meets_values(case: Case, weights: TensorFact, last: int) -> bool:
    """Whether a product is made of it: it is attention and not, say, the loss."""
    left = list(weights.users)
    for _ in range(4):  # dropout, a cast, a view
        calls = [case.call(index) for index in left]
        if any(call.op in _PRODUCTS for call in calls):
            return last >= 2
        left = [
            user for call in calls if call.op in _FORMS | {"dropout"} for made in call.outputs for user in made.users
        ]
    return False


def _is_unscaled(case: Case, tensor: TensorFact) -> bool:
    """Whether it is the plain output of a projection; where that cannot be told, no."""
    while tensor.producer is not None:
        call = case.call(tensor.producer)
        if call.op in _UNSCALED:
            return True
        if call.op not in _FORMS or not call.inputs:
            return False
        tensor = call.inputs[0]
    return False


RULE = Rule("float16-softmax", "attention scores in float16 that may overflow", find)
