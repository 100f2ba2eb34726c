"""The name of a recipe in a written file is that recipe, whatever else the program calls so; its import is one line."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gradscope
from gradscope.patching.patches import Patches

HEAD = "import math\nimport torch\nfrom torch import nn\n"
NET = """

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(8, 8)

    def forward(self, x):
        x = self.lift(x)
        {}
        return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
"""
OTHER = "import math\nimport torch\nfrom torch import nn\n\n\ndef gelu(x):\n    return 7 * x\n"
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):  # what torch imports meanwhile stays
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def loaded(text: str) -> ModuleType:
    path = Path(f"net{next(_numbers)}.py").absolute()
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def fixed(text: str) -> str:
    """The text after the fix, which computes the same as before it."""
    torch.manual_seed(1)
    model = loaded(text).Net()
    ((_, after),) = Patches(gradscope.plan(model, torch.randn(2, 6, 8), recipes=["gelu"])).texts.values()
    other = loaded(after).Net()
    other.load_state_dict(model.state_dict())
    given = torch.randn(2, 6, 8)
    torch.testing.assert_close(other(given), model(given))
    return after


@pytest.mark.parametrize(
    ("head", "line"),
    [
        (HEAD + "from layers import *\n", ""),
        ("from layers import *\n", ""),
        (HEAD + "globals()['ge' + 'lu'] = len\n", ""),
        (HEAD, "try: pass\n        except ValueError as gelu: pass"),
        (HEAD, "match x.dim():\n            case gelu: pass"),
        (HEAD, "match [1]:\n            case [*gelu]: pass"),
        (HEAD, "match {}:\n            case {**gelu}: pass"),
        (HEAD, "def gelu(): pass"),
        (HEAD + "gelu = None\n", ""),
    ],
)
def test_what_has_the_recipes_name_keeps_it(head: str, line: str) -> None:
    Path("layers.py").write_text(OTHER)
    after = fixed(head + NET.format(line))
    assert "import gelu as gradscope_gelu" in after and "return gradscope_gelu(x)" in after


def test_the_longer_name_may_be_taken_too() -> None:
    after = fixed(HEAD + "gelu = gradscope_gelu = None\n" + NET.format(""))
    assert "import gelu as gradscope_gradscope_gelu" in after


def test_a_name_that_a_fix_gave_is_used_again() -> None:
    after = fixed(HEAD + "from gradscope.recipes import gelu as gradscope_gelu\ngelu = None\n" + NET.format(""))
    assert after.count("import gelu as gradscope_gelu") == 1 and "return gradscope_gelu(x)" in after


@pytest.mark.parametrize(
    ("sister", "hidden"),
    [
        ("from layers import gelu\nfrom {} import *\n\nprint(gelu(1))\n", True),
        ("from {} import *\n", False),
        ("from {} import *\n\nprint('gelu')\n", False),
        ("from layers import gelu\nfrom {} import Net\n\nprint(gelu(1))\n", False),
    ],
)
def test_a_file_that_imports_everything_keeps_its_own(sister: str, hidden: bool) -> None:
    name = f"net{next(_numbers) + 1}"
    Path("sister.py").write_text(sister.format(name))
    assert ("gradscope_gelu" in fixed(HEAD + NET.format(""))) is hidden


@pytest.mark.parametrize(
    "head",
    [
        'import torch, math; from torch import nn; X = """a\nb"""\n',
        "import math, torch\nfrom torch import nn; X = [\n1, 2]\n",
        "import math\nfrom torch import nn\nimport torch; \\\nX = 3\n",
        "from torch import nn\nimport math; \\\nimport torch; \\\nX = [\n3]\n",
        '"""Words."""; X = """a\nb"""\ntry:\n    import torch, math\n    from torch import nn\nfinally:\n    pass\n',
        "from __future__ import annotations; \\\nimport torch; import math; \\\nfrom torch import nn\n",
        "import torch, math\nfrom torch import nn  # a \\\n",
    ],
)
def test_the_import_stands_between_two_lines_of_code(head: str) -> None:
    after = fixed(head + NET.format(""))
    assert "\nfrom gradscope.recipes import gelu\n" in after
    held = {name: value for name, value in vars(loaded(head)).items() if name == "X"}
    assert all(vars(loaded(after))[name] == value for name, value in held.items())
