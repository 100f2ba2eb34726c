"""Warnings of the user's are shown as often as without gradscope."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import gradscope
from gradscope.process import unheard


class Warner(nn.Module):
    """Warns in forward of its own line and, as torch does, of its caller's; and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.first.register_full_backward_hook(lambda *given: None)  # torch warns: its input needs no gradient

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("of its own line", stacklevel=1)
        out: torch.Tensor = functional.softmax(self.first(x))  # torch warns: no dim is given
        return out


def _shown(run: Callable[[], object]) -> Counter[str]:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        run()
    return Counter(str(each.message).split(".")[0] for each in shown)


def _train(model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).square().sum().backward()


def test_a_warning_is_shown_as_often_as_without_gradscope() -> None:
    torch.optim.SGD(Warner().parameters())  # imports what sets filters, as in any program with an optimizer
    alone = _shown(lambda: _train(Warner(), 12))
    assert len(alone) == 3 and set(alone.values()) == {1}
    model = Warner()

    def profiled() -> None:
        with gradscope.profiling(model, steps=2, warmup=1) as prof:
            for _ in range(40):
                _train(model, 1)
                if prof.step():
                    break
        assert prof.report.data.lines and prof.report.data.memory is not None

    assert _shown(profiled) == alone


def test_what_was_shown_is_not_forgotten() -> None:
    def warn() -> None:
        for text in ("left out for a while", "shown"):
            warnings.warn(text, stacklevel=1)

    def run() -> None:
        with unheard("LEFT out"):
            warn()
        warn()
        with unheard("shown"):
            pass
        warn()

    assert _shown(run) == {"left out for a while": 1, "shown": 1}


@pytest.mark.parametrize(("module", "count"), [(re.escape(__name__), 0), ("another", 1)])
def test_a_module_is_left_out(module: str, count: int) -> None:
    def run() -> None:
        with unheard(module=module):
            warnings.warn("here", stacklevel=1)

    assert _shown(run)["here"] == count


def test_other_filters_of_the_users_stay() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the user's")
        before = list(warnings.filters)
        with unheard("one"):
            warnings.filterwarnings("ignore", "the user's")
        assert warnings.filters[1:] == before
        with unheard("one"):
            warnings.resetwarnings()
        assert warnings.filters == []
