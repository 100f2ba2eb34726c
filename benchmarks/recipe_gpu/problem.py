"""What is compared: one op at one shape, the ways to compute it, and the least that any way must move or multiply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

Outputs = Tensor | Sequence[Tensor]
Step = Callable[[], Sequence[Tensor]]  # forward and backward once; returns the gradients


class Kind(StrEnum):
    """What a way is compared as."""

    RECIPE = "recipe"
    VARIANT = "variant"  # the recipe by another of its backends
    EAGER = "eager"
    SDPA = "sdpa"
    LIGER = "liger"
    COMPILE = "compile"


RIVALS = (Kind.EAGER, Kind.SDPA, Kind.LIGER)  # of the goal "as fast as the best"; the compiler is its own row


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute an op."""

    name: str
    kind: Kind
    run: Callable[..., Outputs]  # of the problem's inputs
    overwrites: bool = False  # its inputs or the upstream gradients: it gets copies, restored before each step
    goal: bool = True  # the recipe is to be as fast: not as a way that computes something else


@dataclass(frozen=True, slots=True)
class Inputs:
    """What every way is given; gradients are taken of those that require one."""

    tensors: tuple[Tensor, ...]
    upstream: tuple[Tensor, ...]  # one for each output

    @property
    def leaves(self) -> list[Tensor]:
        return [tensor for tensor in self.tensors if tensor.requires_grad]

    def copy(self) -> Inputs:
        """The same values in memory of their own."""
        tensors = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in self.tensors)
        return Inputs(tensors, tuple(x.clone() for x in self.upstream))

    @torch.no_grad()
    def restore(self, other: Inputs) -> None:
        """Take the values of ``other`` again."""
        for mine, right in zip((*self.tensors, *self.upstream), (*other.tensors, *other.upstream), strict=True):
            mine.copy_(right)


@dataclass(frozen=True, slots=True)
class Problem:
    """One op at one shape. ``bytes`` and ``flop`` are of forward and backward together."""

    op: str  # file of ops/, and what --only takes
    name: str
    make: Callable[[str, torch.dtype], Inputs]  # device, and dtype of activations
    ways: tuple[Way, ...]
    bytes: int = 0  # the fewest: every input read once, every output written once
    flop: int = 0  # what a kernel computes twice does not count
    dtype: torch.dtype = torch.bfloat16
    random: bool = False  # ways draw masks of their own: their gradients differ
    accumulates: bool = False  # backward() into .grad, instead of torch.autograd.grad
    share_goal: float | None = None  # of the limit
    faster_than: tuple[Kind, ...] = ()  # by any margin, each
    slower_at_most: float | None = None  # times the time of the first way
    leaner_at_least: float | None = None  # times less memory than the first way

    def step(self, run: Callable[..., Outputs], inputs: Inputs) -> Step:
        """Forward and backward of a way."""

        def taken() -> Sequence[Tensor]:
            outputs = run(*inputs.tensors)
            outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
            if not self.accumulates:
                return torch.autograd.grad(outputs, inputs.leaves, inputs.upstream)
            torch.autograd.backward(outputs, inputs.upstream)
            gradients = []
            for leaf in inputs.leaves:
                assert leaf.grad is not None
                gradients.append(leaf.grad)
                leaf.grad = None
            return gradients

        return taken


def noise(device: str, dtype: torch.dtype, *shape: int, grad: bool = True) -> Tensor:
    """Normal numbers: on zeros kernels run faster than on data."""
    return torch.randn(shape, device=device, dtype=dtype).requires_grad_(grad)


def upstream(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """An upstream gradient."""
    return noise(device, dtype, *shape, grad=False)
