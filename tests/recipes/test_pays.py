"""From which sizes on a recipe's own code runs: the rule that ``auto`` goes by, and what it says of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gradscope import recipes
from gradscope.diagnose.rules.recipes.attention import _FEWEST_WIDE, FEWEST_ON_CPU
from gradscope.kernels import pays

pytestmark = pytest.mark.measured_sizes
T = torch.zeros(32, dtype=torch.int64)
TABLES = (torch.ones(512, 8), torch.zeros(512, 8))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.empty(shape).requires_grad_() for shape in shapes]


# (function, arguments that are too few for own code, and enough).
SMALL: list[tuple[str, Callable[[], Any], Callable[[], Any] | None]] = [
    (
        "cross_entropy",
        lambda: (*tensors((32, 65)), T),
        lambda: (*tensors((6144, 1000)), torch.zeros(6144, dtype=torch.int64)),
    ),
    (
        "linear_cross_entropy",
        lambda: (*tensors((32, 8), (65, 8)), T),
        lambda: (*tensors((1024, 8), (50257, 8)), torch.zeros(1024, dtype=torch.int64)),
    ),
    ("rms_norm", lambda: (*tensors((32, 64)), (64,)), lambda: (*tensors((4096, 768)), (768,))),
    ("add_rms_norm", lambda: tensors((32, 64), (32, 64)), lambda: tensors((4096, 768), (4096, 768))),
    ("add_layer_norm", lambda: tensors((32, 64), (32, 64)), None),
    ("swiglu", lambda: tensors((32, 64), (32, 64)), lambda: tensors((2048, 2048), (2048, 2048))),
    ("swiglu", lambda: tensors((32, 64)), lambda: tensors((2048, 4096))),
    ("geglu", lambda: tensors((2048, 2048), (2048, 2048)), None),
    ("bias_gelu", lambda: tensors((32, 64), (64,)), None),
    ("rope", lambda: (*tensors((1, 4, 16, 16)), *TABLES), lambda: (*tensors((1, 16, 512, 16)), *TABLES)),
    (
        "attention",
        lambda: (*tensors(*[(1, 4, 64, 8)] * 3), None, 0.1),
        lambda: (*tensors(*[(1, 4, 1024, 8)] * 3), None, 0.1),
    ),
    ("packed_attention", lambda: (*tensors((1, 64, 24)), 2), lambda: (*tensors((1, 512, 24)), 2)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "few", "many"), SMALL, ids=[name for name, *_ in SMALL])
def test_few_are_torchs_and_many_are_ours(name: str, few: Callable[[], Any], many: Callable[[], Any] | None) -> None:
    function = getattr(recipes, name)
    choice = function.explain(*few())
    assert choice.backend in ("torch", "math", "attention")
    assert "torch's own is " in choice.refused["cpu"]
    assert function.explain(*few(), backend="cpu").backend == "cpu"
    if many is not None:
        assert function.explain(*many()).backend == "cpu"


ALONE = [(name, few) for name, few, _ in SMALL if "attention" not in name]


@pytest.mark.parametrize(("name", "few"), ALONE, ids=[name for name, _ in ALONE])
def test_few_run_as_explain_says(name: str, few: Callable[[], Any]) -> None:
    """The way that skips the checks gives torch's numbers, and no Function of ours runs."""
    function = getattr(recipes, name)
    given = [x.data.normal_().requires_grad_() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in few()]
    found, torchs = function(*given), function(*given, backend="torch")
    pairs = zip(found, torchs, strict=True) if isinstance(found, tuple) else [(found, torchs)]
    for one, other in pairs:
        assert not isinstance(one.grad_fn, torch.autograd.function.BackwardCFunction)
        torch.testing.assert_close(one, other, rtol=0, atol=0)


X, WEIGHT, WRONG = torch.zeros(3, 4), torch.zeros(4, 2), torch.tensor([0, 4, 1])
NO_CLASS = "target contains 4; expected a class in [0, 4) or ignore_index=-100"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: recipes.cross_entropy(X, WRONG), f"cross_entropy: {NO_CLASS}"),
        (lambda: recipes.cross_entropy(X, WRONG, torch.ones(4)), f"cross_entropy: {NO_CLASS}"),
        (
            lambda: recipes.cross_entropy(X, WRONG[:2]),
            "cross_entropy: target is of shape (2,); expected (3,) for input of shape (3, 4)",
        ),
        (lambda: recipes.linear_cross_entropy(X[:, :2], WEIGHT, WRONG), f"linear_cross_entropy: {NO_CLASS}"),
        (lambda: recipes.dropout(X, 1.5), "dropout: p is 1.5; expected a number in [0, 1]"),
    ],
)
def test_what_is_wrong_with_few_is_said_as_with_many(wrong: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        wrong()


def test_what_the_diagnosis_goes_by() -> None:
    """The larger of both numbers of threads: a report may be read elsewhere than it was made."""
    rules = {
        (True, False, False): "attention with dropout",
        (True, True, False): "attention with dropout and a mask",
        (True, True, True): "attention with a learnt bias and dropout",
        (False, True, True): "attention with a learnt bias",
    }
    assert {key: max(pays.FEWEST[name]["scores"]) for key, name in rules.items()} == FEWEST_ON_CPU
    assert max(pays.FEWEST["attention with wide values"]["scores"]) == _FEWEST_WIDE


def test_words() -> None:
    assert (
        pays.against("linear_cross_entropy", logits=10, rows=1) == "fewer than 3,000,000 logits: torch's own is faster"
    )
    assert pays.against("packed_attention with held scores", scores=10**6) == "torch's own is as fast"
    assert pays.against("packed_attention", tokens=4096) == "more than 768 tokens: torch's own is as fast"
    assert pays.against("no recipe", tokens=4096) is None


def test_threads_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pays, "FEWEST", {"dropout": {"elements": (8_000, 1_000)}})
    assert pays.against("dropout", elements=2_000) == (
        "fewer than 8,000 elements: torch's own is faster with one thread"
    )
    torch.set_num_threads(2)
    assert pays.against("dropout", elements=2_000) is None
    assert pays.against("dropout", elements=500) == (
        "fewer than 1,000 elements: torch's own is faster with several threads"
    )
