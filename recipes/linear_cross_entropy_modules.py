"""Drop-in Modules of :mod:`gradscope.recipes.linear_cross_entropy`."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.kernels.check import refuse, shape_text
from gradscope.recipes.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_and_logits


class LinearCrossEntropyLoss(nn.Module):
    """:func:`linear_cross_entropy` as a module with the arguments of torch 2.13's, and the function's extras.

    The layer is ``self.linear``, as in torch's: the keys of ``state_dict`` are "linear.weight", "linear.bias" and,
    where classes are weighted, "weight".
    """

    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        memory_budget: int | None = None,
    ) -> None:
        super().__init__()
        if weight is not None and tuple(weight.shape) != (num_classes,):
            refuse("LinearCrossEntropyLoss", "weight", shape_text(weight), f"({num_classes},)")
        self.num_classes, self.out_features = num_classes, tuple(out_features)
        rows = math.prod(self.out_features, start=num_classes)
        self.linear = nn.Linear(in_features, rows, bias=bias, device=device, dtype=dtype)
        self.register_buffer("weight", weight)
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.z_loss, self.softcap, self.memory_budget = z_loss, softcap, memory_budget

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """The loss of inputs [..., in_features] and targets."""
        shape = (self.num_classes, *self.out_features)
        linear_weight: Tensor = self.linear.weight
        linear_bias: Tensor | None = self.linear.bias
        if self.out_features:
            linear_weight = linear_weight.reshape(*shape, -1)
            linear_bias = None if linear_bias is None else linear_bias.reshape(shape)
        return linear_cross_entropy(
            input,
            linear_weight,
            target,
            linear_bias,
            weight=self.weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            memory_budget=self.memory_budget,
        )

    def extra_repr(self) -> str:
        """The settings that are not the defaults."""
        return f"out_features={self.out_features}, {_loss_text(self)}" if self.out_features else _loss_text(self)


class LinearCrossEntropyHead(nn.Linear):
    """A language model's head: :class:`torch.nn.Linear` that gives the loss where it is given a target.

    The keys of ``state_dict`` are those of ``nn.Linear``, so that checkpoints and tied weights stay as they are:
    ``head.weight = embedding.weight``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        class_weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        memory_budget: int | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.class_weight: Tensor | None
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.z_loss, self.softcap, self.memory_budget = z_loss, softcap, memory_budget

    def forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss; the logits [..., out_features], soft-capped where the loss is, with no target."""
        if target is None:
            logits = super().forward(input)
            return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        return linear_cross_entropy(input, self.weight, target, self.bias, **self._settings())

    def loss_and_logits(self, input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the logits without a graph; see :func:`linear_cross_entropy_and_logits`."""
        return linear_cross_entropy_and_logits(input, self.weight, target, self.bias, **self._settings())

    def _settings(self) -> dict[str, Any]:
        return {
            "weight": self.class_weight,
            "reduction": self.reduction,
            "ignore_index": self.ignore_index,
            "label_smoothing": self.label_smoothing,
            "z_loss": self.z_loss,
            "softcap": self.softcap,
            "memory_budget": self.memory_budget,
        }

    def extra_repr(self) -> str:
        """The words of ``nn.Linear``, and the loss's settings that are not the defaults."""
        return ", ".join(text for text in (super().extra_repr(), _loss_text(self)) if text)


def _loss_text(module: LinearCrossEntropyLoss | LinearCrossEntropyHead) -> str:
    settings = {
        "reduction": (module.reduction, "mean"),
        "ignore_index": (module.ignore_index, None),
        "label_smoothing": (module.label_smoothing, 0.0),
        "z_loss": (module.z_loss, 0.0),
        "softcap": (module.softcap, None),
        "memory_budget": (module.memory_budget, None),
    }
    return ", ".join(f"{name}={value!r}" for name, (value, default) in settings.items() if value != default)
