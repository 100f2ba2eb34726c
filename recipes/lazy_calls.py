"""The calls that lazy logits answer without being computed: views, casts, log_softmax and the losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradscope.recipes.lazy_graph import When
from gradscope.recipes.lazy_source import LinearSource, Step
from gradscope.recipes.lazy_steps import CASTS, COPIES, RESHAPES, TURNS, classes_after, features_after, is_bias
from gradscope.recipes.lazy_tensor import Lazy, LazyTensor, is_adopted, is_computed, of_layer, stand_in, takes_gradients
from gradscope.recipes.linear_cross_entropy import linear_cross_entropy

_HALVES = (torch.float16, torch.bfloat16)


def taken(
    logits: LazyTensor, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """The call's result without computing the logits; None where that cannot be."""
    if is_computed(logits) or is_adopted(logits) or logits._lazy.source.kept is not None:
        return None
    if name == "cross_entropy":
        return None if logits._lazy.logarithmic else _loss(logits, *args, **kwargs)
    if name == "nll_loss":
        return _loss(logits, *args, **kwargs) if logits._lazy.logarithmic else None
    if name == "log_softmax":
        return _log_softmax(logits, *args, **kwargs)
    if name in RESHAPES or name in TURNS or name == "getitem" or name in CASTS or name in COPIES:
        return _followed(logits, function, name, args, kwargs)
    return None


def with_bias(one: Any, other: Any) -> LazyTensor | None:
    """The logits of a layer with a bias, which is added to them."""
    logits, bias = (one, other) if isinstance(one, LazyTensor) else (other, one)
    if not isinstance(logits, LazyTensor) or type(bias) not in (Tensor, torch.nn.Parameter):
        return None
    lazy = logits._lazy
    source = _layer(lazy)
    mixed = source.when.autocast or torch.is_autocast_enabled(logits.device.type)
    if mixed or source.bias is not None or lazy.logarithmic or lazy.classes != logits.dim() - 1:
        return None
    same = is_bias(bias.shape, logits.shape) and bias.dtype == logits.dtype and bias.device == logits.device
    if not same or is_computed(logits) or is_adopted(logits) or source.kept is not None:
        return None
    if takes_gradients(lazy) != torch.is_grad_enabled():
        return None
    source.check(content=False)
    source.fused = True  # what is computed from the sum gives these logits no gradient
    return of_layer(type(logits), _features(lazy), source.weight, bias if bias.dim() == 1 else bias.view(-1))


def _followed(
    logits: LazyTensor, function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> LazyTensor | None:
    lazy = logits._lazy
    dtype = logits.dtype
    if name in CASTS or name in COPIES:
        wanted = _cast_to(logits, name, args, kwargs)
        if wanted is None:
            return None
        dtype = wanted
    before = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="meta")
    try:
        after = before.to(dtype) if name in CASTS else function(before, *args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
        return None  # the real tensor raises what it should
    if after is before:
        return logits
    classes = classes_after(name, args, kwargs, logits.shape, lazy.classes, after.shape)
    if classes is None or after.dtype != dtype:
        return None
    step = Step(name, function, args, kwargs, When.now(logits.device.type), lazy.classes, tuple(after.shape))
    return stand_in(type(logits), Lazy(lazy.source, (*lazy.steps, step), logits, classes, lazy.logarithmic), after)


def _cast_to(logits: LazyTensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype that a call casts to, where it does no more and loses nothing."""
    if name in COPIES or name == "float":
        wanted = logits.dtype if name in COPIES else torch.float32
        if args or kwargs:
            return None
    else:
        given = [each for each in (*args, *kwargs.values()) if each is not None]
        dtypes = [each for each in given if isinstance(each, torch.dtype)]
        devices = [each for each in given if isinstance(each, (torch.device, str))]
        if len(dtypes) + len(devices) != len(given) or not set(kwargs) <= {"dtype", "device"}:
            return None
        if not all(_is_there(logits, torch.device(each)) for each in devices) or (name == "type" and not dtypes):
            return None
        wanted = dtypes[0] if dtypes else logits.dtype
    same = wanted == logits.dtype
    return wanted if same or (logits.dtype in _HALVES and wanted == torch.float32) else None


def _is_there(logits: LazyTensor, device: torch.device) -> bool:
    if device.type != logits.device.type or device.index is not None:
        return device == logits.device
    return device.type != "cuda" or torch.cuda.current_device() == logits.device.index


def _log_softmax(
    logits: LazyTensor,
    dim: int | None = None,
    _stacklevel: Any = 3,
    dtype: torch.dtype | None = None,
    **others: Any,
) -> LazyTensor | None:
    lazy, rank = logits._lazy, logits.dim()
    if isinstance(_stacklevel, torch.dtype):  # torch.log_softmax has no such argument
        dtype = _stacklevel
    if others or lazy.logarithmic or not isinstance(dim, int) or not -rank <= dim < rank or dim % rank != lazy.classes:
        return None
    result = dtype or _loss_dtype(logits)
    if result != logits.dtype and not (logits.dtype in _HALVES and result == torch.float32):
        return None
    before = torch.empty_strided(logits.shape, logits.stride(), dtype=logits.dtype, device="meta")
    after = torch.log_softmax(before, dim).to(result)
    kwargs = {"dim": dim, "dtype": dtype}
    when = When.now(logits.device.type)
    step = Step("log_softmax", torch.log_softmax, (), kwargs, when, lazy.classes, tuple(after.shape))
    return stand_in(type(logits), Lazy(lazy.source, (*lazy.steps, step), logits, lazy.classes, True), after)


def _loss_dtype(logits: LazyTensor) -> torch.dtype:
    """The dtype that log_softmax and losses of the logits give: autocast has them in float32."""
    return torch.float32 if logits.dtype in _HALVES and torch.is_autocast_enabled(logits.device.type) else logits.dtype


def _layer(lazy: Lazy) -> LinearSource:
    """What logits are computed from."""
    assert isinstance(lazy.source, LinearSource)
    return lazy.source


def _features(lazy: Lazy) -> Tensor:
    """The layer's input, after the steps."""
    features = _layer(lazy).input
    for step in lazy.steps:
        features = features_after(step.name, step.args, step.kwargs, features, step.classes, step.shape)
    return features


def _loss(
    logits: LazyTensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    lazy = logits._lazy
    source = _layer(lazy)
    given = (target,) if weight is None else (target, weight)
    if any(type(each) not in (Tensor, torch.nn.Parameter) for each in given):
        return None
    if lazy.classes != min(1, logits.dim() - 1) or size_average is not None or reduce is not None:
        return None
    source.check(content=source.when.device == "cpu")
    half = source.dtype in _HALVES
    arguments: dict[str, Any] = {
        "weight": weight, "reduction": reduction, "ignore_index": ignore_index, "label_smoothing": label_smoothing
    }  # fmt: skip
    if target.is_floating_point():
        return None
    with torch.set_grad_enabled(takes_gradients(lazy) and torch.is_grad_enabled()):
        features = _features(lazy).movedim(lazy.classes, -1)
        operands = (features, source.weight, target, source.bias)
        # Under autocast the recipe's loss is not rounded to half precision, which a cast before the loss asks for.
        with torch.autocast(source.when.device, dtype=source.dtype if half else source.when.dtype, enabled=half):
            try:
                if linear_cross_entropy.explain(*operands, **arguments).backend == "torch":
                    return None
                loss = linear_cross_entropy(*operands, **arguments)
            except ValueError:  # torch says what is wrong, in its own way
                return None
        source.fused = True
        return loss.to(_loss_dtype(logits))
