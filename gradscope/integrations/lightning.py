"""A callback for Lightning's ``Trainer``."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

from gradscope.integrations.measurement import Measurement
from gradscope.report.report import Report

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


_NO_STEP = (
    "a step ends where trainer.global_step grows, which it did not in {} batches.\nIn manual optimization step what "
    "self.optimizers() returns, or measure with gradscope.profiling."
)


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
        output: PREFIX of the files, in a folder that exists; None writes none.
        stop: end the training when enough is measured; not where there are several ranks.
        options: of :class:`gradscope.profiling`: steps, warmup, lines, memory, ignore, memory_budget.

    Raises:
        GradscopeError: an option is unknown or has no meaning, or the files cannot be written.
    """

    def __init__(
        self, output: str | os.PathLike[str] | None = "gradscope-trainer", *, stop: bool = False, **options: Any
    ) -> None:
        self._measurement = Measurement(output, options, stop=stop)
        self._first = self._steps = 0  # trainer.global_step when training began, and when the last step ended
        self._batches = 0  # since then

    @property
    def report(self) -> Report | None:
        """What was measured; None before."""
        return self._measurement.report

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the module that is trained."""
        self._first = self._steps = trainer.global_step  # a training that is resumed has some
        self._batches = 0
        self._measurement.begin(pl_module, trainer)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """A batch has ended, and with it an optimizer step or not; several optimizers step in one batch."""
        self._batches += 1
        if trainer.global_step > self._steps:
            self._steps, self._batches = trainer.global_step, 0
            self._measurement.step()
            if self._measurement.stops:
                trainer.should_stop = True

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What runs now is no part of a step."""
        self._measurement.pause()

    def on_save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Nor is this; there is no hook behind it but that of the next batch."""
        self._measurement.pause()

    def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
        """A step begins, where not one of its batches has run: else it is left out."""
        if self._batches == 0:
            self._measurement.resume()

    on_train_batch_start = on_validation_end

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report a training that was shorter."""
        grew = trainer.global_step > self._first
        self._measurement.end(None if grew or not self._batches else _NO_STEP.format(self._batches))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let go of a training that ended in an error."""
        self._measurement.drop()
