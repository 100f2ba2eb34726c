"""Which parameters DistributedDataParallel reduces together, beside what the reducer itself says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradscope.capture.reducers import reducers_of
from gradscope.tables import ReducerInfo
from tests.process_group import alone


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with alone():
        yield


class Late(nn.Module):
    """Registered in another order than called, with a layer that is never used and one that is frozen."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.last, self.first, self.frozen = nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 300)
        self.unused = nn.Linear(300, 300) if unused else None
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.frozen(self.first(x)))
        return out


def reducers(model: nn.Module, steps: int = 3) -> tuple[ReducerInfo, ...]:
    for _ in range(steps):
        model(torch.randn(2, 300)).sum().backward()
    names = {id(parameter): number for number, parameter in enumerate(model.parameters())}

    found = reducers_of(model.modules(), lambda _: 7, lambda parameter: [names[id(parameter)]])
    assert [label for label, _ in found] == [7] * len(found)
    return tuple(info for _, info in found)


WEIGHT, BIAS = 300 * 300 * 4, 300 * 4
MIB = 1 << 20


def test_buckets_are_filled_as_gradients_came() -> None:
    (found,) = reducers(DistributedDataParallel(Late(unused=False), bucket_cap_mb=0.2))
    last, last_bias, first, first_bias = (0, WEIGHT), (1, BIAS), (2, WEIGHT), (3, BIAS)
    assert found.buckets == ((last_bias, last), (first_bias, first))
    assert (found.finds_unused, found.hooked, found.cap_bytes) == (False, False, int(0.2 * MIB))


def test_before_that_there_is_one() -> None:
    (found,) = reducers(DistributedDataParallel(Late(unused=False), bucket_cap_mb=0.2), steps=0)
    assert found.buckets == (((0, WEIGHT), (1, BIAS), (2, WEIGHT), (3, BIAS)),)


def test_where_unused_parameters_are_looked_for_they_keep_the_order_of_registration() -> None:
    (found,) = reducers(DistributedDataParallel(Late(unused=True), find_unused_parameters=True, bucket_cap_mb=0.2))
    assert found.finds_unused
    # A weight fills a bucket. frozen is 4 and 5, in no bucket; unused is 6 and 7.
    assert [[number for number, _ in bucket] for bucket in found.buckets] == [[7], [3, 6], [1, 2], [0]]


def test_sizes_are_those_of_the_reducer() -> None:
    model = DistributedDataParallel(Late(unused=False))
    (found,) = reducers(model)
    log: Any = model._get_ddp_logging_data()
    sizes = ", ".join(str(sum(size for _, size in bucket)) for bucket in found.buckets)
    assert sizes == log["rebuilt_bucket_sizes"]


def test_a_log_that_does_not_fit_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DistributedDataParallel(Late(unused=False))
    log = dict(model._get_ddp_logging_data())
    for wrong in ({"bucket_sizes": "1, 2"}, {"bucket_sizes": None}, {"rebuilt_per_bucket_param_indices": "0 1, 1"}):
        monkeypatch.setattr(model, "_get_ddp_logging_data", lambda wrong=wrong: log | wrong)
        assert reducers(model, steps=0) == ()


def test_ignored_parameters_are_in_no_bucket() -> None:
    inner = Late(unused=False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inner, ["first.bias"])
    (found,) = reducers(DistributedDataParallel(inner))
    assert sorted(number for bucket in found.buckets for number, _ in bucket) == [0, 1, 2]


def test_a_parameter_of_two_layers_is_reduced_once() -> None:
    inner = Late(unused=False)
    inner.first.weight = inner.last.weight
    (found,) = reducers(DistributedDataParallel(inner, bucket_cap_mb=0.2))
    assert sorted(number for bucket in found.buckets for number, _ in bucket) == [0, 1, 2]


def test_buckets_of_other_sizes_than_are_logged_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parameters are numbered otherwise then."""
    model = DistributedDataParallel(Late(unused=False), bucket_cap_mb=0.2)
    assert reducers(model)
    log = dict(model._get_ddp_logging_data())
    swapped = log["rebuilt_per_bucket_param_indices"].replace("0", "x").replace("3", "0").replace("x", "3")
    for wrong in (
        {"rebuilt_bucket_sizes": "1, 2"},
        {"rebuilt_bucket_sizes": log["rebuilt_bucket_sizes"].split(",")[0]},
        {"rebuilt_per_bucket_param_indices": swapped},
    ):
        monkeypatch.setattr(model, "_get_ddp_logging_data", lambda wrong=wrong: log | wrong)
        assert reducers(model, steps=0) == ()
