"""What the tests of the rules about torch.compile share."""

from __future__ import annotations

from typing import Any

from gradscope.diagnose.rules import RULES
from gradscope.tables import Finding, OpRow
from tests.diagnose.settings.test_settings_made import made_case


def found(rule: str, ops: tuple[OpRow, ...] = (), **facts: Any) -> list[Finding]:
    return list(RULES[rule].find(made_case(ops=ops, device="cpu", compiled={"again": (), "breaks": (), **facts})))


def row(name: str, ns: int, calls: float) -> OpRow:
    return OpRow(None, "forward", name, calls, ns)
