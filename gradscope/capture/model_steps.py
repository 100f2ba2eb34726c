"""Training steps of a model that gradscope was given: the loop of model mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gradscope.capture.session import Session
from gradscope.workload import Workload, call_model, scalar_loss


def run_steps(workload: Workload, batches: Iterator[Any], session: Session) -> str:
    """Run steps until the session has enough; returns what the loss was (see ``WorkloadInfo.loss``).

    Gradients start each step at None, as ``zero_grad`` leaves them.
    """
    kind = "given"
    parameters = list(workload.model.parameters())
    while True:
        batch = next(batches)
        for parameter in parameters:
            parameter.grad = None
        output = call_model(workload.model, batch)
        loss, kind = scalar_loss(output, batch, workload.loss)
        loss.backward()  # type: ignore[no-untyped-call]
        if workload.optimizer is not None:
            workload.optimizer.step()
        # Dropped before the boundary, so that no graph of this step lives into the next.
        del output, loss
        if session.boundary():
            return kind


def seed_everything(seed: int | None) -> None:
    """Seed torch on all devices; None leaves the random state alone."""
    if seed is not None:
        torch.manual_seed(seed)
