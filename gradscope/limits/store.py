"""Where the measured ceilings are kept: one JSON file in the user's cache folder.

An entry is for one device, number of threads and version of torch. The file can always be made again, so one that
cannot be read is told of and replaced, never an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gradscope.errors import OutputError
from gradscope.inputs import NotJsonError, UnreadableError, parse_json, read_text
from gradscope.tables import Limits

_FORMAT = 1
_MOST_BYTES = 10_000_000
_ENDLESS = 1e30  # no machine's: neither infinite nor not a number


@dataclass(frozen=True, slots=True)
class KeptLimits:
    """One entry.

    Attributes:
        limits: of the device that they name.
        threads: that torch used; None on a GPU, where they do not matter.
        torch: version.
        measured: seconds since 1970.
    """

    limits: Limits
    threads: int | None
    torch: str
    measured: float

    @property
    def key(self) -> tuple[str, int | None, str]:
        """The device, threads and torch that the file holds one entry for."""
        return self.limits.device, self.threads, self.torch

    def fits(self, device_name: str, threads: int, torch: str) -> bool:
        """Check that the limits were measured on this device, with these threads and this torch."""
        return (self.limits.device, self.torch) == (device_name, torch) and self.threads in (None, threads)


@dataclass(frozen=True, slots=True)
class Store:
    """The entries of the file of limits, and what is wrong with it.

    Attributes:
        problem: why nothing of it could be read; "" where it could, or where there is no file.
    """

    entries: tuple[KeptLimits, ...] = field(default=())
    problem: str = ""


def limits_file() -> Path:
    """``$XDG_CACHE_HOME/gradscope/limits.json``, or below ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if os.path.isabs(cache) else Path("~/.cache").expanduser()
    return folder / "gradscope" / "limits.json"


def kept(device_name: str, threads: int, torch_version: str | None = None) -> Limits | None:
    """What was measured for this device and number of threads; None where nothing was.

    Args:
        device_name: as ``device_name`` in the environment of a run.
        torch_version: of the torch that runs now, by default.
    """
    version = torch_version or _torch_version()
    return next((one.limits for one in read().entries if one.fits(device_name, threads, version)), None)


def read() -> Store:
    """All entries. Whatever is wrong with the file is a problem to tell of, no error."""
    try:
        text = read_text(limits_file(), _MOST_BYTES)
    except UnreadableError as error:
        return Store(problem="" if error.missing else str(error))
    except RuntimeError as error:  # nobody knows where home is
        return Store(problem=_reason(error))
    try:
        record = parse_json(text, constants=True)
    except NotJsonError:
        return Store(problem="it is not JSON")
    if not isinstance(record, dict) or record.get("gradscope_limits") != _FORMAT:
        return Store(problem="it was not written by this version of gradscope")
    rows = record.get("entries")
    found = [_entry(row) for row in rows] if isinstance(rows, list) else []
    entries = tuple(one for one in found if one is not None)
    return Store(entries, "" if entries else "it contains no limits")


def keep(limits: Limits, threads: int | None, torch_version: str | None = None, now: float | None = None) -> Path:
    """Write the entry beside those of other devices, threads and torches; the file is written whole or not at all.

    Raises:
        OutputError: the folder or file cannot be written.
    """
    new = KeptLimits(limits, threads, torch_version or _torch_version(), time.time() if now is None else now)
    entries = [*(one for one in read().entries if one.key != new.key), new]
    record = {"gradscope_limits": _FORMAT, "entries": [_row(one) for one in entries]}
    path = require_writable()
    try:
        _replace(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise _unwritable(path, _reason(error)) from error
    return path


def require_writable() -> Path:
    """The path of the file, its folder made; cheap, so that it can be asked for before anything is measured.

    Raises:
        OutputError: the folder cannot be made or written to.
    """
    try:
        path = limits_file()
    except RuntimeError as error:
        raise OutputError("the limits cannot be saved: there is no home folder.\nSet XDG_CACHE_HOME.") from error
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, _reason(error)) from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _unwritable(path, "no permission")
    return path


def _unwritable(path: Path, reason: str) -> OutputError:
    return OutputError(f"{path} cannot be written: {reason}.\nSet XDG_CACHE_HOME to a writable folder.")


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _row(one: KeptLimits) -> dict[str, Any]:
    return {
        "device": one.limits.device,
        "threads": one.threads,
        "torch": one.torch,
        "measured": one.measured,
        "flops": dict(one.limits.flops),
        "bytes": one.limits.bytes,
        "call_ns": one.limits.call_ns,
    }


def _entry(row: Any) -> KeptLimits | None:
    """None where it is not what :func:`_row` makes."""
    if not isinstance(row, dict):
        return None
    flops, device, version, threads = (row.get(name) for name in ("flops", "device", "torch", "threads"))
    if not (isinstance(device, str) and isinstance(version, str) and isinstance(flops, dict)):
        return None
    numbers = [row.get("bytes"), row.get("call_ns"), row.get("measured"), *flops.values()]
    if not all(_positive(number) for number in numbers):
        return None
    if threads is not None and (type(threads) is not int or threads < 1):
        return None
    return KeptLimits(
        Limits(device, _rates(flops), float(row["bytes"]), float(row["call_ns"])),
        threads,
        version,
        float(row["measured"]),
    )


def _rates(flops: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(rate) for name, rate in flops.items()}


def _positive(number: Any) -> bool:
    return type(number) in (int, float) and 0 < number < _ENDLESS


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _torch_version() -> str:
    import torch

    return str(torch.__version__)
