"""Calls on lazy logits in combinations that must not be answered without them: torch's value, dtype and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gradscope.recipes import lazy_linear
from gradscope.recipes.lazy_tensor import LazyTensor, is_computed

ROWS, CLASSES, WIDTH = 6, 5, 4
TARGET = torch.tensor([0, 4, 2, 2, 1, 3])
BATCHED = TARGET.view(2, 3)

Call = Callable[..., Tensor]
Operands = dict[str, Tensor]


def operands(dtype: torch.dtype = torch.float64) -> Operands:
    """Input, weight, the layer's bias, and another one."""
    torch.manual_seed(0)
    shapes = {"x": (2, 3, WIDTH), "weight": (CLASSES, WIDTH), "bias": (CLASSES,), "other": (CLASSES,)}
    return {name: torch.randn(shape).to(dtype).requires_grad_() for name, shape in shapes.items()}


def without_graph(logits: Tensor) -> Tensor:
    with torch.no_grad():
        return logits.flatten(0, 1)


class Doubled(torch.autograd.Function):
    """Somebody else's, that can be differentiated twice."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return 2 * z.detach()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        return 2 * upstream


PROGRAMS: dict[str, Callable[[Call, Operands], Tensor]] = {
    "two biases": lambda call, o: F.cross_entropy(
        (call(o["weight"], o["x"], o["bias"]) + o["other"]).flatten(0, 1), TARGET
    ),
    "a bias behind a view": lambda call, o: F.cross_entropy(
        call(o["weight"], o["x"]).view(-1, CLASSES) + o["other"], TARGET
    ),
    "a bias behind a view without a graph": lambda call, o: F.cross_entropy(
        without_graph(call(o["weight"], o["x"])) + o["other"], TARGET
    ),
    "a view without a graph": lambda call, o: (
        F.cross_entropy(without_graph(call(o["weight"], o["x"])), TARGET) + 0 * o["x"].sum()
    ),
    "a Function behind a view of a view without a graph": lambda call, o: (
        Doubled.apply(without_graph(call(o["weight"], o["x"])).flatten()).sum() + 0 * o["x"].sum()
    ),
    "size_average": lambda call, o: F.cross_entropy(
        call(o["weight"], o["x"]).flatten(0, 1), TARGET, None, False
    ),
    "reduce": lambda call, o: F.cross_entropy(
        call(o["weight"], o["x"]).flatten(0, 1), TARGET, reduce=False
    ).square().sum(),
    "a sum of a view without a graph": lambda call, o: (
        without_graph(call(o["weight"], o["x"])).square().sum() + 0 * o["x"].sum()
    ),
    "every second class": lambda call, o: F.cross_entropy(
        call(o["weight"], o["x"]).flatten(0, 1)[:, ::2], TARGET % 3
    ),
    "a view as it is, with the classes in the middle": lambda call, o: F.cross_entropy(
        call(o["weight"], o["x"]).transpose(1, 2).view(2, CLASSES, 3), BATCHED
    ),
}  # fmt: skip


def eager(weight: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight, bias)


def ran(program: Callable[[Call, Operands], Tensor], call: Call, given: Operands) -> list[Tensor | None]:
    """The loss, and the gradient of each operand."""
    loss = program(call, given)
    return [loss.detach(), *torch.autograd.grad(loss, list(given.values()), allow_unused=True)]


def assert_alike(ours: list[Any], theirs: list[Any], **tolerance: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        if other is None or not other.any():
            assert one is None or not one.any()
        else:
            torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_loss_is_torchs(name: str) -> None:
    assert_alike(ran(PROGRAMS[name], lazy_linear, operands()), ran(PROGRAMS[name], eager, operands()))


def test_log_softmax_computes_in_the_dtype_that_it_is_asked_for() -> None:
    def program(call: Call, o: Operands) -> Tensor:
        logits = call(o["weight"], o["x"]).flatten(0, 1)
        return F.nll_loss(F.log_softmax(logits, -1, dtype=torch.float64), TARGET)

    ours, theirs = (program(call, operands(torch.float32)) for call in (lazy_linear, eager))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)


def test_a_loss_of_halves_cast_before_is_not_rounded_to_them() -> None:
    def program(call: Call, o: Operands) -> Tensor:
        return F.cross_entropy(call(o["weight"], o["x"]).float().flatten(0, 1), TARGET)

    ours, theirs = (program(call, operands(torch.bfloat16)) for call in (lazy_linear, eager))
    assert ours.dtype == torch.float32 and ours != ours.bfloat16()
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=0)  # the products of bfloat16 are rounded by blocks


@pytest.mark.parametrize("outside", [False, True])
def test_a_bias_that_autocast_has_a_say_in(outside: bool) -> None:
    def program(call: Call) -> Tensor:
        o = operands(torch.float32)
        bias = o["other"].bfloat16().detach()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = call(o["weight"], o["x"])
            return logits if outside else logits + bias

    ours, theirs = program(lazy_linear), program(eager)
    if outside:
        bias = operands()["other"].bfloat16().detach()
        ours, theirs = ours + bias, theirs + bias
    assert ours.dtype == theirs.dtype
    assert torch.equal(ours + 0, theirs + 0)


def stepped(*changed: Tensor) -> None:
    optimizer = torch.optim.SGD(changed, lr=0.5)
    for each in changed:
        each.grad = torch.randn_like(each)
    optimizer.step()


@pytest.mark.parametrize("changed", [("weight", "bias"), ("weight",), ("bias",)])
def test_a_loss_after_the_optimizers_step_is_that_of_the_operands_before(changed: tuple[str, ...]) -> None:
    o = operands()
    logits = lazy_linear(o["weight"], o["x"], o["bias"])
    expected = F.cross_entropy(eager(o["weight"], o["x"], o["bias"]).flatten(0, 1), TARGET).detach()
    stepped(*(o[name] for name in changed))
    torch.testing.assert_close(F.cross_entropy(logits.flatten(0, 1), TARGET).detach(), expected)
    assert not torch.allclose(F.cross_entropy(eager(o["weight"], o["x"], o["bias"]).flatten(0, 1), TARGET), expected)


@pytest.mark.parametrize("changed", ["weight", "bias"])
def test_a_step_that_changes_what_an_operand_is_a_view_of(changed: str) -> None:
    o = operands()
    held = {"weight": o["weight"].detach().T.contiguous(), "bias": o["bias"].detach()[None].clone()}
    held = {name: each.requires_grad_() for name, each in held.items()}
    logits = lazy_linear(held["weight"].T, o["x"]) + held["bias"]
    expected = eager(held["weight"].T, o["x"], held["bias"][0]).detach()
    stepped(held[changed])
    torch.testing.assert_close(logits.detach(), expected)


def test_nothing_is_kept_of_logits_that_were_read_before_the_step() -> None:
    o = operands()
    logits = lazy_linear(o["weight"], o["x"])
    before = logits + 0
    stepped(o["weight"])
    assert isinstance(logits, LazyTensor) and logits._lazy.source.kept is None
    assert torch.equal(logits + 0, before)


def test_a_step_does_not_hide_what_was_changed_before_it() -> None:
    o = operands()
    logits = lazy_linear(o["weight"], o["x"])
    with torch.no_grad():
        o["weight"].mul_(2)
    stepped(o["weight"])
    with pytest.raises(RuntimeError, match="was modified in place"):
        logits + 0


def test_a_weight_whose_memory_was_freed_is_not_read() -> None:
    """As that of a sharded layer, once its forward is over."""
    o = operands()
    logits = lazy_linear(o["weight"], o["x"])
    o["weight"].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was modified in place"):
        logits + 0


def test_a_view_of_logits_that_were_read_needs_the_weight_no_more() -> None:
    o = operands()
    logits = lazy_linear(o["weight"], o["x"])
    view, expected = logits.flatten(), 2 * eager(o["weight"], o["x"]).flatten()
    logits + 0
    with torch.no_grad():
        o["weight"].mul_(2)
    assert torch.equal(Doubled.apply(view), expected)


def test_a_bias_is_not_added_to_what_was_changed_since() -> None:
    o = operands()
    logits = lazy_linear(o["weight"], o["x"])
    with torch.no_grad():
        o["weight"].mul_(2)
    with pytest.raises(RuntimeError, match="the head's weight or input was modified in place before it"):
        logits + o["other"]


def test_a_second_derivative_behind_a_function_is_torchs() -> None:
    def program(call: Call, o: Operands) -> Tensor:
        (found,) = torch.autograd.grad(Doubled.apply(call(o["weight"], o["x"])).sum(), o["x"], create_graph=True)
        return found.square().sum()

    assert_alike(ran(program, lazy_linear, operands()), ran(program, eager, operands()))


@pytest.mark.measured_sizes
def test_logits_so_few_that_the_loss_is_torchs_are_computed_once() -> None:
    o = operands(torch.float32)
    logits = lazy_linear(o["weight"], o["x"])
    loss = F.cross_entropy(logits.flatten(0, 1), TARGET)
    assert isinstance(logits, LazyTensor) and is_computed(logits)
    assert not isinstance(loss, LazyTensor)


WRITERS: dict[str, Callable[[Tensor], object]] = {
    "out": lambda z: torch.mul(torch.ones_like(z), 3, out=z),
    "inplace": lambda z: F.relu(z, inplace=True),
    "threshold": lambda z: F.threshold(z, 0.5, -1.0, inplace=True),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_view_sees_what_is_written_into_the_logits_and_a_copy_does_not(name: str) -> None:
    def program(call: Call) -> Tensor:
        o = operands()
        logits = call(o["weight"].detach(), o["x"].detach())
        view, copied = logits.flatten(), F.log_softmax(logits, -1)
        WRITERS[name](logits)
        return torch.cat((view, copied.flatten()))

    assert torch.equal(program(lazy_linear), program(eager))


def test_a_function_behind_what_was_written_has_its_gradient() -> None:
    def program(call: Call, o: Operands) -> Tensor:
        logits = call(o["weight"], o["x"])
        F.relu(logits, inplace=True)
        return Doubled.apply(logits).sum()  # type: ignore[no-any-return]

    assert_alike(ran(program, lazy_linear, operands()), ran(program, eager, operands()))


def test_operands_that_are_no_numbers_are_no_changed_ones() -> None:
    o = {name: each.detach() for name, each in operands().items()}
    for each in o.values():
        each.fill_(torch.nan)
    torch.testing.assert_close(
        lazy_linear(o["weight"], o["x"], o["bias"]) + 0, eager(o["weight"], o["x"], o["bias"]), equal_nan=True
    )


@pytest.mark.parametrize("shape", [(0, WIDTH), (CLASSES, 0)])
def test_a_layer_of_nothing(shape: tuple[int, int]) -> None:
    weight, x = torch.zeros(shape), torch.zeros(3, shape[1])
    assert torch.equal(lazy_linear(weight, x) + 0, eager(weight, x))


def test_an_input_that_counts_no_versions() -> None:
    with torch.inference_mode():
        x = torch.ones(3, WIDTH)
    weight = torch.ones(CLASSES, WIDTH)
    assert torch.equal(lazy_linear(weight, x) + 0, eager(weight, x))


def test_dtypes_that_autocast_leaves_apart_are_refused_at_the_call() -> None:
    weight, x = torch.ones(CLASSES, WIDTH, dtype=torch.float64), torch.ones(3, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="dtype"):
        lazy_linear(weight, x)
