"""Tied embeddings: found in the corpus, replaced exactly, and put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradscope.patching.plan import plan
from tests.patching import swapped
from tests.patching.corpus import (
    lookalikes_losses,
    losses,
    losses_spelled,
    transformers_encoders,
    transformers_gpt,
    transformers_rotary,
    transformers_seq2seq,
)
from tests.patching.corpus.entry import Entry

RECIPES = ("embedding",)
ENTRIES: list[Entry] = [
    *losses.ENTRIES,
    *losses_spelled.ENTRIES,
    *transformers_encoders.ENTRIES,
    *transformers_gpt.ENTRIES,
    *transformers_rotary.ENTRIES,
    *transformers_seq2seq.ENTRIES,
]
FOUND = [entry for entry in ENTRIES if any(recipe == "embedding" for _, recipe in entry.sites)]
OTHERS = [entry for entry in ENTRIES if entry not in FOUND]

# float32: the same rows are added to the gradient in another order.
_TOLERANCE = 1e-6


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("entry", FOUND, ids=lambda entry: entry.name)
def test_found_at_its_sites_and_exact(entry: Entry, train: bool) -> None:
    model, batch = swapped.built(entry)
    model.train(train)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == sorted(site for site in entry.sites if site[1] in RECIPES)
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


@pytest.mark.parametrize("entry", [*OTHERS, *lookalikes_losses.ENTRIES], ids=lambda entry: entry.name)
def test_not_found_elsewhere(entry: Entry) -> None:
    model, batch = swapped.built(entry)
    assert set(swapped.supported(swapped.planned(entry, model, batch, RECIPES))) <= set(entry.sites)


@pytest.mark.parametrize(
    ("entries", "name", "lines"),
    [
        (
            losses.ENTRIES,
            "tied_by_assignment",
            [
                "from gradscope.recipes import embedding",
                "x = torch.tanh(self.fc(embedding(idx, self.wte.weight)))",
            ],
        ),
        (
            losses.ENTRIES,
            "tied_by_function",
            [
                "from gradscope.recipes import embedding",
                "h = torch.relu(self.layer(embedding(tokens, self.tok_embeddings.weight) * WIDTH**0.5))",
            ],
        ),
        (
            transformers_encoders.ENTRIES,
            "bert",
            [
                "from gradscope.recipes import embedding",
                "words_embeddings = embedding(",
                "input_ids,",
                "self.word_embeddings.weight,",
                "padding_idx=self.word_embeddings.padding_idx,",
                ")",
            ],
        ),
    ],
    ids=["assignment", "function", "padding"],
)
def test_text(entries: list[Entry], name: str, lines: list[str]) -> None:
    assert swapped.changed_lines(swapped.named(entries, name), RECIPES) == lines


class _Tied(nn.Module):
    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6, **settings)  # type: ignore[arg-type]
        self.bias = nn.Parameter(torch.zeros(11))

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) @ self.tokens.weight.t() + self.bias


class _Plain(nn.Module):
    """A function, and a head by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(11, 6))

    def forward(self, ids: Tensor) -> Tensor:
        return torch.einsum("btd,vd->btv", F.embedding(ids, self.table, 3), self.table)


class _Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


class _TiedScaled(_Tied):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = _Scaled(11, 6, padding_idx=2)


class _InSequential(nn.Module):
    """The embedding is called by torch's own code: no expression of this file is it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(ids) @ self.net[0].weight.t()


_LINE = _InSequential.forward.__code__.co_firstlineno + 1


def _hooked() -> nn.Module:
    model = _Tied()
    model.tokens.register_forward_hook(lambda module, args, output: output * 2)
    return model


def _frozen() -> nn.Module:
    model = _Tied()
    model.tokens.requires_grad_(False)
    return model


def _half() -> nn.Module:
    return _Tied(dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("build", "reasons"),
    [
        (_Tied, []),
        (_Plain, []),
        (lambda: _Tied(max_norm=1.0), ["the embedding uses max_norm, which only its own kernel supports"]),
        (
            lambda: _Tied(scale_grad_by_freq=True),
            ["the embedding uses scale_grad_by_freq, which only its own kernel supports"],
        ),
        (_hooked, ["the Embedding has hooks, which would no longer be called"]),
        (_InSequential, [f"line {_LINE}: the same call also runs linear"]),
        (_frozen, None),
        (_half, None),
    ],
)
def test_settings(build: Callable[[], nn.Module], reasons: list[str] | None) -> None:
    """None: nothing is found."""
    found = plan(build(), torch.tensor([[1, 3, 3], [10, 0, 1]]), lambda output, batch: output.sum(), recipes=RECIPES)
    assert [site.reasons for site in found.sites] == ([] if reasons is None else [reasons])


@pytest.mark.parametrize(("build", "path"), [(_Plain, ""), (_TiedScaled, "tokens")])
def test_padding_is_exact(build: Callable[[], nn.Module], path: str) -> None:
    """In a function, and in a module that widens torch's."""
    entry = Entry("padding", lambda: (build(), torch.tensor([[1, 3, 3], [10, 2, 1]])))
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [(path, "embedding")]
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)
