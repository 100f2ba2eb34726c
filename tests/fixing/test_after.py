"""The profile after a fix is of the new code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gradscope.capture.byhand import watching
from gradscope.fixing.options import FixOptions
from gradscope.fixing.report import FixReport
from gradscope.fixing.run import fix_workload
from gradscope.patching import plan
from gradscope.patching.patches import Patches
from gradscope.tables import Options
from gradscope.trampoline import is_told_of
from gradscope.workload import load_target
from tests.fixing.fix_fixtures import fixed_fixture, folder_fixture, gains_fixture  # noqa: F401 (used by their names)
from tests.made_times import BETTER, Saves


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
    assert not [note for note in fixed.data.notes if "old code" in note]
    (drop,) = {row.calls for row in fixed.after.data.layers if row.class_name == "Dropout"}
    assert drop == 0


def test_what_a_profile_puts_around_a_forward_is_no_other_forward(folder: Path) -> None:
    workload = load_target("model.py:workload")
    patches = Patches(plan.plan(workload, recipes=("attention",), device="cpu"))
    assert patches.kept
    patches.apply()
    with watching({torch.nn.Dropout}, lambda module, args: False, lambda module: None), Functions() as called:
        workload.model(workload.batch)
    assert "masked_fill" not in called.names and not patches.old_calls
    assert any("scaled_dot_product_attention" in name for name in called.names)


def test_calls_that_run_the_old_code_are_counted(folder: Path) -> None:
    workload = load_target("model.py:workload")
    patches = Patches(plan.plan(workload, recipes=("attention",), device="cpu"))
    patches.apply()
    drop = workload.model.layers[1].drop
    hook = drop.register_forward_hook(lambda *_: None)
    for _ in range(3):
        workload.model(workload.batch)
    assert patches.old_calls == {"layers.1": 3}
    hook.remove()
    workload.model(workload.batch)
    assert patches.old_calls == {"layers.1": 3}
    patches.revert()
    patches.apply()
    assert not patches.old_calls


def test_a_fix_says_that_its_profile_ran_the_old_code(
    folder: Path, gains: Callable[[Saves], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    gains(BETTER)

    def runs(module: Any) -> Any:
        forward = module.forward.__func__
        return object() if is_told_of(forward) else forward  # as if it were another one meanwhile

    monkeypatch.setattr("gradscope.patching.swap._runs", runs)
    options = FixOptions(Options(steps=2, warmup=1, device="cpu"), recipes=("attention",))
    fixed = fix_workload(load_target("model.py:workload"), options)
    (note,) = (note for note in fixed.data.notes if "old code" in note)
    assert note.startswith("the profile after ran old code: layers.0 ")


def test_a_forward_that_a_layer_got_of_its_own_since_is_not_passed_by(folder: Path) -> None:
    """A dropout that the new code only reads: one given a forward of its own would be read, and not called."""
    workload = load_target("model.py:workload")
    patches = Patches(plan.plan(workload, recipes=("attention",), device="cpu"))
    patches.apply()
    drop = workload.model.layers[0].drop
    object.__setattr__(drop, "forward", lambda weights: weights * 0.5)
    workload.model(workload.batch)
    assert patches.old_calls == {"layers.0": 1}
    object.__delattr__(drop, "forward")
    workload.model(workload.batch)
    assert patches.old_calls == {"layers.0": 1}


def test_the_peak_after_has_nothing_of_the_proof(fixed: FixReport) -> None:
    """Operands and copies that the proof left alive would be counted: the page's peak against the table's."""
    assert fixed.before is not None and fixed.after is not None
    for report in (fixed.before, fixed.after):
        memory = report.data.memory
        assert memory is not None and memory.at_peak
        assert sum(row.bytes for row in memory.at_peak if row.category == "other tensors") == 0
