"""A graph as deep as a loop over 100,000 small operations makes it is measured, and freed as it would be alone."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading

import pytest
import torch
from torch import nn

import gradscope
from gradscope.capture import graphs


class Two(nn.Module):
    """Two layers of many operations each; the value between them has two users."""

    def __init__(self, operations: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.operations = operations

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for _ in range(self.operations):
            h = h * 0.999
        return (self.second(h) + h).sum()


def test_walks_no_further_than_it_is_told() -> None:
    out = Two(20)(torch.ones(2, 4))
    nodes, whole = graphs.walked([out.grad_fn])
    assert whole
    assert len(nodes) == 20 + 2 + 2 * (1 + 3)  # sum, add, and of each layer addmm, t and two AccumulateGrads
    some, whole = graphs.walked([out.grad_fn], most=7)
    assert not whole
    assert some == nodes[:7]
    assert graphs.walked([out.grad_fn], most=len(nodes)) == (nodes, True)


def test_threads_of_less_stack_may_look_at_less() -> None:
    found: list[int] = []
    kept = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=lambda: found.append(graphs.most_nodes()))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(kept)
    assert found[0] <= 512 * 1024 // 210 < graphs.most_nodes()


@pytest.mark.parametrize(("limit", "stack"), [(1, 1), (8, 8), (64, 8), (None, 8)])
def test_the_systems_limit_counts_where_it_is_lower_than_usual(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, stack: int
) -> None:
    resource = pytest.importorskip("resource")
    mebibyte = 1024**2
    soft = resource.RLIM_INFINITY if limit is None else limit * mebibyte
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))
    assert 0.5 * stack * mebibyte < 210 * graphs.most_nodes() < stack * mebibyte


def test_parameters_mark_themselves_where_the_graph_is_too_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured() -> gradscope.Report:
        torch.manual_seed(0)
        return gradscope.profile(Two(40), torch.ones(2, 4), steps=2, warmup=1)

    whole = measured().data
    monkeypatch.setattr(graphs, "most_nodes", lambda: 9)
    monkeypatch.setattr("gradscope.capture.passes.most_nodes", lambda: 9)
    deep = measured().data
    assert deep.ledger.accumulate_ns > 0
    for path in ("first", "second"):
        (there,) = (row for row in deep.layers if row.path == path)
        assert there.accumulate_ns > 0
    assert [row.path for row in deep.layers] == [row.path for row in whole.layers]
    assert not deep.partial
    assert (
        "a backward pass runs more than 9 nodes, the most that can be inspected: the layers of its gradient "
        "accumulation, and some saved tensors, are unknown"
    ) in deep.notes
    assert deep.ledger.gradient_sum_ns > 0
    assert not any("runs more than" in note for note in whole.notes)


_SCRIPT = """
import torch
from gradscope.capture.storages import take_census
from gradscope.capture.modules import CallRecorder
from gradscope.capture.passes import PassRecorder
from gradscope.capture.survey import GraphTracer

x = torch.ones(2, requires_grad=True)
h = x
for _ in range(100_000):
    h = h * 0.999
passes, tracer = PassRecorder(CallRecorder()), GraphTracer()
with passes.around(h.sum()), tracer.tracing(h.sum(), lambda nodes: None):
    h.sum().backward()
take_census([])
h = None
passes.forget()
print("freed")
"""


def test_a_deep_graph_is_freed() -> None:
    """Looked at as a whole it ends the process with a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(_SCRIPT)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "freed\n"), done.stderr
