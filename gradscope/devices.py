"""What a device is called, the same in RUN.json and beside the limits that are kept for it; waiting for one."""

from __future__ import annotations

import platform

import torch


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def is_capturing() -> bool:
    """Check that calls are being recorded into a CUDA graph: nothing runs, and waiting for the device would end it."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def synchronize() -> None:
    """Wait for the device, where one is in use and may be waited for."""
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
