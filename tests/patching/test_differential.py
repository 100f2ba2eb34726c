"""Random attention, written as source: what is patched gives what it gave before, and the rest is refused."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor, nn

from gradscope.patching.plan import Plan, plan
from gradscope.patching.prove.unit import InDouble
from gradscope.patching.swap import swaps
from tests.patching.attention_sources import LONGEST, MUTATIONS, WIDTH, Case, cases

_BATCH, _LENGTH = 2, 7

# Half a dozen roundings to float32 of the largest number in sight: where the truth is 0, the original's own error may
# happen to be nothing.
_FLOOR = 6 * 2.0**-23

_tally: Counter[str] = Counter()
_numbers = count()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("attention")
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    yield made
    sys.dont_write_bytecode = written


def _imported(text: str, folder: Path) -> ModuleType:
    name = f"attention_{next(_numbers)}"
    path = folder / name / f"{name}.py"  # alone: each plan reads what is beside the file
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _batch(case: Case, length: int, batch: int = _BATCH) -> tuple[Tensor, ...]:
    x = torch.randn(batch, length, WIDTH, requires_grad=True)
    if case.mask == "causal":
        return x, torch.tril(torch.ones(length, length))
    if case.mask == "padding":  # the first key is seen, so that no query sees none under minus infinity
        seen = torch.rand(batch, 1, 1, length) > 0.4
        seen[..., 0] = True
        return x, seen
    if case.mask == "additive":
        return x, torch.randn(length, length)
    return (x,)


def _of(output: Any) -> list[Tensor]:
    return [output] if isinstance(output, Tensor) else list(output)


def _run(model: nn.Module, batch: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor | None]:
    """Outputs and gradients."""
    outputs = _of(model(*batch))
    weights = [torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype) for out in outputs]
    loss = sum(((out * weight).sum() for out, weight in zip(outputs, weights, strict=True)), torch.zeros(()))
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*(out.detach() for out in outputs), *grads]


def _truth(model: nn.Module, batch: tuple[Tensor, ...], leaves: list[Tensor]) -> list[Tensor | None]:
    held = [*leaves, *model.buffers(), *batch]
    mode = InDouble(held)
    with mode:
        return _run(model, batch, [mode.double_of(leaf) for leaf in leaves])


def _compare(model: nn.Module, batch: tuple[Tensor, ...], patched: Any) -> None:
    leaves = [*model.parameters(), batch[0]]
    state = dict(vars(model))

    def fresh() -> None:
        for name, value in state.items():
            if isinstance(value, int):
                setattr(model, name, value)

    truth, fresh_ = _truth(model, batch, leaves), fresh()
    original = _run(model, batch, leaves)
    fresh()
    patched.put()
    try:
        new = _run(model, batch, leaves)
    finally:
        patched.take_off()
    del fresh_
    top = max(float(each.abs().max()) for each in truth if each is not None)
    for exact, old, made in zip(truth, original, new, strict=True):
        assert (old is None) == (made is None)
        if exact is None or old is None or made is None:
            continue
        assert made.dtype == old.dtype and made.shape == old.shape
        allowed = 2 * float((old - exact).abs().max()) + _FLOOR * top
        error = float((made - exact).abs().max())
        assert math.isnan(allowed) or error <= allowed, (error, allowed)


def _planned(model: nn.Module, batch: tuple[Tensor, ...]) -> Plan:
    return plan(
        model, batch, lambda output, _: sum(each.square().mean() for each in _of(output)), recipes=["attention"]
    )


@settings(
    max_examples=500,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(case=cases())
def _check(folder: Path, case: Case) -> None:
    torch.manual_seed(0)
    model = _imported(case.text, folder).Attention()
    found = _planned(model, _batch(case, _LENGTH))
    group = "changed" if case.mutation else "plain"
    _tally[f"{group}, {'patched' if found.supported else 'refused'}"] += 1
    if not found.supported:
        for site in found.sites:
            _tally[f"{group}: {'; '.join(site.reasons)}"] += 1
        _tally[f"{group}: nothing found"] += not found.sites
        return
    (swap,) = swaps(found.supported, found.files)
    before = dict(vars(model))
    for length in (_LENGTH, LONGEST, 1):
        _compare(model, _batch(case, length), swap)
    model.eval()
    model.causal = False
    _compare(model, _batch(case, 5, batch=1), swap)
    model.train()
    model.tril[3, 5] = 1.0 - model.tril[3, 5]
    _compare(model, _batch(case, 9), swap)
    model.causal = True
    assert set(vars(model)) - {"seen", "largest"} == set(before) - {"seen", "largest"}


def test_patched_equals_original_or_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]):
    _tally.clear()
    _check(folder)
    plain = _tally["plain, patched"] + _tally["plain, refused"]
    with capsys.disabled():
        shown = {name: _tally[name] for name in sorted(_tally) if ":" not in name}
        print(f"\nattention as source: {shown}")
    assert plain + _tally["changed, patched"] + _tally["changed, refused"] >= 500
    assert _tally["plain, patched"] >= 0.6 * plain


def test_every_mutation_is_a_known_place():
    assert {where for where, _ in MUTATIONS.values()} == {"softmax", "softmax_block", "mask", "dropout", "end"}
