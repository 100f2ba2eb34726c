"""What of torch's switches changes how a step runs, as it was while the step ran."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

import torch
from torch.optim import Optimizer

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
    found["compiled"] = "torch._dynamo" in sys.modules
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
