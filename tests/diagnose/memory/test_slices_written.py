"""The rule about tensors that are written part by part: what it says to write, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.diagnose.case import Case
from gradscope.diagnose.rules import RULES
from gradscope.tables import Finding, LineRow
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


def backwards(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(12, 4, 16)
    for i in reversed(range(12)):
        y[i] = parts[i]
    return y


def of_a_grid(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(3, 4, 4, 16)
    for i, part in enumerate(parts):
        y[i // 4, i % 4] = part
    return y


def of_another_type(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(12, 4, 16, dtype=torch.float64)
    for i, part in enumerate(parts):
        y[i] = part
    return y


def changed_behind(parts: list[Tensor]) -> Tensor:
    """A list of these would hold the last state twelve times."""
    y, x = torch.zeros(12, 4, 16), parts[0].clone()
    for i, part in enumerate(parts):
        x += part
        y[i] = x
    return y


def over_two_lines(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(12, 4, 16)
    for i in range(12):
        y[i] = torch.add(
            parts[i],
            1,
        )
    return y


def two_on_a_line(parts: list[Tensor]) -> Tensor:
    y, z = torch.zeros(12, 4, 16), torch.zeros(12, 4, 16)
    for i, part in enumerate(parts):
        y[i] = part; z[i] = part  # fmt: skip  # noqa: E702
    return y + z


def on_lines_of_their_own(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(4, 16, 4)
    y[..., 0] = parts[0]
    y[..., 1] = parts[1]
    y[..., 2] = parts[2].exp()
    y[..., 3] = parts[3]
    return y + sum(parts)[..., None]


def of_what_was_there(parts: list[Tensor]) -> Tensor:
    y = torch.stack(parts[:4], dim=1)
    for i in range(4):
        y[:, i] = y[:, i] * 2
    return y + sum(parts)


@pytest.mark.parametrize(
    ("gather", "count", "shape", "code"),
    [
        (in_front, 12, "12x4x16", "parts.append(part.exp()); y = torch.stack(parts)"),
        (behind, 12, "4x12x16", "parts.append(parts[i]); y = torch.stack(parts, dim=1)"),
        (last, 12, "4x16x12", "parts.append(parts[i]); y = torch.stack(parts, dim=2)"),
        (by_slices, 12, "4x192", "parts.append(parts[i]); y = torch.cat(parts, dim=1)"),
        (all_but_the_first, 11, "12x4x16", "parts.append(part); y = torch.stack(parts)"),
        (backwards, 12, "12x4x16", "parts.append(parts[i]); y = torch.stack(parts[::-1])"),
        (of_a_grid, 12, "3x4x4x16", "parts.append(part); y = torch.stack(parts).unflatten(0, (3, 4))"),
        (of_another_type, 12, "12x4x16", "parts.append(part); y = torch.stack(parts).to(torch.float64)"),
        (changed_behind, 12, "12x4x16", "parts.append(x.clone()); y = torch.stack(parts)"),
        (over_two_lines, 12, "12x4x16", "parts.append(part); y = torch.stack(parts)"),
        (two_on_a_line, 12, "12x4x16", "parts.append(part); y = torch.stack(parts)"),
        (on_lines_of_their_own, 4, "4x16x4", "parts.append(parts[0]); y = torch.stack(parts, dim=2)"),
        (of_what_was_there, 4, "4x4x16", "parts.append(part); y = torch.stack(parts, dim=1)"),
        (as_long_as_wide, 4, "4x4x16", "parts.append(parts[i]); y = torch.stack(parts, dim=1)"),
    ],
)
def test_what_to_write(gather: Callable[[list[Tensor]], Tensor], count: int, shape: str, code: str) -> None:
    (one,) = found(gather)
    assert (
        one.message == f"A tensor is filled by {count} slice assignments: backward copies the whole gradient for each"
    )
    assert one.evidence.startswith(f"{count} slices of a tensor of shape {shape}")
    assert one.code == code
    where = "last" if gather is on_lines_of_their_own else "loop"
    assert one.advice.startswith(f"Append the parts to a list and join them once after the {where}")
    assert ("read earlier parts from the list" in one.advice) == (gather is all_but_the_first)
    assert ("zeros" in one.advice) == (gather is all_but_the_first)


def written(y: Tensor, parts: list[Tensor]) -> Tensor:
    for i, part in enumerate(parts):
        y[i] = part
    return y


def test_tensors_that_one_line_writes_are_told_apart() -> None:
    """One of them is not covered, which the advice says."""
    (one,) = found(lambda parts: written(torch.zeros(12, 4, 16), parts) + written(torch.zeros(16, 4, 16), parts)[4:])
    assert one.evidence.startswith("12 slices of a tensor of shape 12x4x16, 2 times per step; ")
    assert "zeros" in one.advice


def test_copies_of_others_are_not_counted() -> None:
    """Not those of other tensors of the layer, nor those of casts, in proportion to what they copy."""

    def gather(parts: list[Tensor]) -> Tensor:
        y, z = torch.zeros(12, 4, 16), torch.zeros(24, 4, 16)
        for i, part in enumerate(parts):
            y[i] = part
        for i in range(24):
            z[i] = parts[i // 2]
        return y.sum() + z.sum() + torch.stack(parts).double().sum()

    held = case(gather)
    one, other = RULES[RULE].find(replace(held, run=replace(held.run, lines=_dear(held))))
    assert one.cost_ns is not None and other.cost_ns is not None
    assert other.cost_ns == pytest.approx(4 * one.cost_ns, rel=1e-3)
    assert one.cost_ns == pytest.approx(_copies(held) * 12 / (12 + 4 * 12 + 1), rel=1e-3)


def _dear(held: Case) -> tuple[LineRow, ...]:
    return tuple(replace(row, backward_ns=10**12) for row in held.run.lines)


def _copies(held: Case) -> int:
    names = ("aten::copy_", "aten::new_empty_strided", "CopySlices")
    return sum(row.self_ns for row in held.ops["", "backward"] if row.name in names)


def test_what_is_promised_is_what_the_copies_take() -> None:
    """The parts' own copies stay, and no more goes than backward spends on the line."""
    held = case(in_front)
    (one,) = RULES[RULE].find(held)
    assert one.line is not None
    line = held.lines[one.line]
    assert one.cost_ns == min(_copies(held), line.backward_ns) > 0
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


def of_three_rows_of_four(parts: list[Tensor]) -> Tensor:
    """No list of twelve can be folded to a square."""
    y = torch.zeros(4, 4, 16)
    for i in range(12):
        y[i // 4, i % 4] = parts[i][0]
    return y


def in_blocks(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(8, 32)
    for i in range(4):
        row, column = 4 * (i // 2), 16 * (i % 2)
        y[row : row + 4, column : column + 16] = parts[i]
    return y + torch.stack(parts).sum(0).repeat(2, 2)


def between_each_other(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(4, 12 * 16)
    for i, part in enumerate(parts):
        y[:, i::12] = part
    return y


def one_place_again(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(4, 4, 16)
    for i, part in enumerate(parts):
        y[i % 4] = part
    return y


def in_an_order_of_their_own(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(12, 4, 16)
    for i, part in enumerate(parts):
        y[5 * i % 12] = part
    return y


def of_rows(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(3, 4, 4, 16)
    for i in range(3):
        row = y[i]
        for j in range(4):
            row[j] = parts[4 * i + j]
    return y


def added_to(parts: list[Tensor]) -> Tensor:
    y = torch.stack(parts)
    for i, part in enumerate(parts):
        y[i] += part
    return y


def read_up_to_there(parts: list[Tensor]) -> Tensor:
    keys, found = torch.zeros(4, 12, 16), []
    for i, part in enumerate(parts):
        keys[:, i] = part
        found.append(keys[:, : i + 1].sum(1))
    return torch.stack(found)


def read_as_a_whole(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(12, 4, 16)
    for i, part in enumerate(parts):
        y[i] = part + y.mean(0)
    return y


def by_tensors(parts: list[Tensor]) -> Tensor:
    """Where they lie may be known to a GPU alone."""
    y = torch.zeros(4, 12 * 16)
    for i, first in enumerate(torch.arange(0, 12 * 16, 16)):
        y[:, first : first + 16] = parts[i]
    return y


def repeated(parts: list[Tensor]) -> Tensor:
    y = torch.zeros(12, 4, 16)
    for i, part in enumerate(parts):
        y[i] = part[:1]
    return y


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
        of_three_rows_of_four,
        *(in_blocks, in_either_dimension, between_each_other, one_place_again, in_an_order_of_their_own),
        *(of_rows, added_to, read_up_to_there, read_as_a_whole, by_tensors, repeated),
    ],
    ids=lambda each: each.__name__,
)
def test_what_is_left_alone(gather: Callable[[list[Tensor]], Tensor]) -> None:
    assert not in_case(case(gather), RULE)
