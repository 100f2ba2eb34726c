"""Findings of models that really run on a GPU, and this GPU's limits. Not yet run on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from gradscope.limits.measure import measure
from gradscope.tables import Finding

from .run_case import case_of, findings_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def _wide() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2048, 2048), nn.GELU(), nn.Linear(2048, 2048)).to("cuda")


def _rules(findings: list[Finding]) -> set[str]:
    return {finding.rule for finding in findings}


@pytest.mark.usefixtures("precision")
def test_products_without_tensor_cores() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("needs a GPU that has TF32")
    batch = torch.randn(4096, 2048, device="cuda")
    torch.set_float32_matmul_precision("highest")
    assert "tf32-off" in _rules(findings_of(_wide(), batch))
    torch.set_float32_matmul_precision("high")
    assert "tf32-off" not in _rules(findings_of(_wide(), batch))


def test_a_loop_that_waits_for_its_loss() -> None:
    model, batch = _wide(), torch.randn(4096, 2048, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses: list[float] = []

    def step(*, reads: bool) -> None:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if reads:
            losses.append(loss.item())

    (found,) = [each for each in findings_of(model, step=lambda: step(reads=True)) if each.rule == "host-sync"]
    assert found.line is not None and "test_on_gpu.py" in found.line
    assert "host-sync" not in _rules(findings_of(model, step=lambda: step(reads=False)))


def test_an_optimizer_that_could_be_fused() -> None:
    batch = torch.randn(64, 2048, device="cuda")
    for fused in (False, True):
        model = _wide()
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused, foreach=False)
        assert ("optimizer-unfused" in _rules(findings_of(model, batch, optimizer=optimizer))) is not fused


def test_many_small_layers_do_not_fill_the_device() -> None:
    small = nn.Sequential(*(nn.Linear(32, 32) for _ in range(100))).to("cuda")
    found = _rules(findings_of(small, torch.randn(8, 32, device="cuda")))
    assert found & {"device-unfilled", "tiny-layers"}
    assert not _rules(findings_of(_wide(), torch.randn(16384, 2048, device="cuda"))) & {
        "device-unfilled",
        "tiny-layers",
    }


def test_limits_of_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large product is bound by computing, an activation by bandwidth, and no layer is much faster than its limit."""
    limits = measure(torch.device("cuda"))
    assert limits.flops["tf32"] > limits.flops["float32"] * 0.9
    monkeypatch.setattr("gradscope.pipeline.kept", lambda *_: limits)
    # Half a gigabyte each: of a tenth of that a cache of 60 MB would still hold what the layer before has written.
    rows = case_of(_wide(), torch.randn(65536, 2048, device="cuda")).layers
    assert [rows[path].bound_by for path in ("0", "1", "2")] == ["compute", "bandwidth", "compute"]
    for row in rows.values():
        if row.backward_limit_ns:  # a tenth: of both measurements
            assert row.backward_limit_ns < row.backward_self_ns * 1.1
