"""Compiled graphs compute a part of forward again in backward, for a memory budget that the program has set.

Example::

    torch._functorch.config.activation_memory_budget = 0.3  # matmuls are computed again too

Pattern: recompute in compiled code of a program that checkpoints nothing there, and a budget below 1. At 1, the
default, the partitioner (min-cut) recomputes what is fused into the kernel that reads it, which is mostly faster than
to load it.
Evidence: its measured time; the bytes of what backward reads and is computed again: with a larger budget a part of it
is saved, and what is cheap to compute is not.
Estimate: none; the budget is a choice, and what a larger one saves is known once it was tried.

Source: H. He and S. Yu, Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware (MLSys 2023);
PyTorch blog, Current and New Activation Checkpointing Techniques in PyTorch (2025), "Memory Budget API".
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule, share
from gradscope.diagnose.compiled import facts_of, is_the_partitioners
from gradscope.diagnose.findings import make_finding, of_step
from gradscope.diagnose.worth import slowest_line
from gradscope.tables import Finding
from gradscope.units import size as size_text

_LEAST_SHARE = 0.03  # of the step


def find(case: Case) -> Iterator[Finding]:
    """Yield at most one finding: the budget is of the whole program."""
    again, facts = case.run.ledger.recompute_ns, facts_of(case)
    budget = facts.get("budget", 1.0)
    if budget >= 1 or share(again, case) < _LEAST_SHARE or not is_the_partitioners(case):
        return
    times = {row.path: row.recompute_ns for row in case.run.layers if row.recompute_ns}
    layers: list[str] = sorted(times, key=lambda path: -times[path])
    yield make_finding(
        RULE.name,
        case,
        None,
        severity="warning",
        layers=layers,
        line=slowest_line(case, times),
        message="Compiled graphs recompute a part of forward in backward, for their memory budget",
        evidence=(
            f"it takes {of_step(again, case)}; {size_text(facts.get('recomputed_bytes', 0))} of what backward reads "
            f"are computed again; the budget is {budget:g}"
        ),
        advice="Give them a larger budget where memory allows.",
        code=f"torch._functorch.config.activation_memory_budget = {min(1.0, round(budget + 0.2, 2)):g}",
        cost_ns=again,
    )


RULE = Rule("graph-recompute", "forward computed again by compiled graphs, for a memory budget", find)
