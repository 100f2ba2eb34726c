"""The corpus of attention and of whole transformers: every entry builds, runs and trains."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.patching.corpus as corpus
from tests.patching.corpus.entry import Entry

_MODULES = sorted(
    module.name
    for module in pkgutil.iter_modules(corpus.__path__)
    if module.name.startswith(("attention_", "transformers_"))
)
_ENTRIES: list[Entry] = [
    entry for name in _MODULES for entry in importlib.import_module(f"{corpus.__name__}.{name}").ENTRIES
]


def _call(model: torch.nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def _loss(entry: Entry, output: Any, batch: Any) -> Tensor:
    if entry.loss is not None:
        return entry.loss(output, batch)
    if isinstance(output, tuple):
        (found,) = (one for one in output if isinstance(one, Tensor) and one.dim() == 0)
        return found
    return output if output.dim() == 0 else output.mean()


def test_names_are_unique():
    names = [entry.name for entry in _ENTRIES]
    assert len(set(names)) == len(names)


def test_there_are_enough():
    found = [entry for entry in _ENTRIES if entry.sites and not entry.refused]
    assert len(found) >= 60
    assert sum(1 for entry in found if {recipe for _, recipe in entry.sites} <= {"attention", "packed_attention"}) >= 50


@pytest.mark.parametrize("entry", _ENTRIES, ids=lambda entry: entry.name)
def test_trains(entry: Entry):
    torch.manual_seed(0)
    model, batch = entry.build()
    model.train(entry.train)
    loss = _loss(entry, _call(model, batch), batch)
    loss.backward()
    assert torch.isfinite(loss)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("entry", _ENTRIES, ids=lambda entry: entry.name)
def test_sites_are_modules_of_the_model(entry: Entry):
    torch.manual_seed(0)
    model, _ = entry.build()
    for path, _ in entry.sites:
        model.get_submodule(path)


@pytest.mark.parametrize("entry", _ENTRIES, ids=lambda entry: entry.name)
def test_builds_the_same_again(entry: Entry):
    torch.manual_seed(0)
    first, _ = entry.build()
    torch.manual_seed(0)
    second, _ = entry.build()
    pairs = zip(first.named_parameters(), second.named_parameters(), strict=True)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in pairs)
