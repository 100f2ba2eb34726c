"""Programs under torch.compile that gradscope might disturb: python harm.py alone|measured PROGRAM...

Each prints its losses, what was compiled from its fourth step on, and what it finds changed at its end.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.utils import get_compilation_metrics, set_compilation_metrics_limit
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import gradscope

STEPS, SETTLED = 14, 3
SURVEYED = 8  # a step that is traced
torch.set_num_threads(1)
set_compilation_metrics_limit(1_000_000)  # else the oldest are dropped, and what is compiled counts as nothing
# What is asked here is Dynamo's and AOTAutograd's: generating code would take minutes.
compiled = partial(torch.compile, backend="aot_eager")


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def whole_step(model: nn.Module) -> Callable[[int], Tensor]:
    """Both passes and the update, and a second loss behind the break that backward is."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    x = torch.randn(8, 16)

    def part(scale: float) -> Tensor:
        loss: Tensor = model(x).square().mean() * scale
        return loss

    @compiled
    def train() -> Tensor:
        part(1.0).backward()
        second = part(2.0)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        return second

    def step(number: int) -> Tensor:
        with torch.compiler.set_stance("fail_on_recompile" if number >= SETTLED else "default"):
            return train()

    return step


def function_behind_a_break(model: nn.Module) -> Callable[[int], Tensor]:
    """In a frame that Dynamo leaves as it is, for a break in a loop."""
    x = torch.randn(8, 16)

    @compiled
    def loss_of(x: Tensor) -> Tensor:
        for _ in range(2):
            x = model(x)
            torch._dynamo.graph_break()
            try:
                x = Double.apply(x)
            finally:
                pass
        return x.square().mean()

    return lambda _: backward(loss_of(x))


def default_device(model: nn.Module) -> Callable[[int], Tensor]:
    """Set in compiled code, and taken back outside."""
    x, ones = torch.randn(8, 16), torch.ones(1, 8)

    @compiled
    def loss_of() -> Tensor:
        torch.set_default_device("cpu")
        loss: Tensor = (ones @ model(x)).sum() * torch.ones(1)
        return loss

    def step(_: int) -> Tensor:
        loss = backward(loss_of())
        torch.set_default_device(None)
        return loss

    return step


def new_sizes(model: nn.Module) -> Callable[[int], Tensor]:
    """Another in every step, each compiled by itself, also in the steps that are traced."""
    torch._dynamo.config.recompile_limit = 100
    run_model = compiled(model, dynamic=False)
    return lambda number: backward(torch.ones(1, 3 + number) @ run_model(torch.ones(3 + number, 16)))


def reset(model: nn.Module) -> Callable[[int], Tensor]:
    """Forgotten in every step, with the callbacks that tell of compilations."""
    run_model = compiled(model)
    x = torch.randn(8, 16)

    def step(_: int) -> Tensor:
        torch._dynamo.reset()
        return backward(run_model(x))

    return step


def exported(model: nn.Module) -> Callable[[int], Tensor]:
    run_model = compiled(model)
    x = torch.randn(8, 16)

    def step(_: int) -> Tensor:
        torch.export.export(model, (x,))
        return backward(run_model(x))

    return step


def nested(model: nn.Module) -> Callable[[int], Tensor]:
    """A compiled function calls one that is left alone, which calls a compiled one; and one that raises."""
    x = torch.randn(8, 16)

    @compiled
    def inner(x: Tensor) -> Tensor:
        return x.sin() * 3

    @torch.compiler.disable
    def alone(x: Tensor) -> Tensor:
        return inner(x) + model(x)

    @compiled
    def outer(x: Tensor) -> Tensor:
        return alone(x.cos()) * 2

    @compiled
    def raising(x: Tensor) -> Tensor:
        raise ValueError(x.sum())

    def step(_: int) -> Tensor:
        with suppress(ValueError):
            raising(x)
        return backward(outer(x))

    return step


def device_around(model: nn.Module) -> Callable[[int], Tensor]:
    """A block of the user's with another device, around a compiled call."""
    x = torch.randn(8, 16)

    @compiled
    def twice(x: Tensor) -> Tensor:
        return x * 2

    def step(_: int) -> Tensor:
        with torch.device("meta"):
            y = twice(x)
        assert torch.empty(1).device.type == "cpu" and not y.is_meta
        return backward(model(y))

    return step


def stance_inside(model: nn.Module) -> Callable[[int], Tensor]:
    """Changed by a function that was entered under another."""
    x = torch.randn(8, 16)
    run_model = compiled(model)

    @compiled
    def sets(number: int) -> None:
        if number == 1:
            torch.compiler.set_stance("default")

    def step(number: int) -> Tensor:
        if number == 0:
            torch.compiler.set_stance("force_eager")
        sets(number)
        return backward(run_model(x))

    return step


def ahead_of_time(model: nn.Module) -> Callable[[int], Tensor]:
    """It looks at its guards without any of torch.compile's wrappers."""
    x = torch.randn(8, 16)

    def scaled(x: Tensor) -> Tensor:
        return x.sin() * 3

    made: Any = torch.compile(scaled, fullgraph=True)
    if not hasattr(made, "aot_compile"):
        return lambda _: backward(model(x))
    call = made.aot_compile(((x,), {}))
    return lambda _: backward(model(call(x)))


def ended_elsewhere(model: nn.Module) -> Callable[[int], Tensor]:
    """Another thread ends the measurement, in a step that is traced: see main."""
    return steadily(model)


class OwnCall(nn.Linear):
    """As Hugging Face's checkpointed layers have it: Dynamo traces to torch's call, which asks for hooks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def own_call(model: nn.Module) -> Callable[[int], Tensor]:
    run_model = compiled(nn.Sequential(OwnCall(16, 16), model, OwnCall(16, 16)))
    x = torch.randn(8, 16)
    return lambda _: backward(run_model(x))


def own_hook(model: nn.Module) -> Callable[[int], Tensor]:
    """A module that is compiled has a hook, so that Dynamo traces through torch's call."""
    model[1].register_forward_hook(lambda _, __, output: output * 1.01)  # type: ignore[index]
    return steadily(model)


def late_hook(model: nn.Module) -> Callable[[int], Tensor]:
    """What has a hook, on all modules too, is compiled for another size in the middle of a phase, as one graph."""
    model[1].register_forward_hook(lambda _, __, output: output * 1.01)  # type: ignore[index]
    handle = register_module_forward_hook(lambda *_: None)
    run_model = torch.compile(model.forward, backend="aot_eager", fullgraph=True)

    def call(number: int) -> Tensor:
        loss = backward(run_model(torch.ones(8 + number % 2 if number < SURVEYED else 6, 16)))
        if number == STEPS - 1:
            handle.remove()
        return loss

    return call


def disabled_at_times(model: nn.Module) -> Callable[[int], Tensor]:
    """Nothing new is compiled in some steps; what is compiled runs on."""
    model[1].register_forward_hook(lambda _, __, output: output * 1.01)  # type: ignore[index]
    step = steadily(model)

    def call(number: int) -> Tensor:
        with torch._dynamo.config.patch(disable=number > SETTLED and number % 3 == 0):
            return step(number)

    return call


def global_hook(model: nn.Module) -> Callable[[int], Tensor]:
    """The program has a hook on all modules."""
    handle = register_module_forward_pre_hook(lambda *_: None)
    step = steadily(model)

    def call(number: int) -> Tensor:
        if number == STEPS - 1:
            handle.remove()
            return backward(model(torch.ones(8, 16)))
        return step(number)

    return call


def steadily(model: nn.Module) -> Callable[[int], Tensor]:
    run_model, x = compiled(model), torch.randn(8, 16)

    def step(number: int) -> Tensor:
        with torch.compiler.set_stance("fail_on_recompile" if number >= SETTLED else "default"):
            return backward(run_model(x))

    return step


def backward(result: Tensor) -> Tensor:
    loss = result.square().mean()
    loss.backward()
    return loss


PROGRAMS = {
    each.__name__: each
    for each in (
        whole_step,
        function_behind_a_break,
        default_device,
        new_sizes,
        reset,
        exported,
        nested,
        device_around,
        stance_inside,
        ahead_of_time,
        ended_elsewhere,
        own_call,
        own_hook,
        late_hook,
        disabled_at_times,
        global_hook,
    )
}


def run(name: str, step_ended: Callable[[], object], model: nn.Module, report: list[str]) -> None:
    torch.compile(torch.sin)(torch.ones(2))  # gradscope traces where it has seen a graph of Inductor's
    step = PROGRAMS[name](model)
    for number in range(STEPS):
        before = len(get_compilation_metrics())
        loss = step(number)
        if number >= SETTLED:
            # Backward too where no cache is used, which is none of its frames.
            frames = [each.co_name for each in get_compilation_metrics()[before:] if each.co_name]
            report += [f"{number} compiled {name}" for name in frames]
        assert get_eval_frame_callback() is None, "Dynamo looks at what is not compiled"
        report.append(f"{number} loss {loss.item()!r}")
        step_ended()


def ended(name: str, prof: Any) -> None:
    """A step has."""
    prof.step()
    if name == "ended_elsewhere" and prof._session.capture.steps_done == SURVEYED:
        thread = threading.Thread(target=prof._session.close)
        thread.start()
        thread.join()


def main() -> None:
    measured = sys.argv[1] == "measured"
    for name in sys.argv[2:]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        report: list[str] = []
        if measured:
            with gradscope.profiling(model, steps=2, warmup=1) as prof:
                run(name, partial(ended, name, prof), model, report)
            assert prof.report is not None and (name == "ended_elsewhere" or not prof.report.data.partial)
        else:
            run(name, lambda: None, model, report)
        left = [type(each).__name__ for each in _get_current_function_mode_stack() + _get_current_dispatch_mode_stack()]
        print("\n".join(f"{name}: {line}" for line in [*report, f"left {left}"]))


if __name__ == "__main__":
    main()
