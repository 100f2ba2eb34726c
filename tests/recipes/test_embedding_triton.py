"""Rows that are sorted before they are added, interpreted where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from gradscope.kernels.embedding import rows as rows_of
from gradscope.kernels.embedding.rows import add_rows, add_sorted


@pytest.mark.parametrize("kind", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("count", [1, 31, 32, 33, 100])
def test_as_index_add(
    triton_device: torch.device, count: int, integers: torch.dtype, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token that fills chunks and others around it; features in two blocks, the second of them short."""
    monkeypatch.setattr(rows_of, "_BLOCK", 8)
    ids = torch.randint(0, 6, (count,), device=triton_device)
    ids[::2] = 3
    rows = torch.randn(count, 11, dtype=kind, device=triton_device)
    into = torch.randn(7, 11, dtype=kind, device=triton_device)
    expected = into.double().index_add(0, ids, rows.double())
    bound = 1e-13 if kind == torch.float64 else 1e-5  # 100 additions of numbers of about 1 to sums of about 10
    add_sorted(into, ids.to(integers), rows)
    torch.testing.assert_close(into.double(), expected, rtol=0, atol=bound)


def test_any_strides(triton_device: torch.device) -> None:
    ids = torch.tensor([4, 0, 4, 2], device=triton_device)
    rows = torch.randn(5, 4, device=triton_device).t()
    wide = torch.zeros(12, 9, device=triton_device)
    add_sorted(wide[::2, :5], ids, rows)
    expected = torch.zeros(12, 9, device=triton_device)
    expected[::2, :5].index_add_(0, ids, rows)
    torch.testing.assert_close(wide, expected)
    add_sorted(wide, ids[:0], rows[:0].new_empty(0, 9))  # nothing
    torch.testing.assert_close(wide, expected)


def test_one_row_for_all_tokens(triton_device: torch.device) -> None:
    """Stride 0, as the gradient of a sum has it."""
    rows = torch.ones((), device=triton_device).expand(70, 3)
    into = torch.zeros(4, 3, device=triton_device)
    add_sorted(into, torch.tensor([1, 1, 3, 1, 0, 1, 1], device=triton_device).repeat(10), rows)
    assert into[:, 0].tolist() == [10, 50, 0, 10]


def test_the_version_counts_each_addition(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody saved of the gradient is known to have changed, by either way."""
    ids, rows = torch.tensor([1, 1], device=triton_device), torch.ones(2, 3, device=triton_device)
    for sorts in (True, False):
        into = torch.zeros(4, 3, device=triton_device)
        before = into._version
        monkeypatch.setattr(rows_of, "_sorts", lambda *_, sorts=sorts: sorts)
        assert add_rows(into, ids, rows) is into
        assert into._version > before and into[1].tolist() == [2, 2, 2]


def test_the_cpu_does_not_sort() -> None:
    many = torch.zeros(2 * rows_of.SORTED_FROM, dtype=torch.int64)
    assert not rows_of._sorts(torch.zeros(3, 3), many)
