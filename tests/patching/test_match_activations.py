"""GELU, bias + GELU and SwiGLU by hand: found in the corpus at their sites, replaced exactly, and put back."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.patching.patches import Patches
from tests.patching import spelled, swapped
from tests.patching.corpus import (
    activations,
    gated_gelus,
    lookalikes_layers,
    transformers_encoders,
    transformers_gpt,
    transformers_rotary,
    transformers_seq2seq,
)
from tests.patching.corpus.entry import Entry

RECIPES = ("bias_gelu", "geglu", "gelu", "swiglu")
ENTRIES: list[Entry] = [
    *activations.ENTRIES,
    *gated_gelus.ENTRIES,
    *transformers_gpt.ENTRIES,
    *transformers_encoders.ENTRIES,
    *transformers_rotary.ENTRIES,
    *transformers_seq2seq.ENTRIES,
]
FOUND = [entry for entry in ENTRIES if any(recipe in RECIPES for _, recipe in entry.sites)]
OTHERS = [entry for entry in ENTRIES if entry not in FOUND]
LOOKALIKES = [
    entry for entry in lookalikes_layers.ENTRIES if not {"rms", "norm", "residual", "rope"} & set(entry.name.split("_"))
]

# float32: a handful of roundings an element, and 0.79788456 for the root of 2 / pi, through two layers.
_TOLERANCE = 5e-6


@pytest.mark.parametrize("entry", FOUND, ids=lambda entry: entry.name)
def test_found_at_its_sites_and_exact(entry: Entry) -> None:
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    wanted = sorted(site for site in entry.sites if site[1] in RECIPES)
    assert sorted((site.path, site.recipe) for site in found.supported) == wanted
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


@pytest.mark.parametrize("entry", activations.ENTRIES, ids=lambda entry: entry.name)
def test_found_in_evaluation_too(entry: Entry) -> None:
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model.eval(), batch, RECIPES)
    assert sorted((site.path, site.recipe) for site in found.supported) == sorted(entry.sites)


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


INNER = "K * (x + 0.044715 * x**3)"
SPELLED = [
    ("gelu", "0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * x * x * x)))"),
    ("gelu", "x * (0.5 + 0.5 * torch.tanh(K * x * (1 + 0.044715 * x.square())))"),
    ("gelu", f"x * torch.sigmoid(2 * {INNER})"),
    ("gelu", f"x - x * torch.sigmoid(-2 * {INNER})"),
    ("gelu", f"x / (1 + torch.exp(-2 * {INNER}))"),
    ("gelu", f"0.5 * x * (1 - torch.tanh(-{INNER}))"),
    ("gelu", "x.mul(0.5).mul(1 + torch.tanh(torch.mul(K, torch.add(x, x ** 3, alpha=0.044715))))"),
    ("gelu", "0.5 * x * (1 + torch.tanh(torch.tensor(2 / math.pi).sqrt() * (x + 0.044715 * torch.pow(x, 3))))"),
    ("gelu", "x * 0.5 * torch.erfc(-x / math.sqrt(2))"),
    ("gelu", "x * torch.special.ndtr(x)"),
    ("gelu", "torch.mul(x, 0.5 * (1.0 + torch.erf(torch.div(x, 1.4142135623730951))))"),
    ("gelu", "h = x * x * x\nh.mul_(0.044715).add_(x).mul_(K)\ny = 0.5 * x * (1 + h.tanh())"),
    ("gelu", "h = x / math.sqrt(2)\nh = torch.erf(h)\nh = h + 1\nh *= 0.5\ny = x * h"),
    ("bias_gelu", "x = u + self.b\ny = F.gelu(x)"),
    ("bias_gelu", "y = F.gelu(self.b + u, approximate='tanh')"),
    ("swiglu", "x * torch.sigmoid(x) * u"),
    ("swiglu", "(u * x) * x.sigmoid()"),
    ("swiglu", "x * torch.sigmoid(self.beta * x) * u"),  # where it is 1.0
    ("swiglu", "u * x / (1 + torch.exp(-x))"),
    ("swiglu", "0.5 * x * (1 + torch.tanh(x / 2)) * u"),
    ("swiglu", "0.5 * u * x * 2 * torch.sigmoid(x)"),
    ("geglu", "F.gelu(x) * u"),
    ("geglu", "h = F.gelu(x, approximate='tanh')\ny = u * h"),
    ("geglu", "u, x = torch.cat((u, x), -1).chunk(2, -1)\ny = u * F.gelu(x)"),
    ("swiglu", "F.silu(x) * F.dropout(u, 0.1, self.training)"),
]
NOT_SPELLED = [
    "0.5 * x * (1 + torch.tanh(K * (x + 0.0447 * x**3)))",
    "0.5 * x * (1 + torch.tanh(0.79788 * (x + 0.044715 * x**3)))",  # five digits, of which gradients tell more
    "x * torch.sigmoid(1.702 * x)",
    "0.5 * x * (1 + torch.erf(x / 1.41))",
    "0.5 * x * (1 - torch.erf(x / math.sqrt(2)))",
    "0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * x.abs() ** 3)))",
    f"0.5 * x.detach() * (1 + torch.tanh({INNER}))",
    f"x * (1 + torch.tanh({INNER}))",
    f"torch.sigmoid(2 * {INNER})",
    "0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * self.drop(x) ** 3)))",
    "with torch.no_grad():\n    h = torch.erf(x / math.sqrt(2))\ny = 0.5 * x * (1 + h)",
    "h = 1 + torch.erf(x / math.sqrt(2))\ny = 0.5 * x * h + h",
    "x = torch.relu(x)\nh = 1 + torch.erf(x / math.sqrt(2))\nx.mul_(2)\ny = 0.5 * x * h",
    "F.silu(x) * u[..., :1]",
    "F.silu(x) + u",
    "F.gelu(x) + u",
    "F.gelu(x) * u[..., :1]",
    "F.gelu(x).detach() * u",
    "h = F.gelu(x)\ny = h * u + h",
    "1.7 * F.gelu(x) * u",
    "x * torch.sigmoid(1.000006 * x) * u",
    "x.detach() * torch.sigmoid(x) * u",
    "F.gelu(x + u)",
    "F.gelu(torch.add(u, self.b, alpha=2))",
    "F.gelu(x)",
]


@pytest.mark.parametrize(("recipe", "body"), SPELLED)
def test_spelled_otherwise(tmp_path: Path, recipe: str, body: str) -> None:
    entry = spelled.entry(tmp_path, body, "activation")
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("", recipe)]
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("body", NOT_SPELLED)
def test_another_formula(tmp_path: Path, body: str, train: bool) -> None:
    entry = spelled.entry(tmp_path, body, "activation")
    model, batch = swapped.built(entry, dropout=True)
    assert not swapped.planned(entry, model.train(train), batch, RECIPES).supported


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        pytest.param("h = u + self.b\ny = F.gelu(h) + h", (2, 5), id="the sum is read beside"),
        pytest.param("s = F.silu(x)\ny = s * (s + u)", (2, 5), id="what is multiplied is made of it"),
        pytest.param("y = F.gelu(u + self.b)", (), id="two vectors"),
    ],
)
def test_nothing_is_said_of_what_is_no_place_for_a_recipe(tmp_path: Path, body: str, rows: tuple[int, ...]) -> None:
    model, _ = swapped.built(spelled.entry(tmp_path, body, "activation"))
    assert gradscope.plan(model, torch.randn(*rows, spelled.WIDTH), recipes=RECIPES).sites == []


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "gelu_tanh_cdf_multiline",
            ["from gradscope.recipes import gelu as gradscope_gelu", 'return gradscope_gelu(x, approximate="tanh")'],
        ),
        (
            "swiglu_chunk",
            ["from gradscope.recipes import swiglu as gradscope_swiglu", "hidden = gradscope_swiglu(x12)"],
        ),
        (
            "swiglu_silu_module",
            [
                "from gradscope.recipes import swiglu as gradscope_swiglu",
                "down_proj = self.down_proj(gradscope_swiglu(self.gate_proj(x), self.up_proj(x)))",
            ],
        ),
        (
            "bias_gelu_added_inline",
            [
                "from gradscope.recipes import bias_gelu as gradscope_bias_gelu",
                "return self.proj(gradscope_bias_gelu(self.fc(x), self.bias, promote=True))",
            ],
        ),
    ],
)
def test_text(name: str, lines: list[str]) -> None:
    assert swapped.changed_lines(swapped.named(activations.ENTRIES, name), RECIPES) == lines


def test_an_attribute_that_holds_the_function_is_put_back() -> None:
    entry = swapped.named(activations.ENTRIES, "gelu_erf_function")
    model, batch = swapped.built(entry)
    patches = Patches(swapped.planned(entry, model, batch, RECIPES))
    patches.apply()
    patches.apply()
    assert model.intermediate_act_fn is not activations.gelu
    patches.revert()
    assert model.intermediate_act_fn is activations.gelu


NONE, TANH = "", 'approximate="tanh"'
APPROXIMATIONS = {
    "geglu_t5_exact": ("gate_, hidden_linear", NONE),
    "geglu_t5_tanh": ("gate_, hidden_linear", TANH),
    "geglu_t5_torch": ("gate_, hidden_linear", NONE),
    "geglu_gemma_tanh": ("self.gate_proj(x), self.up_proj(x)", TANH),
    "geglu_gemma_exact": ("self.gate_proj(x), self.up_proj(x)", NONE),
    "geglu_gemma_reference_tanh": ("gate, up", TANH),
    "geglu_diffusers": ("gate, hidden_states", NONE),
    "geglu_diffusers_gate_first": ("gate, hidden_states", NONE),
    "geglu_compvis": ("gate, x", NONE),
    "geglu_diffusers_block": ("gate, hidden_states", NONE),
    "geglu_up_read_later": ("self.gate_proj(x), up", NONE),
    "geglu_by_configuration_tanh": ("self.gate_proj(x), self.up_proj(x)", TANH),
}


@pytest.mark.parametrize("name", [entry.name for entry in gated_gelus.ENTRIES if entry.sites])
def test_the_gate_and_its_approximation(name: str) -> None:
    entry = swapped.named(gated_gelus.ENTRIES, name)
    lines = swapped.changed_lines(entry, RECIPES)
    operands, approximate = APPROXIMATIONS[name]
    wanted = f"geglu({operands}, {approximate})" if approximate else f"geglu({operands})"
    assert [wanted in line for line in lines if "geglu(" in line] == [True]


LATER: dict[str, tuple[str, Callable[[nn.Module], object]]] = {
    "different class": ("geglu_gemma_tanh", lambda model: setattr(model, "act_fn", nn.SiLU())),
    "the other GELU": ("geglu_gemma_tanh", lambda model: setattr(model, "act_fn", gated_gelus.GELUActivation())),
    "no activation": ("geglu_t5_exact", lambda model: setattr(model, "act", nn.Identity())),
    "a hook": ("geglu_t5_torch", lambda model: model.act.register_forward_hook(lambda module, given, out: out * 2)),
    "a setting of the module": ("geglu_t5_torch", lambda model: setattr(model.act, "approximate", "tanh")),
    "a setting of the model": ("geglu_by_configuration_tanh", lambda model: setattr(model, "approximate", "none")),
    "frozen gate": ("geglu_diffusers", lambda model: model.proj.requires_grad_(False)),
    "other weights": ("geglu_diffusers", lambda model: model.proj.weight.data.mul_(40)),
    "a wider projection": (
        "geglu_compvis",
        lambda model: (
            setattr(model.net[0], "proj", nn.Linear(gated_gelus.WIDTH, 12, dtype=torch.float64)),
            setattr(model.net, "2", nn.Linear(6, gated_gelus.WIDTH, dtype=torch.float64)),
        ),
    ),
}


@pytest.mark.parametrize("change", LATER)
def test_a_unit_gated_by_gelu_later(change: str) -> None:
    """What its class, settings and weights become after the proof is what runs."""
    name, changes = LATER[change]
    entry = swapped.named(gated_gelus.ENTRIES, name)
    model, batch = swapped.built(entry)
    model, batch = model.double(), batch.double()
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == list(entry.sites)
    changes(model)
    swapped.assert_exact(entry, model, batch, found, 1e-13)


@pytest.mark.parametrize("shape", [(gated_gelus.WIDTH,), (1, gated_gelus.WIDTH), (2, 3, 4, gated_gelus.WIDTH)])
@pytest.mark.parametrize("name", ["geglu_t5_exact", "geglu_gemma_tanh", "geglu_diffusers"])
def test_a_unit_gated_by_gelu_of_other_shapes(name: str, shape: tuple[int, ...]) -> None:
    entry = swapped.named(gated_gelus.ENTRIES, name)
    model, batch = swapped.built(entry)
    model, batch = model.double(), batch.double()
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == list(entry.sites)
    swapped.assert_exact(entry, model, torch.randn(*shape, dtype=torch.float64), found, 1e-13)


SQUARED = "torch saves only ReLU's output for backward: a recipe would save as much"
GATED = "torch saves only ReLU's output and the gated tensor for backward: a recipe would save as much"
LEFT = {
    "like_geglu_reglu": [GATED],
    "like_geglu_reglu_configured": [GATED],
    "like_geglu_squared_relu": [SQUARED],
    "like_geglu_squared_by_name": [SQUARED],
    "like_geglu_with_a_condition": ["gelu may behave differently in another call, on line {}"],
    "like_geglu_gate_read_later": ["the result of gelu is also read by mean"],
    "like_geglu_gate_changed": ["mul modifies in place a tensor that gelu read"],
    "like_geglu_bilinear": [],
    "like_geglu_of_itself": [],
    "like_geglu_both_activated": [],
    "like_geglu_of_a_sum": [],
}


@pytest.mark.parametrize("name", [entry.name for entry in gated_gelus.ENTRIES if not entry.sites])
def test_reason_why_a_gated_unit_is_left(name: str) -> None:
    entry = swapped.named(gated_gelus.ENTRIES, name)
    sites = swapped.planned(entry, *swapped.built(entry), RECIPES).sites
    assert [re.sub(r"line \d+", "line {}", reason) for site in sites for reason in site.reasons] == LEFT[name]


@pytest.mark.parametrize(
    ("body", "reasons"),
    [
        ("torch.relu(x).pow(2)", [SQUARED]),
        ("h = x.relu()\ny = h * h", [SQUARED]),
        ("u * F.relu(x)", [GATED]),
        ("F.relu(x).pow(3)", []),
        ("F.relu(x) * 2", []),
        ("F.relu(x) * u.detach()", []),
        ("F.relu(x) * u[..., :1]", []),
        ("F.relu(x) * self.w", []),
        ("F.relu(x) + u", []),
    ],
)
def test_units_by_relu_are_left_with_a_reason(tmp_path: Path, body: str, reasons: list[str]) -> None:
    entry = spelled.entry(tmp_path, body, "activation")
    sites = swapped.planned(entry, *swapped.built(entry), RECIPES).sites
    assert [reason for site in sites for reason in site.reasons] == reasons


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    entry = spelled.entry(tmp_path, f"0.5 * x * (1 + torch.tanh({INNER}))", "activation")
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model.to(dtype), batch.to(dtype), RECIPES)
    assert swapped.supported(found) == [("", "gelu")]
    # The formula rounds about ten times an element, the recipe once.
    swapped.assert_exact(entry, model, batch.to(dtype), found, 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("like_quick_gelu", "a constant differs from GELU's: this is another function"),
        ("like_gelu_off_constant", "a constant differs from GELU's: this is another function"),
        ("like_gelu_distribution_kept", "the result of mul is also read by detach"),
        ("like_silu_returned", "the result of silu is also read by mean"),
        ("like_gelu_twice_differentiated", "the step computes a second derivative, which recipes do not support"),
    ],
)
def test_reasons(name: str, reason: str) -> None:
    entry = swapped.named(LOOKALIKES, name)
    (site,) = swapped.planned(entry, *swapped.built(entry), RECIPES).sites
    assert site.reasons == [reason]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("F.gelu(u + self.b.bfloat16())", "the bias's dtype differs from that of the tensor it is added to"),
        (
            "p = (u.double() * x).float()\ny = p * torch.sigmoid(x)",
            "the gate's dtype differs from that of the gated tensor",
        ),
    ],
)
def test_operands_of_two_dtypes_are_left(tmp_path: Path, body: str, reason: str) -> None:
    """Also where the result has the dtype of the first."""
    entry = spelled.entry(tmp_path, body, "activation")
    (site,) = swapped.planned(entry, *swapped.built(entry), RECIPES).sites
    assert site.reasons == [reason]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    "body",
    [
        "q = x.to(torch.DTYPE).to(x.dtype)\ny = 0.5 * x * (1 + torch.erf(q / math.sqrt(2)))",
        "q = F.silu(x).to(torch.DTYPE).to(x.dtype)\ny = q * u",
    ],
)
def test_what_is_rounded_on_the_way_is_left(tmp_path: Path, body: str, dtype: str) -> None:
    """As quantisation in training does; the recipe would round nothing."""
    entry = spelled.entry(tmp_path, body.replace("DTYPE", dtype), "activation")
    (site,) = swapped.planned(entry, *swapped.built(entry), RECIPES).sites
    assert site.reasons == ["an intermediate result is rounded to a narrower dtype than the input"]


class Recurrence(nn.Module):
    """A step's activation is a function of the step before: written out, its formula has no end."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.gates = kind, nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        state = cell = x[:, 0]
        for t in range(x.shape[1]):
            if self.kind == "tanh":
                state = torch.tanh(state + x[:, t])
            else:
                i, f, o, g = self.gates(torch.cat([state, x[:, t]], -1)).chunk(4, -1)
                cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
                state = torch.sigmoid(o) * torch.tanh(cell)
        return state.sum() + self.gates.weight.sum()


@pytest.mark.parametrize("kind", ["tanh", "lstm"])
def test_a_recurrence_is_looked_at_in_the_time_of_its_length(kind: str) -> None:
    """Its formulas doubled with each step: 32 took minutes, and more of them all the stack."""
    assert gradscope.plan(Recurrence(kind), torch.randn(2, 200, 8)).sites == []


@pytest.mark.parametrize(
    ("body", "wanted"),
    [("0.5 * x * (1 + torch.erf(x / math.sqrt(2)))", "gelu"), ("u * torch.sigmoid(u) * x", "swiglu")],
)
def test_what_comes_after_a_recurrence_is_found(tmp_path: Path, body: str, wanted: str) -> None:
    """Two hundred calls of tanh in vain at one place of the source say nothing of another."""
    rounds = f"state = x\nfor _ in range(200):\n    state = torch.tanh(state + x)\nx = x + state\ny = {body}"
    model, batch = swapped.built(spelled.entry(tmp_path, rounds, "activation"))
    assert [site.recipe for site in gradscope.plan(model, batch, recipes=["gelu", "swiglu"]).sites] == [wanted]


@pytest.mark.parametrize("form", ["autocast", "bfloat16", "float64 bias", "integers"])
def test_the_result_has_the_dtype_it_had(tmp_path: Path, form: str) -> None:
    """Recorded in float32; a bias of another dtype promotes the sum."""
    entry = spelled.entry(tmp_path, "y = F.gelu(u + self.b)", "activation")
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("", "bias_gelu")]
    model.eval()
    if form == "float64 bias":
        model.b.data = model.b.data.double()
    elif form != "autocast":  # what is added to the bias
        kind = torch.bfloat16 if form == "bfloat16" else torch.int64
        model.up.register_forward_hook(lambda _module, _given, output: (4 * output).to(kind))
    results = swapped.before_and_after(model, found, batch, autocast=form == "autocast")
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("split", ["h.chunk(2, dim=2)", "(h[:, :, :C], h[:, :, C:])", "h.chunk(2, -1)"])
def test_halves_of_more_dimensions(tmp_path: Path, split: str) -> None:
    """The last dimension counted from the front is another one of an input of more."""
    entry = spelled.entry(
        tmp_path, f"h = torch.cat([x, u], -1)\ngate, up = {split}\ny = F.silu(gate) * up", "activation"
    )
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("", "swiglu")]
    patches = Patches(found)
    assert ("h.dim() == 3" in patches.diff) is ("-1" not in split)
    if "chunk" in split:
        x = torch.randn(2, 3, 4, spelled.WIDTH)
        form = None
        try:
            wanted = model(x)
        except RuntimeError as error:  # halves of another dimension: the sum of the model has no such form
            form = str(error)
        patches.apply()
        if form is None:
            torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)  # float32, one rounding fewer
        else:
            with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                model(x)
        patches.revert()


@pytest.mark.parametrize(("gate", "up"), [("24:", ":24"), (":24", ":24"), ("24:", "24:")])
def test_halves_that_are_not_first_and_second(tmp_path: Path, gate: str, up: str) -> None:
    """The recipe would take the first half of the whole for the gate."""
    body = f"h = torch.cat([x, u], -1)\ny = F.silu(h[..., {gate}]) * h[..., {up}]"
    entry = spelled.entry(tmp_path, body, "activation")
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("", "swiglu")]
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


class Gate(nn.Module):
    """Its halves are cut by whoever calls it."""

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return nn.functional.silu(gate) * up


class Halved(nn.Module):
    """The call that cuts stands in another function than the product."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(8, 16), Gate()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.act(gate, up)  # type: ignore[no-any-return]


def test_halves_that_were_cut_by_a_caller() -> None:
    entry = Entry("halved", lambda: (Halved(), torch.randn(2, 8)))
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert swapped.supported(found) == [("act", "swiglu")]
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


def test_a_setting_that_a_class_writes_is_not_asked_for(tmp_path: Path) -> None:
    """Of one that a configuration gives, ``self.act.approximate == "none"`` is."""
    model, batch = swapped.built(spelled.entry(tmp_path, 'a = nn.GELU("tanh")\ny = a(x) * u', "activation"))
    patches = Patches(gradscope.plan(model, batch, recipes=["geglu"]))
    assert 'y = geglu(x, u, approximate="tanh")' in patches.diff
    assert "if " not in patches.diff
    entry = swapped.named(gated_gelus.ENTRIES, "geglu_t5_torch")
    patches = Patches(swapped.planned(entry, *swapped.built(entry), RECIPES))
    assert 'if type(self.act) is nn.GELU and self.act.approximate == "none":' in patches.diff
