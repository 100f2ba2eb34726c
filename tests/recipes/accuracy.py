"""How exact a recipe has to be, and what memory it may rely on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

# Results of one sum in two orders are equally good, and their errors up to twofold apart.
FACTOR = 2


def assert_as_accurate(
    ours: Tensor, torchs: Tensor | Sequence[Tensor], truth: Tensor, what: str = "result", *, inner: float = 0.0
) -> None:
    """Our error is at most twice what torch's own and one rounding come to.

    Args:
        ours: a result.
        torchs: torch's at the same dtype, or several ways of torch to it: the least exact counts.
        truth: the same in float64.
        what: its name, for the message.
        inner: how far the result moves, at most, for a relative change of what is computed on the way, in float32 or
            wider: the size of terms that nearly cancel, or of the scores below a softmax.

    Torch's error alone is no bound. It is one draw of a quantity about as large as a rounding, is 0 by luck at times,
    and every processor draws again, for each adds up in another order. What no order avoids is one rounding: ``eps`` of
    the dtype times the size of the result, and ``eps`` of float32 times ``inner``.

    Compared are the largest error, which one wrong element shows in, and the root of the mean square, which shows when
    all elements are a little worse.
    """
    several = (torchs,) if isinstance(torchs, Tensor) else tuple(torchs)
    for other in several:
        assert ours.dtype == other.dtype, f"{what}: {ours.dtype}, torch's is {other.dtype}"
        assert ours.shape == other.shape == truth.shape, f"{what}: {tuple(ours.shape)}, torch's is {tuple(other.shape)}"
    if not truth.numel():
        return
    truth = truth.double()
    passing = torch.finfo(torch.float64 if ours.dtype == torch.float64 else torch.float32).eps * inner
    for name, size in (("largest", _largest), ("root mean square", _root_mean_square)):
        error = size(ours.double() - truth)
        torchs_error = max(size(other.double() - truth) for other in several)
        rounding = torch.finfo(ours.dtype).eps * size(truth) + passing
        assert error <= FACTOR * (torchs_error + rounding), (
            f"{what}: {name} error {error:.3g}; torch's own is {torchs_error:.3g}, one rounding {rounding:.3g}"
        )


def _largest(values: Tensor) -> float:
    return values.abs().max().item()


def _root_mean_square(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


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
