"""The machine's limits: how they are measured, and where they are kept."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from gradscope import profile
from gradscope.capture.environment import describe_environment
from gradscope.devices import device_name
from gradscope.errors import OutputError
from gradscope.limits import Store, keep, kept, limits_file, measure, read
from gradscope.tables import Limits

CPU = Limits("Some CPU", {"float32": 1e11, "bfloat16": 3e11}, 2e10, 900.5)
GPU = Limits("Some GPU", {"float32": 5e13, "tf32": 4e14}, 4e12, 4000.0)
VERSION = str(torch.__version__)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; the file of limits that would be in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gradscope" / "limits.json"


# --------------------------------------------------------------------------------------------------------------------
# Keeping
# --------------------------------------------------------------------------------------------------------------------


def test_where_the_file_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_file() == cache
    home = Path("~").expanduser()
    for value in ("", "relative/folder"):  # the latter is to be ignored, as the specification of XDG says
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert limits_file() == home / ".cache" / "gradscope" / "limits.json"


def test_what_is_kept_is_found_again(cache: Path) -> None:
    assert read() == Store()
    assert kept("Some CPU", 2) is None
    assert keep(CPU, 2) == cache
    assert kept("Some CPU", 2) == CPU
    assert kept("Some CPU", 4) is None
    assert kept("Other CPU", 2) is None
    assert kept("Some CPU", 2, "1.0") is None
    assert os.listdir(cache.parent) == ["limits.json"]


def test_entries_of_other_devices_threads_and_torches_stay() -> None:
    keep(CPU, 2)
    faster = Limits("Some CPU", {"float32": 2e11}, 2e10, 800.0)
    for limits, threads, version in ((faster, 4, VERSION), (GPU, None, VERSION), (faster, 2, "1.0")):
        keep(limits, threads, version)
    assert kept("Some CPU", 2) == CPU
    assert kept("Some CPU", 4) == kept("Some CPU", 2, "1.0") == faster
    assert kept("Some GPU", 2) == kept("Some GPU", 64) == GPU  # threads do not matter there
    keep(faster, 2)
    assert kept("Some CPU", 2) == faster
    assert len(read().entries) == 4


def entry(**changed: Any) -> dict[str, Any]:
    whole = {"device": "Some CPU", "threads": 2, "torch": VERSION, "measured": 1.7e9, "flops": {"float32": 1e11}}
    return {**whole, "bytes": 2e10, "call_ns": 900, **changed}


FILES = {
    "empty": ("", "it is not JSON"),
    "cut off": ('{"gradscope_limits": 1, "entries": [{"dev', "it is not JSON"),
    "deep": ("[" * 100_000, "it is not JSON"),
    "a list": ("[1]", "it was not written by this version of gradscope"),
    "somebody else's": ('{"limits": 3}', "it was not written by this version of gradscope"),
    "newer": ('{"gradscope_limits": 2, "entries": []}', "it was not written by this version of gradscope"),
    "no entries": ('{"gradscope_limits": 1}', "it contains no limits"),
    "entries that are none": ('{"gradscope_limits": 1, "entries": [1, {}, null]}', "it contains no limits"),
}


@pytest.mark.parametrize(("text", "problem"), FILES.values(), ids=FILES.keys())
def test_a_file_that_cannot_be_used(cache: Path, text: str, problem: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    assert read() == Store((), problem)
    assert kept("Some CPU", 2) is None
    keep(CPU, 2)
    assert read().problem == ""
    assert kept("Some CPU", 2) == CPU


def test_a_file_that_is_no_text_or_no_file(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"\xff\xfe")
    assert read().problem == "it is not UTF-8 text (byte 0)"
    cache.unlink()
    cache.mkdir()
    assert read().problem == "it is a folder"
    with pytest.raises(OutputError) as caught:
        keep(CPU, 2)
    assert str(caught.value) == (
        f"{cache} cannot be written: Is a directory.\nSet XDG_CACHE_HOME to a writable folder."
    )


BAD = {
    "no device": entry(device=None),
    "threads": entry(threads=0),
    "threads as a text": entry(threads="2"),
    "threads as a bool": entry(threads=True),
    "no rate": entry(bytes=0),
    "negative": entry(call_ns=-1.0),
    "not a number": entry(bytes=float("nan")),
    "infinite": entry(flops={"float32": float("inf")}),
    "endless": entry(call_ns=10**400),
    "a text": entry(flops={"float32": "1e11"}),
    "a bool": entry(bytes=True),
    "flops": entry(flops=[1e11]),
    "never": entry(measured=None),
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_a_bad_entry_is_left_out_and_the_others_stay(cache: Path, bad: dict[str, Any]) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(json.dumps({"gradscope_limits": 1, "entries": [bad, entry(device="Fine")]}))
    assert [one.limits.device for one in read().entries] == ["Fine"]


def test_a_failed_write_leaves_the_old_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(CPU, 2)
    before = cache.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputError) as caught:
        keep(GPU, None)
    assert str(caught.value) == (
        f"{cache} cannot be written: No space left on device.\nSet XDG_CACHE_HOME to a writable folder."
    )
    assert cache.read_bytes() == before
    assert os.listdir(cache.parent) == ["limits.json"]


def test_a_folder_that_cannot_be_made(cache: Path) -> None:
    cache.parent.parent.write_text("a file")
    with pytest.raises(OutputError, match=r"limits\.json cannot be written: "):
        keep(CPU, 2)


# --------------------------------------------------------------------------------------------------------------------
# Measuring
# --------------------------------------------------------------------------------------------------------------------


class Ticking:
    """A clock that work moves, so that rates are exact."""

    def __init__(self) -> None:
        self.at = 0

    def __call__(self) -> int:
        return self.at


def test_the_fastest_of_several_runs_counts() -> None:
    now = Ticking()
    took = iter([50, 30, 40, 30, 60])
    clock = measure.Clock(torch.device("cpu"), now)

    def work() -> None:
        now.at += next(took)

    assert clock.best(work, budget_ns=1000, tries=5) == 30
    took = iter([50, 30, 40])
    assert clock.best(work, budget_ns=100) == 30  # a third run would end after the budget
    took = iter([500])
    assert clock.best(work, budget_ns=100) == 500  # one there always is
    took = iter([0])
    assert clock.best(work, budget_ns=100, tries=1) == 1


def test_products_grow_as_far_as_the_time_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = Ticking()
    seen: list[int] = []

    def product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        seen.append(len(left))
        now.at += len(left) ** 3 // 1000  # 2000 FLOP a ns

    monkeypatch.setattr(torch, "mm", product)
    clock = measure.Clock(torch.device("cpu"), now)
    rate = measure.product_rate(clock, torch.float32, budget_ns=1_500_000)
    assert rate == pytest.approx(2e12, rel=1e-3)
    assert set(seen) == {256, 512}  # 1024 would take 1.07 ms, more than is left


def test_a_dtype_that_the_device_does_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError('"addmm_impl_cpu_" not implemented')

    monkeypatch.setattr(torch, "mm", refuse)
    assert measure.product_rate(measure.Clock(torch.device("cpu")), torch.float16) is None


def test_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    clock = measure.Clock(torch.device("cpu"))
    monkeypatch.setattr(measure, "_CPU_COPY_BYTES", 1024**2)
    rate = measure.product_rate(clock, torch.float32, 1)
    assert rate is not None and 1e6 < rate < 1e16
    assert 1e6 < measure.copy_rate(clock, 1) < 1e15
    assert 10 < measure.call_cost(clock, 1) < 1e8
    assert torch.get_float32_matmul_precision() == before


def test_devices_have_the_names_of_the_environment() -> None:
    for device in measure.devices():
        assert device_name(device) == describe_environment(device, None)["device_name"]


@pytest.mark.parametrize(
    ("rates", "shown"),
    [({"float32": 1e11, "bfloat16": 3e11}, ("float32", 1e11)), ({"bfloat16": 3e11}, None), (None, None)],
)
def test_a_run_holds_the_ceilings_of_its_dtype(rates: dict[str, float] | None, shown: tuple[str, float] | None) -> None:
    """Of a model of float32: what the page draws the roof of."""
    threads = torch.get_num_threads()
    if rates is not None:
        keep(Limits(device_name(torch.device("cpu")), rates, 2e10, 900.0), threads)
    report = profile(
        torch.nn.Linear(8, 8), torch.ones(4, 8), steps=1, warmup=0, memory=False, lines=False, device="cpu"
    )
    environment = report.data.environment
    if shown is None:
        assert not [key for key in environment if key.startswith("limit_")]
    else:
        assert (environment["limit_dtype"], environment["limit_flops"], environment["limit_bytes"]) == (*shown, 2e10)
