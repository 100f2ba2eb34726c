"""One training step of a workload with its memory measured, block by block."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from gradscope.capture.memory import Surroundings
from gradscope.capture.model_steps import run_steps, seed_everything
from gradscope.capture.naming import name_modules
from gradscope.capture.session import Session
from gradscope.capture.state import preserved
from gradscope.errors import NothingMeasuredError
from gradscope.pipeline import read_memory_pass
from gradscope.tables import BlockTable, ModuleInfo, Options
from gradscope.workload import Batches, Workload, import_path


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
    # The first step of the memory pass is a warm-up; a lazy model needs one before that to know its parameters.
    lazy = any(is_lazy(parameter) for parameter in workload.model.parameters())
    session = Session(Options(warmup=int(lazy), lines=False, timing=False), None, surroundings)
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
    result = read_memory_pass(found, names, parents)
    return MeasuredStep(result.blocks, names.infos)
