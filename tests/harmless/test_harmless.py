"""Profiling changes nothing: numbers, random state, model, hooks, torch itself and the process stay bit-identical."""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.errors import Terminated
from gradscope.tables import Options, Progress

# --------------------------------------------------------------------------------------------------------------------
# What there is to change
# --------------------------------------------------------------------------------------------------------------------

_OPTIMIZER = sys.modules[torch.optim.Optimizer.__module__]  # torch.optim hides the module's name

_PATCHABLE: tuple[Any, ...] = (
    torch,
    torch.autograd,
    torch.autograd.function,
    torch.autograd.function.Function,
    torch.autograd.graph,
    torch.nn.Module,
    torch.nn.functional,
    torch.nn.modules.module,
    torch.optim.Optimizer,
    _OPTIMIZER,
    torch.profiler,
    torch.profiler.profile,
    torch.Tensor,
    torch.utils.checkpoint,
    torch.utils.data.DataLoader,
    sys.modules["builtins"],
    sys.modules["time"],
)

_GLOBAL_HOOKS = [name for name in vars(torch.nn.modules.module) if name.startswith("_global")]
_OPTIMIZER_HOOKS = [name for name in vars(_OPTIMIZER) if name.startswith("_global")]


def process_state() -> dict[str, Any]:
    """Everything of torch and of the process that a profiler might leave changed, comparable with ``==``."""
    patched = {
        f"{getattr(owner, '__name__', owner)}.{name}": id(value)
        for owner in _PATCHABLE
        for name, value in vars(owner).items()
        if not name.startswith("__")
    }
    hooks = {name: list(getattr(torch.nn.modules.module, name) or ()) for name in _GLOBAL_HOOKS}
    hooks |= {name: list(getattr(_OPTIMIZER, name)) for name in _OPTIMIZER_HOOKS}
    return {
        "patched": patched,
        "hooks": hooks,
        "profiling": (torch.autograd._profiler_enabled(), torch.autograd.profiler._is_profiler_enabled),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "saved tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()),
        "determinism": (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
        "python": (list(sys.argv), list(sys.path), os.getcwd(), sys.modules["__main__"], sys.stdout, sys.stderr),
        "tracing": (sys.gettrace(), sys.getprofile(), sys.excepthook, threading.excepthook, warnings.filters[:]),
        "threads": threading.active_count(),
        "open files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
    }


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Compare two :func:`process_state`; what torch loads lazily may be new, nothing may be another."""
    old, new = before.pop("patched"), after.pop("patched")
    assert {name for name in old if new.get(name) != old[name]} == set()
    changed = {key: (before[key], after[key]) for key in before if before[key] != after[key]}
    assert changed == {}


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test of this file ends with torch and the process as they were."""
    gradscope.profile(nn.Linear(2, 2), torch.ones(1, 2), steps=1, warmup=1, device="cpu")  # what loads once, loads now
    before = process_state()
    yield
    assert_unchanged(before, process_state())


# --------------------------------------------------------------------------------------------------------------------
# A model with every kind of state
# --------------------------------------------------------------------------------------------------------------------


class Stateful(nn.Module):
    """Dropout, batch statistics, buffers, plain attributes, a frozen part, an eval part, user hooks, old gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.quiet = nn.Dropout(0.5).eval()
        self.head = nn.Linear(8, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.calls, self.level = 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.calls += 1
        self.level = float(x.detach().sum()) + random.random() + float(np.random.rand())
        x = self.drop(torch.relu(self.norm(self.stem(x))))
        out: Tensor = self.head(self.quiet(self.frozen(x)) + torch.rand(8))
        return out


@pytest.fixture
def model() -> Stateful:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    model = Stateful()
    model.head.bias.grad = torch.full((4,), 3.0)
    model.stem.register_forward_hook(lambda *_: None)
    model.norm.register_forward_pre_hook(lambda *_: None)
    model.head.register_full_backward_hook(lambda *_: None)
    return model


def state_of(model: nn.Module) -> dict[str, Any]:
    """Every tensor, attribute, flag and hook of a model, in a form that compares by value."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_modules", "_parameters", "_buffers"):
                state[f"{path}.{name}"] = list(value)
            elif name.endswith("_hooks") or "hooks_" in name:
                state[f"{path}.{name}"] = list(value.items()) if hasattr(value, "items") else value
            else:
                state[f"{path}.{name}"] = frozen(value)
        state[f"{path}.__class__"] = type(module)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state[f"{name}: value"], state[f"{name}: address"] = tensor.detach().clone(), tensor.data_ptr()
        state[f"{name}: grad"] = None if tensor.grad is None else tensor.grad.clone()
        state[f"{name}: flags"] = (tensor.requires_grad, tensor.is_leaf, id(tensor))
        hooks = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
        state[f"{name}: hooks"] = [list(found) if found else [] for found in hooks]
    return state


def frozen(value: Any) -> Any:
    """A copy that later steps cannot change."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(frozen(item) for item in value)
    return value


def random_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (name, keys.tolist(), *rest)}


def same(left: Any, right: Any) -> bool:
    """Bit-identical, also inside containers."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        return isinstance(left, Tensor) and isinstance(right, Tensor) and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


def different(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    keys = [*before, *(key for key in after if key not in before)]
    return [key for key in keys if key not in before or key not in after or not same(before[key], after[key])]


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def profile(model: nn.Module, **options: Any) -> Any:
    return gradscope.profile(model, X, steps=2, warmup=1, device="cpu", **options)


# --------------------------------------------------------------------------------------------------------------------
# Tests
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"lines": False}, {"seed": 5}], ids=["plain", "no lines", "seed"])
def test_profile_leaves_the_model_and_the_random_state_as_they_were(model: Stateful, options: dict[str, Any]) -> None:
    before, numbers = state_of(model), random_state()
    profile(model, **options)
    assert different(before, state_of(model)) == []
    assert different(numbers, random_state()) == []


class Remembering(nn.Module):
    """Keeps what it saw in a list and a dict, and makes attributes as it goes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.history: list[float] = [1.0]
        self.cache: dict[str, Any] = {"first": 0}

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.history.append(1.0)
        self.cache["last"] = out
        self.output = out
        return out


def test_lists_dicts_and_new_attributes_of_a_module() -> None:
    model = Remembering()
    history, cache, before = model.history, model.cache, state_of(model)
    profile(model)
    assert different(before, state_of(model)) == []
    assert model.history is history and model.cache is cache


def test_profile_in_eval_mode_stays_in_eval_mode(model: Stateful) -> None:
    model.eval()
    before = state_of(model)
    profile(model)
    assert different(before, state_of(model)) == [] and not model.training


def test_gradients_that_were_none_stay_none_and_old_ones_stay(model: Stateful) -> None:
    old = model.head.bias.grad
    profile(model)
    assert model.head.bias.grad is old
    assert torch.equal(old, torch.full((4,), 3.0))
    assert model.head.weight.grad is None and model.stem.weight.grad is None


@pytest.mark.parametrize("name", ["SGD", "Adam", "LBFGS"])
@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "used"])
def test_an_optimizer_is_as_it_was(model: Stateful, name: str, fresh: bool) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    settings = {"momentum": 0.9} if name == "SGD" else {}
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(parameters, lr=0.1, **settings)
    if not fresh:

        def closure() -> Tensor:
            loss = model(X).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        optimizer.zero_grad()
    optimizer.register_step_post_hook(lambda *_: None)
    before, whole = state_of(model), copy.deepcopy(optimizer.state_dict())
    hooks = list(optimizer._optimizer_step_post_hooks), list(optimizer._optimizer_step_pre_hooks)
    try:
        profile(model, optimizer=optimizer)
    except gradscope.GradscopeError as error:
        assert name == "LBFGS" and "closure" in str(error)
    assert different(before, state_of(model)) == []
    assert same(whole, optimizer.state_dict())
    assert hooks == (list(optimizer._optimizer_step_post_hooks), list(optimizer._optimizer_step_pre_hooks))


def train(steps: int, around: Callable[..., Any] | None) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Train a fresh model; the losses, the model's final state and the random state."""
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    model = Stateful()
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    losses: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    if around is None:
        for _ in range(steps):
            step()
    else:
        around(model, step, steps)
    state = state_of(model)
    final = {
        key: value for key, value in state.items() if "address" not in key and not key.endswith(("flags", "hooks"))
    }
    return losses, final, random_state()


def loop(model: nn.Module, step: Callable[[], None], steps: int) -> None:
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        for _ in range(steps):
            step()
            prof.step()
    assert prof.report.data.workload.steps == 2


def test_a_profiled_training_run_is_bit_identical() -> None:
    """Losses, parameters, buffers, gradients and random numbers of a loop do not know that they were measured."""
    losses, state, numbers = train(10, None)
    again, again_state, again_numbers = train(10, loop)
    assert losses == again
    assert different(state, again_state) == []
    assert different(numbers, again_numbers) == []


def test_outputs_and_gradients_inside_the_measured_steps() -> None:
    """Also during a measured step nothing is wrapped, copied or reordered: in-place ops and views work as ever."""
    seen: list[tuple[Tensor, Tensor, str]] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Flatten(0))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            out.register_hook(
                lambda grad: seen.append((out.detach().clone(), grad.clone(), type(out.grad_fn).__name__))
            )
            return out

    torch.manual_seed(0)
    model = Watched()
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        for _ in range(50):
            model(X).square().sum().backward()
            if prof.step():
                break
    torch.manual_seed(0)
    plain = Watched()
    plain(X).square().sum().backward()
    assert len(seen) > 3 and all(same(list(item), list(seen[-1])) for item in seen)


class Interrupted(nn.Module):
    def __init__(self, error: BaseException, at: int) -> None:
        super().__init__()
        self.inner, self.error, self.at, self.seen = nn.Linear(8, 8), error, at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        if self.seen > self.at:
            raise self.error
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("at", [0, 1, 2, 4], ids=lambda at: f"after {at} steps")
@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_of_the_user_surfaces_as_it_is(kind: type[BaseException], at: int) -> None:
    """The very object, with the user's frame innermost; the hooks are gone (see the fixture)."""
    error = kind("the user's own")
    model = Interrupted(error, at)
    before = {key: value for key, value in state_of(model).items() if not key.endswith((".seen", ".error"))}
    with pytest.raises(kind) as caught:
        profile(model)
    assert caught.value is error
    assert caught.traceback[-1].name == "forward" and Path(caught.traceback[-1].path).name == Path(__file__).name
    assert error.__cause__ is None and error.__context__ is None
    after = {key: value for key, value in state_of(model).items() if not key.endswith((".seen", ".error"))}
    assert different(before, after) == []


def test_an_exception_in_the_users_loop_surfaces() -> None:
    model = nn.Linear(8, 8)
    before = state_of(model)
    error = OSError("the loader's own")
    with pytest.raises(OSError) as caught, gradscope.profiling(model, steps=3, warmup=1) as prof:
        for index in range(9):
            if index == 3:
                raise error
            torch.autograd.grad(model(X).sum(), list(model.parameters()))
            prof.step()
    assert caught.value is error
    assert different(before, state_of(model)) == []


def test_leaving_the_loop_early_leaves_nothing() -> None:
    """``break`` before enough was measured."""
    model = nn.Linear(8, 8)
    with gradscope.profiling(model, steps=5, warmup=1) as prof:
        for _ in range(3):
            torch.autograd.grad(model(X).sum(), list(model.parameters()))
            prof.step()
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_an_error_in_backward_surfaces() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ArithmeticError("no gradient here")

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Breaks.apply(self.inner(x))
            return out

    with pytest.raises(ArithmeticError, match="no gradient here") as caught:
        profile(Broken())
    assert caught.traceback[-1].name == "backward"


SCRIPT = """
import os, random, sys, torch
assert __name__ == "__main__" and sys.argv[1:] == ["--flag", "3"], (__name__, sys.argv)
import beside
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(40):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
print("never reached" if step == 39 else "stopped")
"""


def test_a_script_leaves_the_process_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``sys.argv``, ``sys.path``, ``__main__`` and the hooks are the caller's again (see the fixture)."""
    from gradscope import pipeline, workload

    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("x = 1\n")
    target = workload.load_target(str(tmp_path / "train.py"), ["--flag", "3"])
    try:
        outcome = pipeline.profile_script(target, Options(steps=2, warmup=1), Progress())
    finally:
        sys.modules.pop("beside", None)
    assert outcome.error is None and outcome.report is not None
    assert "never reached" not in capsys.readouterr().out


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Terminated])
def test_what_was_measured_is_kept_when_reasons_are_not(
    stop: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for reasons runs pieces of the step again: Ctrl-C there costs the findings alone."""
    from gradscope import pipeline, workload

    def stopped(*arguments: Any, **named: Any) -> None:
        raise stop

    monkeypatch.setattr(pipeline, "diagnose", stopped)
    model = nn.Linear(4, 4)
    outcome = pipeline.profile_workload(workload.Workload(model, torch.randn(2, 4)), Options(steps=2, warmup=1))
    assert isinstance(outcome.error, stop) and outcome.report is not None
    data = outcome.report.data
    assert data.partial and not data.findings and data.ledger.backward_ns > 0
    assert any("no findings" in note for note in data.notes)


def test_the_users_error_comes_before_a_stop_while_reasons_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from gradscope import pipeline, workload

    def stopped(*arguments: Any, **named: Any) -> None:
        raise KeyboardInterrupt

    class Failing(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Failing.calls += 1
            if Failing.calls > 5:
                raise ValueError("the user's")
            return super().forward(x)

    monkeypatch.setattr(pipeline, "diagnose", stopped)
    outcome = pipeline.profile_workload(
        workload.Workload(Failing(4, 4), torch.randn(2, 4)), Options(steps=2, warmup=1, memory=False)
    )
    assert isinstance(outcome.error, ValueError) and outcome.report is not None and outcome.report.data.partial


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Terminated])
def test_a_stop_while_reasons_are_looked_for_is_raised_in_a_loop(
    stop: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop's own program decides what a stop means; who asks again has what was measured."""
    from gradscope import pipeline

    def stopped(*arguments: Any, **named: Any) -> None:
        raise stop

    monkeypatch.setattr(pipeline, "diagnose", stopped)
    model = nn.Linear(4, 4)
    with gradscope.profiling(model, steps=1, warmup=1, memory=False) as prof:
        while not prof.step():
            model(torch.randn(2, 4)).sum().backward()
    with pytest.raises(stop):
        _ = prof.report
    assert prof.report.data.partial


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("number", "stop"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Terminated)])
def test_a_stop_while_the_trace_is_read_keeps_what_was_measured(
    number: signal.Signals, stop: type[BaseException], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one waits until the trace is read; the second one does not. Handlers are as they were afterwards."""
    from gradscope import pipeline, workload

    def handler(number: int, frame: Any) -> None:
        raise stop

    read_timed = pipeline.read_timed

    def interrupted(*arguments: Any) -> Any:
        for _ in range(times):
            signal.raise_signal(number)
        return read_timed(*arguments)

    monkeypatch.setattr(pipeline, "read_timed", interrupted)
    job = workload.Workload(nn.Linear(4, 4), torch.randn(2, 4))
    before = signal.signal(number, handler)
    try:
        if times == 2:
            with pytest.raises(stop):
                pipeline.profile_workload(job, Options(steps=2, warmup=1, memory=False))
        else:
            outcome = pipeline.profile_workload(job, Options(steps=2, warmup=1, memory=False))
            assert isinstance(outcome.error, stop) and outcome.report is not None
            data = outcome.report.data
            assert data.partial and not data.findings and data.ledger.backward_ns > 0
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def test_a_stop_that_was_put_off_is_not_lost_where_the_block_fails() -> None:
    from gradscope.process import stops_put_off

    with pytest.raises(KeyboardInterrupt) as caught, stops_put_off():
        signal.raise_signal(signal.SIGINT)
        raise ValueError("while the trace is read")
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
