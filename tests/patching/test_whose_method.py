"""Only a method that is asked of the module itself can be another on that module."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from gradscope.patching.advice import answer_of
from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan
from tests.patching.test_bindings import HEAD, net

BATCH = torch.randn(2, 6, 8, dtype=torch.float64)
ATTENTION = """\
q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
att = (q @ k.transpose(-2, -1)) * 0.5
return (self.__drop(att.softmax(-1)) @ v).squeeze(1)
"""


def planned(folder: Path, head: str, call: str, *, above: bool = False) -> tuple[nn.Module, Patches]:
    """A model whose method under ``head`` holds the attention, and whose forward makes the ``call``."""
    method = f"{head}\n" + textwrap.indent(ATTENTION, "    ")
    forward = f"def forward(self, x):\n    return {call}\n"
    text = HEAD.replace("self.flag, self", "self.__drop = nn.Dropout(0.0)\n        self.flag, self")
    text += textwrap.indent(method, " " * 4)
    if above:
        text = text.replace("class Net", "class Base") + "\n\nclass Net(Base):\n"
    model = net(folder, text + "\n" + textwrap.indent(forward, " " * 4))
    return model, Patches(plan(model, BATCH))


_CLASS = "att is called through the class, not through the module"


@pytest.mark.parametrize(
    ("head", "call", "above", "reason"),
    [
        ("def att(self, x):", "Net.att(self, x)", False, _CLASS),
        ("def att(self, x):", "type(self).att(self, x)", False, _CLASS),
        ("def att(self, x):", "self.__class__.att(self, x)", False, _CLASS),
        ("def att(self, x):", "super().att(x)", True, _CLASS),
        ("def forward(self, x):", "super().forward(x)", True, "forward is defined in Base, but overridden in Net"),
        (
            "@staticmethod\ndef att(self, x):",
            "self.att(self, x)",
            False,
            "att is a static method, so it does not receive the module",
        ),
    ],
)
def test_another_is_refused(tmp_path: Path, head: str, call: str, above: bool, reason: str) -> None:
    _, patches = planned(tmp_path, head, call, above=above)
    assert {each for site in patches.sites for each in site.reasons} == {reason}
    assert answer_of(reason)


@pytest.mark.parametrize("name", ["att", "__att", "_att"])
def test_its_own_is_replaced(tmp_path: Path, name: str) -> None:
    model, patches = planned(tmp_path, f"def {name}(self, x):", f"self.{name}(x)")
    original = copy.deepcopy(model)
    patches.apply()
    assert [site.recipe for site in patches.in_source] == ["packed_attention"]
    assert any("att" in each for each in vars(model))
    torch.testing.assert_close(model(BATCH), original(BATCH))
    patches.revert()
    assert not any("att" in each for each in vars(model))
