"""Which part of a tensor an index shows, and what a tensor of one number holds, may be another in a later step."""

from __future__ import annotations

import copy
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan
from gradscope.recipes import is_number
from tests.patching.test_bindings import net

HEAD = """\
import math

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.gate = nn.Linear(8, 24), nn.Linear(8, 16)
        self.half, self.at, self.which, self.axis, self.parts, self.width = 4, 8, 1, -1, [4, 4], 8
        self.low, self.high, self.end = 4, 4, None
        angles = torch.arange(6)[:, None] * torch.rand(4)[None]
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("seen", torch.ones(6, 6).tril().bool())
        self.register_buffer("fill", torch.tensor(-10000.0))
        self.power = torch.tensor(2.0)

    def part(self, x):
        return torch.cat((-x[..., self.half :], x[..., : self.half]), -1)

    def parted(self, x):
        a, b = x.split(self.parts, -1)
        return torch.cat((-b, a), -1)

    def turned(self, x):
        low, rest = x[..., : self.low], x[..., self.high :]
        cos, sin = self.cos[:, ::2], self.sin[:, ::2]
        a, b = low.chunk(2, -1)
        return torch.cat((low * cos + torch.cat((-b, a), -1) * sin, rest), -1)

    def forward(self, x):
        B, T, C = x.shape
"""
ROPE = """\
q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
q, k = {}
return ((q @ k.transpose(-2, -1)).softmax(-1) @ v).squeeze(1)
"""
PACKED = """\
qkv = self.qkv(x)
{}
y = (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v
return y.transpose(1, 2).reshape(B, T, C)
"""
ERF = "x = self.gate(x)\nreturn 0.5 * x * (1.0 + torch.erf(x / {} ** 0.5))\n"
POWER = """\
x, power = self.gate(x), torch.zeros(2)
{}
return x * torch.rsqrt(x.pow(power[1]).mean(-1, keepdim=True) + 1e-5)
"""
_HEADS = "\nq, k, v = (each.view(B, T, 2, -1).transpose(1, 2) for each in (q, k, v))"


def planned(folder: Path, body: str) -> tuple[nn.Module, nn.Module, list[str]]:
    """A model, the same with all that can be replaced, and the recipes found."""
    text = HEAD + textwrap.indent(body, " " * 8)
    model = net(folder, text)
    original = copy.deepcopy(model)
    patches = Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64)))
    patches.apply()
    return original, model, [site.recipe for site in patches.in_source]


def same(original: nn.Module, model: nn.Module, call: Callable[..., Tensor] = nn.Module.__call__) -> None:
    """Outputs and all gradients, or both raise."""
    results: list[list[Tensor]] = []
    for each in (original, model):
        each.zero_grad()
        torch.manual_seed(2)
        try:
            output = call(each, torch.randn(2, 6, 8, dtype=torch.float64))
        except RuntimeError:
            assert each is original
            return
        output.square().sum().backward()
        results.append([output, *(weight.grad for weight in each.parameters() if weight.grad is not None)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("body", "recipe", "changes"),
    [
        (ROPE.format("(q * self.cos + self.part(q) * self.sin, k)"), "rope", {"half": 3}),
        (ROPE.format("(q * self.cos + self.parted(q) * self.sin, k)"), "attention", {"parts": [3, 5]}),
        (ROPE.format("(self.turned(q), self.turned(k))"), "rope", {"high": 3}),
        (
            PACKED.format("q, k, v = qkv[..., :C], qkv[..., self.at:self.at + C], qkv[..., 2 * C:]" + _HEADS),
            "packed_attention",
            {"at": 0},
        ),
        (
            PACKED.format("q, k, v = qkv[..., :C], qkv.narrow(-1, self.at, C), qkv[..., 2 * C:]" + _HEADS),
            "packed_attention",
            {"at": 4},
        ),
        (
            PACKED.format(
                "qkv = qkv.view(B, T, 3, 2, -1).transpose(1, 3)\n"
                "q, k, v = qkv[:, :, 0], qkv[:, :, self.which], qkv[:, :, 2]"
            ),
            "packed_attention",
            {"which": 0},
        ),
        (
            PACKED.format(
                "qkv = qkv.view(B, T, 3, 2, -1).transpose(1, 3)\n"
                "q, k, v = qkv[:, :, 0], qkv.select(2, self.which), qkv[:, :, 2]"
            ),
            "packed_attention",
            {"which": 0},
        ),
        ("g, u = self.gate(x).chunk(2, self.axis)\nreturn F.silu(g) * u\n", "swiglu", {"axis": 1}),
        ("h = self.gate(x)\nreturn F.silu(h[..., :self.width]) * h[..., self.width:]\n", "swiglu", {"width": 1}),
        ("h = self.gate(x)\nreturn F.silu(h[..., :8]) * h[..., 8:self.end]\n", "swiglu", {"end": 9}),
        (ERF.format("(1.0, 2.0)[self.which]"), "gelu", {"which": 0}),
        (ERF.format("float(self.at / 4).real"), "gelu", {"at": 12}),
        (POWER.format("power[self.which] = 2.0"), "rms_norm", {"which": 0}),
        (POWER.format("power[self.which :] = 2.0"), "rms_norm", {"which": 2}),
    ],
)
@pytest.mark.usefixtures("nothing_is_idle")
def test_another_part_is_shown(tmp_path: Path, body: str, recipe: str, changes: dict[str, Any]) -> None:
    original, model, recipes = planned(tmp_path, body)
    assert recipe in recipes
    same(original, model)
    for name, value in changes.items():
        for each in (original, model):
            setattr(each, name, value)
    same(original, model)


@pytest.mark.usefixtures("nothing_is_idle")
def test_a_part_that_a_table_turns_is_not_asked_for(tmp_path: Path) -> None:
    """Another would not fit the table."""
    text = HEAD.replace("self.high :", "self.low :")
    body = ROPE.format("(self.turned(q), self.turned(k))")
    model = net(tmp_path, text + textwrap.indent(body, " " * 8))
    patches = Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64), recipes=["rope"]))
    ((_, after),) = patches.texts.values()
    assert "rope(" in after and "if " not in after


@pytest.mark.parametrize("first", ["self", "this"])
@pytest.mark.usefixtures("nothing_is_idle")
def test_another_modules_number_is_not_asked_of_this_one(tmp_path: Path, first: str) -> None:
    """Both have one of that name."""
    start, end = HEAD.index("    def part("), HEAD.index("    def parted(")
    other = f"""
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.half = 4

    def forward({first}, x):
        return torch.cat((-x[..., {first}.half :], x[..., : {first}.half]), -1)


class Net"""
    text = (HEAD[:start] + HEAD[end:]).replace("\nclass Net", other)
    text = text.replace("self.low, ", "self.part = Part()\n        self.low, ")
    model = net(tmp_path, text + textwrap.indent(ROPE.format("(q * self.cos + self.part(q) * self.sin, k)"), " " * 8))
    original = copy.deepcopy(model)
    Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64), recipes=["rope"])).apply()
    for each in (original, model):
        each.part.half = 3  # type: ignore[union-attr, assignment]
    same(original, model)


@pytest.mark.usefixtures("nothing_is_idle")
def test_a_method_may_call_its_module_otherwise(tmp_path: Path) -> None:
    text = HEAD.replace("def part(self, x)", "def part(this, x)").replace("self.half :]", "this.half :]")
    text = text.replace(": self.half]", ": this.half]")
    model = net(tmp_path, text + textwrap.indent(ROPE.format("(q * self.cos + self.part(q) * self.sin, k)"), " " * 8))
    original = copy.deepcopy(model)
    Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64), recipes=["rope"])).apply()
    for half in (4, 3):
        for each in (original, model):
            each.half = half  # type: ignore[assignment]
        same(original, model)


@pytest.mark.parametrize(
    ("low", "high", "name", "later"),
    [
        ("x[..., self.first::2]", "x[..., 1::2]", "first", 1),
        ("x[..., 0::self.step]", "x[..., 1::2]", "step", 8),  # one column, which every table fits
        ("x[..., self.first : 4]", "x[..., 4:]", "first", 3),  # as above
        ("x[..., self.first : self.first + 4]", "x[..., 4:]", "first", 4),
    ],
)
@pytest.mark.usefixtures("nothing_is_idle")
def test_a_part_of_the_same_width_fits_the_table_too(
    tmp_path: Path, low: str, high: str, name: str, later: int
) -> None:
    paired = "torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)"
    halved = "torch.cat((a * cos - b * sin, a * sin + b * cos), -1)"
    parts = f"""\
    def pairs(self, x):
        cos, sin = self.cos[:, :4], self.sin[:, :4]
        a, b = {low}, {high}
        return {paired if "::" in low else halved}

    def forward(self"""
    text = HEAD.replace("    def forward(self", parts).replace(
        "self.low, ", "self.first, self.step = 0, 2\n        self.low, "
    )
    body = ROPE.format("(self.pairs(q), k)")
    model = net(tmp_path, text + textwrap.indent(body, " " * 8))
    original = copy.deepcopy(model)
    patches = Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64), recipes=["rope"]))
    patches.apply()
    assert "rope(" in patches.diff
    same(original, model)
    for each in (original, model):
        setattr(each, name, later)
    same(original, model)


# ----------------------------------------------------------------------------------------------------------------------
# Numbers in tensors
# ----------------------------------------------------------------------------------------------------------------------

FILLED = """\
q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
att = torch.where(self.seen, q @ k.transpose(-2, -1) * 0.5, self.fill)
return (att.softmax(-1) @ v).squeeze(1)
"""
NORM = "x = self.gate(x)\nreturn x * torch.rsqrt(x.pow(self.power).mean(-1, keepdim=True) + 1e-5)\n"


def compiled(model: nn.Module, x: Tensor) -> Tensor:
    torch._dynamo.reset()
    result: Tensor = torch.compile(model, backend="eager", fullgraph=True)(x)
    return result


def mapped(model: nn.Module, x: Tensor) -> Tensor:
    """Over buffers."""
    held = {name: torch.stack((each, each)) for name, each in model.named_buffers()}
    weights = dict(model.named_parameters())
    result: Tensor = torch.func.vmap(lambda each: torch.func.functional_call(model, (weights, each), (x,)))(held)
    return result


def exported(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = torch.export.export(model, (x,)).module()(x)
    return result


@pytest.mark.parametrize("call", [compiled, mapped, exported])
@pytest.mark.usefixtures("nothing_is_idle")
def test_where_no_tensor_can_be_looked_at(
    tmp_path: Path, call: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, model, recipes = planned(tmp_path, FILLED)
    assert recipes
    home = ModuleType(type(model).__module__)  # which the compiler asks for
    vars(home).update(type(model).forward.__globals__)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, home.__name__, home)
    same(original, model, call)


@pytest.mark.usefixtures("nothing_is_idle")
def test_on_the_meta_device(tmp_path: Path) -> None:
    _, model, _ = planned(tmp_path, FILLED)
    assert model.to("meta")(torch.empty(2, 6, 8, device="meta", dtype=torch.float64)).shape == (2, 6, 8)


@pytest.mark.parametrize(
    "later",
    [2.0, 4.0, torch.full((16,), 2.0), torch.tensor([2.0, 4.0]).repeat(8), torch.tensor(2.0), torch.tensor(4.0)],
)
@pytest.mark.usefixtures("nothing_is_idle")
def test_a_held_number_of_another_kind(tmp_path: Path, later: float | Tensor) -> None:
    original, model, recipes = planned(tmp_path, NORM)
    assert recipes == ["rms_norm"]
    same(original, model)
    for each in (original, model):
        each.power = later  # type: ignore[assignment]
    same(original, model)


@pytest.mark.parametrize("later", [2, nn.Parameter(torch.tensor(1.0, dtype=torch.float64))], ids=["2", "learnt"])
@pytest.mark.usefixtures("nothing_is_idle")
def test_an_integer_becomes_another_or_is_learnt(tmp_path: Path, later: int | Tensor) -> None:
    body = "x = self.gate(x)\nreturn 0.5 * x * (self.which + torch.erf(x / 2**0.5))\n"
    original, model, recipes = planned(tmp_path, body)
    assert recipes == ["gelu"]
    for each in (original, model):
        del each.which
        each.which = copy.deepcopy(later)  # type: ignore[assignment]
    same(original, model)


@pytest.mark.usefixtures("nothing_is_idle")
def test_an_index_of_several_numbers_is_written_or_refused(tmp_path: Path) -> None:
    body = ROPE.format("(q * self.cos + self.part(q) * self.sin, k)")
    text = HEAD.replace("self.low, ", "self.where = (..., slice(4, None))\n        self.low, ")
    text = text.replace("-x[..., self.half :]", "-x[self.where]")
    model = net(tmp_path, text + textwrap.indent(body, " " * 8))
    patches = Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64), recipes=["rope"]))
    assert [site.reasons for site in patches.sites] == [["line 24: the value of self.where may change between calls"]]


def test_a_held_number_is_looked_at_once_for_each_content() -> None:
    held = torch.tensor(2.0)
    assert is_number(held, 2.0) and is_number(held, 2.0) and not is_number(held, 3.0)
    held.add_(1.0)
    assert is_number(held, 3.0) and not is_number(held, 2.0)
    assert not is_number(held.clone().requires_grad_(), 3.0) and not is_number(held[None], 3.0)
    with torch.inference_mode():
        assert is_number(torch.tensor(2.0), 2.0)
    assert is_number(2, 2.0) and not is_number("2", 2.0)


@pytest.mark.parametrize("drawn", ["torch.randint(2, 3, ())", "torch.initial_seed() * 0 + 2"])
@pytest.mark.usefixtures("nothing_is_idle")
def test_what_is_drawn_or_asked_of_torch_is_no_constant(tmp_path: Path, drawn: str) -> None:
    body = f"x = self.gate(x)\nreturn x * torch.rsqrt(x.pow(int({drawn})).mean(-1, keepdim=True) + 1e-5)\n"
    assert planned(tmp_path, body)[2] == []


@pytest.mark.parametrize(
    ("above", "root"),
    [
        ("from math import sqrt", "sqrt(2.0)"),
        ("from math import sqrt, pow", "sqrt(pow(2.0, 1))"),
        ("from math import pi", "(2 * pi / pi) ** 0.5"),
        ("", "float(2**0.5)"),
    ],
)
@pytest.mark.usefixtures("nothing_is_idle")
def test_functions_of_math_are_not_asked_for(tmp_path: Path, above: str, root: str) -> None:
    body = f"x = self.gate(x)\nreturn 0.5 * x * (1.0 + torch.erf(x / {root}))\n"
    model = net(tmp_path, HEAD.replace("import math\n", f"import math\n{above}\n") + textwrap.indent(body, " " * 8))
    ((_, after),) = Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64))).texts.values()
    assert "gelu(x)" in after and "if " not in after


@pytest.mark.usefixtures("nothing_is_idle")
def test_a_number_that_becomes_a_tensor_is_not_asked_for(tmp_path: Path) -> None:
    """As GPT-2's of old, which has one name for both."""
    made = "fill = -1e9\nfill = torch.tensor(fill, dtype=x.dtype).to(x.device)\n"
    model = net(tmp_path, HEAD + textwrap.indent(made + FILLED.replace("self.fill", "fill"), " " * 8))
    ((_, after),) = Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64))).texts.values()
    assert "attention(" in after and "if " not in after


@pytest.mark.usefixtures("nothing_is_idle")
def test_a_number_that_the_new_code_reads_is_not_asked_for(tmp_path: Path) -> None:
    body = f"q, k, v = self.qkv(x).chunk(3, -1){_HEADS}\ny = F.scaled_dot_product_attention(q, k, v, scale=self.half)\n"
    body += "return y.transpose(1, 2).reshape(B, T, C)\n"
    model = net(tmp_path, HEAD + textwrap.indent(body, " " * 8))
    ((_, after),) = Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64))).texts.values()
    assert "scale=self.half" in after and "if " not in after


@pytest.mark.usefixtures("nothing_is_idle")
def test_a_function_of_the_files_own_is_no_constant(tmp_path: Path) -> None:
    body = "x = self.gate(x)\nreturn 0.5 * x * (1.0 + torch.erf(x / float(2)))\n"
    text = HEAD.replace("\n\nclass", "\n\ndef float(x):\n    return x**0.5\n\n\nclass", 1)
    model = net(tmp_path, text + textwrap.indent(body, " " * 8))
    patches = Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64)))
    assert [site.reasons for site in patches.sites] == [["line 42: the value of float(2) may change between calls"]]


@pytest.mark.parametrize(("kind", "norm"), [("LayerNorm", "add_layer_norm"), ("RMSNorm", "add_rms_norm")])
@pytest.mark.usefixtures("nothing_is_idle")
def test_more_than_the_last_dimension_is_normalised(tmp_path: Path, kind: str, norm: str) -> None:
    body = "h = self.drop(self.lift(x))\nx = x + h\nreturn x * 2 + self.norm(x)\n"
    own = f"self.lift, self.drop, self.norm = nn.Linear(8, 8), nn.Dropout(0.0), nn.{kind}(8)\n        self.low, "
    model = net(tmp_path, HEAD.replace("self.low, ", own) + textwrap.indent(body, " " * 8))
    original = copy.deepcopy(model)
    patches = Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64)))
    patches.apply()
    assert f"{norm}(" in patches.diff
    for each in (original, model):
        torch.manual_seed(4)
        each.norm = getattr(nn, kind)((6, 8)).double()
    same(original, model)
