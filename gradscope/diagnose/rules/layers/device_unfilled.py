"""Layers too small to fill the device: call overhead takes longer than the computation.

Example::

    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(200)])  # with a batch of 8

Pattern: layers that the calls limit (see ``bound_by``), together 20 % of the step or more, with 64 calls a step or
more. On the CPU also those that take more than ten times what their matmuls and bytes would, in calls of less than ten
of the smallest. On a GPU: the device had nothing to do in half of the layers' backward time or more, their calls or
their launches explain it, their kernels take less than 10 µs each, and the device's whole work fits twice into a step
that is not profiled: the profiler makes launches slower too. Layers that ``tiny-layers`` (a Python loop) or
``far-from-limit`` tell of are left out.

Evidence: calls or kernels of one step, and their mean time. Estimate: none; at most what the calls take by themselves,
or the time in which the GPU had nothing to do. A larger batch makes no step shorter, but each example cheaper.

Source: PyTorch, Performance Tuning Guide, and "Accelerating PyTorch with CUDA Graphs"; H. He, Making Deep Learning Go
Brrrr From First Principles (2022), on overhead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from gradscope.diagnose.case import Case, Rule, first, share
from gradscope.diagnose.findings import at_most, make_finding
from gradscope.diagnose.rules.layers import far_from_limit, tiny_layers
from gradscope.diagnose.worth import is_slowed_down, own_ns
from gradscope.ops import ATEN
from gradscope.tables import Finding, LayerRow
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import percent

_SHARE, _CALLS = 0.20, 64
_SMALL_NS = 10_000
_MOST = 0.5
_TIMES = 10


def find(case: Case) -> Iterator[Finding]:
    """Yield at most one finding."""
    if is_slowed_down(case):
        return
    rows = _unfilled(case) if case.on_cuda else [row for row in case.run.layers if _is_small(case, row)]
    if share(sum(map(own_ns, rows)), case) < _SHARE:
        return
    told = {path for rule in (tiny_layers, far_from_limit) for finding in rule.find(case) for path in finding.layers}
    rows = [row for row in rows if row.path not in told and own_ns(row) > 0]
    spent = sum(map(own_ns, rows))
    finding = (_of_gpu if case.on_cuda else _of_cpu)(case, rows, spent)
    if finding is not None and share(spent, case) >= _SHARE:
        yield finding


def _of_cpu(case: Case, rows: Sequence[LayerRow], spent: int) -> Finding | None:
    calls = sum(_calls(case, row) for row in rows)
    if calls < _CALLS or case.limits is None:
        return None
    return make_finding(
        RULE.name,
        case,
        at_most(min(round(calls * case.limits.call_ns), spent)),
        severity="warning",
        layers=(row.path for row in rows),
        line=None,
        message="Layers are so small that call overhead takes longer than the computation",
        evidence=(
            f"{_names(rows)}: {counted(round(calls))} calls per step, {time_text(spent / calls)} "
            f"each; the smallest possible call takes {time_text(case.limits.call_ns)}; "
            f"{time_text(spent)} in total, {percent(share(spent, case))} of the step"
        ),
        advice="Use a larger batch, or let torch.compile fuse several calls into one.",
        code="model = torch.compile(model)",
        cost_ns=spent,
    )


def _of_gpu(case: Case, rows: Sequence[LayerRow], spent: int) -> Finding | None:
    calls, working = _kernels(case, {row.path for row in rows})
    idle = sum(row.idle_ns or 0 for row in rows)
    backward = sum(row.backward_self_ns for row in rows)
    if calls < _CALLS:
        return None
    return make_finding(
        RULE.name,
        case,
        at_most(idle),
        severity="warning",
        layers=(row.path for row in rows),
        line=None,
        message="Kernels are too small to fill the GPU, so it waits for kernel launches",
        evidence=(
            f"{_names(rows)}: {counted(round(calls))} kernels per step, {time_text(working / calls)} "
            f"each; the GPU was idle for {time_text(idle)} of {time_text(backward)} of backward; "
            f"{percent(share(spent, case))} of the step"
        ),
        advice="Use a larger batch, or let torch.compile record CUDA graphs, which launch many kernels at once.",
        code='model = torch.compile(model, mode="reduce-overhead")',
        cost_ns=spent,
    )


def _is_small(case: Case, row: LayerRow) -> bool:
    """Check that a layer on the CPU spends most of its time in its calls."""
    if row.bound_by == "overhead":
        return True
    if case.limits is None or row.forward_limit_ns is None or row.backward_limit_ns is None:
        return False
    working = row.forward_limit_ns + row.backward_limit_ns
    return working * _TIMES < own_ns(row) < _calls(case, row) * _TIMES * case.limits.call_ns


def _calls(case: Case, row: LayerRow) -> float:
    """Count the calls of torch's operations, forward and backward."""
    rows = (op for phase in ("forward", "backward") for op in case.ops.get((row.path, phase), ()))
    return sum(op.calls for op in rows if op.name.startswith(ATEN))


def _unfilled(case: Case) -> list[LayerRow]:
    """Return the layers in which the GPU waits for launches."""
    whole = sum(row.device_ns if row.busy_ns is None else row.busy_ns for row in case.run.kernels)
    if whole > _MOST * (case.run.step.unprofiled_wall_ns or case.step_ns):
        return []
    kernels: defaultdict[str | None, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kernel in case.run.kernels:
        kernels[kernel.layer][0] += kernel.calls
        kernels[kernel.layer][1] += kernel.device_ns
    found = []
    for row in case.run.layers:
        calls, working = kernels[row.path]
        if row.idle_ns and row.idle_ns >= _MOST * row.backward_self_ns and calls and working < calls * _SMALL_NS:
            launching = (row.launch_ns or 0) >= _MOST * row.idle_ns
            if row.bound_by == "overhead" or (row.bound_by is None and launching):
                found.append(row)
    return found


def _kernels(case: Case, layers: set[str]) -> tuple[float, float]:
    """Return how many, and how long they ran."""
    rows = [row for row in case.run.kernels if row.layer in layers]
    return sum(row.calls for row in rows), float(sum(row.device_ns for row in rows))


def _names(rows: Sequence[LayerRow]) -> str:
    return first([row.path or row.class_name for row in rows])


RULE = Rule("device-unfilled", "layers too small to fill the device", find, of_times=True)
