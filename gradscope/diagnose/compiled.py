"""What the rules ask of compiled code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from gradscope.diagnose.case import Case
from gradscope.ops import GENERATED


def facts_of(case: Case) -> Mapping[str, Any]:
    """What was noted of compilations: see :func:`gradscope.capture.compiling.compile_facts`; or nothing."""
    found: Mapping[str, Any] = case.facts.settings.get("compiled", {})
    return found


def versions_of(case: Case) -> Mapping[tuple[str, str], int]:
    """How many versions were compiled of each function that was compiled again, by its place and name."""
    again = Counter((each["place"], each["function"]) for each in facts_of(case).get("again", ()))
    return {function: count + 1 for function, count in again.items()}


def is_at_limit(case: Case, versions: int) -> bool:
    """Check that torch.compile compiles no other version of a function that has so many: it runs as it is written."""
    limit = facts_of(case).get("limit")
    return limit is not None and versions >= limit


def is_the_partitioners(case: Case) -> bool:
    """Check that what is recomputed is what compiled graphs do not save: the program checkpoints nothing itself.

    A checkpoint that is not compiled runs its modules again; in a graph none is called.
    """
    facts = facts_of(case)
    again = [row for row in case.run.ops if row.phase == "recompute" and row.name.startswith(GENERATED)]
    return bool(facts.get("graphs")) and not facts.get("checkpointed") and bool(again)
