"""The instruction that each module call comes from. Counts, no clock."""

from __future__ import annotations

import importlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscope.capture.callers import OURS, REPLACEMENTS, UNKNOWN, Callers, _passes_on
from gradscope.capture.guard import Guard
from gradscope.capture.modules import CallRecorder
from gradscope.capture.registry import ModuleRegistry

X = torch.ones(2, 2)


def callers(run: Any, registry: ModuleRegistry | None = None, *, guard: Guard | None = None) -> list[int]:
    """Where the calls come from that ``run`` makes, in order."""
    recorder = CallRecorder(guard, registry)
    with recorder.recording():
        run()
    found = recorder.table().caller
    assert found is not None
    return [int(number) for number in found]


def layer() -> nn.Module:
    return nn.Linear(2, 2)


def test_an_instruction_has_one_number_in_all_recordings_of_a_run() -> None:
    a, b = layer(), layer()

    def run() -> None:
        for each in (a, b, a):
            each(X)
        a(b(X))

    registry = ModuleRegistry()
    first = callers(run, registry)
    assert first == callers(run, registry)
    assert len(set(first[:3])) == 1 and len(set(first[2:])) == 3
    assert UNKNOWN not in first


def test_code_that_is_made_anew_is_the_same_code() -> None:
    def run() -> None:
        names: dict[str, Any] = {"a": layer(), "X": X}
        exec(compile("def go():\n    a(X)\n", "<cell 1>", "exec"), names)
        names["go"]()

    registry = ModuleRegistry()
    assert callers(run, registry) == callers(run, registry)


def test_equal_code_of_two_files_is_not_the_same() -> None:
    def run() -> None:
        for name in ("one.py", "other.py"):
            names: dict[str, Any] = {"a": layer(), "X": X}
            exec(compile("def go():\n    a(X)\n", name, "exec"), names)
            names["go"]()

    assert len(set(callers(run))) == 2


def test_what_torch_calls_for_somebody_is_called_by_them() -> None:
    """Two checkpoints on two lines; a container calls its layers itself."""
    a = layer()

    def run() -> None:
        checkpoint(a, X, use_reentrant=False)
        checkpoint(a, X, use_reentrant=False)

    assert len(set(callers(run))) == 2
    pair = nn.Sequential(layer(), layer())

    def twice() -> None:
        pair(X)
        pair(X)

    first, second = callers(twice)[:3], callers(twice)[3:]
    _, inner, again = first
    assert first[0] != second[0] and inner == again and [inner, again] == second[1:]


@pytest.mark.parametrize(("folder", "own"), [("recipes", True), ("kernels", True), ("capture", False)])
def test_a_recipe_calls_its_layers_itself(folder: str, own: bool) -> None:
    """It runs in the place of the user's code: two lines of it are two, wherever it is installed."""
    place = Path(importlib.import_module(f"gradscope.{folder}").__file__ or "").parent

    def run() -> None:
        names: dict[str, Any] = {"a": layer(), "X": X}
        exec(compile("def go():\n    a(X)\n    a(X)\n", f"{place}/made.py", "exec"), names)
        names["go"]()

    assert len(set(callers(run))) == (2 if own else 1)


def test_only_the_usual_depth_is_the_quick_way() -> None:
    found = Callers()
    found.number(sys._getframe(), usual=1)
    assert not found.first_of
    found.number(sys._getframe(), usual=0)
    assert id(sys._getframe().f_code) in found.first_of


def test_code_that_cannot_be_hashed_has_numbers() -> None:
    """Dynamo makes code with a dict among its constants."""
    names: dict[str, Any] = {"a": layer(), "X": X}

    def run() -> None:
        made = compile("def go():\n    a(X)\n    a(X)\n", "made.py", "exec")
        exec(made, names)
        function = names["go"]
        function.__code__ = function.__code__.replace(co_consts=(*function.__code__.co_consts, {}))
        with pytest.raises(TypeError):
            hash(function.__code__)
        for _ in range(2):
            function()

    one, other, *again = callers(run)
    assert one != other and again == [one, other]


@pytest.mark.parametrize(
    ("name", "passes"), [(f"{REPLACEMENTS[0]}norm.py", False), (f"{OURS}capture/modules.py", True)]
)
def test_a_replacement_calls_for_itself(name: str, passes: bool) -> None:
    assert _passes_on(name) is passes


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = layer()

    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear.forward(x)


def test_a_call_by_hand_comes_from_the_line_that_makes_it() -> None:
    registry = ModuleRegistry()
    registry.called_by_hand |= {Own, nn.Linear}
    module, other = Own(), layer()

    def run() -> None:
        module(X)
        module(X)
        other.forward(X)

    found = callers(run, registry)
    assert len(found) == 5 and UNKNOWN not in found
    assert found[0] != found[2] and found[1] == found[3] and len(set(found)) == 4


@pytest.mark.parametrize("through", [nn.Module._call_impl, nn.Module.__call__])
def test_a_call_with_few_frames_below_it_is_noted(through: Any) -> None:
    """As the first of a thread, and without torch's outermost function."""
    guard = Guard()
    a = layer()

    def run() -> None:
        through(a, X)
        thread = threading.Thread(target=through, args=(a, X))
        thread.start()
        thread.join()

    first, second = callers(run, guard=guard)
    assert first != UNKNOWN and second == UNKNOWN and not guard.failed


def test_a_stack_that_is_not_as_deep_as_usual_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, a = Guard(), layer()
    monkeypatch.setattr("gradscope.capture.modules._BELOW", 10_000)
    (found,) = callers(lambda: a(X), guard=guard)
    assert found != UNKNOWN and not guard.failed


def test_the_quick_way_to_a_caller_gives_what_the_long_way_does() -> None:
    """From the second call on, and only where the first one came at the usual depth."""
    registry, a = ModuleRegistry(), layer()

    def run() -> None:
        for _ in range(2):
            a(X)
            nn.Module._call_impl(a, X)
            checkpoint(a, X, use_reentrant=False)

    found = callers(run, registry)
    assert found[:3] == found[3:] and len(set(found)) == 3
    assert run.__code__ in registry.callers._kept and list(registry.callers.first_of) == [id(run.__code__)]
