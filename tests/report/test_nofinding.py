"""A run without a finding says who looked, where the time is, and how near the limit: the same words everywhere."""

from __future__ import annotations

import dataclasses
import html
import re

import pytest

from gradscope.document.html import to_fragment
from gradscope.document.markdown import escape, to_markdown
from gradscope.document.terminal import to_text
from gradscope.report.document import profile_document
from gradscope.report.nofinding import nothing_found
from gradscope.report.page.data import page_record
from gradscope.report.runfile import from_json, to_json
from gradscope.report.view import build_view
from gradscope.tables import Finding, MemoryInfo, RunData
from tests import report_fixtures as fixtures

MS = 1_000_000
# Memory was measured, and none was used.
NO_MEMORY = MemoryInfo("cpu", 0, 0, "forward", None, "", (), 0, 0, (), (), 0, (), 0, (), 0, (), 0, 0, 0, ())


def run(*, limits: bool = True, rules: int | None = 35, findings: tuple[Finding, ...] = ()) -> RunData:
    """Of 12 linear layers and 12 norms: 61 % and 25 % of backward."""
    builder = fixtures.RunBuilder()
    builder.add("", "Net", 14 * MS, 10 * MS)
    for i in range(12):
        near = {"backward_limit_ns": 3_965_000, "forward_limit_ns": MS} if limits else {}
        builder.add(f"fc{i}", "Linear", round(61 / 12 * MS), MS, **near)
        builder.add(f"norm{i}", "LayerNorm", round(25 / 12 * MS), MS)
    return dataclasses.replace(builder.build(), rules=rules, findings=findings)


def test_it_says_who_looked_where_the_time_is_and_how_near_the_limit() -> None:
    made = dataclasses.replace(run(), memory=NO_MEMORY)
    head, where, phases = nothing_found(made)
    assert head == "No finding: 35 rules looked at time, memory and settings."
    assert nothing_found(run())[0] == "No finding: 35 rules looked at time and settings."  # memory was not measured
    assert where.startswith("Of backward, ")
    assert "% in 12 Linear layers at 78 % of this machine's limit, " in where
    assert "% in 12 LayerNorm layers" in where
    assert phases.startswith("A step of ") and " % forward, " in phases and " % backward" in phases


def test_the_phases_have_the_shares_that_the_head_gives_them() -> None:
    """Rounded one by one they would differ by 1 % from those of the head, which add up to 100 %."""
    made = run()
    for ns in range(0, 4 * MS, MS // 7):
        step = dataclasses.replace(made.step, other_ns=ns, wall_ns=made.step.wall_ns - made.step.other_ns + ns)
        changed = dataclasses.replace(made, step=step)
        told = re.findall(r"(\d+ %) (?:forward|backward|optimizer|between)", nothing_found(changed)[2])
        head = next(line for line in to_text(profile_document(changed), width=140).splitlines() if " = forward" in line)
        assert told == re.findall(r"\((\d+ %)", head)


def test_time_that_was_not_judged_is_not_said_to_be_looked_at() -> None:
    made = dataclasses.replace(run(limits=False), memory=NO_MEMORY)
    busy = dataclasses.replace(made, step=dataclasses.replace(made.step, waited_ns=made.step.wall_ns // 2))
    head, *rest = nothing_found(busy)
    assert head == (
        "No finding: 35 rules looked at memory and settings. Time was not judged, for the steps waited too long for a "
        "core: profile again while the machine is idle."
    )
    assert not any("limit" in each for each in rest)


def test_limits_that_are_not_known_can_be_measured() -> None:
    assert nothing_found(run(limits=False))[-1] == (
        "How near that is to this machine's limit is not known: run gradscope doctor --calibrate, then profile again."
    )


@pytest.mark.parametrize(("moved", "place"), [(40 * MS, 1), (400 * MS, 0)])
def test_time_that_is_in_no_layer_is_named_too(moved: int, place: int) -> None:
    """In its place: the costliest comes first."""
    made = run()
    ledger = dataclasses.replace(made.ledger, engine_ns=made.ledger.engine_ns + moved)
    ledger = dataclasses.replace(ledger, backward_ns=ledger.backward_ns + moved)
    step = dataclasses.replace(made.step, backward_ns=made.step.backward_ns + moved, wall_ns=made.step.wall_ns + moved)
    parts = nothing_found(dataclasses.replace(made, ledger=ledger, step=step))[1].split(", ")[1:]
    assert "% in autograd overhead" in parts[place]
    shares = [int(part.partition(" %")[0]) for part in parts]
    assert shares == sorted(shares, reverse=True)


def built(*layers: tuple[str, float, int | None]) -> str:
    """The second sentence for layers of (class, ms of backward, ms at the limit)."""
    builder = fixtures.RunBuilder()
    builder.add("", "Net", 0, 0)
    for number, (name, ms, limit) in enumerate(layers):
        builder.add(f"l{number}", name, round(ms * MS), MS, backward_limit_ns=None if limit is None else limit * MS)
    return nothing_found(dataclasses.replace(builder.build(), rules=35))[1]


def test_a_limit_that_is_known_of_some_layers_alone_is_not_said() -> None:
    assert "2 Linear layers at 50 % of" in built(("Linear", 50, 25), ("Linear", 50, 25))
    where = built(("Linear", 50, 25), ("Linear", 50, None))
    assert "2 Linear layers" in where and "limit" not in where


def test_nothing_is_nearer_to_the_limit_than_at_it() -> None:
    """A ceiling that was measured on a busier machine."""
    assert "1 Linear layer at 100 % of this machine's limit" in built(("Linear", 50, 70))


def test_layers_without_a_backward_are_not_counted() -> None:
    assert "1 Linear layer at 50 %" in built(("Linear", 50, 25), ("Linear", 0, None))


def test_the_costliest_is_named_first_and_always() -> None:
    """Also where no kind of layer has a tenth of the time."""
    where = built(*((f"Kind{number}", 4 + number / 100, None) for number in range(25)))
    assert "1 Kind24 layer" in where and "Kind23" not in where
    shares = [
        int(share) for share in re.findall(r"(\d+) % in", built(("A", 15, None), ("B", 60, None), ("C", 9, None)))
    ]
    assert shares == sorted(shares, reverse=True) and len(shares) >= 2


def test_two_to_four_sentences() -> None:
    for made in (run(), run(limits=False), dataclasses.replace(fixtures.gpt(12), rules=1)):
        assert 2 <= len(nothing_found(made)) <= 4
    assert nothing_found(dataclasses.replace(fixtures.gpt(12), rules=1))[0].startswith("No finding: 1 rule looked at ")


def test_every_display_has_the_same_sentences() -> None:
    made = run()
    said = nothing_found(made)
    view = profile_document(made)
    for width in (60, 100, 140):
        assert " ".join(said) in " ".join(to_text(view, width).split())
    assert escape(" ".join(said)) in to_markdown(view)
    assert "gains are estimates" not in to_text(view)
    assert all(html.escape(each) in to_fragment(view) for each in said)
    assert page_record([made])["runs"][0]["nothing_found"] == list(said)


@pytest.mark.parametrize("severity", ["info", "warning"])
def test_where_something_was_found_it_is_not_said(severity: str) -> None:
    found = Finding("a", severity, (), None, "m", "e", predicted_saving_ns=30 * MS)  # type: ignore[arg-type]
    made = run(findings=(found,))
    assert build_view(made).findings.nothing == ()
    assert "No finding" not in to_text(profile_document(made)) + to_markdown(profile_document(made))
    assert page_record([made])["runs"][0]["nothing_found"] == []


def test_where_nobody_looked_nothing_is_said() -> None:
    """A recorded trace, and a file of an older version."""
    made = run(rules=None)
    assert nothing_found(made) == ()
    assert "Findings" not in to_text(profile_document(made))
    assert "rules" not in to_json(made)
    assert from_json(to_json(run())).rules == 35
