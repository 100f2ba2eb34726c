"""Products of float32 matrices run on a GPU's ordinary units, though it has tensor cores for them.

Example::

    torch.set_float32_matmul_precision("highest")  # torch's default

Pattern: CUDA of compute capability 8.0 or more, precision "highest", products of float32 outside autocast. Evidence:
their measured time. Estimate: half of it on capability 8.0, 9.0 and 10.x, where TF32 is 6 to 8 times as fast on paper
(low: a fifth, high: four fifths); none on other cards, some of which gain nothing.

Source: PyTorch performance tuning guide and CUDA semantics, "TensorFloat-32 (TF32) on Ampere (and later) devices";
torch.set_float32_matmul_precision; NVIDIA A100 and H100 data sheets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule, severity_of, share
from gradscope.tables import CallFact, Finding
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import percent

_CALLS = {"addbmm", "addmm", "baddbmm", "bmm", "einsum", "linear", "matmul", "mm", "rmatmul"}
_ROWS = {"aten::addmm", "aten::baddbmm", "aten::bmm", "aten::mm", "aten::_addmm_activation"}

# Low, likely, high: parts of the products' time.
_GAINS = (0.2, 0.5, 0.8)

_LEAST = 0.01


def find(case: Case) -> Iterator[Finding]:
    """At most one."""
    settings = case.facts.settings
    capability = tuple(settings.get("capability") or ())
    off = settings.get("matmul_precision") == "highest" and not case.run.environment.get("tf32")
    if not case.on_cuda or not off or capability < (8, 0):
        return
    layers = _layers(case)
    rows = [row for row in case.run.ops if row.name in _ROWS and row.layer in layers]
    spent = sum(row.self_ns for row in rows)
    if share(spent, case) < _LEAST:
        return
    known = capability in {(8, 0), (9, 0)} or capability[0] == 10
    low, likely, high = (round(spent * gain) for gain in _GAINS)
    yield Finding(
        rule=RULE.name,
        severity=severity_of(likely if known else None, case),
        layers=tuple(dict.fromkeys(row.layer for row in rows if row.layer is not None)),
        line=None,
        message="products of float32 matrices do not use the GPU's tensor cores: TF32 is off",
        evidence=(
            f"{counted(round(sum(row.calls for row in rows)))} products of float32, {time_text(spent)} of a step "
            f"({percent(share(spent, case))}), on compute capability {capability[0]}.{capability[1]}"
        ),
        predicted_saving_ns=likely if known else None,
        advice="Allow TF32: inputs of products are rounded to 10 bits after the point, sums stay float32.",
        code='torch.set_float32_matmul_precision("high")',
        predicted_low_ns=low if known else None,
        predicted_high_ns=high if known else None,
    )


def _layers(case: Case) -> set[str | None]:
    """Those all of whose products are of float32."""
    found: defaultdict[str | None, list[bool]] = defaultdict(list)
    for call in case.facts.calls:
        if call.op in _CALLS:
            found[call.layer].append(_is_float32(call))
    return {layer for layer, all_of_them in found.items() if all(all_of_them)}


def _is_float32(call: CallFact) -> bool:
    tensors = (*call.inputs, *call.outputs)
    return not call.autocast and all(each.dtype == "float32" and each.device == "cuda" for each in tensors)


RULE = Rule("tf32-off", "products of float32 without tensor cores", find)
