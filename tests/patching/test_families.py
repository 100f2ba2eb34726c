"""Other classes of the file, and other ways to give it something, make no wrong file of one that was proved."""

from __future__ import annotations

import importlib.util
import itertools
import os
import textwrap
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gradscope.patching.advice import what_to_do
from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan

HEAD = """\
import contextlib
import os
import torch
import torch.nn.functional as F
from torch import nn


class Base(nn.Module):
    def give(self, kind):
        self.act = kind()
        return self


class Net(Base):
    def __init__(self, other=False):
        super().__init__()
        self.gate, self.up, self.act = nn.Linear(8, 8), nn.Linear(8, 8), {act}
        if other:
            {line}

    def do(self, x):
        return F.silu(x)

    def forward(self, x):
        return {called}(self.gate(x)) * self.up(x)


{below}


def make(other):
    return {made}
"""
_numbers = itertools.count()
pytestmark = pytest.mark.usefixtures("nothing_is_idle")


def text_of(
    made: str = "Net(other)",
    below: str = "",
    *,
    line: str = "pass",
    called: str = "self.act",
    act: str = "nn.SiLU()",
    base: str = "nn.Module",
) -> str:
    text = HEAD.replace("class Net(Base)", f"class Net({base})")
    return text.format(made=made, below=textwrap.dedent(below), line=line, called=called, act=act)


def loaded(folder: Path, text: str) -> ModuleType:
    path = folder / f"family{next(_numbers)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def results(module: ModuleType, *, other: bool) -> list[Tensor]:
    torch.manual_seed(3)
    model = module.make(other).double()
    output = model(torch.randn(2, 6, 8, dtype=torch.float64))
    output.square().sum().backward()
    return [output.detach(), *(each.grad for each in model.parameters())]


def planned(folder: Path, text: str) -> Patches:
    model = loaded(folder, text).make(False).double()
    return Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64)))


SUB = """
class Sub({}):
    def __init__(self):
        super().__init__()
        self.act = nn.GELU()
"""
MIXED = "class Mixed:\n    def set(self):\n        self.act = nn.GELU()\n        return self\n\n"
INDENTED = SUB.format("Net").replace("\n", "\n  ")
WIDER = {
    "a class above gives it": text_of("Net().give(nn.GELU) if other else Net()", base="Base"),
    "a function outside of it": text_of(
        "given(Net()) if other else Net()",
        "def given(self):\n    self.act = nn.GELU()\n    return self",
        base="nn.Module",
    ),
    "a class mixed in": text_of(
        "Sub().set() if other else Net()",
        MIXED + "class Sub(Mixed, Net):\n    pass",
    ),
    "a class mixed in by a call": text_of(
        "Sub().set() if other else Net()", MIXED + "Sub = type('Sub', (Mixed, Net), {})"
    ),
    "a class mixed in later": text_of(
        "made().set() if other else Net()",
        MIXED + "def made():\n    class Sub(Mixed, Net): pass\n    return Sub()",
    ),
    "a class beside it": text_of("Sub() if other else Twin()", "class Twin(Net): pass\n" + SUB.format("Net")),
    "a class in a condition": text_of("Sub() if other else Net()", "if True:" + INDENTED),
    "a class of a function": text_of(
        "made() if other else Net()",
        "def made():" + INDENTED + "\n  return Sub()",
    ),
    "a class of a function, that a call makes": text_of(
        "made() if other else Net()",
        "def made():" + INDENTED.replace("(Net)", "(type('X', (Net,), {}))") + "\n  return Sub()",
    ),
    "a class by another name": text_of("Sub() if other else Net()", "Alias = Net\n" + SUB.format("Alias")),
    "a class that a call makes": text_of("Sub() if other else Net()", SUB.format("type('X', (Net,), {})")),
    **{
        f"in a class: {body}": text_of("Sub() if other else Net()", f"class Sub(Net):\n    {body}", base="nn.Module")
        for body in (
            "act = nn.GELU()",
            "act = property(lambda self: F.gelu)",
            "def __getattribute__(self, name): return F.gelu if name == 'act' else super().__getattribute__(name)",
        )
    },
    "a member of a class that a call makes": text_of(
        "made() if other else Net()", "def made(): return type('X', (Net,), {'act': nn.GELU()})()", base="nn.Module"
    ),
    **{
        line: text_of(line=line)
        for line in (
            'self.add_module(module=nn.GELU(), name="act")',
            'self._modules["act"] = nn.GELU()',
            "self._modules.update(act=nn.GELU())",
            'self.__dict__.setdefault("act", nn.GELU())',
            'self.__dict__["act"] = nn.GELU()',
            'vars(self)["act"] = nn.GELU()',
            "for self.act in [nn.GELU()]: pass",
            "with contextlib.nullcontext(nn.GELU()) as self.act: pass",
        )
    },
}


@pytest.mark.parametrize("text", WIDER.values(), ids=WIDER)
def test_whoever_may_give_it_another_module_is_asked_for(tmp_path: Path, text: str) -> None:
    ((_, after),) = planned(tmp_path, text).texts.values()
    assert "if type(self.act) is nn.SiLU" in after
    for other in (False, True):
        before = results(loaded(tmp_path, text), other=other)
        torch.testing.assert_close(results(loaded(tmp_path, after), other=other), before, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["elsewhere", None])
def test_a_class_of_another_file_may_give_it_another(tmp_path: Path, name: str | None) -> None:
    module = loaded(tmp_path, text_of())
    below = type("Sub", (module.Net,), {"__module__": name or module.__name__})
    ((_, after),) = Patches(plan(module.make(False).double(), torch.randn(2, 6, 8, dtype=torch.float64))).texts.values()
    assert ("if type(self.act) is nn.SiLU" in after) == (below.__module__ != module.__name__)


def test_a_class_that_shares_nothing_is_not_asked_for(tmp_path: Path) -> None:
    below = "from typing import Generic, TypeVar\nT = TypeVar('T')\nclass Own(dict):\n    pass\n\n"
    below += SUB.format("nn.Module") + SUB.format("nn.Module, Generic[T]").replace("Sub", "OfAKind")
    ((_, after),) = planned(tmp_path, text_of(below=below)).texts.values()
    assert "if type(" not in after and "swiglu(" in after


DO = "class Mixed:\n    def do(self, x):\n        return F.gelu(x)\n\n"


def test_the_form_of_a_class_is_not_asked_for(tmp_path: Path) -> None:
    below = "class Sub(Net):\n    act: nn.Module\n\ndef made(): return type('X', (Net,), {'other': 1})"
    ((_, after),) = planned(tmp_path, text_of(below=below, base="nn.Module")).texts.values()
    assert "if type(" not in after


OUTSIDE = "def changed(net):\n    {}\n    return net"
HELD = "line 25: self.act may contain different modules in another call"
REFUSED = {
    **{
        line: (text_of(line=line, act="nn.Sequential(nn.SiLU())"), HELD)
        for line in (
            "self.act[0] = nn.GELU()",
            "self.act.append(nn.Tanh())",
            'self.act.add_module("more", nn.Tanh())',
            "self.act.forward = F.gelu",
            "self.act.register_forward_hook(lambda module, given, output: 2 * output)",
        )
    },
    **{
        line: (
            text_of("changed(Net()) if other else Net()", OUTSIDE.format(line), act="nn.Sequential(nn.SiLU())"),
            HELD,
        )
        for line in ("net.act[0] = nn.GELU()", "net.act.forward = F.gelu")
    },
    "a method of the module's own": (
        text_of(line="self.do = F.gelu", called="self.do"),
        "do is not called by its own name",
    ),
    **{
        f"a method that is set: {line}": (
            text_of(line=line, called="self.do"),
            "do is not called by its own name",
        )
        for line in ('setattr(self, "do", F.gelu)', "for name in ('do',): setattr(self, name, F.gelu)")
    },
    **{
        f"another module of that name: {name}": (
            text_of("swap(Net()) if other else Net()", below, called="F.silu"),
            "silu is not called by its own name",
        )
        for name, below in {
            "a global": "class Mine:\n    silu = F.gelu\n\ndef swap(net):\n    global F\n    F = Mine\n    return net",
            "an import": "if 'GRADSCOPE_OTHER' in os.environ:\n    import math as F",
            "a choice": "class Mine:\n    silu = F.gelu\n\nF = Mine if 'GRADSCOPE_OTHER' in os.environ else F",
            "a condition": "class Mine:\n    silu = F.gelu\n\nif 'GRADSCOPE_OTHER' in os.environ:\n    F = Mine",
        }.items()
    },
    "a method that is set": (
        text_of("changed(Net()) if other else Net()", OUTSIDE.format("net.do = F.gelu"), called="self.do"),
        "do is not called by its own name",
    ),
    **{
        name: (
            text_of("Sub() if other else Net()", below, called="self.do"),
            "do is defined in Net, but overridden in Sub",
        )
        for name, below in {
            "a method": "class Sub(Net):\n    def do(self, x):\n        return F.gelu(x)",
            "a static method": "class Sub(Net):\n    @staticmethod\n    def do(x):\n        return F.gelu(x)",
            "a class that a call makes": "def made(): return type('Sub', (Net,), {'do': staticmethod(F.gelu)})",
            "an attribute of the class": "class Sub(Net):\n    do = staticmethod(F.gelu)",
            "a method of two classes": DO + "class Sub(Mixed, Net): pass",
            "a method that nobody wrote here": "Sub = type('Sub', (type('M', (), {'do': F.gelu}), Net), {})",
            "a method, further below": "Sub = type('Sub', (type('M', (Net,), {}),), {'do': F.gelu})",
            "an attribute, of a class that is made later": (
                "def made():\n  class Sub(Net):\n    do = staticmethod(F.gelu)\n  return Sub()"
            ),
            "a method, by a condition": "if os.sep:\n  class Sub(Net):\n    def do(self, x):\n        return F.gelu(x)",
        }.items()
    },
    "two functions of a name": (
        text_of(
            called="quick",
            below='if "GRADSCOPE_OTHER" in os.environ:\n    def quick(x): return F.gelu(x)\n'
            "else:\n    def quick(x): return F.silu(x)",
        ),
        "quick is not called by its own name",
    ),
    "two classes of a name": (
        text_of(
            line="self.act = Act()",
            act="Act()",
            below='if "GRADSCOPE_OTHER" in os.environ:\n    class Act(nn.GELU): pass\n'
            "else:\n    class Act(nn.Module):\n        def forward(self, x): return F.silu(x)",
        ),
        "line 25: self.act may be a module of a different class in another call",
    ),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_asked_for_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    assert "GRADSCOPE_OTHER" not in os.environ
    assert [site.reasons for site in planned(tmp_path, text).sites] == [[reason]]
    assert what_to_do(reason)


def test_a_name_of_all_of_another_file_is_no_constant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"all_of_{next(_numbers)}"
    (tmp_path / f"{name}.py").write_text("import torch.nn.functional as F\nACT = F.silu\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    patches = planned(tmp_path, text_of(called="ACT", below=f"from {name} import *"))
    assert [site.reasons for site in patches.sites] == [["silu is not called by its own name"]]


def test_methods_that_nobody_else_has_are_looked_through(tmp_path: Path) -> None:
    below = "class Sub(Net):\n    def other(self): pass\n\nclass Apart(nn.Module):\n    def do(self, x): pass"
    ((_, after),) = planned(tmp_path, text_of(called="self.do", below=below)).texts.values()
    assert "swiglu(self.gate(x), self.up(x))" in after


SETTINGS = """\
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, dim=-1, pad=None, norm=None, often=False):
        super().__init__()
        self.table = nn.Embedding(9, 8, pad, max_norm=norm, scale_grad_by_freq=often)
        self.qkv, self.soft, self.head = nn.Linear(8, 24), nn.Softmax(dim=dim), nn.Linear(8, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        words = (x[..., 0] * 4).long().clamp(0, 8)
        y = self.table(words)
        q, k, v = self.qkv(y).unsqueeze(1).chunk(3, -1)
        return self.head((self.soft(q @ k.mT * 0.5) @ v).squeeze(1))


def make(other):
    return Net({given})
"""


@pytest.mark.parametrize("given", ["dim=-2", "pad=1", "norm=0.5", "often=True", "dim=-1"])
def test_another_setting_of_a_module_is_asked_for(tmp_path: Path, given: str) -> None:
    text = SETTINGS.replace("Net({given})", f"Net({given}) if other else Net()")
    patches = planned(tmp_path, text)
    assert {site.recipe for site in patches.in_source} == {"embedding", "packed_attention"}, (
        patches.table.reasons.tolist()
    )
    ((_, after),) = patches.texts.values()
    for other in (False, True):
        before = results(loaded(tmp_path, text), other=other)
        torch.testing.assert_close(results(loaded(tmp_path, after), other=other), before, rtol=1e-9, atol=1e-10)
    certain = text.replace("dim=dim", "dim=-1").replace("8, pad, max_norm=norm, scale_grad_by_freq=often", "8")
    ((_, after),) = planned(tmp_path, certain).texts.values()
    assert "if self." not in after


def test_a_setting_that_the_new_code_reads_is_not_asked_for(tmp_path: Path) -> None:
    text = SETTINGS.replace("Net({given})", "Net()").replace("pad=None", "pad=2")
    ((_, after),) = planned(tmp_path, text).texts.values()
    assert "self.table.max_norm is None" in after and after.count("self.table.padding_idx") == 1


@pytest.mark.parametrize("made", ["nn.Embedding(*(9, 8, pad, norm))", 'nn.Embedding(9, 8, **{"max_norm": norm})'])
def test_a_setting_that_is_not_written_in_its_place_is_asked_for(tmp_path: Path, made: str) -> None:
    text = SETTINGS.replace("nn.Embedding(9, 8, pad, max_norm=norm, scale_grad_by_freq=often)", made)
    agree(tmp_path, text.replace("Net({given})", "Net(norm=0.5) if other else Net()"))


BUILT = """\
def built(pad):
    return nn.Embedding(9, 8, pad)


def changed(net, kind):
    for each in net.modules():
        if isinstance(each, nn.Softmax) and kind == "a loop":
            each.dim = -2
    if kind == "setattr":
        setattr(net, "soft", nn.Softmax(dim=-2))
    return net


class Sub(Net):
    soft = nn.Softmax(-2)


"""


@pytest.mark.parametrize("made", ['changed(Net(), "a loop")', 'changed(Net(), "setattr")', "Sub()", "Net(pad=1)"])
def test_a_setting_that_is_changed_elsewhere_is_asked_for(tmp_path: Path, made: str) -> None:
    text = SETTINGS.replace("Net({given})", f"{made} if other else Net()").replace("dim=dim", "dim=-1")
    text = text.replace("nn.Embedding(9, 8, pad, max_norm=norm, scale_grad_by_freq=often)", "built(pad)")
    text = text.replace("def make", BUILT + "def make")
    agree(tmp_path, text)


def test_a_file_may_read_items_of_what_bears_the_same_name(tmp_path: Path) -> None:
    """``self.soft[0]``, read in another class, is not a hook and changes nothing."""
    other = "class Other(nn.Module):\n    def forward(self, x):\n        return self.soft[0](x) + self.table[1]\n\n\n"
    text = SETTINGS.replace("Net({given})", "Net()").replace("def make", other + "def make")
    patches = planned(tmp_path, text)
    assert {site.recipe for site in patches.in_source} == {"embedding", "packed_attention"}


def agree(folder: Path, text: str) -> None:
    """Both models of a file and of what is written of it give the same."""
    ((_, after),) = planned(folder, text).texts.values()
    for other in (False, True):
        before = results(loaded(folder, text), other=other)
        torch.testing.assert_close(results(loaded(folder, after), other=other), before, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    "line", ['held = self._modules; held["act"] = nn.GELU()', "held = vars(self); self.more(held)"]
)
def test_a_name_for_all_that_a_module_holds_is_asked_for(tmp_path: Path, line: str) -> None:
    more = "class More(nn.Module):\n    def more(self, held):\n        held['_modules']['act'] = nn.GELU()\n\n\n"
    agree(tmp_path, text_of(line=line, base="More").replace("class Net", more + "class Net"))


@pytest.mark.parametrize(
    "imports",
    [
        "import torch, torch.nn as nn, torch.nn.functional as F",
        "import torch\nimport torch.nn\nfrom torch.nn import functional as F\nimport torch.nn.functional as F",
        "import torch\nF = torch.nn.functional",
    ],
)
def test_an_import_of_several_names_is_one_of_each(tmp_path: Path, imports: str) -> None:
    text = text_of(called="F.silu").replace("import torch.nn.functional as F", imports)
    ((_, after),) = planned(tmp_path, text).texts.values()
    assert "swiglu(" in after and "if " not in after.partition("def forward")[2].partition("\n\n")[0]


LOCAL = """
class Mine:
    SiLU = nn.GELU


class Sub(Net):
    def __init__(self, other):
        super().__init__()
        self.fill(Mine if other else nn)

    def fill(self, nn):
        self.act = nn.SiLU()
"""


def test_a_class_of_what_a_local_name_holds_is_asked_for(tmp_path: Path) -> None:
    agree(tmp_path, text_of("Sub(other)", LOCAL))


PARTS = SETTINGS.replace("nn.Softmax(dim=dim)", "nn.Sequential(nn.Softmax(dim={soft}))")


@pytest.mark.parametrize(
    ("soft", "below", "found"),
    [
        ("-1", "", {"embedding", "packed_attention"}),
        ("dim", "", {"embedding"}),
        ("-1", "def changed(net):\n    for each in net.modules():\n        each.dim = -2\n\n\n", {"embedding"}),
    ],
)
def test_a_setting_of_a_part_of_a_container_is_written_there(
    tmp_path: Path, soft: str, below: str, found: set[str]
) -> None:
    text = PARTS.replace("{soft}", soft).replace("Net({given})", "Net()").replace("def make", below + "def make")
    assert {site.recipe for site in planned(tmp_path, text).in_source} == found
