"""Predicted savings: both ways of a match run alone, and make what was recorded."""

from __future__ import annotations

import gc
import importlib
import pkgutil
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.patching.prove import predict
from gradscope.patching.prove.predict import Saving, kept_bytes
from tests.patching import corpus, small

BATCH = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(5))


@pytest.fixture(name="runs")
def runs_fixture(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """No clock; both ways are run once, and counted."""
    runs: list[torch.device] = []

    def peaks_bytes(works: Any, device: torch.device) -> list[int]:
        for work in works:
            work()
        runs.append(device)
        return [5_000, 2_000]

    monkeypatch.setattr(predict, "peaks_bytes", peaks_bytes)
    monkeypatch.setattr(predict.Replay, "times_ns", lambda *args: (5_000, 3_000))
    return runs


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(small.Causal() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_the_same_work_is_run_once(runs: list[torch.device]) -> None:
    random = torch.get_rng_state()
    model = Layers()
    after_model = torch.get_rng_state()
    table = gradscope.plan(model, BATCH, recipes=["attention"]).table
    assert len(runs) == 1
    assert list(table["predicted_saving_ns"]) == [2_000] * 3
    assert list(table["predicted_saving_bytes"]) == [3_000] * 3
    assert torch.equal(after_model, torch.get_rng_state()) and random is not None
    assert all(parameter.grad is None for parameter in model.parameters())


class Rounds(small.Causal):
    """Its attention runs twice in one forward."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        for _ in range(2):
            q = ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1) @ v
        return q.squeeze(1)


def test_a_site_in_a_loop_saves_in_every_round(runs: list[torch.device]) -> None:
    found = gradscope.plan(Rounds(), BATCH, recipes=["attention"])
    assert [site.reasons for site in found.sites] == [[]]
    (saving,) = found.savings.values()
    assert saving.kept_bytes is not None and saving.kept_bytes > 0 and saving.kept_bytes % 2 == 0
    # Each round saves less for backward; what lives on its way does so in one of them at a time.
    assert saving == Saving(4_000, 3_000 + saving.kept_bytes // 2, 10_000, saving.kept_bytes)


def test_what_cannot_be_run_alone_is_predicted_by_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> list[int]:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(predict, "peaks_bytes", fails)
    found = gradscope.plan(small.Causal().eval(), BATCH, recipes=["attention"])
    (site,) = found.supported
    # Scores, their product with the scale, the masked ones and the weights; in evaluation dropout makes nothing.
    assert kept_bytes(site.matches[0]) == found.savings[site].bytes == 4 * (2 * 4 * 12 * 12) * 4
    assert found.savings[site].ns is None


def entries() -> list[Any]:
    """Of each recipe the first two models of the corpus; all of them take two minutes."""
    names = [name for _, name, _ in pkgutil.iter_modules(corpus.__path__) if name != "entry" and "base" not in name]
    modules = [importlib.import_module(f"tests.patching.corpus.{name}") for name in names]
    found: dict[str, list[Any]] = {}
    for module in modules:
        for entry in (each for each in getattr(module, "ENTRIES", ()) if not each.refused):
            for recipe in {recipe for _, recipe in entry.sites}:
                found.setdefault(recipe, []).append(entry)
    chosen = {entry.name: entry for recipe in sorted(found) for entry in found[recipe][:2]}
    return [pytest.param(entry, id=name) for name, entry in chosen.items()]


@pytest.mark.parametrize("entry", entries())
def test_a_match_runs_alone(entry: Any, runs: list[torch.device]) -> None:
    torch.manual_seed(0)
    model, batch = entry.build()
    model.train(entry.train)
    found = gradscope.plan(model, batch, entry.loss)
    assert found.savings and all(
        replace(saving, kept_bytes=None) == Saving(2_000, 3_000, 5_000) for saving in found.savings.values()
    )
    assert runs


class Dropped(nn.Module):
    """Attention by hand that drops weights."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x * number for number in (1.0, 2.0, 3.0))
        return torch.as_tensor(self.drop(torch.softmax(q @ k.transpose(-2, -1), dim=-1)) @ v)


def test_a_model_that_is_in_evaluation_since_is_run_as_it_was_recorded() -> None:
    """A script tests its model at its end, and what recipes save is measured after that."""
    model, x = Dropped(), torch.randn(2, 3, 48, 16, requires_grad=True)
    (site,) = gradscope.plan(model, x, recipes=["attention"]).sites
    replay = predict.Replay(site.matches[0])
    trained = replay._called()[0]
    model.eval()
    torch.manual_seed(0)
    first = replay._called()[0]
    second = replay._called()[0]
    assert not torch.equal(first, second) and first.shape == trained.shape  # other weights were dropped


def test_what_was_run_is_not_kept() -> None:
    """A peak measured later in this process would have it in."""
    gc.collect()
    before = {id(each) for each in gc.get_objects() if type(each) is Tensor}
    plan = gradscope.plan(small.Causal(), BATCH, recipes=["attention"])
    (saving,) = plan.savings.values()
    assert saving.kept_bytes is not None and saving.kept_bytes > 0
    del plan, saving
    gc.collect()
    after = [each for each in gc.get_objects() if type(each) is Tensor and id(each) not in before]
    assert [tuple(each.shape) for each in after] == []
