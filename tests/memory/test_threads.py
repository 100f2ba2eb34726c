"""What other threads allocate torch does not record: figures that are incomplete say so, and only those."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .measuring import in_a_loop

X = torch.ones(8, 4)
SAID = (
    " also ran in other threads: torch does not record their allocations, so the memory figures omit them or do "
    "not know their layer"
)


def in_a_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def forward_in_a_thread(model: nn.Module) -> None:
    outputs: list[Tensor] = []
    in_a_thread(lambda: outputs.append(model(X)))
    outputs[0].sum().backward()


def all_in_a_thread(model: nn.Module) -> None:
    in_a_thread(lambda: model(X).sum().backward())


def backward_in_a_thread(model: nn.Module) -> None:
    loss = model(X).sum()
    in_a_thread(loss.backward)


def deep_in_the_engine(model: nn.Module) -> None:
    """Passes inside each other, so many that the engine runs some in threads of its own."""

    def nested(x: Tensor, depth: int) -> Tensor:
        if depth == 0:
            out: Tensor = model(x)
            return out
        inner: Tensor = checkpoint(nested, x, depth - 1, use_reentrant=True)
        return inner

    nested(X.clone().requires_grad_(), 70).sum().backward()


def work_without_modules_in_a_thread(model: nn.Module) -> None:
    in_a_thread(lambda: X + 1)
    model(X).sum().backward()


STEPS: dict[Callable[[nn.Module], None], str] = {
    forward_in_a_thread: "forward",
    all_in_a_thread: "forward and backward",
    backward_in_a_thread: "backward",
    deep_in_the_engine: "",
    work_without_modules_in_a_thread: "",
}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__.replace("_", " "))
def test_memory_of_other_threads(step: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
    data = in_a_loop(model, lambda: step(model))
    said = [note for note in data.notes if "torch does not record" in note]
    assert said == ([STEPS[step] + SAID] if STEPS[step] else [])
