"""Programs that do not the same in every step, make modules while they train, or keep something from step to step."""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tests.truth.burning import Burning, Meter

from .kit import Built, mean_square, network, sgd, structure, trained


def counted(module: nn.Module) -> int:
    """How often it has been asked this."""
    number: int = module.__dict__.setdefault("asked", -1) + 1
    module.__dict__["asked"] = number
    return number


class Mixture(nn.Module):
    """A mixture of experts; other experts work in each step, and they are not equally dear."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(19, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(19, 31 + 2 * k), Burning(1 + k, 4 - k), nn.Linear(31 + 2 * k, 19)) for k in range(4)
        )
        self.head = Burning(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        step, share = counted(self), self.gate(x).softmax(1)
        chosen = ((step * 3) % 4, (step * 3 + 1 + step % 2) % 4)
        out: Tensor = self.head(sum(self.experts[k](x) * share[:, k : k + 1] for k in chosen))
        return out


@structure()
def mixture_of_experts(meter: Meter) -> Built:
    model, x = Mixture(), torch.randn(21, 19)
    return trained(meter, model, lambda: mean_square(model(x)))


class Dropping(nn.Module):
    """Leaves out another layer in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(19, 23 + 2 * k), Burning(1, 1 + k), nn.Linear(23 + 2 * k, 19)) for k in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        skipped = counted(self) % 5
        for number, block in enumerate(self.blocks):
            if number != skipped:
                x = x + block(x)
        return x


@structure()
def dropped_layers(meter: Meter) -> Built:
    model, x = Dropping(), torch.randn(21, 19)
    return trained(meter, model, lambda: mean_square(model(x)))


class Alternating(nn.Module):
    """The same layers in another order each step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(19, 19), Burning(1 + k, 3 - k)) for k in range(3))

    def forward(self, x: Tensor) -> Tensor:
        orders = list(itertools.permutations(range(3)))
        for number in orders[counted(self) % len(orders)]:
            x = torch.tanh(self.blocks[number](x))
        return x


@structure()
def alternating_order(meter: Meter) -> Built:
    model, x = Alternating(), torch.randn(21, 19)
    return trained(meter, model, lambda: mean_square(model(x)))


@structure()
def batches_of_other_lengths(meter: Meter) -> Built:
    model = network()
    lengths = itertools.cycle((21, 37, 11))
    return trained(meter, model, lambda: mean_square(model(torch.randn(next(lengths), 19))))


@structure()
def replaced_head(meter: Meter) -> Built:
    body = network(out=40)
    x = torch.randn(21, 19)

    def step() -> None:
        body.head = nn.Sequential(nn.Linear(40, 201), Burning(1, 2))
        meter.adopt(body)
        optimizer = sgd(body)
        mean_square(body(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Built(body, step)


@structure()
def head_outside_the_model(meter: Meter) -> Built:
    body, x = network(out=40), torch.randn(21, 19)
    meter.adopt(body)
    optimizer = sgd(body)

    def step() -> None:
        optimizer.zero_grad()
        mean_square(nn.Linear(40, 301)(body(x))).backward()
        optimizer.step()

    return Built(body, step)


@structure()
def deep_copies(meter: Meter) -> Built:
    """As in MAML: an inner step on a copy, whose gradients go to the original."""
    model, x = network(), torch.randn(21, 19)
    meter.adopt(model)
    optimizer = sgd(model)

    def step() -> None:
        learner = copy.deepcopy(model)
        inner = sgd(learner)
        mean_square(learner(x)).backward()
        inner.step()
        inner.zero_grad()
        mean_square(learner(x)).backward()
        for mine, theirs in zip(model.parameters(), learner.parameters(), strict=True):
            mine.grad = theirs.grad
        optimizer.step()

    return Built(model, step)


def replica_of(module: nn.Module) -> nn.Module:
    """As DataParallel makes one: without parameters, with copies that lead back to them in their place."""
    made: nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    made._modules = {name: replica_of(inner) for name, inner in module._modules.items() if inner is not None}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            setattr(made, name, parameter.clone())
    return made


class Replicated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module = network()

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([replica_of(self.module)(part) for part in x.chunk(2)])


@structure()
def replicas(meter: Meter) -> Built:
    model, x = Replicated(), torch.randn(42, 19)
    return trained(meter, model, lambda: mean_square(model(x)))


class Growing(nn.Module):
    """A buffer that a step makes longer, in place and by a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("seen", torch.zeros(5))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        with torch.no_grad():
            self.seen.resize_(len(self.seen) + 101).zero_()
            self.count = torch.cat([self.count, y.detach().mean(0)])
        return y


@structure()
def growing_buffer(meter: Meter) -> Built:
    model, x = Growing(), torch.randn(21, 19)
    return trained(meter, model, lambda: mean_square(model(x)))


@structure()
def leaking_list(meter: Meter) -> Built:
    model, x = network(), torch.randn(21, 19)
    meter.adopt(model)
    optimizer = sgd(model)
    kept: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad()
        output = model(x)
        mean_square(output).backward()
        optimizer.step()
        kept.append(output)

    return Built(model, step)


@structure()
def looking_ahead(meter: Meter) -> Built:
    """The next batch is there before the step of this one ends, as in an accelerated loader."""

    def batches() -> Iterator[Tensor]:
        waiting = torch.randn(63, 19)
        while True:
            following = torch.randn(63, 19)
            yield waiting
            waiting = following

    model, loader = network(), batches()
    return trained(meter, model, lambda: mean_square(model(next(loader))))


@structure()
def last_outputs(meter: Meter) -> Built:
    """Keeps some last outputs: full from the start, so it does not grow."""
    model, x = network(), torch.randn(21, 19)
    meter.adopt(model)
    kept: deque[Tensor] = deque((torch.zeros(21, 7) for _ in range(3)), maxlen=3)

    def step() -> None:
        model.zero_grad()
        output = model(x)
        mean_square(output).backward()
        kept.append(output.detach())

    return Built(model, step)


@structure(unknown=("gru",))
def carried_state(meter: Meter) -> Built:
    """A recurrent net whose hidden state goes from step to step."""
    model = nn.ModuleDict(
        {"gru": nn.GRU(19, 23, batch_first=True), "head": nn.Sequential(Burning(1, 2), nn.Linear(23, 2))}
    )
    meter.adopt(model)
    optimizer = torch.optim.Adam(model.parameters())
    carried = [torch.zeros(1, 11, 23)]

    def step() -> None:
        optimizer.zero_grad()
        out, state = model["gru"](torch.randn(11, 9, 19), carried[0])
        mean_square(model["head"](out)).backward()
        carried[0] = state.detach()
        optimizer.step()

    return Built(model, step)


@structure()
def optimizer_of_the_step(meter: Meter) -> Built:
    """A new optimizer in each step, stepped by a new one at its end."""
    model, x = network(), torch.randn(21, 19)
    meter.adopt(model)

    def step() -> None:
        optimizer = torch.optim.Adam(model.parameters())
        mean_square(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Built(model, step)


class Scaled(Tensor):
    """A subclass of two parts: numbers, and their scale."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        return made

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _meta: Any, _size: Any, _stride: Any) -> Scaled:
        return Scaled(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.numbers * value.scale if isinstance(value, Scaled) else value

        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].numbers, args[0].scale)
        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)


@structure()
def tensor_subclass(meter: Meter) -> Built:
    """A frozen weight whose parts are two tensors of its own."""
    model = network(out=27)
    frozen = Scaled(torch.randint(-8, 8, (27, 51)).to(torch.int8), torch.rand(27, 1))
    x = torch.randn(21, 19)
    return trained(meter, model, lambda: mean_square(model(x) @ frozen))
