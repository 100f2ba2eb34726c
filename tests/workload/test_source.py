"""What a file is, decided by parsing it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gradscope.errors import TargetError
from gradscope.workload import file_kind, load_target

WORKLOADS = {
    "a function": "def workload():\n    return 1, 2\n",
    "with a loop of its own": "def workload(): ...\nif __name__ == '__main__':\n    loss.backward()\n",
    "imported": "from models.gpt import workload\n",
    "imported under the name": "from models.gpt import small as workload\n",
    "a second name": "def small(): ...\nworkload = small\n",
    "a lambda": "workload = lambda: (1, 2)\n",
    "a partial": "import functools\nfrom models import make\nworkload = functools.partial(make, 12)\n",
    "in a branch": "import sys\nif sys.platform == 'linux':\n    def workload(): ...\n",
    "in a try": "try:\n    from fast import workload\nexcept ImportError:\n    def workload(): ...\n",
}
MODULE_LEVEL = {
    "plain": "model = Net()\nbatch = torch.ones(2)\n",
    "unpacked": "model, (batch, _) = Net(), make()\n",
    "annotated": "model: Net = Net()\nbatch: Tensor = torch.ones(2)\n",
    "imported": "from parts import model, batch\n",
    "in a with": "with torch.device('meta'):\n    model = Net()\nbatch = 1\n",
    "a backward is defined, not called": (
        "class F(Function):\n    @staticmethod\n    def backward(ctx, g):\n        return g\nmodel = Net()\nbatch = 1\n"
    ),
}
SCRIPTS = {
    "empty": "",
    "a loop": "model = Net()\nfor batch in loader:\n    model(batch).sum().backward()\n",
    "calls backward": "model = Net()\nbatch = 1\nmodel(batch).backward()\n",
    "calls backward of an accelerator": "model = Net()\nbatch = 1\naccelerator.backward(model(batch))\n",
    "calls backward in its main guard": "model = Net()\nbatch = 1\nif __name__ == '__main__':\n    loss.backward()\n",
    "calls autograd.backward": "import torch\nmodel = 1\nbatch = 2\ntorch.autograd.backward(model)\n",
    "calls backward by its own name": "from torch.autograd import backward\nmodel = 1\nbatch = 2\nbackward(model)\n",
    "calls autograd.grad": "from torch import autograd\nmodel = 1\nbatch = 2\nautograd.grad(model, batch)\n",
    "binds the loop's variable only": "model = Net()\nfor batch in loader:\n    print(model(batch))\n",
    "binds them when it is main": "if __name__ == '__main__':\n    model = Net()\n    batch = 1\n",
    "binds them in a function": "def main():\n    model = Net()\n    batch = 1\nmain()\n",
    "sets attributes of that name": "config.model = 1\nsizes[batch] = 2\n",
    "annotates without a value": "model: Net\nbatch: Tensor\n",
    "a workload in a class": "class A:\n    def workload(self): ...\n",
    "a variable called workload": "workload = 'big'\n",
    "a variable of that name made by a call": "workload = parse_args().workload\n",
    "a workload when it is main": "if '__main__' == __name__:\n    def workload(): ...\n",
}
CASES = [
    *(("workload", text) for text in WORKLOADS.values()),
    *(("module-level", text) for text in MODULE_LEVEL.values()),
    *(("script", text) for text in SCRIPTS.values()),
]
IDS = [*WORKLOADS, *MODULE_LEVEL, *SCRIPTS]


@pytest.mark.parametrize(("kind", "text"), CASES, ids=IDS)
def test_kind(kind: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(text)
    assert file_kind(file) == kind


def test_the_file_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("raise SystemExit('ran')\n")
    assert file_kind(str(file)) == "script"


def test_encoding_of_the_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_bytes(b"# -*- coding: latin-1 -*-\nname = '\xe9'\ndef workload(): ...\n")
    assert file_kind(file) == "workload"


SYNTAX_ERRORS = {
    "while it is parsed": ("def f(:\n    pass\n", "model.py:1: invalid syntax\n    def f(:\n          ^"),
    "indented": ("if x:\n    y = = 1\n", "model.py:2: invalid syntax\n    y = = 1\n        ^"),
    "while it is compiled": ("x = 1\nreturn x\n", "model.py:2: 'return' outside function\n    return x\n    ^"),
}


@pytest.mark.parametrize(("text", "message"), SYNTAX_ERRORS.values(), ids=SYNTAX_ERRORS)
def test_syntax_error(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(text)
    with pytest.raises(TargetError) as raised:
        file_kind("model.py")
    assert str(raised.value) == message


def test_doubtful_escape_is_left_to_the_run(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text('pattern = "\\d"\ndef workload(): ...\n')
    assert file_kind(file) == "workload"  # warnings are errors here


@pytest.mark.parametrize("front", [0, 40, 150, 2_000])
def test_a_long_line_is_shown_around_its_fault(front: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("x = [" + "1, " * front + "2 3" + ", 4" * 2_000 + "]\n")
    with pytest.raises(TargetError) as raised:
        file_kind("model.py")
    where, text, caret = str(raised.value).splitlines()
    assert where.startswith("model.py:1: invalid syntax")
    assert len(text) == 104 and text[caret.index("^") :].startswith("2 3, 4")


GIVE = "Give a model file or a training script, for instance: gradscope profile train.py"


def test_binary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.pt").write_bytes(b"PK\x00\x00")
    with pytest.raises(TargetError) as raised:
        file_kind("model.pt")
    assert str(raised.value) == f"model.pt is not Python source: it contains null bytes.\n{GIVE}"


@pytest.mark.parametrize("head", ['{"schema_version": 3, ', '\n{\n "kind": "fix",\n "schema_version": 1, '])
def test_a_report_is_no_program(head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.json").write_text(head + '"layers": []}')
    with pytest.raises(TargetError) as raised:
        file_kind("run.json")
    assert str(raised.value) == (
        "run.json is a gradscope report, not Python source.\nTo show it: gradscope show run.json"
    )


def _sparse() -> None:
    with open("x.py", "wb") as file:
        file.truncate(10**9)


NO_FILES: dict[str, tuple[Callable[[], object], str]] = {
    "pipe": (lambda: os.mkfifo("x.py"), "it is a pipe, not a file"),
    "device": (lambda: Path("x.py").symlink_to("/dev/zero"), "it is a device, not a file"),
    "huge": (_sparse, "it has 1.00 GB, and at most 50.0 MB are read"),
}


@pytest.mark.parametrize(("make", "reason"), NO_FILES.values(), ids=NO_FILES)
def test_what_has_no_end_or_one_reader_is_not_read(
    make: Callable[[], object], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make()
    with pytest.raises(TargetError) as raised:
        load_target("x.py")
    assert str(raised.value) == f"cannot read x.py: {reason}.\n{GIVE}"


def test_a_pipe_of_the_shell_is_not_read() -> None:
    """It could be read once only: to parse it and then to run it takes two."""
    reading, writing = os.pipe()
    os.write(writing, b"def workload(): ...\n")
    os.close(writing)
    with pytest.raises(TargetError) as raised:
        load_target(f"/dev/fd/{reading}")
    os.close(reading)
    assert str(raised.value) == f"cannot read /dev/fd/{reading}: it is a pipe, not a file.\n{GIVE}"


def test_missing_file() -> None:
    with pytest.raises(TargetError) as raised:
        file_kind("nowhere/model.py")
    assert str(raised.value) == (
        "cannot read nowhere/model.py: No such file or directory.\n"
        "Give a model file or a training script, for instance: gradscope profile train.py"
    )
