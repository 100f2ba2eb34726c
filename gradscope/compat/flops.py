"""Torch's formulas for the floating-point operations of an operation, and those that its registry lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch


@cache
def flop_formulas() -> Mapping[Any, Callable[..., int]]:
    """By packet of overloads (``torch.ops.aten.mm``); each is called with the operation's arguments and ``out_val``."""
    from torch.utils.flop_counter import flop_registry  # loads triton where there is one: not at import

    return {**flop_registry, **_cpu_attention_formulas()}


def _cpu_attention_formulas() -> dict[Any, Callable[..., int]]:
    """Torch's formulas for the CPU's flash attention, which its registry does not list."""
    from torch.utils.flop_counter import sdpa_backward_flop, sdpa_flop

    def spread(shared: Any, query: Any) -> tuple[int, ...]:
        """The shape with a head for each of the query's: torch 2.11 counts no heads that queries share."""
        return shared.shape[0], query.shape[1], *shared.shape[2:]

    def forward(query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
        return int(sdpa_flop(query.shape, spread(key, query), spread(value, query)))

    def backward(gradient: Any, query: Any, key: Any, value: Any, *_args: Any, **_kwargs: Any) -> int:
        return int(sdpa_backward_flop(gradient.shape, query.shape, spread(key, query), spread(value, query)))

    found: dict[Any, Callable[..., int]] = {}
    for name, formula in (("", forward), ("_backward", backward)):
        packet = getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{name}", None)
        if packet is not None:
            found[packet] = formula
    return found
