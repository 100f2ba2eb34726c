"""How a structure is declared, and the small networks that they are made of.

A structure is one function: given a meter it builds its model and returns the model with a step. Its layers are real
ones, of odd sizes that differ, so that no two tensors that matter are of one size; and burning ones, which say to the
meter how long they took. ``tests/memory`` counts the bytes of each (burns then last no time), ``tests/truth`` the time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.truth.burning import Burning, Meter

Step = Callable[[], object]


class Built(NamedTuple):
    """A model, by which gradscope names the layers, and a step of its training."""

    model: nn.Module | None
    step: Step


@dataclass(frozen=True)
class Structure:
    """One declared structure.

    Attributes:
        name: of the function, with spaces.
        skip: columns of the layer table, or "outside", of which the meter does not know all.
        unknown: layers that do real work of a length that nothing measured.
        checkpoints: calls of checkpoint whose own Python falls to a layer, by layer.
        around: a context manager to build and run inside of.
    """

    name: str
    build: Callable[[Meter], Built]
    skip: frozenset[str] = frozenset()
    unknown: frozenset[str] = frozenset()
    checkpoints: Mapping[str, int] = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


#: All that are declared, by name.
STRUCTURES: dict[str, Structure] = {}


def structure(
    *,
    skip: Collection[str] = (),
    unknown: Collection[str] = (),
    checkpoints: Mapping[str, int] | None = None,
    around: Callable[[], Any] = nullcontext,
) -> Callable[[Callable[[Meter], Built]], Callable[[Meter], Built]]:
    """Declare the structure that the function below builds.

    Raises:
        ValueError: there is one of that name.
    """

    def declare(build: Callable[[Meter], Built]) -> Callable[[Meter], Built]:
        name = build.__name__.replace("_", " ")
        if name in STRUCTURES:
            raise ValueError(f"two structures are called {name!r}")
        STRUCTURES[name] = Structure(name, build, frozenset(skip), frozenset(unknown), dict(checkpoints or {}), around)
        return build

    return declare


def network(width: int = 33, out: int = 7, inputs: int = 19) -> nn.Sequential:
    """Three linear layers, and two that burn: ``2`` and ``5``."""
    return nn.Sequential(
        nn.Linear(inputs, width),
        nn.Tanh(),
        Burning(1, 2),
        nn.Linear(width, width + 2),
        nn.GELU(),
        Burning(2, 1),
        nn.Linear(width + 2, out),
    )


def sgd(*modules: nn.Module, **options: Any) -> torch.optim.SGD:
    """An SGD over the parameters of all of them."""
    parameters = [each for module in modules for each in module.parameters() if each.requires_grad]
    return torch.optim.SGD(parameters, lr=0.01, **options)


def trained(meter: Meter, model: nn.Module, loss: Callable[[], Tensor]) -> Built:
    """The step that most have: zero the gradients, backward from ``loss()``, step."""
    meter.adopt(model)
    optimizer = sgd(model)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return Built(model, step)


def mean_square(output: Tensor) -> Tensor:
    """A loss that keeps its input."""
    return output.square().mean()
