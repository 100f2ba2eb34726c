"""The device that a kernel is launched on: its arguments', whichever is current."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """While entered, the tensor's GPU is the current one. Triton launches there, wherever its arguments are."""
    return torch.cuda.device(tensor.device) if tensor.device.type == "cuda" else contextlib.nullcontext()
