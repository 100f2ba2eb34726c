"""What a mode of the user's sees, put around all steps or each: its own program's calls, and none of gradscope's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradscope

STEPS = 40


class Functions(TorchFunctionMode):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(getattr(getattr(func, "__self__", None), "__name__", func.__name__)))
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Changing(nn.Module):
    """Another branch in each of many steps: lines are traced in more steps than one."""

    def __init__(self) -> None:
        super().__init__()
        self.branches, self.steps = (
            nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(9)),
            0,
        )

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        out: Tensor = self.branches[self.steps * 5 % 9](x)
        return out


def trained(mode: Callable[[list[str]], AbstractContextManager[Any]], *, each: bool, prof: Any = None) -> Counter[str]:
    torch.manual_seed(0)
    seen: list[str] = []
    model = Changing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nullcontext() if each else mode(seen), prof or nullcontext():
        for _ in range(STEPS):
            with mode(seen) if each else nullcontext():
                model(torch.randn(4, 8)).relu().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if prof is not None:
                prof.step()
    return Counter(seen)


@pytest.mark.parametrize("each", [False, True], ids=["around all", "in each step"])
@pytest.mark.parametrize("mode", [Functions, Operators])
def test_a_mode_sees_the_users_calls_alone(mode: Any, each: bool) -> None:
    alone = trained(mode, each=each)
    prof = gradscope.profiling(steps=2, warmup=1)
    assert trained(mode, each=each, prof=prof) - alone == Counter()
    assert prof._session.capture.traced is not None, "steps were traced once more"
    assert not [note for note in prof.report.data.notes if "Error" in note]
