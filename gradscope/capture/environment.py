"""What the run ran on: versions, device, threads, precision settings."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from gradscope.capture.torch_flags import fp32_precision
from gradscope.devices import device_name


def describe_environment(device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
    """The ``environment`` of RUN.json; every value a string, a number or a bool.

    Args:
        device: where the model ran.
        dtype: of the model's parameters; None where they differ or there are none.
    """
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "triton": _version("triton"),
        "python": platform.python_version(),
        "platform": f"{sys.platform}-{platform.machine()}",
        "device": device.type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "usable_cpus": usable_cpus(),
        "dtype": str(dtype).removeprefix("torch.") if dtype is not None else None,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly_mode": torch.is_anomaly_enabled(),
    }
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
        found["tf32"] = fp32_precision("matmul") == "tf32"
    return {key: value for key, value in found.items() if value is not None}


def usable_cpus() -> int:
    """Cores that this process may use: those it may run on, and no more than its container's share of time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota()
    return allowed if quota is None else max(1, min(allowed, quota))


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> int | None:
    """Whole cores of a container's share, as Linux writes it; None where there is no limit."""
    try:
        limit, period = path.read_text().split()
        return int(limit) // int(period) if limit != "max" else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package) if importlib.util.find_spec(package) is not None else None
    except Exception:  # a stand-in of the user's in sys.modules has no spec; a file may not be opened any more
        return None
