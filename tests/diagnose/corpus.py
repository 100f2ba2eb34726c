"""The corpus of twins and what rules find in it, as a table.

python -m tests.diagnose.corpus            profiles every twin and prints the table
python -m tests.diagnose.corpus --write    writes it to docs/findings-corpus.md too
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import tests.diagnose
from gradscope.diagnose import engine
from gradscope.diagnose.case import Floor, Rule
from gradscope.diagnose.rules import RULES
from gradscope.patching import places as found_places
from gradscope.patching.prove.predict import Saving, kept_bytes
from gradscope.patching.sites import Site
from tests.diagnose.run_case import Twin, findings_of

PAGE = Path(__file__).parents[2] / "docs" / "findings-corpus.md"
ANYWHERE = {"page-faults"}  # of the process's heap, not of the model
BY_CALLS = {"tiny-layers"}  # they judge what a call takes, which on a busy machine may be anything
BY_OPERATIONS = {"backward-ratio", "host-sync", "slow-repeat"}  # they compare what operations take
TRIES = 3  # a fault that stays is found each time
BEGIN, END = "<!-- corpus -->\n", "<!-- /corpus -->\n"


@dataclass(frozen=True)
class Seen:
    """Rules that fired on the twins of one pair, with weight; on the good one without those that are right there."""

    bad: frozenset[str]
    good: frozenset[str]


@dataclass(frozen=True)
class Row:
    """One rule over the pairs."""

    rule: str
    pairs: int
    found: int  # true positives
    missed: int  # false negatives
    wrong: int  # false positives: good twins of any rule
    silent: int  # good twins of its own


def _all_twins() -> Iterator[Twin]:
    for found in pkgutil.iter_modules(tests.diagnose.__path__):
        if found.name.startswith("twins_"):
            yield from importlib.import_module(f"tests.diagnose.{found.name}").TWINS


TWINS = list(_all_twins())


def fixed_predictions(sites: Iterable[Site], rounds: int = 0, elsewhere: int = 0) -> dict[Site, Saving]:
    """2 ms of every recipe that fits: a micro-run on a busy machine may say anything."""
    return {site: Saving(2_000_000, kept_bytes(site.matches[0])) for site in sites if site.supported}


def look_at(twin: Twin) -> Seen:
    """Profiles both; again where what was measured is not as it should be, for another process may be the reason."""
    for _ in range(TRIES):
        bad = _of_weight(twin, bad=True)
        if twin.rule in bad:
            break
    for _ in range(TRIES):
        good = _of_weight(twin, bad=False) - twin.also - ANYWHERE
        if not good:
            break
    return Seen(bad, good)


def _of_weight(twin: Twin, *, bad: bool) -> frozenset[str]:
    """Rules that fired on a twin; one that no number makes worth a warning counts where it is what was planted."""
    planted = {twin.rule}
    made = {"by_calls": BY_CALLS & planted, "by_operations": BY_OPERATIONS & planted}
    found = findings_of(**(twin.bad if bad else twin.good)(), **made)
    return frozenset(each.rule for each in found if each.severity != "info" or each.rule == twin.rule)


def rows_of(seen: Mapping[str, Seen]) -> list[Row]:
    """A row for each rule, by the pairs that were looked at."""
    pairs = [(twin.rule, seen[twin.name]) for twin in TWINS if twin.name in seen]
    planted = Counter(rule for rule, _ in pairs)
    found = Counter(rule for rule, each in pairs if rule in each.bad)
    wrong = Counter(rule for _, each in pairs for rule in each.good)
    silent = Counter(rule for rule, each in pairs if rule not in each.good)
    return [
        Row(rule, planted[rule], found[rule], planted[rule] - found[rule], wrong[rule], silent[rule])
        for rule in sorted(planted | wrong)
    ]


def summary(rows: Iterable[Row]) -> str:
    """Recall and precision over all."""
    rows = list(rows)
    planted, found, wrong = (sum(getattr(row, name) for row in rows) for name in ("pairs", "found", "wrong"))
    recall, precision = found / max(planted, 1), found / max(found + wrong, 1)
    return f"{planted} pairs: recall {recall:.2f} ({found} of {planted}), precision {precision:.2f} ({wrong} wrong)"


def text(rows: Iterable[Row]) -> str:
    """For a terminal."""
    rows = list(rows)
    width = max((len(row.rule) for row in rows), default=0)
    head = f"{'rule':{width}}  pairs  found  missed  wrong  good twins silent"
    lines = [
        f"{row.rule:{width}}  {row.pairs:5}  {row.found:5}  {row.missed:6}  {row.wrong:5}  {row.silent:17}"
        for row in rows
    ]
    return "\n".join([head, *lines, "", summary(rows)])


def markdown(rows: Iterable[Row]) -> str:
    """For the page: the rules, the pairs, and the rules that have none."""
    rows = list(rows)
    lines = [f"{summary(rows)}.", "", "| rule | pairs | found | missed | wrong | good twins silent |"]
    lines += ["|---|---|---|---|---|---|"]
    lines += [
        f"| `{row.rule}` | {row.pairs} | {row.found} | {row.missed} | {row.wrong} | {row.silent} |" for row in rows
    ]
    lines += ["", "## The pairs", "", "| planted | rule | right on the good twin too |", "|---|---|---|"]
    for twin in sorted(TWINS, key=lambda twin: (twin.rule, twin.name)):
        also = ", ".join(f"`{rule}`" for rule in sorted(twin.also))
        lines.append(f"| {twin.name} | `{twin.rule}` | {also} |")
    without = ", ".join(f"`{rule}`" for rule in sorted(set(RULES) - {twin.rule for twin in TWINS}))
    lines += [
        "",
        "No pair, since they need a GPU, another processor, several ranks, measured limits, pages of a certain size or "
        f"torch.compile: {without}. Made cases test them.",
        "",
    ]
    return "\n".join(lines)


def on_page() -> str:
    """What the page has between its marks."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


def write(rows: Iterable[Row]) -> None:
    """Put the table into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{markdown(rows)}{END}{rest.partition(END)[2]}")


def rules_without_floors() -> dict[str, Rule]:
    """All of them: models of a test are so small that everything is below a floor."""
    return {name: replace(rule, floor=Floor(0, 0.0, 0, 0.0)) for name, rule in RULES.items()}


@contextmanager
def _as_in_tests() -> Iterator[None]:
    before = found_places.predict, engine.RULES
    found_places.predict, engine.RULES = fixed_predictions, rules_without_floors()  # type: ignore[assignment]
    try:
        yield
    finally:
        found_places.predict, engine.RULES = before


def main() -> int:
    """Exit code 1 where something is missed or wrong."""
    seen: dict[str, Seen] = {}
    with _as_in_tests():
        for twin in TWINS:
            print(f"\r{len(seen) + 1} of {len(TWINS)}", end="", file=sys.stderr, flush=True)
            seen[twin.name] = look_at(twin)
    print(file=sys.stderr)
    rows = rows_of(seen)
    print(text(rows))
    if "--write" in sys.argv[1:]:
        write(rows)
    return int(any(row.missed or row.wrong for row in rows))


if __name__ == "__main__":
    sys.exit(main())
