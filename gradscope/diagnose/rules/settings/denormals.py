"""Matmuls get denormal (subnormal) numbers, which this CPU computes many times slower.

Example::

    loss = F.cross_entropy(self.head(x), targets)  # of 50,257 probabilities most are 1e-40: no number, but not zero

Pattern: on a CPU, float32 matmuls in the backward pass, at least one in a hundred of whose elements on one side is
smaller than 1.2e-38 and not zero: gradients of a softmax over many classes, or weights that decayed away. Other
processors, as AMD's newer ones, lose nothing by it: a part of the matmul is run alone both ways, and must take twice
as long as with denormal numbers flushed to zero. Silent where they are flushed already.

Evidence: their share in what the recorded step's backward passes gave to matmuls; the time of these; both times of the
part. Estimate: of the matmuls' time what flushing took away from the part, likely 0.9 of it, at least half.

Source: PyTorch, torch.set_flush_denormal; Intel 64 and IA-32 Architectures Optimization Reference Manual,
"Floating-Point Exceptions and Modes": denormal operands need assistance by microcode.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.findings import make_finding, of_step, only, parts_of, several, shape_text
from gradscope.ops import MATMULS
from gradscope.recording.graph import Node
from gradscope.tables import Finding
from gradscope.units import ns as time_text
from gradscope.units import percent

_SLOWER = 2.0  # times, by denormal numbers: less may be the other programs of a busy machine
_PARTS = (0.5, 0.9, 1.0)  # of what flushing takes away: low, likely, high


def find(case: Case) -> Iterator[Finding]:
    """Yield at most one finding: the setting is of the whole program."""
    seen = case.facts.settings.get("denormals") or ()
    slowed = [each for each in seen if each["kept_ns"] >= _SLOWER * each["flushed_ns"] > 0]
    if not slowed or case.facts.settings.get("flush_denormal"):
        return
    dearest = max(slowed, key=lambda each: each["ns"])
    calls = [call for each in slowed for call in _calls(case, each["operand"])]
    line = only(call.source for call in calls)
    spent = sum(each["ns"] for each in slowed)
    number = sum(each["calls"] for each in slowed)
    yield make_finding(
        RULE.name,
        case,
        parts_of(sum(map(_saved_ns, slowed)), _PARTS),
        layers=(call.layer for call in calls) if line is not None else (),
        line=line,
        message="Denormal (subnormal) numbers slow down matmuls on this CPU",
        evidence=(
            f"{percent(dearest['share'])} of the elements of a {shape_text(dearest['operand'])} "
            f"operand are below 1.2e-38; {several(number, 'matmul')} in backward with such operands: "
            f"{of_step(spent, case)}; part of one, run alone, took {time_text(dearest['kept_ns'])}, "
            f"and {time_text(dearest['flushed_ns'])} with denormals flushed"
        ),
        advice=(
            "Flush them to zero before the first matmul: the setting does not reach threads that "
            "torch has already started."
        ),
        code="torch.set_flush_denormal(True)",
        cost_ns=spent,
    )


def _saved_ns(product: Mapping[str, Any]) -> float:
    return float(product["ns"] * (1 - product["flushed_ns"] / product["kept_ns"]))


def _calls(case: Case, operand: tuple[int, ...]) -> Iterator[Node]:
    """Yield matmuls of the forward pass that were given, or made, a tensor of as many numbers and of the same rows.

    A gradient has the shape of the result; a linear layer's is a matrix in backward, or one that is turned.
    """
    elements = 1
    for size in operand:
        elements *= size
    for call in case.facts.calls:
        tensors = (*call.inputs, *call.outputs) if call.op in MATMULS else ()
        if any(each.elements == elements and each.shape and each.shape[-1] in operand for each in tensors):
            yield call


RULE = Rule("denormals", "matmuls slowed down by denormal numbers", find)
