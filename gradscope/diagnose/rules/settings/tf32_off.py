"""Float32 matmuls or convolutions do not use the GPU's tensor cores because TF32 is off.

Example::

    torch.set_float32_matmul_precision("highest")  # torch's default
    torch.backends.cudnn.allow_tf32 = False  # of convolutions; torch's default is True

Pattern: CUDA of compute capability 8.0 or more, TF32 not allowed by whatever switch (``allow_tf32``, the precision of
matmuls, ``fp32_precision``), float32 matmuls or convolutions outside autocast. Evidence: their measured time.
Estimate: half of it on capability 8.0, 9.0 and 10.x, where TF32 is 6 to 8 times as fast on paper (low: a fifth, high:
four fifths); none on other cards, some of which gain nothing.

Source: PyTorch performance tuning guide and CUDA semantics, "TensorFloat-32 (TF32) on Ampere (and later) devices";
torch.set_float32_matmul_precision; NVIDIA A100 and H100 data sheets.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from gradscope.diagnose.case import Case, Rule, layers_of, share
from gradscope.diagnose.findings import make_finding, of_step, parts_of
from gradscope.ops import ATEN_CONVOLUTIONS, ATEN_MATMULS, CONVOLUTIONS, MATMULS
from gradscope.recording.graph import Node
from gradscope.tables import Finding
from gradscope.units import count as counted

# Low, likely, high: parts of the matmuls' time.
_GAINS = (0.2, 0.5, 0.8)

_LEAST = 0.01


@dataclass(frozen=True)
class _Switched:
    """What has a switch of its own.

    Attributes:
        name: as the settings have it.
        calls: of torch, as they are recorded.
        rows: that do the work.
        older, newer: the line that allows TF32; the newer where the code sets an ``fp32_precision`` already.
    """

    name: str
    text: str
    calls: frozenset[str]
    rows: frozenset[str]
    older: str
    newer: str


_KINDS = (
    _Switched(
        "matmul",
        "Float32 matmuls",
        MATMULS,
        ATEN_MATMULS,
        'torch.set_float32_matmul_precision("high")',
        'torch.backends.cuda.matmul.fp32_precision = "tf32"',
    ),
    _Switched(
        "conv",
        "Float32 convolutions",
        CONVOLUTIONS,
        ATEN_CONVOLUTIONS | {"aten::convolution_backward"},
        "torch.backends.cudnn.allow_tf32 = True",
        'torch.backends.cudnn.conv.fp32_precision = "tf32"',
    ),
)


def find(case: Case) -> Iterator[Finding]:
    """Yield at most one finding for matmuls and one for convolutions."""
    capability = tuple(case.facts.settings.get("capability") or ())
    if not case.on_cuda or capability < (8, 0):
        return
    for kind in _KINDS:
        if _is_off(case, kind):
            finding = _finding(case, kind, capability)
            if finding is not None:
                yield finding


def _is_off(case: Case, kind: _Switched) -> bool:
    """Check that TF32 is known to be off."""
    settings = case.facts.settings
    if f"{kind.name}_fp32" in settings:
        return settings[f"{kind.name}_fp32"] in ("none", "ieee")
    if kind.name == "conv":
        return settings.get("cudnn_tf32") is False
    return settings.get("matmul_precision") == "highest" and not case.run.environment.get("tf32")


def _finding(case: Case, kind: _Switched, capability: tuple[int, ...]) -> Finding | None:
    layers = _layers(case, kind)
    rows = [row for row in case.run.ops if row.name in kind.rows and row.layer in layers]
    spent = sum(row.self_ns for row in rows)
    if share(spent, case) < _LEAST:
        return None
    known = capability in {(8, 0), (9, 0)} or capability[0] == 10
    number = round(sum(row.calls for row in rows))
    return make_finding(
        RULE.name,
        case,
        parts_of(spent, _GAINS) if known else None,
        layers=(row.layer for row in rows),
        line=None,
        message=f"{kind.text} do not use the GPU's tensor cores because TF32 is off",
        evidence=(
            f"{counted(number)} float32 {'matmuls' if kind.name == 'matmul' else 'convolutions'} "
            f"in forward and backward, {of_step(spent, case)}; compute capability "
            f"{capability[0]}.{capability[1]}"
        ),
        advice="Allow TF32: inputs are rounded to a 10-bit mantissa, accumulation stays float32.",
        code=kind.newer if case.facts.settings.get(f"{kind.name}_fp32") == "ieee" else kind.older,
        cost_ns=spent,
    )


def _layers(case: Case, kind: _Switched) -> set[str | None]:
    """Return the layers whose calls of this kind are all of float32."""
    found: defaultdict[str | None, list[bool]] = defaultdict(list)
    for call in case.facts.calls:
        if call.op in kind.calls:
            for layer in (call.layer, *layers_of(case, call)[1:]):
                found[layer].append(_is_float32(call))
    return {layer for layer, all_of_them in found.items() if all(all_of_them)}


def _is_float32(call: Node) -> bool:
    tensors = (*call.inputs, *call.outputs)
    return not call.autocast and all(each.dtype == torch.float32 and each.device.type == "cuda" for each in tensors)


RULE = Rule("tf32-off", "float32 matmuls or convolutions that do not use tensor cores", find)
