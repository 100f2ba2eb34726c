"""Tensors that stay alive after their step, so memory grows with every step.

Example::

    losses.append(loss)  # keeps the tensor and the graph behind it; losses.append(loss.item()) keeps a number

Pattern: memory of the step that belongs to no parameter, gradient, buffer or optimizer, is alive when the step ends,
and of which the step before left as much behind at the same place, while each of at least three steps in a row left as
many storages more: a loader that looks ahead is no leak, nor are some last outputs. And a number with a gradient that
is added to one from before the step, as in ``total += loss``, and that nothing reads but Python: each sum holds the
graph of the one before. Evidence: the bytes that stay, by the line that made them; for a sum, its line. Estimate: what
one step leaves behind; it adds up over the steps. The graph's nodes, which a kept loss holds too, are not in torch's
allocator and come on top: a sum's are all there is of it.

Source: https://pytorch.org/docs/stable/notes/faq.html, "My model reports cuda runtime error: out of memory": do not
accumulate history across the training loop.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule, first, text_at
from gradscope.diagnose.findings import Estimate, make_finding, where
from gradscope.recording.graph import Node, Value
from gradscope.tables import LEAK_SHARE, Finding, RetainedRow, Severity
from gradscope.units import size as size_text

_CRITICAL_SHARE = 0.01  # of the peak, with each step
_SCALAR = 64  # bytes
_READS = {"item", "tolist", "detach", "__float__", "__format__", "__repr__", "cpu", "numpy", "div"}

_DETACHES = {"detach", "data"}


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for all that grows: what one name keeps was often made on many lines; and one for each sum."""
    yield from _kept(case)
    yield from _sums(case)


def _kept(case: Case) -> Iterator[Finding]:
    memory = case.run.memory
    rows = [row for row in memory.retained if row.grows and row.phase != "optimizer"] if memory is not None else []
    if memory is None or not rows:
        return
    total = sum(row.bytes for row in rows)
    source = _kept_at(case, rows)
    lines = list(dict.fromkeys(row.line for row in rows if row.line is not None))
    part = total / max(memory.peak_bytes, 1)
    made = [tensor for call in case.calls_of_line.get(source or "", ()) for tensor in call.outputs]
    scalars = total <= _SCALAR * sum(row.count for row in rows)
    # A loss may be detached for one list, or for a line that is printed, and be kept in another as it is.
    kept_whole = case.facts.graphs > 0 or not _is_detached(case, made)
    graph = kept_whole and any(tensor.requires_grad for tensor in made)
    if scalars and made and not graph:
        return  # numbers that are kept on the device on purpose
    grave = part >= LEAK_SHARE or graph
    severity: Severity = "critical" if part >= _CRITICAL_SHARE else "warning" if grave else "info"
    evidence = (
        f"{size_text(total)} more memory stays allocated after each step: {size_text(1000 * total)} after 1000 steps"
    )
    if lines:
        evidence += f"; created on {first([where([line]) for line in lines])}"
    if graph:
        evidence += "; their autograd graph stays too"
    text = text_at(case, source)
    yield make_finding(
        RULE.name,
        case,
        Estimate(bytes=0 if scalars and graph else total),  # the graph is no part of that number
        severity=severity,
        layers=(row.layer for row in rows),
        line=source,
        message="Tensors stay alive after their step, so memory grows with every step",
        evidence=evidence + (f" ({text})" if text else ""),
        advice=(
            f"Keep Python numbers or detached copies instead of what {_where(source)} creates, or "
            "delete the old tensors."
        ),
        code="losses.append(loss.item())" if scalars else "kept.append(x.detach().cpu())",
    )


def _is_detached(case: Case, made: list[Value]) -> bool:
    """Check that some of these tensors are kept without their graph.

    A script's step ends with its optimizer: what it keeps of the step is read at the beginning of the next one.
    """
    if any(user.op in _DETACHES for tensor in made for user in tensor.users):
        return True
    given = [call.inputs[0] for call in case.facts.calls if call.op in _DETACHES and call.layer is None and call.inputs]
    old = {(each.shape, each.dtype) for each in given if each.producer is None and each.requires_grad}
    return any((tensor.shape, tensor.dtype) in old for tensor in made if tensor.requires_grad)


def _sums(case: Case) -> Iterator[Finding]:
    for call in case.facts.calls:
        if call.op == "add" and call.layer is None and call.source is not None and _is_sum(call):
            yield make_finding(
                RULE.name,
                case,
                None,
                severity="warning",
                layers=(),
                line=call.source,
                message="A running sum keeps the autograd graph of every step",
                evidence=(
                    "1 scalar that requires a gradient is added to the sum of the earlier steps, and no "
                    "backward pass uses it"
                ),
                advice="Add the detached value.",
                code="total += loss.detach()  # or loss.item()",
            )


def _is_sum(call: Node) -> bool:
    """Check that the call adds a number to one from before, for nobody but Python to read.

    A script's step ends with its optimizer: then the loss is from before too, as in a sum of two that is only printed.
    """
    tensors = [each for each in call.inputs if not each.shape and each.requires_grad and each.parameter is None]
    if len(tensors) != 2 or not call.grad or len(call.outputs) != 1 or not call.outputs[0].requires_grad:
        return False
    old = [each for each in tensors if each.producer is None]
    made = call.outputs[0]
    users = {user.op for user in made.users}
    if len(old) == 2 and made.storage not in [each.storage for each in tensors]:
        return not users
    return bool(old) and users <= _READS


def _kept_at(case: Case, rows: list[RetainedRow]) -> str | None:
    """The line of what was made last: what holds a graph is its end."""
    lines = [row.line for row in rows if row.line is not None]
    last = {source: calls[-1].index for source, calls in case.calls_of_line.items()}
    if not lines:
        return None
    return max(lines, key=lambda line: last.get(line, -1))


def _where(source: str | None) -> str:
    return where([source]) if source is not None else "the step"


RULE = Rule("leak", "tensors that outlive their step, so memory grows", find, beyond_numbers=True, grows=True)
