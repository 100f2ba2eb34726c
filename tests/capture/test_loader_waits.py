"""How long a loop waits for its batches, by a clock that is set."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from gradscope.capture import loop
from gradscope.capture.guard import Guard
from gradscope.capture.loop import LoaderWatch


class Slow(Dataset[Tensor]):
    """Each item takes so much of the clock."""

    def __init__(self, clock: list[int], takes: int) -> None:
        self.clock, self.takes = clock, takes

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        self.clock[0] += self.takes
        return torch.ones(1)


class Slower(Slow):
    pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    now = [0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))
    return now


def run(loop: Callable[[], object], *, counting: bool = True) -> LoaderWatch:
    watch = LoaderWatch(Guard())
    watch.counting = counting
    with watch.installed():
        loop()
    return watch


def test_what_is_waited_for_is_of_one_step_and_the_longest_comes_first(clock: list[int]) -> None:
    loaders = [DataLoader(Slow(clock, 10)), DataLoader(Slower(clock, 40))]

    def loop() -> None:
        for loader in loaders:
            for _ in loader:
                pass

    found = run(loop).facts(steps=2)
    assert [(each["dataset"], each["ns"], each["start_ns"]) for each in found] == [("Slower", 60, 0), ("Slow", 15, 0)]
    assert all(each["line"].partition(":")[0].endswith("test_loader_waits.py") for each in found)
    assert {(each["workers"], each["persistent"], each["pinned"]) for each in found} == {(0, False, False)}


def test_the_iterator_is_made_at_a_line_too(clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it the workers."""
    original = DataLoader._get_iterator

    def slow(self: Any) -> Any:
        clock[0] += 100
        return original(self)

    monkeypatch.setattr(DataLoader, "_get_iterator", slow)
    (found,) = run(lambda: list(DataLoader(Slow(clock, 10)))).facts(steps=5)
    assert (found["ns"], found["start_ns"]) == (6, 20)


def test_only_the_thread_that_trains_waits_while_it_is_counted(clock: list[int]) -> None:
    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: list(DataLoader(Slow(clock, 10))))
        thread.start()
        thread.join()

    assert run(elsewhere).facts(1) == run(lambda: list(DataLoader(Slow(clock, 10))), counting=False).facts(1) == []


def test_whether_batches_are_pinned(clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a device pins nothing, whatever the loader was asked for."""
    iterator: Any = next(iter([iter(DataLoader(Slow(clock, 10)))]))
    iterator._pin_memory, iterator._persistent_workers = True, True
    monkeypatch.setattr(type(iterator), "_next_data", lambda self: torch.ones(1))
    (found,) = run(lambda: next(iterator)).facts(1)
    assert found["pinned"] is True and found["persistent"] is True


def test_an_error_of_ours_takes_no_batch_away(clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from gradscope.capture import guard

    monkeypatch.setattr(guard, "listeners", [])
    monkeypatch.setattr(LoaderWatch, "_waited", lambda *_: 1 // 0)

    def loop() -> Iterator[None]:
        yield from (None for _ in DataLoader(Slow(clock, 10)))

    seen: list[None] = []
    run(lambda: seen.extend(loop()))
    assert len(seen) == 3


def test_a_torch_of_another_kind_is_left_alone() -> None:
    class Other:
        pass

    for owner in (Other, None):
        with loop._wrapped(owner, "__next__", lambda *_: None):
            assert not hasattr(Other, "__next__")


def test_a_wrapper_that_the_user_sets_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DataLoader, "__iter__", original := DataLoader.__iter__)
    seen: list[Any] = []
    with LoaderWatch(Guard()).installed():
        ours = DataLoader.__iter__

        def users(loader: Any) -> Any:
            seen.append(loader)
            return ours(loader)

        monkeypatch.setattr(DataLoader, "__iter__", users)
    assert DataLoader.__iter__ is users and users is not original
    assert len(list(DataLoader(Slow([0], 0)))) == 3 and len(seen) == 1
