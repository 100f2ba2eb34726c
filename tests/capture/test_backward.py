"""Which of the passes that the engine makes are the program's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch.utils._python_dispatch import BaseTorchDispatchMode

from gradscope.capture.backward import BackwardWatch


def test_a_pass_of_a_compilers_is_no_pass() -> None:
    """AOTAutograd goes backward through what it traces, in the step that compiles."""
    told: list[Any] = []

    @contextmanager
    def around(_roots: Any) -> Iterator[None]:
        told.append("around")
        yield

    watch, x = BackwardWatch(), torch.ones(3, requires_grad=True)
    watch.around, watch.ended = around, told.append
    with watch.installed():
        with tracing(TracingContext(None)), BaseTorchDispatchMode():
            torch.autograd.grad(x.sum(), x)
        assert not told
        x.sum().backward()
        assert told == ["around", False]
        with tracing(TracingContext(None)):  # a program's own
            x.sum().backward()
    assert told == ["around", False] * 2
