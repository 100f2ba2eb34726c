"""What each model of DistributedDataParallel reduces together: its buckets, as its own reducer logs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from gradscope.compat import reducer_log
from gradscope.tables import ReducerInfo
from gradscope.tree import modules_of, named_modules_of


def reducers_of(
    tops: Iterable[nn.Module],
    path_of: Callable[[nn.Module], str],
    owners_of: Callable[[Sequence[torch.Tensor]], Sequence[int]],
) -> tuple[ReducerInfo, ...]:
    """The DDP models in ``tops`` whose buckets are known.

    Args:
        path_of: the path of a module.
        owners_of: of each parameter the row of its layer, -1 for none.
    """
    if not torch.distributed.is_available():
        return ()
    kind = torch.nn.parallel.DistributedDataParallel
    found = []
    for model in (module for top in tops for module in modules_of(top) if isinstance(module, kind)):
        log = reducer_log(model)
        parameters = list(_reduced(model))
        buckets = _buckets(log, [_bytes(parameter) for parameter in parameters])
        if buckets is None:
            continue
        owners = owners_of(parameters)
        found.append(
            ReducerInfo(
                path=path_of(model),
                cap_bytes=int(log.get("bucket_cap_bytes") or 0),
                finds_unused=bool(log.get("find_unused_parameters")),
                buckets=tuple(
                    tuple((owners[place], _bytes(parameters[place])) for place in bucket) for bucket in buckets
                ),
            )
        )
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
