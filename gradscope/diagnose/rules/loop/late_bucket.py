"""Gradients of DistributedDataParallel that are there long before they are sent to the other ranks.

Example::

    model = DistributedDataParallel(model, bucket_cap_mb=500)  # one bucket: nothing is sent before the last gradient

Pattern: a rank waits for its buckets for more than 10 % of the step, and a millisecond of one that is not profiled;
and by bytes, gradients lie for more than a quarter of the backward pass before the collective of their bucket begins.
Either a bucket is too large, or it is complete and waits for one that is sent before it: buckets have one order, that
in which gradients came in the first step, or with ``find_unused_parameters=True`` the one in which parameters were
registered, reversed. Which of both holds more bytes back decides what is advised.

Evidence: what is waited, and of the bucket that lies longest its size, when it was complete and when it was sent.
Estimate: none. One rank's report does not tell a transfer from the wait for a rank that works longer:
``gradscope merge`` does.

Source: S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB 2020), sections
3.2.2 and 3.2.3; torch/csrc/distributed/c10d/reducer.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gradscope.diagnose.case import Case, Rule, share
from gradscope.diagnose.findings import make_finding, of_step
from gradscope.tables import BucketRow, Finding
from gradscope.units import ns as time_text
from gradscope.units import percent, size

_SHARE, _LEAST_NS = 0.10, 1_000_000
_LIES = 0.25  # of the backward pass
# Of it: from which on a complete bucket is held back by another one, and does not merely begin a little later.
_HELD = 0.10
# Into so many buckets gradients are cut: the last, which nothing can hide, is an eighth of them then.
_BUCKETS = 8
_MIB = 1 << 20

COMPARE_FIRST = "Compare the ranks with `gradscope merge`: where one works longer, the others wait for it; else "


def is_much(ns: int, case: Case) -> bool:
    """Check that a wait is a share of the step, and a millisecond of one that is not profiled."""
    step = case.run.step
    unprofiled = ns * min((step.unprofiled_wall_ns or step.wall_ns) / max(step.wall_ns, 1), 1.0)
    return share(ns, case) >= _SHARE and unprofiled >= _LEAST_NS


def find(case: Case) -> Iterator[Finding]:
    """Yield at most one finding for each model."""
    models: dict[str, list[BucketRow]] = {}
    for row in case.run.buckets or ():
        models.setdefault(row.model, []).append(row)
    for rows in models.values():
        if is_much(_exposed(rows), case) and _lies(rows) >= _LIES:
            held = [row for row in rows if _is_held(row)]
            if 2 * sum(row.bytes * (row.begun_at_ns - row.last_at_ns) for row in held) >= sum(map(_lying, rows)):
                yield _of_order(case, rows, held)
            elif (mib := _smaller(rows)) is not None:
                yield _of_size(case, rows, mib)


def _exposed(rows: Sequence[BucketRow]) -> int:
    return sum(row.exposed_ns for row in rows)


def _lying(row: BucketRow) -> int:
    """How long its bytes lie, all together."""
    return row.bytes * (row.begun_at_ns - row.mean_at_ns)


def _lies(rows: Sequence[BucketRow]) -> float:
    """The share of the pass for which a byte lies in the mean."""
    whole = sum(row.bytes for row in rows) * max(row.pass_ns for row in rows)
    return sum(map(_lying, rows)) / whole if whole else 0.0


def _is_held(row: BucketRow) -> bool:
    return row.begun_by not in row.layers and row.begun_at_ns - row.last_at_ns > _HELD * row.pass_ns


def _smaller(rows: Sequence[BucketRow]) -> int | None:
    """MiB that buckets should have; None where they are about as small."""
    mib = max(round(sum(row.bytes for row in rows) / _BUCKETS / _MIB), 1)
    return mib if 2 * mib * _MIB <= max(row.bytes for row in rows) else None


def _of_size(case: Case, rows: Sequence[BucketRow], mib: int) -> Finding:
    largest = max(rows, key=_lying)
    one = len(rows) == 1
    return _finding(
        case,
        rows,
        message="Gradients are sent in one piece, when the last is there" if one else "Gradients wait for their bucket",
        lying=f"{size(largest.bytes)} of gradients in one bucket, the first there {_at(largest.first_at_ns, largest)}, "
        f"sent {_at(largest.begun_at_ns, largest)}",
        advice="make buckets smaller, so that they are sent while backward goes on.",
        code=f"DistributedDataParallel(model, bucket_cap_mb={mib})",
    )


def _of_order(case: Case, rows: Sequence[BucketRow], held: Sequence[BucketRow]) -> Finding:
    worst = max(held, key=_lying)
    before = f" with those of {worst.begun_by}" if worst.begun_by else ""
    unused = worst.finds_unused
    return _finding(
        case,
        rows,
        message="Gradients that are there wait for a bucket that is sent before theirs",
        lying=f"{size(worst.bytes)} of gradients, the last there {_at(worst.last_at_ns, worst)}, "
        f"sent {_at(worst.begun_at_ns, worst)}{before}",
        advice="let DDP order its buckets as gradients come, which it does where it need not look for unused ones: "
        "freeze those that have no gradient, or leave them out of the model."
        if unused
        else "let the first step be as the others are: DDP keeps the order in which gradients came in that one.",
        code="DistributedDataParallel(model, find_unused_parameters=False)"
        if unused
        else "model(usual_batch).sum().backward()  # before the first step, and zero_grad() behind it",
        layers=(worst.begun_by,) if worst.begun_by else (),
    )


def _at(ns: int, row: BucketRow) -> str:
    """When, as a share of the pass."""
    return f"at {percent(ns / row.pass_ns if row.pass_ns else 0.0, 0)}"


def _finding(
    case: Case,
    rows: Sequence[BucketRow],
    *,
    message: str,
    lying: str,
    advice: str,
    code: str,
    layers: Sequence[str] = (),
) -> Finding:
    spent = _exposed(rows)
    longest = max(row.pass_ns for row in rows)
    return make_finding(
        RULE.name,
        case,
        None,
        severity="warning",
        layers=layers,
        line=None,
        message=message,
        evidence=f"{of_step(spent, case)} in which this rank waits for gradients of others, while backward takes "
        f"{time_text(longest)} before: {lying} of it",
        advice=COMPARE_FIRST + advice,
        code=code,
        cost_ns=spent,
    )


RULE = Rule("late-bucket", "gradients of DDP that are there long before they are sent", find, of_times=True)
