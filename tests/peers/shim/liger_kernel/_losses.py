"""Losses under Liger-Kernel's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.recipes import cross_entropy, linear_cross_entropy, linear_cross_entropy_and_logits


@dataclass
class CrossEntropyOutput:
    """A loss with what was asked for beside it."""

    loss: Tensor
    z_loss: Tensor | None = None
    token_accuracy: Tensor | None = None
    predicted_tokens: Tensor | None = None


def _in_words_of_liger(loss: Any, *arguments: Any, **settings: Any) -> Any:
    """Liger asserts that a target is a class; the recipes raise an error, as torch does."""
    try:
        return loss(*arguments, **settings)
    except ValueError as error:
        assert "target holds" not in str(error), f"out of bounds: {error}"
        raise


def _z_loss(logits: Tensor, target: Tensor, ignored: int, scale: float, reduction: str) -> Tensor:
    each = scale * torch.logsumexp(logits.float(), -1).square()
    each = each.masked_fill(target == ignored, 0)
    if reduction == "mean":
        return each.sum() / (target != ignored).sum()
    return each.sum() if reduction == "sum" else each


def _beside(
    logits: Tensor, target: Tensor, ignored: int, scale: float, reduction: str, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """z-loss, accuracy and predictions, of logits that exist already; each where it is wanted."""
    with torch.no_grad():
        counts = target != ignored
        best = logits.argmax(-1)
        z_loss = _z_loss(logits, target, ignored, scale, reduction) if wanted[0] else None
        accuracy = (best == target)[counts].float()
        if reduction != "none":
            accuracy = accuracy.mean()
        return z_loss, accuracy if wanted[1] else None, best.masked_fill(~counts, -1) if wanted[2] else None


class CrossEntropy:
    """``gradscope.recipes.cross_entropy``, called as LigerCrossEntropyFunction is."""

    @staticmethod
    def apply(
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        loss = _in_words_of_liger(
            cross_entropy,
            logits,
            target,
            weight,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
            z_loss=lse_square_scale,
            softcap=softcap,
        )
        wanted = (return_z_loss, return_token_accuracy, return_predicted_tokens)
        if not any(wanted):
            return loss, None, None, None
        capped = logits if softcap is None else softcap * torch.tanh(logits.float() / softcap)
        z_loss, *others = _beside(capped, target, ignore_index, lse_square_scale, reduction, wanted)
        return loss, z_loss if z_loss is None else z_loss.to(loss.dtype), *others


class LinearCrossEntropy:
    """``gradscope.recipes.linear_cross_entropy``, called as LigerFusedLinearCrossEntropyFunction is.

    ``accum_dtype`` asks for what the recipe always does: it adds in float32.
    """

    @staticmethod
    def apply(
        hidden: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        bias: Tensor | None = None,
        ce_weight: Tensor | None = None,
        ignore_index: int = -100,
        lse_square_scale: float = 0.0,
        label_smoothing: float = 0.0,
        reduction: str = "mean",
        softcap: float | None = None,
        return_z_loss: bool = False,
        accum_dtype: torch.dtype | None = None,
        use_token_scaling: bool = False,
        return_token_accuracy: bool = False,
        return_predicted_tokens: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        settings: dict[str, Any] = {
            "weight": ce_weight,
            "reduction": "none" if use_token_scaling else reduction,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": lse_square_scale,
            "softcap": softcap,
        }
        wanted = (return_z_loss, return_token_accuracy, return_predicted_tokens)
        if any(wanted):
            loss, logits = linear_cross_entropy_and_logits(hidden, linear_weight, target, bias, **settings)
            return loss, *_beside(logits, target, ignore_index, lse_square_scale, reduction, wanted)
        loss = linear_cross_entropy(hidden, linear_weight, target, bias, **settings)
        if use_token_scaling:  # by the probability of the target, which is no part of the graph
            loss = loss * torch.exp(-loss.detach())
            loss = loss if reduction == "none" else loss.sum() if reduction == "sum" else loss.mean()
        return loss, None, None, None


def _structured(found: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None], wanted: bool) -> Any:
    return CrossEntropyOutput(*found) if wanted else found[0]


def _asks_for_more(settings: dict[str, Any]) -> bool:
    return any(value for name, value in settings.items() if name.startswith("return_"))


def liger_cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    **settings: Any,
) -> Any:
    """The loss, in a CrossEntropyOutput where more is asked for."""
    found = CrossEntropy.apply(input, target, weight, ignore_index, **settings)
    return _structured(found, _asks_for_more(settings))


def liger_fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ce_weight: Tensor | None = None,
    **settings: Any,
) -> Any:
    """The loss, in a CrossEntropyOutput where more is asked for."""
    found = LinearCrossEntropy.apply(input, weight, target, bias, ce_weight, **settings)
    return _structured(found, _asks_for_more(settings))


class CrossEntropyLoss(nn.Module):
    """The loss of logits, with Liger's settings."""

    def __init__(self, weight: Tensor | None = None, **settings: Any) -> None:
        super().__init__()
        self.weight, self.settings = weight, settings

    def forward(self, input: Tensor, target: Tensor) -> Any:
        """The loss of logits and classes."""
        found = CrossEntropy.apply(input, target, self.weight, **self.settings)
        return _structured(found, _asks_for_more(self.settings))


class LinearCrossEntropyLoss(nn.Module):
    """The loss of what goes into the last layer, with Liger's settings."""

    def __init__(self, ce_weight: Tensor | None = None, **settings: Any) -> None:
        super().__init__()
        self.ce_weight, self.settings = ce_weight, settings

    def forward(self, weight: Tensor, input: Tensor, target: Tensor, bias: Tensor | None = None) -> Any:
        """The loss of a layer's weight and input, and classes."""
        found = LinearCrossEntropy.apply(input, weight, target, bias, self.ce_weight, **self.settings)
        return _structured(found, _asks_for_more(self.settings))
