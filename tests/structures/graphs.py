"""Graphs out of the ordinary: derivatives of derivatives, checkpoints, several passes, torch.func."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.truth.burning import Burning, Meter, Transformable

from .kit import Built, mean_square, network, sgd, structure, trained


@structure()
def gradient_penalty(meter: Meter) -> Built:
    model = network(out=1)

    def loss() -> Tensor:
        x = torch.randn(257, 19, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return ((slope.norm(dim=1) - 1) ** 2).mean()

    return trained(meter, model, loss)


@structure()
def gradient_penalty_that_collects(meter: Meter) -> Built:
    """The points of the penalty are leaves whose gradient is asked for by ``backward``."""
    model = network(out=1)
    meter.adopt(model)
    optimizer = sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        x = torch.randn(257, 19, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a cycle, which is broken below
            model(x).sum().backward(create_graph=True)
        assert x.grad is not None
        penalty = x.grad.square().sum()
        x.grad = None
        for parameter in model.parameters():
            parameter.grad = None
        penalty.backward()
        optimizer.step()

    return Built(model, step)


@structure()
def physics(meter: Meter) -> Built:
    """A PINN: new points each step, their derivatives of two orders."""
    model = nn.Sequential(nn.Linear(2, 31), nn.Tanh(), Burning(1, 2), nn.Linear(31, 1))

    def loss() -> Tensor:
        x, t = torch.rand(301, 1, requires_grad=True), torch.rand(301, 1, requires_grad=True)
        u = model(torch.cat([x, t], 1))
        u_t = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
        u_x = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x.sum(), x, create_graph=True)[0]
        return mean_square(u_t - u_xx)

    return trained(meter, model, loss)


@structure()
def hessian_product(meter: Meter) -> Built:
    model, x = network(), torch.randn(21, 19)
    meter.adopt(model)
    parameters = tuple(model.parameters())

    def step() -> None:
        gradients = torch.autograd.grad(mean_square(model(x)), parameters, create_graph=True)
        product = torch.stack([g.square().sum() for g in gradients]).sum()
        for parameter, value in zip(parameters, torch.autograd.grad(product, parameters), strict=True):
            parameter.data.sub_(value, alpha=0.01)

    return Built(model, step)


def transformable(out: int) -> nn.Sequential:
    """A network whose burning layer torch.func can transform."""
    return nn.Sequential(nn.Linear(19, 33), nn.Tanh(), Transformable(1, 2), nn.Linear(33, out))


@structure()
def per_sample_gradients(meter: Meter) -> Built:
    model, x = transformable(1), torch.randn(23, 19)
    meter.adopt(model)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, values, (one[None],)).square().sum()

    def step() -> None:
        found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
        for name, value in parameters.items():
            value.sub_(found[name].mean(0), alpha=0.1)
        model.zero_grad()
        model(x).mean().backward()

    return Built(model, step)


@structure()
def function_transform_in_the_loss(meter: Meter) -> Built:
    """``torch.func.grad`` of a function whose arguments are leaves of the step."""
    model = transformable(1)

    def loss() -> Tensor:
        points = torch.randn(91, 19, requires_grad=True)
        return mean_square(vmap(grad(lambda one: model(one[None]).sum()))(points))

    return trained(meter, model, loss)


@structure()
def functional_calls(meter: Meter) -> Built:
    """The modules run on tensors that are not their own."""
    model, x = network(), torch.randn(21, 19)

    def loss() -> Tensor:
        values = {name: value * 2 for name, value in model.named_parameters()}
        return mean_square(functional_call(model, values, (x,)))

    return trained(meter, model, loss)


# Its updates are operations of the user's own, outside of every module.
@structure(skip=("outside",))
def unrolled_inner_loop(meter: Meter) -> Built:
    """As in MAML: two inner steps with ``create_graph``, through which the outer backward goes."""
    model, x, y = network(), torch.randn(21, 19), torch.randn(27, 19)

    def loss() -> Tensor:
        values = dict(model.named_parameters())
        for _ in range(2):
            inner = mean_square(functional_call(model, values, (x,)))
            slopes = torch.autograd.grad(inner, tuple(values.values()), create_graph=True)
            values = {name: value - 0.01 * slope for (name, value), slope in zip(values.items(), slopes, strict=True)}
        return mean_square(functional_call(model, values, (y,)))

    return trained(meter, model, loss)


def _checkpointed(meter: Meter, *, reentrant: bool) -> Built:
    blocks, x = nn.ModuleList(network(out=19) for _ in range(3)), torch.randn(61, 19)

    def loss() -> Tensor:
        y = x.clone().requires_grad_()
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=reentrant)
        return mean_square(y)

    return trained(meter, blocks, loss)


# What checkpointing itself does in Python belongs to no module, or to the one that is called next or again.
BLOCKS = {"0": 1, "1": 1, "2": 1}


@structure(skip=("outside",), checkpoints=BLOCKS)
def checkpoint_without_reentrance(meter: Meter) -> Built:
    return _checkpointed(meter, reentrant=False)


@structure(skip=("outside",), checkpoints=BLOCKS)
def checkpoint_with_reentrance(meter: Meter) -> Built:
    return _checkpointed(meter, reentrant=True)


class NestedCheckpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = network(out=19), network(out=19)

    def block(self, x: Tensor) -> Tensor:
        out: Tensor = self.outer(checkpoint(self.inner, x, use_reentrant=False))
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


@structure(unknown=("",))
def nested_checkpoints(meter: Meter) -> Built:
    model, x = NestedCheckpoints(), torch.randn(61, 19)
    return trained(meter, model, lambda: mean_square(model(x)))


@structure(skip=("outside",))
def checkpointed_sequence(meter: Meter) -> Built:
    model, x = nn.Sequential(*(network(out=19) for _ in range(4))), torch.randn(33, 19)
    return trained(meter, model, lambda: mean_square(checkpoint_sequential(model, 2, x, use_reentrant=False)))


@structure()
def saved_on_cpu(meter: Meter) -> Built:
    model, x = network(), torch.randn(61, 19)

    def loss() -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return mean_square(model(x))

    return trained(meter, model, loss)


@structure()
def retained_graph(meter: Meter) -> Built:
    model, x = network(), torch.randn(21, 19)
    meter.adopt(model)

    def step() -> None:
        model.zero_grad()
        loss = mean_square(model(x))
        loss.backward(retain_graph=True)
        loss.backward()

    return Built(model, step)


@structure()
def losses_of_a_shared_trunk(meter: Meter) -> Built:
    """Two heads, two losses, and two backward passes through the trunk."""
    parts = {
        "trunk": network(out=13),
        "one": nn.Sequential(Burning(1, 2), nn.Linear(13, 3)),
        "other": network(inputs=13),
    }
    model, x = nn.ModuleDict(parts), torch.randn(21, 19)
    meter.adopt(model)
    optimizer = sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        hidden = parts["trunk"](x)
        mean_square(parts["one"](hidden)).backward(retain_graph=True)
        parts["other"](hidden).abs().sum().backward()
        optimizer.step()

    return Built(model, step)


@structure()
def several_losses_at_once(meter: Meter) -> Built:
    parts = {"trunk": network(out=13), "head": nn.Sequential(Burning(1, 2), nn.Linear(13, 3))}
    model, x = nn.ModuleDict(parts), torch.randn(21, 19)
    meter.adopt(model)
    optimizer = sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        hidden = parts["trunk"](x)
        torch.autograd.backward([mean_square(hidden), parts["head"](hidden).mean()])
        optimizer.step()

    return Built(model, step)
