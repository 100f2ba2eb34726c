"""The Python API: ``gradscope.profile`` for a model, ``gradscope.profiling`` around a loop of one's own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from gradscope import compat
from gradscope.capture.memory import Surroundings
from gradscope.capture.session import Session
from gradscope.diagnose.engine import require_known
from gradscope.errors import UsageError
from gradscope.pipeline import outcome_of, profile_workload
from gradscope.recording.record import Recorder
from gradscope.report.report import Report
from gradscope.tables import MEMORY_BUDGET, Options, WorkloadInfo
from gradscope.trace.reader import TraceReader
from gradscope.units import bytes_of
from gradscope.workload import Workload


def profile(
    model: nn.Module | Workload,
    batch: Any = None,
    loss: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    steps: int = 5,
    warmup: int = 3,
    device: str = "auto",
    seed: int | None = None,
    lines: bool = True,
    memory: bool = True,
    ignore: Collection[str] = (),
    memory_budget: int | str = MEMORY_BUDGET,
) -> Report:
    """Measure training steps of ``model`` and say where the backward pass goes.

    Args:
        model: an ``nn.Module``, or a :class:`Workload` that holds everything.
        batch: a tensor (``model(batch)``), a tuple (``model(*batch)``), a dict (``model(**batch)``), or an iterator
            of these.
        loss: ``loss(output, batch)`` -> scalar tensor. Without it the output itself, ``output.loss``, the one scalar
            with a gradient in it, or else the mean of its floating tensors; the report says which.
        optimizer: stepped at the end of each step if given; parameters and its state are restored afterwards.
        steps: measured steps.
        warmup: steps before anything is measured.
        device: "cpu", "cuda", or "auto": where the model is, or CUDA where there is one.
        seed: for ``torch.manual_seed`` before the first step.
        lines: also measure by source line.
        memory: also measure memory, in two more steps.
        ignore: names of rules whose findings are left out, see ``gradscope rules``.
        memory_budget: bytes, or a text as "4GiB", that the notes of one pass may take. A step of more operations is
            measured in less detail; the report says which.

    Returns:
        A :class:`Report`. The model, its gradients, its buffers, the optimizer and the random state are as before.

    Raises:
        WorkloadError: the model, batch and loss do not make a training step.
        UsageError: ``ignore`` names a rule that there is not.
        NothingMeasuredError: no step could be measured.
        Exception: whatever the model raises, with its own traceback.
    """
    workload = model if isinstance(model, Workload) else Workload(model, batch, loss=loss, optimizer=optimizer)
    require_known(ignore)
    options = Options(
        steps=steps,
        warmup=warmup,
        device=device,
        seed=seed,
        lines=lines,
        memory=memory,
        ignore=tuple(ignore),
        memory_budget=bytes_of(memory_budget, "memory_budget"),
    )
    outcome = profile_workload(workload, options)
    try:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.report is not None
        return outcome.report
    finally:
        del outcome  # the error's traceback holds this frame: what is caught is let go with all that it holds


class profiling:  # noqa: N801 - used like a function: with gradscope.profiling(model) as prof
    """Measure a training loop of one's own.

    ::

        with gradscope.profiling(model, steps=5, warmup=3) as prof:
            for x, y in loader:
                train_step(x, y)
                if prof.step():  # True when enough is measured
                    break
        print(prof.report)

    Args:
        model: names the layers; without it the modules that run are named by their classes.
        steps, warmup, lines, memory, ignore, memory_budget: as in :func:`profile`.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        steps: int = 5,
        warmup: int = 3,
        lines: bool = True,
        memory: bool = True,
        ignore: Collection[str] = (),
        memory_budget: int | str = MEMORY_BUDGET,
    ) -> None:
        require_known(ignore)
        compat.require()
        self._model = model
        self._options = Options(
            steps=steps,
            warmup=warmup,
            lines=lines,
            memory=memory,
            ignore=tuple(ignore),
            memory_budget=bytes_of(memory_budget, "memory_budget"),
        )
        models = () if model is None else (model,)
        self._recorder = Recorder()
        surroundings = Surroundings(models=lambda: models)
        self._session = Session(self._options, None, surroundings, self._recorder, TraceReader())
        self._report: Report | None = None
        self._used = False

    @property
    def displaceable(self) -> bool:
        """Whether it ends where another measurement of the process begins, instead of keeping that from it."""
        return self._session.displaceable

    @displaceable.setter
    def displaceable(self, value: bool) -> None:
        self._session.displaceable = value

    @property
    def displaced_after(self) -> int | None:
        """How many steps it had seen when it ended so; None where it did not."""
        return self._session.displaced_after

    def __enter__(self) -> profiling:
        if self._used:
            raise UsageError(
                "this gradscope.profiling has been used: it measures one loop.\n"
                "Make another one for the next: with gradscope.profiling(model) as prof:"
            )
        self._session.__enter__()
        self._used = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._session.close()

    def step(self) -> bool:
        """A training step has ended. True when enough has been measured."""
        return self._session.boundary()

    def pause(self) -> None:
        """Leave out what runs until :meth:`resume`, an evaluation say; call it between two steps.

        A step that it is called inside of, after the forward pass say, is left out whole.
        """
        self._session.pause()

    def resume(self) -> None:
        """Measure on: the next step begins."""
        self._session.resume()

    @property
    def report(self) -> Report:
        """Return the report of the steps measured so far; ask for it after the ``with`` block.

        Raises:
            NothingMeasuredError: the loop ended before one step was measured.
        """
        if self._report is None:
            self._session.close()
            about = WorkloadInfo(
                target="", mode="loop", steps=self._options.steps, warmup=self._options.warmup, loss=None
            )
            known = {"": self._model} if self._model is not None else {}
            outcome = outcome_of(self._session.capture, about, known, None, None, None, self._recorder)
            assert outcome.report is not None
            self._report = outcome.report
            try:
                if outcome.error is not None:  # stopped while reasons were looked for: whoever asks again has the rest
                    raise outcome.error
            finally:
                del outcome  # as in profile
        return self._report
