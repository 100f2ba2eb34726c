"""Dropout that keeps a seed for backward instead of a mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradscope.kernels import pays
from gradscope.kernels.check import require_dtype, require_range
from gradscope.kernels.choice import BackendChoice, choose, explained_by
from gradscope.kernels.dropout.counter import draw_seed
from gradscope.kernels.dropout.launch import dropout as launch
from gradscope.kernels.support import why_no_triton
from gradscope.recipes.recipe import Recipe

ABOUT = Recipe(
    name="dropout",
    title="Dropout that saves a seed for backward instead of a mask",
    functions=("dropout",),
    modules=("Dropout",),
    replaces=("F.dropout(x, p, training)", "nn.Dropout(p)"),
    saves=(
        "The mask that torch saves for backward: 1 byte per element on a GPU, 4 on a CPU. On a "
        "CPU also time: torch generates random numbers one by one."
    ),
    limits=(
        "It drops different elements than torch with the same seed.",
        "inplace=True, p=1 and (on a GPU) float64 fall back to torch; in evaluation mode nothing is done.",
        "It supports only torch's default generator.",
    ),
    backends=(("triton", "a GPU"), ("cpu", "a CPU"), ("torch", "any device")),
    sources=(
        "J. Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011",
        "C. Wellons, Prospecting for hash functions, 2018, nullprogram.com/blog/2018/07/31",
    ),
)

_NAME = "dropout"
_REASONS = {
    "triton": "the mask is computed from a seed in forward and in backward, and never stored",
    "cpu": "the mask is hashed from a seed, one cache-sized chunk at a time; torch generates and saves it",
    "torch": "torch.nn.functional.dropout",
}


def _explain(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, backend: str = "auto"
) -> BackendChoice:
    """What :func:`dropout` would do with these arguments, and why."""
    require_dtype(_NAME, "input", input)
    require_range(_NAME, "p", p, 0.0, 1.0)
    nothing = None
    if inplace:
        nothing = "inplace=True needs torch's own"
    elif not training or p in (0, 1):
        nothing = "nothing is random: " + ("training is off" if not training else f"p is {p:g}")
    double = "only the other backends support float64" if input.dtype == torch.float64 else None
    on_cpu = None if input.device.type == "cpu" else f"the tensor is on {input.device}"
    few = pays.against(_NAME, elements=input.numel()) if on_cpu is None and backend == "auto" else None
    against = {"triton": nothing or double or why_no_triton(input.device), "cpu": nothing or on_cpu or few}
    return choose(_NAME, backend, _REASONS, against)


def _plain(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, backend: str = "auto"
) -> Tensor:
    return functional.dropout(input, p, training, inplace)


@explained_by(_explain, _plain, _REASONS)
def dropout(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, *, backend: str = "auto"
) -> Tensor | None:
    """Drop elements as :func:`torch.nn.functional.dropout` does, saving 8 bytes for backward.

    Every call draws a seed from torch's generator of the device; whether an element is dropped is a hash of its index
    and that seed. So ``torch.manual_seed`` and checkpointing work as ever, but other elements are dropped than by
    torch. All derivatives exist.

    Args:
        input: any shape; float16, bfloat16, float32 or float64.
        p: share that becomes 0; the others are divided by ``1 - p``.
        training: without it the input is returned.
        inplace: left to torch.
        backend: "auto", "triton", "cpu" or "torch"; ``dropout.explain`` tells what "auto" takes.

    Returns:
        The input's shape and dtype; contiguous, but by "torch".

    Raises:
        ValueError: a dtype or setting does not fit.
    """
    choice = _explain(input, p, training, inplace, backend=backend)
    if choice.backend == "torch":
        return None
    return _Dropout.apply(input, draw_seed(input.device), p, choice.backend)  # type: ignore[no-untyped-call]


class _Dropout(torch.autograd.Function):
    """A fixed linear map, and so its own derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seed: Tensor, p: float, backend: str) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.p, ctx.backend = p, backend
        return launch(x, seed, p, backend)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        (seed,) = ctx.saved_tensors
        return _Dropout.apply(upstream, seed, ctx.p, ctx.backend), None, None, None  # type: ignore[no-untyped-call]


class Dropout(nn.Module):
    """:func:`dropout` as a module, with the arguments of :class:`torch.nn.Dropout`."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        require_range("Dropout", "p", p, 0.0, 1.0)
        self.p, self.inplace = p, inplace

    def forward(self, input: Tensor) -> Tensor:
        """Drops while the module trains."""
        return dropout(input, self.p, self.training, self.inplace)

    def extra_repr(self) -> str:
        """The settings, as torch shows them."""
        return f"p={self.p}, inplace={self.inplace}"
