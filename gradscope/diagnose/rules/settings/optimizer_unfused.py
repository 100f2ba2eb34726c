"""The optimizer runs many small operations, or loops over the parameters, instead of one fused kernel.

Example::

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

Pattern: torch's own Adam or AdamW without ``fused=True``, on the CPU also Adagrad and on CUDA SGD, whose parameters are
all floating and dense. No other class of torch has a fused variant. On the CPU SGD is left alone: without momentum
fused often took longer, with it sometimes. So is Adagrad on CUDA: older versions of torch have no fused one there.
Evidence: the measured time of the optimizer's step. Estimate: on a busy CPU of 2 cores (2 to 200 tensors of 64 to 8 M
elements) fused Adam, AdamW and Adagrad took 0.05 to 0.5 of the time, once 0.9; so 0.3 is taken, with a range of 0.1 to
0.6; never less is left than reading and writing parameters, gradients and states once takes at this machine's
bandwidth, where that was measured. On CUDA, where tensors are grouped already, 0.7 with a range of 0.4 to 0.95 is
assumed, not measured.

Source: PyTorch performance tuning guide, "Fuse optimizer step"; torch.optim, "for-loop, foreach and fused".
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule, share
from gradscope.diagnose.findings import Estimate, make_finding, of_step
from gradscope.ops import ATEN_FILLS
from gradscope.tables import Finding
from gradscope.units import count as counted

_CPU = ("Adagrad", "Adam", "AdamW")
_CUDA = ("Adam", "AdamW", "SGD")
_MAY_BE_SPARSE = ("Adagrad", "SGD")
_FLOATING = {"float16", "bfloat16", "float32", "float64"}
_CLEARING_RANGE = "Optimizer.zero_grad#"

# Part of the time that is left: low saving, likely, high.
_LEFT_CPU = (0.6, 0.3, 0.1)
_LEFT_CUDA = (0.95, 0.7, 0.4)

_LEAST = 0.03

# Numbers read and written for one of a parameter: it and its gradient, and two moments or one sum.
_MOVED = {"Adam": 7, "AdamW": 7, "Adagrad": 5, "SGD": 3}
_BYTES = 4


def find(case: Case) -> Iterator[Finding]:
    """Yield at most one finding: the step's time is known of all optimizers together."""
    known = _CUDA if case.on_cuda else _CPU
    optimizers = case.facts.optimizers
    if not optimizers or any(each.fused or each.class_name not in known for each in optimizers):
        return
    spent = _step_ns(case)
    if share(spent, case) < _LEAST or not _fusable(case):
        return
    moved = _moving_ns(case)
    low, likely, high = (
        round(max(spent - max(spent * left, moved), 0)) for left in (_LEFT_CUDA if case.on_cuda else _LEFT_CPU)
    )
    names = " and ".join(dict.fromkeys(each.class_name for each in optimizers))
    tensors = sum(each.tensors for each in optimizers)
    elements = sum(each.elements for each in optimizers)
    yield make_finding(
        RULE.name,
        case,
        Estimate(likely, low, high),
        layers=(),
        line=None,
        message=f"{names} is not fused: each step makes many passes over the parameters",
        evidence=(f"{of_step(spent, case)} for {counted(tensors)} tensors of {counted(elements)} elements"),
        advice=(
            "Replace `foreach=True` by `fused=True`."
            if any(each.foreach for each in optimizers)
            else "Add `fused=True`."
        ),
        code=f"optimizer = torch.optim.{optimizers[0].class_name}(model.parameters(), lr=lr, fused=True)"
        if len(optimizers) == 1
        else f"torch.optim.{optimizers[0].class_name}(..., fused=True)  # for each optimizer",
        cost_ns=spent,
    )


def _moving_ns(case: Case) -> float:
    """Return what a fused step takes at least: one read and write a number; 0: bandwidth not known."""
    if case.limits is None or case.limits.bytes <= 0:
        return 0.0
    numbers = sum(each.elements * _MOVED.get(each.class_name, 3) for each in case.facts.optimizers)
    return numbers * _BYTES / case.limits.bytes * 1e9


def _step_ns(case: Case) -> int:
    """Return the time spent in optimizer.step(), zero_grad excluded."""
    return sum(
        row.self_ns
        for row in case.run.ops
        if row.phase == "optimizer" and row.name not in ATEN_FILLS and not row.name.startswith(_CLEARING_RANGE)
    )


def _fusable(case: Case) -> bool:
    """Check that fused kernels take the parameters: dense floating ones; Adam takes no others."""
    if not case.facts.recorded and any(each.class_name in _MAY_BE_SPARSE for each in case.facts.optimizers):
        return False
    if any(call.kwargs.get("sparse") is True or _sparse_embedding(call.op, call.args) for call in case.facts.calls):
        return False
    trained = [each for each in case.facts.parameters if each.requires_grad]
    return all(each.dtype in _FLOATING for each in trained)


def _sparse_embedding(op: str, args: tuple[object, ...]) -> bool:
    # torch.nn.functional.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    # torch.nn.functional.embedding_bag(input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse)
    place = {"embedding": 6, "embedding_bag": 7}.get(op)
    return place is not None and len(args) > place and args[place] is True


RULE = Rule("optimizer-unfused", "an optimizer without fused=True", find)
