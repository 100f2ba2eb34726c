"""What a layer, or several of them, cost a step: the numbers that every report sums and shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from gradscope.report.limited import Limited, limited, sum_of
from gradscope.tables import LayerRow


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a node costs a step, alone or with all below it. ``None``: measured for none of its layers."""

    layers: int = 0  # modules
    backward_self_ns: int = 0
    recompute_ns: int = 0
    accumulate_ns: int = 0
    gradient_sum_ns: int = 0
    hook_ns: int = 0
    forward_ns: int = 0
    communication_ns: int = 0  # with other ranks, in forward and backward; no part of backward_ns
    overlapped_ns: int = 0  # of its collectives' kernels, while their device did something else
    estimated_ns: int = 0  # of backward_ns: its share of kernels that compute several layers
    device_ns: int | None = None
    launch_ns: int | None = None
    flops: int | None = None
    backward_flops: int | None = None
    saved_bytes: int | None = None
    forward_allocated_bytes: int | None = None
    backward_allocated_bytes: int | None = None
    allocations: int | None = None
    copied_bytes: int | None = None
    forward_limited: Limited | None = None
    backward_limited: Limited | None = None

    @property
    def backward_ns(self) -> int:
        """Everything of the backward pass: own nodes, recompute, accumulation, gradient sums and the user's hooks."""
        return self.backward_self_ns + self.recompute_ns + self.accumulate_ns + self.gradient_sum_ns + self.hook_ns

    @property
    def estimated(self) -> float | None:
        """The share of backward that is an estimate; ``None`` without a backward."""
        return self.estimated_ns / self.backward_ns if self.backward_ns > 0 else None

    @property
    def ratio(self) -> float | None:
        """Backward over forward; ``None`` without a forward."""
        return self.backward_ns / self.forward_ns if self.forward_ns > 0 else None

    def limit_ns(self, metric: str = "backward") -> int | None:
        """Backward (or "forward") at this machine's limits; None unless that is the limit of nearly all of it."""
        found = self._limited(metric)
        whole = self.forward_ns if metric == "forward" else self.backward_ns
        return found.limit_ns if found is not None and found.covers(whole) else None

    def reached(self, metric: str = "backward") -> float | None:
        """The limit over the time of the operations that it is of; None unless these are nearly all of the layers'."""
        found = self._operations(metric)
        return None if found is None else found.reached

    def bound_by(self, metric: str = "backward") -> str:
        """What limits most of these operations: ``compute``, ``bandwidth 78 %``; empty where it is not known."""
        found = self._operations(metric)
        return "" if found is None else found.bound_by

    def _operations(self, metric: str) -> Limited | None:
        found = self._limited(metric)
        whole = self.forward_ns if metric == "forward" else self.backward_self_ns
        return found if found is not None and found.covers(whole) else None

    def _limited(self, metric: str) -> Limited | None:
        return self.forward_limited if metric == "forward" else self.backward_limited


_LIMITED = ("forward_limited", "backward_limited")
_AMOUNTS = tuple(f.name for f in fields(Amounts) if f.name not in _LIMITED)
_OPTIONAL = frozenset(f.name for f in fields(Amounts) if f.default is None) - frozenset(_LIMITED)


_RATED = {"flops": ("forward_ns", "backward_ns"), "backward_flops": ("backward_ns",)}  # over these times


def add_up(parts: Sequence[Amounts]) -> Amounts:
    """The sum; a value that some parts lack is the sum of those that have it, but for operations: they are a rate's."""
    if len(parts) == 1:
        return parts[0]
    sums: dict[str, Any] = {}
    for name in _AMOUNTS:
        known = [value for part in parts if (value := getattr(part, name)) is not None]
        lacks = any(_takes_time(part, _RATED.get(name, ())) for part in parts if getattr(part, name) is None)
        sums[name] = sum(known) if (known and not lacks) or name not in _OPTIONAL else None
    for name in _LIMITED:
        known = [value for part in parts if (value := getattr(part, name)) is not None]
        sums[name] = sum_of(known) if known else None
    return Amounts(**sums)


def _takes_time(part: Amounts, times: Sequence[str]) -> bool:
    return any(getattr(part, name) for name in times)


def amounts_of(row: LayerRow) -> Amounts:
    """Amounts of one layer, without those below it."""
    return Amounts(
        layers=1,
        backward_self_ns=row.backward_self_ns,
        recompute_ns=row.recompute_ns,
        accumulate_ns=row.accumulate_ns,
        gradient_sum_ns=row.gradient_sum_ns,
        hook_ns=row.hook_ns,
        forward_ns=row.forward_self_ns,
        communication_ns=row.communication_ns + row.forward_communication_ns,
        overlapped_ns=row.overlapped_communication_ns,
        estimated_ns=row.estimated_ns or 0,
        forward_limited=limited(row.forward_limit_ns, row.forward_self_ns, row.bound_by),
        backward_limited=limited(row.backward_limit_ns, row.backward_self_ns, row.bound_by),
        **{name: getattr(row, name) for name in _OPTIONAL},
    )
