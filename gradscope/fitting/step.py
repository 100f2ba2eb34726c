"""One training step of a workload with its memory measured, block by block."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradscope.capture.budget import left_out_note
from gradscope.capture.memory import Surroundings
from gradscope.capture.model_steps import run_steps, seed_everything
from gradscope.capture.naming import name_called
from gradscope.capture.session import Session
from gradscope.capture.state import preserved
from gradscope.errors import NothingMeasuredError
from gradscope.readings import read_memory_pass
from gradscope.tables import MEMORY_BUDGET, BlockTable, MemoryCategory, ModuleInfo, Options
from gradscope.workload import Batches, Workload, import_path


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of one step."""

    blocks: BlockTable
    infos: Sequence[ModuleInfo]  # what the blocks' layers number
    foreign_bytes: int  # of tensors that are not the model's, alive all the time and not among the blocks


def measure_step(
    workload: Workload,
    device: torch.device,
    ignored: Sequence[torch.Tensor],
    seed: int | None,
    memory_budget: int = MEMORY_BUDGET,
) -> StepMemory:
    """Run a few steps of ``workload`` and measure the memory of the last; everything is put back as it was.

    Args:
        workload: its batch is one batch, on ``device``.
        device: where the model is moved to.
        ignored: tensors that are alive though training would not hold them.
        seed: set before the first step.
        memory_budget: bytes that measuring may take.

    Raises:
        NothingMeasuredError: no step had a backward pass, or one makes more notes than fit into the budget.
        Exception: whatever the model raises.
    """
    gc.collect()  # cycles of an earlier step would count as memory of this one
    optimizers = [] if workload.optimizer is None else [workload.optimizer]
    surroundings = Surroundings(models=lambda: (workload.model,), optimizers=optimizers)
    # It tells how many operations a step has, and a lazy model its parameters.
    options = Options(warmup=1, lines=False, timing=False, memory_budget=memory_budget)
    session = Session(options, None, surroundings)
    with preserved(workload.model, workload.batch, workload.optimizer, device) as copies:
        surroundings.ignored = (*copies, *ignored)
        seed_everything(seed)
        with session, import_path(workload.folder):
            run_steps(workload, Batches(workload.batch, device), session)
    found = session.capture.memory
    if found is None and session.capture.left_out:
        raise NothingMeasuredError(f"{left_out_note(session.capture.left_out, session.capture.rows, memory_budget)}.")
    if found is None:
        raise NothingMeasuredError("no memory was measured.")
    names = name_called(found.recorder.registry, list(found.recorder.roots), {"": workload.model})
    parents = names.calling_parents([names.rows[label] for label in found.recorder.called() if label >= 0])
    blocks, foreign_bytes = _without_foreign(read_memory_pass(found, names, parents).blocks)
    session.capture.let_go()
    return StepMemory(blocks, names.infos, foreign_bytes)


def _without_foreign(blocks: BlockTable) -> tuple[BlockTable, int]:
    """The blocks without tensors that just happen to be alive in this process, and the bytes of these."""
    lasting = (blocks.born < 0) & (blocks.died >= blocks.events)
    foreign = lasting & np.array([category == MemoryCategory.OTHER.value for category in blocks.category], bool)
    kept = np.flatnonzero(~foreign)
    table = BlockTable(
        events=blocks.events,
        bytes=blocks.bytes[kept],
        born=blocks.born[kept],
        died=blocks.died[kept],
        category=tuple(blocks.category[index] for index in kept.tolist()),
        layer=blocks.layer[kept],
        line=blocks.line[kept],
        op=tuple(blocks.op[index] for index in kept.tolist()),
        leaf=tuple(blocks.leaf[index] for index in kept.tolist()),
    )
    return table, int(blocks.bytes[foreign].sum())
