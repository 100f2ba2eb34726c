"""Buckets that are sent late, on runs made by hand; tests/truth has those of real ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from gradscope.diagnose.case import Case
from gradscope.diagnose.rules import RULES
from gradscope.diagnose.rules.loop.late_bucket import is_much
from gradscope.tables import BucketRow, Finding
from tests.diagnose.timing_cases import MS, check_words, made_case, op, row

RULE = RULES["late-bucket"]
WAIT = "(waits for other ranks)"
MIB = 1 << 20


def bucket(number: int, mib: int, first: int, last: int, begun: int, exposed: int, **more: Any) -> BucketRow:
    """Times in ms, of a pass of 60 ms; gradients come evenly between the first and the last."""
    values: dict[str, Any] = {
        "model": "",
        "number": number,
        "parameters": 4,
        "bytes": mib * MIB,
        "layers": (f"layer.{number}",),
        "first_at_ns": first * MS,
        "mean_at_ns": (first + last) * MS // 2,
        "last_at_ns": last * MS,
        "begun_at_ns": begun * MS,
        "begun_by": f"layer.{number}",
        "pass_ns": 60 * MS,
        "exposed_ns": exposed * MS,
        "cap_bytes": 25 * MIB,
    }
    return BucketRow(**{**values, **more})


def case_of(*buckets: BucketRow) -> Case:
    spent = sum(each.exposed_ns for each in buckets)
    case = made_case([row("layer.0", 10 * MS, 60 * MS)], [op(None, "communication", WAIT, spent)])
    run = replace(case.run, step=replace(case.run.step, communication_ns=spent), buckets=buckets)
    return Case(run, case.facts)


def found(*buckets: BucketRow) -> list[Finding]:
    return list(RULE.find(case_of(*buckets)))


def test_one_bucket_for_all() -> None:
    (finding,) = found(bucket(0, 80, 2, 60, 60, 30))
    check_words(finding)
    assert finding.message == "Gradients are sent in one piece, when the last is there"
    assert finding.code == "DistributedDataParallel(model, bucket_cap_mb=10)"
    assert finding.evidence == (
        "30.0 ms per step (30.0 %) in which this rank waits for gradients of others, while backward takes 60.0 ms "
        "before: 83.9 MB of gradients in one bucket, the first there at 3 %, sent at 100 % of it"
    )
    assert (finding.cost_ns, finding.predicted_high_ns) == (30 * MS, None)  # a slow rank's part is not told apart
    assert "gradscope merge" in finding.advice


def test_a_first_small_one_does_not_help_the_large() -> None:
    (finding,) = found(bucket(0, 1, 0, 1, 1, 0), bucket(1, 40, 2, 60, 60, 25))
    assert finding.message == "Gradients wait for their bucket"
    assert "bucket_cap_mb=5" in finding.code


def test_a_bucket_that_waits_for_another() -> None:
    late = bucket(0, 10, 50, 58, 58, 5, finds_unused=True)
    held = [bucket(number, 10, 5, 20, 59, 10, begun_by="layer.0", finds_unused=True) for number in (1, 2)]
    (finding,) = found(late, *held)
    check_words(finding)
    assert finding.message == "Gradients that are there wait for a bucket that is sent before theirs"
    assert list(finding.layers) == ["layer.0"]
    assert finding.code == "DistributedDataParallel(model, find_unused_parameters=False)"
    assert "the last there at 33 %, sent at 98 % with those of layer.0 of it" in finding.evidence
    (finding,) = found(*(replace(each, finds_unused=False) for each in (late, *held)))
    assert "let the first step be as the others are" in finding.advice


@pytest.mark.parametrize(
    "buckets",
    [
        (),
        (bucket(0, 80, 2, 60, 60, 9),),  # waits for little
        (bucket(0, 80, 55, 60, 60, 30),),  # one large layer: its gradient comes last
        tuple(bucket(number, 10, 7 * number, 7 * number + 7, 7 * number + 7, 5) for number in range(8)),
        (bucket(0, 1, 2, 60, 60, 30),),  # small already: it is the latency
    ],
    ids=["no DDP", "little", "comes late", "as it should be", "small"],
)
def test_what_is_left_alone(buckets: tuple[BucketRow, ...]) -> None:
    assert found(*buckets) == []


def test_the_same_time_is_told_once() -> None:
    late = case_of(bucket(0, 80, 2, 60, 60, 30))
    fine = case_of(bucket(0, 80, 55, 60, 60, 30))
    exposed = RULES["exposed-communication"]
    assert list(exposed.find(late)) == []
    (finding,) = exposed.find(fine)
    assert "no_sync" in finding.code


def test_it_explains_itself() -> None:
    assert all(part in RULE.about for part in ("Example::", "Pattern:", "Evidence:", "Estimate:", "Source:"))


def test_each_model_is_judged_by_itself() -> None:
    """Another one that is as it should be neither hides it nor is blamed."""
    late = bucket(0, 80, 2, 60, 60, 30, model="critic")
    fine = [bucket(0, 400, 58, 60, 60, 5, model="actor"), bucket(1, 400, 58, 60, 60, 5, model="actor")]
    for rows in ((late, *fine), (*fine, late)):
        (finding,) = found(*rows)
        assert finding.cost_ns == 30 * MS and "83.9 MB of gradients in one bucket" in finding.evidence
    assert len(found(late, replace(late, model="actor"))) == 2


def test_what_lies_is_told_by_bytes_and_not_by_the_first_gradient() -> None:
    """A small one comes early, nearly all bytes come last."""
    assert found(bucket(0, 80, 2, 60, 60, 30, mean_at_ns=55 * MS)) == []
    assert len(found(bucket(0, 80, 2, 60, 60, 30, mean_at_ns=40 * MS))) == 1


def test_a_bucket_that_its_own_layer_completes_is_held_by_nobody() -> None:
    """Its collective begins late: it is too large, for no other is sent before it."""
    rows = [bucket(number, 40, 5, 20, 59, 15) for number in (0, 1)]
    (finding,) = found(*rows)
    assert finding.message == "Gradients wait for their bucket"


@pytest.mark.parametrize("turned", [False, True])
def test_the_evidence_is_of_the_bucket_that_lies_longest(turned: bool) -> None:
    rows = [bucket(0, 1, 0, 1, 1, 0), bucket(1, 40, 2, 60, 60, 25)]
    (finding,) = found(*(rows[::-1] if turned else rows))
    assert "41.9 MB of gradients in one bucket, the first there at 3 %, sent at 100 %" in finding.evidence
    held = [bucket(2, 10, 5, 20, 59, 10, begun_by="layer.0"), bucket(3, 30, 5, 10, 59, 10, begun_by="layer.0")]
    (finding,) = found(bucket(0, 10, 50, 58, 58, 5), *(held[::-1] if turned else held))
    assert "31.5 MB of gradients, the last there at 17 %" in finding.evidence


def test_a_wait_that_is_short_where_nothing_is_profiled_is_left_alone() -> None:
    """Profiled steps take longer: what is told is a share of one that is not."""
    case = case_of(bucket(0, 80, 2, 60, 60, 30))
    for unprofiled, told in ((50 * MS, True), (4 * MS, True), (3 * MS, False), (None, True)):
        run = replace(case.run, step=replace(case.run.step, unprofiled_wall_ns=unprofiled))
        assert bool(list(RULE.find(Case(run, case.facts)))) == told


@pytest.mark.parametrize("times", [0.25, 0.5, 1.0, 2.0, 9.0])
def test_a_wait_is_never_longer_than_it_was_measured(times: float) -> None:
    """A step that is slower unprofiled, since the machine was busy, makes no wait of a millisecond of a shorter one."""
    case: Any = SimpleNamespace(step_ns=5 * MS, run=SimpleNamespace(step=SimpleNamespace(wall_ns=5 * MS)))
    case.run.step.unprofiled_wall_ns = round(5 * MS * times)
    least = round(MS / min(times, 1.0))
    assert [is_much(waited, case) for waited in (least - 1, least)] == [False, True]
