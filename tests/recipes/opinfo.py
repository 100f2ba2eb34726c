"""PyTorch's own samples of its operations, right and wrong ones, as its test suite makes them."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch


def operations(name: str) -> list[Any]:
    """PyTorch's OpInfo of ``name``, of ``torch`` or ``torch.nn.functional``, one a variant."""
    before = list(sys.path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of optional parts of torch's own tests
            from torch.testing._internal.common_methods_invocations import op_db
    finally:
        sys.path[:] = before  # the import appends to it
    return [op for op in op_db if op.name in (name, f"nn.functional.{name}")]


def samples(name: str, dtype: torch.dtype) -> list[Any]:
    """Sample inputs on the CPU, of all variants that know the dtype; what has a gradient requires it."""
    variants = [op for op in operations(name) if dtype in op.supported_dtypes("cpu")]
    return [sample for op in variants for sample in op.sample_inputs("cpu", dtype, requires_grad=True)]


def error_inputs(name: str) -> list[Any]:
    """Inputs that PyTorch refuses, each with its error's type, of all variants that have any."""
    variants = [op for op in operations(name) if op.error_inputs_func is not None]
    return [error for op in variants for error in op.error_inputs("cpu")]
