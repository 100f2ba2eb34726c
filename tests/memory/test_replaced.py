"""Truth: a layer that is replaced while the model trains owns what it would if it had stayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from .measuring import at_peak, in_a_loop, memory_of, saved

X = torch.randn(63, 19)
WEIGHTS = 4 * (41 * 203 + 203)


def head() -> nn.Module:
    return nn.Sequential(nn.Linear(41, 203), nn.Tanh(), nn.BatchNorm1d(203), nn.Linear(203, 7))


def trained(next_head: Callable[[], nn.Module], *, ends: bool) -> Any:
    """The report of a loop whose steps put a head into the model.

    Args:
        ends: whether the model has no head between the steps.
    """
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(19, 41), nn.Tanh())

    def step() -> None:
        body.head = next_head()
        body(X).square().mean().backward()
        body.zero_grad()  # an optimizer would keep the head: it lies in a cycle
        if ends:
            del body.head

    return in_a_loop(body, step)


def owned(data: Any) -> Any:
    """Who owns what at the peak, what is saved, and what each layer allocates."""
    rows = [
        (row.path, row.saved_bytes, row.forward_allocated_bytes, row.backward_allocated_bytes) for row in data.layers
    ]
    return at_peak(data), saved(data), rows


@pytest.mark.parametrize("ends", [False, True])
def test_replaced_layer_owns_what_one_that_stays_does(ends: bool) -> None:
    stays = head()
    data = trained(head, ends=ends)
    assert owned(data) == owned(trained(lambda: stays, ends=False))
    rows = at_peak(data)
    assert rows["head.0", "parameters"] == WEIGHTS
    assert rows["head.2", "buffers"] == 2 * 4 * 203 + 8
    nobodys = {(row.owner, row.category): row.bytes for row in memory_of(data).at_peak if row.owner is None}
    assert not {category for _, category in nobodys} & {"parameters", "gradients", "buffers"}


@pytest.mark.parametrize("named", [False, True])
def test_a_model_that_is_no_longer_called_owns_what_it_holds(named: bool) -> None:
    """It was called in steps before those that are measured for memory."""
    torch.manual_seed(0)
    body, left, steps = nn.Sequential(nn.Linear(19, 41), nn.Tanh()), head(), 0

    def step() -> None:
        nonlocal steps
        steps += 1
        hidden = body(X)
        (left(hidden) if steps < 6 else hidden).square().mean().backward()

    rows = at_peak(in_a_loop(body if named else None, step))
    owned_bytes = {(kind, size) for (layer, kind), size in rows.items() if layer is not None}
    assert {("parameters", WEIGHTS), ("buffers", 2 * 4 * 203 + 8)} <= owned_bytes
