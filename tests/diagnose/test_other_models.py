"""Models as others write them, each in its smallest form: what their findings once got wrong, or missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscope.diagnose.case import Case, StepFacts
from gradscope.diagnose.findings import is_of_a_library
from gradscope.diagnose.rules import RULES
from gradscope.diagnose.rules.recipes.places import put_in
from gradscope.tables import PlaceFact
from tests.diagnose import twins_recipes as twins
from tests.diagnose.run_case import DEAR_PRODUCTS, case_of, findings_of, in_case, of_rule, timed_by_operations

TABLE = "embedding-dense-gradient"


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    torch.manual_seed(0)


class Bags(nn.Module):
    """Tables of categories, as recommendation models have them."""

    def __init__(self, tables: int, rows: int = 40_000, **given: Any) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 16, **given) for _ in range(tables))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([table(ids) for table in self.tables], 1)


def test_tables_of_embedding_bags_are_one_finding() -> None:
    found = findings_of(Bags(5), torch.randint(40_000, (64, 3)))
    (one,) = of_rule(TABLE, found)
    assert one.message.startswith("The gradients of tables.0.weight, tables.1.weight and 3 more are dense")
    assert one.layers == tuple(f"tables.{index}" for index in range(5))
    assert "192 of 40.0 k rows" in one.evidence and "each of 5 tables" in one.evidence
    make, optimize = one.code.split("; ")
    assert make == 'nn.EmbeddingBag(40000, 16, mode="mean", sparse=True)'
    assert len(eval(optimize, {"torch": torch, "nn": nn, "model": Bags(5, sparse=True)}).param_groups[0]["params"]) == 5
    assert not of_rule("backward-ratio", found)  # it is the size of the table, not its rows


@pytest.mark.parametrize("model", [Bags(1), nn.Sequential(Bags(1))], ids=["in a list", "in a sequence"])
def test_one_table_is_named_as_python_would(model: nn.Module) -> None:
    (one,) = of_rule(TABLE, findings_of(model, torch.randint(40_000, (64, 3))))
    optimize = one.code.split("; ")[1]
    weight = eval(optimize, {"torch": torch, "model": model}).param_groups[0]["params"][0]
    assert weight is next(model.parameters())


@pytest.mark.parametrize("given", [{"sparse": True}, {"mode": "max"}, {"rows": 500}], ids=str)
def test_embedding_bags_that_are_as_they_should_be(given: dict[str, Any]) -> None:
    rows = given.get("rows", 40_000)
    assert not of_rule(TABLE, findings_of(Bags(2, **given), torch.randint(rows, (64, 3))))


class Feed(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(8 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Again(nn.Module):
    """Blocks that are run again in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(64, 64)
        self.blocks = nn.ModuleList(Feed() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_names_the_blocks_that_are_run_again(reentrant: bool) -> None:
    case = timed_by_operations(case_of(Again(reentrant), torch.randn(512, 64)), dear=DEAR_PRODUCTS)
    (found,) = in_case(case, "checkpoint-share")
    assert found.layers == ("blocks.0", "blocks.1", "blocks.2")
    if reentrant:
        assert "x = checkpoint(block, x," in case.lines[str(found.line)].text
    ops = [replace(op, self_ns=1) if "mm" in op.name and op.phase == "recompute" else op for op in case.run.ops]
    (cheap,) = in_case(Case(replace(case.run, ops=ops), case.facts), "checkpoint-share")
    assert "checkpoint fewer layers: blocks.0, blocks.1, blocks.2 take " in cheap.advice
    assert cheap.advice.endswith(" each on average.")


class OwnNorm(nn.Module):
    """A normalisation in a class of the user's own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias)


class OwnGelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = OwnNorm(64), Feed()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x))


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 512), OwnGelu(), nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


@pytest.mark.parametrize(
    ("model", "code"),
    [
        (Block, "self.mlp.up(self.norm(h))"),
        (Feed, 'self.down(F.gelu(h, approximate="tanh"))'),
        (Activated, "self.down(self.act(h))"),
        (lambda: nn.Sequential(Block(), Block()), "self.mlp.up(self.norm(h))"),
    ],
    ids=["norm of the block above", "a function", "a function in a layer of its own", "in a sequence"],
)
def test_what_is_checkpointed_is_named_as_its_holder_calls_it(model: Callable[[], nn.Module], code: str) -> None:
    found = of_rule("saved-activation-inputs", findings_of(model(), torch.randn(64, 64)))
    assert f"checkpoint(lambda h: {code}, h, use_reentrant=False)" in [each.code for each in found]


class Scan(nn.Module):
    """A recurrence over two tensors on one line."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate(x), self.value(x)
        state = torch.zeros_like(x[:, 0])
        for i in range(x.shape[1]):
            state = gate[:, i] * state + value[:, i]
        return state


def test_two_tensors_on_one_line_are_both_named() -> None:
    (found,) = of_rule("slices-zero-filled", findings_of(Scan(), torch.randn(4, 24, 16)))
    assert found.evidence.startswith("24 slices of each of gate and value, of shape 4x24x16; ")
    assert found.code == "gate_parts = gate.unbind(1); value_parts = value.unbind(1)"


class LastStates(nn.Module):
    """The last states of both directions; the layer adds gradients of its own, of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(16, 32, bidirectional=True)
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        _, (h, _) = self.layer(x)
        return self.head(torch.cat([h[-2], h[-1]], 1))


def test_sums_inside_a_recurrent_layer_are_not_those_of_its_parts() -> None:
    case = case_of(LastStates(), torch.randn(64, 4, 16))
    for found in in_case(case, "slices-zero-filled"):
        assert found.severity == "info"
        assert found.code.endswith("x.unbind(0)")
    # Whatever the layer's own sums take.
    sums = [replace(op, self_ns=10**9) if op.phase == "gradient_sum" else op for op in case.run.ops]
    for found in in_case(Case(replace(case.run, ops=sums), case.facts), "slices-zero-filled"):
        assert (found.predicted_saving_ns or 0) < 10**8


def test_a_line_that_a_recipe_rewrites_is_left_to_the_recipe() -> None:
    """Also where one of the layers that run it is no place: without a gradient for the keys, say."""
    case = case_of(twins.Rotary(tokens=64), torch.randn(2, 64, 16))
    (place,) = case.facts.places
    kept = tuple(index for index in place.calls if case.call(index).op != "getitem")
    facts = replace(case.facts, places=(replace(place, calls=kept),))
    assert not in_case(Case(case.run, facts), "slices-zero-filled")
    assert in_case(Case(case.run, replace(facts, places=())), "slices-zero-filled")


def test_a_librarys_line_is_not_to_be_edited() -> None:
    place = PlaceFact(
        recipe="gelu",
        function="gelu",
        layer="h.0",
        source=".venv/lib/site-packages/transformers/activations.py:66",
        supported=True,
        reasons=(),
        idle="",
        calls=(),
        new_text="return gradscope_gelu(input)",
    )
    assert is_of_a_library(place.source) and not is_of_a_library("model.py:12") and not is_of_a_library(None)
    assert (
        put_in(place)
        == "This line is in an installed package: call gradscope.patch to swap in gelu for this model only."
    )
    assert "with `from gradscope.recipes import gelu as gradscope_gelu`; " in put_in(
        replace(place, source="model.py:12")
    )


def test_a_few_bytes_are_not_spoken_of() -> None:
    case = case_of(twins.GeluByHand(), torch.randn(4096, 16))
    places = [replace(each, predicted_saving_ns=10_000, predicted_saving_bytes=8) for each in case.facts.places]
    (found,) = RULES["activation-by-hand"].find(Case(case.run, StepFacts(case.facts.calls, places, recorded=True)))
    assert "are held" not in found.evidence


class Residual(nn.Module):
    """A residual sum before a normalisation, without dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(256, 256), nn.LayerNorm(256), dropout

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.dropout:
            y = F.dropout(y, self.dropout)
        x = x + y
        return self.norm(x)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_dropout_is_spoken_of_where_there_is_one(dropout: float) -> None:
    found = of_rule("norm-by-hand", findings_of(Residual(dropout), torch.randn(2048, 256)))
    assert all(("dropout" in each.message) == bool(dropout) for each in found)
