"""What calls do, told by running them: of given tensors alone, in place or not, and proved with their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gradscope.patching.match.behaviour import Proofs, Trial, bound_of, close, rows
from gradscope.patching.match.search import region
from gradscope.recording.graph import Recording, Value
from gradscope.recording.record import record

X = torch.randn(3, 4, 8)


def recorded(run: Callable[[Tensor, Tensor], Tensor]) -> tuple[Recording, Value, Value, Value]:
    """The recording, the two tensors that were given, and the result."""
    one, other = X.clone().requires_grad_(), X.flip(0).requires_grad_()
    recording, made = record(lambda: run(one, other))

    def value_of(tensor: Tensor) -> Value:
        return next(each for each in reversed(recording.values) if each.tensor() is tensor)

    return recording, value_of(one), value_of(other), value_of(made)


def in_place(x: Tensor) -> Tensor:
    h = x * 2
    h.add_(1).mul_(x)
    return h


def with_casts(x: Tensor) -> Tensor:
    return (x.double().tanh() * x.to(torch.float16).float()).type_as(x)


def with_a_number(x: Tensor) -> Tensor:
    return x * torch.tensor(2.0).sqrt() + 0.5


def lifted(x: Tensor) -> Tensor:
    return x - x.mean(-1)[..., None] + x.sum(-1).unsqueeze(-1)


@pytest.mark.parametrize("run", [in_place, with_casts, with_a_number, lifted], ids=lambda run: run.__name__)
def test_a_trial_makes_what_the_calls_make(run: Callable[[Tensor], Tensor]) -> None:
    _, x, _, made = recorded(lambda one, _: run(one))
    numbers = rows(x)
    found = Trial({x: numbers}).of(made)
    assert found is not None
    wanted = run(numbers) if run is not with_casts else numbers.tanh() * numbers
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)  # the number was a float32's root


def test_what_works_in_place_leaves_what_it_was_before() -> None:
    """A trial makes what is asked for in any order."""

    def run(x: Tensor, _: Tensor) -> Tensor:
        h = x * 2
        before = h + 1
        h.mul_(3)
        return before + h

    recording, x, _, made = recorded(run)
    numbers = rows(x)
    trial = Trial({x: numbers})
    before, tripled = (next(node.output for node in recording.nodes if node.op == op) for op in ("add", "mul"))
    last = next(node.output for node in recording.nodes if node.op == "mul" and node.changed)
    assert torch.equal(trial.of(last), 6 * numbers)  # type: ignore[arg-type]
    assert torch.equal(trial.of(before), 2 * numbers + 1)  # type: ignore[arg-type]
    assert torch.equal(trial.of(tripled), 2 * numbers)  # type: ignore[arg-type]
    torch.testing.assert_close(trial.of(made), 8 * numbers + 1)


OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "another tensor": lambda x, u: x * u,
    "not differentiated": lambda x, u: x * x.detach(),
    "not understood": lambda x, u: x * x.cumsum(-1),
    "whole numbers": lambda x, u: x.long().float() * x,
    "a part of it": lambda x, u: x[:, :4].tanh(),
    "random": lambda x, u: torch.nn.functional.dropout(x, 0.5).tanh(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_made_of_more_is_not_tried(name: str) -> None:
    _, x, _, made = recorded(OTHERS[name])
    trial = Trial({x: rows(x)})
    assert trial.of(made) is None
    assert trial.of(made) is None  # nor the second time
    assert trial.of(x) is not None


def test_both_given() -> None:
    _, x, u, made = recorded(lambda x, u: x * u)
    one, other = rows(x), rows(u)
    assert torch.equal(Trial({x: one, u: other}).of(made), one * other)  # type: ignore[arg-type]
    assert not torch.equal(one, other)


def proved(run: Callable[[Tensor], Tensor], function: Callable[[Tensor], Tensor], scale: float = 1.0) -> bool:
    _, x, _, made = recorded(lambda one, _: run(one))
    found = region(made, (x,))
    assert found is not None
    return Proofs().proves(found.nodes, made, found.given, function, scale=scale)


def test_proofs() -> None:
    assert proved(lambda x: x * 0.70710678, lambda x: x / 2**0.5)
    assert not proved(lambda x: x * 0.7071, lambda x: x / 2**0.5)
    assert proved(in_place, lambda x: (2 * x + 1) * x)
    assert proved(lifted, lambda x: x - x.mean(-1, keepdim=True) + x.sum(-1, keepdim=True))


def test_a_proof_asks_for_gradients() -> None:
    """The result is right, and one of its factors is not differentiated."""
    assert not proved(lambda x: x * x.tanh(), lambda x: x * x.detach().tanh())


def test_what_is_proved_is_not_proved_for_the_same_in_place() -> None:
    """On a tensor that was there before it is none."""
    known = Proofs()

    def proves(run: Callable[[Tensor], Tensor]) -> bool:
        with torch.no_grad():
            recording, _, _, _ = recorded(lambda one, _: run(one))
        (node,) = (each for each in recording.nodes if each.op == "tanh")
        return known.proves([node], node.output, node.inputs, torch.tanh)

    assert proves(torch.tanh)
    assert not proves(torch.tanh_)


def test_functions_are_told_apart_by_their_names() -> None:
    recording, x, _, made = recorded(lambda one, _: one.tanh())
    known = Proofs()

    def proves(function: Callable[[Tensor], Tensor]) -> bool:
        return known.proves(recording.nodes, made, (x,), function, name=function.__name__)

    assert proves(torch.tanh)
    assert not proves(torch.sin)
    assert proves(torch.tanh)


Run = Callable[[Tensor], Tensor]
OTHER_CALLS: dict[str, tuple[Run, Run, Run]] = {
    "an argument by its name": (
        lambda x: x - x.mean(dim=-1, keepdim=True),
        lambda x: x - x.mean(dim=-2, keepdim=True),
        lambda x: x - x.mean(-1, keepdim=True),
    ),
    "a tensor of one number": (lambda x: x * torch.tensor(2.0), lambda x: x * torch.tensor(3.0), lambda x: x * 2),
}


@pytest.mark.parametrize("name", OTHER_CALLS)
def test_what_is_proved_is_not_proved_for_other_calls(name: str) -> None:
    known = Proofs()
    one, other, function = OTHER_CALLS[name]

    def proves(run: Run) -> bool:
        recording, x, _, made = recorded(lambda one, _: run(one))
        nodes = [node for node in recording.nodes if x in node.inputs]
        return known.proves(nodes, made, (x,), function)

    assert proves(one)
    assert not proves(other)


def test_what_is_proved_is_not_proved_for_other_shapes() -> None:
    """Less its mean, one feature is 0."""
    known = Proofs()

    def proves(features: int) -> bool:
        x = X[..., :features].clone().requires_grad_()
        recording, made = record(lambda: x - x.mean(-1, keepdim=True))
        output = next(each for each in reversed(recording.values) if each.tensor() is made)
        return known.proves(recording.nodes, output, recording.nodes[0].inputs[:1], lambda x: x * 0)

    assert proves(1)
    assert not proves(8)


def test_a_proof_asks_for_the_gradient_of_each_operand() -> None:
    recording, x, u, made = recorded(lambda x, u: x * u.detach())
    assert not Proofs().proves(recording.nodes, made, (x, u), torch.mul)


def test_of_a_tensor_that_says_the_dtype_nothing_is_read() -> None:
    wide = torch.randn(3, dtype=torch.float64)
    _, x, _, made = recorded(lambda x, _: (x.type_as(wide) * 2).type_as(x))
    found = region(made, (x.users[0].output,))
    assert found is not None
    assert found.given == (x,)


def test_a_proof_asks_for_another_size_too() -> None:
    """At 1 the two are equal to seven digits; where eps is as large as the mean square they are not."""

    def outside(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + 1e-8)

    def inside(x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-16).rsqrt()

    assert proved(outside, inside)
    assert not proved(outside, inside, scale=1e-8)


def test_a_reduction_of_the_rows_is_seen() -> None:
    """Recorded with one row, it is what a reduction of the features would be."""
    one = torch.randn(1, 8).requires_grad_()
    recording, made = record(lambda: one - one.mean((0, 1)))
    x, output = recording.nodes[0].inputs[0], next(v for v in recording.values if v.tensor() is made)
    found = region(output, (x,))
    assert found is not None
    assert not Proofs().proves(found.nodes, output, found.given, lambda x: x - x.mean(-1, keepdim=True))


def test_close() -> None:
    ones = torch.ones(2, 3, dtype=torch.float64)
    assert close(ones * (1 + 9e-7), ones)
    assert not close(ones * (1 + 2e-6), ones)
    assert not close(ones * torch.nan, ones)
    assert not close(ones[0], ones)
    assert not close(None, ones)
    assert close(ones * 1e-12, ones * 0)  # a gradient that is nothing but rounding


@pytest.mark.parametrize("seed", range(12))
def test_numbers_of_both_signs_are_tried(seed: int) -> None:
    """However few there are: the root of a square is the number itself for positive ones alone."""
    column = torch.randn(4, 1).requires_grad_()

    def run() -> Tensor:
        x = column
        for _ in range(seed):
            x = x + 1.0
        return (x * x).sqrt()

    recording, made = record(run)
    output = next(each for each in reversed(recording.values) if each.tensor() is made)
    x = recording.nodes[-2].inputs[0]
    found = region(output, (x,))
    assert found is not None
    assert not Proofs().proves(found.nodes, output, found.given, lambda x: 1.0 * x)


@pytest.mark.parametrize("dtype", ["float", "double", "half", "bfloat16"])
def test_what_gives_one_dtype_ends_no_region(dtype: str) -> None:
    """Of an operand of another dtype the result has that one too, which a recipe's would not."""
    _, x, _, made = recorded(lambda x, _: getattr(x.double() * 2, dtype)())
    assert made.producer is None or made.producer.op == dtype
    assert region(made, (x,)) is None


LENGTH = {"dim": -1, "keepdim": True}
BOUNDS: dict[str, tuple[Run, tuple[float, float] | None]] = {
    "by name": (lambda x: x.norm(**LENGTH).clamp(min=0.5), (0.5, 1.0)),
    "by position": (lambda x: torch.clamp(torch.linalg.vector_norm(x, **LENGTH), 2), (2.0, 1.0)),
    "clamp_min": (lambda x: torch.norm(x, **LENGTH).clamp_min(0.5), (0.5, 1.0)),
    "a multiple": (lambda x: (x.norm(**LENGTH) * 3 / 4.0).clamp(min=0.5), (0.5, 0.75)),
    "a cast": (lambda x: x.norm(**LENGTH).double().clamp(min=0.5), (0.5, 1.0)),
    "a most": (lambda x: x.norm(**LENGTH).clamp(0.5, 2.0), None),
    "a most alone": (lambda x: x.norm(**LENGTH).clamp(max=2.0), None),
    "none": (lambda x: x.norm(**LENGTH).clamp(min=0.0), None),
    "less than none": (lambda x: x.norm(**LENGTH).clamp(min=-1.0), None),
    "a tensor": (lambda x: x.norm(**LENGTH).clamp(min=torch.tensor(0.5)), None),
    "a truth value": (lambda x: x.norm(**LENGTH).clamp(min=True), None),
    "in place": (lambda x: x.norm(**LENGTH).clamp_(min=0.5), None),
    "of nothing of it": (lambda x: (x.norm(**LENGTH) * 0.0).clamp(min=0.5), None),
    "of infinitely much of it": (lambda x: (x.norm(**LENGTH) / 0.0).clamp(min=0.5), None),
    "of a negative multiple": (lambda x: (x.norm(**LENGTH) * -1).clamp(min=0.5), None),
    "of a multiple that is a tensor": (lambda x: (x.norm(**LENGTH) * x).clamp(min=0.5), None),
    "of a sum": (lambda x: (x.norm(**LENGTH) + 1).clamp(min=0.5), None),
    "of no length": (lambda x: x.sum(**LENGTH).clamp(min=0.5), None),
    "of the operand": (lambda x: x.clamp(min=0.5), None),
}


@pytest.mark.parametrize("name", BOUNDS)
def test_the_bound_of_a_length(name: str) -> None:
    run, bound = BOUNDS[name]
    _, x, _, made = recorded(lambda x, _: run(x))
    assert made.producer is not None
    assert bound_of(made.producer) == bound
    assert (Trial({x: rows(x)}).of(made) is not None) is (bound is not None)


def test_a_bound_shows_on_random_numbers_in_the_place_of_a_length() -> None:
    """What begins at a length would overlook one that no length goes below."""
    recording, _, _, made = recorded(lambda x, _: x.norm(**LENGTH).clamp(min=1e-12) * 2)
    length = next(node.output for node in recording.nodes if node.op == "norm")
    found = region(made, (length,))
    assert found is not None
    assert not Proofs().proves(found.nodes, made, found.given, lambda x: 2 * x)


def test_a_loss_that_is_gone_is_known_without_its_weights() -> None:
    """A module that is made for one call has settings that are asked for later, and a tensor that goes."""
    weights = []

    def run(x: Tensor, _: Tensor) -> Tensor:
        weights.append(weakref.ref(held := torch.rand(8)))
        loss = torch.nn.CrossEntropyLoss(weight=held, ignore_index=3, label_smoothing=0.1)
        return loss(x.flatten(0, 1), torch.zeros(12, dtype=torch.long))

    recording, *_ = recorded(run)
    caller = next(node.caller for node in recording.nodes if node.op == "cross_entropy")
    assert weights[0]() is None
    assert type(caller) is torch.nn.CrossEntropyLoss
    assert (caller.ignore_index, caller.label_smoothing, caller.reduction) == (3, 0.1, "mean")
    assert list(caller.buffers()) == []


@pytest.mark.parametrize("more", [torch.nn.Linear(8, 8), torch.nn.Identity(), torch.ones(8), [torch.ones(8)]])
def test_a_loss_that_is_gone_and_held_more_is_not_known(more: object) -> None:
    """Nothing of the user's is kept for it."""

    def run(x: Tensor, _: Tensor) -> Tensor:
        loss = torch.nn.CrossEntropyLoss(weight=torch.rand(8))
        loss.more = more  # type: ignore[assignment]
        return loss(x.flatten(0, 1), torch.zeros(12, dtype=torch.long))

    recording, *_ = recorded(run)
    assert [node.caller for node in recording.nodes if node.op == "cross_entropy"] == [None]
    assert not recording.live.callers


@pytest.mark.parametrize("made", [lambda: torch.nn.Linear(8, 4), lambda: torch.nn.BatchNorm1d(4, affine=False)])
def test_a_module_with_parameters_or_buffers_that_is_gone_is_not_known(made: Callable[[], torch.nn.Module]) -> None:
    recording, *_ = recorded(lambda x, _: made()(x))
    assert [node.caller for node in recording.nodes if node.op in {"linear", "batch_norm"}] == [None]


def test_a_loss_that_lives_is_itself() -> None:
    loss = torch.nn.CrossEntropyLoss(weight=torch.rand(8))
    recording, *_ = recorded(lambda x, _: loss(x.flatten(0, 1), torch.zeros(12, dtype=torch.long)))
    assert next(node.caller for node in recording.nodes if node.op == "cross_entropy") is loss
