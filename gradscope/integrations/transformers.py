"""A callback for Hugging Face's ``Trainer``, and whatever is built on it (TRL's trainers, say)."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gradscope.integrations.measurement import Measurement
from gradscope.report.report import Report


class GradscopeCallback(TrainerCallback):
    """Profiles the first optimizer steps of a training; gradient accumulation is a part of its step.

    ``Trainer(..., callbacks=[GradscopeCallback("run")])`` prints the report and writes run.json and run.html.

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

    @property
    def report(self) -> Report | None:
        """What was measured; None before."""
        return self._measurement.report

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin with the model that is trained."""
        self._measurement.begin(kwargs.get("model"), state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """An optimizer step has ended."""
        self._measurement.step()
        if self._measurement.stops:
            control.should_training_stop = True

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """Something is evaluated: there is no hook before its first batch."""
        self._measurement.pause()

    def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """What has run since the last step was an evaluation; a step that it ran inside of is left out."""
        self._measurement.pause()
        self._measurement.resume()

    on_predict = on_save = on_evaluate

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """A step begins, also after an evaluation of the program's own."""
        self._measurement.resume()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report a training that was shorter."""
        self._measurement.end()
