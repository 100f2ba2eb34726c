"""``gradscope doctor``: versions, devices, what can be measured on this machine, and its ceilings."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradscope import versions
from gradscope.cli.failure import note_kept, say
from gradscope.cli.options import Color, ColorOption
from gradscope.cli.streams import reader_may_leave, write_json
from gradscope.errors import GradscopeError

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
        say(f"the stored limits cannot be read: {problem}; measuring them again")
    load = _load()
    if load > _BUSY:
        say(f"this machine is busy (load {load:.1f}): the limits may come out too low; calibrate again when it is idle")
    for device in devices():
        say(f"measuring the limits of {device.type}: keep the machine idle")
        keep(measure(device), torch.get_num_threads() if device.type == "cpu" else None)
        note_kept(f"the limits of {device.type}")


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
            f"  not measured on {name} with this torch and thread count: run gradscope doctor --calibrate",
            soft_wrap=True,
        )


def _limit_rows(one: KeptLimits) -> Sequence[tuple[str, str]]:
    from gradscope import units

    return [
        *((f"{dtype} matmul", f"{units.flop(rate)}/s") for dtype, rate in one.limits.flops.items()),
        ("memory bandwidth", f"{units.size(one.limits.bytes)}/s"),
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


_NO_CUDA = "torch finds no CUDA device"
_BROKEN = "a torch interface listed above does not work as needed"


@dataclass(frozen=True)
class Answer:
    """One thing that can or cannot be measured here.

    Attributes:
        name: what it is.
        ok: it can be measured, or answers as it should.
        detail: how, or why not and what would help.
    """

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Diagnosis:
    """All that the doctor found."""

    versions: dict[str, str | None]  # None: not installed
    devices: list[str]
    interfaces: list[Answer]
    measurements: list[Answer]
    limits: Ceilings | None = None  # None: torch cannot be imported
    warnings: list[str] = field(default_factory=list)  # versions that gradscope was not tried on

    @property
    def ok(self) -> bool:
        """Profiling on the CPU works, which everything else stands on."""
        return bool(self.interfaces) and all(item.ok for item in self.interfaces)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    calibrate: Annotated[
        bool,
        typer.Option("--calibrate", help="Measure the peak rates of this machine, in under 20 s, and store them."),
    ] = False,
    color: ColorOption = Color.auto,
) -> None:
    """Show versions, devices, and what can be measured here.

    With --calibrate, also measure the peak rates of matmuls, copies and kernel
    launches: reports then say what limits each layer. Exit code 0 if profiling
    on the CPU works, else 2.
    """
    if calibrate:
        calibrate_all()
    diagnosis = diagnose()
    with reader_may_leave(sys.stdout):
        if as_json:
            record = {"ok": diagnosis.ok, **dataclasses.asdict(diagnosis)}
            write_json(sys.stdout, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        else:
            from gradscope.document.terminal import make_console

            _print(diagnosis, make_console(sys.stdout, color.wanted))
    raise typer.Exit(0 if diagnosis.ok else GradscopeError.exit_code)


def diagnose() -> Diagnosis:
    """Look at this machine; a torch that cannot be imported is a finding, not an error."""
    try:
        import torch
    except Exception as error:  # a broken CUDA library fails in many ways
        missing = Answer("import torch", False, f"{type(error).__name__}: {_first_line(error)}")
        return Diagnosis(_versions(None), [_cpu()], [missing], [])
    interfaces = _interfaces()
    works = all(item.ok for item in interfaces)
    return Diagnosis(
        _versions(torch),
        _devices(torch),
        interfaces,
        _measurements(torch, works=works),
        limits=ceilings(torch),
        warnings=versions.untried(torch.__version__),
    )


# --------------------------------------------------------------------------------------------------------------------
# What is there
# --------------------------------------------------------------------------------------------------------------------


def _versions(torch: Any) -> dict[str, str | None]:
    import gradscope

    found: dict[str, str | None] = {
        "gradscope": gradscope.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in ("torch", "triton", "numpy", "pandas", "rich", "typer"):
        found[package] = _version(package)
    if torch is not None:
        found["torch"] = str(torch.__version__)  # with the build, which the package's metadata may leave out
    found["CUDA of torch"] = torch.version.cuda if torch is not None else None
    found["NVIDIA driver"] = _nvidia_driver()
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _nvidia_driver() -> str | None:
    """The NVIDIA driver's version, from the kernel module itself: a CUDA library tells it only where CUDA works."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", text)
    return found.group(1) if found else None


def _devices(torch: Any) -> list[str]:
    devices = [f"{_cpu()}, torch uses {torch.get_num_threads()} threads"]
    if torch.cuda.is_available():
        from gradscope import units

        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            capability = f"compute capability {device.major}.{device.minor}"
            devices.append(f"cuda:{index}: {device.name}, {units.size(device.total_memory)}, {capability}")
    return devices


def _cpu() -> str:
    return f"cpu: {platform.processor() or platform.machine()}, {os.cpu_count()} logical cores"


# --------------------------------------------------------------------------------------------------------------------
# What works
# --------------------------------------------------------------------------------------------------------------------


def _interfaces() -> list[Answer]:
    from gradscope import compat

    return [Answer(item.name, item.ok, item.detail) for item in compat.check()]


def _measurements(torch: Any, *, works: bool) -> list[Answer]:
    base = "by sequence numbers of autograd nodes" if works else _BROKEN
    return [
        Answer("backward time by layer", works, base),
        Answer("backward time by source line", works, "in a separate pass" if works else base),
        Answer("memory by layer and line", works, "in a separate pass" if works else base),
        _flops(),
        _device_time(torch, works=works),
        _compile(torch),
    ]


def _flops() -> Answer:
    name = "FLOPs by layer"
    try:
        from torch.utils.flop_counter import flop_registry
    except ImportError as error:
        return Answer(name, False, _first_line(error))
    return Answer(name, bool(flop_registry), f"torch's registry knows {len(flop_registry)} operations")


def _device_time(torch: Any, *, works: bool) -> Answer:
    name = "CUDA kernel time by layer"
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else _NO_CUDA
        return Answer(name, False, built)
    supported = {str(activity).rpartition(".")[2] for activity in torch.profiler.supported_activities()}
    if "CUDA" not in supported:
        return Answer(name, False, "this torch is built without CUPTI, which reports kernels")
    if not works:
        return Answer(name, False, _BROKEN)
    try:
        kernels = _count_kernels(torch)
    except Exception as error:  # whatever the driver says is the answer
        return Answer(name, False, f"{type(error).__name__}: {_first_line(error)}")
    if not kernels:
        return Answer(
            name, False, "CUPTI reports no kernels: another profiler may hold it, or the driver may forbid it to users"
        )
    return Answer(name, True, "CUPTI reports kernels")


def _count_kernels(torch: Any) -> int:
    from gradscope import compat

    profiler = compat.new_profiler()
    with compat.quiet_kineto():
        profiler.start()
    try:
        torch.ones(64, device="cuda").sum().item()
    finally:
        with compat.quiet_kineto():
            profiler.stop()
    return sum(str(event.device_type()).endswith("CUDA") for event in compat.kineto_events(profiler))


def _compile(torch: Any) -> Answer:
    name = "models under torch.compile"
    cuda = torch.cuda.is_available()
    limits = "kernels of several layers are split by an estimate"
    if cuda and importlib.util.find_spec("triton") is None:
        return Answer(name, False, "triton is not installed, which torch.compile needs on CUDA")
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")  # as torch looks for it
    if not cuda and not shutil.which(compiler):
        return Answer(name, False, f"no C++ compiler {compiler}, which torch.compile needs on the CPU: install it")
    from gradscope import compat

    try:
        compat.probe_graphs()
    except (AttributeError, ImportError) as error:
        return Answer(name, False, f"compiled graphs are told as one row: {_first_line(error)}")
    try:
        compat.probe_entry()
    except (AttributeError, ImportError) as error:
        return Answer(name, False, f"operations beside compiled graphs have no lines and FLOPs: {_first_line(error)}")
    try:
        compat.probe_by_hand()
    except (AttributeError, ImportError) as error:
        return Answer(name, False, f"what graphs call by hand is their callers': {_first_line(error)}")
    return Answer(name, True, limits)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]


# --------------------------------------------------------------------------------------------------------------------
# Printing
# --------------------------------------------------------------------------------------------------------------------


def _print(diagnosis: Diagnosis, console: Console) -> None:
    rows = [(name, version or "not found") for name, version in diagnosis.versions.items()]
    rows += [("device", device) for device in diagnosis.devices]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        console.print(f"{name.ljust(width)}  {text}", soft_wrap=True)
    for warning in diagnosis.warnings:
        console.print(f"warning: {warning}", style="yellow", soft_wrap=True)
    _print_findings(console, "torch's interfaces", diagnosis.interfaces)
    _print_findings(console, "what can be measured here", diagnosis.measurements)
    if diagnosis.limits is not None:
        print_ceilings(console, diagnosis.limits)


def _print_findings(console: Console, title: str, findings: list[Answer]) -> None:
    if not findings:
        return
    console.print()
    console.print(title, style="bold")
    width = max(len(item.name) for item in findings)
    for item in findings:
        answer, style = ("yes", "green") if item.ok else ("no ", "yellow")
        console.print(f"  {answer}", style=style, end="")
        console.print(f"  {item.name.ljust(width)}  {item.detail}", soft_wrap=True)
