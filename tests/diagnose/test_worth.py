"""What findings may promise: the floor, the cost, the step, the peak, and a run whose steps are unsteady."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from gradscope.diagnose import engine
from gradscope.diagnose.case import Case, Floor, Rule
from gradscope.diagnose.engine import diagnose, every_rule
from gradscope.diagnose.worth import LEFT, weighed
from gradscope.tables import Finding, HolderRow
from tests import report_memory_fixtures as memory_fixtures
from tests.diagnose.timing_cases import MS, made_case, row

pytestmark = pytest.mark.floors

STEP = 100 * MS
MB = 1_000_000


def _case(**more: Any) -> Case:
    """Of a step of 100 ms."""
    return made_case([row("body", 20 * MS, 30 * MS)], **more)


def _with_peak(case: Case, peak: int, *holders: tuple[str | None, int]) -> Case:
    """The rest of the peak is the parameters of a layer that no finding is about."""
    memory = memory_fixtures.gpt(2).memory
    assert memory is not None
    rows = [HolderRow(owner, "saved activations", size) for owner, size in holders]
    rows.append(HolderRow("", "parameters", peak - sum(size for _, size in holders)))
    memory = replace(
        memory, peak_bytes=peak, at_peak=rows, saved=(), saved_bytes=0, held=(), held_bytes=0, retained=(),
        retained_after_step_bytes=0, copies=(), copied_bytes=0, categories=None,
    )  # fmt: skip
    return Case(replace(case.run, memory=memory), case.facts)


def _finding(ns: int | None = None, size: int | None = None, **more: Any) -> Finding:
    return Finding(
        "a",
        "warning",
        more.pop("layers", ()),
        None,
        "m",
        "e",
        predicted_saving_ns=ns,
        predicted_saving_bytes=size,
        **more,
    )


def _rule(**more: Any) -> Rule:
    return Rule("a", "", lambda case: iter(()), **more)


def _weighed(finding: Finding, case: Case | None = None, *, steady: bool = True, **rule: Any) -> Finding | None:
    return weighed(finding, _rule(**rule), case or _case(), steady=steady)


# -- never the whole ------------------------------------------------------------------------------------------------


def test_a_promise_is_less_than_what_it_is_about() -> None:
    """Saving 75 ms of 75 ms is never true."""
    found = _weighed(_finding(75 * MS, cost_ns=75 * MS, predicted_low_ns=75 * MS, predicted_high_ns=75 * MS))
    assert found is not None
    most = round(75 * MS * (1 - LEFT))
    assert (found.predicted_low_ns, found.predicted_saving_ns, found.predicted_high_ns) == (most, most, most)


def test_a_promise_is_less_than_the_step_without_a_profiler() -> None:
    """A backward by hand that a profiler slows down: 133 % of a step were promised once."""
    case = _case()
    case = Case(replace(case.run, step=replace(case.run.step, unprofiled_wall_ns=STEP // 2)), case.facts)
    found = _weighed(_finding(133 * MS, predicted_high_ns=200 * MS), case)
    assert found is not None
    assert found.predicted_saving_ns == found.predicted_high_ns == round(STEP / 2 * (1 - LEFT))


def test_the_range_holds_the_promise() -> None:
    found = _weighed(_finding(10 * MS, predicted_low_ns=12 * MS, predicted_high_ns=8 * MS))
    assert found is not None
    assert (found.predicted_low_ns, found.predicted_high_ns) == (10 * MS, 10 * MS)
    lost = _weighed(_finding(-3 * MS, 5 * MB, predicted_low_ns=-5 * MS))
    assert lost is not None
    assert (lost.predicted_saving_ns, lost.predicted_low_ns, lost.predicted_saving_bytes) == (None, None, 5 * MB)


# -- the floor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ns", "size", "said"),
    [
        (499_999, None, False),  # half a percent of the step
        (500_000, None, True),
        (None, 6_700, False),  # "a warning to free 6.7 kB"
        (None, 1_000_000, True),
        (None, None, True),  # promises nothing, and is no less for it
    ],
)
def test_less_than_the_floor_is_not_said(ns: int | None, size: int | None, said: bool) -> None:
    assert (_weighed(_finding(ns, size)) is not None) is said


def test_both_parts_of_the_floor_must_be_reached() -> None:
    short = made_case([row("body", 1000, 2000)], wall=10_000, forward=4_000)
    assert _weighed(_finding(5_000), short) is None  # half of the step, and 5 µs
    assert _weighed(_finding(99_999), _case(), floor=Floor(ns=100_000, of_step=0.0)) is None
    large = _with_peak(_case(), 1000 * MB)
    assert _weighed(_finding(size=2 * MB), large) is None  # 0.2 % of the peak


def test_a_number_below_the_floor_goes_alone() -> None:
    found = _weighed(_finding(3_000, 5 * MB, predicted_low_ns=1_000, predicted_high_ns=4_000))
    assert found is not None
    numbers = (found.predicted_saving_ns, found.predicted_low_ns, found.predicted_high_ns, found.predicted_saving_bytes)
    assert numbers == (None, None, None, 5 * MB)


def test_the_most_there_is_to_gain_is_held_against_the_floor_too() -> None:
    assert _weighed(_finding(predicted_high_ns=3_000)) is None
    assert _weighed(_finding(predicted_high_ns=3 * MS)) is not None


def test_what_no_number_tells_is_said_in_any_case() -> None:
    found = _weighed(_finding(size=6_700), beyond_numbers=True)
    assert found is not None
    assert (found.severity, found.predicted_saving_bytes) == ("warning", None)


# -- the peak -------------------------------------------------------------------------------------------------------


def test_nothing_is_freed_that_the_peak_does_not_hold() -> None:
    """Sums over micro-batches: 230 MB were to be freed beside a peak of 27."""
    found = _weighed(_finding(size=230 * MB), _with_peak(_case(), 27 * MB))
    assert found is not None and found.predicted_saving_bytes == round(27 * MB * (1 - LEFT))
    case = _with_peak(_case(), 27 * MB, ("body", 4 * MB), (None, 2 * MB))
    found = _weighed(_finding(size=230 * MB, layers=("body",)), case)
    assert found is not None and found.predicted_saving_bytes == 6 * MB
    grown = _weighed(_finding(size=230 * MB), case, grows=True, beyond_numbers=True)
    assert grown is not None and grown.predicted_saving_bytes == 230 * MB


def test_what_is_gone_before_the_peak_frees_nothing() -> None:
    case = _with_peak(_case(), 27 * MB)
    assert _weighed(_finding(size=5 * MB, layers=("body",)), case) is None


# -- severity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ns", "size", "severity"),
    [(12 * MS, None, "critical"), (4 * MS, None, "warning"), (2 * MS, None, "info"), (None, 20 * MB, "warning")],
)
def test_the_severity_is_that_of_the_gain(ns: int | None, size: int | None, severity: str) -> None:
    """Whatever the rule said of it."""
    case = _with_peak(_case(), 100 * MB, ("body", 50 * MB))
    found = _weighed(replace(_finding(ns, size, layers=("body",)), severity="critical"), case)
    assert found is not None and found.severity == severity


def test_memory_for_time_is_a_hint() -> None:
    case = _with_peak(_case(), 100 * MB, ("body", 50 * MB))
    found = _weighed(_finding(size=40 * MB, layers=("body",)), case, trades=True)
    assert found is not None and found.severity == "info"


# -- code of others -------------------------------------------------------------------------------------------------


def test_nobody_is_told_to_edit_an_installed_package() -> None:
    library = "/usr/lib/python3.12/site-packages/torchvision/models/vgg.py:70"
    edit = replace(_finding(30 * MS), line=library)
    assert _weighed(edit, edits=True) is None
    assert _weighed(replace(edit, line="model.py:70"), edits=True) is not None
    assert _weighed(replace(edit, recipe="gelu"), edits=True) is not None  # gradscope.patch puts it into this model
    assert _weighed(edit) is not None  # its advice is a setting


# -- a run that is unsteady -----------------------------------------------------------------------------------------


def test_an_unsteady_run_gets_neither_alarms_nor_savings(monkeypatch: pytest.MonkeyPatch) -> None:
    def saving(case: Case) -> Iterator[Finding]:
        yield _finding(30 * MS, 20 * MB, predicted_low_ns=10 * MS, predicted_high_ns=40 * MS)
        yield replace(_finding(30 * MS), rule="time")

    alarm = replace(_rule(of_times=True), name="alarm", find=lambda case: iter([_finding(50 * MS)]))
    overflow = replace(_rule(beyond_numbers=True), name="overflow", find=lambda case: iter([_finding()]))
    rules = {"a": replace(_rule(), find=saving), "alarm": alarm, "overflow": overflow}
    monkeypatch.setattr(engine, "RULES", rules)
    assert len(diagnose(_case())[0]) == 4
    found, notes = diagnose(_case(), steady=False)
    assert notes == []
    said = sorted((each.predicted_saving_ns, each.predicted_saving_bytes or 0, each.severity) for each in found)
    assert said == [(None, 0, "warning"), (None, 20 * MB, "info")]
    assert all(each.predicted_low_ns is None and each.predicted_high_ns is None for each in found)


def test_an_unsteady_run_has_hints_alone() -> None:
    """Also where memory would be worth a warning: what the step does was not seen twice."""
    case = _with_peak(_case(), 100 * MB, ("body", 50 * MB))
    for steady, severity in ((True, "warning"), (False, "info")):
        found = _weighed(_finding(None, 40 * MB, layers=("body",)), case, steady=steady)
        assert found is not None and (found.severity, found.predicted_saving_bytes) == (severity, 40 * MB)


def test_no_loss_is_promised() -> None:
    found = _weighed(_finding(10 * MS, predicted_low_ns=-5 * MS, predicted_high_ns=20 * MS))
    assert found is not None and found.predicted_low_ns == 0


def test_rules_that_rest_on_times_alone_say_so() -> None:
    alarms = {rule.name for rule in every_rule() if rule.of_times}
    assert alarms == {
        "backward-ratio",
        "data-loading",
        "device-unfilled",
        "exposed-communication",
        "late-bucket",
        "far-from-limit",
        "not-compiled",
        "slow-repeat",
    }
    assert {rule.name for rule in every_rule() if rule.beyond_numbers} == {"float16-softmax", "leak"}


def test_every_rule_has_a_floor() -> None:
    for rule in every_rule():
        floor = rule.floor
        assert floor.ns >= 100_000 and floor.bytes >= 1_000_000 and floor.of_step > 0 and floor.of_peak > 0
