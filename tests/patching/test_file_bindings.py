"""What a file's names and attributes hold may be another thing next time, unless it is there by its own name."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan
from tests.patching.test_bindings import net

HEAD = """\
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import silu
from torch.nn.functional import silu as swish
import {other}
from {other} import ACT as IMPORTED, Held, own as renamed, silu as theirs

ACT, KIND = F.silu, nn.SiLU
ALONE, APART = F.silu, {other}.Apart
TYPED: object = F.silu
for LOOPED in (F.silu,):
    assert (INSIDE := LOOPED)
softmax = torch.softmax
written = lambda x: F.silu(x)
try:
    quick = F.silu
except AttributeError:
    quick = None


class Config:
    act = F.silu  # not through an instance, which would be bound to it
    kind = nn.SiLU


def helper(x):
    return F.silu(x)


cfg, HELPER = Config(), helper
cfg.act, cfg.helper = F.silu, helper


def chosen():
    global late
    late = F.silu


chosen()


async def elsewhere():
    silu = F.gelu
    return silu


class Net(nn.Module):
    def __init__(self, name="silu"):
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)
        self.silu, self.kind, self.theirs = nn.SiLU(), KIND(), Held()
        {line}

    def forward(self, x):
        {body}
"""
OTHER = """\
import torch
from torch import nn
from torch.nn.functional import silu

ACT, KIND = silu, nn.SiLU


class Held(nn.Module):
    def forward(self, x):
        return silu(x)


class Apart(Held):
    pass


def own(x):
    return silu(x)


OWN = own
"""
_numbers = itertools.count()
pytestmark = pytest.mark.usefixtures("nothing_is_idle")


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of another file that can be imported."""
    name = f"other_bindings_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text(OTHER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def planned(folder: Path, other: str, body: str, line: str = "pass") -> Patches:
    text = HEAD.format(other=other, body=body, line=line)
    return Patches(plan(net(folder, text), torch.randn(2, 6, 8, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("function", "named"),
    [
        ("ACT", "silu"),
        ("ALONE", "silu"),
        ("TYPED", "silu"),
        ("LOOPED", "silu"),
        ("INSIDE", "silu"),
        ("quick", "silu"),
        ("late", "silu"),
        ("IMPORTED", "silu"),
        ("cfg.act", "silu"),
        ("Config.act", "silu"),
        ("{other}.ACT", "silu"),
        ("HELPER", "helper"),
        ("cfg.helper", "helper"),
        ("{other}.OWN", "own"),
    ],
)
def test_a_name_that_was_given_a_function_is_no_constant(tmp_path: Path, other: str, function: str, named: str) -> None:
    patches = planned(tmp_path, other, f"return {function.format(other=other)}(self.gate(x)) * self.up(x)")
    assert [site.reasons for site in patches.sites] == [[f"{named} is not called by its own name"]]


@pytest.mark.parametrize(
    "called",
    [
        "silu(self.gate(x))",
        "swish(self.gate(x))",
        "theirs(self.gate(x))",
        "renamed(self.gate(x))",
        "written(self.gate(x))",
        "helper(self.gate(x))",
        "torch.nn.functional.silu(self.gate(x))",
        "{other}.silu(self.gate(x))",
        "{other}.own(self.gate(x))",
        "self.silu(self.gate(x))",
        "self.theirs(self.gate(x))",
    ],
)
def test_what_is_called_by_its_own_name_is_replaced(tmp_path: Path, other: str, called: str) -> None:
    patches = planned(tmp_path, other, f"return {called.format(other=other)} * self.up(x)")
    ((_, after),) = patches.texts.values()
    assert "swiglu(" in after and "if type(" not in after


@pytest.mark.parametrize("called", ["softmax(s, -1)", "Tensor.softmax(s, -1)", "s.softmax(-1)", "(s * 2).softmax(-1)"])
def test_the_ways_to_call_softmax(tmp_path: Path, other: str, called: str) -> None:
    lines = ["x = self.up(x).unsqueeze(1)", "s = x @ x.mT * 0.3", f"return {called} @ x"]
    body = f"\n{' ' * 8}".join(lines)
    patches = planned(tmp_path, other, body)
    assert [site.recipe for site in patches.in_source] == ["attention"], patches.table.reasons.tolist()


@pytest.mark.parametrize(
    "line",
    [
        'setattr(self, "silu", nn.SiLU())',
        "setattr(self, name, nn.SiLU())",
        "self.add_module(name, nn.SiLU())",
        'self.register_module("silu", nn.SiLU())',
        'self.set_submodule("silu", nn.SiLU())',
        'self.__setattr__("silu", nn.SiLU())',
        "self.silu = KIND()",
        "self.silu: nn.Module = KIND()",
        "self.silu = Config.kind()",
        "self.silu = {other}.KIND()",
    ],
)
def test_a_module_that_is_set_by_its_name_is_asked_for(tmp_path: Path, other: str, line: str) -> None:
    patches = planned(tmp_path, other, "return self.silu(self.gate(x)) * self.up(x)", line.format(other=other))
    ((_, after),) = patches.texts.values()
    assert "if type(self.silu) is nn.SiLU" in after


@pytest.mark.parametrize("line", ['setattr(self, "other", nn.SiLU())', 'self.add_module("other", nn.SiLU())'])
def test_what_is_set_by_another_name_changes_nothing(tmp_path: Path, other: str, line: str) -> None:
    patches = planned(tmp_path, other, "return self.silu(self.gate(x)) * self.up(x)", line)
    ((_, after),) = patches.texts.values()
    assert "if type(" not in after


def test_an_alias_is_no_name_to_ask_by(tmp_path: Path, other: str) -> None:
    """``KIND = nn.Tanh`` would make both sides of ``type(self.kind) is KIND`` another class."""
    patches = planned(tmp_path, other, "return self.kind(self.gate(x)) * self.up(x)")
    ((_, after),) = patches.texts.values()
    assert "if type(self.kind) is nn.SiLU" in after
    patches = planned(tmp_path, other, "return self.apart(self.gate(x)) * self.up(x)", "self.apart = APART()")
    ((_, after),) = patches.texts.values()
    assert 'if type(self.apart).__name__ == "Apart"' in after


def test_a_function_that_a_global_statement_may_change_is_no_constant(tmp_path: Path, other: str) -> None:
    later = "def later():\n    global helper\n    helper = F.gelu\n\n\nclass Net"
    text = HEAD.format(other=other, body="return helper(self.gate(x)) * self.up(x)", line="pass")
    model = net(tmp_path, text.replace("class Net", later))
    patches = Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64)))
    assert [site.reasons for site in patches.sites] == [["helper is not called by its own name"]]


@pytest.mark.parametrize("between", [False, True], ids=["itself", "over one of this file"])
def test_a_class_that_another_file_derives_may_hold_another_module(tmp_path: Path, other: str, between: bool) -> None:
    text = HEAD.format(other=other, body="return self.silu(self.gate(x)) * self.up(x)", line="pass")
    model = net(tmp_path, text)
    own = type(model)
    base = type("Between", (own,), {"__module__": own.__module__}) if between else own

    class Wider(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.silu = nn.Tanh()

    ((_, after),) = Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64))).texts.values()
    assert "if type(self.silu) is nn.SiLU" in after
    assert isinstance(Wider().silu, nn.Tanh)
