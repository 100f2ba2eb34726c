"""The logarithm of Triton kernels beside float64."""

from __future__ import annotations

import torch
from torch import Tensor


def logarithm(numbers: Tensor) -> Tensor:
    from .log_kernel import logarithms

    found = torch.empty_like(numbers)
    logarithms[(1,)](numbers, found, block=len(numbers))
    return found


def test_to_two_units_in_the_last_place(triton_device: torch.device) -> None:
    """Of sums of exponentials, which are 1 at least, also just above it; and down to the smallest normal number."""
    above = 1 + torch.logspace(-7, 9, 2048, dtype=torch.float64)
    below = torch.logspace(-37, 0, 2048, dtype=torch.float64)
    numbers = torch.cat([above, below]).float().to(triton_device)
    truth = numbers.double().log()
    assert ((logarithm(numbers).double() - truth).abs() <= 2 * 2**-23 * truth.abs()).all()


def test_of_no_number(triton_device: torch.device) -> None:
    numbers = torch.tensor([0.0, torch.inf, torch.nan, 1.0], device=triton_device)
    assert logarithm(numbers).tolist()[:2] == [-torch.inf, torch.inf]
    assert logarithm(numbers)[2].isnan() and logarithm(numbers)[3] == 0
