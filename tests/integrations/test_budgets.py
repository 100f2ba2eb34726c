"""Limits in a test and in GitHub Actions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradscope.errors import UsageError
from gradscope.integrations.pytest import assert_within
from gradscope.report.report import Report
from gradscope.report.runfile import to_json
from tests.diff_fixtures import MS, run

FAST, SLOW = (run({"": [0] * 5, "a": [each * MS] * 5, "b": [10 * MS] * 5}, saved={"a": 4096}) for each in (10, 20))


def test_a_layer_over_its_budget_fails_the_test() -> None:
    assert_within(Report(FAST), Report(FAST), max_regression=["5%", "a=5%"])
    with pytest.raises(AssertionError, match=r"(?s)a .*5 %") as failed:
        assert_within(Report(SLOW), Report(FAST), max_regression=["a=5%"])
    assert "over" in str(failed.value)


def test_memory_needs_no_baseline(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(to_json(FAST), encoding="utf-8")
    assert_within(path, max_peak="1GiB", max_saved=4096)
    with pytest.raises(AssertionError):
        assert_within(path, max_peak=100)
    with pytest.raises(UsageError):
        assert_within(path, max_regression=["5%"])


@pytest.mark.parametrize(("limit", "code"), [("1GiB", 0), ("1", 4)])
def test_the_action_writes_the_summary_and_ends_as_the_check(limit: str, code: int, tmp_path: Path) -> None:
    """Its script, as a runner starts it."""
    action = (Path(__file__).parents[2] / "action.yml").read_text(encoding="utf-8")
    script = "\n".join(line[8:] for line in action.split("run: |\n", 1)[1].splitlines())
    (tmp_path / "model.py").write_text(
        "import torch\ndef workload(): return torch.nn.Linear(4, 4), torch.ones(2, 4)\n", encoding="utf-8"
    )
    scripts = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{scripts}:{os.environ['PATH']}",
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_OUTPUT": str(tmp_path / "output"),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
        "TARGET": "model.py",
        "BASELINE": "",
        "LIMITS": f"--max-peak {limit}",
        "PROFILE_OPTIONS": "--steps 2 --warmup 1",
    }
    # As the runner's bash: it stops at the first error.
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    summary = (tmp_path / "summary").read_text(encoding="utf-8")
    assert summary.startswith("### gradscope check: model.py\n```\n") and "peak" in summary
    assert (tmp_path / "output").read_text(encoding="utf-8") == f"run={tmp_path}/gradscope.json\n"
