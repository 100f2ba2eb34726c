"""Files as people have them: encodings, line ends, indents, and what stands at their top."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gradscope
from gradscope.errors import OutputError
from gradscope.fixing.report import Edited, check_writable, write
from gradscope.patching.patches import Patches

BODY = """class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.hidden = 0.0
        self.register_buffer("mask", torch.tril(torch.ones(5, 5)))

    def forward(self, x, seen=True):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        att = (q @ k.transpose(-2, -1)) * 0.25

        # a word
        att = att.masked_fill(self.mask == self.hidden, float("-inf"))
        if seen:
            att = att.softmax(-1)
        return (att @ v).squeeze(1)
"""
IMPORTS = "import torch\nfrom torch import nn\n\n\n"
USUAL = IMPORTS + BODY

FORMS: dict[str, bytes] = {
    "as usual": USUAL.encode(),
    "carriage returns": USUAL.replace("\n", "\r\n").encode(),
    "tabs": USUAL.replace("    ", "\t").encode(),
    "two spaces": USUAL.replace("    ", "  ").encode(),
    "a mark": b"\xef\xbb\xbf" + USUAL.encode(),
    "latin-1": ("# -*- coding: latin-1 -*-\n" + USUAL.replace("a word", "ein Wörtchen é")).encode("latin-1"),
    "more than one byte": USUAL.replace("a word", "κάποια λέξη").encode(),
    "form feeds and separators": USUAL.replace("\n\n\n", "\n\x0c\n\n")
    .replace("a word", "a\u2028word\x0c\x1c\x85")
    .encode(),
    "a shebang": ("#!/usr/bin/env python\n# MIT\n\n" + USUAL).encode(),
    "a docstring": ('"""What it does."""\n\n__all__ = ["Attention"]\n' + USUAL).encode(),
    "comments and no import": ("#!/usr/bin/env python\n# MIT\nnn, torch = __builtins__['given']\n" + BODY).encode(),
    "nothing before": ("nn, torch = __builtins__['given']\n" + BODY).encode(),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(f"{name}.py").absolute())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__builtins__"] = {**vars(__import__("builtins")), "given": (torch.nn, torch)}
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("form", FORMS)
def test_the_diff_applies_and_what_is_written_is_the_same(form: str) -> None:
    content = FORMS[form]
    Path("net.py").write_bytes(content)
    module = loaded("net")
    torch.manual_seed(1)
    model = module.Attention()
    found = Patches(gradscope.plan(model, torch.randn(2, 5, 8), recipes=["attention"]))
    assert [site.recipe for site in found.in_source] == ["attention"], found.table.reasons.tolist()
    ((name, (before, after)),) = found.texts.items()
    write([Edited(name, before, after)])
    written = Path("net.py").read_bytes()
    assert Path("net.py.bak").read_bytes() == content
    assert written.count(b"\r") == (0 if b"\r" not in content else written.count(b"\n"))
    if form != "latin-1":  # a diff is in one encoding, and this one in UTF-8
        Path("net.py").write_bytes(content)
        subprocess.run(
            ["patch", "-p1", "--no-backup-if-mismatch"], input=found.diff.encode(), check=True, capture_output=True
        )
        assert Path("net.py").read_bytes() == written
    patched = loaded("net").Attention()
    patched.load_state_dict(model.state_dict())
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(patched(x), model(x))


@pytest.mark.parametrize("form", FORMS)
def test_what_stands_above_stays_above(form: str) -> None:
    Path("net.py").write_bytes(FORMS[form])
    found = Patches(gradscope.plan(loaded("net").Attention(), torch.randn(2, 5, 8), recipes=["attention"]))
    ((_, after),) = found.texts.values()
    above, _, below = after.partition("from gradscope.recipes import")
    for word in ("#!", "# MIT", "coding", '"""', "import torch", "from torch import nn"):
        assert word not in below or word not in FORMS[form].decode("latin-1"), word
    assert "class Attention" in below and above.count("\n\n\n\n") == 0
    code = compile(re.sub(r"^.*coding.*\n", "", after), "net.py", "exec")
    assert code.co_names


@pytest.mark.parametrize("form", ["tabs", "two spaces", "as usual"])
def test_blocks_are_indented_as_their_surroundings(form: str) -> None:
    Path("net.py").write_bytes(FORMS[form])
    found = Patches(gradscope.plan(loaded("net").Attention(), torch.randn(2, 5, 8), recipes=["attention"]))
    step = {"tabs": "\t", "two spaces": "  "}.get(form, "    ")
    added = [line[1:] for line in found.diff.splitlines() if line.startswith("+") and not line.startswith("+++")]
    inside = [line for line in added if line.strip() and not line.startswith("from ")]
    assert len(inside) > 4
    for line in inside:
        before = line[: len(line) - len(line.lstrip())]
        assert before == step * (len(before) // len(step)) and len(before) >= 2 * len(step), line


def test_a_line_between_what_goes_and_what_stays_is_not_left_empty() -> None:
    Path("net.py").write_bytes(FORMS["as usual"])
    found = Patches(gradscope.plan(loaded("net").Attention(), torch.randn(2, 5, 8), recipes=["attention"]))
    ((_, after),) = found.texts.values()
    new, _, _ = after.partition("        else:")
    block = new[new.rindex("        if ") :].splitlines()[1:]
    assert all(line.strip() for line in block), block


def test_a_backup_has_the_files_mode() -> None:
    Path("net.py").write_bytes(FORMS["as usual"])
    Path("net.py").chmod(0o640)
    write([Edited(str(Path("net.py").absolute()), USUAL, USUAL + "\n")])
    assert Path("net.py.bak").stat().st_mode & 0o777 == 0o640 == Path("net.py").stat().st_mode & 0o777


@pytest.mark.parametrize("name", ["gradscope.py", "gradscope/__init__.py"])
def test_a_module_of_this_packages_name_is_told(name: str) -> None:
    Path("net.py").write_bytes(FORMS["as usual"])
    file = Edited(str(Path("net.py").absolute()), USUAL, USUAL + "\n")
    check_writable([file], force=False)
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).touch()
    with pytest.raises(OutputError) as told:
        check_writable([file], force=False)
    assert str(told.value) == (
        f"{name.partition('/')[0]} beside net.py would be imported in the place of this package.\n"
        "Give it another name, or write all the same with --force."
    )
    check_writable([file], force=True)
