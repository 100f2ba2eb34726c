"""How benchmarks/recipe_gpu runs: its time, ways that fail, processes that end, and what it asks of the device."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor

from .gpu_fixtures import (
    BENCHMARKS,
    FIRST,
    LIMITS,
    RECIPE,
    Budget,
    Figure,
    Kind,
    Limits,
    Stub,
    Way,
    budget,
    double,
    measured,
    report,
    small,
    supervise,
    timer,
    worker,
)


def test_budget_keeps_time_for_what_follows() -> None:
    now = [100.0]
    limit = Budget(200.0, clock=lambda: now[0])
    assert limit.left() == 100 and limit.why_no_compile(0) is None
    most = int((100 - budget.COMPILE_SECONDS) / budget.LEAST_SECONDS)
    assert limit.why_no_compile(most) is None
    assert limit.why_no_compile(most + 1) == "no time to compile: 10 s to spare, it may take 12"
    limit.compiled_in(40.0)
    assert limit.why_no_compile(21) == "no time to compile: 37 s to spare, it may take 40"
    now[0] = 300.0
    assert limit.why_no_compile(0) == "no time to compile: 0 s to spare, it may take 40"


def test_one_failing_way_does_not_stop_the_others() -> None:
    calls = []

    def full(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand more")

    def later(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("no more")
        return 2 * x

    ways = (FIRST, Way("full", Kind.SDPA, full), Way("later", Kind.LIGER, later), RECIPE)
    figures = {figure.way: figure for figure in measured(small(*ways))}
    assert figures["full"].failure == "OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"
    assert figures["later"].failure == "RuntimeError: no more"
    assert figures["first"].failure is None and figures["recipe"].failure is None
    assert figures["recipe"].error == 0.0


def test_where_the_first_fails_the_next_is_what_others_are_compared_with() -> None:
    def full(x: Tensor) -> Tensor:
        raise RuntimeError("full")

    second = Way("second", Kind.EAGER, lambda x: 3 * x)
    figures = measured(small(Way("first", Kind.EAGER, full), second, RECIPE))
    assert [figure.error for figure in figures] == [None, None, pytest.approx(1 / 3)]


def test_a_lost_device_ends_the_process() -> None:
    class Lost(Stub):
        def synchronize(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    begun: list[str] = []
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measured(small(FIRST, RECIPE), Lost(), begin=begun.append)
    assert begun == ["first"]


def test_a_wrong_gradient_is_seen() -> None:
    wrong = Way("recipe", Kind.RECIPE, lambda x: 2.5 * x)
    problem = small(FIRST, wrong)
    figures = measured(problem)
    assert figures[1].error == pytest.approx(0.25)
    assert report.lines_of(problem, figures, LIMITS)[-1].endswith("WRONG by 0.25")
    assert any("gradient error" in line for line in report.verdict_lines(report.results_of(problem, figures)))
    assert timer.error_of([torch.tensor([float("nan")])], [torch.ones(1)]) == float("inf")
    assert timer.error_of([torch.ones(2)], [torch.ones(1)]) == float("inf")
    assert timer.error_of([torch.ones(1)], [torch.zeros(1)]) == 1.0


def test_medians_in_turns() -> None:
    """One sample each to learn what queueing takes, then rounds: first 1, 3, 9 ms, recipe 2, 2, 4."""
    clock = Stub(50, 50, 1, 2, 3, 2, 9, 4)
    first, recipe = measured(small(FIRST, RECIPE), clock)
    assert (first.ms, recipe.ms) == (3, 2) and clock.steps == 8
    assert first.share == pytest.approx(2 / 3)  # 8 GB at 4 TB/s take 2 ms


def test_the_compiler_is_left_out_when_time_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    problem = small(FIRST, RECIPE, Way("compiled", Kind.COMPILE, double))
    assert measured(problem, deadline=13.0)[2].failure is None
    short = measured(problem, deadline=13.0, problems_after=2)
    assert short[2].failure == "no time to compile: 7 s to spare, it may take 12"
    assert short[1].failure is None
    assert measured(problem, skip={"first": "crashed"})[0].failure == "crashed"


def test_worker_says_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    order = {
        "start": 1,
        "deadline": 1e12,
        "rounds": 3,
        "skip": [[1, "first", "crashed"], [0, "recipe", "?"]],
        "limits": None,
    }
    worker.run([small(), small(FIRST, RECIPE)], order, said.append, Stub(), "cpu")
    assert said[0] == {"limits": {"bytes_per_s": 4e12, "flop_per_s": 8e14}}
    assert said[1:3] == [{"begin": 1, "way": "recipe"}, {"begin": 1, "way": ""}]
    assert said[3]["index"] == 1
    figures = [Figure(**figure) for figure in json.loads(json.dumps(said[3]["figures"]))]
    assert [figure.failure for figure in figures] == ["crashed", None]
    said.clear()
    worker.run([small(FIRST)], {**order, "start": 0, "skip": [], "deadline": 0.0}, said.append, Stub(), "cpu")
    assert said[-1]["figures"][0]["failure"] == "no time left"


CHILD = """
import json, os, sys, time
order = json.loads(sys.argv[1])
say = lambda **line: print(json.dumps(line), flush=True)
print("a library's chatter", flush=True)
say(limits={"bytes_per_s": 1.0, "flop_per_s": 2.0})
skipped = {(index, way) for index, way, _ in order["skip"]}
for index in range(order["start"], 3):
    for way in ("good", "bad"):
        if (index, way) in skipped:
            continue
        say(begin=index, way=way)
        if index == 0 and way == "bad":
            sys.exit("CUDA error: misaligned address")
        if index == 1 and way == "bad":
            time.sleep(60)
    say(begin=index, way="")
    if index == 2:
        os._exit(7)
    say(index=index, figures=[skip for skip in order["skip"] if skip[0] == index])
"""


def test_another_process_goes_on_where_one_was_lost() -> None:
    """The first dies by a way, the second does not end another, the third is lost while all are timed."""
    orders: list[dict[str, Any]] = []

    def command(order: dict[str, Any]) -> list[str]:
        orders.append(json.loads(json.dumps(order)))
        return [sys.executable, "-S", "-c", CHILD, json.dumps(order)]

    lines = list(supervise.supervise(command, {"start": 0, "skip": [], "limits": None}, 3, patience=2.0))
    figures = [line for line in lines if "figures" in line]
    assert figures[0]["figures"] == [[0, "bad", "its process ended with 1: CUDA error: misaligned address"]]
    assert figures[1]["figures"] == [[1, "bad", "its process did not go on"]]
    assert lines[-1] == {"lost": 2, "why": "its process ended with 7"}
    assert [order["start"] for order in orders] == [0, 0, 1]
    assert orders[0]["limits"] is None and orders[1]["limits"] == {"bytes_per_s": 1.0, "flop_per_s": 2.0}


def test_an_end_is_seen_though_the_pipe_stays_open() -> None:
    """A compiler's own processes inherit it."""
    code = "import subprocess, sys; subprocess.Popen(['sleep', '5']); sys.exit('gone')"
    lines = list(
        supervise.supervise(
            lambda order: [sys.executable, "-S", "-c", code], {"start": 0, "skip": [], "limits": None}, 1, patience=4.0
        )
    )
    assert lines == [{"lost": 0, "why": "its process ended with 1: gone"}]


def test_processes_that_all_end_are_given_up() -> None:
    started: list[int] = []

    def command(order: dict[str, Any]) -> list[str]:
        started.append(order["start"])
        return [sys.executable, "-S", "-c", "raise SystemExit('no device')"]

    lines = list(supervise.supervise(command, {"start": 0, "skip": [], "limits": None}, 12))
    assert [line["lost"] for line in lines] == list(range(12))
    assert len(started) == supervise.MOST_RESTARTS + 1
    assert lines[-1]["why"] == "too many processes ended; of the last one, its process ended with 1: no device"


class FakeEvent:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return 4.0


class FakeCuda(types.SimpleNamespace):
    """What the timer asks of torch.cuda."""

    def __init__(self) -> None:
        super().__init__(slept=[], peak=900, mode=0)

    def Event(self, *, enable_timing: bool) -> FakeEvent:
        return FakeEvent()

    def _sleep(self, cycles: int) -> None:
        self.slept.append(cycles)

    def synchronize(self) -> None:
        pass

    def memory_allocated(self) -> int:
        return 300

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_sync_debug_mode(self) -> int:
        return self.mode

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.mode = mode


def test_the_timer_asks_torch_for_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls, with torch.cuda's names replaced: a name that torch has not got would be found out here."""
    cuda = FakeCuda()
    for name in vars(FakeCuda):
        assert name.startswith("__") or hasattr(torch.cuda, name), name
    here: Any = types.SimpleNamespace(cuda=cuda, Tensor=Tensor)
    for name in ("int32", "uint8", "bfloat16", "empty_like", "mm"):
        setattr(here, name, getattr(torch, name))
    for name in ("ones", "randint", "randn"):
        made = getattr(torch, name)
        setattr(here, name, lambda *sizes, made=made, device, **named: made(*sizes, **named))
    monkeypatch.setattr(timer, "torch", here)
    for name, value in (("FLUSH_BYTES", 64), ("COPY_BYTES", 4000), ("PRODUCT", 16)):
        monkeypatch.setattr(timer, name, value)
    clock = timer.CudaTimer()
    per_ms = timer.CYCLES_TO_CALIBRATE / 4
    assert clock.limits() == Limits(2 * 4000 / 4e-3, 2 * 16**3 / 4e-3)
    assert clock.sample(list, 1.0).device_ms == 4.0
    assert cuda.slept[-1] == 2 * per_ms
    clock.sample(list, 0.0)
    assert cuda.slept[-1] == pytest.approx(0.2 * per_ms)
    assert clock.peak(list) == 600
    assert not clock.waits(list)

    def waiting() -> list[Tensor]:
        assert cuda.mode == "error"
        raise RuntimeError("called a synchronizing CUDA operation")

    def broken() -> list[Tensor]:
        raise RuntimeError("broken")

    assert clock.waits(waiting)
    with pytest.raises(RuntimeError, match="broken"):
        clock.waits(broken)
    assert cuda.mode == 0


def test_without_an_install_the_checkout_is_found() -> None:
    """For a machine that only has a copy of the tree: recipes and kernels lie elsewhere than they are imported from."""
    lines = (
        f"sys.path += ['{BENCHMARKS.parent}']",
        "import gradscope",
        f"runpy.run_path('{BENCHMARKS / 'from_source' / 'sitecustomize.py'}')",
        "specs = [importlib.util.find_spec(f'gradscope.{name}') for name in ('recipes', 'kernels', 'tables')]",
        "print(*(spec.origin for spec in specs), sep=chr(10))",
    )
    code = "import importlib.util, runpy, sys; " + "; ".join(lines)
    run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    top = BENCHMARKS.parent
    assert run.stdout.splitlines() == [
        str(top / "recipes" / "__init__.py"),
        str(top / "kernels" / "__init__.py"),
        str(top / "gradscope" / "tables" / "__init__.py"),
    ]
