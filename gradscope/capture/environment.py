"""What the run ran on and how torch was set: versions, device, threads, switches."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from gradscope.capture.guard import Guard
from gradscope.capture.hooks_aside import HooksAside
from gradscope.capture.modules import no_compile_warning
from gradscope.compat import DYNAMO
from gradscope.devices import device_name
from gradscope.process import rank_of_process
from gradscope.tables import OptimizerFact

_DENORMAL = 5e-324


def current_settings() -> dict[str, Any]:
    """Switches by name; those of a device that is not in use are left out.

    ``anomaly``: torch.autograd.set_detect_anomaly; ``anomaly_nan``: with its check for NaN; ``deterministic``:
    torch.use_deterministic_algorithms; ``fill_uninitialized``: with torch.empty filled; ``flush_denormal``:
    torch.set_flush_denormal, as this thread computes; ``matmul_precision``:
    torch.get_float32_matmul_precision(), or None where torch refuses to say; ``threads``; ``validate_args``:
    torch.distributions' own checks. On CUDA also ``cudnn_benchmark``, ``cudnn_tf32`` (of convolutions),
    ``matmul_tf32``, ``conv_fp32`` and ``matmul_fp32`` (:func:`fp32_precision`), ``capability``, ``launch_blocking``
    (CUDA_LAUNCH_BLOCKING) and ``no_caching`` (PYTORCH_NO_CUDA_MEMORY_CACHING).
    """
    found: dict[str, Any] = {
        "anomaly": torch.is_anomaly_enabled(),
        "anomaly_nan": torch.is_anomaly_check_nan_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill_uninitialized": getattr(torch.utils.deterministic, "fill_uninitialized_memory", True),
        "flush_denormal": _DENORMAL * 1.0 == 0.0,  # torch does not say; Python's numbers go by the same switch
        "matmul_precision": _matmul_precision(),
        "threads": torch.get_num_threads(),
        "validate_args": torch.distributions.Distribution._validate_args,
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found |= {
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_tf32": fp32_precision("conv") == "tf32",
            "conv_fp32": fp32_precision("conv"),
            "matmul_tf32": fp32_precision("matmul") == "tf32",
            "matmul_fp32": fp32_precision("matmul"),
            "capability": list(torch.cuda.get_device_capability()),
            "launch_blocking": os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
            # torch only asks whether this one is set.
            "no_caching": "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ,
        }
    found["compiled"] = DYNAMO in sys.modules
    return found


def fp32_precision(operation: Literal["matmul", "conv"]) -> str:
    """How CUDA computes this operation in float32: "tf32", or "ieee" or "none" for full precision.

    "ieee" was asked for by an ``fp32_precision``. The older ``allow_tf32`` raise where the newer switches were set.
    """
    backends: Any = torch.backends
    backend = backends.cuda.matmul if operation == "matmul" else backends.cudnn.conv
    return str(backend.fp32_precision)


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch.backends.fp32_precision and its like were set
        return None


def optimizer_fact(optimizer: Optimizer) -> OptimizerFact:
    """What decides how its step runs."""
    with torch._C.DisableTorchFunction():  # a mode of the user's sees the user's calls alone
        return _optimizer_fact(optimizer)


def _optimizer_fact(optimizer: Optimizer) -> OptimizerFact:
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kind = type(optimizer)
    own = kind.__module__.startswith("torch.optim")
    return OptimizerFact(
        # Others have classes of the same names, which take other arguments.
        class_name=kind.__name__ if own else f"{kind.__module__}.{kind.__qualname__}",
        fused=_of_groups(optimizer, "fused"),
        foreach=_of_groups(optimizer, "foreach"),
        tensors=len(held),
        elements=sum(parameter.numel() for parameter in held),
    )


def _of_groups(optimizer: Optimizer, name: str) -> bool | None:
    """A setting that each group of parameters may have of its own: True where all have it."""
    given = {group.get(name, optimizer.defaults.get(name)) for group in optimizer.param_groups}
    return True if given == {True} else None if given <= {None} else False


def describe_environment(
    device: torch.device, dtype: torch.dtype | None, ranks: tuple[int, int] | None = None, mesh: str | None = None
) -> dict[str, Any]:
    """The ``environment`` of RUN.json; every value a string, a number or a bool.

    Args:
        device: where the model ran.
        dtype: of the model's parameters; None where they differ or there are none.
        ranks: rank and number of ranks, where they were seen while it ran: its process group may be gone.
        mesh: how its parameters lie on the ranks, as `mesh_of` says it.
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
    if (ranks := ranks or rank_and_size()) is not None:
        found["rank"], found["world_size"] = ranks
        found["mesh"] = mesh
    if device.type == "cuda":
        found["cuda"] = torch.version.cuda
        found["tf32"] = fp32_precision("matmul") == "tf32"
    return {key: value for key, value in found.items() if value is not None}


def rank_and_size() -> tuple[int, int] | None:
    """This process's rank and how many there are: of the process group, or as ``torchrun`` says."""
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        return group.get_rank(), group.get_world_size()
    return rank_of_process()


def mesh_of(parameters: Iterable[torch.Tensor]) -> str | None:
    """The device meshes that parameters lie on: ``2 dp x 4 tp``, or ``8`` for one whose dimensions have no names.

    Those of a larger one's dimensions are not said again; of several, those with most dimensions come first. None where
    no parameter is a ``DTensor``.
    """
    tensor = sys.modules.get("torch.distributed.tensor")  # nobody has one before it is imported
    if tensor is None:
        return None
    held = {parameter.device_mesh for parameter in parameters if isinstance(parameter, tensor.DTensor)}
    found = {_sides(mesh.shape, mesh.mesh_dim_names) for mesh in held}
    largest = [one for one in found if not any(set(one) < set(other) for other in found)]
    return ", ".join(" x ".join(sides) for sides in sorted(largest, key=lambda sides: (-len(sides), sides))) or None


def _sides(shape: Sequence[int], names: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(f"{size} {name}".strip() for size, name in zip(shape, names or [""] * len(shape), strict=True))


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


_DEBUGGING = ("anomaly", "deterministic", "validate_args")


class SwitchWatch:
    """Looks at the switches where the step's first module is called, and where each backward pass begins."""

    def __init__(self) -> None:
        self._seen: list[dict[str, Any]] = []

    @contextmanager
    def watching(self, guard: Guard, aside: HooksAside) -> Iterator[None]:
        """Look at the first module call until the block is left."""

        def first(module: nn.Module, args: Any) -> None:
            if not self._seen:
                self.look()

        hook = guard.hook("reading torch's settings", first)
        with aside.holding(partial(register_module_forward_pre_hook, hook)), no_compile_warning():
            yield

    def look(self) -> None:
        """Note how the switches are now."""
        self._seen.append(current_settings())

    def with_seen(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """``settings``, those between two steps, with what was on inside of the step.

        ``inside_step``: names of the switches that were on there only.
        """
        found = dict(settings)
        inside = []
        for name in _DEBUGGING:
            on = [seen for seen in self._seen if seen.get(name)]
            if on and not settings.get(name):
                inside.append(name)
                found[name] = True
                if name == "anomaly":
                    found["anomaly_nan"] = any(seen.get("anomaly_nan") for seen in on)
        if inside:
            found["inside_step"] = inside
        return found
