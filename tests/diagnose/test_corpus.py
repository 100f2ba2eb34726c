"""Every pair of twins: what is planted is found, and nothing of weight is found where nothing is planted."""

from __future__ import annotations

import pytest

from gradscope.diagnose.rules import RULES
from tests.diagnose.corpus import PAGE, TWINS, Row, Seen, look_at, markdown, on_page, rows_of, summary, text
from tests.diagnose.run_case import Twin

_SEEN: dict[str, Seen] = {}


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_what_is_planted_is_found_and_nothing_else(twin: Twin) -> None:
    seen = _SEEN[twin.name] = look_at(twin)
    assert twin.rule in seen.bad
    assert not seen.good, f"on the good twin: {set(seen.good)}"


def test_precision_and_recall() -> None:
    """Over all pairs that ran here; the good twins' findings of weight are those of other rules."""
    rows = rows_of(_SEEN)
    print(text(rows))
    assert not any(row.missed or row.wrong for row in rows), text(rows)


def test_the_page_has_what_was_counted() -> None:
    """All found and nothing wrong, which the tests above ask for, of the pairs that there are."""
    every = {twin.name: Seen(frozenset({twin.rule}), frozenset()) for twin in TWINS}
    again = "run python -m tests.diagnose.corpus --write"
    assert on_page() == markdown(rows_of(every)), again
    if len(_SEEN) == len(TWINS):
        assert on_page() == markdown(rows_of(_SEEN)), again
    assert "python -m tests.diagnose.corpus --write" in PAGE.read_text()


def test_rows_count_what_is_missed_and_what_is_wrong() -> None:
    first, second, third = TWINS[0], TWINS[1], TWINS[-1]
    assert first.rule != third.rule
    seen = {
        first.name: Seen(frozenset({first.rule}), frozenset({third.rule})),
        second.name: Seen(frozenset(), frozenset()),
        third.name: Seen(frozenset({third.rule, first.rule}), frozenset({third.rule})),
    }
    rows = {row.rule: row for row in rows_of(seen)}
    assert rows[third.rule] == Row(third.rule, pairs=1, found=1, missed=0, wrong=2, silent=0)
    assert sum(row.missed for row in rows.values()) == 1
    assert summary(rows.values()) == "3 pairs: recall 0.67 (2 of 3), precision 0.50 (2 wrong)"
    assert text(rows.values()).startswith("rule ") and text(rows.values()).endswith("(2 wrong)")


def test_names_are_of_rules_and_each_once() -> None:
    assert {twin.rule for twin in TWINS} <= set(RULES)
    assert len({twin.name for twin in TWINS}) == len(TWINS)
    assert len(TWINS) >= 25
