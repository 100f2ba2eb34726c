"""What the benchmarks share: goals and verdicts, the printed table, the environment, and the line in results/."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Result:
    """One number beside its goal; ``higher`` tells which side of the goal is good. Without a goal it is for reading."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    higher: bool = False

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return ""
        good = self.value >= self.goal if self.higher else self.value <= self.goal
        return "ok" if good else "MISSED"


def print_table(title: str, results: Sequence[Result]) -> None:
    """Value, goal and verdict of each result."""
    width = max(len(result.name) for result in results)
    print(f"\n{title}")
    for result in results:
        goal = "" if result.goal is None else f"{'>=' if result.higher else '<='} {result.goal:g}"
        print(f"  {result.name:<{width}}  {result.value:>10.3f} {result.unit:<12} {goal:<9} {result.verdict}".rstrip())


def finish(name: str, results: Sequence[Result], device: str, path: Path | None) -> int:
    """Append the results as one JSON line to ``path``, if given; the exit code: 1 when a goal is missed."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [{**asdict(result), "verdict": result.verdict} for result in results]
        record = {"benchmark": name, **environment(device), "results": rows}
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
    return int(any(result.verdict == "MISSED" for result in results))


def environment(device: str) -> dict[str, Any]:
    """Commit, time, device and versions: without these a number says nothing."""
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "device": device,
        "device_name": torch.cuda.get_device_name() if device == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "liger": _version("liger-kernel"),
        "malloc": {name: value for name, value in sorted(os.environ.items()) if name.startswith("MALLOC_")},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit, marked where the tree holds more than it; outside a checkout what GRADSCOPE_COMMIT says, or None."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("GRADSCOPE_COMMIT")
    return done.stdout.strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    made.add_argument("--json", type=Path, metavar="FILE", help="append the results as one JSON line to FILE")
    return made


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], object], device: str) -> float:
    """Wall time of one step in ms, the device's work included."""
    synchronize(device)
    start = time.perf_counter_ns()
    step()
    synchronize(device)
    return (time.perf_counter_ns() - start) / 1e6


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


class TinyOps(nn.Module):
    """``count`` linears of 16x16: a model whose every op is far smaller than the cost of looking at it."""

    def __init__(self, count: int = 350) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def tiny_step(device: str, count: int = 350) -> tuple[nn.Module, Callable[[], object]]:
    """The model of tiny ops and one training step of it, without an optimizer."""
    model = TinyOps(count).to(device)
    batch = torch.randn(16, 16, device=device)

    def step() -> None:
        model.zero_grad()
        model(batch).sum().backward()

    return model, step


def example_step(path: Path, device: str) -> tuple[nn.Module, Callable[[], object]]:
    """The model of an example file and one training step of it, as ``gradscope profile`` runs it."""
    from gradscope import workload

    loaded = workload.load_target(str(path), [])
    if isinstance(loaded, workload.Script):
        sys.exit(f"{path} is a training script: this benchmark wants a file with workload()")
    return workload_step(loaded, device)


def workload_step(loaded: Any, device: str) -> tuple[nn.Module, Callable[[], object]]:
    """One training step of a loaded workload, without its optimizer."""
    model = loaded.model.to(device)
    batch = _to(loaded.batch, device)

    def step() -> None:
        model.zero_grad()
        output = _call(model, batch)
        loss = loaded.loss(output, batch) if loaded.loss is not None else _scalar(output)
        loss.backward()

    return model, step


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _to(value: Any, device: str) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _to(item, device) for key, item in value.items()}
    return type(value)(_to(item, device) for item in value) if isinstance(value, list | tuple) else value


def _scalar(output: Any) -> torch.Tensor:
    """The scalar to go backward from, where the workload gives no loss."""
    if hasattr(output, "loss"):
        output = output.loss
    candidates = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else [output]
    tensors = [item for item in candidates if isinstance(item, torch.Tensor) and item.requires_grad]
    scalars = [item for item in tensors if item.dim() == 0]
    return scalars[0] if scalars else torch.stack([item.mean() for item in tensors]).mean()
