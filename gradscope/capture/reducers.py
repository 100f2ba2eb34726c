"""What each model of DistributedDataParallel reduces together: its buckets, as its own reducer logs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gradscope.compat import reducer_log
from gradscope.tables import ReducerInfo
from gradscope.tree import named_modules_of


def reducers_of(
    modules: Iterable[nn.Module],
    label_of: Callable[[nn.Module], int | None],
    owners_of: Callable[[torch.Tensor], Sequence[int]],
) -> tuple[tuple[int, ReducerInfo], ...]:
    """The DDP models among ``modules`` whose buckets are known, each with its label; its path is to be found out.

    Args:
        label_of: a number for a module; None for one that is not to be told.
        owners_of: the numbers of the modules that hold a parameter: the first is what the buckets have.
    """
    if not torch.distributed.is_available():
        return ()
    kind = torch.nn.parallel.DistributedDataParallel
    found = []
    for model in (module for module in modules if isinstance(module, kind)):
        log, label = reducer_log(model), label_of(model)
        parameters = list(_reduced(model))
        buckets = _buckets(log, [_bytes(parameter) for parameter in parameters])
        if buckets is None or label is None:
            continue
        owners = [next(iter(owners_of(parameter)), -1) for parameter in parameters]
        info = ReducerInfo(
            path="",
            cap_bytes=int(log.get("bucket_cap_bytes") or 0),
            finds_unused=bool(log.get("find_unused_parameters")),
            buckets=tuple(tuple((owners[place], _bytes(parameters[place])) for place in bucket) for bucket in buckets),
            hooked=bool(log.get("comm_hook")),
        )
        found.append((label, info))
    return tuple(found)


def _reduced(model: Any) -> Iterator[torch.Tensor]:
    """The parameters in the order in which the reducer numbers them."""
    ignored = getattr(model, "parameters_to_ignore", ())
    seen: set[int] = set()
    for path, module in named_modules_of(model.module):
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad or f"{path}.{name}" in ignored:
                continue
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _buckets(log: Any, sizes: Sequence[int]) -> list[list[int]] | None:
    """The numbers of the parameters of each bucket, in the order in which buckets are sent; None where not known.

    After its first backward pass the reducer fills buckets anew, in the order in which gradients came, and logs which
    parameter is where. Without that they are filled in the order of registration and sent from the last to the first.
    Either is believed if the sizes are those that it logs.
    """
    if log.get("rebuilt_per_bucket_param_indices"):
        logged = log["rebuilt_per_bucket_param_indices"].split(",")
        buckets = [[int(number) for number in bucket.split()] for bucket in logged]
        wanted = _numbers(log.get("rebuilt_bucket_sizes"))
    else:
        wanted = _numbers(log.get("bucket_sizes"))
        buckets = _in_order(sizes, wanted[::-1])[::-1]
    every = sorted(number for bucket in buckets for number in bucket)
    if every != list(range(len(sizes))):
        return None
    filled = [sum(sizes[number] for number in bucket) for bucket in buckets]
    return buckets if filled == wanted else None


def _in_order(sizes: Sequence[int], wanted: Sequence[int]) -> list[list[int]]:
    """Buckets of these sizes, filled one after the other."""
    buckets: list[list[int]] = []
    number = 0
    for most in wanted:
        bucket: list[int] = []
        held = 0
        while number < len(sizes) and held < most:
            bucket.append(number)
            held += sizes[number]
            number += 1
        buckets.append(bucket)
    return buckets


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in text.split(",")] if text else []
