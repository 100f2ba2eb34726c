"""Truth: the peak against torch's own profiler, started before the model is built, in the same steps unmeasured.

It is told of every allocation from the first on, and its running total needs no attribution and no guesses. The two
agree to the byte.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope.compat import quiet_kineto
from gradscope.workload import Workload, call_model, scalar_loss

from .measuring import check_sums, example, in_a_loop, memory_of

STEPS = 4  # the last one is compared


def total_allocated(build: Callable[[], Callable[[], object]]) -> int:
    """Highest running total in the last of some steps; ``build`` makes the model and returns the step."""
    gc.collect()
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with quiet_kineto():
        profiler.start()
    try:
        step = build()
        for number in range(STEPS):
            with record_function(f"step {number}"):
                step()
        del step
    finally:
        with quiet_kineto():
            profiler.stop()
    return _highest(profiler)


def _highest(profiler: Any) -> int:
    totals: list[tuple[int, int, int]] = []
    start, end = 0, 0
    stack = list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack += event.children
        if event.name == "[memory]":
            fields = event.extra_fields
            totals.append((event.start_time_ns, fields.total_allocated, fields.alloc_size))
        elif event.name == f"step {STEPS - 1}":
            start, end = event.start_time_ns, event.end_time_ns
    totals.sort(key=lambda entry: entry[0])
    before = totals[0][1] - totals[0][2]
    return max(total - before for time, total, _ in totals if start <= time <= end)


def in_model_mode(make: Callable[[], Workload]) -> int:
    """gradscope's peak, without what was alive before the model was built."""
    gc.collect()
    foreign = sum(sizes_of_all_tensors().values())
    data = gradscope.profile(make(), steps=1, warmup=1, device="cpu", seed=0).data
    check_sums(data)
    return memory_of(data).peak_bytes - foreign


def sizes_of_all_tensors() -> dict[int, int]:
    """Bytes of each storage that Python holds."""
    tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


def same_steps(make: Callable[[], Workload]) -> Callable[[], Callable[[], object]]:
    """The steps that gradscope makes of a workload, plainly."""

    def build() -> Callable[[], object]:
        workload = make()
        parameters = list(workload.model.parameters())

        def forward_backward() -> None:
            for parameter in parameters:
                parameter.grad = None
            output = call_model(workload.model, workload.batch)
            loss, _ = scalar_loss(output, workload.batch, workload.loss)
            loss.backward()

        def step() -> None:
            forward_backward()
            if workload.optimizer is not None:
                workload.optimizer.step()

        return step

    return build


# --------------------------------------------------------------------------------------------------------------------
# Models of our own
# --------------------------------------------------------------------------------------------------------------------


class Zoo(nn.Module):
    """Whatever allocates in its own way: norms, dropout, attention, a recurrent layer, a checkpoint, in-place ops."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.drop = nn.Dropout(0.1)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.gru = nn.GRU(32, 32, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 50)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.gru(self.block(self.drop(self.embed(ids))))[0]
        x = x + checkpoint(self.inner, x, use_reentrant=False)
        logits = self.head(x.relu_())
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


class Mixed(Zoo):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(ids)


def zoo(kind: type[nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer] | None) -> Workload:
    torch.manual_seed(0)
    model = kind()
    return Workload(model, torch.arange(4 * 16).reshape(4, 16) % 50, optimizer=optimizer and optimizer(model.parameters()))


OWN: dict[str, Callable[[], Workload]] = {
    "no optimizer": lambda: zoo(Zoo, None),
    "Adam": lambda: zoo(Zoo, torch.optim.Adam),
    "Adam, foreach": lambda: zoo(Zoo, lambda p: torch.optim.Adam(p, foreach=True)),
    "SGD under autocast": lambda: zoo(Mixed, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
}


@pytest.mark.parametrize("name", OWN)
def test_a_model_of_many_kinds(name: str) -> None:
    assert in_model_mode(OWN[name]) == total_allocated(same_steps(OWN[name]))


# --------------------------------------------------------------------------------------------------------------------
# Examples
# --------------------------------------------------------------------------------------------------------------------


def gpt() -> Workload:
    module = example("gpt.py")
    model, batch = module.make(module.Config(n_layer=2, n_embd=64, block_size=32, batch_size=2))
    return Workload(model, batch)


def attention(kind: str) -> Workload:
    module = example("attention.py")
    torch.manual_seed(0)
    model = nn.Sequential(getattr(module, kind)(32, 4, 16), getattr(module, kind)(32, 4, 16))
    return Workload(model, torch.randn(2, 16, 32), loss=module.loss)


def blocks(reentrant: bool | None) -> Workload:
    torch.manual_seed(0)
    return Workload(example("checkpoint.py").Checkpointed(64, 3, reentrant), torch.randn(32, 64))


def convnet() -> Workload:
    module = example("convnet.py")
    whole = module.workload()
    raise AssertionError(whole)


EXAMPLES: dict[str, Callable[[], Workload]] = {
    "gpt": gpt,
    "attention, copying": lambda: attention("CopyingAttention"),
    "attention, viewing": lambda: attention("ViewingAttention"),
    "checkpoint": lambda: blocks(False),
    "checkpoint, reentrant": lambda: blocks(True),
    "convnet": convnet,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str) -> None:
    assert in_model_mode(EXAMPLES[name]) == total_allocated(same_steps(EXAMPLES[name]))
