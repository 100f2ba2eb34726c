"""The JSON of an exported trace -> columns, an event at a time.

Of an event nothing is kept but its numbers, so that a trace needs little more memory than its own text. Times are
nanoseconds from the first event; the file has microseconds with up to three decimals.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gradscope import markers
from gradscope.chrome.flops import flops_of
from gradscope.errors import TraceFileError
from gradscope.inputs import MOST_BYTES, NotJsonError, UnreadableError, parse_json, read_bytes
from gradscope.safe_text import shown_path
from gradscope.tables import IntColumn
from gradscope.trace.tree import Interner
from gradscope.units import size as size_text

_EXPORT = "Export one from the training loop with: prof.export_chrome_trace('trace.json.gz')"

# Categories of kineto's exports, newest and oldest names. Others (flows of copies, Python's own functions,
# annotations mirrored on the device, counters) hold nothing that is read here.
_OPS = frozenset({"cpu_op", "operator"})
_ANNOTATIONS = frozenset({"user_annotation"})
_RUNTIME = frozenset({"cuda_runtime", "cuda_driver", "runtime", "privateuse1_runtime", "xpu_runtime", "mtia_runtime"})
_DEVICE = frozenset(
    {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset", "concurrent_kernel", "privateuse1_driver"}
    | {"mtia_ccp_events", "xpu_kernel"}
)
_PYTHON = frozenset({"python_function"})
_ARROWS = frozenset({"fwdbwd"})

MODULE = "nn.Module: "
# The engine is entered by the first of these; where several enclose each other the innermost counts.
_ENGINE = ("<built-in method run_backward of ", "<built-in method run_backward>")
_ENGINE_CALLERS = (": _engine_run_backward", "torch/_tensor.py(", "torch/autograd/__init__.py(")

HOST, ANNOTATION, RUNTIME, CALL, BACKWARD = range(5)  # what a row of the host is


@dataclass(slots=True)
class HostEvents:
    """What threads of the program did; one entry an event."""

    kind: Any = field(default_factory=lambda: array("b"))
    name: Any = field(default_factory=lambda: array("i"))  # index into Exported.names
    thread: Any = field(default_factory=lambda: array("i"))  # index into Exported.threads
    start: Any = field(default_factory=lambda: array("d"))  # microseconds
    duration: Any = field(default_factory=lambda: array("d"))
    sequence: Any = field(default_factory=lambda: array("q"))  # -1: none
    forward_thread: Any = field(default_factory=lambda: array("q"))  # the profiler's number of a thread; 0: none
    external: Any = field(default_factory=lambda: array("q"))  # "External id"; -1: none
    correlation: Any = field(default_factory=lambda: array("q"))  # of a call of the device's runtime; -1: none


@dataclass(slots=True)
class DeviceEvents:
    """Kernels, copies and memsets; one entry an event."""

    name: Any = field(default_factory=lambda: array("i"))  # index into Exported.kernels
    start: Any = field(default_factory=lambda: array("d"))
    duration: Any = field(default_factory=lambda: array("d"))
    device: Any = field(default_factory=lambda: array("q"))
    stream: Any = field(default_factory=lambda: array("q"))
    external: Any = field(default_factory=lambda: array("q"))
    correlation: Any = field(default_factory=lambda: array("q"))


@dataclass(slots=True)
class Exported:
    """An exported trace as columns.

    Attributes:
        arrows: of each arrow from an operation to its backward node, by its number: (thread, start) of both ends.
        shapes: of each host event the number of its text in ``shape_texts``, -1 for none.
        flops: of each host event its floating-point operations, 0 where they are not known.
        about: what the file says of itself outside of its events.
    """

    name: str  # what messages call the file
    host: HostEvents = field(default_factory=HostEvents)
    device: DeviceEvents = field(default_factory=DeviceEvents)
    names: Interner = field(default_factory=Interner)
    kernels: Interner = field(default_factory=Interner)
    threads: dict[tuple[str, str], int] = field(default_factory=dict)
    arrows: dict[str, list[tuple[int, float] | None]] = field(default_factory=dict)
    shape_texts: Interner = field(default_factory=Interner)
    shapes: Any = field(default_factory=lambda: array("i"))
    flops: Any = field(default_factory=lambda: array("q"))  # of each host event
    about: dict[str, Any] = field(default_factory=dict)
    events: int = 0
    unread: int = 0  # events without a start, or with something else in place of a number

    def base(self) -> float:
        """The start of the first event, in the file's microseconds."""
        starts = [column for column in (self.host.start, self.device.start) if len(column)]
        return min(min(column) for column in starts) if starts else 0.0


def ns(microseconds: Any, base: float) -> IntColumn:
    """Nanoseconds from ``base`` on."""
    found: IntColumn = np.rint((np.frombuffer(microseconds, np.float64) - base) * 1000.0).astype(np.int64)
    return found


def read_exported(path: str | os.PathLike[str]) -> Exported:
    """Read a trace that ``torch.profiler`` exported, ``.json`` or ``.json.gz``.

    Raises:
        TraceFileError: it cannot be read, is cut off, or is no such trace.
    """
    name = shown_path(path)
    text = _text(path, name)
    reader = _Reader(Exported(name))
    try:
        whole = parse_json(text, constants=True, each=reader.take)
    except NotJsonError as error:
        raise TraceFileError(f"{name} is not a whole trace: {error}.\n{_EXPORT}") from error
    del text
    found = reader.found
    if isinstance(whole, dict):
        found.about = {key: value for key, value in whole.items() if key != "traceEvents"}
    if not found.events:
        raise TraceFileError(
            f"{name} is not a trace of torch.profiler: it has no events with a name, a start and a duration.\n{_EXPORT}"
        )
    _check_span(found)
    return found


def _check_span(found: Exported) -> None:
    """Refuse times that are too far apart for nanoseconds of 64 bits."""
    starts = [np.frombuffer(column, np.float64) for column in (found.host.start, found.device.start) if len(column)]
    if starts and max(each.max() for each in starts) - min(each.min() for each in starts) > _LONGEST_SPAN_US:
        raise TraceFileError(
            f"{found.name} has events that are more than 60 years apart: the times of some are broken.\n"
            "Export the trace again, or remove the events whose ts is far from that of the others."
        )


def _text(path: str | os.PathLike[str], name: str) -> str:
    try:
        data = read_bytes(path, pipes=True)
        if data[:2] == _GZIP:
            data = _unpacked(data)
        return data.decode("utf-8-sig", errors="replace")  # names of kernels of other compilers
    except UnreadableError as error:
        reason = "no such file" if error.missing else f"cannot be read: {error}"
        raise TraceFileError(f"{name}{':' if error.missing else ''} {reason}.\n{_EXPORT}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceFileError(f"{name} is cut off or damaged: {error}.\nCopy it again, or record it again.") from error
    except MemoryError as error:
        raise TraceFileError(f"{name} cannot be read: there is not enough memory for it.") from error


def _unpacked(data: bytes) -> bytes:
    """What gzip packed; no more than would be read of a plain file.

    Raises:
        EOFError: it ends before its end.
        UnreadableError: it is larger.
    """
    found: list[bytes] = []
    size = 0
    while data[:2] == _GZIP:  # one member behind another, as bgzip and cat make them
        unpacker = zlib.decompressobj(wbits=31)
        found.append(unpacker.decompress(data, _MOST_UNPACKED + 1 - size))
        size += len(found[-1])
        if size > _MOST_UNPACKED:
            raise UnreadableError(f"unpacked it has more than {size_text(_MOST_UNPACKED)}, the most that is read")
        if not unpacker.eof:
            raise EOFError("it ends before its end")
        data = unpacker.unused_data
    return found[0] if len(found) == 1 else b"".join(found)


_MOST_UNPACKED = 4 * MOST_BYTES
_GZIP = b"\x1f\x8b"


class _Reader:
    """Takes each object of the JSON as soon as it is read: an event becomes numbers, and nothing is left of it."""

    def __init__(self, found: Exported) -> None:
        self.found = found
        self._kinds: dict[Any, Callable[[dict[str, Any]], None] | None] = {}

    def take(self, value: dict[str, Any]) -> Any:
        """Return None of an event, and of other objects themselves."""
        phase = value.get("ph")
        if phase is None or "name" not in value:
            return value
        category = str(value.get("cat"))
        if phase == "X":
            if category not in self._kinds:
                self._kinds[category] = self._reader_of(category.lower())
            read = self._kinds[category]
            self.found.events += 1
            if read is not None:
                try:
                    read(value)
                except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
                    self.found.events -= 1  # no event of kineto's
                    self.found.unread += 1
        elif phase in ("s", "f") and category.lower() in _ARROWS:
            self._arrow(value, end=phase == "f")
        return None

    def _reader_of(self, category: str) -> Callable[[dict[str, Any]], None] | None:
        if category in _OPS:
            return self._op
        if category in _ANNOTATIONS:
            return self._annotation
        if category in _RUNTIME:
            return self._runtime
        if category in _DEVICE:
            return self._device
        return self._python if category in _PYTHON else None

    def _op(self, event: dict[str, Any]) -> None:
        self._host(HOST, event, str(event["name"]))

    def _annotation(self, event: dict[str, Any]) -> None:
        self._host(ANNOTATION, event, str(event["name"]))

    def _runtime(self, event: dict[str, Any]) -> None:
        self._host(RUNTIME, event, str(event["name"]))

    def _python(self, event: dict[str, Any]) -> None:
        name = event["name"]
        if name.startswith(MODULE) and len(name) > len(MODULE):
            self._host(CALL, event, name)
        elif name.startswith(_ENGINE) or (name.endswith("backward") and any(each in name for each in _ENGINE_CALLERS)):
            self._host(BACKWARD, event, name)

    def _host(self, kind: int, event: dict[str, Any], name: str) -> None:
        found, arguments = self.found.host, _arguments(event)
        start, duration = _times(event)
        thread = self._thread(event)
        sequence = _whole(arguments.get("Sequence number", -1))
        forward = _whole(arguments.get("Fwd thread id", 0))
        if forward >= _MOST_THREADS:
            raise ValueError(f"no number of a thread: {forward}")
        external = _external(arguments)
        correlation = _whole(arguments.get("correlation", -1)) if kind == RUNTIME else -1
        dims = arguments.get("Input Dims", arguments.get("Input dims")) if kind == HOST else None
        shape = _shape_text(dims)
        counts = kind == HOST and shape != ""
        flops = flops_of(name, dims, arguments.get("Concrete Inputs")) if counts else 0
        # Nothing below raises: an event is in all columns, or in none.
        found.kind.append(kind)
        found.name.append(self.found.names[_not_a_marker(name)])
        found.thread.append(thread)
        found.start.append(start)
        found.duration.append(duration)
        found.sequence.append(sequence)
        found.forward_thread.append(forward)
        found.external.append(external)
        found.correlation.append(correlation)
        self.found.shapes.append(self.found.shape_texts[shape] if shape else -1)
        self.found.flops.append(flops)

    def _device(self, event: dict[str, Any]) -> None:
        found, arguments = self.found.device, _arguments(event)
        start, duration = _times(event)
        device = _number(arguments.get("device", event.get("pid")))
        stream = _number(arguments.get("stream", event.get("tid")))
        external, correlation = _external(arguments), _whole(arguments.get("correlation", -1))
        found.name.append(self.found.kernels[str(event["name"])])
        found.start.append(start)
        found.duration.append(duration)
        found.device.append(device)
        found.stream.append(stream)
        found.external.append(external)
        found.correlation.append(correlation)

    def _arrow(self, event: dict[str, Any], *, end: bool) -> None:
        try:
            place = (self._thread(event), _times(event)[0])
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        ends = self.found.arrows.setdefault(str(event.get("id")), [None, None])
        ends[end] = place

    def _thread(self, event: dict[str, Any]) -> int:
        threads = self.found.threads
        return threads.setdefault((str(event.get("pid")), str(event.get("tid"))), len(threads) + 1)


def _not_a_marker(name: str) -> str:
    """The name of a row of the file; one that is named as gradscope's own markers are loses the colon."""
    if not name.startswith(markers.PREFIX):
        return name
    return f"{markers.PREFIX.removesuffix(':')} {name.removeprefix(markers.PREFIX)}"


def _arguments(event: dict[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _external(arguments: Mapping[str, Any]) -> int:
    return _whole(arguments.get("External id", arguments.get("external id", -1)))


_MOST_THREADS = 1 << 30
_LATEST_US, _LONGEST_US = 4e15, 1e12  # the year 2096, and eleven days: what is beyond is no time of a trace's
_LONGEST_SPAN_US = 2e15  # from the first event to the last; rows are nested by twice the nanoseconds


def _times(event: dict[str, Any]) -> tuple[float, float]:
    """Start and duration in microseconds.

    Raises:
        KeyError, TypeError, ValueError: it has no start, or one of them is no such number.
    """
    start, duration = float(event["ts"]), float(event.get("dur", 0))
    if not (abs(start) <= _LATEST_US and duration <= _LONGEST_US):
        raise ValueError(f"no time: {start}, {duration}")
    return start, max(duration, 0.0)


def _whole(value: Any) -> int:
    """An integer that a column can hold.

    Raises:
        TypeError, ValueError, OverflowError: it is none.
    """
    found = int(value)
    if abs(found) >= 1 << 62:
        raise OverflowError("no number of a trace's")
    return found


def _number(value: Any) -> int:
    try:
        return _whole(value)
    except (TypeError, ValueError, OverflowError):  # "stream 7", or a name
        digits = "".join(letter for letter in str(value) if letter.isdigit())
        return int(digits[:9]) if digits else 0


def _shape_text(dims: Any) -> str:
    """``[[8, 64], [], [64, 64]]`` -> ``"[8, 64] [64, 64]"``."""
    if not isinstance(dims, list):
        return ""
    return " ".join(json.dumps(shape) for shape in dims if isinstance(shape, list) and shape)
