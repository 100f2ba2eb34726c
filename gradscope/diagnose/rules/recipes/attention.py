"""What the rules about attention share: whether torch ran plain operations, and what a kernel without scores saves."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from gradscope.diagnose.case import Case
from gradscope.diagnose.findings import Estimate
from gradscope.diagnose.worth import alive_at_peak, ops_ns
from gradscope.ops import ATTENTION
from gradscope.recording.graph import Node, Value
from gradscope.tables import PlaceFact

ATTENTION_RECIPES = frozenset({"attention", "packed_attention"})

NO_GRADIENT = "torch's fused CPU kernel computes no gradient for the mask"

# Fewer are of no weight in a step, by whatever way.
FEWEST_SCORES = 200_000

# From how many scores on the recipe pays on a CPU, whatever the number of threads: as in kernels/pays.py, which needs
# torch. (dropout, a mask, and one that learns).
FEWEST_ON_CPU = {
    (True, False, False): 1_000_000,
    (True, True, False): 1_500_000,
    (True, True, True): 4_000_000,
    (False, True, True): 8_000_000,
}
_FEWEST_WIDE = 2_000_000  # values of another size than the queries

# Of the passes over scores: low, likely, high. With dropout on the CPU the recipe took 75 ms where torch took 288, of
# which its matmuls took about 100.
_OF_PASSES = (0.3, 0.8, 0.95)
# With a learnt bias benchmarks/crossover.py has x1.1 to x1.2 for the whole attention, whose passes are about half; a
# pair of benchmarks/estimates.py, whose scores are new pages in each step, x1.6.
OF_LEARNT_PASSES = (0.0, 0.4, 0.9)

# Of the matmuls' time.
_MADE_AGAIN = 1 / 6

NO_DROPOUT = "torch's fused CPU kernel has no dropout"


def saved_of_passes(
    case: Case,
    layers: Collection[str | None],
    spent: int,
    kept: int = 0,
    of_passes: tuple[float, float, float] = _OF_PASSES,
) -> Estimate | None:
    """Return what a kernel without scores saves of these layers' attention; None where there is nothing to save.

    Its passes over the scores go, but for the softmax itself, which is computed with the matmuls, and again in
    backward; of the six matmuls (two in forward, four in backward) one is recomputed.

    Args:
        spent: by the lines of the attention.
        kept: bytes of scores.
        of_passes: what part of their time goes: low, likely, high.
    """
    products = ops_ns(case, layers, lambda name: "mm" in name.lower())
    passes = ops_ns(case, layers, lambda name: "mm" not in name.lower() and name != "(python)")
    found = min(passes, spent)
    # What was measured as a whole has the matmul in it.
    again = min(products, spent - found) * _MADE_AGAIN if of_passes is _OF_PASSES else 0
    low, likely, high = (max(round(found * part - again), 0) for part in of_passes)
    return Estimate(likely, low, high, kept) if likely or kept else None


def attention_call(case: Case, place: PlaceFact) -> Node | None:
    """The call of torch's own attention among those of a place."""
    return next((call for call in map(case.call, place.calls) if call.op == ATTENTION), None)


def is_given_mask(call: Node) -> bool:
    """Check that torch's attention is given a mask."""
    return isinstance(call.argument(3, "attn_mask"), Value)


def is_causal_mask(case: Case, place: PlaceFact) -> bool:
    """Check that torch's attention is given a mask that was causal: the recipe leaves it out, or looks at it itself."""
    call = attention_call(case, place)
    if call is None or not is_given_mask(call):
        return False
    return place.recipe == "attention" or "**attention_mask(" in place.new_text or "is_causal=True" in place.new_text


def why_math(case: Case, call: Node) -> str:
    """Why torch's attention ran as plain operations; empty where it did not, or where that is the best there is."""
    ran = any("_scaled_dot_product_attention_math" in row.name for row in case.ops.get((call.layer, "forward"), ()))
    if not ran or len(call.inputs) < 3:
        return ""
    query, key, value = call.inputs[:3]
    mask, dropout = call.argument(3, "attn_mask"), call.argument(4, "dropout_p", 0.0)
    drops = isinstance(dropout, (int, float)) and dropout > 0
    if len(query.shape) != 4:
        return f"query has {len(query.shape)} dimensions, and the fused kernels need 4"
    if query.device.type == "cuda":
        return _why_math_on_cuda(call, query, value)
    masked = isinstance(mask, Value)
    learned = isinstance(mask, Value) and mask.requires_grad
    scores = query.elements // query.shape[-1] * key.shape[-2]
    wide = _FEWEST_WIDE if query.shape[-1] != value.shape[-1] else 0
    if scores < FEWEST_ON_CPU.get((drops, masked, learned), wide):
        return ""  # so few are done at once sooner
    if drops:
        return NO_DROPOUT
    if learned:
        return NO_GRADIENT
    return _why_math_anywhere(call, query, value)


def _why_math_on_cuda(call: Node, query: Value, value: Value) -> str:
    if query.dtype == torch.float64:
        return "the fused kernels do not support float64"
    if query.dtype == torch.float32 and call.argument(7, "enable_gqa", False):
        return "the fused kernels do not support grouped heads in float32"
    if query.dtype == torch.float32 and query.shape[-1] % 4:
        return f"in float32 the fused kernels need a head size that is a multiple of 4, not {query.shape[-1]}"
    return _why_math_anywhere(call, query, value)


def _why_math_anywhere(call: Node, query: Value, value: Value) -> str:
    if query.device.type != "cuda" and query.shape[-1] != value.shape[-1]:
        return f"the head sizes of query ({query.shape[-1]}) and value ({value.shape[-1]}) differ"
    if any(each.strides is not None and each.strides[-1] != 1 for each in call.inputs[:3]):
        return "the last dimension of query, key or value is not contiguous"
    return ""


def scores_kept(case: Case, lines: Collection[str | None], scores: Sequence[tuple[int, ...]]) -> int:
    """Bytes of tensors the shape of these scores that the lines keep for backward, and that are alive at the peak."""
    ends = tuple({f"{shape[-2]}x{shape[-1]}" for shape in scores})
    return alive_at_peak(row for row in case.saved if row.line in lines and row.shape.endswith(ends))
