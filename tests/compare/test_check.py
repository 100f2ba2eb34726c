"""Runs held against limits: what is over, what is within noise, and what cannot be checked."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from gradscope.compare.budgets import (
    Budgets,
    Checked,
    Judged,
    LayerLimit,
    check,
    percentage,
    regressions,
)
from gradscope.compare.checkdocument import check_document, offenders, to_json
from gradscope.document.terminal import to_text
from gradscope.errors import UsageError
from gradscope.tables import RunData
from tests import report_fixtures
from tests.diff_fixtures import CPU, MS, around, run

NOTHING = (0, 0, 0, 0, 0)
FIVE, TEN = Fraction(5, 100), Fraction(10, 100)


def shown(checked: Checked) -> str:
    return to_text(check_document(checked))


def judged(before: RunData, after: RunData, **limits: Any) -> list[Judged]:
    return list(check(after, before, Budgets(**limits), ("after.json", "before.json")).judged)


def net(mean: int, by: int = 0, **options: Any) -> RunData:
    return run({"": NOTHING, "a": around(mean, by), "b": around(10 * MS, 0)}, **options)


# --------------------------------------------------------------------------------------------------------------------
# Time
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("after", "result"), [(104_500_000, "ok"), (104_500_001, "over"), (50 * MS, "ok")])
def test_the_limit_itself_is_within_it(after: int, result: str) -> None:
    (one,) = judged(net(90 * MS), net(after - 10 * MS + 500_000), regression=FIVE)  # 100 ms and 5 % are 105 ms
    assert (one.result, one.limit, one.layer) == (result, 105 * MS, None)
    assert one.change.metric == "backward_ns"


def test_a_regression_within_noise_is_inconclusive() -> None:
    wall = around(0, 10 * MS)
    (one,) = judged(net(90 * MS, wall=wall), net(97 * MS, wall=wall), regression=FIVE)
    assert (one.result, one.change.difference) == ("inconclusive", 7 * MS)
    steady = around(0, MS)
    (one,) = judged(net(90 * MS, wall=steady), net(97 * MS, wall=steady), regression=FIVE)
    assert one.result == "over"


@pytest.mark.parametrize(
    ("backward", "allowed", "result"),
    [
        (90, 5, "inconclusive"),  # no difference at all, and one of 19 ms would not be seen
        (90, 20, "ok"),  # the limit is above the noise
        (80, 5, "inconclusive"),  # 10 ms faster, or 9 ms slower, but the limit is 5
        (70, 5, "ok"),  # 20 ms faster: not over the limit whatever the noise
        (115, 20, "over"),
    ],
)
def test_a_limit_that_noise_hides_is_no_pass(backward: int, allowed: int, result: str) -> None:
    wall = around(0, 10 * MS)  # noise of 19.1 ms on a baseline of 100 ms
    before, after = net(90 * MS, wall=wall), net(backward * MS, wall=wall)
    (one,) = judged(before, after, regression=Fraction(allowed, 100))
    assert one.result == result


def test_layers_are_chosen_by_globs_and_judged_with_all_below_them() -> None:
    before, after = report_fixtures.gpt(3), report_fixtures.gpt(3, slow_block=1)
    found = judged(before, after, layers=[LayerLimit("transformer.h.*.attn", TEN)])
    assert [(one.layer, one.result) for one in found] == [
        ("transformer.h.1.attn", "over"),
        ("transformer.h.0.attn", "ok"),
        ("transformer.h.2.attn", "ok"),
    ]
    totals = {row.path: row.backward_total_ns for row in before.layers}
    assert found[0].change.before == totals["transformer.h.1.attn"]
    assert found[0].change.metric == "backward_total_ns"


def test_of_several_limits_the_last_one_counts() -> None:
    limits = [LayerLimit("**", FIVE), LayerLimit("a", Fraction(1))]
    found = {one.layer: one for one in judged(net(100 * MS), net(150 * MS), layers=limits)}
    assert found["a"].result == "ok"
    assert found["b"].result == "ok"
    assert found[""].result == "over"
    assert judged(net(100 * MS), net(150 * MS), layers=limits[::-1])[0].layer in {"", "a"}


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("h.*.attn", "h.0.attn", True),
        ("h.*.attn", "h.0.x.attn", False),
        ("h.*.attn", "transformer.h.0.attn", False),
        ("**.attn", "transformer.h.0.attn", True),
        ("**", "", True),
        ("h.?", "h.7", True),
        ("h.?", "h.12", False),
        ("h.1+", "h.11", False),
        ("ln_*", "ln_f", True),
    ],
)
def test_globs(glob: str, path: str, matches: bool) -> None:
    assert LayerLimit(glob, FIVE).matches(path) is matches


def test_a_new_layer_is_noted_not_checked() -> None:
    before = run({"": NOTHING, "a": around(MS, 0)})
    after = run({"": NOTHING, "a": around(MS, 0), "b": around(MS, 0)})
    checked = check(after, before, Budgets(layers=[LayerLimit("?", FIVE)]), ("after.json", "before.json"))
    assert [one.layer for one in checked.judged] == ["a"]
    assert checked.notes == ["not in the baseline, so not checked: b"]


def test_a_layer_that_is_gone_is_noted() -> None:
    before = run({"": NOTHING, "a": around(MS, 0), "b": around(MS, 0)})
    after = run({"": NOTHING, "a": around(MS, 0), "c": around(MS, 0)})
    checked = check(after, before, Budgets(layers=[LayerLimit("?", FIVE)]), ("after.json", "before.json"))
    assert [one.layer for one in checked.judged] == ["a"]
    assert checked.notes == ["not in the baseline, so not checked: c", "not in the run, so not checked: b"]


@pytest.mark.parametrize(("glob", "only"), [("b", "before.json"), ("c", "after.json")])
def test_a_limit_of_a_renamed_layer_is_no_pass(glob: str, only: str) -> None:
    before = run({"": NOTHING, "a": around(MS, 0), "b": around(MS, 0)})
    after = run({"": NOTHING, "a": around(MS, 0), "c": around(50 * MS, 0)})
    limits = Budgets(layers=[LayerLimit(glob, FIVE)])
    with pytest.raises(UsageError) as raised:
        check(after, before, limits, ("after.json", "before.json"))
    assert str(raised.value) == (
        f"--max-regression: {glob} is no layer of both runs, only of {only}.\n"
        "Name the layer as both have it, or profile a new baseline."
    )


# --------------------------------------------------------------------------------------------------------------------
# Memory
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "result"), [(1050, "ok"), (1051, "over"), (900, "ok")])
def test_memory_is_exact(saved: int, result: str) -> None:
    noisy = around(0, 5 * MS)
    before = net(90 * MS, wall=noisy, saved={"a": 1000})
    found = judged(before, net(90 * MS, wall=noisy, saved={"a": saved}), memory_regression=FIVE)
    assert [(one.change.metric, one.result, one.limit) for one in found] == [
        ("peak_bytes", result, 2100),
        ("saved_bytes", result, 1050),
    ]


def test_amounts_need_no_baseline() -> None:
    checked = check(
        net(90 * MS, saved={"a": 1000}), None, Budgets(peak_bytes=2000, saved_bytes=999), ("run.json", None)
    )
    assert [(one.change.metric, one.result, one.limit) for one in checked.judged] == [
        ("saved_bytes", "over", 999),
        ("peak_bytes", "ok", 2000),
    ]
    assert [one.change.metric for one in checked.over] == ["saved_bytes"]


def test_memory_from_nothing() -> None:
    found = judged(net(MS, saved={"a": 0}), net(MS, saved={"a": 1}), memory_regression=FIVE)
    assert [one.result for one in found] == ["over", "over"]
    assert [one.result for one in judged(net(MS, saved={"a": 0}), net(MS, saved={"a": 0}), memory_regression=FIVE)] == [
        "ok",
        "ok",
    ]


# --------------------------------------------------------------------------------------------------------------------
# What cannot be checked
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "baseline", "message"),
    [
        (
            {},
            True,
            "nothing to check: no limit is given.\n"
            "Give --max-regression 5%, --max-memory-regression 2%, --max-peak 6GiB or --max-saved 2GiB.",
        ),
        (
            {"regression": FIVE},
            False,
            "a regression needs a run to compare with.\nGive --baseline BASELINE.json, written by gradscope profile.",
        ),
        (
            {"peak_bytes": 1},
            False,
            "after.json has no memory to check: it was not measured.\nProfile again without --no-memory.",
        ),
        (
            {"memory_regression": FIVE},
            True,
            "before.json has no memory to check: it was not measured.\nProfile again without --no-memory.",
        ),
        (
            {"layers": [LayerLimit("c.*", FIVE)]},
            True,
            "--max-regression: no layer of either run matches c.*.\n"
            "A glob is for the whole path, such as a; * stands for one part, ** for any.",
        ),
    ],
)
def test_limits_that_cannot_be_checked(limits: dict[str, Any], baseline: bool, message: str) -> None:
    one = net(MS)
    with pytest.raises(UsageError) as wrong:
        check(one, one if baseline else None, Budgets(**limits), ("after.json", "before.json" if baseline else None))
    assert str(wrong.value) == message


def test_a_glob_that_lacks_the_beginning_is_told_the_whole_path() -> None:
    one = report_fixtures.gpt(2)
    with pytest.raises(UsageError, match=r"matches h\.\*\.attn\.\nA glob .* such as transformer\.h\.0\.attn;"):
        judged(one, one, layers=[LayerLimit("h.*.attn", FIVE)])


def test_one_step_cannot_be_judged() -> None:
    one, five = run({"": (0,), "a": (MS,)}), run({"": NOTHING, "a": around(MS, 0)})
    for before, after, name in ((one, five, "before.json"), (five, one, "after.json")):
        with pytest.raises(UsageError) as wrong:
            judged(before, after, regression=FIVE)
        assert str(wrong.value) == (
            f"{name} has one measured step, so its noise is unknown.\nProfile again with --steps 5 or more."
        )


# --------------------------------------------------------------------------------------------------------------------
# What is typed
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "share"), [("5%", FIVE), (" 5 % ", FIVE), ("0.5%", Fraction(1, 200)), ("0%", 0), ("150%", Fraction(3, 2))]
)
def test_percentages(text: str, share: Fraction) -> None:
    assert percentage(text, "--max-regression") == share


@pytest.mark.parametrize("text", ["5", "-5%", "five", "", "%", "5%%", "1e3%", "٥%"])
def test_what_is_no_percentage(text: str) -> None:
    with pytest.raises(UsageError) as wrong:
        percentage(text, "--max-regression")
    assert str(wrong.value) == f"--max-regression: {text} is not a percentage.\nGive one with its sign: 5%"


def test_limits_of_the_step_and_of_layers() -> None:
    assert regressions(["5%", "h.*=10%", "7%", "a=0%"], "") == (
        Fraction(7, 100),
        (LayerLimit("h.*", TEN), LayerLimit("a", Fraction(0))),
    )
    assert regressions([], "") == (None, ())
    with pytest.raises(UsageError) as wrong:
        regressions(["=5%"], "--max-regression")
    assert str(wrong.value) == ("--max-regression: =5% names no layer.\nGive 5% for the step, or GLOB=5%: h.*.attn=5%")


# --------------------------------------------------------------------------------------------------------------------
# How it reads
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(name="checked")
def checked_fixture() -> Checked:
    before = net(90 * MS, MS, wall=around(0, MS), saved={"a": 1_000_000})
    after = net(105 * MS, MS, wall=around(0, MS), saved={"a": 1_010_000}, environment={**CPU, "torch": "2.14.0"})
    limits = Budgets(FIVE, [LayerLimit("?", TEN)], Fraction(2, 100), 3_000_000)
    return check(after, before, limits, ("after.json", "before.json"))


TEXT = """\
gradscope 0.1.0  check
WARNING: the runs differ in more than the code, and what follows may come from that:
- torch: 2.13.0+cpu before, 2.14.0 after
baseline  before.json
run       after.json

Limits  OVER: beyond the limit and beyond noise; inconclusive: noise hides the limit
      layer     metric     before    after   change    limit     noise
OVER  the step  backward   100 ms   115 ms  +15.0 %     +5 %  ±1.91 ms
OVER  a         backward  90.0 ms   105 ms  +16.7 %    +10 %  ±1.91 ms
ok    b         backward  10.0 ms  10.0 ms      0 %    +10 %   ±100 µs
ok    the step  peak      2.00 MB  2.02 MB   +1.0 %     +2 %     exact
ok    the step  saved     1.00 MB  1.01 MB   +1.0 %     +2 %     exact
ok    the step  peak            -  2.02 MB        -  3.00 MB     exact

Result
FAILED: 2 of 6 values are over the limit.
"""


def test_the_terminals_text(checked: Checked) -> None:
    assert shown(checked) == TEXT
    assert offenders(checked.over) == "backward of the step, backward of a"


def test_a_check_that_passes() -> None:
    one = net(90 * MS, MS)
    checked = check(one, one, Budgets(FIVE), ("run.json", "run.json"))
    assert shown(checked).endswith("\nPASSED: the value is within the limit.\n")
    assert "WARNING" not in shown(checked)
    checked = check(one, one, Budgets(FIVE, [LayerLimit("*", TEN)]), ("run.json", "run.json"))
    assert shown(checked).endswith("\nPASSED: all 4 values are within the limit.\n")


def test_a_check_that_noise_leaves_open() -> None:
    wall = around(0, 10 * MS)
    checked = check(net(97 * MS, wall=wall), net(90 * MS, wall=wall), Budgets(FIVE), ("run.json", "b.json"))
    text = shown(checked)
    assert text.endswith(
        "\nINCONCLUSIVE: 1 of 1 value is inconclusive, because noise hides the limit. Measure more steps\n"
        "(gradscope profile --steps 20) on a quiet machine, or raise the limit.\n"
        "- inconclusive: backward of the step: cannot see below 19 %\n"
    )
    assert "\ninconclusive  the step  backward  100 ms  107 ms  ~+7.0 %   +5 %  ±19.1 ms\n" in text


def test_what_is_within_its_limit_is_not_listed_without_end() -> None:
    layers = {"": NOTHING} | {f"l{i}": around(MS, 0) for i in range(30)}
    one = run(layers)
    checked = check(one, one, Budgets(layers=[LayerLimit("l*", FIVE)]), ("run.json", "run.json"))
    lines = shown(checked).splitlines()
    assert sum(line.startswith("ok ") for line in lines) == 21
    assert any(line.split() == ["ok", "…", "10", "more"] for line in lines)


def test_json(checked: Checked) -> None:
    record = json.loads(to_json(checked))
    assert list(record) == [
        "kind",
        "schema_version",
        "gradscope",
        "passed",
        "result",
        "run",
        "baseline",
        "warnings",
        "notes",
        "values",
    ]
    assert (record["kind"], record["schema_version"], record["passed"]) == ("check", 2, False)
    assert (record["run"]["file"], record["baseline"]["file"]) == ("after.json", "before.json")
    first, peak = record["values"][0], record["values"][-1]
    assert {key: first[key] for key in ("result", "metric", "before", "after", "limit", "allowed", "real")} == {
        "result": "over",
        "metric": "backward_ns",
        "before": 100 * MS,
        "after": 115 * MS,
        "limit": 105 * MS,
        "allowed": 0.05,
        "real": True,
    }
    assert record["values"][1]["layer"] == "a"
    assert (peak["metric"], peak["limit"]) == ("peak_bytes", 3_000_000)
    assert "allowed" not in peak and "before" not in peak
