"""Gradients are filled with zeros before each step, and backward then reads these zeros to add to them.

Example::

    optimizer.zero_grad(set_to_none=False)

Pattern: ``zero_`` in the recorded step on what ``.grad`` of a tensor gave. Evidence: the gradients and their bytes, the
measured time of the fills where the optimizer makes them, and of the additions to ``.grad`` in backward. Estimate: the
fills and one backward pass's additions: where there are several, the others are needed (low: the fills).

Source: PyTorch performance tuning guide, "Use parameter.grad = None instead of model.zero_grad()";
torch.optim.Optimizer.zero_grad.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule, severity_of
from gradscope.tables import CallFact, Finding, TensorFact
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import size as size_text

_CALLS = {"zero", "_foreach_zero_"}
_FILLS = {"aten::zero_", "aten::fill_", "aten::_foreach_zero_"}
_BYTES = {"float16": 2, "bfloat16": 2, "float64": 8}


def find(case: Case) -> Iterator[Finding]:
    """At most one."""
    clears = [call for call in case.facts.calls if call.op in _CALLS and _gradients(case, call)]
    if not clears:
        return
    gradients = [each for call in clears for each in _gradients(case, call)]
    fills = [row for row in case.run.ops if row.phase == "optimizer" and row.layer is None and row.name in _FILLS]
    filled_ns = sum(row.self_ns for row in fills)
    backwards = max(1, sum(call.op == "backward" for call in case.facts.calls))
    additions = [row for row in case.run.ops if row.phase == "accumulate" and row.name.startswith("aten::add")]
    added_ns = sum(row.self_ns for row in additions)
    saving = filled_ns + added_ns // backwards
    held = sum(each.elements * _BYTES.get(each.dtype, 4) for each in gradients)
    evidence = f"{counted(len(gradients))} gradients of {size_text(held)} are filled"
    if filled_ns:
        evidence += f" in {time_text(filled_ns)}"
    if additions:
        evidence += f"; adding to them in backward takes {time_text(added_ns)}"
    yield Finding(
        rule=RULE.name,
        severity=severity_of(saving, case),
        layers=(),
        line=clears[0].source,
        message="gradients are filled with zeros and added to, instead of dropped and made anew",
        evidence=evidence,
        predicted_saving_ns=saving or None,
        advice="Leave set_to_none at True, its default, and check for None where the code reads .grad.",
        code="optimizer.zero_grad()",
        # A gradient that is not added to is still written, and may have to be copied.
        predicted_low_ns=filled_ns if saving else None,
        predicted_high_ns=saving or None,
    )


def _gradients(case: Case, call: CallFact) -> list[TensorFact]:
    """What of the call's tensors was read from a ``.grad``."""
    return [each for each in call.inputs if each.producer is not None and case.call(each.producer).op == "grad"]


RULE = Rule("zero-grad-fills", "gradients that are filled with zeros", find)
