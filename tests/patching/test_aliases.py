"""Two names of one tensor in the recorded step, one of which is another tensor once a flag is set."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import gradscope
from gradscope.patching.patches import Patches
from tests.patching import spelled

NORM = "y = h * torch.rsqrt(g.pow(2).mean(-1, keepdim=True) + self.eps)"
SCALE = "torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)"
TANH = "y = 0.5 * x * (1 + torch.tanh(K * (x + 0.044715 * x**3)))"
CHOSEN = {
    "norm": "h = x\ng = u if self.flag else x\n" + NORM,
    "norm, by a statement": "h = x\ng = x\nif self.flag:\n    g = u\n" + NORM,
    "norm, of casts": "h = x.double()\ng = (u if self.flag else x).double()\n" + NORM + "\ny = x + y.sum()",
    "norm, one name": f"h = {SCALE}\nif self.flag:\n    x = u\ny = x * h",
    "gelu": "h = 0.5 * x\ng = u if self.flag else x\ny = h * (1 + torch.erf(g / 2**0.5))",
    "swiglu": "g = torch.sigmoid(u if self.flag else x)\ny = x * g * u",
    "norm, two of one assignment": "h, g = x, (u if self.flag else x)\n" + NORM,
    "norm, over another name": "k = u if self.flag else x\nh = x\ng = k\n" + NORM,
    "norm, of a function": "h = x\ng = (lambda a: u if self.flag else a)(x)\n" + NORM,
    "norm, of a list": "h = x\ng = [x, u][int(self.flag)]\n" + NORM,
    "norm, of each": "h, g = [each for each in (x, u if self.flag else x)]\n" + NORM,
    "norm, of a pair": "pair = (x, u) if self.flag else (x, x)\nh, g = pair\n" + NORM,
    "norm, of an attribute": "h = x\nself.kept = u if self.flag else x\n" + NORM.replace("g.pow", "self.kept.pow"),
    "norm, of a loop": "h = x\nfor g in [u if self.flag else x]:\n    pass\n" + NORM,
    "norm, of a list, inline": "hs = [x, u]\n" + NORM.replace("h *", "hs[int(self.flag)] *").replace("g.", "x."),
    "gelu, of a list, inline": "hs = [x, u]\n" + TANH.replace("K * (x", "K * (hs[int(self.flag)]"),
    "gelu, of a dict, inline": "hs = {False: x, True: u}\n" + TANH.replace("0.5 * x", "0.5 * hs[self.flag]"),
    "gelu, of a lambda, inline": "pick = lambda a: u if self.flag else a\n" + TANH.replace("K * (x", "K * (pick(x)"),
    "gelu, of a lambda, thrice": "pick = lambda a: u if self.flag else a\n" + TANH.replace("x**3", "pick(x)**3"),
    "norm, squared by a lambda": "pick = lambda a: u if self.flag else a\n"
    "y = x * torch.rsqrt((x * pick(x)).mean(-1, keepdim=True) + self.eps)",
    "swiglu, of a list, inline": "hs = [x, u]\ny = x * torch.sigmoid(hs[int(self.flag)]) * u",
}
SURE = {
    "two names of one assignment": "h, g = x, x\n" + NORM,
    "a copy": "h = x\ng = h.contiguous()\n" + NORM,
    "a name of a name": "h = x\ng = h\n" + NORM,
    "two names": "h = x\ng = x\n" + NORM,
    "one name, chosen before": f"x = u if self.flag else x\ny = x * {SCALE}",
    "one name, of a statement": f"if self.flag:\n    x = u\ny = x * {SCALE}",
}


def patched(folder: Path, body: str) -> tuple[torch.nn.Module, torch.nn.Module, Patches]:
    model = spelled.entry(folder, body, "alias").build()[0]
    original = copy.deepcopy(model)
    return model, original, Patches(gradscope.plan(model, torch.randn(2, 5, spelled.WIDTH)))


@pytest.mark.parametrize("body", [*CHOSEN.values(), *SURE.values()], ids=[*CHOSEN, *SURE])
def test_the_other_tensor_later(tmp_path: Path, body: str) -> None:
    model, original, patches = patched(tmp_path, body)
    patches.apply()
    for flag in (True, False):
        model.flag = original.flag = flag
        x = torch.randn(2, 5, spelled.WIDTH)
        torch.testing.assert_close(model(x), original(x), rtol=1e-5, atol=1e-5, equal_nan=True)  # float32
    patches.revert()


def test_a_module_that_gave_its_argument_is_replaced_later(tmp_path: Path) -> None:
    body = TANH.replace("K * (x", "K * (self.same(x)")
    model = spelled.entry(tmp_path, body, "same").build()[0]
    model.same = torch.nn.Identity()
    original = copy.deepcopy(model)
    patches = Patches(gradscope.plan(model, torch.randn(2, 5, spelled.WIDTH)))
    patches.apply()
    model.same = original.same = torch.nn.Hardtanh()
    x = torch.randn(2, 5, spelled.WIDTH)
    torch.testing.assert_close(model(x), original(x), rtol=1e-5, atol=1e-5)  # float32, sums of 24 numbers
    patches.revert()


@pytest.mark.parametrize("body", SURE.values(), ids=SURE)
def test_names_that_are_one_tensor_always_are_found(tmp_path: Path, body: str) -> None:
    assert patched(tmp_path, body)[2].table.supported.any()
