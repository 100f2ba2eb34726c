"""The part of ``gradscope doctor`` on what this machine can do at most."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradscope.cli.failure import say

if TYPE_CHECKING:
    from rich.console import Console

    from gradscope.limits import KeptLimits


@dataclass(frozen=True)
class Ceilings:
    """What this machine can do at most.

    Attributes:
        file: where they are kept.
        kept: those of this torch; none before ``--calibrate``.
        missing: names of devices here that were not measured with this torch and number of threads.
        problem: why the file could not be read; "" where it could.
    """

    file: str
    kept: list[KeptLimits]
    missing: list[str]
    problem: str


def calibrate_all() -> None:
    """Measure every device here and keep what came out."""
    try:
        import torch

        from gradscope.limits import keep, read, require_writable
        from gradscope.limits.measure import devices, measure
    except Exception:  # diagnose() says what is wrong with torch
        return
    require_writable()
    problem = read().problem
    if problem:
        say(f"the limits that were kept cannot be read: {problem}; they are measured again")
    load = _load()
    if load > _BUSY:
        say(f"this machine is busy (load {load:.1f}): limits may come out too low; measure again when it is not")
    for device in devices():
        say(f"measuring the limits of {device.type}: the machine should do nothing else")
        keep(measure(device), torch.get_num_threads() if device.type == "cpu" else None)


# Processes that want to run, on average over the last minute.
_BUSY = 0.5


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except (OSError, AttributeError):  # not known, or not on this platform
        return 0.0


def ceilings(torch: Any) -> Ceilings:
    """The ceilings that are kept, and the devices that would have to be measured."""
    from gradscope.devices import device_name
    from gradscope.limits import Store, limits_file, read
    from gradscope.limits.measure import devices

    try:
        file, store = str(limits_file()), read()
    except RuntimeError:  # no home folder
        file, store = "", Store(problem="there is no home folder")
    version, threads = str(torch.__version__), torch.get_num_threads()
    names = [device_name(device) for device in devices()]
    return Ceilings(
        file=file,
        kept=[one for one in store.entries if one.torch == version],
        missing=[name for name in names if not any(one.fits(name, threads, version) for one in store.entries)],
        problem=store.problem,
    )


def print_ceilings(console: Console, limits: Ceilings) -> None:
    """A table for each entry, and how to get what is missing."""
    console.print()
    console.print("this machine's limits", style="bold")
    for one in limits.kept:
        threads = "" if one.threads is None else f", {one.threads} thread{'s' if one.threads > 1 else ''}"
        console.print(f"  {one.limits.device}{threads}  measured {age(time.time() - one.measured)}", soft_wrap=True)
        rows = _limit_rows(one)
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            console.print(f"    {name.ljust(width)}  {text}", soft_wrap=True)
    if limits.problem:
        console.print(f"  no   {limits.file} cannot be read: {limits.problem}", style="yellow", soft_wrap=True)
    for name in limits.missing:
        console.print(
            f"  not measured on {name} with these threads and this torch: gradscope doctor --calibrate", soft_wrap=True
        )


def _limit_rows(one: KeptLimits) -> Sequence[tuple[str, str]]:
    from gradscope import units

    return [
        *((f"products of {dtype}", f"{units.flop(rate)}/s") for dtype, rate in one.limits.flops.items()),
        ("copies, read and written", f"{units.size(one.limits.bytes)}/s"),
        ("smallest call", units.ns(one.limits.call_ns)),
    ]


_AGES = ((86_400, "day"), (3_600, "hour"), (60, "minute"))


def age(seconds: float) -> str:
    """How long ago something was, in words: ``just now``, ``3 hours ago``, ``12 days ago``."""
    for length, name in _AGES:
        count = int(seconds // length)
        if count >= 1:
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"
