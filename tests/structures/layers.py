"""How modules are held, called and wrapped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.nn.utils import parametrizations, parametrize

from tests.truth.burning import Burning, Meter

from .kit import Built, mean_square, network, sgd, structure, trained


def batch(rows: int = 21, width: int = 19) -> Tensor:
    return torch.randn(rows, width)


@structure()
def plain(meter: Meter) -> Built:
    model, x = network(), batch()
    meter.adopt(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        mean_square(model(x)).backward()
        optimizer.step()

    return Built(model, step)


class Reusing(nn.Module):
    """One block called three times, held under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.block = network(out=19)
        self.stack = nn.ModuleList([self.block, nn.Linear(19, 5), Burning(1, 2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x) + self.stack[0](self.block(x))
        out: Tensor = self.stack[2](self.stack[1](x))
        return out


@structure()
def block_used_three_times(meter: Meter) -> Built:
    model, x = Reusing(), batch()
    return trained(meter, model, lambda: mean_square(model(x)))


@structure()
def siamese(meter: Meter) -> Built:
    tower, head = network(out=11), nn.Sequential(nn.Linear(11, 1), Burning(1, 2))
    model, one, other = nn.ModuleDict({"tower": tower, "head": head}), batch(), batch()
    return trained(meter, model, lambda: mean_square(head(tower(one) - tower(other))))


@structure()
def sequential_in_sequential(meter: Meter) -> Built:
    inner = nn.Sequential(Burning(1, 2), nn.Linear(19, 19))
    model, x = nn.Sequential(inner, nn.ReLU(), inner, nn.Sequential(inner, Burning(2, 1))), batch()
    return trained(meter, model, lambda: mean_square(model(x)))


@structure()
def tied_weights(meter: Meter) -> Built:
    table, body, head = nn.Embedding(211, 29), nn.Linear(29, 29), nn.Linear(29, 211, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, Burning(1, 2), body, nn.Tanh(), Burning(2, 1), head)
    ids = torch.randint(211, (7, 13))
    return trained(meter, model, lambda: nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()))


class Held(nn.Module):
    """Modules in lists and dicts that are never called themselves, and one whose forward is called by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(19, 23), "b": Burning(1, 2)}), Burning(2, 1)])
        self.direct = network(inputs=23)

    def forward(self, x: Tensor) -> Tensor:
        inside = self.parts[0]
        x = self.parts[1](inside["b"](inside["a"](x)))  # type: ignore[index]
        out: Tensor = self.direct.forward(x)
        return out


@structure()
def lists_and_forward_by_hand(meter: Meter) -> Built:
    model, x = Held(), batch()
    return trained(meter, model, lambda: mean_square(model(x)))


@dataclass
class Outputs:
    """As a transformer's output: fields by name."""

    logits: Tensor
    hidden: dict[str, Tensor]


class Answering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = network(out=31), nn.Sequential(Burning(1, 2), nn.Linear(31, 3))

    def forward(self, *, x: Tensor, scale: float = 1.0) -> Outputs:
        hidden = self.body(x) * scale
        return Outputs(self.head(hidden), {"last": hidden})


@structure()
def dataclass_outputs_and_keywords(meter: Meter) -> Built:
    model, x = Answering(), batch()

    def loss() -> Tensor:
        out = model(x=x, scale=0.5)
        return mean_square(out.logits) + out.hidden["last"].mean()

    return trained(meter, model, loss)


class InPlace(nn.Module):
    """Views, writes in place, and a branch that no gradient goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = network(out=24), Burning(1, 2), Burning(2, 1)
        self.relu = nn.ReLU(inplace=True)
        self.detached = Burning(1, 9)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.stem(x).mul_(2.0))
        left, right = y.view(len(x), 3, 8).transpose(1, 2).chunk(2, dim=1)
        noise = self.detached(y.detach())
        out: Tensor = self.left(left).reshape(len(x), -1) + self.right(right.contiguous()).flatten(1)
        return out.add_(noise[:, :12])


@structure()
def views_and_writes_in_place(meter: Meter) -> Built:
    model, x = InPlace(), batch()
    return trained(meter, model, lambda: mean_square(model(x)))


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.burn = nn.Linear(19 + 13, 13), Burning(0.5, 1)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        out: Tensor = self.burn(torch.tanh(self.mix(torch.cat([x, state], 1))))
        return out


@structure()
def recurrent_loop(meter: Meter) -> Built:
    model, x = nn.ModuleDict({"cell": Cell(), "head": network(inputs=13)}), torch.randn(5, 21, 19)

    def loss() -> Tensor:
        state = torch.zeros(21, 13)
        for each in x:
            state = model["cell"](each, state)
        return mean_square(model["head"](state))

    return trained(meter, model, loss)


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.body, self.middle = network(out=19), network(out=17), network(inputs=17, out=9)
        self.middle.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.encoder(x)
        out: Tensor = self.middle(self.body(x))
        return out


@structure()
def parts_without_grad_and_frozen_ones(meter: Meter) -> Built:
    model, x = PartlyFrozen(), batch()
    return trained(meter, model, lambda: mean_square(model(x)))


class LowRank(nn.Module):
    """As LoRA: a frozen layer with a small trained one beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features)
        self.burn = Burning(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.burn(self.down(x)))
        return out


@structure()
def low_rank_adapters(meter: Meter) -> Built:
    model, x = network(), batch()
    model.requires_grad_(False)
    for index, rank in ((0, 3), (3, 5), (6, 2)):
        model[index] = LowRank(model[index], rank)  # type: ignore[arg-type]
    return trained(meter, model, lambda: mean_square(model(x)))


class BurningScale(Burning):
    """A parametrization that burns."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


@structure()
def parametrized_weights(meter: Meter) -> Built:
    model, x = network(), batch()
    parametrize.register_parametrization(model[0], "weight", BurningScale(1, 2))
    parametrizations.weight_norm(model[3])
    parametrizations.spectral_norm(model[6])
    return trained(meter, model, lambda: mean_square(model(x)))


class Annotated(nn.Module):
    """As DistributedDataParallel: a range of the profiler's own around the forward of what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.module = network()

    def forward(self, x: Tensor) -> Tensor:
        with record_function("Annotated.forward"):
            out: Tensor = self.module(x)
        return out


@structure()
def range_around_forward(meter: Meter) -> Built:
    model, x = Annotated(), batch()
    return trained(meter, model, lambda: mean_square(model(x)))


@structure()
def hooks_with_closures(meter: Meter) -> Built:
    """Hooks of a step that hold tensors of it, and forward hooks that stay."""
    model, x = network(), batch()
    meter.adopt(model)
    model[2].register_forward_hook(lambda module, args, output: output * 1.5)
    model[5].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model[3].register_full_backward_hook(lambda module, got, gave: None)
    optimizer = sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        output = model(x)
        weight = torch.rand(21, 7)
        output.register_hook(lambda gradient: gradient * weight)
        mean_square(output).backward()
        optimizer.step()

    return Built(model, step)


@structure()
def autocast(meter: Meter) -> Built:
    model, x = network(), batch()

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mean_square(model(x).float())

    return trained(meter, model, loss)


class Keeps(torch.autograd.Function):
    """Keeps tensors as attributes of its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.held = x.exp()
        ctx.pair = {"twice": 2 * ctx.held}
        return ctx.held.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.held * ctx.pair["twice"].cos()


@structure()
def context_attributes(meter: Meter) -> Built:
    model, x = network(), batch()
    return trained(meter, model, lambda: Keeps.apply(model(x)).sum())


class Lightning(nn.Module):
    """Holds the network and the loss, and is never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.loss = network(out=5), nn.MSELoss()
        self.head = nn.Sequential(Burning(1, 2), nn.Linear(5, 3))

    def training_step(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.loss(self.head(self.encoder(x)), y)
        return out


@structure()
def owner_that_is_never_called(meter: Meter) -> Built:
    model, x, y = Lightning(), batch(), torch.randn(21, 3)
    return Built(None, trained(meter, model, lambda: model.training_step(x, y)).step)
