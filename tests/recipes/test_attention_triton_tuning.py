"""Block sizes that are timed: what is taken, what is kept, and that timing changes no result."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from gradscope.kernels.attention import triton_blocks, triton_launch, triton_tuning
from gradscope.kernels.attention.triton_blocks import BackwardBlocks, Tiling

from .attention_triton import check, problem


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(triton_tuning, "_chosen", {})
    yield


def clock_of(times: dict[str, float], asked: list[str]) -> Callable[[Callable[[], object]], float]:
    """A clock that says what it is told of the candidate that runs."""

    def clock(work: Callable[[], object]) -> float:
        name = str(work())
        asked.append(name)
        return times[name]

    return clock


@pytest.mark.parametrize(
    ("times", "taken"),
    [
        ({"a": 1.0, "b": 0.9, "c": 0.8}, "c"),
        ({"a": 1.0, "b": 0.96, "c": 2.0}, "a"),  # not clearly faster
        ({"a": 1.0, "b": 0.9, "c": 0.9}, "b"),
    ],
)
def test_the_fastest_is_taken_and_kept(times: dict[str, float], taken: str) -> None:
    asked: list[str] = []
    clock = clock_of(times, asked)
    assert triton_tuning.fastest("kind", ["a", "b", "c"], lambda name: name, clock) == taken
    assert asked == ["a", "b", "c"]
    assert triton_tuning.fastest("kind", ["a", "b", "c"], lambda name: name, clock) == taken
    assert asked == ["a", "b", "c"]
    triton_tuning.fastest("another", ["a", "b", "c"], lambda name: name, clock)
    assert len(asked) == 6


def test_few_are_timed_and_one_is_not() -> None:
    asked: list[str] = []
    clock = clock_of(dict.fromkeys("abcd", 1.0), asked)
    assert triton_tuning.fastest(1, ["a"], lambda name: name, clock) == "a" and not asked
    triton_tuning.fastest(2, ["a", "b", "c", "d"], lambda name: name, clock)
    assert asked == ["a", "b", "c"]


def test_what_does_not_fit_is_left_out() -> None:
    """But for the first, whose error is the caller's."""
    pytest.importorskip("triton")
    from triton.runtime.errors import OutOfResources

    def run(name: str) -> str:
        if name == "large":
            raise OutOfResources(300, 200, "shared memory")
        if name == "hungry":
            raise torch.OutOfMemoryError("no memory")
        return name

    clock = clock_of({"a": 1.0, "b": 0.5}, [])
    assert triton_tuning.fastest(1, ["a", "large", "b"], run, clock) == "b"
    assert triton_tuning.fastest(2, ["a", "hungry"], run, clock) == "a"
    with pytest.raises(OutOfResources):
        triton_tuning.fastest(3, ["large", "a"], run, clock)


class OnGpu:
    """What :func:`times` asks of a tensor."""

    is_cuda = True


def test_when_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    tensor, enough = OnGpu(), triton_tuning.LEAST_OPERATIONS
    assert triton_tuning.times(tensor, enough)  # type: ignore[arg-type]
    assert not triton_tuning.times(tensor, enough - 1)  # type: ignore[arg-type]
    assert not triton_tuning.times(torch.zeros(1), enough)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert not triton_tuning.times(tensor, enough)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        assert not triton_tuning.times(tensor, enough)  # type: ignore[arg-type]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not triton_tuning.times(tensor, enough)  # type: ignore[arg-type]


def _always_timed(monkeypatch: pytest.MonkeyPatch, taken: int, before: Callable[[], None]) -> list[int]:
    """Every candidate runs three times, the given one is the fastest; ``before`` is called after each."""
    timed: list[int] = []

    def clock(work: Callable[[], object]) -> float:
        for _ in range(3):
            work()
            before()
        timed.append(len(timed))
        return 1.0 if len(timed) % 3 == (taken + 1) % 3 else 2.0

    small = Tiling(16, 16, 4, 1)
    ways = (BackwardBlocks(small, small, small), BackwardBlocks(None, small, small))
    ways += (BackwardBlocks(Tiling(32, 16, 4, 1), small, small),)
    monkeypatch.setattr(triton_blocks, "forward_candidates", lambda *_: (small, Tiling(32, 16, 4, 1), small))
    monkeypatch.setattr(triton_blocks, "backward_candidates", lambda *_: ways)
    monkeypatch.setattr(triton_tuning, "times", lambda *_: True)
    monkeypatch.setattr(triton_tuning, "device_ms", clock)
    return timed


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_timing_changes_no_gradient(triton_device: torch.device, taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are added to begin at zero at each run."""
    timed = _always_timed(monkeypatch, taken, lambda: None)
    for dtype in (torch.float32, torch.float16):
        check(problem(triton_device, 20, 40, kv_heads=1, dtype=dtype, is_causal=True))
    assert len(timed) == 12


def test_timing_writes_nothing_of_the_callers(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients go to the caller's memory once, when the choice is made: it may be that of an input."""
    p = problem(triton_device, 20, 40)
    out, logsumexp = triton_launch.forward(p.q, p.k, p.v, None, p.options, None)
    into = tuple(torch.full_like(tensor, 7) for tensor in (p.q, p.k, p.v))
    assert len(into) == 3
    timed = _always_timed(monkeypatch, 1, lambda: [tensor.eq(7).all() or pytest.fail("written") for tensor in into])
    arguments = (p.grad_out, p.q, p.k, p.v, None, out, logsumexp, p.options, None, False)
    found = triton_launch.backward(*arguments, into=into)
    assert len(timed) == 3 and not any(tensor.eq(7).any() for tensor in found[:3] if tensor is not None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rich", [False, True])
@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (12, 0)])
def test_candidates_begin_with_the_default(capability: tuple[int, int] | None, rich: bool, dtype: torch.dtype) -> None:
    for size in (16, 32, 64, 128, 256):
        kind = (size, dtype, capability, rich)
        forward, backward = triton_blocks.forward_candidates(*kind), triton_blocks.backward_candidates(*kind)
        assert forward[0] == triton_blocks.forward_blocks(*kind)
        assert backward[0].one_pass == triton_blocks.one_pass_blocks(*kind)
        assert len(set(forward)) == len(forward) <= triton_tuning.MOST
        assert len(set(backward)) == len(backward) <= triton_tuning.MOST
