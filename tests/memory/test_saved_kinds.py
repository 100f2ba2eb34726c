"""Truth: recurrent layers, tensors of unusual storages, several backward passes, and what is held but not saved."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from gradscope.tables import RunData

from .measuring import F32, I64, Kept, assert_saved, in_a_loop, layer, line_of, measured, memory_of, place

ROWS, WIDTH = 8, 16
X = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
SIZE = ROWS * WIDTH * F32
COMPLEX = 8

# --------------------------------------------------------------------------------------------------------------------
# Recurrent layers: their steps are unrolled by torch, in C++
# --------------------------------------------------------------------------------------------------------------------

TIMES, N, IN, HID = 7, 3, 6, 5
STATE = N * HID * F32
SEQUENCE = Kept("inner", "AddmmBackward0", "mat1", "21x6", "float32", TIMES * N * IN * F32)


@pytest.fixture
def no_onednn() -> Iterator[None]:
    """oneDNN's LSTM is one node with a workspace of its own choosing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TF32 acceleration on top of oneDNN")
        with torch.backends.mkldnn.flags(enabled=False):
            yield


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.inner = kind(IN, HID)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


def test_lstm(no_onednn: None) -> None:
    """A step keeps its four gates, which are one storage; the old cell; tanh of the new one; and the old hidden state.

    Two sigmoids, a tanh and a sigmoid run in place on four views of the gates: they belong to the first.
    """
    node = "AddmmBackward0"
    assert_saved(
        measured(Recurrent(nn.LSTM), torch.ones(TIMES, N, IN)),
        SEQUENCE,
        Kept("inner", node, "mat1", "3x5", "float32", TIMES * STATE, count=TIMES),  # hidden states
        Kept("inner", "SigmoidBackward0", "output", "3x5", "float32", TIMES * 4 * STATE, count=TIMES),  # gates
        Kept("inner", "MulBackward0", "other", "3x5", "float32", TIMES * STATE, count=TIMES),  # cells
        Kept("inner", "TanhBackward0", "output", "3x5", "float32", TIMES * STATE, count=TIMES),
    )


def test_gru() -> None:
    """A step keeps its three gates, one storage; the candidate state; and the old hidden state.

    Both products are made in place, for which torch copies what it overwrites.
    """
    assert_saved(
        measured(Recurrent(nn.GRU), torch.ones(TIMES, N, IN)),
        SEQUENCE,
        Kept("inner", "AddmmBackward0", "mat1", "3x5", "float32", TIMES * STATE, count=TIMES),
        Kept("inner", "SigmoidBackward0", "output", "3x5", "float32", TIMES * 3 * STATE, count=TIMES),
        Kept("inner", "TanhBackward0", "output", "3x5", "float32", TIMES * STATE, count=TIMES),
        Kept("inner", "MulBackward0", "self", "3x5", "float32", 2 * TIMES * STATE, count=2 * TIMES),
    )


# --------------------------------------------------------------------------------------------------------------------
# Storages that are not one block of floats
# --------------------------------------------------------------------------------------------------------------------


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft(self.stem(x)).abs()


def test_complex_tensors() -> None:
    """abs keeps its complex input; the transform its real one, whose shape is all it needs."""
    assert_saved(
        measured(Spectrum(), X),
        Kept("stem", "AddmmBackward0", "mat1", "8x16", "float32", SIZE),
        Kept("", "FftR2CBackward0", "self", "8x16", "float32", SIZE),
        Kept("", "AbsBackward0", "self", "8x16", "complex64", ROWS * WIDTH * COMPLEX),
    )


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(x, self.weight)


def coordinates() -> Tensor:
    """Five numbers of 8 x 16."""
    return torch.sparse_coo_tensor(torch.arange(2 * 5).reshape(2, 5) % 8, torch.ones(5), (ROWS, WIDTH)).coalesce()


def compressed() -> Tensor:
    """Five numbers, all of them in the first row."""
    rows = torch.tensor([0] + [5] * ROWS)
    return torch.sparse_csr_tensor(rows, torch.arange(5), torch.ones(5), (ROWS, WIDTH))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_a_sparse_batch_is_its_indices_and_values() -> None:
    data = measured(Sparse(), coordinates())
    size = 2 * 5 * I64 + 5 * F32
    assert_saved(data, Kept("", "SparseAddmmBackward0", "mat1", "8x16", "float32", size, count=2))


@pytest.mark.filterwarnings("ignore:Sparse (CSR tensor support is in beta|invariant checks)")
def test_a_compressed_sparse_batch_is_its_three_parts() -> None:
    data = measured(Sparse(), compressed())
    size = (ROWS + 1) * I64 + 5 * I64 + 5 * F32
    assert_saved(data, Kept("", "SparseAddmmBackward0", "mat1", "8x16", "float32", size, count=3))


# --------------------------------------------------------------------------------------------------------------------
# More than one backward pass a step
# --------------------------------------------------------------------------------------------------------------------


def test_two_passes_over_one_graph_count_it_once() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, 2))

    def step() -> None:
        model.zero_grad()
        out = model(X)
        out[:, 0].sum().backward(retain_graph=True)
        out[:, 1].exp().sum().backward()  # made after the first pass

    data = in_a_loop(model, step)
    assert_saved(
        data,
        Kept("0", "AddmmBackward0", "mat1", "8x16", "float32", SIZE),
        Kept("1", "SigmoidBackward0", "output", "8x16", "float32", SIZE),
        Kept(None, "ExpBackward0", "output", "8", "float32", ROWS * F32),
    )
    (row,) = (row for row in memory_of(data).saved if row.layer is None)
    assert place(row.line) == line_of("made after the first pass", __file__)


def test_two_graphs_of_a_step_are_both_kept() -> None:
    """Micro-batches: their graphs never live at the same time, but both were kept in the course of the step."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, 2))
    halves = X.clone(), X.clone()

    def step() -> None:
        model.zero_grad()
        for half in halves:
            model(half).sum().backward()

    assert_saved(
        in_a_loop(model, step),
        Kept("0", "AddmmBackward0", "mat1", "8x16", "float32", 2 * SIZE, count=2),
        Kept("1", "SigmoidBackward0", "output", "8x16", "float32", 2 * SIZE, count=2),
    )


class Penalised(nn.Module):
    """A gradient penalty: its backward runs through a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act, self.tail = nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(self.act(self.stem(x)))
        return out


@pytest.mark.parametrize("leaf", [True, False], ids=["the batch itself", "a copy of it"])
def test_nodes_made_in_backward_belong_to_the_layer_whose_node_made_them(leaf: bool) -> None:
    model, ones = Penalised(), torch.ones(ROWS, 1)
    batch = X.clone().requires_grad_()

    def step() -> None:
        model.zero_grad()
        x = batch if leaf else batch.clone()
        (grad,) = torch.autograd.grad(model(x), x, ones, create_graph=True)
        grad.square().sum().backward()
        batch.grad = None

    assert_saved(
        in_a_loop(model, step),
        Kept("stem", "AddmmBackward0", "mat1", "8x16", "float32", SIZE),  # x
        Kept("act", "SigmoidBackward0", "output", "8x16", "float32", SIZE),
        # The product of the tail's backward keeps what it was given: ones, for the gradient of its weight.
        Kept("tail", "MmBackward0", "self", "8x1", "float32", ROWS * F32),
        Kept("act", "SigmoidBackwardBackward0", "grad_output", "8x16", "float32", SIZE),
        Kept("stem", "MmBackward0", "self", "8x16", "float32", SIZE),
        Kept(None, "PowBackward0", "self", "8x16", "float32", SIZE),  # grad
    )


# --------------------------------------------------------------------------------------------------------------------
# Held, not saved
# --------------------------------------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Gives two outputs, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.used(x)
        return hidden, self.idle(hidden).exp()  # nobody asks for this


def held(data: RunData) -> dict[tuple[str | None, str | None, str], tuple[int, int]]:
    """(layer, line, op) -> (bytes, count), without scalars."""
    rows = memory_of(data).held
    return {(row.layer, place(row.line), row.op): (row.bytes, row.count) for row in rows if row.bytes > F32 * row.count}


def test_a_branch_that_the_loss_does_not_use_is_held() -> None:
    """Its graph is alive as long as its output; none of it is reached by backward."""
    data = measured(Branching(), X, lambda out, _: out[0].sum())
    assert_saved(data, Kept("used", "AddmmBackward0", "mat1", "8x16", "float32", SIZE))
    line = line_of("nobody asks for this", __file__)
    rows = held(data)
    assert rows.pop(("", line, "aten::exp")) == (2 * SIZE, 1)
    ((key, found),) = rows.items()
    assert (key[0], key[2], found) == ("used", "aten::linear", (SIZE, 1))  # hidden: the other output


def test_a_branch_that_the_loss_uses_is_saved() -> None:
    data = measured(Branching(), X, lambda out, _: out[1].sum())
    assert_saved(
        data,
        Kept("used", "AddmmBackward0", "mat1", "8x16", "float32", SIZE),
        Kept("idle", "AddmmBackward0", "mat1", "8x16", "float32", SIZE),
        Kept("", "ExpBackward0", "output", "8x32", "float32", 2 * SIZE),
    )
    assert held(data) == {}


class Remembers(nn.Module):
    """Keeps its last output, as hooks that visualise features do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen = nn.Linear(WIDTH, WIDTH), []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        self.seen[:] = [out.detach()]
        return out * 2


def test_an_activation_in_an_attribute_is_held() -> None:
    """``* 2`` needs no tensor, so only the list holds the output of ``inner``; the loop holds forward's."""
    data = measured(nn.Sequential(Remembers()), X)
    assert {(key[0], key[2]): found for key, found in held(data).items()} == {
        ("0.inner", "aten::linear"): (SIZE, 1),
        ("0", "aten::mul"): (SIZE, 1),
    }
    assert layer(data, "0").saved_bytes == 8  # the number 2 as a float64
