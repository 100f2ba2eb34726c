"""Other libraries' tests on gradscope's recipes. ``make peers`` fetches them; without them they are skipped."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from .fetch import fetch
from .liger_plugin import ExactCrossEntropyLoss, exact_cross_entropy
from .suites import FOLDER, LEFT, LIGER, REPOSITORY, SUITES, Suite, elements, why_left

CASES = [pytest.param(suite, file, id=f"{suite.name}-{Path(file).stem}") for suite in SUITES for file in suite.files]


@pytest.mark.parametrize(("suite", "file"), CASES)
def test_their_tests_pass(suite: Suite, file: str, tmp_path: Path) -> None:
    folder = suite.folder()
    if not (folder / file).exists():
        pytest.skip(f"{folder / file} is not there: `make peers` fetches {suite.name} at the commit it was tried with")
    pytest.importorskip("transformers")
    (tmp_path / "empty.ini").write_text("[pytest]\n")
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-c", str(tmp_path / "empty.ini"), "--rootdir", str(folder)]
    command += ["-p", "tests.peers.plugin", "-p", f"tests.peers.{suite.plugin}", "-p", "no:cacheprovider"]
    command += ["-q", "--tb=short", "--junitxml", str(report)]
    shim = REPOSITORY / "tests" / "peers" / "shim"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (shim, folder, REPOSITORY))),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONSAFEPATH": "1",  # else their own package, in the working folder, comes before the shim
    }
    done = subprocess.run([*command, file], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    cases = ElementTree.parse(report).getroot().iter("testcase")
    skipped = {case.get("name") for case in cases if case.find("skipped") is not None}
    assert not skipped, "each test that is not run has its reason in tests/peers/suites.py"
    print(done.stdout.splitlines()[-1])


def test_what_is_left_out_has_its_reason() -> None:
    files = {Path(file).stem for suite in SUITES for file in suite.files}
    assert all(left.why and left.file in files for left in LEFT)
    assert why_left("test_rope", "test_functional_correctness[True-dtype0-1e-05-1e-05-9-7-41-41-41]") is not None
    assert why_left("test_rope", "test_functional_correctness[True-dtype0-1e-05-1e-05-1-2-2-2-8]") is None
    assert why_left("test_layer_norm", "test_dtensor_rms_norm[4]") is None


def test_elements_of_a_test() -> None:
    assert elements({"B": 2, "T": 3, "V": 5, "H": 7}) == 30
    assert elements({"bs": 2}) == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_exact_reference_is_torchs_in_float64(reduction: str, weighted: bool) -> None:
    """In parts, too: 1,100 rows are three of them."""
    logits, target = torch.randn(1100, 7, dtype=torch.float64, requires_grad=True), torch.randint(0, 7, (1100,))
    target[::5] = 2
    weight = torch.rand(7, dtype=torch.float64) if weighted else None
    settings = {"ignore_index": 2, "reduction": reduction, "label_smoothing": 0.1}
    found = exact_cross_entropy(logits, target, weight, **settings)
    expected = functional.cross_entropy(logits, target, weight, **settings)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(expected)
    ours, torchs = (torch.autograd.grad(loss, logits, upstream)[0] for loss in (found, expected))
    torch.testing.assert_close(ours, torchs)
    module = ExactCrossEntropyLoss(weight, **settings)
    assert torch.equal(module(logits, target), found)
    half = exact_cross_entropy(logits.bfloat16(), target)
    assert half.dtype == torch.bfloat16


def test_fetch_takes_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.mkdir()

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        command = ["git", "-C", str(source), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "--quiet")
    git("config", "uploadpack.allowAnySHA1InWant", "true")
    commits = []
    for text in ("old", "new"):
        (source / "test.py").write_text(text)
        git("add", ".")
        git("commit", "--quiet", "-m", text)
        commits.append(git("rev-parse", "HEAD"))
    monkeypatch.setenv(FOLDER, str(tmp_path / "peers"))
    for commit, text in zip(commits, ("old", "new"), strict=True):
        suite = dataclasses.replace(LIGER, url=source.as_uri(), commit=commit)
        for _ in range(2):
            fetch(suite)
            assert (tmp_path / "peers" / "Liger-Kernel" / "test.py").read_text() == text
    (source / ".git").rename(tmp_path / "gone")
    fetch(suite)  # asks nobody for what is there
