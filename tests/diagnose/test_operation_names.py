"""The table of operations is what torch does: the rows that a call leaves, and what it saves for backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from gradscope import ops


def rows(run: Callable[[], object], *, called: bool = False) -> set[str]:
    """The names of the operations that torch's dispatcher runs; with ``called`` of those that ``run`` calls alone."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        run()
    found = [event for event in prof.events() or [] if event.name.startswith("aten::")]
    return {event.name for event in found if event.cpu_parent is None or not called}


def saved(run: Callable[..., Tensor], *given: Tensor) -> tuple[set[int], int]:
    """What is saved of floating numbers: positions in ``given``, -1 for the result; and how many other tensors."""
    found: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: found.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        result = run(*given)
    known = {each.untyped_storage().data_ptr(): place for place, each in enumerate(given)}
    known[result.untyped_storage().data_ptr()] = -1
    places = [known.get(each.untyped_storage().data_ptr()) for each in found if each.is_floating_point()]
    return {each for each in places if each is not None}, places.count(None)


def learnt(*shape: int) -> Tensor:
    return (torch.rand(*shape) + 0.5).requires_grad_()


MATRIX, BATCH, IMAGE = (4, 4), (3, 4, 4), (2, 4, 6, 6)
ROW, ONE, MANY = torch.rand(4), torch.rand(MATRIX), torch.rand(BATCH)
PRODUCTS: dict[str, Callable[[], object]] = {
    "mm": lambda: torch.mm(ONE, ONE),
    "bmm": lambda: torch.bmm(MANY, MANY),
    "addmm": lambda: torch.addmm(ONE, ONE, ONE),
    "baddbmm": lambda: torch.baddbmm(MANY, MANY, MANY),
    "with an activation": lambda: torch._addmm_activation(ROW, ONE, ONE),
}
CALLS: dict[str, Callable[[], object]] = {
    "matmul": lambda: torch.matmul(ONE, ONE),
    "matmul of a batch": lambda: torch.matmul(MANY, MANY),
    "linear": lambda: F.linear(ONE, ONE),
    "linear with a bias": lambda: F.linear(ONE, ONE, ROW),
    "einsum": lambda: torch.einsum("bij,bjk->bik", MANY, MANY),
}


def test_the_rows_of_products() -> None:
    assert set().union(*(rows(run, called=True) for run in PRODUCTS.values())) == ops.ATEN_MATMULS
    assert all(rows(run) & ops.ATEN_MATMULS for run in CALLS.values())


def test_the_rows_of_convolutions_attention_and_casts() -> None:
    assert rows(lambda: F.conv2d(learnt(*IMAGE), learnt(4, 4, 3, 3))) & ops.ATEN_CONVOLUTIONS
    assert rows(lambda: F.conv2d(learnt(*IMAGE).double(), learnt(4, 4, 3, 3).double())) & ops.ATEN_CONVOLUTIONS
    attention = rows(lambda: F.scaled_dot_product_attention(*(torch.rand(1, 2, 8, 8) for _ in range(3))))
    assert any(name.startswith(ops.ATEN_ATTENTION) for name in attention)
    assert rows(ONE.bfloat16) - {"aten::empty_strided", "aten::copy_"} == ops.ATEN_CASTS
    cast = learnt(4).bfloat16().grad_fn
    assert cast is not None and cast.name() == ops.CAST_NODE


def test_the_rows_of_gradients_that_are_filled() -> None:
    model = nn.Linear(4, 4)
    model(torch.rand(2, 4)).sum().backward()
    gradients = [each.grad for each in model.parameters()]
    assert all(isinstance(each, Tensor) for each in gradients)

    def run() -> None:
        torch._foreach_zero_(gradients)  # so do optimizers
        for each in gradients:
            assert each is not None
            each.zero_()
            each.fill_(0.0)

    assert rows(run, called=True) == ops.ATEN_FILLS


SAVED_INPUT: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "pow": lambda x: x.pow(3),
    "log": torch.log,
    "sin": torch.sin,
    "cos": torch.cos,
}
SAVED_RESULT: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "exp": torch.exp,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
}
# Of gather and take_along_dim the source is kept, and its sizes alone are read.
SAVED_NOTHING: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "mean": lambda x: x.mean(-1),
    "masked_fill": lambda x: x.masked_fill(x.detach() > 1, 0.0),
    "where": lambda x: torch.where(x.detach() > 1, x, 0.0),
    "tril": torch.tril,
    "triu": torch.triu,
    "index_select": lambda x: x.index_select(0, torch.tensor([1, 0])),
    "getitem": lambda x: x[torch.tensor([1, 0])],
    "embedding": lambda x: F.embedding(torch.tensor([1, 0]), x),
    "cumsum": lambda x: x.cumsum(0),
    "pad": lambda x: F.pad(x, (1, 1)),
    "roll": lambda x: x.roll(1, 0),
    "flip": lambda x: x.flip(0),
    "repeat": lambda x: x.repeat(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "tile": lambda x: x.tile(2, 1),
    "rsub": lambda x: 1 - x,
}


@pytest.mark.parametrize(
    ("name", "run", "kept"),
    [
        *((name, run, {0}) for name, run in SAVED_INPUT.items()),
        *((name, run, {-1}) for name, run in SAVED_RESULT.items()),
        *((name, run, set()) for name, run in SAVED_NOTHING.items()),
    ],
)
def test_what_is_saved_of_one_tensor(name: str, run: Callable[[Tensor], Tensor], kept: set[int]) -> None:
    x = (torch.rand(4, 4) + 0.5).requires_grad_()
    assert saved(run, x)[0] == kept
    tables = {0: ops.SAVES_INPUT, -1: ops.SAVES_RESULT}
    (table,) = [tables[each] for each in kept] or [ops.SAVES_NOTHING]
    assert name in table


def test_every_operation_of_one_tensor_is_tried() -> None:
    assert set(SAVED_INPUT) == ops.SAVES_INPUT - {"rms_norm"}  # of plain operations on a CPU, each with its own
    assert set(SAVED_RESULT) == ops.SAVES_RESULT


EACH_OTHER: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "matmul": (torch.matmul, MATRIX, MATRIX),
    "linear": (F.linear, MATRIX, MATRIX),
    "mm": (torch.mm, MATRIX, MATRIX),
    "bmm": (torch.bmm, BATCH, BATCH),
    "conv1d": (F.conv1d, (2, 4, 6), (4, 4, 3)),
    "conv2d": (F.conv2d, IMAGE, (4, 4, 3, 3)),
    "mv": (torch.mv, MATRIX, (4,)),
    "dot": (torch.dot, (4,), (4,)),
    "mul": (torch.mul, MATRIX, MATRIX),
    "outer": (torch.outer, (4,), (4,)),
    "inner": (torch.inner, (4,), (4,)),
}


@pytest.mark.parametrize("name", EACH_OTHER)
def test_a_product_saves_each_where_the_other_wants_a_gradient(name: str) -> None:
    assert name in ops.SAVES_EACH_OTHER
    run, *shapes = EACH_OTHER[name]
    for wanting in ((True, True), (True, False), (False, True)):
        given = [torch.rand(shape).requires_grad_(wants) for shape, wants in zip(shapes, wanting, strict=True)]
        kept = saved(run, *given)[0]
        if name.startswith("conv"):  # it saves both whatever is wanted, and reads one
            assert kept == {0, 1}
        else:
            assert kept == {place for place in (0, 1) if wanting[1 - place]}


@pytest.mark.parametrize("name", ["addmm", "baddbmm", "addbmm"])
def test_what_a_product_is_added_to_comes_first(name: str) -> None:
    assert name in ops.MATMULS and name not in ops.SAVES_EACH_OTHER
    shapes = {"addmm": (MATRIX,) * 3, "baddbmm": (BATCH,) * 3, "addbmm": (MATRIX, BATCH, BATCH)}[name]
    assert saved(getattr(torch, name), *(learnt(*shape) for shape in shapes))[0] == {1, 2}
