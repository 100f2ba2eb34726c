"""Rotary positions by hand: found in the corpus and in further spellings, replaced exactly, and put back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.patching.match.matchers import rope
from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan, record_step
from gradscope.workload import Workload
from tests.patching import swapped
from tests.patching.corpus import lookalikes_layers, ropes, transformers_rotary
from tests.patching.corpus.entry import Entry

RECIPES = ("rope",)
ENTRIES: list[Entry] = [*ropes.ENTRIES, *transformers_rotary.ENTRIES]
LOOKALIKES = [entry for entry in lookalikes_layers.ENTRIES if "rope" in entry.name]

# On a CPU the recipe is the product of complex numbers that these are written with.
COMPLEX = ("rope_complex", "llama, rotary pairs as complex numbers")
FOUND = [entry for entry in ENTRIES if entry.name not in COMPLEX]

# float32: two products and a sum in another order, through up to two layers.
_TOLERANCE = 2e-6


@pytest.mark.parametrize("entry", FOUND, ids=lambda entry: entry.name)
def test_found_at_its_sites_and_exact(entry: Entry) -> None:
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert set(swapped.supported(found)) == {site for site in entry.sites if site[1] in RECIPES}
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


@pytest.mark.parametrize("name", COMPLEX)
def test_complex_product_stays_on_a_cpu(name: str) -> None:
    entry = swapped.named(ENTRIES, name)
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert {(site.path, site.recipe) for site in found.sites} == {site for site in entry.sites if site[1] in RECIPES}
    reasons = {reason for site in found.sites for reason in site.reasons}
    assert reasons == {"on a CPU the recipe uses the same complex multiplication as this code"}


@pytest.mark.parametrize("entry", LOOKALIKES, ids=lambda entry: entry.name)
def test_lookalikes_are_left_or_exact(entry: Entry) -> None:
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    assert set(swapped.supported(found)) <= set(entry.sites)
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        (
            "rope_helper_of_both",
            [
                "from gradscope.recipes import rope",
                "if unsqueeze_dim == 1:",
                "q_embed = rope(q, cos[:, 0], sin[:, 0], promote=True)",
                "else:",
                "q_embed = (q * cos) + (rotate_half(q) * sin)",
                "if unsqueeze_dim == 1:",
                "k_embed = rope(k, cos[:, 0], sin[:, 0], promote=True)",
                "else:",
                "k_embed = (k * cos) + (rotate_half(k) * sin)",
            ],
        ),
        (
            "rope_interleaved_stack",
            ["from gradscope.recipes import rope", "return rope(x, cos, sin, interleaved=True, promote=True)"],
        ),
        (
            "neox, rotary of a part",
            [
                "from gradscope.recipes import rope",
                "query = rope(query, cos[:, 0], sin[:, 0], rotary=cos.shape[-1], promote=True).contiguous()",
                "key = rope(key, cos[:, 0], sin[:, 0], rotary=cos.shape[-1], promote=True).contiguous()",
            ],
        ),
    ],
)
def test_text(name: str, lines: list[str]) -> None:
    assert swapped.changed_lines(swapped.named(ENTRIES, name), RECIPES) == lines


# --------------------------------------------------------------------------------------------------------------------
# Further spellings, by the form that is recognised
# --------------------------------------------------------------------------------------------------------------------

B, H, T, S = 2, 3, 5, 8


def _halves_by_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.split(S // 2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def _halves_by_unbind(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-2).flatten(-2)


def _pairs_by_reshape(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = x.float().reshape(B, H, T, -1, 2)
    a, b = pairs[..., 0], pairs[..., 1]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(3).type_as(x)


def _doubled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide_cos, wide_sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    turned = torch.cat((x[..., S // 2 :].neg(), x[..., : S // 2]), -1)
    return x.mul(wide_cos).add(turned.mul(wide_sin))


def _tokens_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = x.transpose(1, 2).contiguous()
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _then_transposed(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _halves_by_split(x, cos, sin).transpose(1, 2)


def _a_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = x[..., :4], x[..., 4:]
    a, b = turned[..., 0::2], turned[..., 1::2]
    cos, sin = cos[:, :2], sin[:, :2]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).reshape(B, H, T, 4)
    return torch.cat((turned, rest), -1)


def _backwards(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


def _backwards_by_minus_sin(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=3)
    return torch.cat((a * cos + b * sin, a * (-sin) + b * cos), 3)


def _scaled(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1) * 2.0


def _one_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * cos, b * cos + a * cos), -1)


def _detached_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b.detach() * sin, b * cos + a * sin), -1)


class _Turned(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.randn(B, H, T, S))
        angles = torch.randn(T, S // 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, scale: Tensor) -> Tensor:
        return self.function(self.weight * scale, self.cos, self.sin).square().mean()


def _rotate_every_two(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _apply_to_part(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    sin = torch.repeat_interleave(sin[:, :, None, :], 2, 3)
    cos = torch.repeat_interleave(cos[:, :, None, :], 2, 3)
    return (x * cos) + (_rotate_every_two(x) * sin)


class _TablesWidenedInside(nn.Module):
    """A part of each head, tokens first, the tables cut out of one and doubled in the helper."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(H * S, H * S)
        self.register_buffer("table", torch.randn(16, 4).cos())

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        key = self.proj(x).view(b, t, H, S)
        sin, cos = self.table[:t][None].repeat(b, 1, 1).split(2, dim=-1)
        turned, rest = key[:, :, :, :4], key[:, :, :, 4:]
        turned = _apply_to_part(turned, sin, cos)
        key = torch.cat([turned, rest], dim=-1)
        return key.view(b, t, c).square().mean()


def test_tables_made_in_a_helper() -> None:
    """What the helper does is replaced there; the function around it has no such tables."""
    entry = Entry("inside", lambda: (_TablesWidenedInside(), torch.randn(B, T, H * S)))
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, RECIPES)
    (site,) = found.supported
    assert [link.name for link in site.chain] == ["forward", "_apply_to_part"]
    swapped.assert_exact(entry, model, batch, found, _TOLERANCE)


def _matches(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Any]:
    torch.manual_seed(0)
    workload = Workload(_Turned(function), torch.randn(S))
    return list(rope.matches(record_step(workload, torch.device("cpu"))))


@pytest.mark.parametrize(
    ("function", "settings", "suffix"),
    [
        (_halves_by_split, ["promote"], ""),
        (_halves_by_unbind, ["promote"], ""),
        (_pairs_by_reshape, ["interleaved"], ""),
        (_doubled, ["promote"], ""),
        (_tokens_first, ["promote"], ".transpose(1, 2)"),
        (_then_transposed, ["promote"], ""),
        (_a_part, ["interleaved", "promote"], ""),
        (_backwards, ["promote"], ""),
        (_backwards_by_minus_sin, ["promote"], ""),
    ],
)
def test_form(function: Any, settings: list[str], suffix: str) -> None:
    (match,) = _matches(function)
    assert not match.reasons
    assert (match.arguments[2].pieces[0] == "-") == ("backwards" in function.__name__)
    assert [argument.name for argument in match.arguments] == ["", "", "", *settings]
    assert match.suffix == suffix


@pytest.mark.parametrize("function", [_one_table, _detached_half])
def test_other_forms(function: Any) -> None:
    assert not _matches(function)


def test_rotation_inside_another_product() -> None:
    """What is scaled afterwards is no rotation; the rotation before it is."""
    (match,) = _matches(_scaled)
    assert match.last.op == "cat"


class _ByBuffers(nn.Module):
    """Queries and keys by a doubled table in buffers, as Llama's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        angles = torch.arange(6.0)[:, None] * torch.rand(4).repeat(2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        q, k = (layer(x).view(2, 6, 2, 8).transpose(1, 2) for layer in (self.q, self.k))
        q = q * self.cos + torch.cat((-q[..., 4:], q[..., :4]), -1) * self.sin
        k = k * self.cos + torch.cat((-k[..., 4:], k[..., :4]), -1) * self.sin
        return torch.stack((q, k))


_LATER = {
    "autocast": (torch.float32, torch.float32),
    "integers": (torch.int64, torch.int64),
    "truths": (torch.bool, torch.bool),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float64": (torch.float64, torch.float64),
    "two": (torch.float64, torch.float32),
    "halves": (torch.float32, torch.float32),
    "compiled halves": (torch.float32, torch.float32),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
@pytest.mark.parametrize("form", _LATER)
def test_other_tables_later(form: str) -> None:
    """Recorded in float32: the result has the dtype and the content that it had."""
    model = _ByBuffers()
    original, x = copy.deepcopy(model), torch.randn(2, 6, 16)
    patches = Patches(plan(model, x, recipes=["rope"]))
    assert len(patches.kept) == 2, patches.table.reasons.tolist()
    patches.apply()
    for each in (model, original):
        each.cos, each.sin = ((2 * old).to(kind) for old, kind in zip((each.cos, each.sin), _LATER[form], strict=True))
        if "halves" in form:
            each.cos = each.cos * torch.linspace(1, 2, 8)
    run: Any = model
    if "compiled" in form:
        torch.compiler.reset()
        run = torch.compile(model, backend="eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=form == "autocast"):
        got, expected = run(x), original(x)
    torch.testing.assert_close(got, expected)
    results = [
        torch.autograd.grad(each.square().sum(), list(of.parameters()))
        for each, of in zip((got, expected), (model, original), strict=True)
    ]
    rough = 2**-6 if form == "autocast" else 1e-5  # gradients pass through bfloat16, of 8 bits
    torch.testing.assert_close(*results, rtol=rough, atol=rough * 10)


class _CastBefore(nn.Module):
    """Whose cast does nothing in float32, and is needed beside the rotation too."""

    def __init__(self, held: bool) -> None:
        super().__init__()
        self.up, self.held = nn.Linear(S, S), held
        angles = torch.randn(T, S // 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        wide = y.float()
        a, b = wide.chunk(2, -1)
        turned = torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin), -1).type_as(y)
        if self.held:
            self.seen = wide
            return turned
        return turned + wide.square().mean()


@pytest.mark.parametrize("held", [False, True])
def test_a_cast_that_is_needed_elsewhere_stays(held: bool) -> None:
    found = plan(_CastBefore(held), torch.randn(B, H, T, S))
    assert [(site.recipe, site.reasons) for site in found.sites] == [("rope", [])]
