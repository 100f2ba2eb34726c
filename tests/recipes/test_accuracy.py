"""The tests' own measures can fail."""

from __future__ import annotations

import pytest
import torch

from .accuracy import assert_as_accurate, dirty_memory


def test_an_error_of_three_times_torchs_fails() -> None:
    truth = torch.tensor([1.0, 100.0], dtype=torch.float64)
    torchs = (truth + torch.tensor([0.01, 0.0], dtype=torch.float64)).float()
    assert_as_accurate((truth + 0.019).float(), torchs, truth)
    with pytest.raises(AssertionError, match=r"off by 0\.03"):
        assert_as_accurate((truth + 0.03).float(), torchs, truth)


def test_nan_fails() -> None:
    truth = torch.ones(2, dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_as_accurate(torch.tensor([1.0, float("nan")]), truth.float(), truth)


def test_memory_that_nobody_wrote_is_nan() -> None:
    with dirty_memory():
        assert torch.empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
