"""Training steps of a model that gradscope was given: the loop of model mode."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from gradscope.capture.guard import text_of
from gradscope.capture.phases import StepRecorder
from gradscope.capture.session import Session
from gradscope.capture.state import leaves_of
from gradscope.errors import WorkloadError
from gradscope.interrupts import is_interruption
from gradscope.safe_text import cut, visible
from gradscope.tree import parameters_of
from gradscope.workload import Workload, call_model, scalar_loss


def run_steps(workload: Workload, batches: Iterator[Any], session: Session) -> str:
    """Run steps until the session has enough; returns what the loss was (see ``WorkloadInfo.loss``).

    Gradients start each step at None, as ``zero_grad`` leaves them.
    """
    stepper = Stepper(workload, session.run.recorder)
    while True:
        try:
            session.surroundings.batch = batch = next(batches)
            stepper.step(batch)
        except (Exception, SystemExit) as error:
            if not session.has_all or is_interruption(error):
                raise
            # In a step that nobody has asked for: it was to show source lines.
            if not isinstance(error, WorkloadError):
                session.capture.notes.append(
                    f"an extra step, run to find more source lines, raised {cut(visible(text_of(error)), 200)}"
                )
            return stepper.loss_kind
        if session.boundary():
            return stepper.loss_kind


class Stepper:
    """Runs one training step of a workload at a time.

    Args:
        recorder: sees all of the forward pass and of the loss, where it is at work.
    """

    def __init__(self, workload: Workload, recorder: StepRecorder | None = None) -> None:
        self.loss_kind = "given"
        self._recorder = recorder
        self._workload = workload
        self._parameters = list(parameters_of(workload.model))
        self._needs_closure = workload.optimizer is not None and _needs_closure(workload.optimizer)

    def step(self, batch: Any) -> None:
        optimizer = self._workload.optimizer
        if optimizer is not None and self._needs_closure:
            optimizer.step(lambda: self._forward_backward(batch))
            return
        self._forward_backward(batch)
        if optimizer is not None:
            optimizer.step()

    def _forward_backward(self, batch: Any) -> float:
        for leaf in (*self._parameters, *leaves_of(batch)):
            leaf.grad = None

        def forward() -> tuple[Any, torch.Tensor, str]:
            output = call_model(self._workload.model, batch)
            return output, *scalar_loss(output, batch, self._workload.loss, self._workload.model)

        # The output is held while backward runs, as a loop holds it.
        _output, loss, self.loss_kind = forward() if self._recorder is None else self._recorder.below(forward)
        loss.backward()  # type: ignore[no-untyped-call]
        # A number, not the tensor: no graph of this step lives into the next.
        return loss.item() if self._needs_closure else 0.0


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Check that the optimizer's ``step`` evaluates the model itself, as LBFGS does."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def seed_everything(seed: int | None) -> None:
    """Seed torch on all devices; None leaves the random state alone."""
    if seed is not None:
        torch.manual_seed(seed)
