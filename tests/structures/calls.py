"""Models whose modules are called in other ways than torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.truth.burning import Burning, Meter, Source

from .kit import Built, mean_square, network, structure, trained


@structure()
def forward_called_by_hand(meter: Meter) -> Built:
    """No hook fires for the root."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.own = network(out=19), Burning(1, 2)
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.own.forward(self.first(x)) * self.scale.sum()
            return out

    model, x = Root(), torch.randn(21, 19)
    return Built(None, trained(meter, model, lambda: mean_square(model.forward(x))).step)


class ForwardOnly(nn.Linear):
    """As in forward-forward training: a layer with its own optimizer and loss, which calls its own forward."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.burn = Burning(1, 2)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.01)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.relu(self.burn(nn.functional.linear(x, self.weight, self.bias)))
        return out

    def learn(self, x: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        mean_square(self.forward(x)).backward()
        self.optimizer.step()
        return self.forward(x).detach()


class ForwardForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ForwardOnly(19, 23), ForwardOnly(23, 29)])


@structure()
def layers_that_train_themselves(meter: Meter) -> Built:
    model, x = ForwardForward(), torch.randn(21, 19)
    meter.adopt(model)

    def step() -> None:
        y = x
        for layer in model.layers:
            y = layer.learn(y)  # type: ignore[operator]

    return Built(None, step)


class OwnCall(nn.Module):
    """As keras on torch: ``__call__`` is the library's own, and torch's hooks never fire."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.call(x)

    def call(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class OwnDense(OwnCall):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.burn = Burning(1, 2)

    def call(self, x: Tensor) -> Tensor:
        out: Tensor = self.burn(x) @ self.weight
        return out


class OwnStack(OwnCall):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.ModuleList([OwnDense(19, 27), OwnDense(27, 5)])

    def call(self, x: Tensor) -> Tensor:
        for each in self.dense:
            x = each(x)
        return x


@structure()
def call_overridden(meter: Meter) -> Built:
    model, x = OwnStack(), torch.randn(21, 19)
    return Built(None, trained(meter, model, lambda: mean_square(model(x))).step)


class Timing(nn.Module):
    """Overrides ``__call__`` and goes on to torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.source = network(), Source(1, 1)

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(self.source(x))
        return out


@structure()
def call_that_goes_on_to_torchs(meter: Meter) -> Built:
    model, x = Timing(), torch.randn(21, 19)
    return trained(meter, model, lambda: mean_square(model(x)))
