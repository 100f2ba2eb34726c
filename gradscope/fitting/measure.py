"""Runs a few small batch sizes and keeps the memory of one step of each, block by block."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

import numpy as np
import torch
from torch import nn

from gradscope import units, versions
from gradscope.capture.budget import left_out_note
from gradscope.capture.memory import Surroundings
from gradscope.capture.model_steps import Stepper, run_steps, seed_everything
from gradscope.capture.naming import name_called
from gradscope.capture.session import Session
from gradscope.capture.state import preserved
from gradscope.errors import GradscopeError, NothingMeasuredError, WorkloadError
from gradscope.fitting.align import BatchRun
from gradscope.fitting.batches import ScaledSource, SizeSource, cannot_scale
from gradscope.fitting.fake import BatchShapes
from gradscope.fitting.options import FitOptions, add_optimizer
from gradscope.readings import read_memory_pass
from gradscope.tables import MEMORY_BUDGET, BlockTable, MemoryCategory, ModuleInfo, Options, Progress
from gradscope.tree import named_modules_of
from gradscope.workload import Batches, Workload, call_model, import_path, resolve_device, to_device


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
        raise NothingMeasuredError("memory was not measured.")
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


_SHARE = 0.9  # of what is free; the rest is for what the step does not account for


def free_bytes(device: torch.device) -> int | None:
    """Memory that a step on ``device`` may take now; None where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + unused
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def lacks_room(size: int, peaks: Mapping[int, int], device: torch.device) -> str | None:
    """Why a step at ``size`` is not tried; None where it may be.

    Args:
        peaks: of the sizes measured so far.
    """
    free = free_bytes(device)
    if not peaks or free is None:
        return None
    needed = _expected(size, peaks)
    # What the model holds between steps is in use already.
    if needed - min(peaks.values()) <= _SHARE * free:
        return None
    return f"a step at batch size {size} would take about {units.size(needed)}, and {units.size(free)} are free"


def require_room(size: int, peaks: Mapping[int, int], device: torch.device) -> None:
    """Raise :class:`WorkloadError` if :func:`lacks_room` says why not."""
    reason = lacks_room(size, peaks, device)
    if reason is not None:
        raise WorkloadError(f"{reason}.\nMeasure smaller batches: --measure 1,2,3")


def _expected(size: int, peaks: Mapping[int, int]) -> int:
    known = sorted(peaks)
    last = known[-1]
    if len(known) == 1:
        return peaks[last] * size // last
    slope = (peaks[last] - peaks[known[0]]) / (last - known[0])
    return round(peaks[last] + max(slope, 0) * (size - last))


_Sizes = dict[str, list[tuple[int, ...]]]


def find_time_major(model: nn.Module, batches: Sequence[Any]) -> str | None:
    """Name of a layer with ``batch_first=False`` whose time, and not whose batch, changes from batch to batch.

    ``nn.LSTM`` and its kind take (time, batch, features) unless told otherwise, and (time, features) for one sample.
    A model that turns its samples first before it calls them is all right. The model is called once for each of
    ``batches``, without a graph, and only if it has such a layer.
    """
    layers = {
        name or type(module).__name__: module
        for name, module in named_modules_of(model)
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first
    }
    if not layers:
        return None
    seen: list[_Sizes] = []
    for batch in batches:
        shapes: _Sizes = {}
        handles = [module.register_forward_pre_hook(_noting(shapes, name)) for name, module in layers.items()]
        try:
            with torch.no_grad():
                call_model(model, batch)
        finally:
            for handle in handles:
                handle.remove()
        seen.append(shapes)
    first, last = seen[0], seen[-1]
    for name in layers:
        for before, after in zip(first.get(name, ()), last.get(name, ()), strict=False):
            if before[0] != after[0] and before[1:] == after[1:]:
                return f"{name} ({type(layers[name]).__name__})"
    return None


def _noting(shapes: _Sizes, name: str) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor):
            shapes.setdefault(name, []).append(tuple(args[0].shape))

    return hook


@dataclass(frozen=True, slots=True)
class MeasuredRuns:
    """What the runs at small batch sizes left behind."""

    target: str
    device: torch.device
    runs: Mapping[int, BatchRun]  # by batch size, ascending; without the check where that did not fit
    infos: Sequence[ModuleInfo]  # of the largest size that the prediction is made from
    workload: Workload  # of that size
    shapes: BatchShapes
    notes: tuple[str, ...]


def measure_all(source: SizeSource, settings: FitOptions, progress: Progress) -> MeasuredRuns:
    """Measure every size of ``settings``, smallest first.

    Raises:
        WorkloadError: the batch cannot be made in a size, or a step of it does not fit into the memory that is free.
        UsageError: the device or the optimizer cannot be used.
        Exception: what the user's function raises; what the model raises on a batch that the user's function made.
    """
    progress.phase("measuring small batches", len(settings.measured) + 1)
    if isinstance(source, ScaledSource):
        _check_order(source, settings)
    runs: dict[int, BatchRun] = {}
    shapes = BatchShapes(source.target or "workload()")
    notes = [*versions.untried(torch.__version__), *source.notes]
    device = torch.device("cpu")
    infos: Sequence[ModuleInfo] = ()
    foreign_bytes = 0
    for size in (*settings.measured, settings.check):
        peaks = {known: run.peak_bytes for known, run in runs.items()}
        if size != settings.check:
            require_room(size, peaks, device)
        elif reason := lacks_room(size, peaks, device):
            notes.append(f"{reason}: the prediction was not checked there")
            break
        workload = source.at(size)
        add_optimizer(workload, settings.optimizer)
        device = resolve_device(settings.device, workload.model)
        workload.batch = to_device(workload.batch, device)
        shapes.note(size, workload.batch)
        step = _measured(source, workload, size, device, settings)
        runs[size] = BatchRun(size, step.blocks, tuple(info.path for info in step.infos))
        if size != settings.check:
            infos = step.infos
        foreign_bytes = step.foreign_bytes
        if size == settings.measured[1]:
            shapes.require_growth()
        del workload, step  # the next size must not find them alive
        progress.advance()
    # Below a hundredth of a step, or a megabyte, nobody would miss them in a prediction.
    if foreign_bytes > max(0.01 * max(run.peak_bytes for run in runs.values()), 1_000_000):
        notes.append(
            f"{units.size(foreign_bytes)} of tensors outside the model were alive in this process; they are not counted"
        )
    kept = source.at(settings.measured[-1])
    add_optimizer(kept, settings.optimizer)
    return MeasuredRuns(source.target, device, runs, infos, kept, shapes, tuple(notes))


def _measured(
    source: SizeSource, workload: Workload, size: int, device: torch.device, settings: FitOptions
) -> StepMemory:
    try:
        return measure_step(workload, device, source.keeps(), settings.seed, settings.memory_budget)
    except GradscopeError:
        raise
    except Exception as error:
        if _is_out_of_memory(error):
            raise WorkloadError(
                f"a step at batch size {size} runs out of memory.\nMeasure smaller batches: --measure 1,2,3"
            ) from error
        refusal = source.refusal(size, error)
        if refusal is None or _is_ours(error):
            raise
        raise refusal from error


def _is_ours(error: Exception) -> bool:
    """Check that the error came from around the training step: a defect of gradscope's, nothing of the model's."""
    frames = [(frame.f_globals.get("__name__"), frame.f_code.co_name) for frame, _ in walk_tb(error.__traceback__)]
    return (Stepper.__module__, Stepper.step.__name__) not in frames


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)


def _check_order(source: ScaledSource, settings: FitOptions) -> None:
    """Refuse a batch whose first dimension the model takes for time."""
    model = source.workload.model
    device = resolve_device(settings.device, model)
    sizes = settings.measured[:2]
    with preserved(model, device=device), import_path(source.workload.folder):
        try:
            name = find_time_major(model, [to_device(source.at(size).batch, device) for size in sizes])
        except GradscopeError:
            raise
        except Exception as error:
            raise source.refusal(sizes[0], error) from error
    if name is not None:
        raise cannot_scale(f"{name} treats its first dimension as time (batch_first=False)", source.target)
