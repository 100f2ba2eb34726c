"""Training loops: several models and optimizers, accumulation, compiled parts, sharded parameters."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tests.truth.burning import Burning, Meter

from .kit import Built, mean_square, network, sgd, structure, trained


@structure()
def average_teacher(meter: Meter) -> Built:
    """A teacher that is a running mean of the student."""
    model = nn.ModuleDict({"student": network()})
    model["teacher"] = copy.deepcopy(model["student"]).requires_grad_(False)
    student, teacher, x = model["student"], model["teacher"], torch.randn(21, 19)
    meter.adopt(model)
    optimizer = sgd(student, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        with torch.no_grad():
            goal = teacher(x)
        mean_square(student(x + 0.1) - goal).backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.01)

    return Built(model, step)


@structure()
def distillation(meter: Meter) -> Built:
    """A larger, frozen model as the teacher; a third model that only looks."""
    model = nn.ModuleDict({"teacher": network(71), "student": network(), "probe": nn.Sequential(Burning(1, 9))})
    model["teacher"].requires_grad_(False)
    x = torch.randn(21, 19)

    def loss() -> Tensor:
        output = model["student"](x)
        with torch.inference_mode():
            model["probe"](output)
        return nn.functional.kl_div(output.log_softmax(1), model["teacher"](x).softmax(1), reduction="batchmean")

    return trained(meter, model, loss)


@structure()
def accumulation(meter: Meter) -> Built:
    model = network()
    meter.adopt(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(4):
            (mean_square(model(torch.randn(61, 19))) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Built(model, step)


def _generator() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 43), nn.ReLU(), Burning(1, 3), nn.Linear(43, 19))


@structure()
def adversaries(meter: Meter) -> Built:
    maker, judge = _generator(), network(out=1)
    model = nn.ModuleDict({"maker": maker, "judge": judge})
    meter.adopt(model)
    for_maker, for_judge = torch.optim.Adam(maker.parameters()), torch.optim.RMSprop(judge.parameters())
    loss = nn.BCEWithLogitsLoss()

    def step() -> None:
        made = maker(torch.randn(37, 5))
        for_judge.zero_grad()
        ones = torch.ones(37, 1)
        (loss(judge(torch.randn(37, 19)), ones) + loss(judge(made.detach()), 1 - ones)).backward()
        for_judge.step()
        for_maker.zero_grad()
        loss(judge(made), ones).backward()
        for_maker.step()

    return Built(model, step)


@structure()
def optimizers_at_unequal_rates(meter: Meter) -> Built:
    """Three steps of the critic for one of the generator, and the user ends a step at each of them."""
    maker, judge = _generator(), network(out=1)
    model = nn.ModuleDict({"maker": maker, "judge": judge})
    meter.adopt(model)
    for_maker, for_judge = sgd(maker), sgd(judge)
    taken: list[int] = []

    def step() -> None:
        taken.append(1)
        for_judge.zero_grad()
        (judge(maker(torch.randn(37, 5)).detach()).mean() - judge(torch.randn(37, 19)).mean()).backward()
        for_judge.step()
        if len(taken) % 3 == 0:
            for_maker.zero_grad()
            (-judge(maker(torch.randn(37, 5))).mean()).backward()
            for_maker.step()

    return Built(model, step)


@structure()
def sparse_embedding(meter: Meter) -> Built:
    parts = {"table": nn.Embedding(503, 29, sparse=True), "head": nn.Sequential(Burning(1, 2), nn.Linear(29, 3))}
    model = nn.ModuleDict(parts)
    meter.adopt(model)
    optimizers = (torch.optim.SparseAdam(parts["table"].parameters()), sgd(parts["head"]))

    def step() -> None:
        for each in optimizers:
            each.zero_grad()
        mean_square(parts["head"](parts["table"](torch.randint(503, (17, 5))))).backward()
        for each in optimizers:
            each.step()

    return Built(model, step)


# The optimizers work in hooks of the parameters, which is not burnt.
@structure(skip=("hook_ns",))
def optimizer_in_backward(meter: Meter) -> Built:
    """Each parameter is stepped, and its gradient let go, as soon as the gradient is there."""
    model, x = network(), torch.randn(21, 19)
    meter.adopt(model)
    optimizers = {parameter: torch.optim.Adam([parameter], foreach=False) for parameter in model.parameters()}

    def now(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(now)
    return Built(model, lambda: mean_square(model(x)).backward())


@structure()
def closure_called_twice(meter: Meter) -> Built:
    model, x = network(), torch.randn(21, 19)
    meter.adopt(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=2, tolerance_grad=0, tolerance_change=0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mean_square(model(x))
        loss.backward()
        return loss

    return Built(model, lambda: optimizer.step(closure))


@contextmanager
def compiling() -> Iterator[None]:
    """Dynamo as it was before; torch's own compiler uses what torch itself deprecates."""
    import torch._dynamo as dynamo

    dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dynamo.reset()
        dynamo.utils.counters.clear()


@structure(around=compiling)
def compiled_part(meter: Meter) -> Built:
    compiled = torch.compile(nn.Sequential(nn.Linear(19, 23), nn.GELU(), nn.Linear(23, 19)), backend="eager")
    model, x = nn.Sequential(Burning(1, 2), nn.Linear(19, 19), compiled, network()), torch.randn(21, 19)
    mean_square(model(x)).backward()
    model.zero_grad()
    return trained(meter, model, lambda: mean_square(model(x)))


@contextmanager
def sharding() -> Iterator[None]:
    """One process's group."""
    from tests.process_group import alone

    with alone():
        yield


# The sharding's own hooks do real work in the forward and backward of what they shard.
@structure(around=sharding, unknown=("", "0", "3", "6"), skip=("accumulate_ns",))
def sharded_parameters(meter: Meter) -> Built:
    """FSDP2 on one process."""
    from torch.distributed.fsdp import fully_shard

    model, x = network(), torch.randn(21, 19)
    meter.adopt(model)
    for each in (model[0], model[3], model):
        fully_shard(each)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        mean_square(model(x)).backward()
        optimizer.step()

    return Built(model, step)
