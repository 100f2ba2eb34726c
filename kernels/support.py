"""Where Triton kernels can run."""

from __future__ import annotations

import importlib.util
import os

import torch

OLDEST_CAPABILITY = (8, 0)  # bfloat16 and asynchronous copies
_INSTALLED = importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Check that Triton runs its kernels as Python, on the CPU: ``TRITON_INTERPRET=1``, set before it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def autocasts(kind: str) -> bool:
    """Check that autocast is on for a kind of device; some, as "meta", have none."""
    available = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    return available and torch.is_autocast_enabled(kind)


def why_no_triton(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on ``device``, in words; ``None`` where they can."""
    if not _INSTALLED:
        return "triton is not installed"
    if interpreting():
        return None
    if device.type != "cuda":
        return f"Triton has no {device.type} backend"
    if torch.version.hip is not None:
        return "the kernels were written for CUDA, not for ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        have, need = (".".join(map(str, numbers)) for numbers in (capability, OLDEST_CAPABILITY))
        return f"the device has compute capability {have}, the kernels need {need}"
    return None
