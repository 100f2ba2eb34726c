"""Steps of the corpus before and after a replacement, for the tests of matchers."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.patching.patches import Patches
from gradscope.patching.plan import Plan, plan
from gradscope.patching.swap import in_file
from gradscope.workload import Workload, call_model, scalar_loss
from tests.patching.corpus.entry import Entry

_RATES = ("p", "dropout", "attention_dropout", "dropout_p", "attn_dropout", "resid_dropout")


def built(entry: Entry, *, dropout: bool = False) -> tuple[nn.Module, Any]:
    """The entry's model, its dropout set to 0 unless asked for, and its batch."""
    torch.manual_seed(0)
    model, batch = entry.build()
    for module in model.modules() if not dropout else ():
        for name in _RATES:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train(entry.train), batch


def planned(entry: Entry, model: nn.Module, batch: Any, recipes: Iterable[str]) -> Plan:
    """The plan for these recipes."""
    return plan(Workload(model, batch, loss=entry.loss), recipes=recipes)


def supported(found: Plan) -> list[tuple[str, str]]:
    """Where, and by what."""
    return sorted((site.path, site.recipe) for site in found.supported)


def step(entry: Entry, model: nn.Module, batch: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and loss; gradients of parameters and inputs."""
    model.zero_grad()
    torch.manual_seed(1)
    output = call_model(model, batch)
    loss, _ = scalar_loss(output, batch, entry.loss)
    inputs = [each for each in _tensors(batch) if each.requires_grad]
    for each in inputs:
        each.grad = None
    loss.backward()
    leaves = [*model.parameters(), *inputs]
    gradients = [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]
    return [each.detach().clone() for each in (*_tensors(output), loss)], gradients


def assert_exact(entry: Entry, model: nn.Module, batch: Any, found: Plan, tolerance: float) -> None:
    """The replaced step gives what the original does; put back, it is the original bit for bit.

    ``tolerance`` is of the largest value among all outputs, or all gradients: one may be zero but for rounding.
    """
    for each in _tensors(batch):
        if each.is_floating_point():
            each.requires_grad_()
    state = copy.deepcopy(model.state_dict())
    before = step(entry, model, batch)
    patches = Patches(found)
    patches.apply()
    after = step(entry, model, batch)
    patches.revert()
    again = step(entry, model, batch)
    for old, new, restored in zip(before, after, again, strict=True):
        assert len(old) == len(new)
        largest = max((float(each.abs().max()) for each in old), default=0.0)
        for one, other, third in zip(old, new, restored, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(other, one, rtol=0.0, atol=largest * tolerance, equal_nan=False)
            assert torch.equal(one, third)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(
        isinstance(value, type(patches.revert)) for module in model.modules() for value in vars(module).values()
    )


def before_and_after(model: nn.Module, found: Plan, batch: Any, *, autocast: bool) -> list[Tensor]:
    """What a spelled model's ``out`` is given by the old code and by the new, in the dtype that it comes in."""
    results: list[Tensor] = []

    def keep(_: object, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        results.append(given[0])
        return (given[0].float(),)

    model.get_submodule("out").register_forward_pre_hook(keep)
    patches = Patches(found)
    for patched in (False, True):
        if patched:
            patches.apply()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(batch)
    patches.revert()
    return results


def changed_lines(entry: Entry, recipes: Iterable[str]) -> list[str]:
    """The lines of the new source that the old has not, without their indentation."""
    model, batch = built(entry, dropout=True)
    found = planned(entry, model, batch, recipes)
    edits = {site.edit.key: site.edit for site in found.supported if site.edit is not None}
    files = {site.edit.source.file for site in found.supported if site.edit is not None}
    (file,) = files
    old = set(file.text.decode().splitlines())
    return [line.strip() for line in in_file(file, edits.values()).splitlines() if line.strip() and line not in old]


def named(entries: Iterable[Entry], name: str) -> Entry:
    """The entry of that name."""
    return next(entry for entry in entries if entry.name == name)


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _tensors(part)
    elif isinstance(result, dict):
        yield from _tensors(list(result.values()))
