"""Floating-point operations of an event, from the shapes that it was recorded with, by torch's own formulas.

Source: ``torch.utils.flop_counter``, which counts the same operations while they run; attention as if every score were
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils import flop_counter

Shapes = Sequence[Any]  # of each argument; [] for what is no tensor


def _of_first(formula: Callable[..., int], count: int) -> Callable[[Shapes, Sequence[str]], int]:
    return lambda shapes, _: formula(*shapes[:count])


def _convolution(shapes: Shapes, given: Sequence[str]) -> int:
    x, weight = shapes[:2]
    transposed = given[6] == "True"
    stride, padding, dilation, added = (_numbers(given[i], len(x) - 2) for i in (3, 4, 5, 7))
    out = _spatial(x[2:], weight[2:], stride, padding, dilation, added if transposed else None)
    channels = weight[1] * int(given[8]) if transposed else weight[0]
    return int(flop_counter.conv_flop_count(x, weight, [x[0], channels, *out], transposed=transposed))


def _convolution_backward(shapes: Shapes, given: Sequence[str]) -> int:
    """Of the input's gradient, and of the weight's: both are convolutions. The bias's is a sum."""
    above, x, weight = shapes[:3]
    of_input, of_weight = (part.strip() == "True" for part in given[10].strip("[]()").split(",")[:2])
    transposed = given[7] == "True"
    count: Callable[..., int] = flop_counter.conv_flop_count
    found = count(above, weight, x, transposed=not transposed) if of_input else 0
    if of_weight:
        first, second = (above, x) if transposed else (x, above)
        found += count(*map(_channels_first, (first, second, weight)))
    return found


def _channels_first(shape: Sequence[int]) -> list[int]:
    return [shape[1], shape[0], *shape[2:]]


def _numbers(text: str, count: int) -> list[int]:
    found = [int(part) for part in text.strip("[]()").split(",") if part.strip()]
    return found * count if len(found) == 1 else found


def _spatial(
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    added: Sequence[int] | None,
) -> list[int]:
    """The output's sizes as ``nn.Conv2d`` has them, or with ``added`` (output_padding) as ``nn.ConvTranspose2d``."""
    found = []
    for i, length in enumerate(size):
        reach = dilation[i] * (kernel[i] - 1)
        if added is not None:
            found.append((length - 1) * stride[i] - 2 * padding[i] + reach + added[i] + 1)
        else:
            found.append((length + 2 * padding[i] - reach - 1) // stride[i] + 1)
    return found


_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention")  # torch counts none of the CPU's
_FORMULAS: dict[str, Callable[[Shapes, Sequence[str]], int]] = {
    "aten::mm": _of_first(flop_counter.mm_flop, 2),
    "aten::addmm": _of_first(flop_counter.addmm_flop, 3),
    "aten::bmm": _of_first(flop_counter.bmm_flop, 2),
    "aten::baddbmm": _of_first(flop_counter.baddbmm_flop, 3),
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **{f"aten::_scaled_dot_product_{kind}": _of_first(flop_counter.sdpa_flop_count, 3) for kind in _ATTENTION},
    **{
        f"aten::_scaled_dot_product_{kind}_backward": _of_first(flop_counter.sdpa_backward_flop_count, 4)
        for kind in _ATTENTION
    },
}


def flops_of(name: str, shapes: Any, given: Any) -> int:
    """Floating-point operations of one event; 0 for operations that are not counted, or of unknown shapes.

    Args:
        name: ``aten::mm``.
        shapes: ``Input Dims``.
        given: ``Concrete Inputs``, the values of what is no tensor as texts.
    """
    formula = _FORMULAS.get(name)
    if formula is None or not isinstance(shapes, list):
        return 0
    try:
        found = int(formula(shapes, given if isinstance(given, list) else ()))
    except (AssertionError, ArithmeticError, AttributeError, IndexError, TypeError, ValueError):
        return 0  # a trace of another torch, or a broken one
    return found if 0 < found < 1 << 60 else 0
