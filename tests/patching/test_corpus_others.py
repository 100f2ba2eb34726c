"""The corpus itself: every model builds, runs forward and backward, and gives finite gradients."""

from __future__ import annotations

import functools
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gradscope.recipes.rope import rope
from gradscope.workload.step import call_model, scalar_loss
from tests.patching.corpus import (
    activations,
    gated_gelus,
    lookalikes_attention,
    lookalikes_layers,
    lookalikes_losses,
    lookalikes_source,
    losses,
    losses_spelled,
    norms,
    residuals,
    ropes,
)
from tests.patching.corpus.entry import Entry

POSITIVES = [
    *losses.ENTRIES,
    *(entry for entry in losses_spelled.ENTRIES if not entry.refused),
    *activations.ENTRIES,
    *(entry for entry in gated_gelus.ENTRIES if not entry.refused),
    *norms.ENTRIES,
    *residuals.ENTRIES,
    *ropes.ENTRIES,
]
LOOKALIKES = [
    *lookalikes_attention.ENTRIES,
    *lookalikes_losses.ENTRIES,
    *(entry for entry in losses_spelled.ENTRIES if entry.refused),
    *(entry for entry in gated_gelus.ENTRIES if entry.refused),
    *lookalikes_layers.ENTRIES,
    *lookalikes_source.ENTRIES,
]
ENTRIES = POSITIVES + LOOKALIKES
RECIPES = {
    "attention",
    "packed_attention",
    "linear_cross_entropy",
    "cross_entropy",
    "gelu",
    "bias_gelu",
    "geglu",
    "swiglu",
    "rms_norm",
    "layer_norm",
    "add_norm",
    "rope",
    "embedding",
}


def _step(entry: Entry) -> tuple[torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(7)
    model, batch = entry.build()
    model.train(entry.train)
    loss, _ = scalar_loss(call_model(model, batch), batch, entry.loss)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_every_model_trains(entry: Entry) -> None:
    loss, gradients = _step(entry)
    assert loss.isfinite()
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_a_seed_gives_the_same_step(entry: Entry) -> None:
    """Two builds under one seed agree bit for bit, so that a patched model can be compared with an unpatched one."""
    if entry.name == "like_scripted":
        _step(entry)  # TorchScript optimises its code after the first run in a process, and then adds in another order
    first, second = _step(entry), _step(entry)
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(a, b) for a, b in zip(first[1], second[1], strict=True))


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_expected_sites_are_of_modules_there(entry: Entry) -> None:
    model, _ = entry.build()
    paths = {path for path, _ in model.named_modules()}
    assert {path for path, _ in entry.sites} <= paths
    assert {recipe for _, recipe in entry.sites} <= RECIPES


def test_names_are_unique() -> None:
    names = [entry.name for entry in ENTRIES]
    assert len(set(names)) == len(names)


def test_positives_have_sites_and_lookalikes_a_reason() -> None:
    assert [entry.name for entry in POSITIVES if not entry.sites] == ["dropout_residual_norm_elsewhere"]
    assert not [entry.name for entry in LOOKALIKES if not entry.refused]


def test_every_recipe_but_attention_has_positives() -> None:
    found = {recipe for entry in POSITIVES for _, recipe in entry.sites}
    assert found == RECIPES - {"attention", "packed_attention"}


# --------------------------------------------------------------------------------------------------------------------
# A positive is the function it is listed as; a look-alike of it is not
# --------------------------------------------------------------------------------------------------------------------

_WIDE = 3 * torch.linspace(-1.0, 1.0, 2 * 5 * 56).view(2, 5, 56).sin()


def _tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


@pytest.mark.parametrize(
    ("function", "truth"),
    [
        (activations.NewGELU(), _tanh_gelu),
        (activations.gelu_by_products, _tanh_gelu),
        (lambda x: activations.CubeByProducts.gelu(x, math.sqrt(2 / math.pi)), _tanh_gelu),
        (activations.StepByStep(), _tanh_gelu),
        (activations.gelu, F.gelu),
        (activations.SpecialErf(), F.gelu),
        (activations.GELUModule(), F.gelu),
        (lambda x: activations.bias_gelu(torch.full((56,), 0.2), x), lambda x: _tanh_gelu(x + 0.2)),
        (activations.SwiGLU(), lambda x: F.silu(x[..., 28:]) * x[..., :28]),
        (activations.swiglu, lambda x: F.silu(x[..., :28]) * x[..., 28:]),
        (norms.NormScaled(56), lambda x: F.rms_norm(x, (56,), eps=0.0)),
        (norms.rms_norm, lambda x: F.rms_norm(x, (56,), eps=1e-6)),
        # in float64, for it takes the difference of two squares that are near each other
        (lambda x: norms.SquareOfMean()(x.double()).float(), lambda x: F.layer_norm(x, (56,))),
    ],
)
def test_positives_are_the_function(function: Any, truth: Any) -> None:
    if isinstance(function, norms.NormScaled):
        torch.nn.init.ones_(function.scale)
    # float32 rounding of a few operations on numbers up to 3
    torch.testing.assert_close(function(_WIDE), truth(_WIDE), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("norm", [norms.RMSNorm, norms.VarianceRMSNorm, norms.GemmaRMSNorm])
def test_weighted_root_mean_squares_are_the_function(norm: Any) -> None:
    module = norm(56)
    weight = module.weight + 1 if norm is norms.GemmaRMSNorm else module.weight
    eps = getattr(module, "eps", None) or module.variance_epsilon
    torch.testing.assert_close(module(_WIDE), F.rms_norm(_WIDE, (56,), weight, eps), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("norm", "eps"),
    [(norms.LayerNorm, 1e-5), (norms.BertLayerNorm, 1e-12), (norms.VarMean, 1e-5), (norms.BiasedStd, 0.0)],
)
def test_weighted_layer_norms_are_the_function(norm: Any, eps: float) -> None:
    module = norm(56)
    weight, bias = module.parameters()
    torch.testing.assert_close(module(_WIDE), F.layer_norm(_WIDE, (56,), weight, bias, eps), rtol=1e-5, atol=1e-5)


def test_ropes_are_the_recipe() -> None:
    x = torch.linspace(-2, 2, 2 * ropes.HEADS * ropes.TOKENS * ropes.SIZE).cos()
    x = x.view(2, ropes.HEADS, ropes.TOKENS, ropes.SIZE)
    cos, sin = ropes.angles(ropes.SIZE).cos(), ropes.angles(ropes.SIZE).sin()
    wide_cos, wide_sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    halves, pairs = rope(x, cos, sin), rope(x, cos, sin, interleaved=True)
    close = functools.partial(torch.testing.assert_close, rtol=1e-5, atol=2e-6)
    for found in ropes.apply_rotary_pos_emb(x, x, wide_cos[None], wide_sin[None]):
        close(found, halves)
    close(ropes.Rotary()(x), halves)
    close(ropes.apply_interleaved(x, cos, sin), pairs)
    tokens_first = x.transpose(1, 2)
    turned, _ = ropes.apply_rotary_emb(tokens_first, tokens_first, ropes.precompute_freqs_cis(ropes.SIZE, ropes.TOKENS))
    close(turned.transpose(1, 2), pairs)


@pytest.mark.parametrize(
    ("other", "likes"),
    [
        (lookalikes_layers.QuickGELU(), (F.gelu, _tanh_gelu)),
        (lookalikes_layers.OffConstant(), (F.gelu, _tanh_gelu)),
        (lookalikes_layers.OffRoot(), (F.gelu, _tanh_gelu)),
        (lookalikes_layers.SquareForCube(), (F.gelu, _tanh_gelu)),
        (lookalikes_layers.ErfWithoutRoot(), (F.gelu,)),
        (lookalikes_layers.ErfOfAnother(), (F.gelu,)),
        (lookalikes_layers.HalfTheChannels(), (F.gelu, _tanh_gelu)),
        (lookalikes_layers.OverTokens(), (lambda x: F.rms_norm(x, (56,)),)),
        (lookalikes_layers.EpsOutside(), (lambda x: F.rms_norm(x, (56,), eps=1e-2),)),
        (lookalikes_layers.SumForMean(), (lambda x: F.rms_norm(x, (56,)),)),
        (lookalikes_layers.PartialRms(), (lambda x: F.rms_norm(x, (56,)),)),
        (lookalikes_layers.AnnotatedLayerNorm(56), (lambda x: F.layer_norm(x, (56,), eps=1e-6),)),
        (lookalikes_layers.UnbiasedVariance(), (lambda x: F.layer_norm(x, (56,)),)),
        (lookalikes_layers.WrongMean(), (lambda x: F.layer_norm(x, (56,)),)),
        (lookalikes_layers.BatchStatistics(), (lambda x: F.layer_norm(x, (56,)),)),
    ],
)
def test_lookalikes_are_another_function(other: Any, likes: Any) -> None:
    """By more than rounding: a tolerance of 1e-5 would tell."""
    for like in likes:
        assert (other(_WIDE) - like(_WIDE)).abs().max() > 1e-4


def test_a_changed_file_is_not_what_runs() -> None:
    torch.manual_seed(7)
    model, batch = lookalikes_source.changed_on_disk("value")
    text = Path(inspect.getfile(type(model))).read_text(encoding="utf-8")
    assert "math.sqrt(C)  " in text
    names: dict[str, Any] = {}
    exec(compile(text, "edited", "exec"), names)
    edited = names["Attention"]()
    edited.load_state_dict(model.state_dict())
    assert (edited(batch) - model(batch)).abs().max() > 1e-4


@pytest.mark.parametrize("edit", ["value", "moved", "emptied", "gone"])
def test_a_changed_file_runs_as_it_was_imported(edit: str) -> None:
    torch.manual_seed(7)
    model, batch = lookalikes_source.changed_on_disk(edit)
    q, k, v = (f(batch).view(2, 20, 4, 10).transpose(1, 2) for f in (model.query, model.key, model.value))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 20, 40)
    torch.testing.assert_close(model(batch), model.proj(y))
