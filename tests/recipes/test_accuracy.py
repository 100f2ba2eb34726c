"""The tests' own measures can fail."""

from __future__ import annotations

import pytest
import torch

from .accuracy import assert_as_accurate, dirty_memory


def test_an_error_of_three_times_torchs_fails() -> None:
    truth = torch.tensor([1.0, 100.0], dtype=torch.float64)
    torchs = (truth + torch.tensor([0.01, 0.0], dtype=torch.float64)).float()
    assert_as_accurate((truth + torch.tensor([0.019, 0.0])).float(), torchs, truth)
    with pytest.raises(
        AssertionError, match=r"result: largest error 0\.03; torch's own is 0\.01, one rounding 1\.19e-05"
    ):
        assert_as_accurate((truth + torch.tensor([0.03, 0.0])).float(), torchs, truth)


def test_all_elements_three_times_as_wrong_fail_though_the_largest_is_not() -> None:
    truth = torch.zeros(100, dtype=torch.float64)
    torchs = torch.full((100,), 0.01)
    torchs[0] = 1.0
    with pytest.raises(AssertionError, match="root mean square error 0\\.3; torch's own is 0\\.1"):
        assert_as_accurate(torch.full((100,), 0.3), torchs, truth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_where_torch_is_exact_one_rounding_is_allowed_and_three_are_not(dtype: torch.dtype) -> None:
    """A unit in the last place of values just above 1, either way."""
    truth, unit = torch.ones(8, dtype=torch.float64), torch.finfo(dtype).eps
    exact = truth.to(dtype)
    assert_as_accurate(exact + unit, exact, truth)
    with pytest.raises(AssertionError, match="result: largest error"):
        assert_as_accurate(exact + 3 * unit, exact, truth)


def test_what_cancels_on_the_way_is_rounded_in_float32() -> None:
    """One rounding of terms of size 1,000 is left over; of a result in float16 too, for its sums are in float32."""
    truth = torch.zeros(4, dtype=torch.float64)
    left = 1_000 * torch.finfo(torch.float32).eps
    for dtype in (torch.float32, torch.float16):
        assert_as_accurate(torch.full((4,), left, dtype=dtype), truth.to(dtype), truth, inner=1_000)
        with pytest.raises(AssertionError, match=r"dq: largest error 0\.000358"):
            assert_as_accurate(torch.full((4,), 3 * left, dtype=dtype), truth.to(dtype), truth, "dq", inner=1_000)


def test_the_least_exact_way_of_torchs_counts() -> None:
    truth = torch.zeros(4, dtype=torch.float64)
    exact, off = torch.zeros(4), torch.full((4,), 0.01)
    assert_as_accurate(off, (exact, off), truth)
    with pytest.raises(AssertionError, match="result: largest error"):
        assert_as_accurate(off, (exact, exact), truth)


@pytest.mark.parametrize("kind", ["dtype", "shape"])
def test_another_dtype_or_shape_fails(kind: str) -> None:
    truth = torch.zeros(4, dtype=torch.float64)
    ours = torch.zeros(4, dtype=torch.float16) if kind == "dtype" else torch.zeros(1, 4)
    with pytest.raises(AssertionError, match=r"result: .*, torch's is"):
        assert_as_accurate(ours, torch.zeros(4), truth)


def test_nan_fails() -> None:
    truth = torch.ones(2, dtype=torch.float64)
    with pytest.raises(AssertionError):
        assert_as_accurate(torch.tensor([1.0, float("nan")]), truth.float(), truth)


def test_memory_that_nobody_wrote_is_nan() -> None:
    with dirty_memory():
        assert torch.empty(3).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
