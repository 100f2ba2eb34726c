"""The change that is shown, as a whole: what a reviewer would write, in the style of the file."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

import gradscope
from gradscope.patching.patches import Patches

HEAD = "import torch\nimport torch.nn as nn\nfrom torch.nn import functional as F\n"
CLASS = """

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.drop, self.norm = nn.Dropout(0.1), nn.LayerNorm(8)
        self.soft = nn.Softmax(dim=-1)
        self.heads, self.scale, self.flash = 2, 0.5, True

    def forward(self, x):
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def module_of(text: str, name: str = "net") -> nn.Module:
    path = Path(f"{name}.py").absolute()
    path.write_bytes(text.encode())
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(1)
    made: nn.Module = module.Net()
    return made


RECIPES = ["attention", "gelu", "cross_entropy", "add_norm", "rms_norm"]


def fixed(text: str, recipes: list[str] = RECIPES, **settings: object) -> str:
    """The text of a file with a ``Net`` after the fix, which computes the same as before it."""
    model = module_of(text)
    vars(model).update(settings)
    found = Patches(gradscope.plan(model, torch.randn(2, 6, 8), recipes=recipes))
    assert found.in_source, found.table.reasons.tolist()
    ((_, after),) = found.texts.values()
    _check_same(text, after)
    return after


def _check_same(before: str, after: str) -> None:
    given = torch.randn(2, 6, 8)
    one, other = module_of(before, "one").eval(), module_of(after, "other").eval()
    for flash in (True, False):
        one.flash = other.flash = flash  # type: ignore[assignment]
        torch.testing.assert_close(other(given), one(given))


def body(lines: str, head: str = HEAD) -> str:
    """A file whose ``forward`` has these lines."""
    return head + CLASS + textwrap.indent(lines, " " * 8)


def check(before: str, after: str, imports: str, recipes: list[str] = RECIPES) -> None:
    """The fix makes of these lines of ``forward`` those, and imports that."""
    head = HEAD.partition("from")[0] if "F." in before and "F." not in after else HEAD  # no import that nothing reads
    expected = body(after, f"{head}from gradscope.recipes import {imports}\n")
    assert fixed(body(before), recipes) == expected


# ----------------------------------------------------------------------------------------------------------------------
# A condition of the source's own
# ----------------------------------------------------------------------------------------------------------------------

TWO_WAYS = """\
B, T, C = x.size()
# heads
q, k, v = self.qkv(x).split(C, dim=2)
q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)

if self.flash:
    # fast
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
else:
    # slow
    att = (q @ k.transpose(-2, -1)) * (C // self.heads) ** -0.5
    mask = torch.ones(T, T).tril()
    att = att.masked_fill(mask == 0, float("-inf"))
    y = att.softmax(-1) @ v  # weighed
y = y.transpose(1, 2).contiguous().view(B, T, C)
return self.out(y)
"""
ABOVE = """\
    q, k, v = self.qkv(x).split(C, dim=2)
    q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
    k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
    v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)

"""
SLOW = """\
    # slow
    att = (q @ k.transpose(-2, -1)) * (C // self.heads) ** -0.5
    mask = torch.ones(T, T).tril()
    att = att.masked_fill(mask == 0, float("-inf"))
    y = att.softmax(-1) @ v  # weighed
"""
FAST = """\
    # fast
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
"""
BELOW = "    y = y.transpose(1, 2).contiguous().view(B, T, C)\n"
START, END = "B, T, C = x.size()\n# heads\n", "return self.out(y)\n"


def test_what_was_asked_is_not_asked_again_in_the_old_code() -> None:
    new = "    qkv = self.qkv(x)\n    y = packed_attention(qkv, self.heads, is_causal=True)\n"
    after = f"{START}if self.flash:\n{new}else:\n{ABOVE}{SLOW}{BELOW}{END}"
    check(TWO_WAYS, after, "packed_attention", ["packed_attention"])


def test_the_old_code_stands_where_it_stood() -> None:
    after = fixed(body(TWO_WAYS), ["packed_attention"], flash=False)
    assert f"if self.flash:\n{textwrap.indent(ABOVE + FAST + BELOW, ' ' * 8)}        else:\n            qkv = " in after
    assert "if not" not in after and "# slow" not in after


def test_the_next_of_several_ways_becomes_the_first() -> None:
    several = TWO_WAYS.replace("else:", "elif C < 0:\n    y = q * 2\nelse:")
    after = fixed(body(several), ["packed_attention"])
    assert after.count("elif") == 0 and "            if C < 0:\n                y = q * 2\n            else:\n" in after
    assert after.count("if self.flash:") == 1


@pytest.mark.parametrize(
    ("old", "new", "flashes"),
    [
        ("if self.flash:", "if self.twice:\n    y = q * 2\nelif self.flash:", (True, False)),
        ("v = v.view", "if self.flash: q = q * 2\nv = v.view", (False,)),
        ("    # slow\n", "    if self.flash:\n        q = q * 3\n    # slow\n", (True, False)),
        ("    # fast\n", "    if self.flash:\n        q = q * 3\n    # fast\n", (False,)),
        ("    # fast\n", "    q = q * 3 if self.flash else q * 2\n", (False,)),
        ("v = v.view", "q = q * (3 if self.flash else 2)\nv = v.view", (False,)),
    ],
)
def test_a_condition_asked_in_other_forms_too(old: str, new: str, flashes: tuple[bool, ...]) -> None:
    """The old code does what it did where that is asked again: in one line, below an ``elif`` or inside itself."""
    assert old in TWO_WAYS
    text = body(TWO_WAYS.replace(old, new)).replace("Module):\n", "Module):\n    twice = False\n\n")
    for flash in flashes:
        after = fixed(text, ["packed_attention", "attention"], flash=flash)
        one, other = module_of(text, "again_one").eval(), module_of(after, "again_other").eval()
        given = torch.randn(2, 6, 8)
        for asked, twice in itertools.product((True, False), (True, False)):
            for each in (one, other):
                vars(each).update(flash=asked, twice=twice)
            torch.testing.assert_close(other(given), one(given))


def test_comments_at_the_end_of_a_side_stay() -> None:
    after = fixed(body(TWO_WAYS.replace("else:", "    # so much\nelse:")), ["packed_attention"], flash=False)
    assert f"{textwrap.indent(FAST, ' ' * 8)}            # so much\n            y = y.transpose" in after


def test_tabs() -> None:
    after = fixed(body(TWO_WAYS).replace("    ", "\t"), ["packed_attention"])
    assert "\t\tif self.flash:\n\t\t\tqkv = self.qkv(x)\n" in after
    assert "\t\telse:\n\t\t\tq, k, v = self.qkv(x)" in after and "  " not in after.replace("  # weighed", "")


def test_two_conditions_keep_the_old_code_whole() -> None:
    """The new code is not for both of them, so that either may hold in the old."""
    lines = """\
    q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
    att = q @ k.transpose(-2, -1)
    if self.flash:
        att = att * 0.5
    if self.heads == 2:
        att = att.softmax(-1)
    y = att @ v
    return self.out(y.squeeze(1))
    """
    after = fixed(body(textwrap.dedent(lines)))
    assert "if self.flash and self.heads == 2:\n" in after
    assert "            if self.flash:\n" in after and "            if self.heads == 2:\n" in after


# ----------------------------------------------------------------------------------------------------------------------
# Empty lines and comments
# ----------------------------------------------------------------------------------------------------------------------

QKV = "q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)\n"


def test_no_empty_lines_are_left() -> None:
    check(
        f"{QKV}\ndots = q @ k.transpose(-1, -2) * self.scale\n\natt = self.soft(dots)\n\nout = att @ v\n"
        "return self.out(out.squeeze(1))\n",
        f"{QKV}\nout = attention(q, k, v, scale=self.scale)\nreturn self.out(out.squeeze(1))\n",
        "attention",
    )


def test_a_comment_goes_with_all_that_stood_below_it() -> None:
    check(
        f"# parts\n{QKV}\n# similarity\n\ndots = q @ k.transpose(-1, -2) * self.scale\n\n# weights\n"
        "att = self.soft(dots)\n\n# values\n\nout = att @ v\n\nreturn self.out(out.squeeze(1))\n",
        f"# parts\n{QKV}\n# values\n\nout = attention(q, k, v, scale=self.scale)\n\nreturn self.out(out.squeeze(1))\n",
        "attention",
    )


def test_a_comment_above_the_result_stays() -> None:
    check(
        f"{QKV}\n# attention\ndots = q @ k.transpose(-1, -2) * self.scale\n\nout = self.soft(dots) @ v\n"
        "return self.out(out.squeeze(1))\n",
        f"{QKV}\n# attention\nout = attention(q, k, v, scale=self.scale)\nreturn self.out(out.squeeze(1))\n",
        "attention",
    )


def test_a_comment_above_what_stays_stays() -> None:
    between = "# length\nlength = x.shape[1]\n"
    check(
        f"{QKV}dots = q @ k.transpose(-1, -2) * self.scale\n{between}att = self.soft(dots)\nout = att @ v\n"
        "return self.out(out.squeeze(1) / length)\n",
        f"{QKV}{between}out = attention(q, k, v, scale=self.scale)\nreturn self.out(out.squeeze(1) / length)\n",
        "attention",
    )


# ----------------------------------------------------------------------------------------------------------------------
# Names, lines, quotes
# ----------------------------------------------------------------------------------------------------------------------


def test_a_name_is_used_again_that_only_what_goes_bound_anew() -> None:
    after = """\
residual = x
x = self.out(x)
x = add_layer_norm(
    x,
    residual,
    weight=self.norm.weight,
    bias=self.norm.bias,
    eps=self.norm.eps,
    dropout_p=self.drop.p,
    training=self.drop.training,
)[0]
return x
"""
    check("residual = x\nx = self.out(x)\nx = self.drop(x)\nx += residual\nx = self.norm(x)\nreturn x\n", after,
          "add_layer_norm")  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "out = (self.soft(q @ k.mT * self.scale) @ v).squeeze(1)",
            "out = attention(q, k, v, scale=self.scale).squeeze(1)",
        ),
        (
            "out = torch.neg(self.soft(q @ k.mT / self.scale) @ v)[:, 0]",
            "out = torch.neg(attention(q, k, v, scale=1.0 / self.scale))[:, 0]",
        ),
        (
            "out = -(\n    self.soft(q @ k.mT / (self.scale + 1)) @ v\n)[:, 0]",
            "out = -attention(q, k, v, scale=1.0 / (self.scale + 1))[:, 0]",
        ),
        ("out = 1 * (self.soft(q @ k.mT * 2) @ v)[:, 0]", "out = 1 * attention(q, k, v, scale=2)[:, 0]"),
    ],
)
def test_brackets_that_are_not_needed_go(before: str, after: str) -> None:
    check(f"{QKV}{before}\nreturn self.out(out)\n", f"{QKV}{after}\nreturn self.out(out)\n", "attention")


def test_brackets_beside_a_word_stay() -> None:
    lines = f"{QKV}def out():\n    return((q @ k.mT * 2).softmax(-1) @ v)[:, 0]\nreturn self.out(out())\n"
    assert "return(attention(q, k, v, scale=2))[:, 0]" in fixed(body(lines))


def test_a_text_without_a_place_to_fill_is_certain() -> None:
    check(
        f'{QKV}out = torch.einsum(f"bhij,bhjd->bhid", (torch.einsum("bhid,bhjd->bhij", q, k) * 0.5).softmax(-1), v)\n'
        "return self.out(out.squeeze(1))\n",
        f"{QKV}out = attention(q, k, v, scale=0.5)\nreturn self.out(out.squeeze(1))\n",
        "attention",
    )


LONG = (
    f"{QKV}out = self.drop((q @ k.transpose(-1, -2) * self.scale).softmax(-1)) @ v\nreturn self.out(out.squeeze(1))\n"
)
ONE_LINE = "out = attention(q, k, v, dropout_p=self.drop.p if self.drop.training else 0.0, scale=self.scale)\n"


@pytest.mark.parametrize("widest", [80, 120])
def test_lines_are_as_long_as_the_others(widest: int) -> None:
    wide = f"{'a' * (widest - 12)} = 1\n"
    after = fixed(body(LONG).replace("    def forward", f"        {wide}\n    def forward"))
    assert (ONE_LINE in after) is (widest == 120)
    assert max(map(len, after.splitlines())) <= max(widest, 88)


def test_a_call_that_is_no_longer_than_it_was_stays_on_its_line() -> None:
    line = "loss = F.cross_entropy(self.out(x).relu().flatten(0, 1), torch.zeros(12, dtype=torch.long), reduction="
    before, after = (f'{line}"sum", label_smoothing=0.10)\nreturn loss\n', f'{line}"sum", label_smoothing=0.10)\n')
    text = fixed(body(before))
    assert after.replace("F.cross_entropy(", "cross_entropy(") in text


def test_quotes_and_spaces_are_the_files_own() -> None:
    before = (
        body(
            "x = self.out(x)\ny = 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x ** 3)))\nreturn y\n"
        )
        .replace("dim=-1", "dim = -1")
        .replace("class Net", "name = 'net'\nclass Net")
    )
    assert "        y = gelu(x, approximate = 'tanh')\n" in fixed(before)


# ----------------------------------------------------------------------------------------------------------------------
# The import
# ----------------------------------------------------------------------------------------------------------------------

SHORT = f"{QKV}out = self.soft(q @ k.transpose(-1, -2) * self.scale) @ v\nreturn self.out(out.squeeze(1))\n"
NEW = "from gradscope.recipes import attention\n"
IMPORTS = {
    "behind the last": "import math\n\nimport torch\nfrom torch import nn\n{}",
    "sorted": "import torch\nfrom einops import rearrange\n{}from torch import nn\nfrom torch.nn import init\n",
    "not sorted": "import torch\nfrom torch.nn import init\nfrom torch import nn\n{}",
    "above one's own": "import torch\nfrom torch import nn\n{}\nfrom helper import help_me\n",
    "over several lines": "import torch\nfrom torch import (\n    nn,\n)\n{}",
    "beside one's own": "import torch\nfrom torch import nn\n{}from helper import help_me\n",
}
OTHERS = {
    "only one's own": ("from helper import nn, torch\n", "{}\nfrom helper import nn, torch\n"),
    "only Python's": (
        "import sys\n\ntorch = sys.modules['torch']\nnn = torch.nn\n",
        "import sys\n\n{}\ntorch = sys.modules['torch']\nnn = torch.nn\n",
    ),
    "only the future": (
        "from __future__ import annotations\ntorch = __import__('torch')\nnn = torch.nn\n",
        "from __future__ import annotations\n\n{}torch = __import__('torch')\nnn = torch.nn\n",
    ),
}
OTHERS |= {name: (head.format(""), head) for name, head in IMPORTS.items()}


@pytest.mark.parametrize("name", OTHERS)
def test_the_import_stands_with_its_like(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("helper.py").write_text("import torch\nfrom torch import nn\n\nhelp_me = None\n")
    Path("lib").mkdir()
    Path("lib/einops.py").write_text("rearrange = None\n")
    for each in (Path.cwd(), Path("lib").absolute()):
        monkeypatch.syspath_prepend(str(each))
    for each in ("helper", "einops"):  # of an earlier test, and for the next ones
        monkeypatch.setitem(sys.modules, each, None)
        del sys.modules[each]
    before, expected = OTHERS[name]
    assert fixed(body(SHORT, before)).partition("\n\nclass Net")[0] == expected.format(NEW)


def test_a_folder_may_have_a_packages_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    monkeypatch.chdir(tmp_path / "torch")
    assert fixed(body(SHORT)).startswith(HEAD + NEW)


def test_lines_that_end_in_a_carriage_return_alone() -> None:
    before = body(SHORT.replace("self.out(out", "self.out(input=out")).replace(
        "    def forward", "    #\r    def forward"
    )
    assert "out = attention(q, k, v, scale=self.scale)" in fixed(before)


def test_what_is_imported_already_is_not_imported_again() -> None:
    before = body(f"x = gelu(x)\n{SHORT}", f"{HEAD}from gradscope.recipes import gelu\n")
    after = fixed(before)
    assert "import attention, gelu\n" in after and after.count("import") == before.count("import")
    assert "gradscope_" not in after
    again = body(f"x = attention(x, x, x)\n{SHORT}", f"{HEAD}from gradscope.recipes import attention\n")
    assert fixed(again).count("import") == again.count("import") and "gradscope_" not in fixed(again)


@pytest.mark.parametrize("held", ["*", "gelu as attention"])
def test_an_import_that_holds_other_names_stays(held: str) -> None:
    after = fixed(body(SHORT, f"{HEAD}from gradscope.recipes import {held}\n"))
    assert "attention(q, k, v, scale=self.scale)" in after
    assert f"{held}\n" in after or f"{held},\n" in after


def test_a_name_of_the_files_own_is_not_taken_for_the_recipe() -> None:
    before = body(f"attention = x\n{SHORT}", f"{HEAD}from gradscope.recipes import attention\n")
    assert "gradscope_attention(q, k, v" in fixed(before)


def test_a_long_import_is_wrapped() -> None:
    lines = f"""\
x = 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x ** 3)))
residual = x
x = self.norm(self.drop(self.out(x)) + residual)
x = x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
{QKV}a = q @ k.transpose(-1, -2) * self.scale
a = a.masked_fill(torch.ones(1, 1).bool().logical_not(), -1e9)
out = self.soft(a) @ v
return self.out(out.squeeze(1))
"""
    after = fixed(body(lines))
    names = after.partition("from gradscope.recipes import ")[2]
    assert names.startswith("(\n    add_") and ",\n)\n" in names, after[:400]
