"""Code of the user's that runs while gradscope goes from one step to the next: handlers of signals, finalizers."""

from __future__ import annotations

import torch
from torch import nn

from gradscope.capture.session import Session
from gradscope.capture.training import StepFinder
from gradscope.tables import Options, Progress


class _Trains(Progress):
    """Trains where a handler might: in the middle of a step's end."""

    session: Session | None = None

    def phase(self, name: str, total: int | None = None) -> None:
        _backward()

    def advance(self) -> None:
        _backward()


def _backward() -> None:
    nn.Linear(2, 1)(torch.ones(1, 2)).sum().backward()


def test_backward_passes_meanwhile_end_no_step() -> None:
    options = Options(steps=2, warmup=2)
    steps = {}
    for progress in (Progress(), _Trains()):
        session = Session(options, progress)
        finder = StepFinder(session, run_to_end=True)
        done = 0
        with session, finder.watching():
            while not session.finished:
                _backward()
                done += 1
                assert done < 60
        steps[type(progress)] = done, session.capture.steps_done
        assert not session.run.guard.failed
    assert steps[Progress] == steps[_Trains]
