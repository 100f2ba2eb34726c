"""How exact a recipe has to be, and what memory it may rely on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def assert_as_accurate(ours: Tensor, torchs: Tensor, truth: Tensor, what: str = "result") -> None:
    """Our largest error against ``truth`` is at most twice torch's own at the same dtype.

    Args:
        ours, torchs: results at the same dtype.
        truth: the same in float64.

    Where torch happens to be exact, or nearly so, rounding of the result itself is allowed: two units in the last place
    of the largest value, for a sum taken in another order may round its largest terms the other way.
    """
    assert ours.dtype == torchs.dtype, f"{what}: {ours.dtype}, torch's is {torchs.dtype}"
    assert ours.shape == torchs.shape == truth.shape, f"{what}: {tuple(ours.shape)}, torch's is {tuple(torchs.shape)}"
    if not truth.numel():
        return
    truth = truth.double()
    error = (ours.double() - truth).abs().max().item()
    allowed = (torchs.double() - truth).abs().max().item() * 2
    floor = 2 * torch.finfo(ours.dtype).eps * truth.abs().max().item()
    assert error <= max(allowed, floor), f"{what}: off by {error:.3g}, torch's own error twice is {allowed:.3g}"


@contextmanager
def dirty_memory() -> Iterator[None]:
    """While entered, ``torch.empty`` and its like return NaN (integers: the largest): what nobody wrote shows."""
    was, warn = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(was, warn_only=warn)
