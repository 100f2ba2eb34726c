"""The rule about tensors that are written part by part: what it says to write, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.diagnose.case import Case
from gradscope.diagnose.rules import RULES
from gradscope.tables import Finding
from tests.diagnose.run_case import case_of, in_case

RULE = "slices-written"


class Steps(nn.Module):
    """What a test does with the states of 12 steps, each [4, 16]."""

    def __init__(self, gather: Callable[[list[Tensor]], Tensor]) -> None:
        super().__init__()
        self.layer, self.gather = nn.Linear(16, 16), gather

    def forward(self, x: Tensor) -> Tensor:
        return self.gather([self.layer(part) for part in x.unbind(1)])


def case(gather: Callable[[list[Tensor]], Tensor]) -> Case:
    return case_of(Steps(gather), torch.randn(4, 12, 16), memory=False)


def found(gather: Callable[[list[Tensor]], Tensor]) -> list[Finding]:
    return list(RULES[RULE].find(case(gather)))


def in_front(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(12, 4, 16)
    for i, part in enumerate(parts):
        y[i] = part.exp()
    return y


def behind(parts: list[Tensor]) -> Tensor:
    y = parts[0].new_empty(4, 12, 16)
    for i in range(12):
        y[:, i] = parts[i]  # of each step
    return y


def last(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(4, 16, 12)
    for i in range(12):
        y[..., i] = parts[i]
    return y


def by_slices(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(4, 12 * 16)
    for i in range(12):
        y[:, 16 * i : 16 * i + 16] = parts[i]
    return y


def all_but_the_first(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(12, 4, 16)
    for i in range(1, 12):
        y[i] = parts[i] + y[i - 1]
    return y


def as_long_as_wide(parts: list[Tensor]) -> Tensor:
    """As few as are named; by the values' shape they might lie in the first dimension too."""
    y = torch.zeros(4, 4, 16)
    for i in range(4):
        y[:, i] = parts[i]
    return y + sum(parts)


@pytest.mark.parametrize(
    ("gather", "count", "shape", "code"),
    [
        (in_front, 12, "12x4x16", "parts.append(part.exp()); y = torch.stack(parts)"),
        (behind, 12, "4x12x16", "parts.append(parts[i]); y = torch.stack(parts, dim=1)"),
        (last, 12, "4x16x12", "parts.append(parts[i]); y = torch.stack(parts, dim=2)"),
        (by_slices, 12, "4x192", "parts.append(parts[i]); y = torch.cat(parts, dim=1)"),
        (all_but_the_first, 11, "12x4x16", "parts.append(parts[i] + y[i - 1]); y = torch.stack(parts)"),
        (as_long_as_wide, 4, "4x4x16", "parts.append(parts[i]); y = torch.stack(parts, dim=1)"),
    ],
)
def test_what_to_write(gather: Callable[[list[Tensor]], Tensor], count: int, shape: str, code: str) -> None:
    (one,) = found(gather)
    assert one.message == f"a tensor is written in {count} parts: backward copies its whole gradient for each"
    assert one.evidence.startswith(f"{count} parts of a tensor of {shape}; ")
    assert one.code == code
    assert one.advice.startswith("Append the parts to a list and join them once, behind the loop")
    assert ("zeros" in one.advice) == (gather is all_but_the_first)


def written(y: Tensor, parts: list[Tensor]) -> Tensor:
    for i, part in enumerate(parts):
        y[i] = part
    return y


def test_tensors_that_one_line_writes_are_told_apart() -> None:
    """One of them is not covered, which the advice says."""
    (one,) = found(lambda parts: written(torch.zeros(12, 4, 16), parts) + written(torch.zeros(16, 4, 16), parts)[4:])
    assert one.evidence.startswith("12 parts of a tensor of 12x4x16, 2 times a step; ")
    assert "zeros" in one.advice


def test_what_is_promised_is_what_the_copies_take() -> None:
    """The parts' own copies stay, and no more goes than backward spends on the line."""
    held = case(in_front)
    (one,) = RULES[RULE].find(held)
    assert one.line is not None
    line = held.lines[one.line]
    copies = sum(
        row.self_ns
        for row in held.ops["", "backward"]
        if row.name in ("aten::copy_", "aten::new_empty_strided", "CopySlices")
    )
    assert one.cost_ns == min(copies, line.backward_ns) > 0
    assert one.predicted_saving_ns == pytest.approx(one.cost_ns * 12 / 13, rel=1e-3)


def stacked(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts)


def three(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(3, 4, 16)
    for i in range(3):
        y[i] = parts[i]
    return y + sum(parts)


def of_a_large_one(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(100, 4, 16)
    for i in range(12):
        y[i] = parts[i]
    return y


def by_a_mask(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(4, 16)
    for part in parts[:6]:
        y[part > 0] = part[part > 0]
    return y


def without_gradient(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(12, 4, 16)
    for i in range(12):
        y[i] = parts[i].detach()
    return y + torch.stack(parts)


def of_two_dimensions(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(12, 4, 16)
    for i in range(12):
        y[i, i % 4] = parts[i][0]
    return y


def in_blocks(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(8, 32)
    for i in range(4):
        row, column = 4 * (i // 2), 16 * (i % 2)
        y[row : row + 4, column : column + 16] = parts[i]
    return y + torch.stack(parts).sum(0).repeat(2, 2)


def in_either_dimension(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(4, 4, 16)
    places: list[Any] = [0, (slice(None), 1), 2, (slice(None), 3)]
    for place, part in zip(places, parts, strict=False):
        y[place] = part
    return y + sum(parts)


@pytest.mark.parametrize(
    "gather",
    [
        *(stacked, three, of_a_large_one, by_a_mask, without_gradient, of_two_dimensions),
        *(in_blocks, in_either_dimension),
    ],
    ids=lambda each: each.__name__,
)
def test_what_is_left_alone(gather: Callable[[list[Tensor]], Tensor]) -> None:
    assert not in_case(case(gather), RULE)
