"""Autocast runs normalization in float32: each call saves a float32 copy of its input and returns float32.

Example::

    with torch.autocast("cuda", dtype=torch.bfloat16):
        x = self.norm(self.conv(x))  # bfloat16 in, float32 inside and out

Pattern: torch's layer, group or RMS normalisation under autocast, given float16 or bfloat16 and giving float32. A
float32 residual stream needs no cast and is left alone, and so is the CPU, where autocast leaves normalisations as they
are. The softmax of attention is for the rules about attention.

Evidence: such calls, how many of their results are cast down again by what reads them, and the measured time of the
casts in layers that make no others. Estimate: 0.8 of that time, forward and backward (low: half; high: 0.95): the
normalisation itself then reads and writes the lower precision. The casts back, which are about as many, are measured
among those of the layers that read the result, and not promised. Memory: half of the float32
inputs that these layers were measured to keep. Not yet run on a GPU.

Source: PyTorch, Automatic Mixed Precision package, "CUDA Ops that can autocast to float32"; torch computes the mean and
variance of a low precision input in float32 anyway (aten/src/ATen/native/cuda/layer_norm_kernel.cu, acc_type).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.findings import make_finding, only, parts_of
from gradscope.diagnose.worth import alive_at_peak
from gradscope.ops import ATEN_CASTS, CAST_NODE, NODE_OF
from gradscope.recording.graph import HALVES, Node
from gradscope.tables import Finding
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import size as size_text

_CODE = {
    "layer_norm": "F.layer_norm(x, shape, weight.to(x.dtype), bias.to(x.dtype))",
    "group_norm": "F.group_norm(x, groups, weight.to(x.dtype), bias.to(x.dtype))",
    "rms_norm": "F.rms_norm(x, shape, weight.to(x.dtype))",
}
# Of the casts' time: low, likely, high.
_OF_CASTS = (0.5, 0.8, 0.95)

_CASTS = ATEN_CASTS | {"aten::copy_"}
_CASTS_BACKWARD = _CASTS | {CAST_NODE}
_NODES = tuple(NODE_OF[op].removesuffix("0") for op in _CODE)  # those of their own gradients too


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for all layers."""
    layers: defaultdict[str, list[Node]] = defaultdict(list)
    for call in case.facts.calls:
        if call.op in _CODE and call.layer is not None and _is_raised(call):
            layers[call.layer].append(call)
    if not layers:
        return
    calls = [call for each in layers.values() for call in each]
    spent = sum(_casts_ns(case, path, len(each)) for path, each in layers.items())
    kept = _kept(case, set(layers))
    back = sum(any(map(_is_lowered, call.outputs[0].users)) for call in calls)
    evidence = f"{counted(len(calls))} normalization calls with {calls[0].inputs[0].dtype_name} inputs run in float32"
    if back:
        evidence += f"; the results of {counted(back)} are cast back down"
    if spent:
        evidence += f"; casting their inputs takes {time_text(spent)} per step in forward and backward"
    if kept:
        evidence += f"; {size_text(2 * kept)} of float32 inputs are saved for backward"
    kinds = list(dict.fromkeys(call.op for call in calls))
    yield make_finding(
        RULE.name,
        case,
        parts_of(spent, _OF_CASTS, kept),
        layers=tuple(layers),
        line=only(call.source for call in calls),
        message="Autocast runs normalization in float32: each call saves a float32 copy of its input for backward",
        evidence=evidence,
        advice=(
            "Run the normalization outside autocast in the input's dtype: torch computes mean and "
            "variance in float32 anyway."
        ),
        code=f'with torch.autocast("cuda", enabled=False): y = {_CODE[kinds[0]]}',
        cost_ns=spent,
    )


def _is_raised(call: Node) -> bool:
    """Check that autocast cast the call's input up to float32."""
    if not call.autocast or not call.inputs or not call.outputs:
        return False
    given, made = call.inputs[0], call.outputs[0]
    return given.device.type == "cuda" and given.dtype in HALVES and made.dtype == torch.float32


def _is_lowered(call: Node) -> bool:
    """Check that autocast casts down what the call is given."""
    return call.autocast and any(each.dtype in HALVES for each in call.outputs)


def _casts_ns(case: Case, path: str, norms: int) -> int:
    """Return the time of casting a layer's inputs to its norms; 0 where it makes other casts too."""
    forward = case.ops.get((path, "forward"), [])
    made = sum(row.calls for row in forward if row.name == "aten::_to_copy")
    if not 0 < made <= norms:
        return 0
    backward = case.ops.get((path, "backward"), [])
    return sum(row.self_ns for row in forward if row.name in _CASTS) + sum(
        row.self_ns for row in backward if row.name in _CASTS_BACKWARD
    )


def _kept(case: Case, layers: set[str]) -> int:
    """Return half of the bytes of the saved float32 inputs at the peak: a dtype half as wide would be saved."""
    return sum(
        alive_at_peak([row]) // 2
        for row in case.saved
        if row.layer in layers and row.dtype == "float32" and row.what == "input" and row.node.startswith(_NODES)
    )


RULE = Rule("autocast-norms", "normalization that autocast runs in float32", find)
