"""One training step of a workload with its memory measured, block by block."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from gradscope.capture.memory import Surroundings
from gradscope.capture.model_steps import run_steps, seed_everything
from gradscope.capture.modules import CallRecorder
from gradscope.capture.naming import name_modules
from gradscope.capture.session import Session, TimedSteps
from gradscope.capture.state import preserved
from gradscope.errors import NothingMeasuredError
from gradscope.pipeline import _read_memory
from gradscope.tables import BlockTable, ModuleInfo, Options
from gradscope.workload import Batches, Workload, import_path


class _MemorySession(Session):
    """The memory pass alone, whose first step is a warm-up; before it one that initialises a lazy model."""

    def __init__(self, surroundings: Surroundings, *, lazy: bool) -> None:
        super().__init__(Options(warmup=int(lazy), lines=False), None, surroundings)
        self._phases = [phase for phase in self._phases if phase.name in ("warm-up", "memory")]
        # The timed steps would say which modules there are; here the surroundings know the model.
        self.capture.timed = TimedSteps(None, CallRecorder())


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The memory of one step."""

    blocks: BlockTable
    infos: Sequence[ModuleInfo]  # what the blocks' layers number


def measure_step(
    workload: Workload, device: torch.device, ignored: Sequence[torch.Tensor], seed: int | None
) -> MeasuredStep:
    """Run a few steps of ``workload`` and measure the memory of the last; everything is put back as it was.

    Args:
        workload: its batch is one batch, on ``device``.
        device: where the model is moved to.
        ignored: tensors that are alive though training would not hold them.
        seed: set before the first step.

    Raises:
        NothingMeasuredError: no step had a backward pass.
        Exception: whatever the model raises.
    """
    gc.collect()  # cycles of an earlier step would count as memory of this one
    optimizers = [] if workload.optimizer is None else [workload.optimizer]
    surroundings = Surroundings(models=lambda: (workload.model,), optimizers=optimizers)
    session = _MemorySession(surroundings, lazy=any(is_lazy(parameter) for parameter in workload.model.parameters()))
    with preserved(workload.model, workload.batch, workload.optimizer, device) as copies:
        surroundings.ignored = (*copies, *ignored)
        seed_everything(seed)
        with session, import_path(workload.folder):
            run_steps(workload, Batches(workload.batch, device), session)
    found = session.capture.memory
    if found is None:
        raise NothingMeasuredError("no memory was measured.")
    names = name_modules([found.recorder.modules[label] for label in found.recorder.roots], {"": workload.model})
    parents = names.calling_parents(names.labels(found.recorder.modules))
    result = _read_memory(found, names, parents)
    assert result is not None
    return MeasuredStep(result.blocks, names.infos)
