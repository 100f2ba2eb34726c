"""Truth: the peak against torch's own profiler, started before the model is built, in the same steps unmeasured.

It is told of every allocation from the first on, and its running total needs no attribution and no guesses. The two
agree to the byte.
"""

from __future__ import annotations

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

from .measuring import bytes_of_all_tensors, check_sums, example, in_a_loop, memory_of

Step = Callable[[], object]

STEPS = 4


def total_allocated(build: Callable[[], Step], steps: int = STEPS) -> int:
    """Highest running total in the last of some steps; ``build`` makes the model and returns the step."""
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with quiet_kineto():
        profiler.start()
    try:
        step = build()
        for number in range(steps):
            with record_function(f"step {number}"):
                step()
        del step
    finally:
        with quiet_kineto():
            profiler.stop()
    return _highest(profiler, f"step {steps - 1}")


def _highest(profiler: Any, step: str) -> int:
    totals: list[tuple[int, int, int]] = []
    start, end = 0, 0
    stack = list(profiler.profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack += event.children
        if event.name == "[memory]":
            fields = event.extra_fields
            totals.append((event.start_time_ns, fields.total_allocated, fields.alloc_size))
        elif event.name == step:
            start, end = event.start_time_ns, event.end_time_ns
    totals.sort(key=lambda entry: entry[0])
    before = totals[0][1] - totals[0][2]
    return max(total - before for time, total, _ in totals if start <= time <= end)


def in_model_mode(make: Callable[[], Workload]) -> int:
    """gradscope's peak, without what was alive before the model was built."""
    foreign = bytes_of_all_tensors()
    data = gradscope.profile(make(), steps=1, warmup=1, device="cpu").data
    check_sums(data)
    return memory_of(data).peak_bytes - foreign


def in_loop_mode(build: Callable[[], Step]) -> tuple[int, int]:
    """The same of a loop of one's own, and how many steps it took."""
    foreign = bytes_of_all_tensors()
    step, taken = build(), []

    def counted() -> None:
        step()
        taken.append(1)

    return memory_of(in_a_loop(None, counted)).peak_bytes - foreign, len(taken)


def same_steps(make: Callable[[], Workload]) -> Callable[[], Step]:
    """The steps that gradscope makes of a workload, plainly."""

    def build() -> Step:
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
    return Workload(
        model, torch.arange(4 * 16).reshape(4, 16) % 50, optimizer=optimizer and optimizer(model.parameters())
    )


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
    torch.manual_seed(0)
    model = module.ConvNet(channels=8, blocks=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return Workload(model, (torch.randn(4, 3, 16, 16),), loss=module.loss, optimizer=optimizer)


def recurrent() -> Workload:
    torch.manual_seed(0)
    ids = torch.randint(64, (4, 9))
    return Workload(example("recurrent.py").Recurrent(64, 16), {"idx": ids[:, :-1], "targets": ids[:, 1:]})


EXAMPLES: dict[str, Callable[[], Workload]] = {
    "gpt": gpt,
    "attention, copying": lambda: attention("CopyingAttention"),
    "attention, viewing": lambda: attention("ViewingAttention"),
    "checkpoint": lambda: blocks(False),
    "checkpoint, reentrant": lambda: blocks(True),
    "convnet": convnet,
    "recurrent": recurrent,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example(name: str) -> None:
    assert in_model_mode(EXAMPLES[name]) == total_allocated(same_steps(EXAMPLES[name]))


# --------------------------------------------------------------------------------------------------------------------
# Loops of one's own
# --------------------------------------------------------------------------------------------------------------------


def keeping_the_last_loss_and_output() -> Step:
    model, x, kept = network(), torch.randn(32, 64), {}

    def step() -> None:
        model.zero_grad()
        kept["output"] = model(x)  # while the old one is there
        kept["loss"] = kept["output"].square().mean()
        kept["loss"].backward()

    return step


def accumulating() -> Step:
    model, batches = network(), torch.randn(3, 32, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        for x in batches:
            (model(x).square().mean() / 3).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def two_models() -> Step:
    maker, judge = nn.Linear(8, 64), network()
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in (maker, judge)]

    def step() -> None:
        made = maker(torch.randn(32, 8))
        optimizers[1].zero_grad()
        (judge(torch.randn(32, 64)).mean() - judge(made.detach()).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        judge(made).mean().backward()
        optimizers[0].step()

    return step


def leaking_graphs() -> Step:
    """Keeps every graph: attention's, whose copies of q, k and v no Python object has ever seen."""
    model = nn.MultiheadAttention(16, 4, batch_first=True)
    x, losses = torch.randn(4, 8, 16), []

    def step() -> None:
        model.zero_grad()
        loss = model(x, x, x, need_weights=True)[0].square().mean()
        loss.backward(retain_graph=True)
        losses.append(loss)

    return step


def a_closure_inside_the_optimizer() -> Step:
    """LBFGS runs forward and backward itself, several times a step, and keeps its history in lists."""
    model, x = network(), torch.randn(32, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def writing_into_views() -> Step:
    model, x = network(), torch.randn(32, 64, requires_grad=True)

    def step() -> None:
        model.zero_grad()
        x.grad = None
        y = model(x)
        z = y.clone()
        z[:, :4].mul_(y[:, 4:].exp())
        z[0] = 0
        z.square().mean().backward()

    return step


def averaging_weights() -> Step:
    """A second model, which no step calls, and statistics that a hook keeps for the next step."""
    model, x, seen = network(), torch.randn(32, 64), []
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model[1].register_forward_hook(lambda _module, _args, out: seen.__setitem__(slice(None), [out.detach().std(0)]))

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        average.update_parameters(model)

    return step


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Sigmoid(), nn.LayerNorm(128), nn.Linear(128, 8))


LOOPS = (
    keeping_the_last_loss_and_output,
    accumulating,
    two_models,
    a_closure_inside_the_optimizer,
    writing_into_views,
    averaging_weights,
    leaking_graphs,
)


@pytest.mark.parametrize("build", LOOPS, ids=lambda build: build.__name__.replace("_", " "))
def test_a_loop(build: Callable[[], Step]) -> None:
    peak, steps = in_loop_mode(build)
    assert peak == total_allocated(build, steps)
