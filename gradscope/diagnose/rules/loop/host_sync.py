"""Python reads the value of a tensor: on a GPU it waits until all queued work is done.

Example::

    if loss.item() > 10: ...  # also .tolist(), float(x), if x.any(): ..., print(x), f"{x:.3f}", x.cpu()
    chosen = x[mask]  # and nonzero(), unique(): how large is the result?
    mask = torch.tensor(rows).to(x.device)  # a copy to the GPU is waited for too, without non_blocking=True

Pattern: calls that must know the value of a tensor on the device, or that copy one to it, by line, in the recorded
step: in modules, in the loop, and in hooks that run in backward. A GPU works on while Python runs ahead; each such call
makes Python wait for all of it, and then the GPU wait for Python. On a CPU there is nothing to wait for: a line of the
user's own module is told of from ten calls a step on, for what the calls cost, where torch's operations that read
single numbers take 1 % of the step in its layers. Code of installed packages is left alone there.

Evidence: which calls, how often a step. Estimate: none; on a CPU at most what these operations take.

Source: PyTorch, Performance Tuning Guide, "Avoid unnecessary CPU-GPU synchronization"; CUDA semantics, "Use pinned
memory buffers".
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch

from gradscope.diagnose.case import Case, Rule, share, text_at
from gradscope.diagnose.findings import at_most, is_of_a_library, make_finding, shape_text
from gradscope.diagnose.worth import ops_ns
from gradscope.recording.graph import Node, Value
from gradscope.recording.operations import SHOWS
from gradscope.tables import Finding, Severity
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
    "__index__": "indexing",
    "__complex__": "complex()",
    "__contains__": "in",
    "__repr__": "repr()",
    "__format__": "format()",
    "is_nonzero": "is_nonzero",
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
# What a read of one number is made of, on a CPU.
_READING = frozenset({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"})
# An optimizer reads its own counters, and a scaler whether it may step: neither can be helped.
_STEPS = re.compile(r"\.step\(")
_MOVES = {"cpu", "to", "cuda", "type_as"}
_MAKES = {"tensor", "as_tensor", "asarray"}


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each line."""
    found: defaultdict[str, list[tuple[Node, str]]] = defaultdict(list)
    for call in case.facts.calls:
        what = _waits(call)
        if what and call.source is not None and not _STEPS.search(text_at(case, call.source)):
            found[call.source].append((call, what))
    for source, calls in found.items():
        finding = _finding(case, source, calls)
        if finding is not None:
            yield finding


def _waits(call: Node) -> str:
    """Return how the call is spelled, where it must know the content of a tensor; else ""."""
    if call.op in _MAKES and _is_from_cpu(call):
        return f"torch.{call.op}"
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
    if call.op not in _MOVES or not call.outputs or _is_asynchronous(call):
        return ""
    return f".{call.op}()" if call.inputs[0].device.type != call.outputs[0].device.type else ""


def _is_from_cpu(call: Node) -> bool:
    """Check that the call puts on the GPU what was not there."""
    made = call.outputs[:1]
    return bool(made) and made[0].device.type == "cuda" and all(tensor.device.type == "cpu" for tensor in call.inputs)


def _is_asynchronous(call: Node) -> bool:
    """Check that the call asks for ``non_blocking``, by name or as the first of its flags."""
    flags = [argument for argument in call.args[1:] if isinstance(argument, bool)]
    return call.kwargs.get("non_blocking", flags[0] if flags else False) is True


def _masked(call: Node) -> bool:
    """Check that a mask of bools says what is read or written; a single number is written without knowing where."""
    index = call.args[1] if len(call.args) > 1 else None
    parts = index if isinstance(index, (tuple, list)) else (index,)
    by_mask = any(isinstance(part, Value) and part.dtype in (torch.bool, torch.uint8) and part.shape for part in parts)
    value = call.args[2] if len(call.args) > 2 else None
    return by_mask and not (call.op == "setitem" and (not isinstance(value, Value) or value.elements == 1))


def _finding(case: Case, source: str, calls: list[tuple[Node, str]]) -> Finding | None:
    on_device = [(call, what) for call, what in calls if _on_gpu(call)]
    if not on_device:
        calls = [(call, what) for call, what in calls if call.layer is not None and call.op in _READS]
        if case.on_cuda or is_of_a_library(source) or len(calls) < _MANY_ON_CPU:
            return None
        if share(_reading_ns(case, calls), case) < _LEAST_SHARE_ON_CPU:
            return None
    calls = on_device or calls
    layers = tuple(dict.fromkeys(call.layer for call, _ in calls if call.layer is not None))
    kinds = Counter(what for _, what in calls)
    told = ", ".join(f"{what} {_times(count)}" for what, count in kinds.most_common())
    # One look at the loss, or a copy of the batch, is common, and at the end of it there is little left to wait for.
    copied = bool(on_device) and all(_is_copied(call) for call, _ in calls)
    severity: Severity = "warning" if on_device and (layers or (len(calls) > 1 and not copied)) else "info"
    evidence = f"{told} per step"
    if not on_device:
        message = "Single tensor values are read one by one, each with its own call"
        evidence += f"; the reads take {time_text(_reading_ns(case, calls))}"
    elif copied:
        message = "A blocking copy to the GPU: Python waits for the GPU, then the GPU waits for Python"
        sizes = [shape_text(call.outputs[0].shape) or "1" for call, _ in calls]
        evidence += f", {', '.join(dict.fromkeys(sizes))} elements"
    else:
        message = "A tensor's value is read from the GPU: Python waits for the GPU, then the GPU waits for Python"
    advice, code = _advice(calls, bool(on_device))
    reading = 0 if on_device else _reading_ns(case, calls)
    return make_finding(
        RULE.name,
        case,
        at_most(reading),
        severity=severity,
        layers=layers,
        line=source,
        message=message,
        evidence=evidence,
        advice=advice,
        code=code,
        cost_ns=reading,
    )


def _reading_ns(case: Case, calls: list[tuple[Node, str]]) -> int:
    """Return what the operations take that read single numbers, by these calls' part of all that their layers make."""
    layers = {call.layer for call, _ in calls}
    every = sum(each.layer in layers and each.op in _READS for each in case.facts.calls)
    return round(ops_ns(case, layers, _READING.__contains__) * len(calls) / max(every, 1))


def _on_gpu(call: Node) -> bool:
    return any(tensor.device.type == "cuda" for tensor in (*call.inputs, *call.outputs))


def _is_copied(call: Node) -> bool:
    """Check that the call waits for a copy to the GPU, and for nothing else."""
    return call.op in _MAKES | _MOVES and _is_from_cpu(call)


def _times(count: int) -> str:
    return "1 time" if count == 1 else f"{counted(count)} times"


def _advice(calls: list[tuple[Node, str]], on_device: bool) -> tuple[str, str]:
    call = calls[0][0]
    if call.op in SHOWS:
        return "Print every 100 steps or so, or after training.", "if step % 100 == 0: print(loss.item())"
    if call.op in ("getitem", "setitem", "where", *_SIZES):
        return (
            "Keep the shape: select with torch.where or multiply by the mask, and divide by its sum.",
            "total = torch.where(mask, x, 0.0).sum()",
        )
    if call.op == "repeat_interleave":
        return "Pass the size of the result.", "torch.repeat_interleave(x, repeats, output_size=length)"
    if on_device and _is_copied(call) and call.layer is None:
        return (
            "Copy from pinned memory with `non_blocking=True`, so that the copy overlaps with computation.",
            "x = x.to(device, non_blocking=True)  # from DataLoader(..., pin_memory=True)",
        )
    if on_device and _is_copied(call):
        return (
            "Create the tensor on the device, or create it once: a registered buffer moves with the module.",
            'self.register_buffer("mask", mask)',
        )
    if call.op == "__bool__":
        return (
            "Use torch.where instead of `if`, or check only every 100 steps.",
            "x = torch.where(condition, one, other)",
        )
    if on_device:
        return (
            "Keep the value on the device with `.detach()`, and read it only every 100 steps or so.",
            "total += loss.detach()  # total.item() when it is printed",
        )
    return "Collect the values in one tensor and read it once.", "values = torch.stack(found).tolist()"


RULE = Rule("host-sync", "reads of tensor values that make Python wait", find, edits=True)
