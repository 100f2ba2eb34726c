"""What a name or a size was in the recorded step need not be what it is in the next, nor in a larger model."""

from __future__ import annotations

import importlib.util
import itertools
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan

HEAD = """\
import math
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width=8, size=4):
        super().__init__()
        self.flag, self.size, self.heads = True, size, width // size
        self.sizes = [width // size, size]
        self.lift, self.qkv = nn.Linear(width, width), nn.Linear(width, 3 * width)
        self.register_buffer("mask", torch.ones(6, 6).tril())

"""
_numbers = itertools.count()


def net(folder: Path, text: str, *sizes: int) -> nn.Module:
    path = folder / f"net{next(_numbers)}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(1)
    made: nn.Module = module.Net(*sizes)
    return made.double().eval()


def fixed(folder: Path, text: str) -> tuple[str, list[str]]:
    """The text after the fix, and what was replaced."""
    model = net(folder, text)
    found = Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64)))
    assert found.in_source, found.table.reasons.tolist()
    ((_, after),) = found.texts.values()
    return after, [site.recipe for site in found.in_source]


def check(folder: Path, text: str, after: str, *, sizes: tuple[int, ...] = (), flag: bool = True, **given: Any) -> None:
    """Before and after the fix the same results and gradients."""
    results: list[list[Tensor | None]] = []
    for each in (text, after):
        model = net(folder, each, *sizes)
        model.flag = flag  # type: ignore[assignment]
        torch.manual_seed(2)
        output = model(torch.randn(2, 6, sizes[0] if sizes else 8, dtype=torch.float64), **given)
        output.square().sum().backward()
        results.append([output.detach(), *(each.grad for each in model.parameters())])
    for one, other in zip(*results, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-10, equal_nan=True)


# ----------------------------------------------------------------------------------------------------------------------
# A literal is no constant where another may have been bound
# ----------------------------------------------------------------------------------------------------------------------

GELU = "x = self.lift(x)\n{}\nreturn y * x * (1.0 + torch.erf(x / math.sqrt(2.0)))\n"
NORM = "x = self.lift(x)\n{}\nreturn x * torch.rsqrt(x.pow(y).mean(-1, keepdim=True) + 1e-5)\n"
ATTENTION = """\
q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
{}
att = (q @ k.transpose(-2, -1)) * 0.5
att = att.masked_fill(self.mask == %s, %s)
return (att.softmax(%s) @ v).squeeze(1)
"""
HIDDEN = ATTENTION % ("y", "-math.inf", "-1")
FILL = ATTENTION % ("0", "y", "-1")
DIMENSION = ATTENTION % ("0", "-math.inf", "y")


@pytest.mark.parametrize(
    "bound",
    [
        "if self.flag:\n    y = 0.5\nelse:\n    y = 1.5",
        "y = 1.5\nif self.flag:\n    y = 0.5",
        "y = 0.5\nif not self.flag: y = 1.5",
        "match self.flag:\n    case True:\n        y = 0.5\n    case _:\n        y = 1.5",
        "y = 0.5\nfor _ in range(not self.flag):\n    y = 1.5",
        "y = 0.5\ntry:\n    1 / self.flag\nexcept ZeroDivisionError:\n    y = 1.5",
        "y = 0.5\ndef other():\n    nonlocal y\n    y = 1.5\nif not self.flag:\n    other()",
        "y = (1.5, 0.5)[self.flag]",
        "match (1.5, 0.5)[self.flag]:\n    case y: pass",
    ],
)
def test_another_branch_binds_another_number(tmp_path: Path, bound: str) -> None:
    text = HEAD + "    def forward(self, x):\n" + textwrap.indent(GELU.format(bound), " " * 8)
    after, _ = fixed(tmp_path, text)
    check(tmp_path, text, after)
    check(tmp_path, text, after, flag=False)


@pytest.mark.parametrize(
    ("body", "usual", "other"),
    [(GELU, 0.5, 2.0), (NORM, 2, 4), (HIDDEN, 0, 1), (FILL, "-math.inf", 0.0), (DIMENSION, -1, -2)],
    ids=["gelu", "norm", "what hides", "fill", "dimension"],
)
def test_an_argument_that_was_left_out(tmp_path: Path, body: str, usual: object, other: object) -> None:
    lines = body.format(f"if y is None:\n    y = {usual}")
    text = HEAD + "    def forward(self, x, y=None):\n" + textwrap.indent(lines, " " * 8)
    after, _ = fixed(tmp_path, text)
    check(tmp_path, text, after)
    check(tmp_path, text, after, y=other)


def test_what_every_call_binds_is_not_asked_for(tmp_path: Path) -> None:
    text = HEAD + "    def forward(self, x, y=None):\n" + textwrap.indent(GELU.format("y = 1.5\ny = 0.5"), " " * 8)
    assert "return gelu(x)\n" in fixed(tmp_path, text)[0] and "if " not in fixed(tmp_path, text)[0]


@pytest.mark.parametrize(
    "between",
    [
        "from math import tau as s",
        "def s(): pass",
        "class s: pass",
        "try:\n    raise ValueError\nexcept ValueError as s:\n    pass",
        "match 3:\n    case s: pass",
        "match [3]:\n    case [*s]: pass",
        "match {1: 3}:\n    case {**s}: pass",
    ],
)
def test_a_name_that_something_else_binds_on_the_way(tmp_path: Path, between: str) -> None:
    body = f"s = 0.25\nq, k, v = self.qkv(x).chunk(3, -1)\natt = q @ k.mT * s\n{between}\nreturn att.softmax(-1) @ v\n"
    text = HEAD + "    def forward(self, x):\n" + textwrap.indent(body, " " * 8)
    after, _ = fixed(tmp_path, text)
    check(tmp_path, text, after)


# ----------------------------------------------------------------------------------------------------------------------
# The number of heads, in a model of another size
# ----------------------------------------------------------------------------------------------------------------------

BY_HEADS = """\
    def split(self, t):
        return t.view(t.size(0), t.size(1), -1, self.size).transpose(1, 2)

    def forward(self, x, heads=None):
        if heads is None:
            heads = self.heads
        B, T, C = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = {}
        y = (q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v
        return y.transpose(1, 2).reshape(B, T, C)
"""
_EACH = "[{}.transpose(1, 2) for t in (q, k, v)]"


@pytest.mark.parametrize(
    ("split", "heads"),
    [
        (_EACH.format("t.view(B, T, self.heads, -1)"), "self.heads"),
        (_EACH.format("t.view(B, T, heads, -1)"), "heads"),
        ("map(lambda t: t.view(B, T, heads, -1).transpose(1, 2), (q, k, v))", "heads"),
        (_EACH.format("t.view(B, T, -1, self.size)"), "qkv.size(-1) // 3 // self.size"),
        (_EACH.format("t.reshape(B, T, -1, C // heads)"), "qkv.size(-1) // 3 // (C // heads)"),
        (_EACH.format("t.view(*x.shape[:-1], -1, self.size)"), "qkv.size(-1) // 3 // self.size"),
        (_EACH.format("t.unflatten(-1, (-1, self.size))"), "qkv.size(-1) // 3 // self.size"),
        (_EACH.format("t.unflatten(-1, self.sizes)"), None),
        (_EACH.format("t.unflatten(dim=-1, sizes=(heads, -1))"), None),
        (_EACH.format("t.view([B, T] + self.sizes)"), None),
        (_EACH.format("torch.reshape(t, shape=(B, T, heads, -1))"), None),
        ("[t.view(B, T, n, -1).transpose(1, 2) for t, n in zip((q, k, v), [heads] * 3)]", None),
        ("map(self.split, (q, k, v))", None),
    ],
)
def test_heads_are_those_of_each_model(tmp_path: Path, split: str, heads: str | None) -> None:
    """Where the number of heads is not written where it can be read, the views stay."""
    text = HEAD + BY_HEADS.format(split)
    after, recipes = fixed(tmp_path, text)
    assert recipes == ["packed_attention" if heads else "attention"]
    if heads:
        assert f"packed_attention(qkv, {heads}, " in after
    check(tmp_path, text, after)
    check(tmp_path, text, after, sizes=(16, 2))
    check(tmp_path, text, after, sizes=(16, 8))
    if "heads" in split.replace("self.heads", ""):
        check(tmp_path, text, after, heads=4)


@pytest.mark.parametrize("scaled", ["q * 2.0", "q / self.size"])
def test_the_scale_is_that_of_each_model(tmp_path: Path, scaled: str) -> None:
    """Torch's own attention scales by the size of a head, as well as what the source does."""
    lines = BY_HEADS.replace(
        "(q @ k.transpose(-2, -1) * 0.5).softmax(-1) @ v",
        f"nn.functional.scaled_dot_product_attention({scaled}, k, v, self.mask.bool()[:T, :T])",
    )
    text = HEAD + lines.format(_EACH.format("t.view(B, T, heads, -1)"))
    model = net(tmp_path, text)
    for _, after in Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64))).texts.values():
        check(tmp_path, text, after, sizes=(16, 2))
