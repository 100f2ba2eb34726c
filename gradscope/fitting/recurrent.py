"""Finds layers that read the first dimension of the batch as time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gradscope.tree import named_modules_of
from gradscope.workload import call_model

_Sizes = dict[str, list[tuple[int, ...]]]


def find_time_major(model: nn.Module, batches: Sequence[Any]) -> str | None:
    """Name of a layer with ``batch_first=False`` whose time, and not whose batch, changes from batch to batch.

    ``nn.LSTM`` and its kind take (time, batch, features) unless told otherwise, and (time, features) for one sample.
    A model that turns its samples first before it calls them is all right. The model is called once for each of
    ``batches``, without a graph, and only if it has such a layer.
    """
    layers = {
        name or type(module).__name__: module
        for name, module in named_modules_of(model)
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first
    }
    if not layers:
        return None
    seen: list[_Sizes] = []
    for batch in batches:
        shapes: _Sizes = {}
        handles = [module.register_forward_pre_hook(_noting(shapes, name)) for name, module in layers.items()]
        try:
            with torch.no_grad():
                call_model(model, batch)
        finally:
            for handle in handles:
                handle.remove()
        seen.append(shapes)
    first, last = seen[0], seen[-1]
    for name in layers:
        for before, after in zip(first.get(name, ()), last.get(name, ()), strict=False):
            if before[0] != after[0] and before[1:] == after[1:]:
                return f"{name} ({type(layers[name]).__name__})"
    return None


def _noting(shapes: _Sizes, name: str) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor):
            shapes.setdefault(name, []).append(tuple(args[0].shape))

    return hook
