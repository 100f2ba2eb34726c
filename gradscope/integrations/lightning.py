"""A callback for Lightning's ``Trainer``."""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from gradscope.integrations.measurement import Measurement
from gradscope.report.report import Report

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def _callback_class() -> Any:
    """Lightning's Callback: of the package that the program uses, which has an older name too."""
    older = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    if older or importlib.util.find_spec("lightning") is None:
        return importlib.import_module("pytorch_lightning").Callback
    return importlib.import_module("lightning.pytorch").Callback


class GradscopeCallback(_callback_class()):  # type: ignore[misc]
    """Profiles the first optimizer steps of a training; batches that accumulate are a part of their step.

    ``Trainer(callbacks=[GradscopeCallback("run")])`` prints the report and writes run.json and run.html.

    Args:
        output: PREFIX of the files; None writes none.
        stop: end the training when enough is measured; not where there are several ranks.
        options: of :class:`gradscope.profiling`: steps, warmup, lines, memory, ignore, memory_budget.
    """

    def __init__(self, output: str | None = "gradscope-trainer", *, stop: bool = False, **options: Any) -> None:
        self._measurement = Measurement(output, options, stop=stop)
        self._steps = 0

    @property
    def report(self) -> Report | None:
        """What was measured; None before."""
        return self._measurement.report

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the module that is trained."""
        self._steps = trainer.global_step
        self._measurement.begin(pl_module)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """A batch has ended, and with it an optimizer step or not; several optimizers step in one batch."""
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            if self._measurement.step() and self._measurement.stops:
                trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a training that was shorter."""
        self._measurement.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of a training that ended in an error."""
        self._measurement.drop()
