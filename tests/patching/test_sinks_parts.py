"""The parts of an attention with sinks, told one by one: what is no such part is told apart from it as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from gradscope.patching.match.matchers.sinks import column_of, sinks_of, unshifted, without_last
from gradscope.recording.graph import Value
from gradscope.recording.record import record

SIZES = (2, 4, 5, 5)  # batch, heads, queries, keys


def made(run: Callable[[], Tensor]) -> Value:
    """What the last call of ``run`` gives."""
    recording, result = record(run)
    return next(each for each in reversed(recording.values) if each.tensor() is result)


def scores(*batch: int) -> Tensor:
    return torch.randn(*batch, 5, 3) @ torch.randn(*batch, 3, 5)


SHIFTED: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda s: s - s.max(-1, keepdim=True)[0],
    "max by name": lambda s: s - s.max(dim=-1, keepdim=True).values,
    "amax": lambda s: s - s.amax(-1, keepdim=True),
    "the last of four": lambda s: s - s.amax(3, keepdim=True),
    "detached": lambda s: s - s.amax(-1, keepdim=True).detach(),
    "cast": lambda s: (s - s.amax(-1, keepdim=True)).double(),
    "copied": lambda s: (s - s.amax(-1, keepdim=True)).clone().contiguous(),
}
OTHERWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "of each column": lambda s: s - s.amax(-2, keepdim=True),
    "where the largest is": lambda s: s - s.max(-1, keepdim=True)[1],
    "of another": lambda s: s - (s * 2).amax(-1, keepdim=True),
    "twice": lambda s: torch.sub(s, s.amax(-1, keepdim=True), alpha=2),
    "from the largest": lambda s: s.amax(-1, keepdim=True) - s,
    "the least": lambda s: s - s.amin(-1, keepdim=True),
}


@pytest.mark.parametrize("run", SHIFTED.values(), ids=SHIFTED)
def test_the_largest_of_a_row_is_looked_through(run: Callable[[Tensor], Tensor]) -> None:
    below, nodes = unshifted(made(lambda: run(scores(2, 4))))
    assert below.producer is not None and below.producer.op == "matmul"
    assert {node.op for node in nodes} <= {"sub", "max", "amax", "getitem", "detach", "double", "clone", "contiguous"}


@pytest.mark.parametrize("run", OTHERWISE.values(), ids=OTHERWISE)
def test_what_else_is_taken_off_is_not(run: Callable[[Tensor], Tensor]) -> None:
    value = made(lambda: run(scores(2, 4)))
    assert unshifted(value) == (value, set())


def test_the_largest_of_a_row_in_the_place_of_a_column_is_not() -> None:
    """Without a dimension for it, it is taken off a column, if as many rows as columns hide that."""
    value = made(lambda: (lambda s: s - s.amax(-1))(scores(1)))
    assert unshifted(value) == (value, set())


@pytest.mark.parametrize(
    ("index", "is_last"),
    [
        ((..., slice(None, -1)), True),
        ((slice(None), slice(None), slice(None), slice(None, -1)), True),
        ((slice(None), ..., slice(None, 4)), True),
        ((..., slice(1, None)), False),
        ((slice(None), slice(None), slice(None, -1)), False),
        ((slice(None, 2), slice(None), slice(None), slice(None, -1)), False),  # the whole batch today
        ((slice(None), [1, 0, 2, 3], slice(None), slice(None, -1)), False),  # heads in another order
        ((slice(None), slice(None), slice(None), [0, 1, 2, 3]), False),
        ((..., slice(None, None, 2)), False),
        (0, False),
    ],
)
def test_all_columns_but_the_last(index: object, is_last: bool) -> None:
    node = made(lambda: torch.randn(SIZES)[index]).producer  # type: ignore[index]
    assert node is not None and (without_last(node) is not None) == is_last


def test_every_second_column_of_two_is_not_all_but_the_last() -> None:
    node = made(lambda: torch.randn(2, 4, 5, 2)[..., ::2]).producer
    assert node is not None and without_last(node) is None


def test_a_column_is_joined_as_the_last() -> None:
    column = torch.randn(2, 4, 5, 1)
    joined = column_of(made(lambda: torch.cat((scores(2, 4), column), -1)).producer)
    assert joined is not None and joined[1].shape == column.shape
    for run in (
        lambda: torch.cat((column, scores(2, 4)), -1),  # as the first
        lambda: torch.cat((scores(2, 4), torch.randn(2, 4, 5, 2)), -1),  # two
        lambda: torch.cat((torch.randn(2, 4, 5, 3) @ torch.randn(2, 4, 3, 1), column), 2),  # rows of a single key
        lambda: torch.cat((torch.randn(SIZES), column), -1),  # to what is no product
        lambda: torch.cat((scores(2, 4), column, column), -1),
    ):
        assert column_of(made(run).producer) is None


HELD, HELD_WIDE = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(1, 4, 1, 1))
OF_SAMPLES = nn.Parameter(torch.randn(2, 1, 1, 1))
SPREAD: dict[str, Callable[[], Tensor]] = {
    "a parameter": lambda: HELD.view(1, -1, 1, 1).expand(2, -1, 5, 1),
    "cast": lambda: HELD.double()[:, None, None].expand(2, 4, 5, 1),
    "computed": lambda: (HELD * 2).view(1, -1, 1, 1).expand(2, -1, 5, 1),
    "of four dimensions": lambda: HELD_WIDE.expand(2, -1, 5, -1),
    "repeated": lambda: HELD[None, :, None, None].repeat(2, 1, 5, 1),
}
NOT_SPREAD: dict[str, Callable[[], Tensor]] = {
    "of each query": lambda: nn.Parameter(torch.randn(5)).view(1, 1, -1, 1).expand(2, 4, -1, 1),
    "in another order": lambda: HELD[:, None].expand(4, 2).reshape(2, 4)[..., None, None].expand(2, 4, 5, 1),
    "of a matrix": lambda: nn.Parameter(torch.randn(4, 5))[None, :, :, None].expand(2, -1, -1, 1),
    "of a single head": lambda: nn.Parameter(torch.randn(1)).view(1, 1, 1, 1).expand(2, 1, 5, 1),
    "of samples with a single head": lambda: OF_SAMPLES.expand(-1, -1, 5, -1),
    "without a batch": lambda: HELD.view(-1, 1, 1).expand(-1, 5, 1),
    "a sum": lambda: HELD.view(1, -1, 1, 1) + torch.zeros(2, 1, 5, 1),
}


@pytest.mark.parametrize("run", SPREAD.values(), ids=SPREAD)
def test_sinks_are_of_a_head_each(run: Callable[[], Tensor]) -> None:
    found = sinks_of(made(run))
    assert found is not None and found.piece.value.elements == 4 == max(found.piece.value.shape)


@pytest.mark.parametrize("run", NOT_SPREAD.values(), ids=NOT_SPREAD)
def test_what_is_no_number_of_a_head_each(run: Callable[[], Tensor]) -> None:
    assert sinks_of(made(run)) is None
