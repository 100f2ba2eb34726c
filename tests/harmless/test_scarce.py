"""Where the user's code, or the system, leaves gradscope no files: training goes on, and what is known is told."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradscope
from gradscope.capture.environment import describe_environment
from gradscope.process import RoomForCalls, room_for_files, room_for_frames

_LEAKS = """
import os, resource, torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
leaked = []
for number in range(40):
    loss = model(torch.ones(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if number == 1:
        HARD
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        try:
            while True:
                leaked.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
print("trained", loss.item())
"""


def _profiled(folder: Path, hard: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(_LEAKS.replace("HARD", hard))
    command = [sys.executable, "-m", "gradscope", "profile", "train.py", "--steps", "2", "--run-to-end"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)


def test_a_script_that_has_used_up_its_descriptors(tmp_path: Path) -> None:
    ran = _profiled(tmp_path, "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]")
    assert ran.returncode == 0 and "trained " in ran.stdout and "gradscope: error" not in ran.stderr, ran.stderr
    run = json.loads((tmp_path / "gradscope-train.json").read_text())
    assert not run["partial"] and not [note for note in run["notes"] if "failed" in note]
    assert (tmp_path / "gradscope-train.html").exists()


def test_a_script_that_may_have_no_more(tmp_path: Path) -> None:
    """Nothing can be loaded or written from then on: one clear error, when the training has ended."""
    ran = _profiled(tmp_path, "hard = 200")
    assert "trained " in ran.stdout and ran.returncode == 2, ran.stderr
    assert (
        "gradscope: error: too many files are open: gradscope can open none of its own.\n"
        "Close some, or raise the limit: ulimit -n\n"
    ) in ran.stderr


@pytest.fixture
def limit() -> Iterator[int]:
    """The soft limit, which is below the hard one in this test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before) - 100, before[1]))
    yield min(before) - 100
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_is_as_before(limit: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with room_for_files():
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > limit
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit, hard)
    with room_for_files():
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit - 7, hard))
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limit - 7, hard), "one that was set meanwhile stays"


def test_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container with a read-only file system."""

    def fail(*_args: Any, **_kwargs: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", fail)
    monkeypatch.setattr(os, "memfd_create", fail)
    opened = len(os.listdir("/proc/self/fd"))
    report = gradscope.profile(nn.Linear(8, 8), torch.ones(4, 8), steps=1, warmup=1)
    assert not report.data.partial and not [note for note in report.data.notes if "failed" in note]
    assert len(os.listdir("/proc/self/fd")) == opened


def test_a_stand_in_for_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    assert "triton" not in describe_environment(torch.device("cpu"), None)


@pytest.mark.parametrize("stream", [None, types.SimpleNamespace(write=len)], ids=["none", "no flush"])
def test_what_the_user_puts_in_the_place_of_stderr(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    report = gradscope.profile(nn.Linear(8, 8), torch.ones(4, 8), steps=1, warmup=1)
    assert not report.data.partial and not [note for note in report.data.notes if "failed" in note]


class _Nest(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def _deep(wanted: Callable[[nn.Module], bool]) -> nn.Module:
    """The deepest model that ``wanted`` holds of, by tens."""
    model: nn.Module = nn.Linear(4, 4)
    while True:
        deeper = model
        for _ in range(10):
            deeper = _Nest(deeper)
        if not wanted(deeper):
            return model
        model = deeper


def _runs(model: nn.Module) -> bool:
    try:
        model(torch.ones(2, 4))
    except RecursionError:
        return False
    return True


def test_a_model_is_as_deep_as_it_may_be_alone() -> None:
    model = _deep(_runs)
    before, steps = sys.getrecursionlimit(), 0
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        for _ in range(40):
            model(torch.ones(2, 4)).sum().backward()
            steps += 1
            if prof.step():
                break
    assert steps > 2 and sys.getrecursionlimit() == before
    assert prof.report.data.ledger.backward_ns > 0


def test_the_depth_of_other_programs_is_theirs() -> None:
    """A thread with little memory for its stack relies on it."""
    model, limits = nn.Sequential(nn.Linear(4, 4)), set()
    model.register_forward_hook(lambda *_: limits.add(sys.getrecursionlimit()))
    gradscope.profile(model, torch.ones(2, 4), steps=2, warmup=1)
    assert limits == {sys.getrecursionlimit()}


@pytest.mark.parametrize("programs", [None, 2_000, 2**31 - 1])
def test_the_depth_that_a_program_allows_itself_is_kept(programs: int | None) -> None:
    before = sys.getrecursionlimit()
    try:
        with room_for_frames(500):
            assert sys.getrecursionlimit() == before + 500
            if programs is not None:
                sys.setrecursionlimit(programs)
            with room_for_frames(500):
                assert sys.getrecursionlimit() >= (programs or before)
            if programs is not None:
                assert sys.getrecursionlimit() == programs
        assert sys.getrecursionlimit() == (programs or before)
    finally:
        sys.setrecursionlimit(before)


def test_who_asks_first_for_room_need_not_be_the_last_to_have_it() -> None:
    before = sys.getrecursionlimit()
    first, second = room_for_frames(300), room_for_frames(200)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getrecursionlimit() == before + 200
    second.__exit__(None, None, None)
    assert sys.getrecursionlimit() == before


def test_two_that_need_room_do_not_take_each_other_for_the_program() -> None:
    """Modules and what Dynamo inlines, in turns; nor is room lost that the program has taken away."""
    before = sys.getrecursionlimit()
    first, second = RoomForCalls(), RoomForCalls(5)
    try:
        for depth in (32, 64, 32, 64):
            first.make(depth)
            second.make(depth)
        assert sys.getrecursionlimit() == before + (101 + 96) + (101 + 5 * 96)
        sys.setrecursionlimit(before + 1)
        first.make(32)
        assert sys.getrecursionlimit() == before + 1 + 101 + 64
        first.close()
        second.close()
        assert sys.getrecursionlimit() == before + 1
    finally:
        sys.setrecursionlimit(before)


class _Tree(nn.Module):
    """Calls itself: one module, and calls as deep as the program asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        return self.linear(x if depth == 0 else self(x, depth - 1))  # type: ignore[no-any-return]


def _deepest(model: nn.Module) -> int:
    depth = 10
    while _runs_at(model, depth + 5):
        depth += 5
    return depth


def _runs_at(model: nn.Module, depth: int) -> bool:
    try:
        model(torch.ones(2, 4), depth)
    except RecursionError:
        return False
    return True


def test_a_module_calls_itself_as_deep_as_it_may_alone() -> None:
    model, before = _Tree(), sys.getrecursionlimit()
    depth, limits = _deepest(model), set()
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        while True:
            model(torch.ones(2, 4), depth).sum().backward()
            limits.add(sys.getrecursionlimit())
            if prof.step():
                break
    assert limits != {before} and sys.getrecursionlimit() == before
    assert not [note for note in prof.report.data.notes if "failed" in note]


@pytest.mark.parametrize("keeps", [False, True])
def test_a_program_that_sets_the_depth_of_each_forward_has_it(keeps: bool) -> None:
    model, before = _Tree(), sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(1200)
        depth = _deepest(model)
        with gradscope.profiling(model, steps=2, warmup=1) as prof:
            while True:
                sys.setrecursionlimit(1200)
                loss = model(torch.ones(2, 4), depth).sum()
                if not keeps:
                    sys.setrecursionlimit(before)
                loss.backward()
                if prof.step():
                    break
        assert sys.getrecursionlimit() == (1200 if keeps else before)
        assert not [note for note in prof.report.data.notes if "failed" in note]
    finally:
        sys.setrecursionlimit(before)


def test_a_thread_with_a_small_stack_has_the_depth_that_keeps_it_from_overflowing() -> None:
    before, found = sys.getrecursionlimit(), []

    def deep() -> None:
        room = RoomForCalls()
        room.make(64)
        found.append(sys.getrecursionlimit())
        room.close()

    size = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=deep)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
    deep()
    assert found[0] == before < found[1] and sys.getrecursionlimit() == before


@pytest.mark.filterwarnings("ignore:global module forward hook with:UserWarning")  # torch's, of our hooks at the end
def test_a_recursion_without_an_end_has_one() -> None:
    model, reached = _Tree(), 0
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        while True:
            model(torch.ones(2, 4), 1).sum().backward()
            reached += not _runs_at(model, 1_000_000)
            if prof.step():
                break
    assert reached > 3
