"""The order of things of a fit: measure a few small batch sizes, predict, check, judge. Read this first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gradscope import compat
from gradscope.errors import UsageError
from gradscope.fitting.batches import FactorySource, ScaledSource, SizeSource
from gradscope.fitting.judge import judge
from gradscope.fitting.measure import measure_all
from gradscope.fitting.options import Amount, FitOptions, Sizes, settings_of
from gradscope.fitting.report import FitReport
from gradscope.tables import MEMORY_BUDGET, Progress
from gradscope.workload import Factory, Workload, accepts_batch_size, describe, workload_from


def fit(
    model: nn.Module | Workload | Callable[..., Any],
    batch: Any = None,
    loss: Any = None,
    optimizer: torch.optim.Optimizer | str | None = None,
    *,
    batch_sizes: Sizes,
    device_memory: Amount | None = None,
    reserve: Amount | None = None,
    measure: Sizes | None = None,
    device: str = "auto",
    seed: int | None = None,
    memory_budget: Amount = MEMORY_BUDGET,
) -> FitReport:
    """Predict the peak memory of a training step at batch sizes that are not run.

    Args:
        model: an ``nn.Module`` with its ``batch`` and ``loss`` as in :func:`gradscope.profile`; a :class:`Workload`;
            or a function ``workload(batch_size)`` that returns what a model file's does.
        batch: of any size; it is cut, or its rows repeated, along the first dimension.
        loss: see ``model``.
        optimizer: an optimizer of the model's parameters, or "adam", "adamw" or "sgd" for a new one of torch's.
        batch_sizes: to be predicted: numbers, or "8,16,32".
        device_memory: "6GiB", "24g", or bytes. None: the CUDA device's own; on a CPU nothing is judged.
        reserve: part of ``device_memory`` that the tensors of a step shall leave free: "10%" (the default), "600MiB".
        measure: three batch sizes to run and predict from, and a fourth to check with; (2, 3, 4, 8) by default.
        device: where the steps run: "cpu", "cuda", or "auto": where the model is, or CUDA where there is one.
        seed: for ``torch.manual_seed`` before each measured size.
        memory_budget: bytes, or a text as "4GiB", that measuring a step may take, beside the step itself.

    Returns:
        A :class:`FitReport`. The model, its gradients, its buffers, the optimizer and the random state are as before.

    Raises:
        UsageError: an argument has a value that cannot be used.
        NothingMeasuredError: a step makes more notes than fit into the budget.
        WorkloadError: the batch cannot be made in other sizes; the message shows how to supply a function that can.
        Exception: whatever the model raises, with its own traceback.
    """
    name = optimizer if isinstance(optimizer, str) else None
    settings = settings_of(
        batch_sizes,
        measure=measure,
        device_memory=device_memory,
        reserve=reserve,
        optimizer=name,
        device=device,
        seed=seed,
        memory_budget=memory_budget,
    )
    own = None if isinstance(optimizer, str) else optimizer
    return fit_source(_source(model, batch, loss, own), settings)


def _source(model: Any, batch: Any, loss: Any, optimizer: torch.optim.Optimizer | None) -> SizeSource:
    if isinstance(model, Workload):
        return ScaledSource(model)
    if isinstance(model, nn.Module):
        return ScaledSource(Workload(model, batch, loss=loss, optimizer=optimizer))
    if not accepts_batch_size(model):
        raise UsageError(
            f"the first argument is {describe(model)}.\n"
            "Give a model, a gradscope.Workload, or a function that has a parameter batch_size."
        )
    if batch is not None or loss is not None or optimizer is not None:
        raise UsageError("a function that creates the workload also gives its batch, loss and optimizer: omit them.")

    def make(size: int) -> Workload:
        return workload_from(model(batch_size=size), where=f"workload(batch_size={size})", target="")

    return FactorySource(make, "")


def source_of(factory: Factory) -> SizeSource:
    """Where the workloads of a loaded TARGET come from.

    Raises:
        WorkloadError: the batch cannot be scaled; the message shows what to write instead.
        BaseException: whatever the user's function raises.
    """
    if factory.takes_batch_size:
        return FactorySource(factory.make, factory.target)
    return ScaledSource(factory.make())


def fit_source(source: SizeSource, settings: FitOptions, progress: Progress | None = None) -> FitReport:
    """Measure, predict, check and judge.

    Raises:
        WorkloadError, UsageError, Exception: as :func:`fit`.
    """
    compat.require()
    progress = progress or Progress()
    measured = measure_all(source, settings, progress)
    progress.phase("predicting")
    data = judge(measured, settings)
    progress.done()
    return FitReport(data)
