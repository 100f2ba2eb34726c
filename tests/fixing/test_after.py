"""The profile after a fix is of the new code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gradscope.capture.byhand import watching
from gradscope.fixing.report import FixReport
from gradscope.patching import plan
from gradscope.patching.patches import Patches
from gradscope.workload import load_target
from tests.fixing.fix_fixtures import fixed_fixture, folder_fixture, gains_fixture  # noqa: F401 (used by their names)


class Functions(TorchFunctionMode):
    """The names of torch's functions that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


def operations(report: Any) -> set[str]:
    return {row.name for row in report.data.ops}


def test_the_profile_after_is_of_the_new_code(fixed: FixReport) -> None:
    assert fixed.before is not None and fixed.after is not None
    assert "aten::masked_fill" in operations(fixed.before)
    assert "aten::masked_fill" not in operations(fixed.after)
    (drop,) = {row.calls for row in fixed.after.data.layers if row.class_name == "Dropout"}
    assert drop == 0


def test_what_a_profile_puts_around_a_forward_is_no_other_forward(folder: Path) -> None:
    workload = load_target("model.py:workload")
    patches = Patches(plan.plan(workload, recipes=("attention",), device="cpu"))
    assert patches.kept
    patches.apply()
    with watching({torch.nn.Dropout}, lambda module, args: False, lambda module: None), Functions() as called:
        workload.model(workload.batch)
    assert "masked_fill" not in called.names
    assert any("scaled_dot_product_attention" in name for name in called.names)
