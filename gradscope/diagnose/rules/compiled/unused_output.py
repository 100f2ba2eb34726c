"""A compiled graph returns a value that the loss does not use, and backward makes zeros for its gradient.

Example::

    class Model(nn.Module):
        def forward(self, x, y):
            logits = self.head(x)
            return logits, F.cross_entropy(logits, y)

    _, loss = torch.compile(model)(x, y)
    loss.backward()  # zeros as large as the logits, which are then added to their gradient

Pattern: zeros that autograd makes in front of a compiled graph of backward. Without torch.compile a gradient that does
not come costs nothing; a compiled graph takes one for each value that it returned and that requires a gradient.
Evidence: the measured time of these zeros, and of the sums of gradients in graphs, of which theirs is one.
Estimate: the zeros (half of them to all of them and the sums): reading them again is a part of a kernel.

Source: PyTorch, torch.autograd.function.FunctionCtx.set_materialize_grads, and AOTAutograd's CompiledFunction
(torch/_functorch/_aot_autograd/runtime_wrappers.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope import ops
from gradscope.diagnose.case import Case, Rule, share
from gradscope.diagnose.findings import Estimate, make_finding, of_step
from gradscope.diagnose.worth import slowest_line
from gradscope.tables import Finding

_LEAST_SHARE = 0.02  # of the step


def find(case: Case) -> Iterator[Finding]:
    """Yield at most one finding."""
    rows = [row for row in case.run.ops if row.name == ops.ZEROS_OF_UNUSED]
    spent = sum(row.self_ns for row in rows)
    if share(spent, case) < _LEAST_SHARE:
        return
    sums = sum(
        row.self_ns for row in case.run.ops if row.phase == "gradient_sum" and row.name.startswith(ops.GENERATED)
    )
    layers = list(dict.fromkeys(row.layer for row in rows))
    evidence = f"zeros for its gradient take {of_step(spent, case)}"
    yield make_finding(
        RULE.name,
        case,
        Estimate(spent, spent // 2, spent + sums),
        layers=layers,
        line=slowest_line(case, layers),
        message="A compiled graph returns a value that the loss does not use",
        evidence=f"{evidence}; sums of gradients in graphs take {of_step(sums, case)}" if sums else evidence,
        advice="Return it detached while training, or compile a function that returns the loss alone: "
        "parameters that only it depends on then get no gradients, in place of zeros.",
        code="return logits.detach(), loss",
        cost_ns=spent,
    )


RULE = Rule("unused-output", "values that compiled graphs return and the loss does not use", find)
