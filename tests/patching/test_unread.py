"""Imports that only the replaced text read: gone where nothing else can miss them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradscope.patching import program
from gradscope.patching.replacement import Replacement, edited
from gradscope.patching.source import SourceFile
from gradscope.patching.unread import unread_imports

_BODY = "\n\ndef area(r):\n    return OLD\n"


def without(folder: Path, head: str, old: str = "math.pi * r", new: str = "r", name: str = "rhombi.py") -> str:
    """What the head of a file becomes where ``old`` is replaced by ``new``."""
    path = folder / name
    path.write_text(head + _BODY.replace("OLD", old))
    file = SourceFile.read(str(path))
    start = file.text.index(old.encode(), len(head))
    change = Replacement(start, start + len(old.encode()), new)
    text = edited(file.text, [change]).decode()
    found = edited(file.text, [change, *unread_imports(file, text)]).decode()
    assert found.endswith(_BODY.replace("OLD", new))
    return found.removesuffix(_BODY.replace("OLD", new))


@pytest.mark.parametrize(
    ("head", "left"),
    [
        ("import math\nimport os\n", "import os\n"),
        ("import os\n\nimport math\n\nimport sys\n", "import os\n\nimport sys\n"),
        ("import math\n\nimport os\n", "import os\n"),
        ("import math, os\n", "import os\n"),
        ('"""Words."""\nimport math\n', '"""Words."""\n'),
    ],
)
def test_what_is_not_read_any_more_goes(tmp_path: Path, head: str, left: str) -> None:
    assert without(tmp_path, head) == left


@pytest.mark.parametrize(
    ("head", "left"),
    [
        ("from math import pi, tau\n", "from math import tau\n"),
        ("from math import pi as π, tau\n", "from math import pi as π, tau\n"),
        ("from math import (\n    pi,\n    tau,\n)\n", "from math import (\n    tau,\n)\n"),
        ("from math import (pi, tau)\n", "from math import (pi, tau)\n"),
        ("from math import (\n    pi, tau,\n)\n", "from math import (\n    pi, tau,\n)\n"),
        ("import os\nfrom math import (\n    pi,\n)\n", "import os\n"),
        ("from math import tau, \\\n    pi\n", "from math import tau, \\\n    pi\n"),
        ("from math import pi, \\\n    tau\n", "from math import pi, \\\n    tau\n"),
    ],
)
def test_some_names_of_an_import(tmp_path: Path, head: str, left: str) -> None:
    assert without(tmp_path, head, "pi * r") == left


@pytest.mark.parametrize(
    "head",
    [
        "import math  # noqa: F401\n",
        "import math; import os\n",
        "try:\n    import math\nexcept ImportError:\n    pass\n",
        'import math\n\n__all__ = ["math"]\n',
        "import math\n\n# math.tau is twice that\n",
        "import math\n\nSIDE = math.tau\n",
    ],
)
def test_what_may_be_wanted_stays(tmp_path: Path, head: str) -> None:
    assert without(tmp_path, head) == head


def test_what_nobody_read_before_is_not_ours_to_take(tmp_path: Path) -> None:
    assert without(tmp_path, "import math\nimport readline\n") == "import readline\n"


def test_a_package_gives_its_names_on(tmp_path: Path) -> None:
    assert without(tmp_path, "import math\n", name="__init__.py") == "import math\n"


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        ("from rhombi import math\n", True),
        ("from rhombi import *\n", True),
        ("from .rhombi import Shape, math\n", True),
        ("import rhombi\n\nrhombi.math.pi\n", True),
        ("from . import rhombi as r\n\nr.math.pi\n", True),
        ("import rhombi\n\ngetattr(rhombi, 'math').pi\n", True),
        ("import unittest.mock\n\nunittest.mock.patch('lib.rhombi.math')\n", True),
        ("import math\nimport rhombi\n\nmath.pi\n", False),
        ("from rhombi import area\n", False),
        ("# as in rhombi\nheld.math\n", False),
        ("from solids import math\n", False),
        ("import rhombi\n\nthis is no Python\n", False),
    ],
)
def test_a_file_that_is_not_loaded_takes_it_from_there(tmp_path: Path, other: str, taken: bool) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "other.py").write_text(other)
    assert without(tmp_path, "import math\nimport os\n") == ("import math\nimport os\n" if taken else "import os\n")


def test_what_is_installed_beside_the_program_takes_nothing(tmp_path: Path) -> None:
    for folder in ("env", ".hidden", "lib/site-packages"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "other.py").write_text("from rhombi import *\n")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    assert without(tmp_path, "import math\nimport os\n") == "import os\n"


def test_of_too_many_files_none_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_MOST", 3)
    for number in range(3):
        (tmp_path / f"other{number}.py").touch()
    assert without(tmp_path, "import math\nimport os\n") == "import math\nimport os\n"


def test_another_module_imports_it_from_there(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import other\n"
        "from tests.patching.test_unread import without\n"
        "print(repr(without(Path(sys.argv[1]), 'import math\\nimport os\\n')))"
    )
    (tmp_path / "rhombi.py").write_text("import math\n")
    for text, left in (("from rhombi import math\n", "import math\nimport os\n"), ("import rhombi\n", "import os\n")):
        (tmp_path / "other.py").write_text(text)
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-B", "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, cwd=root
        )
        assert done.stdout.splitlines()[-1] == repr(left)
