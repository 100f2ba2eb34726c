"""Sites of a plan as rows of FIX.json."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gradscope.fixing.options import FixOptions
from gradscope.fixing.result import planned_sites
from gradscope.fixing.run import fix_workload
from gradscope.patching.sites import Site
from gradscope.tables import Options
from gradscope.workload import Workload


class Given(dict[Any, Any]):
    """The same saving for every site."""

    kept: int | None = None  # less saved for backward

    def get(self, key: Any, default: Any = None) -> Any:
        return SimpleNamespace(ns=7, bytes=8, kept_bytes=self.kept)


FEW = "fewer than 3,000,000 logits: torch's own is sooner"


@pytest.mark.parametrize(
    ("supported", "idle", "reasons", "expected"),
    [
        (True, "", [], ("found", "", 7)),
        (True, FEW, [], ("refused", FEW, None)),  # as it would be where the plan is tried
        (False, "", ["a", "b"], ("refused", "a; b", None)),
        (False, FEW, ["a"], ("refused", FEW, None)),  # rewritten as "a" asks for, it would gain nothing
    ],
)
def test_a_dry_run_finds_what_would_be_tried(
    supported: bool, idle: str, reasons: list[str], expected: tuple[str, str, int | None]
) -> None:
    matches, edit = [SimpleNamespace(idle=idle)], object() if supported else None
    parts: dict[str, Any] = {"reasons": reasons, "matches": matches, "edit": edit}
    site = Site(path="head", file="model.py", line=3, recipe="gelu", **parts)
    (row,) = planned_sites([site], Given())
    assert (row.status, row.reason, row.predicted_saving_ns) == expected
    assert row.predicted_saving_bytes == (None if row.predicted_saving_ns is None else 8)
    given = Given()
    given.kept = 5
    (row,) = planned_sites([site], given)
    assert row.predicted_saving_bytes == (None if row.predicted_saving_ns is None else 5)


class Few(nn.Module):
    """A gate that could be replaced, on too few elements to gain."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x)


def test_a_dry_run_changes_what_it_found_alone() -> None:
    found = fix_workload(Workload(Few(), torch.ones(2, 4)), FixOptions(Options(device="cpu"), dry_run=True))
    assert [(site.recipe, site.status) for site in found.data.sites] == [("swiglu", "refused")]
    assert (found.data.diff, found.data.notes, tuple(found.files)) == ("", (), ())
