"""What a layer would take at the machine's limits, and what limits it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.diagnose.bounds import (
    Work,
    at_limit_ns,
    bound_by,
    bounded,
    call_bytes,
    calls_of_layers,
    memory_bytes,
    works,
)
from gradscope.diagnose.case import Case, StepFacts
from gradscope.recording.graph import Node, Value
from gradscope.tables import LayerRow, Limits, OpRow
from tests.diagnose.bound_cases import LIMITS, MS, WIDE, Net, call, case, run, tensor
from tests.diagnose.run_case import case_of
from tests.report_fixtures import RunBuilder

# --------------------------------------------------------------------------------------------------------------------
# Bytes
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (tensor(3, 5), 60),
        (tensor(3, 5, dtype="bfloat16"), 30),
        (tensor(3, 5, dtype="int64"), 120),
        (tensor(3, 5, dtype="bool"), 15),
        (tensor(3, dtype="complex64"), 24),
        (tensor(3, dtype="float8_e4m3fn"), 3),
        (tensor(), 4),
        (tensor(0, 7), 0),
        (tensor(100, 5, strides=(0, 1)), 20),  # expanded
        (tensor(3, 5, strides=None), 60),  # sparse: as if it were dense
    ],
)
def test_bytes_of_a_tensor(given: Value, size: int) -> None:
    assert memory_bytes(given) == size


def one(storage: int, **given: Any) -> Value:
    """400 bytes."""
    return tensor(10, 10, storage=storage, **given)


BIAS = tensor(10, storage=9)
CALLS = {
    # forward reads and writes, backward reads the output's gradient and the input, and writes the input's
    "gelu": (call("gelu", [one(1)], [one(2)]), 800, 1200),
    "gelu of what wants no gradient": (call("gelu", [one(1, grad=False)], [one(2, grad=False)]), 800, 0),
    "gelu without gradients": (call("gelu", [one(1)], [one(2)], grad=False), 800, 0),
    "view": (call("transpose", [one(1)], [one(1)]), 0, 0),
    "slice": (call("getitem", [one(1)], [tensor(5, 10, storage=1)]), 0, 0),
    "dropout in evaluation": (call("dropout", [one(1)], [one(1)]), 0, 0),
    "dropout": (call("dropout", [one(1)], [one(2)]), 800, 800),
    "reshape that copies": (call("reshape", [one(1)], [one(2)]), 800, 0),
    "add": (call("add", [one(1), one(2)], [one(3)]), 1200, 0),
    "add in place": (call("add", [one(1), one(2)], [one(1)]), 1200, 0),
    "add a bias": (call("add", [one(1), BIAS], [one(3)]), 840, 440),  # its gradient is summed
    "add to itself": (call("add", [one(1), one(1)], [one(2)]), 800, 0),
    "mul by a number": (call("mul", [one(1)], [one(2)]), 800, 800),
    "mul": (call("mul", [one(1), one(2)], [one(3)]), 1200, 2000),
    "mul with itself": (call("mul", [one(1), one(1)], [one(2)]), 800, 1200),
    "mul by a mask": (call("mul", [one(1), one(2, grad=False)], [one(3)]), 1200, 1200),
    # backward: output's gradient, input and weight, and three gradients
    "linear": (call("linear", [one(1), one(2), BIAS], [one(3)]), 1240, 2040),
    "first linear": (call("linear", [one(1, grad=False), one(2), BIAS], [one(3)]), 1240, 1240),
    # what it is added to comes first: each of the three counts, more than is read
    "addmm": (call("addmm", [BIAS, one(1), one(2)], [one(3)]), 1240, 2080),
    "sum": (call("sum", [one(1)], [tensor(storage=2)]), 404, 0),
    "mean": (call("mean", [one(1)], [tensor(storage=2)]), 404, 404),
    "cast": (call("to", [one(1)], [one(2, dtype="bfloat16")]), 600, 600),
    "cat": (call("cat", [one(1), one(2)], [tensor(20, 10, storage=3)]), 1600, 0),
    "masked_fill": (call("masked_fill", [one(1), one(2, dtype="bool")], [one(3)]), 900, 900),
    # only the rows that are picked are read, but the gradient of the whole table is written
    "embedding": (
        call("embedding", [tensor(10, dtype="int64", storage=1), tensor(1000, 10, storage=2)], [one(3)]),
        880,
        400 + 80 + 40_000,
    ),
    "argmax": (call("argmax", [one(1)], [tensor(10, dtype="int64", storage=2)]), 480, 0),
    "setitem": (call("setitem", [one(1), tensor(10, storage=2)], [one(1)]), 80, 0),
    "nothing": (call("backward", [one(1)], []), 0, 0),
}


@pytest.mark.parametrize(("given", "forward", "backward"), CALLS.values(), ids=CALLS.keys())
def test_bytes_of_a_call(given: Node, forward: int, backward: int) -> None:
    assert call_bytes(given) == (forward, backward)


# --------------------------------------------------------------------------------------------------------------------
# Limits
# --------------------------------------------------------------------------------------------------------------------


def work(**given: Any) -> Work:
    settings: dict[str, Any] = {
        "forward_bytes": 10_000_000,
        "backward_bytes": 20_000_000,
        "forward_flops": 400_000_000,
        "backward_flops": 800_000_000,
        "dtypes": ("float32",),
        "calls": 10.0,
    }
    return Work(**{**settings, **given})


def test_the_larger_of_the_two_times_counts_in_each_phase() -> None:
    assert at_limit_ns(work(), LIMITS) == (4 * MS, 8 * MS)
    assert at_limit_ns(work(forward_flops=0, backward_flops=0, dtypes=()), LIMITS) == (1 * MS, 2 * MS)
    assert at_limit_ns(work(forward_bytes=50_000_000), LIMITS) == (5 * MS, 8 * MS)
    assert at_limit_ns(work(dtypes=("bfloat16",)), LIMITS) == (1 * MS, 2 * MS)
    assert at_limit_ns(work(dtypes=("float32", "bfloat16")), LIMITS) == (1 * MS, 2 * MS)  # a limit: the faster


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        (work(), None),
        (work(forward_flops=None), LIMITS),
        (work(backward_flops=None), LIMITS),
        (work(dtypes=()), LIMITS),
        (work(dtypes=("float16",)), LIMITS),
        (work(dtypes=("float32", "float16")), LIMITS),
        (work(), replace(LIMITS, bytes=0.0)),
    ],
)
def test_what_is_not_known_has_no_limit(given: Work, limits: Limits | None) -> None:
    assert at_limit_ns(given, limits) is None
    if limits is not None:
        assert bound_by(row(), given, limits, on_cuda=False) is None


def row(forward: int = 5 * MS, backward: int = 10 * MS, **given: Any) -> LayerRow:
    builder = RunBuilder()
    builder.add("", "Net", backward, forward, **given)
    return builder.build().layers[0]


@pytest.mark.parametrize(
    ("of", "given", "on_cuda", "answer"),
    [
        (row(), work(), False, "compute"),
        (row(), work(forward_flops=0, backward_flops=0, dtypes=()), False, "bandwidth"),
        (row(), work(dtypes=("bfloat16",), forward_bytes=90_000_000), False, "bandwidth"),
        (row(), work(calls=7_500.0), False, "overhead"),
        (row(), work(calls=7_499.0), False, "compute"),
        # On a GPU calls are made while it works: only where it was idle do they cost time.
        (row(idle_ns=0), work(calls=7_500.0), True, "compute"),
        (row(idle_ns=6 * MS), work(calls=7_500.0), True, "overhead"),
        (row(idle_ns=6 * MS), work(), True, "waiting"),
        (row(idle_ns=5 * MS), work(), True, "compute"),
        (row(), work(calls=7_500.0), True, "compute"),
        (row(0, 0), work(), False, None),
        (row(), work(forward_bytes=0, backward_bytes=0, forward_flops=0, backward_flops=0), False, None),
    ],
)
def test_what_limits_a_layer(of: LayerRow, given: Work, on_cuda: bool, answer: str | None) -> None:
    assert bound_by(of, given, LIMITS, on_cuda=on_cuda) == answer


# --------------------------------------------------------------------------------------------------------------------
# Whole runs
# --------------------------------------------------------------------------------------------------------------------


def test_the_layers_of_a_run() -> None:
    found = {row.path: row for row in bounded(case(run()))}
    assert (found["h.0"].forward_limit_ns, found["h.0"].backward_limit_ns) == (10 * MS, 20 * MS)
    assert found["h.0"].bound_by == "compute"
    assert found["h.0"].bytes == 12_000_000 + 4 * 5_000_000
    assert (found["b"].forward_limit_ns, found["b"].backward_limit_ns) == (8 * MS, 12 * MS)
    assert found["b"].bound_by == "bandwidth"
    assert (found["h"].bytes, found["h"].bound_by) == (0, None)  # no calls, no work


def test_all_else_of_the_rows_stays() -> None:
    data = run()
    empty = {"bytes": None, "bound_by": None, "forward_limit_ns": None, "backward_limit_ns": None}
    given = case(data)
    assert tuple(replace(row, **empty) for row in bounded(given)) == tuple(data.layers)
    assert bounded(replace(given, run=replace(data, layers=bounded(given)))) == bounded(given)


def test_without_limits_there_are_bytes_only() -> None:
    found = {row.path: row for row in bounded(case(run(), limits=None))}
    assert found["h.0"].bytes == 32_000_000
    assert found["h.0"].bound_by is found["h.0"].forward_limit_ns is None


def test_without_a_recorded_step_there_is_nothing() -> None:
    data = run()
    assert bounded(Case(data, StepFacts(), LIMITS)) == tuple(data.layers)


@pytest.mark.parametrize(
    ("calls", "ops"),
    [
        ([], [OpRow("h.0", "forward", "aten::addmm", 1, 5)]),  # its calls were not seen
        ([replace(WIDE, layer="h.0", op="lstm")], []),
        ([replace(WIDE, layer="h.0")], [OpRow("h.0", "backward", "MyFunctionBackward", 1, 5)]),
        ([replace(WIDE, layer="h.0")], [OpRow("h.0", "backward", "CompiledFunctionBackward", 1, 5)]),
        ([replace(WIDE, layer="h.0")], [OpRow("h.0", "forward", "mylib::fused", 1, 5)]),
    ],
)
def test_layers_whose_calls_do_not_tell_are_left_out(calls: list[Node], ops: list[OpRow]) -> None:
    given = case(replace(run(), ops=tuple(ops)), calls)
    assert "h.0" not in works(given)


@pytest.mark.parametrize("op", ["bilinear", "conv_transpose2d", "dot", "einsum", "mv", "scaled_dot_product_attention"])
def test_every_product_has_the_rate_of_its_dtype(op: str) -> None:
    assert works(case(run(), [replace(WIDE, layer="h.0", op=op)]))["h.0"].dtypes == ("float32",)


def test_products_of_float32_in_tf32_have_its_rate() -> None:
    cuda = {"device": "cuda", "device_name": "GPU", "tf32": True}
    given = case(run(environment=cuda))
    assert works(given)["h.0"].dtypes == ("tf32",)
    convolution = replace(WIDE, layer="h.0", op="conv2d")
    assert works(case(run(environment=cuda), [convolution]))["h.0"].dtypes == ("float32",)
    found = works(case(run(environment=cuda), [convolution], settings={"cudnn_tf32": True}))
    assert found["h.0"].dtypes == ("tf32",)
    assert works(case(run(), settings={"cudnn_tf32": True}))["h.0"].dtypes == ("float32",)


class Stacked(nn.Module):
    """Modules of torch's own inside one another; two of a class without parameters."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Dropout(0.1))
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), inner, nn.LeakyReLU(), nn.Hardswish())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).sum() + self.net[0](x).sum()


def test_calls_inside_modules_of_torch() -> None:
    seen = case_of(Stacked(), torch.randn(4, 8), memory=False)
    found = {path: [call.op for call in calls] for path, calls in calls_of_layers(seen).items()}
    assert found == {
        "": ["sum", "sum", "add"],
        "net.0": ["linear", "linear"],
        "net.1": ["relu"],
        "net.2.0": ["linear"],
        "net.2.1": ["relu"],
        "net.2.2": ["dropout"],
        "net.3": ["leaky_relu"],
        "net.4": ["hardswish"],
    }
    known = {row.path: row for row in bounded(replace(seen, limits=LIMITS))}
    assert known["net.2.1"].bytes == 4 * 16 * 4 * 5
    assert known["net"].bytes == 0


def test_a_layer_of_torch_with_layers_and_operations_of_its_own() -> None:
    seen = case_of(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 5, 16), memory=False)
    found = {path: [call.op for call in calls] for path, calls in calls_of_layers(seen).items()}
    assert found["linear1"] == found["linear2"] == ["linear"]
    assert found["norm1"] == ["layer_norm"]
    assert found["dropout2"] == ["dropout"]
    assert "add" in found[""] and "linear" not in found[""]
    assert "self_attn" not in works(seen)  # what happens inside its one call is not known


class Folded(nn.Module):
    """A container whose layers cannot be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(0), nn.ReLU6())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * x).sum()


def test_calls_that_are_nobodys_leave_a_layer_without_limit() -> None:
    seen = case_of(Folded(), torch.randn(4, 8, requires_grad=True), memory=False)
    found = works(seen)
    assert "net.1" not in found  # ReLU6 calls hardtanh
    assert found["net"].forward_bytes == 0


def test_a_real_run() -> None:
    seen = case_of(Net(), torch.randn(32, 16, 64), memory=False)
    found = {row.path: row for row in bounded(replace(seen, limits=LIMITS))}
    rows = 32 * 16
    up, activation = 4 * rows * 64, 4 * rows * 256
    weight, bias = 4 * 64 * 256, 4 * 256
    forward = up + weight + bias + activation
    backward = activation + up + weight + bias  # the batch wants no gradient
    assert found["up"].bytes == forward + backward
    assert found[""].bytes == 2 * activation + 3 * activation + up + 4  # gelu; the sum hands its gradient on
    flops = 2 * rows * 64 * 256
    assert found["up"].forward_limit_ns == round(max(flops / 1e11, forward / 1e10) * 1e9)
    assert found["down"].backward_limit_ns == round(2 * flops / 1e11 * 1e9)
    assert found["up"].bound_by in ("compute", "bandwidth", "overhead")
    assert found["norm"].forward_limit_ns == round((2 * activation + 2 * bias) / 1e10 * 1e9)
