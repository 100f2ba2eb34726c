"""Formulas in canonical form: equal ones are equal, others are not, and the form keeps the value."""

from __future__ import annotations

import math
import random

import pytest
import torch

from gradscope.patching import algebra
from gradscope.patching.again import evaluate
from gradscope.patching.algebra import Sum, TooLongError, add, close, mean, number, power, scaled, sigmoid, tanh, times

X, Y, W = algebra.tensor(1), algebra.tensor(2), algebra.tensor(3)
ROW = algebra.tensor(4, varies=False)
ONE = number(1.0)
MEAN = mean(X)


def minus(one: Sum, other: Sum) -> Sum:
    return add(one, scaled(other, -1))


def over(one: Sum, other: Sum) -> Sum:
    return times(one, power(other, -1))


EQUAL = {
    "sums are sorted": (add(X, Y, W), add(W, X, Y)),
    "products are sorted": (times(times(X, Y), W), times(W, times(Y, X))),
    "products of sums are multiplied out": (
        times(add(X, Y), minus(X, Y)),
        minus(power(X, 2), power(Y, 2)),
    ),
    "a cube": (power(X, 3), times(X, times(X, X))),
    "numbers are folded": (scaled(scaled(X, 3), 0.5), scaled(X, 1.5)),
    "a difference to itself": (minus(X, X), number(0.0)),
    "a quotient": (over(times(X, Y), Y), X),
    "a root squared": (power(power(add(X, ONE), 0.5), 2), add(X, ONE)),
    "a root of a scaled sum": (
        power(scaled(add(power(X, 2), ONE), 9.0), -0.5),
        scaled(power(add(power(X, 2), ONE), -0.5), 1 / 3),
    ),
    "the root of a mean square taken apart": (
        power(scaled(mean(power(X, 2)), 16), 0.5),
        scaled(power(mean(power(X, 2)), 0.5), 4),
    ),
    "tanh of the opposite": (tanh(scaled(X, -1)), scaled(tanh(X), -1)),
    "tanh by the logistic function": (tanh(X), minus(scaled(sigmoid(scaled(X, 2)), 2), ONE)),
    "the logistic function by exp": (sigmoid(X), power(add(ONE, algebra.exp(scaled(X, -1))), -1)),
    "the logistic function of the opposite": (sigmoid(scaled(X, -1)), minus(ONE, sigmoid(X))),
    "erf of the opposite": (algebra.erf(scaled(X, -1)), scaled(algebra.erf(X), -1)),
    "silu": (algebra.silu(X), over(X, add(ONE, algebra.exp(scaled(X, -1))))),
    "a mean of means": (mean(MEAN), MEAN),
    "what does not vary leaves the mean": (mean(times(ROW, X)), times(ROW, MEAN)),
    "the variance": (mean(power(minus(X, MEAN), 2)), minus(mean(power(X, 2)), power(MEAN, 2))),
    "gelu by the logistic function": (
        algebra.gelu(X, "tanh"),
        times(X, sigmoid(scaled(add(X, scaled(power(X, 3), 0.044715)), 2 * math.sqrt(2 / math.pi)))),
    ),
}

OTHERS = {
    "another number": (scaled(X, 1.0), scaled(X, 1.00001)),
    "another number inside": (sigmoid(scaled(X, 1.702)), sigmoid(X)),
    "another power": (power(X, 3), power(X, 4)),
    "another tensor": (times(X, X), times(X, Y)),
    "the root of a square is the size, not the number": (power(power(X, 2), 0.5), X),
    "a mean of products": (mean(times(X, Y)), times(mean(X), mean(Y))),
    "a number beside the root": (
        add(power(mean(power(X, 2)), 0.5), number(1e-6)),
        power(add(mean(power(X, 2)), number(1e-6)), 0.5),
    ),
    "erf and tanh": (algebra.gelu(X, "none"), algebra.gelu(X, "tanh")),
    "a variance and a mean square": (mean(power(minus(X, MEAN), 2)), mean(power(X, 2))),
    "nothing and something tiny": (number(0.0), number(1e-12)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_formulas_are_equal(name: str) -> None:
    one, other = EQUAL[name]
    assert close(one, other, 1e-12)
    assert one.key == other.key


@pytest.mark.parametrize("name", OTHERS)
def test_other_formulas_are_not(name: str) -> None:
    one, other = OTHERS[name]
    assert not close(one, other)
    assert one.key != other.key


@pytest.mark.parametrize(("by", "same"), [(1 + 9e-7, True), (1 + 2e-6, False), (-1.0, False)])
def test_numbers_agree_relatively(by: float, same: bool) -> None:
    wanted = times(X, sigmoid(add(X, scaled(power(X, 3), 0.044715))))
    found = times(X, sigmoid(add(X, scaled(power(X, 3), 0.044715 * by))))
    assert close(found, wanted) is same


def test_leaves_and_constant() -> None:
    formula = add(times(X, power(add(mean(power(Y, 2)), number(0.25)), -0.5)), number(3.0))
    assert formula.leaves == {1, 2}
    assert formula.constant == 3.0
    assert not ROW.varies
    assert times(ROW, X).varies


@pytest.mark.parametrize(
    "make",
    [
        lambda: power(number(0.0), -1),
        lambda: power(scaled(power(mean(power(X, 2)), 1), -1.0), 0.5),
        lambda: power(add(*(algebra.tensor(index) for index in range(40))), 4),
    ],
)
def test_what_is_no_formula(make: object) -> None:
    with pytest.raises(TooLongError):
        make()  # type: ignore[operator]


TENSORS = {
    index: torch.randn(3, size, dtype=torch.float64, generator=torch.Generator().manual_seed(index))
    for index, size in ((1, 8), (2, 8), (3, 8), (4, 1))
}


@pytest.mark.parametrize("seed", range(40))
def test_the_form_keeps_the_value(seed: int) -> None:
    """Formulas made at random have the value of the same steps done on tensors."""
    choose = random.Random(seed)
    formulas = [(algebra.tensor(index, varies=index != 4), tensor) for index, tensor in TENSORS.items()]
    steps = {
        "add": lambda one, other: (add(one[0], other[0]), one[1] + other[1]),
        "mul": lambda one, other: (times(one[0], other[0]), one[1] * other[1]),
        "half": lambda one, _: (scaled(one[0], -0.5), -0.5 * one[1]),
        "square": lambda one, _: (power(one[0], 2), one[1] ** 2),
        "mean": lambda one, _: (mean(one[0]), one[1].mean(-1, keepdim=True)),
        "tanh": lambda one, _: (tanh(one[0]), one[1].tanh()),
        "silu": lambda one, _: (algebra.silu(one[0]), torch.nn.functional.silu(one[1])),
        "erf": lambda one, _: (algebra.erf(one[0]), one[1].erf()),
        "root": lambda one, _: (power(add(power(one[0], 2), ONE), -0.5), (one[1] ** 2 + 1) ** -0.5),
    }
    for _ in range(7):
        step = steps[choose.choice(list(steps))]
        try:
            formulas.append(step(choose.choice(formulas), choose.choice(formulas)))
        except TooLongError:
            continue
    for formula, truth in formulas:
        found = evaluate(formula, TENSORS).expand(torch.broadcast_shapes(truth.shape, (1,)))
        # Multiplied out, a formula adds and takes off numbers up to a thousand times its value.
        torch.testing.assert_close(found.expand_as(truth), truth, rtol=1e-9, atol=1e-9)
