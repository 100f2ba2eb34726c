"""A linear layer whose output is computed when somebody reads it, for a loss that needs no logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function_unary

from gradscope.kernels.plain import why_torch
from gradscope.recipes.lazy_logits import lazy_logits
from gradscope.recipes.linear_cross_entropy_arguments import logits_dtype

# What may stand behind the last linear layer of a Sequential and leaves the logits lazy.
_ENDINGS = (nn.LogSoftmax, nn.Flatten, nn.Unflatten, nn.Identity)
_M = TypeVar("_M", nn.Sequential, nn.Linear)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def lazy_linear(layer: Callable[[Tensor], Tensor] | Tensor, input: Tensor, bias: Tensor | None = None) -> Tensor:
    """``layer(input)``, or ``linear(input, layer, bias)``, computed when somebody reads it.

    The result has the shape, dtype, device and graph of the layer's output. ``F.cross_entropy``,
    ``nn.CrossEntropyLoss`` and ``log_softmax`` with ``nll_loss`` take the loss from the layer's operands by
    :func:`~gradscope.recipes.linear_cross_entropy`, with their arguments, and also behind ``view``, ``reshape``,
    ``flatten``, ``transpose``, ``permute``, slices, ``contiguous`` and ``float``. Anything else computes the logits
    once, as the layer would have, and goes on with them; gradients of both ways add up.

    The layer is called as it is where its forward is not that of ``nn.Linear`` (or of an ``nn.Sequential`` that ends in
    one and perhaps ``nn.LogSoftmax``), where it has hooks, under ``torch.no_grad()`` and inference mode, and under
    ``torch.compile``, ``torch.func`` transforms, tracing and forward-mode derivatives.

    Logits that somebody still holds when an optimizer of torch's steps keep a copy of the layer's weight as it was, so
    that they can be read after the step.

    Args:
        layer: a module, or whatever is called like one; or a weight [classes, features].
        input: [..., features].
        bias: [classes]; with a weight only.

    Raises:
        RuntimeError: later, where the logits are read for the first time after the weight or the input was changed in
            place by other means than an optimizer's step; or where their gradient is asked for after a loss was taken
            without them.
    """
    is_subclass = isinstance(input, Tensor) and type(input) not in (Tensor, nn.Parameter)
    if not is_subclass and has_torch_function_unary(input):  # a mode, or torch.fx
        return handle_torch_function(lazy_linear, (input,), layer, input, bias)
    if not isinstance(layer, Tensor):
        return _called(layer, input)
    if _can_wait(input, layer, bias):
        return lazy_logits(input, layer, bias)
    return functional.linear(input, layer, bias)


def _called(layer: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    if _is_plain(layer, nn.Sequential):
        children = list(layer.children())
        last = len(children)
        while last and type(children[last - 1]) in _ENDINGS:
            last -= 1
        result = input
        for index, each in enumerate(children):
            result = _called(each, result) if index == last - 1 else each(result)
        return result
    if _is_plain(layer, nn.Linear):
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")  # computed ones are elsewhere
        if isinstance(weight, Tensor) and _can_wait(input, weight, bias):
            return lazy_logits(input, weight, bias)
    return layer(input)


def _is_plain(layer: object, kind: type[_M]) -> TypeGuard[_M]:
    """Check that a call of the layer is the forward of ``kind`` and no more."""
    if not isinstance(layer, kind) or type(layer).forward is not kind.forward or "forward" in vars(layer):
        return False
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return not any(hooks) and type(layer).__call__ is nn.Module.__call__ and layer._compiled_call_impl is None


def _can_wait(input: Any, weight: Any, bias: Any) -> bool:
    given = [each for each in (input, weight, bias) if each is not None]
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or why_torch(given) is not None:
        return False
    if not torch.is_grad_enabled():  # what is read later, as an average of weights is put in, was meant for these
        return False
    if any(each.is_inference() or each.dtype not in _DTYPES or each.device != input.device for each in given):
        return False
    if input.device.type not in {"cpu", "cuda"} or input.dim() == 0 or weight.dim() != 2 or 0 in weight.shape:
        return False
    if input.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        return False
    # Under autocast dtypes may differ, but float64 is not cast.
    mixed = torch.is_autocast_enabled(input.device.type) and all(each.dtype != torch.float64 for each in given)
    return mixed or all(each.dtype == logits_dtype(input) for each in given)
