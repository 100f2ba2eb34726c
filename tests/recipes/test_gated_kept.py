"""What gated units, and ReLU's, keep for backward of operands that nobody else keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradscope.recipes.swiglu import geglu


def _kept(made: Callable[[], Tensor]) -> int:
    """The bytes that autograd keeps for backward, of each storage once."""
    found: dict[int, int] = {}
    held = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        held.append(made())
    return sum(found.values())


UNITS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "F.gelu(gate) * up": (lambda gate, up: functional.gelu(gate) * up, 3),
    "geglu": (lambda gate, up: geglu(gate, up, backend="cpu"), 2),
    "F.relu(gate) * up": (lambda gate, up: functional.relu(gate) * up, 2),
    "F.relu(x) ** 2": (lambda x, _: functional.relu(x) ** 2, 1),
    "torch.square": (lambda x, _: torch.square(functional.relu(x)), 1),
    "relu(x) * relu(x)": (lambda x, _: (h := functional.relu(x)) * h, 1),
}


@pytest.mark.parametrize("name", UNITS)
def test_kept_of_operands_that_nobody_else_keeps(name: str) -> None:
    """Why units by ReLU are left: their operands, as products before give them, are as much."""
    function, tensors = UNITS[name]
    x, weight = torch.randn(64, 16), torch.randn(16, 48, requires_grad=True)
    gate, up = x @ weight, x @ weight
    assert _kept(lambda: function(gate, up)) == tensors * gate.nbytes
