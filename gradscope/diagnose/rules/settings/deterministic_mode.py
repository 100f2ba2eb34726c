"""Deterministic algorithms are on, and operations of this step have a slower deterministic variant.

Example::

    torch.use_deterministic_algorithms(True)

Pattern: on CUDA, the switch at the end of the recorded step, and the operations that its documentation lists, with the
backward passes of convolution and of attention. What has no deterministic variant, as cumsum, is left out. On the CPU
the rule is silent: index_put that adds took 0.2 to 0.8 of the other variant's time, and filling new memory next to
nothing. Evidence: their measured time; and that new tensors are filled, where that is on. Estimate: none, the faster
variants were not run.

Source: torch.use_deterministic_algorithms; torch.utils.deterministic.fill_uninitialized_memory; PyTorch notes,
Reproducibility.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradscope.diagnose.case import Case, Rule, first, share
from gradscope.diagnose.findings import make_finding, of_step
from gradscope.ops import ATEN
from gradscope.tables import Finding, OpRow
from gradscope.units import calls as calls_text

_SLOWER = {
    "aten::convolution_backward",
    "aten::_efficient_attention_backward",
    "aten::_flash_attention_backward",
    "aten::gather_backward",
    "aten::index_add",
    "aten::index_add_",
    "aten::index_copy",
    "aten::index_copy_",
    "aten::index_put",
    "aten::index_put_",
    "aten::_index_put_impl_",
    "aten::max_pool3d_with_indices_backward",
    "aten::replication_pad1d_backward",
    "aten::replication_pad2d_backward",
    "aten::replication_pad3d_backward",
    "aten::scatter",
    "aten::scatter_",
    "aten::scatter_add",
    "aten::scatter_add_",
    "aten::scatter_reduce",
}

# Of the step; below it is not worth a word.
_LEAST = 0.01
_WARNING = 0.10


def find(case: Case) -> Iterator[Finding]:
    """Yield at most one finding."""
    if not case.on_cuda or not case.facts.settings.get("deterministic"):
        return
    slow = sorted((row for row in case.run.ops if row.name in _SLOWER), key=lambda row: -row.self_ns)
    spent = sum(row.self_ns for row in slow)
    if share(spent, case) < _LEAST:
        return
    fills = bool(case.facts.settings.get("fill_uninitialized"))
    advice = "Turn it off if runs need not be bitwise reproducible"
    if fills:
        advice += "; otherwise set torch.utils.deterministic.fill_uninitialized_memory = False to skip the filling"
    yield make_finding(
        RULE.name,
        case,
        None,
        severity="warning" if share(spent, case) >= _WARNING else "info",
        layers=(row.layer for row in slow),
        line=None,
        message="Deterministic algorithms are on, and some of the step's operations are slower that way",
        evidence=_evidence(case, slow, spent) + ("; every new uninitialized tensor is filled" if fills else ""),
        advice=f"{advice}.",
        code="torch.use_deterministic_algorithms(False)",
    )


def _evidence(case: Case, slow: Sequence[OpRow], spent: int) -> str:
    calls: dict[str, float] = {}
    for row in slow:
        calls[row.name] = calls.get(row.name, 0) + row.calls
    shown = first([f"{calls_text(number)} {name.removeprefix(ATEN)}" for name, number in calls.items()])
    return f"{shown}: {of_step(spent, case)}"


RULE = Rule("deterministic-mode", "operations that are slower because deterministic algorithms are on", find)
