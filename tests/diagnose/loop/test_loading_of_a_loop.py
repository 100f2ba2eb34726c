"""Batches that a loop waits for: really loaded, and made by hand for what needs many cores or a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, dataloader

from gradscope.diagnose.case import Case, StepFacts
from gradscope.diagnose.rules.loop import data_loading
from gradscope.tables import Finding, LineRow
from tests.diagnose.run_case import loop_case, with_quick_phases
from tests.diagnose.timing_cases import MS, check_words, made_case, op
from tests.diagnose.twins_loops import Samples, Training


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Steps stay short also where other processes use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _case(batches: Iterator[Any]) -> Case:
    return with_quick_phases(loop_case(Training(batches).step, memory=False, steps=3, warmup=4))


def _found(batches: Iterator[Any]) -> tuple[Case, Finding]:
    """The one finding."""
    case = _case(batches)
    (one,) = data_loading.find(case)
    return case, one


def _forever(loader: DataLoader[Any]) -> Iterator[Tensor]:
    while True:
        for batch in loader:
            yield batch[0] if isinstance(batch, list) else batch


def test_a_dataset_that_is_slow_is_named_with_its_line() -> None:
    case, found = _found(iter(DataLoader(Samples(0.005), batch_size=8)))
    (loader,) = case.facts.settings["loaders"]
    assert loader["workers"] == 0
    assert loader["dataset"] == "Samples"
    assert 40 * MS <= loader["ns"] <= case.run.step.other_ns
    check_words(found)
    assert "has no workers" in found.message
    assert found.line is not None and "twins_loops.py" in found.line
    assert "num_workers=" in found.code
    assert found.severity != "info"


def test_workers_that_are_too_slow_are_counted() -> None:
    case = _case(iter(DataLoader(Samples(0.02), batch_size=8, num_workers=2)))
    (loader,) = case.facts.settings["loaders"]
    assert loader["workers"] == 2
    # How long they are waited for depends on the machine's other work: two that sleep 160 ms a batch, 80 ms a step.
    settings = {**case.facts.settings, "loaders": [{**loader, "ns": 80 * MS}]}
    waiting = with_quick_phases(Case(case.run, replace(case.facts, settings=settings)), between_ns=80 * MS)
    (found,) = data_loading.find(waiting)
    check_words(found)
    assert "slower than the step" in found.message
    assert "2 workers" in found.evidence
    assert "persistent" not in found.advice
    assert found.predicted_low_ns == 0


def test_tensors_made_by_hand_are_named_with_their_line() -> None:
    def made() -> Iterator[Tensor]:
        while True:
            time.sleep(0.03)
            yield torch.ones(8, 64)

    case, found = _found(made())
    assert case.facts.settings["loaders"] == []
    check_words(found)
    assert "is Python code" in found.message
    assert found.line is not None and "test_loading_of_a_loop.py" in found.line
    lines = Path(__file__).read_text().splitlines()
    assert "time.sleep(0.03)" in lines[int(found.line.rpartition(":")[2]) - 1]


def test_workers_that_are_started_for_each_epoch() -> None:
    data = TensorDataset(torch.ones(16, 64))
    case = _case(_forever(DataLoader(data, batch_size=8, num_workers=2)))
    (loader,) = case.facts.settings["loaders"]
    assert loader["start_ns"] > 0
    assert not loader["persistent"]


def test_nothing_is_left_behind() -> None:
    before = vars(DataLoader)["__iter__"], vars(dataloader._BaseDataLoaderIter)["__next__"]
    threads = threading.active_count()
    _case(iter(DataLoader(Samples(0.0), batch_size=8)))
    assert (vars(DataLoader)["__iter__"], vars(dataloader._BaseDataLoaderIter)["__next__"]) == before
    assert threading.active_count() == threads


def _made(
    loaders: list[dict[str, Any]],
    between: list[dict[str, Any]] | None = None,
    lines: list[LineRow] | None = None,
    device: str = "cpu",
    cores: int = 16,
    phases: int = 60,
) -> list[Finding]:
    """Of a step of 100 ms."""
    case = made_case(
        mode="loop",
        forward=(phases - 30) * MS,
        backward=20 * MS,
        optimizer=10 * MS,
        device=device,
        lines=lines or (),
        facts=StepFacts(settings={"loaders": loaders, "between": between or []}),
    )
    environment = {**case.run.environment, "cpus": 64, "usable_cpus": cores, "threads": 8}
    return list(data_loading.find(Case(replace(case.run, environment=environment), case.facts)))


def _loader(ms: int, workers: int = 0, start_ms: int = 0, *, persistent: bool = False) -> dict[str, Any]:
    return {
        "line": "train.py:20",
        "dataset": "Images",
        "workers": workers,
        "persistent": persistent,
        "pinned": False,
        "ns": ms * MS,
        "start_ns": start_ms * MS,
    }


def test_a_loader_without_workers() -> None:
    (found,) = _made([_loader(35)], device="cuda")
    check_words(found)
    assert found.line == "train.py:20"
    assert "35.0 ms in the DataLoader of Images" in found.evidence
    assert "pin_memory=True" in found.code
    assert found.predicted_low_ns == 17_500_000


def test_on_cores_that_all_compute_the_saving_may_be_nothing() -> None:
    assert _made([_loader(35)], cores=8)[0].predicted_low_ns == 0
    assert _made([_loader(35)], cores=16)[0].predicted_low_ns == 17_500_000


def test_more_workers_where_there_are_cores() -> None:
    (found,) = _made([_loader(35, workers=4)])
    check_words(found)
    assert "7 would keep up" in found.evidence
    assert "num_workers=7" in found.code
    (found,) = _made([_loader(35, workers=4)], cores=4)
    check_words(found)
    assert "num_workers" not in found.code
    assert "the 4 cores this process may use" in found.advice


@pytest.mark.parametrize(("cores", "workers"), [(2, 2), (3, 3), (16, 4)])
def test_no_more_workers_than_cores_that_may_be_used(cores: int, workers: int) -> None:
    """The machine has 64."""
    (found,) = _made([_loader(80)], cores=cores, phases=20)
    check_words(found)
    assert f"num_workers={workers}," in found.code


def test_no_workers_on_a_single_core() -> None:
    (found,) = _made([_loader(35)], cores=1)
    check_words(found)
    assert "workers" not in found.code
    assert found.predicted_saving_ns is None


def test_what_is_set_already_is_not_advised() -> None:
    loader = {**_loader(35, workers=2, persistent=True), "pinned": True}
    (found,) = _made([loader], device="cuda")
    assert "num_workers=" in found.code
    assert "persistent" not in found.code
    assert "pin_memory" not in found.code


def test_a_librarys_loader_is_a_setting() -> None:
    loader = {**_loader(35), "line": "/usr/lib/python3/site-packages/transformers/trainer.py:20"}
    (found,) = _made([loader])
    assert found.code.startswith("dataloader_num_workers=")


def test_workers_started_again() -> None:
    (found,) = _made([_loader(15, workers=4, start_ms=20)])
    check_words(found)
    assert "restarts its workers" in found.message
    assert "persistent_workers=True" in found.code
    assert "started again" not in _made([_loader(15, workers=4, start_ms=20, persistent=True)])[0].message


def test_python_between_the_phases_is_no_data_loading() -> None:
    between = [{"line": "train.py:30", "share": 0.8, "loading": False}]
    (found,) = _made([_loader(5)], between)
    check_words(found)
    assert "is Python code" in found.message
    assert found.line == "train.py:30"
    assert "80.0 %" in found.evidence
    _speaks_of_no_loader(found)


def _speaks_of_no_loader(found: Finding) -> None:
    """Nor promises what nobody measured."""
    assert "worker" not in f"{found.message} {found.advice} {found.code}".lower()
    assert "loader" not in f"{found.message} {found.advice} {found.code}".lower()
    assert found.predicted_saving_ns is None
    assert found.severity == "info"


def test_a_program_without_a_loader_is_not_told_of_one() -> None:
    (found,) = _made([])
    check_words(found)
    _speaks_of_no_loader(found)


def test_torchs_operations_between_the_phases_are_no_python() -> None:
    """Noise that is drawn, images that are turned: 38 of 40 ms."""
    case = made_case(ops=[op(None, "other", "aten::randn", 38 * MS)], mode="loop", backward=20 * MS, optimizer=10 * MS)
    assert list(data_loading.find(case)) == []
    case = made_case(ops=[op(None, "other", "aten::randn", 8 * MS)], mode="loop", backward=20 * MS, optimizer=10 * MS)
    (found,) = data_loading.find(case)
    assert "torch operations take 8.00 ms of it" in found.evidence


def test_waits_for_other_ranks_between_the_phases_are_no_python() -> None:
    """Gradients that a program averages by hand."""
    for wait, found in ((38 * MS, False), (MS, True)):
        waits = [op(None, "other", "c10d::allreduce_", MS), op(None, "other", "(waits for gloo:all_reduce)", wait)]
        case = made_case(ops=waits, mode="loop", backward=20 * MS, optimizer=10 * MS)
        assert bool(list(data_loading.find(case))) == found


def test_on_a_device_such_waits_have_no_row() -> None:
    waits = [op(None, "other", "c10d::allreduce_", MS)]
    case = made_case(ops=waits, mode="loop", backward=20 * MS, optimizer=10 * MS, device="cuda")
    assert list(data_loading.find(case)) == []


def test_a_line_that_torch_worked_on_is_not_named() -> None:
    between = [{"line": "train.py:30", "share": 0.8, "loading": False}]
    (found,) = _made([], between, [LineRow("train.py", 30, "main", "loss = f(x)", None, 20 * MS, 10 * MS)])
    assert found.line is None
    (found,) = _made([], [{"line": "train.py:30", "share": 0.2, "loading": False}])
    assert found.line is None
    assert _made([_loader(5)], between, phases=95) == []


def test_time_without_a_core_is_no_work_of_the_loops() -> None:
    """As on a busy machine, where each step waits for its turn: 40 ms of 100 are spent between the phases."""
    case = made_case(mode="loop", forward=30 * MS, backward=20 * MS, optimizer=10 * MS)
    assert list(data_loading.find(case))
    for waited, found in ((20 * MS, True), (30 * MS, False), (40 * MS, False)):
        step = replace(case.run.step, waited_ns=waited)
        assert bool(list(data_loading.find(Case(replace(case.run, step=step), case.facts)))) is found
