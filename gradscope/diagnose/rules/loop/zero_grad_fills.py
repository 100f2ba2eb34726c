"""zero_grad fills gradients with zeros instead of freeing them, so backward must add to them.

Example::

    optimizer.zero_grad(set_to_none=False)
    for parameter in model.parameters(): parameter.grad.zero_()

Pattern: ``zero_``, or ``fill_`` with 0, in the recorded step on what ``.grad`` of a tensor gave. Evidence: the
gradients and their bytes, the measured time of the fills outside of modules, by their share of the numbers that are
filled there, and of the additions to ``.grad`` in backward. Estimate: 0.9 of the fills and half of one backward pass's
additions: a gradient that is not added to is still written, and where there are several passes the others are needed
(low: half of the fills; high: both). On a CPU none, that is the most there can be: gradients
made anew may be memory that the system hands out again, page by page (measured: from 9 % of a step saved to 20 % lost).

Source: PyTorch performance tuning guide, "Use parameter.grad = None instead of model.zero_grad()";
torch.optim.Optimizer.zero_grad.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.findings import Estimate, at_most, make_finding
from gradscope.ops import ATEN_FILLS
from gradscope.recording.graph import Node, Value
from gradscope.tables import Finding
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import size as size_text

_CALLS = {"zero", "_foreach_zero_", "fill"}
_SAME = {"data", "detach"}  # of a gradient: the same memory
_PHASES = {"optimizer", "other", "forward"}  # the last: what comes after the first module of a step
_OF_FILLS = 0.9  # of their time


def find(case: Case) -> Iterator[Finding]:
    """Yield at most one finding."""
    fills = [call for call in case.facts.calls if call.op in _CALLS and call.layer is None]
    clears = [call for call in fills if _is_zero(call) and _gradients(call)]
    if not clears:
        return
    gradients = [each for call in clears for each in _gradients(call)]
    filled = sum(each.elements for call in fills for each in call.inputs)
    spent = sum(
        row.self_ns for row in case.run.ops if row.layer is None and row.phase in _PHASES and row.name in ATEN_FILLS
    )
    filled_ns = round(spent * sum(each.elements for each in gradients) / max(filled, 1))
    backwards = max(1, sum(call.op == "backward" for call in case.facts.calls))
    additions = [row for row in case.run.ops if row.phase == "accumulate" and row.name.startswith("aten::add")]
    added_ns = sum(row.self_ns for row in additions)
    most = filled_ns + added_ns // backwards
    saving = round(filled_ns * _OF_FILLS) + added_ns // backwards // 2
    held = sum(each.bytes for each in gradients)
    evidence = f"{counted(len(gradients))} gradients ({size_text(held)}) are zero-filled"
    if filled_ns:
        evidence += f" in {time_text(filled_ns)}"
    if additions:
        evidence += f"; accumulating into them in backward takes {time_text(added_ns)}"
    yield make_finding(
        RULE.name,
        case,
        Estimate(saving, filled_ns // 2, most) if case.on_cuda else at_most(most),
        layers=(),
        line=clears[0].source,
        message="zero_grad fills gradients with zeros instead of freeing them, so backward must add to them",
        evidence=evidence,
        advice="Use the default `set_to_none=True`, and check for None where the code reads .grad.",
        code="optimizer.zero_grad()",
        cost_ns=filled_ns + added_ns,
    )


def _is_zero(call: Node) -> bool:
    return call.op != "fill" or call.argument(1, "value") == 0


def _gradients(call: Node) -> list[Value]:
    """Return what of the call's tensors was read from a ``.grad``."""
    return [each for each in call.inputs if _maker(each) == "grad"]


def _maker(tensor: Value) -> str:
    """The operation that made the tensor, or what it shares its memory with; "" where it was there before."""
    while tensor.producer is not None:
        call = tensor.producer
        if call.op not in _SAME or not call.inputs:
            return call.op
        tensor = call.inputs[0]
    return ""


RULE = Rule("zero-grad-fills", "gradients that zero_grad fills with zeros", find)
