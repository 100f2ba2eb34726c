"""What a pattern calls may be another function, or a module of another class, next time or in another model."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradscope.patching.advice import what_to_do
from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan
from tests.patching.test_bindings import net

HEAD = """\
import torch
import torch.nn.functional as F
from torch import nn

KINDS = {"silu": nn.SiLU, "tanh": nn.Tanh}


class Own(nn.Module):
    def forward(self, x):
        return F.silu(x)


class Other(nn.Module):
    def forward(self, x):
        return F.gelu(x)


class Louder(Own):
    def forward(self, x):
        return 2 * super().forward(x)


OWN, LOUDER = {"silu": Own, "tanh": Other}, {"silu": Own, "tanh": Louder}
FUNCTIONS = {"silu": F.silu, "tanh": torch.tanh}
HIDDEN = {"silu": type("Hidden", (nn.Module,), {"forward": Own.forward}), "tanh": Other}


class Net(nn.Module):
    def __init__(self, act="silu", share=0.1, softmax=torch.softmax):
        super().__init__()
        self.qkv, self.gate, self.up = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)
        self.rsqrt, self.tanh, self.softmax = torch.rsqrt, torch.tanh, softmax
        self.drop = nn.Dropout(share) if share else nn.Identity()
        self.act, self.own, self.hidden = KINDS[act](), OWN[act](), HIDDEN[act]()
        self.silu_of_file, self.wrapped, self.written = Own(), nn.Sequential(OWN[act]()), nn.Sequential(Own())
        self.wrapped_silu, self.written_silu = nn.Sequential(KINDS[act]()), nn.Sequential(nn.SiLU())
        self.acts, self.by_name = nn.ModuleList([KINDS[act]()]), nn.ModuleDict({"silu": Own(), "tanh": Other()})
        self.kind, self.holder, self.louder = act, nn.Module(), LOUDER[act]()
        self.holder.act, self.function, self.choice = OWN[act](), lambda x: FUNCTIONS[act](x), FUNCTIONS[act]
        self.add_module("added", OWN[act]())
        self.low, self.silu = (nn.Linear(8, 8), nn.SiLU())
        self.register_buffer("cos", torch.rand(1, 6, 2).repeat(1, 1, 2))
        self.register_buffer("sin", torch.rand(1, 6, 2).repeat(1, 1, 2))

    @property
    def given(self):
        return self.own

    def by(self, act, x):
        return act(x)

    def turned(self, x, unsqueeze_dim=1):
        cos, sin = self.cos.unsqueeze(unsqueeze_dim), self.sin.unsqueeze(unsqueeze_dim)
        return x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin

    def forward(self, x):
"""
BLOCK = """\
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


BLOCKS = {"silu": Block, "tanh": nn.Tanh}


class Net("""
ATTENTION = "q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)\nreturn {} @ v\n"

pytestmark = pytest.mark.usefixtures("nothing_is_idle")


def text_of(body: str) -> str:
    return HEAD + textwrap.indent(body, " " * 8)


def planned(folder: Path, body: str) -> Patches:
    return Patches(plan(net(folder, text_of(body)), torch.randn(2, 6, 8, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("body", "op"),
    [
        (ATTENTION.format("self.softmax(q @ k.mT * 0.5, -1)"), "softmax"),
        ("x = self.up(x)\nreturn x * self.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)\n", "rsqrt"),
        ("x = self.up(x)\nreturn 0.5 * x * (1 + self.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))\n", "tanh"),
        ("f, x = self.rsqrt, self.up(x)\nreturn x * f(x.pow(2).mean(-1, keepdim=True) + 1e-5)\n", "rsqrt"),
    ],
)
def test_a_function_that_an_attribute_holds_is_no_constant(tmp_path: Path, body: str, op: str) -> None:
    patches = planned(tmp_path, body)
    assert patches.sites
    for site in patches.sites:
        assert site.reasons == [f"{op} is not called by its own name"]
        assert what_to_do(site.reasons[0]).startswith("call it by its own name")


@pytest.mark.parametrize(
    ("body", "sizes"),
    [
        ("return self.act(self.gate(x)) * self.up(x)\n", ("tanh",)),
        ("return self.own(self.gate(x)) * self.up(x)\n", ("tanh",)),
        ("return self.own.forward(self.gate(x)) * self.up(x)\n", ("tanh",)),
        ("act = self.own\nreturn act(self.gate(x)) * self.up(x)\n", ("tanh",)),
        ("return self.hidden(self.gate(x)) * self.up(x)\n", ("tanh",)),
        ("return self.louder(self.gate(x)) * self.up(x)\n", ("tanh",)),
        ("return self.added(self.gate(x)) * self.up(x)\n", ("tanh",)),
        ("return self.given(self.gate(x)) * self.up(x)\n", ("tanh",)),
        ("return self.acts[0](self.gate(x)) * self.up(x)\n", ("tanh",)),
        ("return self.acts[-1](self.gate(x)) * self.up(x)\n", ("tanh",)),
        ("act = self.acts[0]\nreturn act(self.gate(x)) * self.up(x)\n", ("tanh",)),
        ("return self.by_name[self.kind](self.gate(x)) * self.up(x)\n", ("tanh",)),
        ("return self.holder.act(self.gate(x)) * self.up(x)\n", ("tanh",)),
        ("return self.own.__call__(self.gate(x)) * self.up(x)\n", ("tanh",)),
        (ATTENTION.format("self.drop((q @ k.mT * 0.5).softmax(-1))"), ("silu", 0.0)),
    ],
)
def test_a_model_with_another_class_there_runs_the_old_code(tmp_path: Path, body: str, sizes: tuple[Any, ...]) -> None:
    ((before, after),) = planned(tmp_path, body).texts.values()
    assert "if type(self." in after, after
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    for given in ((), sizes):
        one, other = (net(tmp_path, text, *given)(x) for text in (before, after))
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-10)


def test_a_class_that_is_written_down_is_not_asked_for(tmp_path: Path) -> None:
    ((_, after),) = planned(tmp_path, "return self.silu(self.gate(x)) * self.up(x)\n").texts.values()
    assert "swiglu(" in after and "if type(" not in after


LATER = {
    "a class that widens it": """
class Wider(Net):
    def __init__(self):
        super().__init__()
        self.silu = nn.Tanh()


made = Wider()
""",
    "a class that widens one that does": """
class Wider(Net):
    pass


class Widest(Wider):
    def __init__(self):
        super().__init__()
        self.silu = nn.Tanh()


made = Widest()
""",
    "a class of a function": """
def widened():
    class Wider(Net):
        def __init__(self):
            super().__init__()
            self.silu = nn.Tanh()

    return Wider


made = widened()()
""",
    "the file itself": """
made = Net()
made.silu = nn.Tanh()
""",
    "different class": """
class Holder:
    def __init__(self):
        self.net = Net()
        self.net.silu = nn.Tanh()


made = Holder().net
""",
}


@pytest.mark.parametrize("where", LATER)
def test_a_class_that_another_part_of_the_file_changes_is_asked_for(tmp_path: Path, where: str) -> None:
    body = "return self.silu(self.gate(x)) * self.up(x)\n\n"
    found = plan(net(tmp_path, text_of(body) + LATER[where]), torch.randn(2, 6, 8, dtype=torch.float64))
    ((before, after),) = Patches(found).texts.values()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    one, other = (made(tmp_path, text)(x) for text in (before, after))
    torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-10)


def made(folder: Path, text: str) -> Any:
    """What the text makes at its end, with the numbers that ``net`` begins with."""
    held = net(folder, text)
    last = type(held).forward.__globals__["made"].double()
    last.load_state_dict(held.state_dict())
    return last


def test_what_another_class_holds_by_that_name_is_not_asked_for(tmp_path: Path) -> None:
    other = "\n\nclass Stranger(nn.Module):\n    def __init__(self):\n        self.silu = nn.Tanh()\n"
    found = plan(
        net(tmp_path, text_of("return self.silu(self.gate(x)) * self.up(x)\n") + other),
        torch.randn(2, 6, 8, dtype=torch.float64),
    )
    ((_, after),) = Patches(found).texts.values()
    assert "swiglu(" in after and "if type(" not in after


@pytest.mark.parametrize("name", ["silu_of_file", "written", "written_silu"])
def test_a_class_of_the_file_that_is_written_down_is_not_asked_for(tmp_path: Path, name: str) -> None:
    ((_, after),) = planned(tmp_path, f"return self.{name}(self.gate(x)) * self.up(x)\n").texts.values()
    assert "swiglu(" in after and "if type(" not in after


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return self.function(self.gate(x)) * self.up(x)\n", "<lambda> is not called by its own name"),
        ("return self.choice(self.gate(x)) * self.up(x)\n", "silu is not called by its own name"),
        ("return FUNCTIONS[self.kind](self.gate(x)) * self.up(x)\n", "silu is not called by its own name"),
        (
            "own, _ = self.own, 1\nreturn own(self.gate(x)) * self.up(x)\n",
            "own may contain different modules in another call",
        ),
        (
            "i = 0\nreturn self.acts[i](self.gate(x)) * self.up(x)\n",
            "self.acts[i] may contain different modules in another call",
        ),
        ("return self.by(self.own, self.gate(x)) * self.up(x)\n", "the value of act may change between calls"),
        (
            "return (self.own if self.kind else self.act)(self.gate(x)) * self.up(x)\n",
            "self.own if self.kind else self.act may contain different modules in another call",
        ),
    ],
)
def test_what_can_be_asked_for_nowhere_is_left_alone(tmp_path: Path, body: str, reason: str) -> None:
    patches = planned(tmp_path, body)
    assert [site.reasons[0].rpartition(": ")[2] for site in patches.sites] == [reason]


def test_what_calls_the_module_itself_is_not_asked_for(tmp_path: Path) -> None:
    body = "return self.block(x)\n"
    text = (
        text_of(body)
        .replace("class Net(", BLOCK)
        .replace("self.drop = ", "self.block = BLOCKS[act]()\n        self.drop = ")
    )
    ((_, after),) = Patches(plan(net(tmp_path, text), torch.randn(2, 6, 8, dtype=torch.float64))).texts.values()
    assert "swiglu(" in after and "if type(" not in after


def test_what_an_argument_becomes_can_be_asked_for_nowhere(tmp_path: Path) -> None:
    text = text_of("act, _ = act or self.own, 1\nreturn act(self.gate(x)) * self.up(x)\n")
    model = net(tmp_path, text.replace("def forward(self, x):", "def forward(self, x, act=None):"))
    patches = Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64)))
    reasons = [site.reasons[0].rpartition(": ")[2] for site in patches.sites]
    assert reasons == ["act may contain different modules in another call"]


@pytest.mark.parametrize("name", ["wrapped", "wrapped_silu"])
def test_a_container_that_is_filled_by_a_choice_is_left_alone(tmp_path: Path, name: str) -> None:
    patches = planned(tmp_path, f"return self.{name}(self.gate(x)) * self.up(x)\n")
    assert [site.reasons for site in patches.sites] == [
        [f"line 57: self.{name} may contain different modules in another call"]
    ]
    assert what_to_do(patches.sites[0].reasons[0]).startswith("list its modules")


@pytest.mark.parametrize("behind", ["", "[:]"])
def test_where_a_table_has_its_heads_is_asked(tmp_path: Path, behind: str) -> None:
    """One sequence of one head fits the other way round as well, with the first token's angles for all."""
    body = (
        "q, k, v = self.qkv(x).view(2, 6, 6, 4).transpose(1, 2).chunk(3, 1)\nreturn self.turned(q) * self.turned(k)\n"
    )
    text = text_of(body).replace(".unsqueeze(unsqueeze_dim)", f".unsqueeze(unsqueeze_dim){behind}")
    patches = Patches(plan(net(tmp_path, text), torch.randn(2, 6, 8, dtype=torch.float64)))
    assert patches.in_source, patches.table.reasons.tolist()
    ((before, after),) = patches.texts.values()
    for shape, dim in (((2, 6, 2, 4), 2), ((2, 6, 1, 4), 2), ((2, 2, 6, 4), 1)):
        x = torch.randn(*shape, dtype=torch.float64)
        one, other = (_turned(net(tmp_path, text), x, dim) for text in (before, after))
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-10)


def _turned(model: Any, x: Tensor, dim: int) -> Tensor:
    turned: Tensor = model.turned(x, unsqueeze_dim=dim)
    return turned


def test_a_form_that_is_asked_for_by_a_call(tmp_path: Path) -> None:
    body = ATTENTION.format("s.masked_fill(torch.ones_like(s).triu(2).bool(), -torch.inf).softmax(-1)")
    patches = planned(tmp_path, body.replace("return", "s = q @ k.mT\nreturn"))
    reasons = {reason for site in patches.sites for reason in site.reasons}
    assert reasons == {"ones_like reads the shape of the result of matmul, which is removed"}
    assert what_to_do(reasons.pop()).startswith("read the shape or dtype from an operand")
