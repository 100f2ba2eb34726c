"""Lines of operations that an installed library writes another way: its caller's. Counts, no clock."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor, nn, ones

import gradscope

_CODE = "def rearrange(x):\n    return doubled(x)\n\n\ndef doubled(x):\n    return x * 2\n"


class Net(nn.Module):
    def __init__(self, rearrange: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.rearrange = nn.Linear(4, 4), rearrange

    def forward(self, x: Tensor) -> Tensor:
        x = self.rearrange(x)
        return self.linear(x)


@pytest.mark.parametrize(
    ("file", "is_callers"),
    [
        ("venv/lib/site-packages/einops/einops.py", True),
        ("venv/lib/site-packages/einops_exts/more.py", False),
        ("work/einops/einops.py", False),  # whose author profiles it
    ],
)
def test_what_a_notation_computes_is_at_the_line_that_uses_it(file: str, is_callers: bool, tmp_path: Path) -> None:
    path = str(tmp_path / file)
    made: dict[str, Callable[[Tensor], Tensor]] = {}
    exec(compile(_CODE, path, "exec"), made)
    x = ones(2, 4, requires_grad=True)
    data = gradscope.profile(Net(made["rearrange"]), x, steps=2, warmup=1, memory=False).data
    lines = {(Path(row.file).name, row.line) for row in data.lines if row.backward_ns}
    own, first = Path(__file__).name, inspect.getsourcelines(Net.forward)[1]
    inside, call, linear = (Path(file).name, 6), (own, first + 1), (own, first + 2)
    assert lines == {call if is_callers else inside, linear}
