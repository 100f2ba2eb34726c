"""A fix's report and FIX.json: folded rows, sentences, widths, and what a damaged file is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradscope.document.terminal import to_text
from gradscope.errors import RunFileError
from gradscope.fixing.document import fix_document
from gradscope.fixing.messages import fold_sites, next_steps, verdict
from gradscope.fixing.result import FixData, FixSite, LossCurves, StepSide, from_json, load_fix, to_json
from gradscope.tables import WorkloadInfo

KEPT = FixSite("", "m.py:7", "attention", "kept", "", 900_000, 2_000_000, 1_000_000, 3_000_000, 2e-7, 3e-7)


def block(number: int, **changes: Any) -> FixSite:
    return replace(KEPT, path=f"h.{number}.attn", **changes)


def side(wall_ns: int, peak_bytes: int | None = 40_000_000, spread_ns: int = 10_000) -> StepSide:
    return StepSide(wall_ns, {"wall_ns": spread_ns}, "alternating", wall_ns // 2, peak_bytes)


def shown(data: FixData, width: int = 100, encoding: str = "utf-8", diff: str | None = None) -> str:
    return to_text(fix_document(data, diff), width, encoding)


def fixed(**changes: Any) -> FixData:
    data = FixData(
        gradscope="0.1.0",
        environment={"device": "cpu", "threads": 2, "torch": "2.13.0"},
        workload=WorkloadInfo("m.py", "model", 5, 3, "output", "Net", 1_000_000, batch="4x256 int64"),
        baseline="the model as given",
        sites=(
            *(block(number) for number in range(3)),
            FixSite("head", "m.py:9", "rope", "refused", "q is read by add"),
        ),
        diff="--- a/m.py\n+++ b/m.py\n",
        failed=False,
        before=side(10_000_000),
        after=side(8_000_000, 10_000_000),
        loss_difference=1.25e-7,
    )
    return replace(data, **changes)


WIDE = """\
gradscope 0.1.0  fix
target  m.py
model   Net, 1.00 M parameters · batch 4x256 int64
device  cpu · 2 threads · torch 2.13.0

Result
3 of 4 call sites replaced: a step is 1.25 times as fast and needs 4.00 times less memory.

Call sites  time and memory: saved per step
layer        source  recipe     verdict     time   memory  grad error  original's
h.*.attn ×3  m.py:7  attention  kept     3.00 ms  9.00 MB     2.0e-07     3.0e-07
head         m.py:9  rope       refused        -        -           -           -
  refused: q is read by add

The whole step  peak memory: above what was allocated when it began
                   time  spread  peak memory
before          10.0 ms  ±0.1 %      40.0 MB
after           8.00 ms  ±0.1 %      10.0 MB
before / after    ×1.25                ×4.00
the loss differs by 1.2e-07 of its value
"""


def test_the_whole_report() -> None:
    found = shown(fixed(), 140, diff="out.diff")
    head = [" ".join(line.split()) for line in found.partition("\nNotes")[0].splitlines()]
    assert head == [" ".join(line.split()) for line in WIDE.splitlines()]
    assert found.endswith(
        "Next\n  patch -p1 < out.diff        apply the diff\n  gradscope fix m.py --write  apply it, keeping a backup\n"
    )


def test_a_time_that_noise_hides_is_no_ratio() -> None:
    """The table says what the sentence below it says."""
    found = shown(fixed(time="nothing"), 140)
    assert "×1.25" not in found and "within noise" in found
    (row,) = [line.split() for line in found.splitlines() if line.startswith("before / after")]
    assert row == ["before", "/", "after", "noise", "×4.00"]
    (kept,) = [line.split() for line in found.splitlines() if line.startswith("h.*.attn")]
    assert kept[4:7] == ["kept", "noise", "9.00"]  # whose savings add up to the step's


@pytest.mark.parametrize(
    ("told", "saved_ns", "words"),
    [
        (("nothing",), -47_900_000, "noise"),
        (("nothing",), 5_000_000, "noise"),
        (("less",), 5_000_000, "5.00 ms"),
        (("less",), -1_000_000, "noise"),  # medians that say otherwise than most rounds do
        (("more",), -5_000_000, "-5.00 ms"),
        (("less", "nothing"), 5_000_000, "10.0 ms"),
        ((None,), -5_000_000, "-5.00 ms"),  # of a file of before
    ],
)
def test_a_places_time_is_told_where_it_is_no_noise(told: tuple[Any, ...], saved_ns: int, words: str) -> None:
    """Whether the step's is told or not: a place may be kept for its memory alone."""
    sites = tuple(block(k, measured_saving_ns=saved_ns, time=word) for k, word in enumerate(told))
    data = fixed(sites=sites)
    (row,) = [line for line in shown(data, 140).splitlines() if line.startswith("h.")]
    assert f" {words} " in row.split("kept")[1]
    assert from_json(to_json(data)) == data


def test_where_it_is_stays_longer_than_how_exact_it_is() -> None:
    sites = (replace(KEPT, path="first_attention_of_the_network.with_a_long_name", recipe="packed_attention"),)
    found = []
    for width in range(50, 141):
        (head,) = [line for line in shown(fixed(sites=sites), width).splitlines() if line.startswith("layer")]
        found.append(tuple(word for word in head.split() if word in ("source", "error")))
    assert set(found) == {(), ("source",), ("source", "error")}


def test_a_loss_that_is_not_the_users_is_told() -> None:
    assert "\nloss " not in shown(fixed())
    ours = replace(fixed().workload, loss="mean of outputs")
    assert "\nloss    mean of the floating outputs" in shown(fixed(workload=ours))


def test_a_step_in_turns_says_what_its_memory_is_also_where_nothing_is_kept() -> None:
    for after in (side(8_000_000), None):
        text = " ".join(shown(fixed(after=after)).split())
        assert "The whole step peak memory: above what was allocated when it began" in text
        assert "spread by" not in text


def test_a_ratio_of_unsteady_steps_is_called_rough() -> None:
    noisy = replace(side(8_000_000), spread={"wall_ns": 2_800_000})
    assert "step's times spread by ±35.0 %: the ratio is a rough one" in " ".join(shown(fixed(after=noisy)).split())
    text = " ".join(shown(fixed(before=noisy, after=None)).split())
    assert "spread by ±35.0 %: its time may be another" in text


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    data = fixed(curves=LossCurves((2.0, 1.0), (2.0, 1.0), 0.0, True, "The curves are the same."))
    lines = shown(data, width, diff="out.diff").splitlines()
    assert max(map(len, lines)) <= width
    assert any(line.startswith("h.*.attn ×3") for line in lines)


def test_ascii() -> None:
    shown(fixed(), encoding="ascii").encode("ascii")


def test_repeated_blocks_are_one_row() -> None:
    (row,) = fold_sites([block(number) for number in range(12)])
    assert (row.address, len(row.sites), row.measured_saving_ns) == ("h.*.attn", 12, 12_000_000)
    assert row.predicted_saving_bytes == 24_000_000


def test_blocks_with_another_verdict_are_another_row() -> None:
    sites = [block(0), block(1, status="undone", reason="it is slower on this batch"), block(2)]
    assert [row.address for row in fold_sites(sites)] == ["h.0,2.attn", "h.1.attn"]


def test_figures_in_a_reason_part_no_blocks() -> None:
    sites = [block(n, status="undone", reason=f"output is off by {n}.0e-01 of its size") for n in range(2)]
    assert [row.address for row in fold_sites(sites)] == ["h.*.attn"]


def test_each_place_of_a_module_has_its_own_saving() -> None:
    both = [block(0), block(0, source="m.py:9", recipe="gelu", measured_saving_ns=500_000)]
    assert [row.measured_saving_ns for row in fold_sites(both)] == [1_000_000, 500_000]
    assert "those that are kept add up to the step's" in shown(fixed(sites=tuple(both)), 200)


def test_savings_of_several_models_are_not_the_steps() -> None:
    """Each was measured by itself; the step is that of two profiles."""
    script = replace(fixed().workload, mode="script")
    profiles = {name: replace(side(took), measured="profile") for name, took in (("before", 9_000_000), ("after", 12))}
    found = shown(fixed(workload=script, **profiles), 400)
    last = next(line for line in found.splitlines() if line.startswith("before / after"))
    assert last.split() == ["before", "/", "after", "-", "-", "×1.00"]  # neither time nor backward
    assert "they do not add up to the whole step's" in found and "that are kept add up" not in found
    assert "those that are kept add up to the step's" in shown(fixed(workload=script), 400)


def test_a_sign_test_decides_the_verdict_where_there_is_one() -> None:
    """However far the medians are apart, and whatever the spread."""
    assert "as long as before, within noise" in verdict(fixed(time="nothing"))
    assert "1.25 times as fast" in verdict(fixed(time="less", after=side(8_000_000, spread_ns=9_000_000)))


@pytest.mark.parametrize("wide", ["before", "after"])
def test_without_a_sign_test_the_spread_of_either_side_is_noise(wide: str) -> None:
    assert fixed().change == "less"
    scattered = {wide: replace(getattr(fixed(), wide), spread={"wall_ns": 2_000_000})}
    assert fixed(**scattered).change == "nothing"


def test_a_dry_run_predicts_one_pass() -> None:
    found = to_text(
        fix_document(fixed(dry_run=True, sites=(replace(KEPT, status="found"),), before=None, after=None)), 140
    )
    assert "predicted savings of one forward and backward" in found
    assert " ".join(found.partition("attention")[2].split()).startswith("found ~900 µs ~2.00 MB ")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sites": ()}, "No recipe matches this model."),
        (
            {"after": side(9_990_000)},
            "3 of 4 call sites replaced: a step takes as long as before, within noise, and needs as much memory.",
        ),
        (
            {"after": side(20_000_000, 50_000_000)},
            "3 of 4 call sites replaced: a step is slower, 0.50 times as fast, and needs 1.25 times as much memory.",
        ),
        (  # enough for a place to be kept is enough to be told
            {"time": "nothing", "after": side(10_000_000, 39_400_000)},
            "3 of 4 call sites replaced: a step takes as long as before, within noise, and needs 1.02 times less "
            "memory.",
        ),
        (
            {"time": "less", "after": side(8_000_000, 40_600_000)},
            "3 of 4 call sites replaced: a step is 1.25 times as fast and needs 1.01 times as much memory.",
        ),
        (  # a few kilobytes are none
            {"time": "nothing", "before": side(10_000_000, 600_000), "after": side(10_000_000, 585_000)},
            "3 of 4 call sites replaced: a step takes as long as before, within noise, and needs as much memory.",
        ),
        (  # two profiles are further apart by themselves
            {"after": replace(side(20_000_000, 39_400_000), measured="profile")},
            "3 of 4 call sites replaced: each makes its own model faster or smaller; whole steps were not "
            "compared; a step needs as much memory.",
        ),
        (
            {"after": replace(side(5_000_000, None), measured="profile")},
            "3 of 4 call sites replaced: each makes its own model faster or smaller; whole steps were not compared.",
        ),
        ({"after": side(5_000_000, None)}, "3 of 4 call sites replaced: a step is 2.00 times as fast."),
        ({"dry_run": True, "sites": (replace(KEPT, status="found"),)}, "1 of 1 call site can be replaced."),
        ({"sites": (replace(KEPT, status="refused"),)}, "The only call site was not replaced; the model is unchanged."),
        (
            {"failed": True, "sites": (replace(KEPT, status="undone", max_grad_error=None),)},
            "The only call site was not replaced: 1 failed verification and was undone.",
        ),
    ],
)
def test_verdicts(changes: dict[str, Any], sentence: str) -> None:
    assert verdict(fixed(**changes)) == sentence


def test_of_a_script_the_model_alone_was_measured() -> None:
    """Neither heading nor verdict says that of a step which holds a loss, data and an optimizer besides."""
    script = WorkloadInfo("train.py", "script", 5, 3, None)
    found = shown(fixed(workload=script), 140)
    assert "The model's part of a step  peak memory" in found and "whole step" not in found
    assert "replaced: the model's part of a step is 1.25 times as fast and needs 4.00 times less memory." in found
    assert "a loss outside the model, data loading and the optimizer come on top" in " ".join(found.split())
    of_two = {name: replace(side(wall_ns), measured="profile") for name, wall_ns in (("before", 10), ("after", 8))}
    assert "The whole step\n" in shown(fixed(workload=script, **of_two), 140)
    assert "The whole step  peak memory" in shown(fixed(), 140)


def test_next_steps() -> None:
    def commands(**changes: Any) -> list[str]:
        return [step.command for step in next_steps(fixed(**changes), "a b.diff")]

    assert commands() == ["patch -p1 < 'a b.diff'", "gradscope fix m.py --write"]
    assert commands(failed=True) == ["patch -p1 < 'a b.diff'"]
    assert commands(written=("m.py",)) == ["gradscope profile m.py"]
    assert commands(diff="") == ["gradscope profile m.py", "gradscope recipes"]
    script = WorkloadInfo("pkg.train", "script", 5, 3, None)
    assert commands(workload=script, args=("--lr", "a b"))[1] == "gradscope fix -m pkg.train --write -- --lr 'a b'"
    elsewhere = (replace(KEPT, source="/elsewhere/m.py:7"),)
    assert commands(sites=elsewhere)[0] == "patch -p1 -d /elsewhere < 'a b.diff'"
    both = (block(0), *elsewhere)  # one command cannot apply a diff that is seen from two folders
    assert commands(sites=both) == ["gradscope fix m.py --write"]


# --------------------------------------------------------------------------------------------------------------------
# FIX.json
# --------------------------------------------------------------------------------------------------------------------


def test_there_and_back(tmp_path: Path) -> None:
    data = fixed(curves=LossCurves((2.0, 1.0), (2.0, 1.0), 0.0, True, "the same"), notes=("one",), written=("m.py",))
    text = to_json(data)
    assert from_json(text) == data
    assert list(json.loads(text))[:4] == ["kind", "schema_version", "gradscope", "environment"]
    (tmp_path / "fix.json").write_text(text)
    assert load_fix(tmp_path / "fix.json") == data
    bare = replace(data, before=None, after=None, curves=None, loss_difference=None)
    assert from_json(to_json(bare)) == bare


def damaged(**changes: Any) -> str:
    return json.dumps(json.loads(to_json(fixed())) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{",
            "x is not JSON: Expecting property name enclosed in double quotes (line 1, column 2).\n"
            "Write one with: gradscope fix TARGET",
        ),
        ("[]", "x is not a FIX.json: it has no kind and sites.\nWrite one with: gradscope fix TARGET"),
        (damaged(kind="diff"), "x is not a FIX.json: it has no kind and sites.\nWrite one with: gradscope fix TARGET"),
        (
            damaged(schema_version=0),
            "x is not a FIX.json: its schema_version is 0.\nWrite one with: gradscope fix TARGET",
        ),
        (
            damaged(schema_version=2),
            "x has schema_version 2; this gradscope reads up to 1.\n"
            "It was written by gradscope 0.1.0: update gradscope, or fix again.",
        ),
        (
            damaged(failed="no"),
            "x is damaged: failed is a string, not true or false.\nRun gradscope fix again to write a new one.",
        ),
        (damaged(diff=None), "x is damaged: diff is missing.\nRun gradscope fix again to write a new one."),
        (
            damaged(sites=[{"path": "a", "source": "b", "recipe": "c", "status": "good"}]),
            "x is damaged: sites[0].status is 'good', not one of kept, undone, refused, found.\n"
            "Run gradscope fix again to write a new one.",
        ),
    ],
)
def test_what_is_no_fix(text: str, message: str) -> None:
    with pytest.raises(RunFileError) as error:
        from_json(text, "x")
    assert str(error.value) == message


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"gone\.json: no such file.\nWrite one with: gradscope fix TARGET"):
        load_fix(tmp_path / "gone.json")
