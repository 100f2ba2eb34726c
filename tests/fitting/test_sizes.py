"""What the user types: batch sizes, amounts of memory, the reserve, the sizes to measure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradscope.errors import UsageError, WorkloadError
from gradscope.fitting.options import FitOptions, add_optimizer, batch_sizes, reserve_of, settings_of
from gradscope.units import bytes_of
from gradscope.workload import Workload


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("6GiB", 6 * 1024**3),
        ("6GB", 6 * 10**9),
        ("24g", 24 * 1024**3),
        ("512MiB", 512 * 1024**2),
        ("512m", 512 * 1024**2),
        ("80 GiB", 80 * 1024**3),
        ("1.5GiB", 3 * 512 * 1024**2),
        (".5k", 512),
        ("1TB", 10**12),
        ("1000", 1000),
        ("1000B", 1000),
        (6442450944, 6442450944),
    ],
)
def test_amounts_of_memory(text: str | int, amount: int) -> None:
    assert bytes_of(text) == amount


@pytest.mark.parametrize("text", ["", "six", "6 Gigs", "-1GiB", "1e9", "6GiB8", "GiB", "1,5g", "²"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        bytes_of(text)
    shown = text or "''"
    assert str(raised.value) == (
        f"--device-memory: {shown} is not an amount of memory.\n"
        "Give a number with a unit: 6GiB, 6GB, 24g (GiB), 512MiB; without one it is bytes."
    )


@pytest.mark.parametrize("text", ["0", "0GiB", "0.4", 0])
def test_no_memory_at_all(text: str | int) -> None:
    with pytest.raises(UsageError) as raised:
        bytes_of(text)
    assert str(raised.value) == (
        f"--device-memory: {text} is not a positive amount of memory.\n"
        f"Give a number with a unit: 6GiB, 6GB, 24g (GiB), 512MiB."
    )


@pytest.mark.parametrize(
    ("given", "sizes"),
    [("8,16,32,64", (8, 16, 32, 64)), (" 32, 8,32 ", (8, 32)), ("1", (1,)), (12, (12,)), ([4, 2, 4], (2, 4))],
)
def test_batch_sizes(given: Any, sizes: tuple[int, ...]) -> None:
    assert batch_sizes(given) == sizes


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("8,x", "x"),
        ("0,8", "0"),
        ("-4", "-4"),
        ("1.5", "1.5"),
        ("8,,16", "''"),
        ("", "''"),
        ([True], "True"),
        ([2.0], "2.0"),
    ],
)
def test_what_is_no_batch_size(given: Any, shown: str) -> None:
    with pytest.raises(UsageError) as raised:
        batch_sizes(given)
    assert str(raised.value) == (
        f"--batch-sizes: {shown} is not a batch size.\nGive whole numbers from 1, with commas between: 8,16,32"
    )


def test_no_batch_size_at_all() -> None:
    with pytest.raises(UsageError, match=r"^--batch-sizes is empty\.\nGive whole numbers from 1: 8,16,32$"):
        batch_sizes([])


@pytest.mark.parametrize(
    ("given", "kept", "text"),
    [
        (None, 100, "10 %"),
        ("10%", 100, "10 %"),
        ("2.5 %", 25, "2.5 %"),
        ("0", 0, "0 B"),
        (0, 0, "0 B"),
        ("600", 600, "600 B"),
    ],
)
def test_reserve_of_a_thousand(given: Any, kept: int, text: str) -> None:
    reserve = reserve_of(given)
    assert (reserve.of(1000), reserve.text) == (kept, text)


@pytest.mark.parametrize("text", ["100%", "-1%", "%", "ten%", "1/0%"])
def test_what_is_no_reserve(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        reserve_of(text)
    assert str(raised.value) == (
        f"--reserve: {text} is not a share of the device's memory.\nGive 0% to 99%, or an amount: 600MiB"
    )


def test_settings_and_their_defaults() -> None:
    assert settings_of("8") == FitOptions(batch_sizes=(8,), measured=(2, 3, 4), check=8)
    given = settings_of("8,4", measure="6,12,3", device_memory=" 6GiB", reserve="1g", optimizer="adamw", seed=3)
    assert (given.batch_sizes, given.measured, given.check) == ((4, 8), (3, 6, 12), 24)
    assert (given.device_memory, given.device_memory_text) == (6 * 1024**3, "6GiB")
    assert (given.reserve.of(1), given.optimizer, given.seed) == (1024**3, "adamw", 3)
    assert settings_of("8", measure=(2, 4, 6, 20)).check == 20


@pytest.mark.parametrize("measure", ["2,3", "2,2,2", "1,2,3,4,5"])
def test_too_few_or_too_many_to_measure(measure: str) -> None:
    with pytest.raises(UsageError) as raised:
        settings_of("8", measure=measure)
    shown = ",".join(sorted(set(measure.split(","))))
    assert str(raised.value) == (
        f"--measure {shown}: give three different batch sizes to predict from, and a larger fourth to check with.\n"
        "The default is 2,3,4,8."
    )


def test_settings_name_the_option() -> None:
    with pytest.raises(UsageError, match=r"^--measure: x is not a batch size"):
        settings_of("8", measure="x")
    with pytest.raises(UsageError, match=r"^--reserve: lots is not an amount of memory"):
        settings_of("8", reserve="lots")
    with pytest.raises(UsageError, match=r"^--optimizer lion is not known; it is adam, adamw, sgd\.$"):
        settings_of("8", optimizer="lion")


def test_an_optimizer_is_added() -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False)
    workload = Workload(model, torch.ones(3, 2))
    add_optimizer(workload, None)
    assert workload.optimizer is None
    add_optimizer(workload, "adamw")
    assert type(workload.optimizer) is torch.optim.AdamW
    assert workload.optimizer.param_groups[0]["params"] == [model.weight]


def test_an_optimizer_is_not_replaced() -> None:
    model = nn.Linear(2, 1)
    workload = Workload(model, torch.ones(3, 2), optimizer=torch.optim.SGD(model.parameters()), target="model.py")
    with pytest.raises(UsageError) as raised:
        add_optimizer(workload, "adam")
    assert str(raised.value) == "--optimizer adam: model.py has its own optimizer, SGD.\nOmit the option."


def test_nothing_to_optimize() -> None:
    workload = Workload(nn.ReLU(), torch.ones(3, 2))
    with pytest.raises(WorkloadError) as raised:
        add_optimizer(workload, "sgd")
    assert str(raised.value) == (
        "--optimizer sgd: all parameters of the model are frozen, so there is nothing to optimize."
    )
