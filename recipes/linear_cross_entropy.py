"""A head and its loss without the logits: chunks of rows, whose gradients forward leaves behind."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gradscope.kernels.choice import explained_by
from gradscope.kernels.cross_entropy.by_torch import by_torch
from gradscope.kernels.cross_entropy.targets import require_classes
from gradscope.recipes.linear_cross_entropy_arguments import IGNORED, NAME, REASONS, explain, logits_dtype
from gradscope.recipes.linear_cross_entropy_function import LinearCrossEntropy, LossSettings
from gradscope.recipes.recipe import Recipe

ABOUT = Recipe(
    name="linear_cross_entropy",
    title="The last linear layer and cross-entropy, without materializing the full logits",
    functions=("linear_cross_entropy", "linear_cross_entropy_and_logits", "lazy_linear"),
    modules=("LinearCrossEntropyLoss", "LinearCrossEntropyHead"),
    replaces=(
        "F.cross_entropy(F.linear(x, weight, bias), target)",
        "F.cross_entropy(lm_head(x).view(-1, vocab), target.view(-1))",
        "torch.nn.functional.linear_cross_entropy (torch 2.13), with or without options",
    ),
    saves=(
        "The logits, their log_softmax and its gradient, each [tokens, vocabulary]: only one "
        "chunk of rows is stored, and its gradient overwrites it. On the CPU, rows with an "
        "ignored target are skipped."
    ),
    limits=(
        "Forward computes the gradients too: a loss that is only looked at belongs under torch.no_grad().",
        'reduction="none" recomputes the logits in backward.',
        "Logits returned with the loss carry no gradient.",
        "On the CPU, fewer than 3,000,000 logits or 1,000 rows (512 with several threads) fall back to torch.",
        "Probability targets, and several positions per input, fall back to torch, which stores the full logits.",
        "A second derivative by torch.autograd.grad raises RuntimeError; torch.func falls back to torch.",
        "The class weight gets no gradient.",
    ),
    backends=(
        ("triton", "NVIDIA GPUs from compute capability 8.0; run under Triton's interpreter, not yet on a GPU"),
        ("cpu", "any CPU; measured"),
        ("torch", "anywhere; probabilities, and GPUs without triton"),
    ),
    sources=(
        "github.com/pytorch/pytorch/issues/124480: chunks of rows whose gradients are computed in forward",
        "P. Hsu et al., Liger Kernel: Efficient Triton Kernels for LLM Training, 2024, arxiv.org/abs/2410.10989",
        "A. Chowdhery et al., PaLM, 2022, arxiv.org/abs/2204.02311, section 5: z-loss",
        "Gemma 2, 2024, arxiv.org/abs/2408.00118: soft-capped logits",
    ),
)


def _run(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    memory_budget: int | None,
    backend: str,
    logits_wanted: bool,
) -> tuple[Tensor, Tensor] | None:
    choice = explain(
        input,
        linear_weight,
        target,
        linear_bias,
        weight=weight,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        memory_budget=memory_budget,
        backend=backend,
    )
    if choice.backend == "torch":
        if input.is_cpu and not target.is_floating_point():  # torch names no argument
            ignored = IGNORED if ignore_index is None else ignore_index
            require_classes(NAME, target, linear_weight.shape[0], ignored)
        return None
    grad = torch.is_grad_enabled()
    settings = LossSettings(
        reduction,
        IGNORED if ignore_index is None else ignore_index,
        max(label_smoothing, 0.0),
        z_loss,
        softcap,
        logits_dtype(input),
        (
            grad and input.requires_grad,
            grad and linear_weight.requires_grad,
            grad and linear_bias is not None and linear_bias.requires_grad,
        ),
        logits_wanted,
        memory_budget,
        choice.backend,
    )
    rows = math.prod(input.shape[:-1])
    flat = input.reshape(rows, input.shape[-1]), target.reshape(rows).long()
    loss, logits, _ = LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        flat[0], linear_weight, flat[1], linear_bias, weight, settings
    )
    if not torch.is_autocast_enabled(input.device.type):
        loss = loss.to(input.dtype)
    if logits_wanted:
        logits = logits.reshape(*input.shape[:-1], linear_weight.shape[0])
    return loss.reshape(target.shape) if reduction == "none" else loss, logits


def _by_torch(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    memory_budget: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    ignored = IGNORED if ignore_index is None else ignore_index
    classes, *positions, _ = linear_weight.shape
    batch = input.shape[:-1]
    if linear_weight.dim() == 2 and len(batch) == 1:  # as few calls as it can be
        logits = functional.linear(input, linear_weight, linear_bias)
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        return by_torch(logits, target, weight, ignored, reduction, label_smoothing, z_loss), logits.detach()
    bias = None if linear_bias is None else linear_bias.reshape(-1)
    logits = functional.linear(input, linear_weight.flatten(0, -2), bias)
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    rows = math.prod(batch)
    loss = by_torch(
        logits.reshape(rows, classes, *positions),
        target.reshape(rows, classes, *positions) if target.is_floating_point() else target.reshape(rows, *positions),
        weight,
        ignored,
        reduction,
        label_smoothing,
        z_loss,
    )
    found = loss.reshape((*batch, *positions)) if reduction == "none" else loss
    return found, logits.detach().reshape(*batch, classes, *positions)


def _loss_by_torch(*args: Any, **settings: Any) -> Tensor:
    return _by_torch(*args, **settings)[0]


@explained_by(explain, _loss_by_torch, REASONS)
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    memory_budget: int | None = None,
    backend: str = "auto",
) -> Tensor | None:
    """``cross_entropy(linear(input, linear_weight, linear_bias), target, ...)``, holding one chunk of logits at a time.

    The arguments are those of torch 2.13's ``torch.nn.functional.linear_cross_entropy``, and work in any version; for
    its ``options`` there is ``memory_budget``. Forward computes the gradients that are wanted, the weight's summed in
    float32; backward scales them, in place unless the graph is retained. Under autocast the products are taken in its
    dtype, on the CPU in float32; gradients have the dtypes of their tensors, and the loss is float32.

    Args:
        input: [features] or [..., features]; float16, bfloat16, float32 or float64.
        linear_weight: [classes, features], of the same dtype; any but float64 under autocast. [classes, ..., features]
            goes to torch, as in its version.
        target: int64 or uint8, of ``input``'s shape without its features; probabilities, of the logits' shape, go to
            torch.
        linear_bias: [classes].
        weight: [classes], of each class.
        reduction: "mean", "sum" or "none".
        ignore_index: a target that counts for nothing; None for -100.
        label_smoothing: share of the target's weight that is spread over all classes, up to 1; below 0 is 0.
        z_loss: adds ``z_loss · logsumexp(logits)²`` to the loss of each row, not weighted by class; its mean is that
            over the rows that count.
        softcap: the logits are ``softcap · tanh(logits / softcap)`` first.
        memory_budget: bytes of logits held at once, of which one row is the least. None: 128 MiB on the CPU, elsewhere
            4 to 8 chunks.
        backend: "auto", "triton", "cpu" or "torch"; ``linear_cross_entropy.explain`` tells what "auto" takes.

    Returns:
        A scalar, or the shape of ``target`` with ``reduction="none"``. The mean over no target that counts is NaN,
        with gradients of zero.

    Raises:
        ValueError: a shape, dtype, device or setting does not fit; on the CPU also a target that is no class. On a GPU
            such a target stops the device with an assertion, as torch does.
    """
    both = _run(
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        reduction,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        memory_budget,
        backend,
        False,
    )
    return None if both is None else both[0]


@explained_by(explain, _by_torch, REASONS)
def linear_cross_entropy_and_logits(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    memory_budget: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor] | None:
    """:func:`linear_cross_entropy`, and the logits that its loss was computed from, soft-capped where it is.

    For accuracy, perplexity by token and the like: [..., classes], of the dtype that ``linear`` gives, with no graph.
    They cost their own memory and one copy, but no product of their own.
    """
    return _run(
        input,
        linear_weight,
        target,
        linear_bias,
        weight,
        reduction,
        ignore_index,
        label_smoothing,
        z_loss,
        softcap,
        memory_budget,
        backend,
        True,
    )
