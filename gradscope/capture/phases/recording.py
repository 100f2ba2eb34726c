"""A step without a profiler: what torch is called with, and how torch is set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from gradscope.capture.backward import Around
from gradscope.capture.denormals import DenormalWatch
from gradscope.capture.environment import SwitchWatch, current_settings, optimizer_fact
from gradscope.capture.phases.base import Phase, Run, StepRecorder
from gradscope.capture.phases.timed import SETTLING_STEPS
from gradscope.process import unheard
from gradscope.tree import parameters_of

_INTERRUPTED = "what recipes could replace is not looked for: the program interrupted the step that was recorded for it"
_NO_RECIPES = (
    "what recipes could replace is not looked for in a compiled program: gradscope fix finds it, and measures it"
)


class RecordingPhase(Phase):
    """Every torch call is written down, where nothing is compiled; the facts are taken when the step has ended."""

    name = "recording"

    def __init__(self, run: Run, steps: int) -> None:
        super().__init__(run, steps)
        self._switches = SwitchWatch()
        self._denormals = DenormalWatch()

    def enter(self, exits: ExitStack) -> None:
        run = self.run
        exits.enter_context(self._switches.watching(run.guard, run.hooks_aside))
        recorder = run.recorder
        if recorder is not None and not run.uses_compile():
            exits.enter_context(recorder.watching(run.guard, run.hooks_aside))
            exits.enter_context(unheard(module=r"gradscope\."))  # as in the survey
            exits.enter_context(run.leaving_fast_paths())
            run.line_mode.turn_on(recorder)
            exits.callback(run.line_mode.turn_off)
        else:
            if recorder is not None:
                run.capture.notes.append(_NO_RECIPES)
            recorder = None
        looking = nullcontext if recorder is None else partial(self._denormals.watching, run.guard)
        run.backward.around = _around(self._switches, recorder, looking)
        exits.callback(setattr, run.backward, "around", None)

    def keep(self) -> None:
        if self.done:
            self.run.take_census()
        run, capture = self.run, self.run.capture
        if run.recorder is not None and run.recorder.failed is not None:
            run.guard.note(self.name, run.recorder.failed)
        if run.recorder is not None and run.recorder.interrupted:
            capture.notes.append(_INTERRUPTED)
        measured = capture.timed.completed - SETTLING_STEPS if capture.timed is not None else 0
        capture.settings = {
            **self._switches.with_seen(current_settings()),
            "loaders": run.loaders.facts(measured),
            "between": run.sampler.facts(),
            "system": run.faults.facts(),
            "denormals": self._denormals.facts(),
        }
        optimizers = run.surroundings.optimizers
        capture.optimizers = [optimizer_fact(each) for each in optimizers]
        modules = (*capture.registry.alive(), *run.surroundings.models())
        with torch._C.DisableTorchFunction():  # a mode of the user's sees the user's calls alone
            capture.with_gradient = frozenset(
                id(each) for module in modules for each in parameters_of(module) if each.grad is not None
            )
        capture.optimized = frozenset(
            id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]
        )
        capture.with_state = frozenset(id(each) for optimizer in optimizers for each in optimizer.state)


def _around(
    switches: SwitchWatch, recorder: StepRecorder | None, looking: Callable[[], AbstractContextManager[None]]
) -> Around:
    @contextmanager
    def around(roots: Any) -> Iterator[None]:
        switches.look()
        with looking(), recorder.inside_backward() if recorder is not None else nullcontext():
            yield

    return around
