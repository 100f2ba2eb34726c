"""Every pair of twins: what is planted is found, and nothing of weight is found where nothing is planted."""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import Iterator

import pytest

import tests.diagnose
from gradscope.diagnose.rules import RULES
from tests.diagnose.run_case import Twin, findings_of


def _twins() -> Iterator[Twin]:
    for found in pkgutil.iter_modules(tests.diagnose.__path__):
        if found.name.startswith("twins_"):
            yield from importlib.import_module(f"tests.diagnose.{found.name}").TWINS


TWINS = list(_twins())
_SEEN: dict[str, tuple[set[str], set[str]]] = {}  # name -> rules of weight that fired on the bad and on the good twin


def _of_weight(twin: Twin, *, bad: bool) -> set[str]:
    """Rules that fired on a twin; one that no number makes worth a warning counts where it is what was planted."""
    findings = findings_of(**(twin.bad if bad else twin.good)())
    return {each.rule for each in findings if each.severity != "info" or each.rule == twin.rule}


@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.name)
def test_what_is_planted_is_found_and_nothing_else(twin: Twin) -> None:
    bad, good = _SEEN[twin.name] = _of_weight(twin, bad=True), _of_weight(twin, bad=False) - twin.also
    assert twin.rule in bad
    assert not good, f"on the good twin: {good}"


def test_precision_and_recall() -> None:
    """Over all pairs that ran here; the good twins' findings of weight are those of other rules."""
    rules = {twin.name: twin.rule for twin in TWINS}
    hits = Counter(rules[name] for name, (bad, _) in _SEEN.items() if rules[name] in bad)
    planted = Counter(rules[name] for name in _SEEN)
    false = Counter(rule for _, good in _SEEN.values() for rule in good)
    table = [(rule, planted[rule], hits[rule], false[rule]) for rule in sorted(planted | false)]
    text = "\n".join(
        f"{rule:28} planted {count}, found {found}, on good twins {wrong}" for rule, count, found, wrong in table
    )
    assert sum(hits.values()) == len(_SEEN), text
    assert not false, text


def test_names_are_of_rules_and_each_once() -> None:
    assert {twin.rule for twin in TWINS} <= set(RULES)
    assert len({twin.name for twin in TWINS}) == len(TWINS)
