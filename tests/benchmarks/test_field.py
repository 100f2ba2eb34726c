"""benchmarks/field.py on toy programs: what it compares, what it says, what it keeps."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest

from .field_fixtures import HONEST, PROGRAMS, Program, compare, field, made_repository, numbers, running, sources, table

COMMIT = "0" * 40
TOY = Program(
    "toy", "someone/toy", COMMIT, "train.py 20", data=numbers, without=("data.txt",), steps=2, warmup=1, limit_s=120
)


def toy(folder: Path, text: str = HONEST, **changes: object) -> Program:
    return dataclasses.replace(TOY, commit=made_repository(folder, text), **changes)  # type: ignore[arg-type]


def test_an_honest_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = toy(tmp_path)
    assert field.main([str(tmp_path)], (program,)) == 0
    record = json.loads((tmp_path / "results.jsonl").read_text())
    assert (record["exit_alone"], record["exit_profiled"]) == (0, 0)
    assert record["prints_alike"] and record["files_alike"]
    assert record["numbers"] == 40 and record["files"] == 1  # a step's number and its loss, 20 times; model.pt
    assert record["steps"] == 2 and record["unattributed"] == 0 and record["no_line"] < table.NO_LINE_GOAL
    assert table.missed(record) == []
    assert "| toy | someone/toy: `train.py` | 0 | 40 numbers, 1 files | 2 | 0 |" in capsys.readouterr().out
    assert (tmp_path / "runs/toy/report.txt").read_text().startswith("gradscope ")
    assert not (tmp_path / "work").joinpath("toy").exists()


def test_a_result_is_kept_until_the_program_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"digest": field.digest(TOY), "name": "toy", **_RECORD}
    (tmp_path / "results.jsonl").write_text(json.dumps(record) + "\n")
    assert field.main([str(tmp_path)], (TOY,)) == 0  # although there is no clone
    assert capsys.readouterr().err == ""
    changed = dataclasses.replace(TOY, command="train.py 30")
    assert field.main([str(tmp_path)], (changed,)) == 1
    assert "is missing. Get it" in capsys.readouterr().err


def test_an_endless_program_is_compared_as_far_as_it_was_profiled(tmp_path: Path) -> None:
    program = toy(tmp_path, command="train.py 1000000", endless=True)
    record = running.run_program(program, tmp_path)
    assert (record["exit_alone"], record["exit_profiled"]) == (0, 0)
    assert record["prints_alike"] and record["numbers"] >= 2 * (program.steps + program.warmup)


def test_what_a_profiled_program_does_otherwise_is_seen(tmp_path: Path) -> None:
    """It asks whether gradscope is there, and then prints, writes and exits otherwise."""
    text = HONEST + 'if "gradscope" in sys.modules:\n    print("loss 0.1")\n    open("extra", "w")\n    sys.exit(4)\n'
    record = running.run_program(toy(tmp_path, text), tmp_path)
    assert (record["exit_alone"], record["exit_profiled"]) == (0, 4)
    assert not record["prints_alike"] and not record["files_alike"]
    assert "+loss 0.1" in record["difference"] and "only profiled: extra" in record["difference"]
    assert table.missed(record)[:2] == ["exit code 4, alone 0", "prints something else"]


def test_a_program_without_a_seed_is_given_one_or_said_to_vary(tmp_path: Path) -> None:
    text = HONEST.replace("torch.manual_seed(0)\n", "")
    program = toy(tmp_path, text, seed=3)
    record = running.run_program(program, tmp_path)
    assert record["prints_alike"] and record["files_alike"]
    record = running.run_program(dataclasses.replace(program, seed=None), tmp_path)
    assert record["varies_alone"]
    assert table.missed(record) == ["differs from run to run without gradscope as well"]


def test_a_time_limit_ends_the_program_and_its_children(tmp_path: Path) -> None:
    text = "import subprocess, time\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\ntime.sleep(60)\n"
    program = toy(tmp_path, text)
    place = sources.export(program, tmp_path / "sources" / program.checkout, tmp_path / "tree")
    ran = running.run_process(program, running.command_alone(program), place, tmp_path / "tree", 1.0)
    assert ran.timed_out
    assert gone(int(ran.stdout))


def gone(process: int) -> bool:
    """Wait for a process that was sent the signal to end; on a busy machine that takes a moment."""
    for _ in range(600):
        try:
            state = Path(f"/proc/{process}/stat").read_text().split()[2]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_data_may_not_change_the_program(tmp_path: Path) -> None:
    program = toy(tmp_path, without=())
    with pytest.raises(AssertionError, match=r"^toy: the maker of data changed data.txt of the repository$"):
        sources.export(program, tmp_path / "sources" / program.checkout, tmp_path / "tree")


def test_missing_clone(tmp_path: Path) -> None:
    with pytest.raises(sources.Missing) as raised:
        sources.check_ready(TOY, tmp_path)
    place = tmp_path / "someone+toy"
    assert str(raised.value) == (
        f"toy: {place} is missing. Get it:\n"
        f"  git clone https://github.com/someone/toy {place}\n"
        f"  or let field.py do so: --get"
    )


def test_missing_commit(tmp_path: Path) -> None:
    made_repository(tmp_path)
    place = tmp_path / "sources/someone+toy"
    with pytest.raises(sources.Missing) as raised:
        sources.check_ready(TOY, tmp_path / "sources")
    assert str(raised.value) == f"toy: {place} has no commit {COMMIT}. Get it:\n  git -C {place} fetch origin {COMMIT}"


def test_missing_package(tmp_path: Path) -> None:
    program = toy(tmp_path, needs=("json", "no_such_package"))
    with pytest.raises(sources.Missing, match=r"^toy imports no_such_package, which this Python lacks\. Install it:\n"):
        sources.check_ready(program, tmp_path / "sources")


def test_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as raised:
        field.main([str(tmp_path), "--only", "toys"], (TOY,))
    assert raised.value.code == "field.py: no program is called toys. There are:\n  toy"


def test_get_clones(tmp_path: Path) -> None:
    program = toy(tmp_path / "elsewhere")
    origin = str(tmp_path / "elsewhere/sources/{checkout}")
    sources.clone(program, tmp_path / "sources", origin)
    assert sources.check_ready(program, tmp_path / "sources") == tmp_path / "sources/someone+toy"


@pytest.mark.parametrize(
    "line",
    [
        "iter 3: loss 2.5000, time 12.25ms",
        "took 3.5 seconds, 2.1 it/s",
        "2026-01-02 03:04:05,678 loss 2.5",
        "<object at 0x7f00aa00bb00>",
        "loss 2.5 [00:03<00:01, 3.4it/s]",
    ],
)
def test_clocks_and_addresses_do_not_count(line: str) -> None:
    other = re.sub(r"0x7f", "0x6a", re.sub(r"(12\.25|3\.5|05,678|00:03|3\.4)", lambda found: found[0][:-1] + "9", line))
    assert other != line
    assert compare.compare_text(line, other).alike


@pytest.mark.parametrize(
    ("line", "other"), [("loss 2.5001", "loss 2.5002"), ("12 of 20", "13 of 20"), ("0.1s 5", "0.1s 6")]
)
def test_numbers_count(line: str, other: str) -> None:
    assert not compare.compare_text(line, other).alike


def test_the_report_is_not_the_programs() -> None:
    printed, report = compare.split_report("loss 1.0\ngradscope 0.1.0  train.py (script) · Net\nrun   cpu\nloss 2.0\n")
    assert (printed, report[:15]) == ("loss 1.0\n", "gradscope 0.1.0")


def test_temporary_files_left_behind() -> None:
    """Names that tempfile draws differ from run to run; torch makes its cache whenever dynamo is imported."""
    assert running.left_behind(["pymp-1k6a8b1v"], ["pymp-xr1jlpyn", "torchinductor_root"]) == []
    assert running.left_behind(["pymp-1k6a8b1v"], ["pymp-xr1jlpyn", "pymp-aaaa1111", "ours"]) == ["ours", "pymp-#"]


def test_new_lines_on_stderr() -> None:
    profiled = "gradscope: warm-up\nUserWarning: ours\nWarning: theirs\n 10%|#     | 1/10\n"
    assert compare.new_lines("Warning: theirs\n", profiled) == ["UserWarning: ours"]


def test_page(tmp_path: Path) -> None:
    page = tmp_path / "field.md"
    page.write_text("# Field\n\nWhat it is.\n\n" + field.MARK + "\nold\n")
    field.publish(page, "new\n")
    assert page.read_text() == "# Field\n\nWhat it is.\n\n" + field.MARK + "\nnew\n"


_RECORD = {
    "repo": "someone/toy", "command": "train.py", "exit_alone": 0, "exit_profiled": 0, "exit_expected": 0,
    "numbers": 3, "files": 0, "prints_alike": True, "files_alike": True, "left_behind": [], "measured": True,
    "unattributed": 0.0, "no_line": 0.0, "library": False, "endless": False, "steps": 5, "notes": ["5 of 9 steps"],
    "findings": ["info tied-embedding"], "load": 0.1, "cpus": 2, "wall_alone_s": 1.0, "wall_profiled_s": 2.0,
    "processor_alone_s": 1.0, "processor_profiled_s": 2.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"exit_alone": 1, "exit_profiled": 1}, "exit code 1 alone: the list expects 0"),
        ({"files_alike": False}, "writes other files"),
        ({"numbers": 0}, "prints and writes nothing that could be compared"),
        ({"left_behind": ["cache"]}, "leaves cache behind"),
        ({"measured": False}, "nothing measured"),
        ({"unattributed": 0.0051}, "0.5% unattributed"),
        ({"no_line": 0.021}, "2.1% without a line"),
    ],
)
def test_goals(change: dict[str, object], said: str) -> None:
    assert table.missed(_RECORD) == []
    assert table.missed({**_RECORD, **change}) == [said]


def test_lines_of_a_library_are_not_the_programs() -> None:
    assert table.missed({**_RECORD, "no_line": 0.5, "library": True}) == []


def test_kernels_of_torch_compile_have_no_lines() -> None:
    note = "source lines and FLOPs are not measured: the model uses torch.compile"
    assert table.missed({**_RECORD, "no_line": 0.5, "notes": [note]}) == []


def test_the_list() -> None:
    """Forty programs at least, each told apart, at a whole commit; ports of programs that meet are not the same."""
    names = [program.name for program in PROGRAMS]
    assert len(set(names)) == len(names) >= 40
    for program in PROGRAMS:
        assert program.repo == "installed" or re.fullmatch(r"[0-9a-f]{40}", program.commit), program.name
        assert program.arguments, program.name


def test_nothing_is_said_of_the_load_on_a_quiet_machine() -> None:
    environment = {
        "commit": "abc",
        "torch": "2.13.0",
        "device_name": "CPU",
        "threads": 2,
        "time": "2026-11-22T00:00:00Z",
    }
    quiet = table.markdown([{"name": "toy", **_RECORD}], environment)
    assert "| ×2.0 | ×2.0 |" in quiet and "None." in quiet
    assert "loaded" not in quiet
    busy = table.markdown([{"name": "toy", **_RECORD, "load": 3.0}], environment)
    assert "loaded" in busy
