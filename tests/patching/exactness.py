"""Whether a patched model computes what the original does: outputs and every gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan

# A float32 attention of this size differs by a few roundings of sums over a few dozen numbers.
TOLERANCE = 2e-5


def squares(output: Any, batch: Any = None) -> Tensor:
    """A loss whose gradient is not the same everywhere."""
    first = output[0] if isinstance(output, tuple) else output
    return first.float().square().mean()


def call(model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch, as gradscope.profile takes it."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def results(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] = squares) -> dict[str, Tensor]:
    """The output and all gradients, by name."""
    torch.manual_seed(7)
    model.zero_grad(set_to_none=True)
    output = call(model, batch)
    value = loss(output, batch)
    found = {"loss": value.detach(), "output": (output[0] if isinstance(output, tuple) else output).detach()}
    if value.requires_grad:
        value.backward()
        found |= {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return {name: each.clone() for name, each in found.items()}


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest, in shares of the largest gradient or output."""
    assert one.keys() == other.keys()
    worst = 0.0
    top = (
        max(float(each.abs().max()) for name, each in one.items() if name not in {"loss", "output"})
        if len(one) > 2
        else 0
    )
    for name, each in one.items():
        assert (each.dtype, each.shape) == (other[name].dtype, other[name].shape), name
        size = float(each.abs().max()) if name in {"loss", "output"} else top
        worst = max(worst, float((each.double() - other[name].double()).abs().max()) / (size + 1e-12))
    return worst


def patched(model: nn.Module, batch: Any, loss: Any = squares) -> Patches:
    """Attention patched in, where it is supported."""
    patches = Patches(plan(model, batch, loss, recipes=["attention"]))
    patches.apply()
    return patches


def reasons(model: nn.Module, batch: Any, loss: Any = squares) -> list[str]:
    """Why nothing is patched; fails where something is."""
    found = plan(model, batch, loss, recipes=["attention"])
    assert not found.supported
    return [reason for site in found.sites for reason in site.reasons]


def check_exact(
    model: nn.Module,
    batch: Any,
    change: Callable[[nn.Module], None] = lambda model: None,
    later: Any = None,
    *,
    loss: Callable[[Any, Any], Tensor] = squares,
    tolerance: float = TOLERANCE,
) -> Patches:
    """Patch, do ``change`` to the model and to a copy that is not patched, and compare them on ``later``."""
    original = copy.deepcopy(model)
    patches = patched(model, batch, loss)
    assert patches.table.supported.any(), patches.table.reasons.tolist()
    for each in (original, model):
        change(each)
    later = batch if later is None else later
    assert difference(results(original, later, loss), results(model, later, loss)) <= tolerance
    return patches
