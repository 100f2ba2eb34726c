"""Cross-entropy whose forward leaves the gradient behind: one pass over the logits, float32 inside."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.kernels import pays
from gradscope.kernels.check import (
    dtype_text,
    refuse,
    require_dtype,
    require_one_of,
    require_range,
    require_same_device,
    shape_text,
)
from gradscope.kernels.choice import BackendChoice, choose, explained_by
from gradscope.kernels.cross_entropy.by_torch import by_torch
from gradscope.kernels.cross_entropy.launch import losses_and_gradient
from gradscope.kernels.cross_entropy.targets import require_classes
from gradscope.kernels.cross_entropy.terms import Terms, accumulate_dtype, late_factor, mean_factors
from gradscope.kernels.once import first_derivative_only, token
from gradscope.kernels.retained import needed_again
from gradscope.kernels.scaling.launch import scale_in_place
from gradscope.kernels.support import why_no_triton
from gradscope.recipes.recipe import Recipe

ABOUT = Recipe(
    name="cross_entropy",
    title="Cross-entropy whose forward also computes the gradient, in one pass over the logits",
    functions=("cross_entropy",),
    modules=("CrossEntropyLoss",),
    replaces=(
        "torch.nn.functional.cross_entropy and torch.nn.CrossEntropyLoss",
        "F.nll_loss(F.log_softmax(logits, -1), target)",
        "logits.log_softmax(-1).gather(-1, target.unsqueeze(-1)), and logits.logsumexp(-1) minus the target's logits",
    ),
    saves=(
        "Only one tensor of the logits' size is stored, the gradient, instead of three. "
        "Half-precision logits are never copied to float32."
    ),
    limits=(
        "Forward also computes the gradient: compute a loss without backward under torch.no_grad().",
        "Probability targets, and GPU tensors without triton, fall back to torch.",
        "A second derivative by torch.autograd.grad raises RuntimeError; torch.func falls back to torch.",
        "The class weight gets no gradient.",
    ),
    backends=(
        ("triton", "NVIDIA GPUs from compute capability 8.0; run under Triton's interpreter, not yet on a GPU"),
        ("cpu", "any CPU; measured"),
        ("torch", "anywhere; probabilities, and GPUs without triton"),
    ),
    sources=(
        "M. Milakov and N. Gimelshein, Online normalizer calculation for softmax, 2018, arxiv.org/abs/1805.02867",
        "A. Karpathy, llm.c: one kernel for loss and gradient, github.com/karpathy/llm.c",
        "A. Chowdhery et al., PaLM, 2022, arxiv.org/abs/2204.02311, section 5: z-loss",
        "Gemma 2, 2024, arxiv.org/abs/2408.00118: soft-capped logits",
    ),
)
_NAME = "cross_entropy"
_REASONS = {
    "triton": "one kernel reads the logits once and writes their gradient",
    "cpu": "processes a few rows at a time, so that they stay in the cache",
    "torch": "torch.nn.functional.cross_entropy",
}


def _explain(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    backend: str = "auto",
) -> BackendChoice:
    """What :func:`cross_entropy` would do with these arguments, and why."""
    _check(input, target, weight, _reduction(size_average, reduce, reduction), label_smoothing, z_loss, softcap)
    probabilities = "the target contains probabilities" if target.is_floating_point() else None
    on_cpu = None if input.device.type == "cpu" else f"the tensors are on {input.device}"
    extras = "it does not support z_loss and softcap" if z_loss or softcap is not None else None
    double = "only the other backends support float64" if input.dtype == torch.float64 else None
    few = None if extras or on_cpu or backend != "auto" else _against_size(input)
    against = {
        "triton": probabilities or double or why_no_triton(input.device),
        "cpu": probabilities or on_cpu or few,
        "torch": extras,
    }
    return choose(_NAME, backend, _REASONS, against)


def _plain(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor:
    reduction = _reduction(size_average, reduce, reduction)
    return by_torch(input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap)


@explained_by(_explain, _plain, _REASONS)
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    backend: str = "auto",
) -> Tensor | None:
    """Compute :func:`torch.nn.functional.cross_entropy`, holding one copy of the logits' size instead of three.

    Where a gradient is wanted, forward computes it beside the loss, and backward only scales it, in place unless the
    graph is retained. A second derivative raises ``RuntimeError``. Under autocast the loss is float32 while logits and
    gradient keep their dtype.

    Args:
        input: logits, [classes], [batch, classes] or [batch, classes, ...]; float16, bfloat16, float32 or float64.
        target: int64 or uint8, of ``input``'s shape without its classes; probabilities, of ``input``'s shape, go to
            torch.
        weight: [classes], of each class.
        ignore_index: a target that counts for nothing.
        size_average, reduce: torch's old names for ``reduction``, which they overrule where one is given.
        reduction: "mean", "sum" or "none".
        label_smoothing: share of the target's weight that is spread over all classes, up to 1; below 0 is 0.
        z_loss: adds ``z_loss · logsumexp(logits)²`` to the loss of each row, not weighted by class; its mean is that
            over the rows that count.
        softcap: the logits are ``softcap · tanh(logits / softcap)`` first.
        backend: "auto", "triton", "cpu" or "torch"; ``cross_entropy.explain`` tells what "auto" takes.

    Returns:
        A scalar, or the shape of ``target`` with ``reduction="none"``. The mean over no target that counts is NaN,
        with gradients of zero, as torch has it.

    Raises:
        ValueError: a shape, dtype, device or setting does not fit; on the CPU also a target that is no class. On a GPU
            such a target stops the device with an assertion, as torch does.
    """
    choice = _explain(
        input,
        target,
        weight,
        size_average,
        ignore_index,
        reduce,
        reduction,
        label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        backend=backend,
    )
    reduction = _reduction(size_average, reduce, reduction)
    if choice.backend == "torch":
        if input.is_cpu and not target.is_floating_point():  # torch names no argument
            require_classes(_NAME, target, input.shape[min(1, input.dim() - 1)], ignore_index)
        return None
    batch, classes = (1, input.shape[0]) if input.dim() == 1 else (input.shape[0], input.shape[1])
    positions = math.prod(input.shape[2:])  # not -1: it says nothing of an empty batch
    settings = _Settings(ignore_index, reduction, max(label_smoothing, 0.0), z_loss, softcap, choice.backend)
    wanted = torch.is_grad_enabled() and input.requires_grad
    loss: Tensor
    loss, _ = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        input.reshape(batch, classes, positions), target.reshape(batch, positions).long(), weight, settings, wanted
    )
    if not torch.is_autocast_enabled(input.device.type):
        loss = loss.to(input.dtype)
    return loss.reshape(target.shape) if reduction == "none" else loss


@dataclass(frozen=True, slots=True)
class _Settings:
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    backend: str


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits [batch, classes, positions] and targets [batch, positions]."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, settings: _Settings, wanted: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = accumulate_dtype(logits.dtype)
        scale = None
        if settings.reduction == "mean":
            terms = Terms(weight, settings.ignore_index, z_loss=settings.z_loss)
            weight, scale = mean_factors(target, terms, dtype)
        # What a loss scaler saves from underflow must not have been rounded to float16 before: the mean waits.
        late = logits.dtype == torch.float16
        per_row, gradient = losses_and_gradient(
            logits,
            target,
            weight,
            None if late else scale,
            settings.ignore_index,
            settings.label_smoothing,
            settings.z_loss,
            settings.softcap,
            wanted,
            settings.backend,
        )
        link = token(logits)
        later = late_factor(scale) if late and scale is not None else None
        ctx.save_for_backward(gradient, later, link)
        ctx.settings = settings
        if settings.reduction == "none":
            return per_row, link
        total = per_row.sum()
        return total if scale is None else total * scale, link

    @staticmethod
    @first_derivative_only(_NAME, 'backend="torch" supports second derivatives, but not z_loss and softcap')
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradient, late, _ = ctx.saved_tensors
        rows = ctx.settings.reduction == "none"
        if rows or needed_again():
            by = upstream if late is None else upstream * late
            # With as many dimensions as the gradient: a scalar would be rounded to its dtype first, and overflow.
            by = by[:, None] if rows else by.reshape(1, 1, 1)
            found = (gradient * by).to(gradient.dtype) if needed_again() else gradient.mul_(by)
        else:
            found = scale_in_place(gradient, upstream, late, backend=ctx.settings.backend)
        return found, None, None, None, None


class CrossEntropyLoss(nn.Module):
    """:func:`cross_entropy` as a module, with the arguments of :class:`torch.nn.CrossEntropyLoss`, and its extras."""

    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.reduction = _reduction(size_average, reduce, reduction)
        self.z_loss, self.softcap = z_loss, softcap

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of logits and classes."""
        return cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
        )

    def extra_repr(self) -> str:
        """The settings that are not torch's defaults."""
        settings = {
            "ignore_index": (self.ignore_index, -100),
            "reduction": (self.reduction, "mean"),
            "label_smoothing": (self.label_smoothing, 0.0),
            "z_loss": (self.z_loss, 0.0),
            "softcap": (self.softcap, None),
        }
        return ", ".join(f"{name}={value!r}" for name, (value, default) in settings.items() if value != default)


def _reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """torch's rule: the old names hold where one of them is given; None stands for True."""
    if size_average is None and reduce is None:
        return reduction
    if reduce is False:
        return "none"
    return "sum" if size_average is False else "mean"


def _against_size(input: Tensor) -> str | None:
    return pays.against(_NAME, logits=input.numel())


def _check(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
) -> None:
    require_dtype(_NAME, "input", input)
    if input.dim() == 0:
        refuse(_NAME, "input", "a scalar", "[classes], [batch, classes] or [batch, classes, ...]")
    classes = input.shape[0] if input.dim() == 1 else input.shape[1]
    if classes == 0:
        refuse(_NAME, "input", shape_text(input), "at least one class")
    expected = input.shape[2:] if input.dim() == 1 else (input.shape[0], *input.shape[2:])
    if target.is_floating_point():
        expected = input.shape
    elif target.dtype not in (torch.int64, torch.uint8):
        refuse(_NAME, "target", f"of dtype {dtype_text(target.dtype)}", "int64 or uint8, or probabilities")
    if tuple(target.shape) != tuple(expected):
        refuse(_NAME, "target", shape_text(target), f"{tuple(expected)} for input {shape_text(input)}")
    if weight is not None and tuple(weight.shape) != (classes,):
        refuse(_NAME, "weight", shape_text(weight), f"({classes},)")
    if weight is not None and weight.requires_grad:
        refuse(
            _NAME, "weight", "a tensor that requires a gradient", ("one that does not: no gradient is computed for it")
        )
    require_same_device(_NAME, ("input", input), target=target, weight=weight)
    require_one_of(_NAME, "reduction", reduction, ("mean", "sum", "none"))
    require_range(_NAME, "label_smoothing", max(label_smoothing, 0.0), 0.0, 1.0)
    require_range(_NAME, "z_loss", z_loss, 0.0, float("inf"), open_high=True)
    if softcap is not None:
        require_range(_NAME, "softcap", softcap, 0.0, float("inf"), open_low=True, open_high=True)
