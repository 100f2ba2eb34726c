"""What of torch's switches changes how a step runs, as it was while the step ran."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.optim import Optimizer

from gradscope.tables import OptimizerFact


def current_settings() -> dict[str, Any]:
    """Switches by name; those of a device that is not in use are left out.

    ``anomaly``: torch.autograd.set_detect_anomaly; ``anomaly_nan``: with its check for NaN; ``deterministic``:
    torch.use_deterministic_algorithms; ``fill_uninitialized``: with torch.empty filled; ``matmul_precision``:
    torch.get_float32_matmul_precision(); ``threads``; ``validate_args``: torch.distributions' own checks. On CUDA also
    ``cudnn_benchmark``, ``cudnn_tf32``, ``capability``, ``launch_blocking`` (CUDA_LAUNCH_BLOCKING) and ``no_caching``
    (PYTORCH_NO_CUDA_MEMORY_CACHING).
    """
    found: dict[str, Any] = {
        "anomaly": torch.is_anomaly_enabled(),
        "anomaly_nan": torch.is_anomaly_check_nan_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill_uninitialized": getattr(torch.utils.deterministic, "fill_uninitialized_memory", True),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "threads": torch.get_num_threads(),
        "validate_args": torch.distributions.Distribution._validate_args,
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found |= {
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "capability": list(torch.cuda.get_device_capability()),
            "launch_blocking": os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
            # torch only asks whether this one is set.
            "no_caching": "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ,
        }
    found["compiled"] = "torch._dynamo" in sys.modules
    return found


def optimizer_fact(optimizer: Optimizer) -> OptimizerFact:
    """What decides how its step runs."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return OptimizerFact(
        class_name=type(optimizer).__name__,
        fused=optimizer.defaults.get("fused"),
        foreach=optimizer.defaults.get("foreach"),
        tensors=len(held),
        elements=sum(parameter.numel() for parameter in held),
    )
