"""What a file gives to parts of a module by other ways than ``self.act = ...`` makes no wrong file of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.patching.test_families import HELD, OUTSIDE, agree, planned, text_of

pytestmark = pytest.mark.usefixtures("nothing_is_idle")

PARTS = "nn.Sequential(nn.SiLU())"
CHANGES = [
    'setattr(self.act, "0", nn.GELU())',
    'setattr(self.act, "forward", F.gelu)',
    'self.act._modules["0"] = nn.GELU()',
    'self.act.__dict__["forward"] = F.gelu',
    "parts = self.act; parts[0] = nn.GELU()",
    "if parts := self.act: parts.append(nn.Tanh())",
    'self.get_submodule("act")[0] = nn.GELU()',
    "for each in self.modules(): each[0] = nn.GELU()",
    "for each in list(self.children()): each[0] = nn.GELU()",
    "for name, each in self.named_modules(): each.forward = F.gelu",
]


@pytest.mark.parametrize("change", CHANGES)
def test_parts_that_another_name_changes(tmp_path: Path, change: str) -> None:
    inside = text_of(line=change, act=PARTS)
    outside = text_of(
        "changed(Net()) if other else Net()",
        OUTSIDE.format(change.replace("self", "net")),
        act=PARTS,
    )
    for text in (inside, outside):
        assert [site.reasons for site in planned(tmp_path, text).sites] == [[HELD]]


def test_names_of_other_functions_change_nothing(tmp_path: Path) -> None:
    """Nor do settings that are no part."""
    below = """
    def shown(net, rows):
        parts = net.act
        for each in net.modules():
            setattr(each, "seen", True)
            each.register_forward_hook(print)
        net.act.register_forward_hook(print)
        return parts[0]

    def filled(parts):
        parts[0] = 1
    """
    ((_, after),) = planned(tmp_path, text_of(below=below, act=PARTS)).texts.values()
    assert "swiglu(self.gate(x), self.up(x))" in after


BLOCK = """
class Block(nn.Module):
    def __init__(self, other):
        super().__init__()
        if other:
            {line}

    def do(self, x):
        return F.silu(x)

    def forward(self, x):
        return F.silu(x)
"""


@pytest.mark.parametrize(
    ("line", "below", "called", "method"),
    [
        ("self.forward = F.gelu", "", "self.act", "forward"),
        ("setattr(self, 'forward', F.gelu)", "", "self.act", "forward"),
        ("self.do = F.gelu", "", "self.act.do", "do"),
        (
            "pass",
            "if 'GRADSCOPE_OTHER' in os.environ: Block.forward = lambda self, x: F.gelu(x)",
            "self.act",
            "forward",
        ),
        ("pass", "if 'GRADSCOPE_OTHER' in os.environ: Block.do = lambda self, x: F.gelu(x)", "self.act.do", "do"),
        ("self.kept = F.gelu", "", "self.act", ""),
    ],
)
def test_a_part_may_be_given_another_method(tmp_path: Path, line: str, below: str, called: str, method: str) -> None:
    text = text_of(act="Block(other)", below=f"{BLOCK.format(line=line)}\n\n{below}", called=called)
    reasons = [site.reasons for site in planned(tmp_path, text).sites]
    assert reasons == [[f"{method} is not called by its own name"] if method else []]


@pytest.mark.parametrize("called", ["self.__class__.do", "Base.do", "super().do"])
@pytest.mark.parametrize(
    "below",
    [
        "class Sub(Net): do = staticmethod(F.gelu)",
        "if os.environ.get('GRADSCOPE_OTHER'): Base.do = staticmethod(F.gelu)",
    ],
)
def test_a_static_method_may_be_given_anew(tmp_path: Path, called: str, below: str) -> None:
    text = text_of("Sub() if other else Net()", below, base="Base", called=called)
    own = "    @staticmethod\n    def do(x): return F.silu(x)\n\n"
    text = text.replace("class Base(nn.Module):\n", f"class Base(nn.Module):\n{own}")
    text = text.replace("    def do(self, x):\n        return F.silu(x)\n\n", "")
    kept = "Sub" in below and called != "self.__class__.do"  # whatever a class below has
    assert [not site.reasons for site in planned(tmp_path, text).sites] == [kept]
    if kept:
        agree(tmp_path, text)


EVERY = "def __{}__(self, name): return F.gelu if name == '{}' else super().__{}__(name)"


@pytest.mark.parametrize("method", ["getattr", "getattribute"])
def test_a_class_that_gives_attributes_itself(tmp_path: Path, method: str) -> None:
    every = EVERY.format(method, "act", method)
    agree(tmp_path, text_of("Sub() if other else Net()", f"class Sub(Net):\n    {every}", base="nn.Module"))
    made = f"def every(self, name): return F.gelu if name == 'act' else nn.Module.__{method}__(self, name)\n"
    made += f"def made(): return type('X', (Net,), {{'__{method}__': every}})()"
    agree(tmp_path, text_of("made() if other else Net()", made, base="nn.Module"))


def test_a_class_that_gives_methods_itself(tmp_path: Path) -> None:
    below = f"class Sub(Net):\n    {EVERY.format('getattribute', 'do', 'getattribute')}"
    text = text_of("Sub() if other else Net()", below, called="self.do")
    assert [site.reasons for site in planned(tmp_path, text).sites] == [["do is defined in Net, but overridden in Sub"]]


def test_the_name_of_a_module_that_may_be_another_is_not_asked_by(tmp_path: Path) -> None:
    below = "class Mine:\n    SiLU = nn.GELU\n\ndef swapped():\n    global nn\n    nn = Mine\n    return Sub()\n\n"
    below += "class Sub(Net):\n    def __init__(self):\n        super(Net, self).__init__()\n"
    below += "        self.gate, self.up, self.act = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), nn.SiLU()\n"
    agree(tmp_path, text_of("swapped() if other else Net()", below, base="nn.Module"))


def test_a_class_of_what_a_function_imports_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"imported_by_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("from torch.nn import GELU as SiLU\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    below = f"class Sub(Net):\n    def __init__(self):\n        super().__init__()\n        import {name} as nn\n"
    agree(tmp_path, text_of("Sub() if other else Net()", below + "        self.act = nn.SiLU()", base="nn.Module"))
