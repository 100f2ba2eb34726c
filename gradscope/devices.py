"""What a device is called: the same in RUN.json and beside the limits that are kept for it."""

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
