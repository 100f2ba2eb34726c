"""Device activities of a trace -> :class:`~gradscope.tables.KernelTable`. Not yet run on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gradscope.tables import IntColumn, KernelTable

# CUDA runtime and driver calls are CPU rows that duplicate what the op rows around them already time; their thread
# number is the operating system's, so they would nest nowhere.
_RUNTIME_PREFIXES = ("cuda", "cu", "hip", "Activity Buffer")


def split_devices(events: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """``(host, device)``: rows of torch's own threads, and activities on a device. Runtime calls are dropped."""
    from torch.autograd import DeviceType  # type: ignore[attr-defined]

    host, device = [], []
    for event in events:
        if event.device_type() != DeviceType.CPU:
            # A record_function is mirrored on the device as one long bar over its kernels: not work of its own.
            if not event.is_user_annotation():
                device.append(event)
        elif not _is_runtime(event.name()):
            host.append(event)
    return host, device


def _is_runtime(name: str) -> bool:
    return name.startswith(_RUNTIME_PREFIXES) and "::" not in name and " " not in name.removeprefix("Activity ")


def read_kernels(events: Sequence[Any], correlation: IntColumn) -> KernelTable:
    """Kernels, copies and memsets in order of start, each with the row that launched it.

    Args:
        correlation: of each row on the host, in the order of the :class:`~gradscope.tables.EventTable`.
    """
    names: dict[str, int] = {}
    order = sorted(events, key=lambda event: event.start_ns())

    def column(values: list[int]) -> Any:
        return np.array(values, np.int64)

    start = column([event.start_ns() for event in order])
    return KernelTable(
        name=column([names.setdefault(event.name(), len(names)) for event in order]),
        names=tuple(names),
        start_ns=start,
        end_ns=start + column([event.duration_ns() for event in order]),
        device=column([event.device_index() for event in order]),
        stream=column([event.device_resource_id() for event in order]),
        row=launchers(correlation, column([event.linked_correlation_id() for event in order])),
    )


def launchers(of_rows: IntColumn, of_kernels: IntColumn) -> IntColumn:
    """The row that launched each kernel, by its correlation; -1 where there is none."""
    if not len(of_rows):
        return np.full(len(of_kernels), -1, np.int64)
    order = np.argsort(of_rows, kind="stable")
    known = of_rows[order]
    place = np.minimum(np.searchsorted(known, of_kernels), len(known) - 1)
    return np.where(known[place] == of_kernels, order[place], -1)
