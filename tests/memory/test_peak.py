"""Truth: the live set at the peak, worked out by hand for each phase that it can be in."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .measuring import F32, F64, at_peak, bytes_of_all_tensors, in_a_loop, layer, measured, memory_of

ROWS, IN, HIDDEN, OUT = 64, 32, 128, 8
X = torch.linspace(-1, 1, ROWS * IN).reshape(ROWS, IN)

STEM = (IN * HIDDEN + HIDDEN) * F32  # parameters
TAIL = (HIDDEN * OUT + OUT) * F32
INPUT, WIDE, OUTPUT = ROWS * IN * F32, ROWS * HIDDEN * F32, ROWS * OUT * F32
LOSS = F32 + F32  # the loss, and the 1 that backward starts from

Peak = dict[tuple[str | None, str], int]


def network() -> nn.Module:
    """Linear, ReLU, Linear: the middle is the widest."""
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT))


def in_relus_node() -> Peak:
    """The live set while ReLU's node runs: the gradient of its output, that of its input, and what it kept.

    The tail is done: its gradients are there, those of the stem are not. The output of the model is held by the loop.
    """
    return {
        ("0", "parameters"): STEM,
        ("2", "parameters"): TAIL,
        ("2", "gradients"): TAIL,
        (None, "inputs"): INPUT,
        ("1", "saved activations"): WIDE,
        ("2", "activation gradients"): WIDE,
        ("1", "activation gradients"): WIDE,
        ("2", "other activations"): OUTPUT,
        (None, "other activations"): LOSS,
    }


def test_a_peak_in_backward() -> None:
    data = measured(network(), X)
    assert at_peak(data) == in_relus_node()
    memory = memory_of(data)
    assert (memory.peak_phase, memory.peak_layer, memory.peak_op) == ("backward", "1", "ReluBackward0")


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int, int]] = {
    # name: (make, times the parameters, bytes a parameter besides)
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1), 0, 0),
    "SGD with momentum": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1, 0),
    "Adam": (torch.optim.Adam, 2, F32),  # two moments, and a step that is a tensor
    "Adam, amsgrad": (lambda p: torch.optim.Adam(p, amsgrad=True), 3, F32),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer_lies_at_the_layers_of_its_parameters(name: str) -> None:
    make, times, more = OPTIMIZERS[name]
    model = network()
    data = measured(model, X, optimizer=make(model.parameters()))
    expected = in_relus_node()
    if times:
        expected["0", "optimizer state"] = times * STEM + 2 * more
        expected["2", "optimizer state"] = times * TAIL + 2 * more
    assert at_peak(data) == expected


def test_gradients_that_are_accumulated_are_there_from_the_start() -> None:
    """A loop that zeroes nothing: all gradients are old, and those that backward makes are added to them."""
    model = network()
    data = in_a_loop(model, lambda: model(X).sum().backward())
    expected = in_relus_node()
    expected["0", "gradients"] = STEM
    # Nobody holds the output of the model here, and it is gone with the node of the sum; nor the loss.
    del expected["2", "other activations"]
    expected[None, "other activations"] = LOSS
    assert at_peak(data) == expected


def test_start_and_end_of_a_step() -> None:
    """Old gradients are dropped in the step; what it ends with is what the next one starts with."""
    data = measured(network(), X)
    memory = memory_of(data)
    others = sum(row.bytes for row in memory.at_peak if row.category == "other tensors")
    assert memory.start_bytes == memory.end_bytes == 2 * (STEM + TAIL) + INPUT + others


def test_how_far_each_layer_raises_the_level() -> None:
    """``peak_bytes`` of a layer: the most above what there was when it, or one of its nodes, began."""
    data = measured(network(), X)
    rises = {path: layer(data, path).peak_bytes for path in ("0", "1", "2")}
    assert rises == {
        "0": WIDE,  # forward: its output; in backward its gradients are less
        "1": WIDE,
        # The gradient of the input, and then a copy of the expanded gradient beside that of the weight. Before: the
        # gradient of the input beside such a copy, which is less.
        "2": WIDE + OUTPUT + HIDDEN * OUT * F32,
    }


# --------------------------------------------------------------------------------------------------------------------
# Other phases
# --------------------------------------------------------------------------------------------------------------------


class Busy(nn.Module):
    """Needs 32 times its input for a moment."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.cat([x] * 32).detach().max()


def test_a_peak_in_forward() -> None:
    data = measured(nn.Sequential(nn.Linear(IN, IN, bias=False), Busy()), X)
    memory = memory_of(data)
    assert (memory.peak_phase, memory.peak_layer, memory.peak_op) == ("forward", "1", "aten::max")
    assert at_peak(data) == {
        (None, "inputs"): INPUT,
        ("0", "parameters"): IN * IN * F32,
        ("0", "temporaries"): INPUT,  # the output: a sum keeps nothing, so it is gone before backward
        ("1", "temporaries"): 32 * INPUT + F32,
    }


def test_a_peak_in_the_optimizer() -> None:
    """A large weight and a small batch. Adam without foreach makes a root and a quotient of each weight."""
    width = 256
    model = nn.Linear(width, width, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    data = measured(model, torch.ones(1, width), optimizer=optimizer)
    weight = width * width * F32
    memory = memory_of(data)
    assert (memory.peak_phase, memory.peak_layer, memory.peak_op) == ("optimizer", None, "aten::div")
    assert at_peak(data) == {
        (None, "inputs"): width * F32,
        ("", "parameters"): weight,
        ("", "gradients"): weight,
        ("", "optimizer state"): 2 * weight + F32,
        (None, "temporaries"): 2 * weight + F64 + F32,  # the divisor as a tensor, and in the weight's type
    }


def test_a_peak_before_forward() -> None:
    """Data that is prepared in the step."""
    model = nn.Linear(IN, OUT, bias=False)

    def step() -> None:
        model.zero_grad()
        raw = torch.zeros(100, ROWS, IN)
        x = raw.sum(0)
        del raw
        model(x).sum().backward()

    data = in_a_loop(model, step)
    memory = memory_of(data)
    assert (memory.peak_phase, memory.peak_layer, memory.peak_op) == ("other", None, "aten::sum")
    assert at_peak(data) == {
        (None, "temporaries"): 100 * INPUT,
        (None, "inputs"): INPUT,  # x, which is what the model is given
        ("", "parameters"): IN * OUT * F32,
    }


# --------------------------------------------------------------------------------------------------------------------
# What belongs to the model, and what to others
# --------------------------------------------------------------------------------------------------------------------


class Equipped(nn.Module):
    """Buffers of both kinds, a frozen weight, and a tensor in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(IN, IN, bias=False)
        self.frozen = nn.Parameter(torch.ones(IN), requires_grad=False)
        self.register_buffer("scale", torch.ones(IN, IN))
        self.register_buffer("shift", torch.ones(3, IN), persistent=False)
        self.plain = torch.ones(5, IN)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x) * self.frozen + self.plain[0] + self.scale[0] + self.shift[0]
        return out


def test_parameters_buffers_and_other_tensors() -> None:
    shows = any(each is X for each in gc.get_objects())  # not where it was passed over before the tests began
    elsewhere = bytes_of_all_tensors() - (X.nbytes if shows else 0)  # other tests' constants
    dataset = torch.ones(7, IN)  # of the user's, in no step
    model = Equipped()
    rows = {(row.owner, row.category): row.bytes for row in memory_of(measured(model, X)).at_peak}
    assert rows["inner", "parameters"] == IN * IN * F32
    assert rows["", "parameters"] == IN * F32
    assert rows["", "buffers"] == (IN * IN + 3 * IN) * F32
    assert rows[None, "other tensors"] == elsewhere + dataset.nbytes + model.plain.nbytes


def test_weights_of_a_tied_layer_and_of_a_batch_count_once() -> None:
    """One storage: under the first layer of the model that holds it, and as an input however often it is given."""
    model = nn.Sequential(nn.Linear(IN, IN, bias=False), nn.Linear(IN, IN, bias=False))
    model[1].weight = model[0].weight

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor, again: Tensor, part: Tensor) -> Tensor:
            out: Tensor = self.model(x) + again + part
            return out

    peak = at_peak(measured(Twice(), (X, X, X[:, :1])))
    assert peak["model.0", "parameters"] == IN * IN * F32
    assert ("model.1", "parameters") not in peak
    assert peak[None, "inputs"] == INPUT
