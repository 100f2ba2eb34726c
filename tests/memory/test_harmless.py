"""Measuring memory keeps nothing alive, changes no number, and is not in the way of what the user's code does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope import compat
from gradscope.capture.storages import StorageReader
from gradscope.tables import LayerRow

from .measuring import memory_of, summed

ROWS, WIDTH = 8, 16
STEPS = 10  # of a run with steps=1, warmup=1: 1 warm-up, 1 unprofiled, 2 profiled, 2 unprofiled, 1 survey, 3 for memory
MEMORY_COLUMNS = {"saved_bytes", "saved_total_bytes", "peak_bytes", "copied_bytes"}
X = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)


class Watch(TorchDispatchMode):
    """Weak references to the storage of everything that an op gave, and how many bytes were alive after each op."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.levels: list[tuple[str, int]] = []

    def alive(self) -> int:
        """Bytes of the storages that are alive."""
        self.storages = {key: entry for key, entry in self.storages.items() if not entry[0].expired()}
        return sum(size for _, size in self.storages.values())

    def forget(self, tensors: Any) -> None:
        """Leave out what the user has by right."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self.storages.pop(tensor.untyped_storage()._cdata, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                known = self.storages.get(storage._cdata)
                if known is None or known[0].expired():
                    self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                del storage
        self.levels.append((str(func), self.alive()))
        return result


@dataclass
class Orders:
    """Outside of the module, whose attributes are put back after a run."""

    calls: int = 0
    blocks: int = 0  # of the checkpoint, in this call
    fails: tuple[str, int] = ("", 0)  # where, and in which call


class Model(nn.Module):
    """Dropout, a norm, in-place ReLU, a checkpoint, a hook, and an error to order."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(0.5)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.tail = nn.Linear(WIDTH, 4)
        self.orders = Orders()

    def forward(self, x: Tensor) -> Tensor:
        self.orders.calls += 1
        self.orders.blocks = 0
        x = self.drop(self.norm(self.stem(x))).relu_()
        x.register_hook(self.on_gradient)
        x = x + checkpoint(self.inside, x, use_reentrant=False)
        self.fail_in("forward")
        out: Tensor = self.tail(x)
        return out

    def inside(self, x: Tensor) -> Tensor:
        self.orders.blocks += 1
        if self.orders.blocks == 2:
            self.fail_in("recompute")
        out: Tensor = self.block(x).sigmoid()
        return out

    def on_gradient(self, gradient: Tensor) -> Tensor:
        self.fail_in("backward")
        return gradient.sgn()

    def fail_in(self, where: str) -> None:
        if self.orders.fails == (where, self.orders.calls):
            raise ArithmeticError(where)


def model_and_optimizer() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def profile(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return gradscope.profile(model, X, summed, optimizer, steps=1, warmup=1, device="cpu", **options)


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def mine(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Every tensor that is the user's."""
    state = [list(entry.values()) for entry in optimizer.state.values()]
    return [X, *model.parameters(), *model.buffers(), state, [parameter.grad for parameter in model.parameters()]]


# --------------------------------------------------------------------------------------------------------------------
# Nothing is kept alive
# --------------------------------------------------------------------------------------------------------------------


def test_every_tensor_dies_when_it_would_have() -> None:
    """In each step of a run, those of the memory pass included, the same bytes are alive after the same ops."""
    model, optimizer = model_and_optimizer()

    def step(watch: Watch) -> list[tuple[str, int]]:
        watch.levels.clear()
        with watch:
            optimizer.zero_grad()
            model(X).sum().backward()
            optimizer.step()
        return list(watch.levels)

    watch = Watch()
    plain = [step(watch) for _ in range(3)][-1]
    levels = []
    with gradscope.profiling(model, steps=1, warmup=1) as prof:
        while not (levels.append(step(watch)) or prof.step()):
            pass
    assert len(levels) == STEPS and len(plain) > 50
    assert [index for index, found in enumerate(levels) if found != plain] == []
    assert memory_of(prof.report.data).retained == ()


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "no memory"])
def test_nothing_of_a_run_outlives_it(memory: bool) -> None:
    """No collection is needed for it: outputs, saved tensors, gradients and gradscope's own copies are all dead."""
    # The first optimizer of a process imports torch._dynamo, which keeps the frames that imported it, and so the model
    # in them, until the next collection: without gradscope too.
    model_and_optimizer()
    model, optimizer = model_and_optimizer()
    profile(model, optimizer)  # what loads once, loads now
    watch, name = Watch(), weakref.ref(model)
    with watch:
        report = profile(model, optimizer, memory=memory)
    watch.forget(mine(model, optimizer))
    assert len(watch.levels) > 500
    assert watch.alive() == 0
    del model, optimizer
    assert name() is None, "the model is kept alive"
    assert report.data.layers


@pytest.mark.parametrize("at", [STEPS - 1, STEPS], ids=["the settling step", "the measured step"])
@pytest.mark.parametrize("where", ["forward", "recompute", "backward"])
def test_nothing_outlives_a_run_that_fails_in(where: str, at: int) -> None:
    model, optimizer = model_and_optimizer()
    model.orders.fails = where, at
    before = copy_of(model)
    watch = Watch()
    with watch, pytest.raises(ArithmeticError, match=where) as caught:
        profile(model, optimizer)
    assert model.orders.calls == at
    del caught
    gc.collect()  # an exception and the frames of its traceback refer to each other
    watch.forget(mine(model, optimizer))
    assert watch.alive() == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    name = weakref.ref(model)
    del model, optimizer
    assert name() is None, "the model is kept alive"


# --------------------------------------------------------------------------------------------------------------------
# Nothing is changed
# --------------------------------------------------------------------------------------------------------------------


def trained(memory: bool | None) -> tuple[list[float], dict[str, Tensor], Tensor]:
    """Losses, parameters and random state after a loop of STEPS steps; measured unless ``memory`` is None."""
    model, optimizer = model_and_optimizer()
    losses: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    if memory is None:
        for _ in range(STEPS):
            step()
    else:
        with gradscope.profiling(model, steps=1, warmup=1, memory=memory) as prof:
            for _ in range(STEPS):
                step()
                prof.step()
        assert (prof.report.data.memory is not None) == memory
    return losses, copy_of(model), torch.get_rng_state()


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "no memory"])
def test_numbers_are_bit_identical(memory: bool) -> None:
    losses, state, random = trained(None)
    again, state_again, random_again = trained(memory)
    assert losses == again
    assert all(torch.equal(state[name], state_again[name]) for name in state)
    assert torch.equal(random, random_again)


def test_hooks_on_saved_tensors_fire_as_ever() -> None:
    """As often, in the same order, with the same tensors, in every step alike; none is unpacked by gradscope."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, 4))
    fired: list[tuple[str, tuple[int, ...], float]] = []

    def note(what: str) -> Callable[[Tensor], Tensor]:
        def hook(tensor: Tensor) -> Tensor:
            fired.append((what, tuple(tensor.shape), tensor.sum().item()))
            return tensor

        return hook

    def step() -> list[tuple[str, tuple[int, ...], float]]:
        fired.clear()
        inner.zero_grad()
        with saved_tensors_hooks(note("pack"), note("unpack")):
            loss = inner(X).square().mean()
        loss.backward()
        return list(fired)

    plain = step()
    # Two Linears keep input and (the second) weight, the sigmoid its output, the square its input.
    assert [what for what, _, _ in plain].count("pack") == [what for what, _, _ in plain].count("unpack") == 5
    steps = []
    with gradscope.profiling(inner, steps=1, warmup=1) as prof:
        while not (steps.append(step()) or prof.step()):
            pass
    assert len(steps) == STEPS and all(found == plain for found in steps)
    assert memory_of(prof.report.data).saved_bytes > 0


class Transformed(nn.Module):
    """Uses torch.func inside of forward: a gradient of each row, and a product with a Jacobian."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def energy(row: Tensor) -> Tensor:
            return torch.sin(self.inner(row)).square().sum()

        forces = torch.func.vmap(torch.func.grad(energy))(x)
        _, pull = torch.func.vjp(torch.tanh, x)
        out: Tensor = forces + pull(forces)[0]
        return out


def test_function_transforms_work_while_memory_is_measured() -> None:
    torch.manual_seed(0)
    model = Transformed()
    plain = model(X)
    (expected,) = torch.autograd.grad(plain.square().sum(), model.inner.weight)
    seen: list[tuple[Tensor, Tensor]] = []

    def step() -> None:
        out = model(X)
        (found,) = torch.autograd.grad(out.square().sum(), model.inner.weight)
        seen.append((out.detach(), found))

    with gradscope.profiling(model, steps=1, warmup=1) as prof:
        while not (step() or prof.step()):
            pass
    assert len(seen) == STEPS
    assert all(torch.equal(out, plain) and torch.equal(grad, expected) for out, grad in seen)
    memory = memory_of(prof.report.data)
    assert memory.peak_bytes > 0 and memory.saved_bytes > 0


# --------------------------------------------------------------------------------------------------------------------
# Without memory
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def profilers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of every profiler that gradscope starts: torch's own stands on this class too."""
    compat.check()
    made: list[dict[str, Any]] = []
    real = torch.autograd.profiler.profile

    def profile(**settings: Any) -> Any:
        made.append(settings)
        return real(**settings)

    monkeypatch.setattr(torch.autograd.profiler, "profile", profile)
    return made


def test_without_memory_no_step_and_no_profiler_is_spent_on_it(profilers: list[dict[str, Any]]) -> None:
    model, optimizer = model_and_optimizer()
    data = profile(model, optimizer, memory=False).data
    assert model.orders.calls == STEPS - 2  # one to settle, one that counts
    assert [settings.get("profile_memory", False) for settings in profilers] == [False, False]
    assert data.memory is None and not data.partial
    columns = [name for name in vars(LayerRow) if "allocat" in name or name in MEMORY_COLUMNS]
    assert len(columns) == 10
    assert all(getattr(row, name) is None for row in data.layers for name in columns)
    names = ("saved_bytes", "allocated_bytes", "copied_bytes")
    assert data.lines and all(getattr(row, name) is None for row in data.lines for name in names)


def test_memory_takes_two_more_steps_and_a_profiler_of_its_own(profilers: list[dict[str, Any]]) -> None:
    """The timed steps and the survey do not record memory; the memory pass records no shapes, which keep tensors."""
    model, optimizer = model_and_optimizer()
    data = profile(model, optimizer).data
    assert model.orders.calls == STEPS
    assert [settings.get("profile_memory", False) for settings in profilers] == [False, False, True]
    assert not profilers[-1].get("record_shapes", False)
    assert data.memory is not None and not data.partial
    assert data.workload.steps == 1


def test_fake_tensors_of_somebody_else_are_left_alone() -> None:
    """What torch.compile left in its caches has no memory; to ask for its address is a warning, here an error."""
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(1024)
    assert StorageReader().storages(fake) == []
    assert gradscope.profile(nn.Linear(8, 8), torch.ones(4, 8), steps=1, warmup=0).data.memory is not None
