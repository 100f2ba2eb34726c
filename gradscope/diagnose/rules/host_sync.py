"""Python asks for the content of a tensor: on a GPU the step stands still until it is known.

Example::

    if loss.item() > 10: ...  # also .tolist(), float(x), if x.any(): ..., print(x), x.cpu()
    chosen = x[mask]  # and nonzero(), unique(): how large is the result?

Pattern: calls that must know the content of a tensor on the device, by line, in the recorded step. A GPU works on
while Python runs ahead; each such call makes Python wait for all of it, and then the GPU wait for Python. On a CPU
there is nothing to wait for: a line of a module is told of from ten calls a step on, for what it costs to call, where
it takes 1 % of the step.

Evidence: which calls, how often a step. Estimate: none.

Source: PyTorch, Performance Tuning Guide, "Avoid unnecessary CPU-GPU synchronization".
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule, Severity, share, text_at
from gradscope.tables import CallFact, Finding, TensorFact
from gradscope.units import count as counted
from gradscope.units import ns as time_text

_READS = {
    "item": ".item()",
    "tolist": ".tolist()",
    "numpy": ".numpy()",
    "__array__": "numpy",
    "__bool__": "if",
    "__float__": "float()",
    "__int__": "int()",
    "__index__": "an index",
    "equal": "torch.equal",
    "allclose": "torch.allclose",
}
_SIZES = {
    "nonzero": "nonzero",
    "argwhere": "argwhere",
    "masked_select": "masked_select",
    "unique": "unique",
    "unique_consecutive": "unique_consecutive",
    "_unique2": "unique",
}
_MANY_ON_CPU = 10
_LEAST_SHARE_ON_CPU = 0.01
# An optimizer reads its own counters, and a scaler whether it may step: neither can be helped.
_STEPS = re.compile(r"\.step\(")
_PRINTS = re.compile(r"\bprint\(|\blogg?(?:er|ing)?\.(?:info|debug|warning)\(")
_LOOKS = re.compile(r"\.(?:shape|size|dtype|device|dim)\b")


def find(case: Case) -> Iterator[Finding]:
    """One for each line."""
    found: defaultdict[str, list[tuple[CallFact, str]]] = defaultdict(list)
    for call in case.facts.calls:
        what = _waits(call)
        if what and call.source is not None and not _STEPS.search(text_at(case, call.source)):
            found[call.source].append((call, what))
    for source, calls in found.items():
        finding = _finding(case, source, calls)
        if finding is not None:
            yield finding
    if case.on_cuda:
        yield from _prints(case, set(found))


def _waits(call: CallFact) -> str:
    """How the call is spelled, where it must know the content of a tensor; else ""."""
    if not call.inputs:
        return ""
    if call.op in _READS or call.op in _SIZES:
        return _READS.get(call.op) or _SIZES[call.op]
    if call.op == "where" and len(call.inputs) == 1:
        return "where with one argument"
    if call.op in ("getitem", "setitem"):
        return "a boolean mask" if _masked(call) else ""
    if call.op == "repeat_interleave" and len(call.inputs) > 1 and call.argument(3, "output_size") is None:
        return "repeat_interleave"
    moved = call.op in ("cpu", "to") and call.inputs[0].device == "cuda" and bool(call.outputs)
    blocking = call.kwargs.get("non_blocking") is not True
    return f".{call.op}()" if moved and blocking and call.outputs[0].device == "cpu" else ""


def _masked(call: CallFact) -> bool:
    """Whether a tensor of bools chooses what is read or written; a single number is written without knowing where."""
    index = call.args[1] if len(call.args) > 1 else None
    parts = index if isinstance(index, tuple) else (index,)
    by_mask = any(isinstance(part, TensorFact) and part.dtype in ("bool", "uint8") and part.shape for part in parts)
    value = call.args[2] if len(call.args) > 2 else None
    return by_mask and not (call.op == "setitem" and (not isinstance(value, TensorFact) or value.elements == 1))


def _finding(case: Case, source: str, calls: list[tuple[CallFact, str]]) -> Finding | None:
    on_device = [(call, what) for call, what in calls if any(tensor.device == "cuda" for tensor in call.inputs)]
    if not on_device:
        calls = [(call, what) for call, what in calls if call.layer is not None and call.op in _READS]
        if case.on_cuda or len(calls) < _MANY_ON_CPU or share(case.lines_ns([source]), case) < _LEAST_SHARE_ON_CPU:
            return None
    calls = on_device or calls
    layers = tuple(dict.fromkeys(call.layer for call, _ in calls if call.layer is not None))
    kinds = Counter(what for _, what in calls)
    told = ", ".join(f"{what} {counted(count)} times" for what, count in kinds.most_common())
    spent = case.lines_ns([source])
    # One look at the loss in a step is common, and at the end of it there is little left to wait for.
    severity: Severity = "warning" if on_device and (layers or len(calls) > 1) else "info"
    if on_device:
        message = "Python waits for the GPU to learn the content of a tensor, and then the GPU for Python"
        evidence = f"{told} a step"
    else:
        message = "the content of tensors is read one by one, which costs a call each"
        evidence = f"{told} a step; the line takes {time_text(spent)}"
    advice, code = _advice(calls, bool(on_device))
    return Finding(
        rule=RULE.name,
        severity=severity,
        layers=layers,
        line=source,
        message=message,
        evidence=evidence,
        advice=advice,
        code=code,
    )


def _advice(calls: list[tuple[CallFact, str]], on_device: bool) -> tuple[str, str]:
    call = calls[0][0]
    if call.op in ("getitem", "setitem", "where", "nonzero", "argwhere", *_SIZES):
        return (
            "Keep the shape: choose with torch.where or multiply by the mask, and divide by its sum.",
            "total = torch.where(mask, x, 0.0).sum()",
        )
    if call.op == "__bool__":
        return (
            "Decide with torch.where instead of if, or look only every hundredth step.",
            "x = torch.where(condition, one, other)",
        )
    if on_device:
        return (
            "Keep the value on the device with detach, and read it once in many steps.",
            "total += loss.detach()  # total.item() when it is printed",
        )
    return "Collect the values in one tensor and read them once.", "values = torch.stack(found).tolist()"


def _prints(case: Case, known: set[str]) -> Iterator[Finding]:
    """Lines that print what torch computed there: the content has to be known."""
    for source, row in case.lines.items():
        if source in known or not row.forward_ns or not _PRINTS.search(row.text) or _LOOKS.search(row.text):
            continue
        yield Finding(
            rule=RULE.name,
            severity="warning",
            layers=(row.layer,) if row.layer is not None else (),
            line=source,
            message="a tensor is printed: Python waits for the GPU to learn its content",
            evidence=f"{row.text.strip()[:60]} takes {time_text(row.forward_ns)} of a step",
            advice="Print once in many steps, or after training.",
            code="if step % 100 == 0: print(loss.item())",
        )


RULE = Rule("host-sync", "Python waits for the content of a tensor", find)
