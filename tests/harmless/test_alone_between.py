"""Steps that are timed without a profiler, and those behind the last one that is measured, run as they would alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

import gradscope


def put_up(run: Any, model: nn.Module) -> list[str]:
    """What of gradscope's is at work in a step, beside what only waits for an end of it."""
    modules: Any = nn.modules.module
    threads = run.sampler._thread
    found = {
        "function mode": _get_current_function_mode() is not None,
        "dispatch mode": _get_current_dispatch_mode() is not None,
        "tracer": run.line_mode._tracer is not None,
        "module hooks": bool(modules._global_forward_pre_hooks or modules._global_forward_hooks),
        "parameter hooks": any(each._post_accumulate_grad_hooks for each in model.parameters()),  # type: ignore[attr-defined]
        "profiler": run.profiler is not None or torch.autograd.profiler._is_profiler_enabled,
        "pass": run.backward.mark or run.backward.around is not None or run.backward.nested is not None,
        "loaders": run.loaders.counting,
        "sampler": threads is not None and threads.is_alive(),
    }
    return [name for name, on in found.items() if on]


class Model(nn.Module):
    """Takes the weight of a layer that is not called: its parameters mark themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.called, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.called(x) @ self.idle.weight
        return out


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("lines", [True, False])
def test_nothing_is_put_up_where_nothing_is_noted(memory: bool, lines: bool) -> None:
    model, seen = Model(), dict[str, set[str]]()
    with gradscope.profiling(model, steps=2, warmup=3, memory=memory, lines=lines) as prof:
        session: Any = prof._session  # type: ignore[union-attr]
        for _ in range(60):
            phase = "the end" if session.finished else session.phase
            seen.setdefault(phase, set()).update(put_up(session.run, model))
            model(torch.ones(2, 4)).sum().backward()
            prof.step()
            if phase == "the end":
                break
    assert session.capture.survey.recorder.on_root_call is None  # else the run holds itself alive
    assert seen.pop("warm-up") <= {"sampler"}
    assert seen.pop("unprofiled steps") == seen.pop("the end") == set()
    assert {"module hooks", "profiler", "pass", "parameter hooks", "loaders"} <= seen["profiled steps"]
    assert ("function mode" in seen["survey"]) is lines and "profiler" in seen["survey"]
    assert "profiler" not in seen["recording"] and "tracer" in seen["recording"]
    assert ("memory" in seen) is memory


def test_no_mode_is_put_up_over_compiled_code() -> None:
    """It would run as other code than what was timed; nor are classes changed that it was made of.

    Torch warns that hooks fire for a compiled module too: in no phase is that said to the user, who has put up none.
    """
    model, seen = torch.compile(Model(), backend="eager"), set[str]()
    with gradscope.profiling(model, steps=1, warmup=1) as prof:
        session: Any = prof._session  # type: ignore[union-attr]
        while not session.finished:
            seen.update(put_up(session.run, model))
            model(torch.ones(2, 4)).sum().backward()
            prof.step()
    assert "module hooks" in seen and not seen & {"function mode", "dispatch mode", "tracer"}
    assert not session.capture.registry.called_by_hand
