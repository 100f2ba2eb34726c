"""torch.compile could not compile a line, so that the code in front of it and behind it are graphs of their own.

Example::

    scale = x.abs().mean().item()  # a number that Python needs: the graph ends here
    return x / scale

Pattern: the breaks that Dynamo has noted since gradscope began, but for those that gradscope's own entry into backward
makes, where torch's own breaks the graph too, and those inside of torch.
Evidence: the reason as Dynamo gives it, and what is around the kernels of compiled code in a step: the look for a graph
that fits, its guards, and the code that enters it. Each region that a break makes has its own.
Estimate: none. What is fused across the line is known only once it compiles.

Source: PyTorch, "Working with Graph Breaks" (torch.compiler documentation).
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule, share
from gradscope.diagnose.compiled import facts_of
from gradscope.diagnose.findings import make_finding, of_step, several
from gradscope.tables import Finding

# Rows that torch writes around what compiled code runs, by how their names begin.
_AROUND = ("TorchDynamo Cache Lookup", "Torch-Compiled Region", "Pregraph bytecode", "AOTDispatcher Runtime Wrapper")
_REGION = "Torch-Compiled Region"
_WARNED = 0.02  # of the step, from which on it is more than a remark
_LONGEST = 160  # characters of a reason


def find(case: Case) -> Iterator[Finding]:
    """Yield a finding for each line."""
    breaks: dict[str, str] = {}
    for each in facts_of(case).get("breaks", ()):
        breaks.setdefault(each["place"], each["reason"])
    around = sum(row.self_ns for row in case.run.ops if row.name.startswith(_AROUND))
    regions = round(sum(row.calls for row in case.run.ops if row.name.startswith(_REGION)))
    for place, reason in breaks.items():
        evidence = reason[:_LONGEST]
        if regions:
            evidence += (
                f"; a step enters {several(regions, 'compiled region')}: what is around their kernels takes "
                f"{of_step(around, case)}"
            )
        yield make_finding(
            RULE.name,
            case,
            None,
            severity="warning" if share(around, case) >= _WARNED else "info",
            layers=(),
            line=place,
            message="torch.compile breaks the graph at this line",
            evidence=evidence,
            advice="Take it out of the compiled code, or write it in tensor operations; torch explains each break.",
            code="TORCH_LOGS=graph_breaks python train.py",
            cost_ns=around // len(breaks),
        )


RULE = Rule("graph-break", "lines at which torch.compile breaks the graph", find)
