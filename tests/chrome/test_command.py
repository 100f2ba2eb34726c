"""``gradscope trace`` on the command line: what it prints, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chrome.made import two_layers
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (used by its name)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_trace_gives_a_report_a_run_and_a_page(run: Runner, tmp_path: Path) -> None:
    two_layers().save(tmp_path / "rank3.pt.trace.json.gz")
    ran = run("trace", "rank3.pt.trace.json.gz")
    assert ran.code == 0
    head = ran.out.splitlines()[:3]
    assert head[0].startswith("gradscope ") and "rank3.pt.trace.json.gz (trace) · Net" in head[0]
    assert "cuda (Made GPU) · rank 3 of 8 · 2 steps" in head[1]
    assert "1.00 ms = forward" in head[2]
    flat = " ".join(ran.out.split())
    # Busy from 100 to 160, 230 to 240, 400 to 600, and while the optimizer steps.
    assert "idle for 720 µs of the step (72 %); 380 µs of kernels and copies, each in full = forward 70.0 µs" in flat
    assert "is the machine idle" not in flat
    assert "reading rank3.pt.trace.json.gz" in ran.err and "wrote gradscope-rank3.json" in ran.err
    record = json.loads((tmp_path / "gradscope-rank3.json").read_text(encoding="utf-8"))
    assert record["workload"]["mode"] == "trace" and record["device"]["kernel_ns"] == 380_000
    assert "lines" not in record or record["lines"] == []
    assert (tmp_path / "gradscope-rank3.html").stat().st_size > 10_000


def test_the_run_is_shown_compared_and_checked_like_any_other(run: Runner, tmp_path: Path) -> None:
    for name in ("a", "b"):
        two_layers(4).save(tmp_path / f"{name}.json")
        assert run("trace", f"{name}.json", "--no-html", "-q").code == 0
    shown = run("show", "gradscope-a.json", "--show", "device")
    assert shown.code == 0 and "launched by" in shown.out and "all kernels and copies" in shown.out
    assert run("show", "gradscope-a.json", "--format", "csv").code == 0
    compared = run("diff", "gradscope-a.json", "gradscope-b.json")
    assert compared.code == 0
    checked = run("check", "gradscope-a.json", "--baseline", "gradscope-b.json", "--max-regression", "5%")
    assert checked.code == 0


def test_several_files_are_reported_one_after_the_other(run: Runner, tmp_path: Path) -> None:
    for rank in range(2):
        two_layers().save(tmp_path / f"rank{rank}.json")
    ran = run("trace", "rank0.json", "rank1.json", "--no-html", "-q")
    assert ran.code == 0 and ran.out.count("\nLayers ") == 2
    assert {path.name for path in tmp_path.glob("gradscope-*")} == {"gradscope-rank0.json", "gradscope-rank1.json"}


def test_a_file_that_cannot_be_read_does_not_end_the_others(run: Runner, tmp_path: Path) -> None:
    for name in ("a", "b"):
        two_layers().save(tmp_path / f"{name}.json")
    (tmp_path / "stacks.txt").write_text("forward;linear 5\n", encoding="utf-8")
    ran = run("trace", "stacks.txt", "a.json", "none.json", "b.json", "--no-html", "-q")
    assert ran.code == 2 and ran.out.count("\nLayers ") == 2 and not ran.out.startswith("\n")
    assert "stacks.txt is not a whole trace" in ran.err and "none.json: no such file" in ran.err
    assert {path.name for path in tmp_path.glob("gradscope-*")} == {"gradscope-a.json", "gradscope-b.json"}


def test_the_head_has_the_device_s_idle_time_where_it_is_much(run: Runner, tmp_path: Path) -> None:
    """Here 72 % of the step; without a device there is none."""
    made = two_layers()
    made.events = [event for event in made.events if "nccl" not in event["name"]]
    made.save(tmp_path / "a.json")
    flat = " ".join(run("trace", "a.json", "--no-html", "-q").out.split())
    assert "idle the device waits for the host for 76 % of the step (760 µs): larger batches" in flat
    assert flat.index("idle the device") < flat.index("Findings")
    made.events = [event for event in made.events if event["cat"] not in ("kernel", "cuda_runtime")]
    made.save(tmp_path / "b.json")
    assert "waits for the host" not in run("trace", "b.json", "--no-html", "-q").out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.json"], "none.json: no such file"),
        (["a.json", "b.json", "-o", "x"], "-o names the output of one FILE, and 2 are given"),
        (["a.json", "other/a.json"], "two of these FILEs have the same name"),
        (["a.json", "--steps", "x"], "--steps x: give the first and the last"),
        (["a.json", "--steps", "90-91"], "has steps 4 to 5"),
        (["a.json", "--model", "script.py"], "--model script.py is a script"),
        (["a.json", "--open", "--no-html"], "--open has no page to open"),
        ([], "Missing argument"),
    ],
)
def test_what_cannot_be_done_is_said(run: Runner, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "script.py").write_text("import torch\n", encoding="utf-8")
    two_layers().save(tmp_path / "a.json")
    ran = run("trace", *arguments)
    assert ran.code == 2 and words in ran.err and "Traceback" not in ran.err
    assert not list(tmp_path.glob("gradscope-*"))


def test_a_file_of_somebody_else_is_not_overwritten(run: Runner, tmp_path: Path) -> None:
    two_layers().save(tmp_path / "a.json")
    (tmp_path / "gradscope-a.json").write_text("mine", encoding="utf-8")
    ran = run("trace", "a.json")
    assert ran.code == 2 and "gradscope-a.json" in ran.err
    assert (tmp_path / "gradscope-a.json").read_text(encoding="utf-8") == "mine"


def test_json_to_stdout(run: Runner, tmp_path: Path) -> None:
    two_layers().save(tmp_path / "a.json")
    ran = run("trace", "a.json", "--json", "-")
    assert ran.code == 0 and json.loads(ran.out)["device"]["collectives_ns"] == 140_000


@pytest.mark.parametrize("option", [["-o", "a"], ["--json", "a.json"], ["--html", "a.json"]])
def test_a_trace_is_never_written_over(option: list[str], run: Runner, tmp_path: Path) -> None:
    """Not with --force either: nobody has it twice."""
    two_layers().save(tmp_path / "a.json")
    before = (tmp_path / "a.json").read_bytes()
    ran = run("trace", "a.json", *option, "--force")
    assert ran.code == 2 and "is a FILE that is read" in ran.err
    assert (tmp_path / "a.json").read_bytes() == before


def test_a_model_that_raises_is_the_users_error(run: Runner, tmp_path: Path) -> None:
    two_layers().save(tmp_path / "a.json")
    (tmp_path / "model.py").write_text(
        "import torch\nclass Net(torch.nn.Module):\n    def forward(self, x): raise RuntimeError('no')\n"
        "def workload(): return Net(), torch.ones(1)\n",
        encoding="utf-8",
    )
    ran = run("trace", "a.json", "--model", "model.py")
    assert ran.code == 1 and "RuntimeError: no" in ran.err and "names.py" not in ran.err


def test_without_modules_operations_and_kernels_are_what_is_shown(run: Runner, tmp_path: Path) -> None:
    """They are all that tells where the time goes."""
    made = two_layers()
    made.events = [event for event in made.events if event.get("cat") != "python_function"]
    made.save(tmp_path / "a.json")
    ran = run("trace", "a.json", "--no-html", "-q")
    assert ran.code == 0
    assert "a.json (trace)\n" in ran.out
    assert "\nOperations " in ran.out and "\nKernels " in ran.out and "gemm" in ran.out
    two_layers().save(tmp_path / "b.json")
    assert "\nOperations " not in run("trace", "b.json", "--no-html", "-q").out
