"""Attention from a packed projection to merged heads: found in the corpus, replaced exactly, and put back."""

from __future__ import annotations

import pytest
import torch

from tests.patching import swapped
from tests.patching.corpus import (
    attention_heads,
    attention_packed,
    attention_sdpa,
    lookalikes_attention,
    transformers_encoders,
    transformers_gpt,
    transformers_rotary,
    transformers_seq2seq,
)
from tests.patching.corpus.entry import Entry

ENTRIES: list[Entry] = [
    *attention_packed.ENTRIES,
    *transformers_gpt.ENTRIES,
    *transformers_encoders.ENTRIES,
    *transformers_rotary.ENTRIES,
    *transformers_seq2seq.ENTRIES,
    *attention_heads.ENTRIES,
    *attention_sdpa.ENTRIES,
]
FOUND = [entry for entry in ENTRIES if any(recipe == "packed_attention" for _, recipe in entry.sites)]
OTHERS = [entry for entry in ENTRIES if entry not in FOUND]
LOOKALIKES = lookalikes_attention.ENTRIES
RECIPES = ("packed_attention",)
BOTH = ("packed_attention", "attention")

# float32: sums over 20 keys and up to 112 features in another order, through two layers.
_TOLERANCE = 5e-6


@pytest.mark.parametrize("entry", FOUND, ids=lambda entry: entry.name)
def test_found_at_its_sites_and_exact(entry: Entry) -> None:
    """And the attention of the same lines is not listed."""
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, BOTH)
    wanted = sorted(site for site in entry.sites if site[1] in BOTH)
    assert sorted((site.path, site.recipe) for site in found.sites) == wanted
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


@pytest.mark.parametrize("entry", [*FOUND[:10], *FOUND[-1:]], ids=lambda entry: entry.name)
def test_found_in_evaluation_too(entry: Entry) -> None:
    model, batch = swapped.built(entry, dropout=True)
    in_training = [(site.path, site.line) for site in swapped.planned(entry, model, batch, RECIPES).supported]
    found = swapped.planned(entry, model.eval(), batch, RECIPES)
    assert [(site.path, site.line) for site in found.supported] == in_training
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


@pytest.mark.parametrize("entry", OTHERS, ids=lambda entry: entry.name)
def test_not_found_elsewhere(entry: Entry) -> None:
    model, batch = swapped.built(entry)
    assert not swapped.planned(entry, model, batch, RECIPES).supported


@pytest.mark.parametrize("entry", LOOKALIKES, ids=lambda entry: entry.name)
def test_not_found_in_lookalikes(entry: Entry) -> None:
    model, batch = swapped.built(entry)
    assert not swapped.planned(entry, model, batch, RECIPES).supported


def test_refused_chain_gives_way_to_attention() -> None:
    """The chain is spread over methods; the attention inside is not."""
    entry = swapped.named(attention_packed.ENTRIES, "packed, helpers around")
    model, batch = swapped.built(entry)
    (alone,) = swapped.planned(entry, model, batch, RECIPES).sites
    assert alone.reasons == ["the result of view is computed in _merge_heads"]
    (other,) = swapped.planned(entry, model, batch, BOTH).sites
    assert (other.recipe, other.supported) == ("attention", True)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "packed, split",
            [
                "from gradscope.recipes import attention_mask, packed_attention",
                "qkv_ = self.c_attn(x)",
                "y = packed_attention(",
                "qkv_,",
                "self.n_head,",
                "dropout_p=self.attn_dropout.p if self.attn_dropout.training else 0.0,",
                '**attention_mask(self.bias[:, :, :T, :T], hides="zero"),',
                ")  # re-assemble all head outputs side by side",
            ],
        ),
        (
            "packed, slices",
            [
                "from gradscope.recipes import packed_attention",
                "return self.c_proj(packed_attention(qkv, self.n_head, scale=(C // self.n_head) ** -0.5))",
            ],
        ),
        (
            "packed, grouped, SDPA",
            [
                "from gradscope.recipes import packed_attention",
                "qkv_ = self.wqkv(x)",
                "y = packed_attention(qkv_, self.n_head, is_causal=True, kv_heads=self.n_local_heads)",
            ],
        ),
    ],
)
def test_text(name: str, lines: list[str]) -> None:
    assert swapped.changed_lines(swapped.named(attention_packed.ENTRIES, name), RECIPES) == lines


def test_mask_that_changes_later_is_seen() -> None:
    """The replaced code looks at the mask's content in every step."""
    entry = swapped.named(attention_packed.ENTRIES, "packed, split")
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    with torch.no_grad():
        model.bias[..., 5, 9] = 1.0
        model.bias[..., 7, :4] = 0.0
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


def test_other_lengths_and_batches() -> None:
    entry = swapped.named(attention_packed.ENTRIES, "packed, unbind einsum")
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    for shape in ((1, 1, 48), (3, 7, 48), (2, 32, 48)):
        swapped.assert_exact(entry, model, torch.randn(shape), found, _TOLERANCE)
