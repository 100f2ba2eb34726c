"""Imports that only the replaced text read: gone where nothing else can miss them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gradscope.patching.edit import imports as importers
from gradscope.patching.edit.imports import unread_imports
from gradscope.patching.edit.source import Replacement, SourceFile, edited

# Not written out anywhere: this file is loaded too, and would take what it names.
STEM = "".join(("rhom", "bi"))
_BODY = "\n\ndef area(r):\n    return OLD\n"


def without(folder: Path, head: str, old: str = "math.pi * r", new: str = "r", name: str = f"{STEM}.py") -> str:
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


def test_a_setting_of_the_compiler_is_no_import(tmp_path: Path) -> None:
    head = "from __future__ import annotations\n"
    assert without(tmp_path, head, "annotations") == head


def test_what_nobody_read_before_is_not_ours_to_take(tmp_path: Path) -> None:
    assert without(tmp_path, "import math\nimport readline\n") == "import readline\n"


def test_a_file_takes_nothing_from_itself(tmp_path: Path) -> None:
    text = f"import os\n\nNAME, HELD = '{STEM}', os.math\n"
    assert without(tmp_path, f"import math\n{text}") == text


def test_a_package_gives_its_names_on(tmp_path: Path) -> None:
    assert without(tmp_path, "import math\n", name="__init__.py") == "import math\n"


@pytest.mark.parametrize(
    ("other", "taken"),
    [
        ("from RHOMBI import math\n", True),
        ("from RHOMBI import *\n", True),
        ("from .RHOMBI import Shape, math\n", True),
        ("import RHOMBI\n\nRHOMBI.math.pi\n", True),
        ("from . import RHOMBI as r\n\nr.math.pi\n", True),
        ("import RHOMBI\n\ngetattr(RHOMBI, 'math').pi\n", True),
        ("import unittest.mock\n\nunittest.mock.patch('lib.RHOMBI.math')\n", True),
        ("import unittest.mock\n\nunittest.mock.patch('lib.RHOMBI.math.pi')\n", True),
        ("import lib\n\nlib.RHOMBI.math.pi\n", True),
        ("import lib as shapes\n\nown = shapes.RHOMBI\nown.math.pi\n", True),
        ("import operator\nimport RHOMBI\n\noperator.attrgetter('math.pi')(RHOMBI)\n", True),
        ("def f(x: 'RHOMBI.math.pi'): ...\n", True),
        ('"""\n>>> RHOMBI.math.pi > 3\nTrue\n"""\n', True),
        ("exec(open('../RHOMBI.py').read())\nmath.pi\n", True),
        ("import runpy\n\nrunpy.run_path('RHOMBI.py')['math'].pi\n", True),
        ("import load\n\nload.file('RHOMBI.py').math.pi\n", True),
        ("import math\nimport RHOMBI\n\nmath.pi\n", False),
        ("import math\n\nmath.RHOMBI\n", False),
        ("'RHOMBI.mathematics'\n", False),
        ("from RHOMBI import area\n", False),
        ("# as in RHOMBI\nheld.math\n", False),
        ("from solids import math\n", False),
        ("import RHOMBI\n\nthis is no Python\n", False),
    ],
)
def test_a_file_that_is_not_loaded_takes_it_from_there(tmp_path: Path, other: str, taken: bool) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "other.py").write_text(other.replace("RHOMBI", STEM))
    assert without(tmp_path, "import math\nimport os\n") == ("import math\nimport os\n" if taken else "import os\n")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("other.py", "# -*- coding: latin-1 -*-\nfrom RHOMBI import math\nNAME = 'Fläche'\n".encode("latin-1")),
        ("other.py", "from RHOMBI import math\nNAME = 'Fläche'\n".encode("utf-8-sig")),
        (
            "other.ipynb",
            b'{"cells": [{"cell_type": "code", "source": ["%matplotlib inline\\n", "from RHOMBI import *\\n"]}]}',
        ),
    ],
)
def test_a_file_of_another_form_takes_it_from_there(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content.replace(b"RHOMBI", STEM.encode()))
    assert without(tmp_path, "import math\nimport os\n") == "import math\nimport os\n"


@pytest.mark.parametrize(
    "content", [b"[]", b"{", b'{"cells": 3}', b'{"cells": [3, {"cell_type": "code", "source": 3}]}', b"\xff"]
)
def test_a_notebook_that_is_none_takes_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / f"{STEM}.ipynb").write_bytes(content)
    assert without(tmp_path, "import math\nimport os\n") == "import os\n"


@pytest.mark.parametrize(("mark", "stays"), [("pyproject.toml", True), (".git", True), ("notes.txt", False)])
def test_a_file_beside_the_folder_of_sources_takes_it_from_there(tmp_path: Path, mark: str, stays: bool) -> None:
    (tmp_path / mark).touch()
    for folder in ("src/lib", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "src" / "lib" / "__init__.py").touch()
    (tmp_path / "tests" / "test_it.py").write_text(f"from lib.{STEM} import math\n")
    left = without(tmp_path / "src" / "lib", "import math\nimport os\n")
    assert left == ("import math\nimport os\n" if stays else "import os\n")


def test_what_is_installed_beside_the_program_takes_nothing(tmp_path: Path) -> None:
    for folder in ("env", ".hidden", "lib/site-packages"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "other.py").write_text(f"from {STEM} import *\n")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    assert without(tmp_path, "import math\nimport os\n") == "import os\n"


def test_of_too_many_files_none_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importers, "_MOST", 3)
    for number in range(3):
        (tmp_path / f"other{number}.py").touch()
    assert without(tmp_path, "import math\nimport os\n") == "import math\nimport os\n"


def test_another_module_imports_it_from_there(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path += [sys.argv[1], sys.argv[1] + '/sources']; from pathlib import Path; import other\n"
        "from tests.patching.test_unread import without\n"
        "print(repr(without(Path(sys.argv[1]) / 'sources', 'import math\\nimport os\\n')))"
    )
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / f"{STEM}.py").write_text("import math\n")
    for text, left in ((f"from {STEM} import math\n", "import math\nimport os\n"), (f"import {STEM}\n", "import os\n")):
        (tmp_path / "other.py").write_text(text)
        root = Path(__file__).parents[2]
        done = subprocess.run(
            [sys.executable, "-B", "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, cwd=root
        )
        assert done.stdout.splitlines()[-1] == repr(left)
