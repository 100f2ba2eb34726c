"""Debugging settings were left on: anomaly mode, blocking kernel launches, uncached allocations.

Example::

    torch.autograd.set_detect_anomaly(True)

Pattern: the switch at the end of the recorded step, at its first module and where each backward pass begins, so that
``with torch.autograd.detect_anomaly():`` inside a step is seen too; and the search for NaN in the backward pass, which
nothing else makes.
Evidence: the measured time of these searches, and the number of nodes, each of which keeps the text of a Python stack.
Estimate: the searches, and 100 µs a stack: 160 µs were measured under 15 frames, 400 µs under 25 (low: 20 µs, high:
400 µs), never more than the forward pass took.

Source: PyTorch performance tuning guide, "Disable debugging APIs"; torch.autograd.set_detect_anomaly; CUDA semantics,
"Asynchronous execution" (CUDA_LAUNCH_BLOCKING) and "Memory management" (PYTORCH_NO_CUDA_MEMORY_CACHING).
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.findings import Estimate, make_finding
from gradscope.tables import Finding, OpRow
from gradscope.units import count as counted
from gradscope.units import ns as time_text

_BACKWARD = {"backward", "accumulate", "gradient_sum", "engine", "recompute"}
_SIGN = "aten::_is_any_true"  # no function of torch's own but the engine's search calls it
_SEARCH = {_SIGN, "aten::isnan"}

# A Python stack as text, in ns: low, likely, high.
_STACK_NS = (20_000, 100_000, 400_000)

# How much of the forward pass the stacks can have been at most.
_MOST = 0.9

# name of the setting -> what is wrong, what to do, how.
_SWITCHES = {
    "launch_blocking": (
        "CUDA_LAUNCH_BLOCKING is set: the CPU waits for every kernel to finish",
        "Unset it unless you are debugging a failing kernel.",
        "unset CUDA_LAUNCH_BLOCKING",
    ),
    "no_caching": (
        "PYTORCH_NO_CUDA_MEMORY_CACHING is set: every allocation goes to the driver, which waits for the GPU",
        "Unset it unless you are debugging memory accesses with compute-sanitizer.",
        "unset PYTORCH_NO_CUDA_MEMORY_CACHING",
    ),
}


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each switch."""
    searches = [row for row in case.run.ops if row.phase in _BACKWARD and row.name in _SEARCH]
    searched = any(row.name == _SIGN for row in searches)
    if searched or case.facts.settings.get("anomaly"):  # the search alone, where no step was recorded
        yield _anomaly(case, searches if searched else [])
    if case.on_cuda:
        for name, (message, advice, code) in _SWITCHES.items():
            if case.facts.settings.get(name):
                yield make_finding(
                    RULE.name,
                    case,
                    None,
                    severity="warning",
                    layers=(),
                    line=None,
                    message=message,
                    evidence="the environment variable is set",
                    advice=advice,
                    code=code,
                )


def _anomaly(case: Case, searches: list[OpRow]) -> Finding:
    nodes = sum(row.calls for row in case.run.ops if row.phase == "backward" and _is_node(row.name))
    search_ns = sum(row.self_ns for row in searches)
    most = case.run.step.forward_ns * _MOST
    low, likely, high = (search_ns + round(min(nodes * each, most)) for each in _STACK_NS)
    message = "Anomaly mode is on: every autograd node stores a Python stack trace"
    evidence = f"{counted(round(nodes))} nodes per step"
    if searches:
        calls = sum(row.calls for row in searches if row.name == _SIGN)
        message += ", and every gradient is checked for NaN"
        evidence += f"; {counted(round(calls))} NaN checks took {time_text(search_ns)}"
    line = None
    if "anomaly" in case.facts.settings.get("inside_step", ()):
        line = next((call.source for call in case.facts.calls if call.op == "backward" and call.source), None)
        evidence += "; it is on only inside the step"
    return make_finding(
        RULE.name,
        case,
        Estimate(likely, low, high),
        layers=(),
        line=line,
        message=message,
        evidence=evidence,
        advice="Turn anomaly mode off, except to find the source of a NaN.",
        code="torch.autograd.set_detect_anomaly(False)",
    )


def _is_node(name: str) -> bool:
    """Check that a row is of an autograd node, as AddmmBackward0, and not of an operation that it ran."""
    return "::" not in name and name.rstrip("0123456789").endswith("Backward")


RULE = Rule("anomaly-mode", "debugging settings left on", find)
