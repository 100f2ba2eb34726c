"""A head over a vocabulary whose size is not a multiple of 64.

Example::

    self.lm_head = nn.Linear(384, 50257)  # 50304 is the next multiple of 64

Pattern: a linear layer onto more than 1024 classes, more than its inputs, that is no multiple of 64: kernels for
matmuls work on tiles. On a CPU it only matters in float32 where the size is no multiple of 16, and for 2,000,000 logits
and more: then rows of the logits start at odd addresses; fewer of them stay in the cache.

Evidence: the size, and the time of the head's matmuls in forward. Estimate: on a CPU 0.04 of this time, 0.01 to 0.10:
what padding gained depends on the processor (Intel Xeon with AVX-512: 1 to 10 %), less the matmuls of the added
classes. None on a GPU, where it depends on the kernel that is chosen.

Source: NVIDIA, Matrix Multiplication Background User's Guide (tile and alignment effects); A. Karpathy, nanoGPT,
vocab_size padded from 50257 to 50304.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.findings import Estimate, is_of_a_library, make_finding
from gradscope.diagnose.worth import ops_ns
from gradscope.ops import ATEN_MATMULS
from gradscope.recording.graph import Node, Value
from gradscope.tables import Finding
from gradscope.units import ns as time_text

_CLASSES, _MULTIPLE, _CPU_MULTIPLE = 1024, 64, 16
_LOGITS = 2_000_000
_PARTS = (0.01, 0.04, 0.10)  # of the matmul's time: low, likely, high
_MATMUL_ROWS = ATEN_MATMULS | {"aten::matmul", "aten::linear"}  # and what calls them


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each weight."""
    heads: defaultdict[tuple[str, tuple[int, ...]], list[Node]] = defaultdict(list)
    for call in case.facts.calls:
        weight = _weight(call)
        if weight is not None and weight.parameter is not None and _is_odd(call, weight):
            heads[weight.parameter, weight.shape].append(call)
    for (parameter, shape), calls in heads.items():
        yield _finding(case, parameter, shape, calls)


def _weight(call: Node) -> Value | None:
    """Return the weight of a call of F.linear, as nn.Linear makes it; None of other calls."""
    found = call.argument(1, "weight") if call.op == "linear" else None
    return found if isinstance(found, Value) and len(found.shape) == 2 else None


def _is_odd(call: Node, weight: Value) -> bool:
    classes, width = weight.shape
    if classes <= max(_CLASSES, width) or classes % _MULTIPLE == 0:
        return False
    if weight.device.type == "cuda":
        return True
    dtype = call.outputs[0].dtype if call.outputs else weight.dtype
    many = sum(each.elements for each in call.outputs) >= _LOGITS
    return weight.device.type == "cpu" and dtype == torch.float32 and classes % _CPU_MULTIPLE != 0 and many


def _finding(case: Case, parameter: str, shape: tuple[int, ...], calls: list[Node]) -> Finding:
    classes, width = shape
    padded = -(-classes // _MULTIPLE) * _MULTIPLE
    layers = tuple(dict.fromkeys(call.layer for call in calls if call.layer is not None))
    spent = _product_ns(case, calls)
    on_cpu = calls[0].outputs[0].device.type == "cpu" if calls[0].outputs else not case.on_cuda
    estimated = on_cpu and spent
    added = (padded - classes) / classes
    low, saving, high = (round(spent * max(part - added, 0.0)) for part in _PARTS)
    multiple = _CPU_MULTIPLE if on_cpu else _MULTIPLE
    evidence = f"{classes:,} classes; the next multiple is {padded:,} ({padded - classes} more)"
    if spent:
        evidence += f"; the matmul for the logits takes {time_text(spent)} per step"
    return make_finding(
        RULE.name,
        case,
        Estimate(saving, low, high) if estimated else None,
        layers=layers,
        line=calls[0].source,
        message=f"Vocabulary size {classes:,} is not a multiple of {multiple}, so the matmul is slower",
        evidence=evidence,
        cost_ns=spent,
        advice=f"Pad {parameter} to {padded:,} rows and mask the padding logits.",
        code=_code(calls[0].source, classes, width, padded),
    )


def _code(source: str | None, classes: int, width: int, padded: int) -> str:
    """Return what pads the head; of a model of transformers its own method."""
    if source is not None and is_of_a_library(source) and "transformers" in source:
        return f"model.resize_token_embeddings(pad_to_multiple_of={_MULTIPLE})"
    return f"nn.Linear({width}, {padded})  # mask the padding: logits[..., {classes}:] = -torch.inf"


def _product_ns(case: Case, calls: list[Node]) -> int:
    """Return the forward matmuls of the layers that are the head and nothing else."""
    paths = {call.layer for call in calls if call.module == "Linear" and call.layer is not None}
    return ops_ns(case, paths, _MATMUL_ROWS.__contains__, phases=("forward",))


RULE = Rule("vocabulary-multiple", "a vocabulary size that makes the head's matmul slow", find)
