"""The proof itself can fail: time that stands in the wrong row is found, in either direction."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from gradscope.tables import RunData

from .burning import Burning, Meter, Source
from .proof import Expected, compare, in_model_mode, prove, summed

MS = 1_000_000


def moved(data: RunData, source: str, target: str, ns: int) -> RunData:
    """``data`` with ``ns`` of one layer's backward in another's row."""
    change = {source: -ns, target: ns}
    layers = [
        dataclasses.replace(row, backward_self_ns=row.backward_self_ns + change.get(row.path, 0)) for row in data.layers
    ]
    return dataclasses.replace(data, layers=layers)


@pytest.mark.parametrize(("source", "target"), [("0", "1"), ("2", "1"), ("2", "0"), ("0", "2")])
def test_a_millisecond_in_the_wrong_row_is_found(meter: Meter, source: str, target: str) -> None:
    """Layer 1 is real work of unknown cost, which is allowed for: a burn is not to hide in it."""
    model = nn.Sequential(Source(1, 3), nn.Linear(8, 8), Burning(2, 3))
    meter.adopt(model)
    data = prove(meter, in_model_mode(model, torch.ones(4, 8), summed)).data
    wrong = compare(moved(data, source, target, MS), meter, Expected.nothing())
    assert [problem.split(":")[0] for problem in wrong if "backward_self_ns" in problem] == [
        f"backward_self_ns of {path!r}" for path in sorted((source, target))
    ]
