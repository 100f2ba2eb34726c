"""Where a step of somebody else's loop ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from gradscope.capture import backward, training
from gradscope.capture.backward import BackwardWatch
from gradscope.capture.training import StepFinder, StopRun


class _Session:
    """Counts the boundaries it is told of, and what had happened before each."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.backward = BackwardWatch()
        self.log: list[str] = []
        self._left = stop_after

    def boundary(self) -> bool:
        self.log.append("|")
        self._left -= 1
        return self._left <= 0


def _optimizer(name: str, session: _Session) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_args: session.log.append(name))
    return optimizer


def _finder(session: _Session, **options: bool) -> StepFinder:
    finder: Any = StepFinder
    return finder(session, **options)


def test_one_optimizer_ends_a_step_each_time_once_it_is_known_to_be_alone() -> None:
    session = _Session()
    with _finder(session).watching():
        optimizer = _optimizer("a", session)
        for _ in range(4):
            optimizer.step()
    assert "".join(session.log) == "aa|a|a|"


class _Wrapper(torch.optim.Optimizer):
    """As accelerate's: an optimizer itself, whose steps are those of another."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)


def test_a_wrapper_of_an_optimizer_is_not_waited_for() -> None:
    session = _Session()
    with _finder(session).watching():
        optimizer = _Wrapper(_optimizer("a", session))
        for _ in range(4):
            optimizer.step()
    assert "".join(session.log) == "aa|a|a|"


def test_a_round_of_several_ends_with_the_last() -> None:
    session = _Session()
    with _finder(session).watching():
        first, second = _optimizer("a", session), _optimizer("b", session)
        for _ in range(4):
            first.step()
            second.step()
    assert "".join(session.log) == "abab|ab|ab|"


def test_threads_that_train_side_by_side_do_not_mix_their_optimizers() -> None:
    """Whatever their order is: each step of the first counts, and those of the others are in none of its cycles."""
    session = _Session()
    with _finder(session).watching(), ThreadPoolExecutor(1) as other:
        first, second = _optimizer("a", session), _optimizer("b", session)
        for number in range(8):
            first.step()
            for _ in range(number % 3):
                other.submit(second.step).result()
    first_step, *others = "".join(session.log).replace("b", "").split("|")
    assert len(first_step) <= 3  # until it is known that nothing else is to be waited for
    assert others == [*"a" * (8 - len(first_step)), ""]


def test_a_thread_that_has_ended_trains_no_more() -> None:
    """The next in which an optimizer steps does."""
    session = _Session()
    with _finder(session).watching():
        optimizer = _optimizer("a", session)
        for _ in range(2):
            with ThreadPoolExecutor(1) as trainer:
                for _ in range(3):
                    trainer.submit(optimizer.step).result()
    assert "".join(session.log) == "aa|a|a|a|a|"


def test_a_step_of_several_optimizers_says_how_often_each_steps() -> None:
    session = _Session()
    finder = _finder(session)
    with finder.watching():
        critic, other = _optimizer("c", session), _optimizer("g", session)
        for _ in range(4):
            for optimizer in (critic, critic, other):
                optimizer.step()
    held = [frozenset({id(each.param_groups[0]["params"][0])}) for each in (critic, other)]
    assert finder.cycle == [("SGD", held[0], 2), ("SGD", held[1], 1)]


def test_of_one_optimizer_there_is_nothing_to_say() -> None:
    session = _Session()
    finder = _finder(session)
    with finder.watching():
        optimizer = _optimizer("a", session)
        for _ in range(4):
            optimizer.step()
    assert "|" in session.log and finder.cycle == []


def test_a_round_follows_a_loop_that_drops_an_optimizer() -> None:
    session = _Session()
    with _finder(session).watching():
        first, second = _optimizer("a", session), _optimizer("b", session)
        for _ in range(2):
            first.step()
            second.step()
        for _ in range(3):
            first.step()
    assert "".join(session.log) == "abab|aa|a|"


def _backward() -> None:
    (torch.ones(1, requires_grad=True) * 2).sum().backward()


def test_passes_of_other_threads_are_no_steps_while_an_optimizer_is_waited_for() -> None:
    session = _Session()
    finder = _finder(session)
    with session.backward.installed(), finder.watching(), ThreadPoolExecutor(1) as other:
        optimizer = _optimizer("a", session)
        for _ in range(300):
            other.submit(_backward).result()
        _backward()
        assert session.log == []
        optimizer.step()
        optimizer.step()
    assert "".join(session.log).startswith("a") and "|" in session.log


def test_an_optimizer_that_never_steps_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_PATIENCE", 3)
    session = _Session()
    with session.backward.installed(), _finder(session).watching():
        optimizer = _optimizer("a", session)
        for _ in range(5):
            session.log.append("b")
            _backward()
    assert "".join(session.log) == "bbbb|b|"
    del optimizer


def test_a_pass_in_which_no_optimizer_stepped_is_no_step_of_those_inside_backward() -> None:
    session = _Session()
    finder = _finder(session)
    wanted = True
    with session.backward.installed(), finder.watching():
        optimizer = _optimizer("s", session)
        parameter = optimizer.param_groups[0]["params"][0]
        parameter.register_post_accumulate_grad_hook(lambda _parameter: optimizer.step() if wanted else None)
        for number in range(8):
            wanted = number % 2 == 1  # every other pass only accumulates
            session.log.append("b")
            (parameter * 2).sum().backward()
    assert "".join(session.log) == "bbsbbs|bbs|bbs|"


def test_without_an_optimizer_each_outermost_backward_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _Session()
    finder = _finder(session)
    monkeypatch.setattr(finder, "_has_optimizer", lambda: False)
    with session.backward.installed(), finder.watching():
        for _ in range(3):
            _backward()
    assert session.log == ["|", "|", "|"]


class _Again(torch.autograd.Function):
    """Runs forward and a backward pass of its own inside backward, as reentrant checkpointing does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (inner * 2).backward(upstream)
        assert inner.grad is not None
        return inner.grad


def test_a_pass_inside_a_backward_pass_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it seen by whoever watches: twelve passes, of which four are outermost."""
    session = _Session()
    finder = _finder(session)
    monkeypatch.setattr(finder, "_has_optimizer", lambda: False)
    entered: list[int] = []

    @contextlib.contextmanager
    def around(roots: Any) -> Iterator[None]:
        entered.append(torch._C._current_graph_task_id())
        yield

    session.backward.around = around
    with session.backward.installed(), finder.watching():
        for _ in range(4):
            x = torch.ones(1, requires_grad=True)
            _Again.apply(_Again.apply(x)).sum().backward()
            assert x.grad is not None and x.grad.item() == 4
    assert session.log == ["|"] * 4
    assert entered == [-1] * 4


def test_a_backward_pass_that_raises_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    session = _Session()
    finder = _finder(session)
    monkeypatch.setattr(finder, "_has_optimizer", lambda: False)
    with session.backward.installed(), finder.watching():
        x = torch.ones(1, requires_grad=True)
        (y := x * 2).register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            y.sum().backward()
        _backward()
    assert session.log == ["|"]


def test_backward_passes_before_the_first_optimizer_step_are_accumulation() -> None:
    session = _Session()
    with session.backward.installed(), _finder(session).watching():
        optimizer = _optimizer("a", session)
        for _ in range(3):
            for _ in range(4):
                _backward()
            optimizer.step()
    assert "".join(session.log) == "aa|a|"


def test_the_script_is_stopped_after_the_last_step_unless_it_may_run_on() -> None:
    session = _Session(stop_after=2)
    with _finder(session).watching(), pytest.raises(StopRun):
        optimizer = _optimizer("a", session)
        for _ in range(10):
            optimizer.step()
    assert "".join(session.log) == "aa|a|"
    session = _Session(stop_after=2)
    with _finder(session, run_to_end=True).watching():
        optimizer = _optimizer("a", session)
        for _ in range(5):
            optimizer.step()
    assert "".join(session.log).startswith("aa|a|")


def test_stopping_passes_an_except_exception() -> None:
    assert not issubclass(StopRun, Exception)


def _passes(session: _Session, kinds: str) -> str:
    """Go backward once a letter: p plain, g with ``create_graph``, f by torch.func; tell what the session was told."""
    weight = torch.ones(2, requires_grad=True)
    with session.backward.installed(), _finder(session).watching():
        for kind in kinds:
            session.log.append(kind)
            if kind == "f":
                torch.func.grad(lambda x: x.square().sum())(weight.detach())
            else:
                torch.autograd.grad(weight.square().sum(), weight, create_graph=kind == "g")
    return "".join(session.log)


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ("gpgpgp", "gp|gp|gp|"),  # an inner step, or a gradient penalty, and what goes through it
        ("ggggggggggpggggggggggpgp", "ggggggggg|g|p|ggggggggggp|gp|"),
        ("pgp", "p|gp|"),
        ("g" * 10, "g" * 9 + "|g|"),  # a program that asks for a graph each time, and never uses it
        ("fff", "f|f|f|"),  # torch.func always does
    ],
)
def test_a_pass_that_a_later_one_goes_through_ends_no_step(kinds: str, found: str) -> None:
    assert _passes(_Session(), kinds) == found


def test_what_is_recorded_into_a_cuda_graph_ends_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs then, and a phase that begins or ends in it, or waits for the device, would end the recording."""
    session = _Session()
    recording: list[bool] = []
    for module in (backward, training):
        monkeypatch.setattr(module, "is_capturing", lambda: recording[-1])
    with session.backward.installed(), _finder(session).watching():
        optimizer = _optimizer("a", session)
        x = torch.ones(1, requires_grad=True)
        for each in (False, True, True, False, False):
            recording.append(each)
            (x * 2).backward()
            optimizer.step()
    assert "".join(session.log) == "aaaa|a|"
    assert session.backward.captured == 2
