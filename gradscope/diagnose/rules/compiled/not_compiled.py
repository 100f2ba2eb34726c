"""Operations that torch.compile would fuse run outside of the graphs of a program that uses it.

Example::

    for block in model.blocks:
        block.compile()  # and the embeddings, the head and the loss run as they are

Pattern: elementwise operations, normalisations, reductions, losses and copies with rows of their own in forward and
backward, in a program whose graphs were noted: of a graph's own such operations none has one.
Evidence: their measured time, and the layers that have most of it.
Estimate: none. What they are fused into is known only once they are compiled.

Source: J. Ansel et al., PyTorch 2: Faster Machine Learning Through Dynamic Python Bytecode Transformation and Graph
Compilation (ASPLOS 2024), section 5, on fusion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from gradscope import ops
from gradscope.diagnose.case import Case, Rule, first, share
from gradscope.diagnose.compiled import facts_of, is_at_limit, versions_of
from gradscope.diagnose.findings import make_finding, of_step, script_of
from gradscope.diagnose.worth import slowest_line
from gradscope.tables import Finding

_LEAST_SHARE = 0.05  # of the step
_AROUND = "loss_of = torch.compile(lambda x, y: criterion(model(x), y))"
_PHASES = ("forward", "backward", "recompute")


def find(case: Case) -> Iterator[Finding]:
    """Yield at most one finding: one call of torch.compile cures all."""
    facts = facts_of(case)
    if not facts.get("graphs"):
        return
    spent = Counter[str | None]()
    # An operation of the user's own in a graph runs what it calls there.
    in_graphs = {(row.layer, row.phase) for row in case.run.ops if row.name.startswith(ops.GENERATED)}
    # What has no backward is an evaluation, of a copy of the model say, which is none of the step's.
    trained = {row.path for row in case.run.layers if row.backward_total_ns} | {None}
    for row in case.run.ops:
        if row.phase not in _PHASES or row.layer not in trained or (row.layer, row.phase) in in_graphs:
            continue
        if row.name in ops.ATEN_FUSED:
            spent[row.layer] += row.self_ns
    whole = spent.total()
    if share(whole, case) < _LEAST_SHARE:
        return
    layers = [path for path, ns in spent.most_common() if path is not None and ns]
    broken = bool(facts.get("breaks"))
    stopped = any(is_at_limit(case, versions) for versions in versions_of(case).values())
    names = first([_name(path) for path, ns in spent.most_common() if ns])
    yield make_finding(
        RULE.name,
        case,
        None,
        severity="info",
        layers=layers,
        line=slowest_line(case, [path for path, _ in spent.most_common(1)]),
        message="Operations that torch.compile would fuse run outside of its graphs",
        evidence=f"{of_step(whole, case)} in elementwise operations, normalisations, losses and copies, of {names}",
        advice=(
            "A function that is compiled no more runs as it is written (see recompiles): mend that first."
            if stopped
            else "Compile what is around them too, and take out what breaks graphs there (see graph-break)."
            if broken
            else "Compile what is around them too, or a function that holds the loss with them."
        ),
        code=f"TORCH_LOGS={'recompiles' if stopped else 'graph_breaks'} python {script_of(case)}"
        if stopped or broken
        else _AROUND,
        cost_ns=whole,
    )


def _name(path: str | None) -> str:
    return "operations outside every module" if path is None else path or "the model itself"


RULE = Rule("not-compiled", "operations outside of compiled graphs that these would fuse", find, of_times=True)
