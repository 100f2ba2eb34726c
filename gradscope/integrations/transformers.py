"""A callback for Hugging Face's ``Trainer``, and whatever is built on it (TRL's trainers, say)."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gradscope.integrations.measurement import Measurement
from gradscope.report.report import Report


class GradscopeCallback(TrainerCallback):
    """Profiles the first optimizer steps of a training; gradient accumulation is a part of its step.

    ``Trainer(..., callbacks=[GradscopeCallback("run")])`` prints the report and writes run.json and run.html.

    Args:
        output: PREFIX of the files; None writes none.
        stop: end the training when enough is measured; not where there are several ranks.
        options: of :class:`gradscope.profiling`: steps, warmup, lines, memory, ignore, memory_budget.
    """

    def __init__(self, output: str | None = "gradscope-trainer", *, stop: bool = False, **options: Any) -> None:
        self._measurement = Measurement(output, options, stop=stop)

    @property
    def report(self) -> Report | None:
        """What was measured; None before."""
        return self._measurement.report

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin with the model that is trained."""
        self._measurement.begin(kwargs.get("model"))

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """An optimizer step has ended."""
        if self._measurement.step() and self._measurement.stops:
            control.should_training_stop = True

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report a training that was shorter."""
        self._measurement.end()
