"""Norms by hand, and dropout + residual + norm: found in the corpus at their sites, replaced exactly, and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from gradscope.patching.patches import Patches
from gradscope.patching.plan import Plan, plan
from tests.patching import spelled, swapped
from tests.patching.corpus import (
    lookalikes_layers,
    norms,
    residuals,
    transformers_encoders,
    transformers_gpt,
    transformers_rotary,
    transformers_seq2seq,
)
from tests.patching.corpus.entry import Entry

RECIPES = ("add_norm", "rms_norm", "layer_norm")
ENTRIES: list[Entry] = [
    *norms.ENTRIES,
    *residuals.ENTRIES,
    *transformers_gpt.ENTRIES,
    *transformers_encoders.ENTRIES,
    *transformers_rotary.ENTRIES,
    *transformers_seq2seq.ENTRIES,
]
FOUND = [entry for entry in ENTRIES if any(recipe in RECIPES for _, recipe in entry.sites)]
OTHERS = [entry for entry in ENTRIES if entry not in FOUND]
LOOKALIKES = [
    entry
    for entry in lookalikes_layers.ENTRIES
    if {"rms", "norm", "residual", "drop", "dropout", "dropped", "sum"} & set(entry.name.split("_"))
]

# float32: means of 40 to 56 features in another order, divided by their spread, through up to five norms.
_TOLERANCE = 1e-5


@pytest.mark.parametrize("entry", FOUND, ids=lambda entry: entry.name)
def test_found_at_its_sites_and_exact(entry: Entry) -> None:
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    wanted = sorted(site for site in entry.sites if site[1] in RECIPES)
    assert sorted((site.path, site.recipe) for site in found.supported) == wanted
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


@pytest.mark.parametrize("entry", [*norms.ENTRIES, *residuals.ENTRIES], ids=lambda entry: entry.name)
def test_found_in_evaluation_too(entry: Entry) -> None:
    model, batch = swapped.built(entry, dropout=True)
    found = swapped.planned(entry, model.eval(), batch, RECIPES)
    assert sorted((site.path, site.recipe) for site in found.supported) == sorted(entry.sites)
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


@pytest.mark.parametrize("entry", OTHERS, ids=lambda entry: entry.name)
def test_not_found_elsewhere(entry: Entry) -> None:
    model, batch = swapped.built(entry)
    assert not swapped.planned(entry, model, batch, RECIPES).supported


@pytest.mark.parametrize("entry", LOOKALIKES, ids=lambda entry: entry.name)
def test_lookalikes_are_refused_or_exact(entry: Entry) -> None:
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert {(site.path, site.recipe) for site in found.supported} <= set(entry.sites)
    if found.supported:
        swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


SPELLED = [
    ("rms_norm", "x / torch.sqrt((x ** 2).mean(dim=-1, keepdim=True) + self.eps)"),
    ("rms_norm", "self.w * (x * (x.square().mean(-1, True) + self.eps).pow(-0.5))"),
    ("rms_norm", "x * torch.rsqrt(x.pow(2).mean(-1)[..., None] + self.eps)"),
    ("rms_norm", "x * torch.rsqrt(x.pow(2).mean(-1).unsqueeze(-1) + self.eps)"),
    ("rms_norm", "x * (x.pow(2).sum(-1, keepdim=True) / C + self.eps).rsqrt() * self.w"),
    ("rms_norm", "x / x.norm(dim=-1, keepdim=True) * math.sqrt(C) * self.w"),
    ("rms_norm", "self.w * x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"),
    ("rms_norm", "(1 + self.w) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"),
    ("rms_norm", "x * torch.rsqrt(torch.linalg.vector_norm(x, dim=-1, keepdim=True) ** 2 / C + self.eps)"),
    ("rms_norm", "v = x.pow(2).mean(-1, keepdim=True)\nv = v.add_(self.eps).rsqrt()\ny = self.w * (x * v)"),
    ("rms_norm", "self.rms(x)"),
    ("rms_norm", "F.rms_norm(x, (C,), self.w, 1e-6)"),
    ("layer_norm", "(x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + self.eps)"),
    (
        "layer_norm",
        "d = x - x.mean(-1, True)\ny = torch.addcmul(self.b, self.w, d * (x.var(-1, False, True) + 1e-6).rsqrt())",
    ),
    (
        "layer_norm",
        "d = x - x.mean(2, keepdim=True)\ny = d * (d.square().mean(-1, keepdim=True) + self.eps) ** -0.5 * self.w",
    ),
    (
        "layer_norm",
        "m = x.mean(-1, True)\ny = (x - m) / ((x * x).mean(-1, keepdim=True) - m**2 + self.eps).sqrt() + self.b",
    ),
    ("layer_norm", "s, m = torch.std_mean(x, -1, correction=0, keepdim=True)\ny = self.b + (x - m) / s * self.w"),
    ("add_norm", "self.norm(u + self.drop(x))"),
    ("add_norm", "x = torch.add(F.dropout(x, 0.1, self.training), u)\ny = F.layer_norm(x, (C,), self.w, self.b)"),
    ("add_norm", "h = u + self.drop(x)\ny = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps) * self.w"),
    ("add_norm", "h = u + self.drop(x)\ny = self.up(self.norm(h)) + h"),
    ("add_norm", "h = self.drop(x) + u\nz = h.sum(1)\ny = self.rms(h) + z[:, None] + h"),
    (
        "add_norm",
        "for _ in range(2):\n    x = u + self.drop(x)\n    u = self.norm(x)\n    x = torch.tanh(x)\ny = u + x",
    ),
]
NOT_SPELLED = [
    "x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps)",
    "x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)",
    "(x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + self.eps)",
    "(x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True, unbiased=False) + self.eps)",
    "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).detach() + self.eps)",
    "with torch.no_grad():\n    v = x.pow(2).mean(-1, keepdim=True)\ny = x * torch.rsqrt(v + self.eps)",
    "x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps)",
    "(x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)",
    "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - self.eps)",
    "x * torch.rsqrt(x.pow(2).mean(keepdim=True, dim=(-1, -2)) + self.eps)",
    "x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)",
    "x * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + self.eps)",
    "F.layer_norm(x, (C,), self.w, self.b)",
    # the sum, or what its norm reads, is not certain to be the same
    "h = u + self.drop(x)\nif self.flag:\n    h = 2 * h\ny = self.norm(h) + h",
    "h = u + self.drop(x)\nif self.flag:\n    h.mul_(2)\ny = self.norm(h) + h",
    "h = u + self.drop(x)\nh.mul_(2)\ny = self.norm(h) + h",
    "h = u + self.drop(x)\ny = self.norm(h) + h if self.training else h",
    "h = u + self.drop(x)\nif self.training:\n    h = self.norm(h) + h\ny = h",
    "h = u + self.drop(x)\nwith torch.no_grad():\n    m = self.norm(h)\ny = m + h",
    "h = g = u + self.drop(x)\ny = self.norm(g) + h",
    "u += self.drop(x)\ny = self.norm(u) + u",
    "h = u - self.drop(x)\ny = self.norm(h)",
    "h = torch.add(u, self.drop(x), alpha=2)\ny = self.norm(h)",
    "y = self.norm(self.drop(u + x))",
    "y = self.norm(u + F.dropout(x, 0.1, self.training, inplace=True))",
    "y = self.norm(u[:, :1] + self.drop(x))",
]


@pytest.mark.parametrize(("recipe", "body"), SPELLED)
def test_spelled_otherwise(tmp_path: Path, recipe: str, body: str) -> None:
    entry = spelled.entry(tmp_path, body, "norm")
    model, batch = swapped.built(entry)
    model.drop.p = 0.0
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("", recipe)]
    if "0.1" not in body:  # of what dropout drops
        swapped.assert_exact(entry, model, batch, found, _TOLERANCE)
    entry.build()
    found = swapped.planned(entry, model.eval(), batch, RECIPES)
    assert swapped.supported(found) == [("", recipe)]
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


_CAST = [
    ("rms_norm", "(x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.w"),
    ("rms_norm", "(x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps) * self.w).type_as(x)"),
    ("rms_norm", "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.w.type_as(x)"),
    (
        "rms_norm",
        "k = x.dtype\nh = x.to(torch.float32)\nv = h.pow(2).mean(-1, keepdim=True)\n"
        "y = self.w * (h * torch.rsqrt(v + self.eps)).to(k)",
    ),
    (
        "layer_norm",
        "d = (x - x.mean(-1, True)).float()\n"
        "y = (d * (d.square().mean(-1, keepdim=True) + self.eps) ** -0.5).type_as(x) * self.w + self.b",
    ),
]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch's own of its rms_norm
@pytest.mark.parametrize("form", ["autocast", "bfloat16"])
@pytest.mark.parametrize(("recipe", "body"), [each for each in SPELLED if "std_mean" not in each[1]] + _CAST)
def test_the_result_has_the_dtype_it_had(tmp_path: Path, recipe: str, body: str, form: str) -> None:
    """Recorded in float32; a float32 weight promotes a bfloat16 stream where no cast follows it."""
    entry = spelled.entry(tmp_path, body, "norm")
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("", recipe)]
    model.eval()
    if form == "bfloat16":
        batch = batch.bfloat16()
        for part in (model.inp, model.up, model.norm, model.rms):
            part.bfloat16()
    results = swapped.before_and_after(model, found, batch, autocast=form == "autocast")
    assert results[1].dtype == results[0].dtype
    # bfloat16 has 8 bits, and a norm by hand rounds a few times.
    torch.testing.assert_close(results[1], results[0], rtol=2**-5, atol=2**-5)


SUMS = [
    ("self.rms(u + x)", ["rms_norm"]),
    ("h = u + x\ny = self.up(self.rms(h)) + h", ["rms_norm"]),
    ("h = u + x\ny = self.w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)) + h", ["rms_norm"]),
    (
        "h = u + x\nd = h - h.mean(-1, keepdim=True)\n"
        "y = d * torch.rsqrt(d.square().mean(-1, keepdim=True) + self.eps) * self.w + h",
        ["layer_norm"],
    ),
    ("self.norm(u + x)", []),
    ("h = u + x\ny = self.up(self.norm(h)) + h", []),
    ("h = u + x\ny = F.layer_norm(h, (C,), self.w, self.b)", []),
]


@pytest.mark.parametrize(("body", "recipes"), SUMS)
def test_a_sum_without_dropout_is_left_to_the_norm(tmp_path: Path, body: str, recipes: list[str]) -> None:
    """With the sum in it the norm's recipe keeps no less, and torch's own layer normalisation is sooner."""
    entry = spelled.entry(tmp_path, body, "norm")
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert [recipe for _, recipe in swapped.supported(found)] == recipes
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


@pytest.mark.parametrize("body", NOT_SPELLED)
def test_another_formula(tmp_path: Path, body: str) -> None:
    entry = spelled.entry(tmp_path, body, "norm")
    model, batch = swapped.built(entry, dropout=True)
    assert not swapped.planned(entry, model, batch, RECIPES).supported


@pytest.mark.parametrize(
    ("recipe", "formula"),
    [
        ("rms_norm", "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.w"),
        ("layer_norm", "(x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True)) * self.w"),
    ],
)
def test_deep_in_a_residual_stream(tmp_path: Path, recipe: str, formula: str) -> None:
    """The vectors that the stream was made with, biases of its layers for one, are none of the norm's."""
    entry = spelled.entry(tmp_path, f"x = (x + u * self.b) * self.rms.weight + self.out(u)\ny = {formula}", "norm")
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, [recipe])
    assert swapped.supported(found) == [("", recipe)]
    assert "weight=self.w" in Patches(found).diff
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


@pytest.mark.parametrize(
    ("vector", "taken"),
    [
        ("self.w.view(1, 1, -1)", True),
        ("(1 + self.w[None])", True),
        ("u.mean(1, keepdim=True).sigmoid()", False),
    ],
)
def test_a_vector_that_may_be_several_later(tmp_path: Path, vector: str, taken: bool) -> None:
    """Recorded with a batch of one, what modulates each of a batch has the form of a weight."""
    entry = spelled.entry(tmp_path, f"y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * {vector}", "norm")
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch[:1], RECIPES)
    assert swapped.supported(found) == [("", "rms_norm")]
    assert ("weight=" in Patches(found).diff) == taken
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_what_is_rounded_on_the_way_is_left(tmp_path: Path, dtype: str) -> None:
    """A mean in a smaller dtype is another number."""
    mean = f"x.pow(2).mean(-1, keepdim=True).to(torch.{dtype}).float()"
    entry = spelled.entry(tmp_path, f"x * torch.rsqrt({mean} + 1e-3)", "norm")
    assert not swapped.planned(entry, *swapped.built(entry), RECIPES).supported
    entry = spelled.entry(tmp_path, "x * torch.rsqrt(x.pow(2).mean(-1, True, dtype=torch.bfloat16) + 1e-3)", "norm")
    (site,) = swapped.planned(entry, *swapped.built(entry), RECIPES).sites
    assert site.reasons == ["an intermediate result is rounded to a narrower dtype than the input"]


def test_what_is_made_once_is_not_made_twice(tmp_path: Path) -> None:
    """The norm's form is read off the input's name; without one it would be computed again."""
    body = "y = self.rms_of(self.up(x).float())"
    entry = spelled.entry(tmp_path, body, "norm")
    path = tmp_path / "spelled_norm.py"
    path.write_text(
        path.read_text()
        + "\n    def rms_of(self, x):\n        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)\n"
    )
    entry = spelled.loaded(path)
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("", "rms_norm")]
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


@pytest.mark.parametrize(
    ("entries", "name", "lines"),
    [
        (
            norms.ENTRIES,
            "rms_float_type_as",
            [
                "from gradscope.recipes import rms_norm as gradscope_rms_norm",
                "return gradscope_rms_norm(",
                "x,",
                "x.shape[-1:],",
                "weight=self.weight,",
                "eps=self.eps,",
                "promote=True,",
                ")",
            ],
        ),
        (
            residuals.ENTRIES,
            "add_norm_functional",
            [
                "from gradscope.recipes import add_layer_norm",
                "normed_x, x = add_layer_norm(",
                "x,",
                "residual,",
                "weight=self.norm_weight,",
                "bias=self.norm_bias,",
                "eps=1e-5,",
                "dropout_p=self.dropout,",
                "training=self.training,",
                ")",
                "x = normed_x",
            ],
        ),
    ],
)
def test_text(entries: list[Entry], name: str, lines: list[str]) -> None:
    assert swapped.changed_lines(swapped.named(entries, name), RECIPES) == lines


def test_half_precision_keeps_its_rounding() -> None:
    """What is cast back before the weight is rounded there: the weight stays in the user's code."""
    entry = swapped.named(norms.ENTRIES, "rms_variance_pow")
    model, batch = swapped.built(entry)
    model, batch = model.bfloat16(), batch.bfloat16()
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("norm", "rms_norm")]
    x = torch.randn(2, 5, norms.HIDDEN).bfloat16()
    before = model.norm(x)
    with patched_by(found):
        assert torch.equal(model.norm(x), before)


@contextmanager
def patched_by(found: Plan) -> Iterator[None]:
    patches = Patches(found)
    patches.apply()
    yield
    patches.revert()


@pytest.mark.parametrize("name", ["layer_norm_var_biased", "rms_float_type_as"])
def test_autocast_that_changes_the_dtype_is_refused(name: str) -> None:
    entry = swapped.named(norms.ENTRIES, name)
    model, batch = swapped.built(entry)
    model.forward = torch.autocast("cpu", dtype=torch.bfloat16)(model.forward)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert not found.supported


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "like_layer_norm_unbiased",
            "the divisor is not the number of features (unbiased variance, or scaled)",
        ),
        ("like_rms_statistics_stored", "the result of rsqrt is returned or stored"),
        ("like_dropped_used_twice", "the result of dropout is also read by add"),
        ("like_residual_broadcast", "the residual's shape differs from that of the added tensor"),
    ],
)
def test_reasons(name: str, reason: str) -> None:
    entry = swapped.named(LOOKALIKES, name)
    (site,) = swapped.planned(entry, *swapped.built(entry), RECIPES).sites
    assert site.reasons == [reason]


@pytest.mark.parametrize("before", range(16))
def test_one_number_over_its_sum_is_no_norm(before: int) -> None:
    """A router of one expert: of two the weights are another thing. The calls before say what a trial draws."""

    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = torch.nn.Linear(8, 4), 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(before):
                x = x + 1.0
            scores = torch.sigmoid(self.gate(x))
            weights = scores.topk(self.experts, dim=-1).values
            return weights / weights.sum(dim=-1, keepdim=True) * self.gate.bias.sum()

    assert plan(Router(), torch.randn(32, 8), recipes=RECIPES).sites == []


FORMS = [
    ("x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + self.eps) * self.w", (2, 3, 4, spelled.WIDTH)),
    ("x * torch.rsqrt(x.pow(2).mean(-1)[:, :, None] + self.eps) * self.w", (2, 5, spelled.WIDTH)),
    ("x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / C + self.eps)", (2, 5, spelled.WIDTH)),
]


@pytest.mark.parametrize(("body", "shape"), FORMS)
def test_the_form_that_the_proof_relied_on_is_asked_for(tmp_path: Path, body: str, shape: tuple[int, ...]) -> None:
    """Dimensions counted from the front are others of an input of more; a written count is of this width alone."""
    entry = spelled.entry(tmp_path, body, "norm")
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("", "rms_norm")]
    patches = Patches(found)
    assert "x.dim() == 3" in patches.diff or f"x.size(-1) == {spelled.WIDTH}" in patches.diff
    x = torch.randn(shape)
    wanted = model(x)
    patches.apply()
    # float32: means of 24 features in another order
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
    patches.revert()


@pytest.mark.parametrize(
    "body", [body for recipe, body in SPELLED if "-1" in body and "[..." not in body and "2," not in body]
)
def test_no_form_is_asked_for_without_need(tmp_path: Path, body: str) -> None:
    """Dimensions are counted from the last, and a weight says how many features there are."""
    if "self.w" in body:
        patches = Patches(swapped.planned(*_built(tmp_path, body), RECIPES))
        assert ".dim() ==" not in patches.diff and ".size(-1) ==" not in patches.diff


def _built(folder: Path, body: str) -> tuple[Entry, torch.nn.Module, torch.Tensor]:
    entry = spelled.entry(folder, body, "norm")
    return entry, *swapped.built(entry)


@pytest.mark.parametrize("rows", [2, 5])
def test_a_result_in_another_order_is_left(tmp_path: Path, rows: int) -> None:
    """Two rows in another order are out of order as well as five."""
    body = (
        "h = x.transpose(0, 1)\nh = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)\ny = h.transpose(0, 1)"
    )
    model, _ = spelled.entry(tmp_path, body, "order").build()
    (site,) = plan(model, torch.randn(rows, 2, spelled.WIDTH), recipes=["rms_norm"]).sites
    assert site.reasons == ["the result's memory layout differs from the recipe's"]
