"""Runs a few small batch sizes and keeps the memory of one step of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_tb

import torch

from gradscope import units, versions
from gradscope.capture.model_steps import Stepper
from gradscope.capture.state import preserved
from gradscope.errors import GradscopeError, WorkloadError
from gradscope.fitting.align import BatchRun
from gradscope.fitting.options import FitOptions, add_optimizer
from gradscope.fitting.recurrent import find_time_major
from gradscope.fitting.room import lacks_room, require_room
from gradscope.fitting.shapes import BatchShapes
from gradscope.fitting.sources import ScaledSource, SizeSource, cannot_scale
from gradscope.fitting.step import StepMemory, measure_step
from gradscope.tables import ModuleInfo, Progress
from gradscope.workload import Workload, import_path, resolve_device, to_device


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
            f"tensors of {units.size(foreign_bytes)} that are not the model's were alive in this process: not counted"
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
        raise cannot_scale(f"its first dimension is time to {name}, which has batch_first=False", source.target)
