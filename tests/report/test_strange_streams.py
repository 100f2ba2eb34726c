"""Standard streams that are closed, full or of another encoding, and paths that cannot be written."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gradscope.errors import OutputError
from gradscope.report import Report, load
from gradscope.report.outfile import check_output, write_text
from gradscope.report.runfile import to_json
from tests import report_fixtures as fixtures
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)

pytestmark = pytest.mark.skipif(os.name == "nt", reason="streams and paths as on POSIX")

ELSEWHERE = "Send it to a file or a pipe that takes it."
ODD = ("Größe ×2", "\u202e漢字", "a\udcffb", "\x1b[31m")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a run in it whose texts no ASCII holds."""
    monkeypatch.chdir(tmp_path)
    run = fixtures.mlp()
    lines = tuple(replace(line, text=ODD[i % len(ODD)], function=ODD[1]) for i, line in enumerate(run.lines))
    run = replace(run, lines=lines, notes=ODD)
    Path("run.json").write_bytes(to_json(run).encode("utf-8", "backslashreplace"))
    return tmp_path


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of the shell, in which ``gradscope`` is this one."""
    program = f'gradscope() {{ "{sys.executable}" -m gradscope "$@"; }}\n'
    settings = {**os.environ, **environment}
    return subprocess.run(["bash", "-c", program + command], capture_output=True, env=settings, check=False)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "command",
    [
        "show run.json",
        "show run.json -f json",
        "diff run.json run.json",
        "check run.json --max-regression 5% --baseline run.json",
        "rules",
        "--help",
    ],
)
def test_a_full_stdout(command: str) -> None:
    ran = shell(f"gradscope {command} > /dev/full")
    message = f"gradscope: error: stdout cannot be written: No space left on device.\n{ELSEWHERE}\n"
    assert (ran.returncode, ran.stderr.decode()) == (2, message)


@pytest.mark.parametrize("format", ["terminal", "csv"])
def test_a_closed_stdout(format: str) -> None:
    ran = shell(f"gradscope show run.json -f {format} >&-")
    assert (ran.returncode, ran.stderr.decode()) == (2, f"gradscope: error: stdout is closed.\n{ELSEWHERE}\n")


def test_all_streams_closed() -> None:
    ran = shell("gradscope show run.json -f json -o out.json <&- >&- 2>&-; echo $? > code")
    assert (ran.stdout, ran.stderr, Path("code").read_text()) == (b"", b"", "0\n")
    assert load("out.json").data == load("run.json").data


def test_a_reader_that_leaves() -> None:
    ran = shell("set -o pipefail; gradscope show run.json -f json | head -1")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"{\n", b"")


@pytest.mark.parametrize("command", ["gradscope show <(cat run.json)", "cat run.json | gradscope show /dev/stdin"])
def test_a_pipe_of_the_shells(command: str) -> None:
    ran = shell(f"{command} -f json")
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert json.loads(ran.stdout) == json.loads(to_json(load("run.json").data))


# Without these Python takes UTF-8 where the locale is C.
PLAIN = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, PLAIN, {"PYTHONIOENCODING": "latin-1"}, {}])
@pytest.mark.parametrize("format", ["terminal", "markdown", "csv --table lines", "json", "speedscope"])
def test_any_encoding(format: str, environment: dict[str, str]) -> None:
    ran = shell(f"gradscope show run.json -f {format}", **environment)
    assert (ran.returncode, ran.stderr) == (0, b"")
    text = ran.stdout.decode("utf-8" if not environment else environment.get("PYTHONIOENCODING", "ascii"))
    if format == "json":
        assert json.loads(text) == json.loads(to_json(load("run.json").data))
    elif format == "speedscope":
        assert json.loads(text)["profiles"]
    else:
        assert text.strip()
        assert all(char.isprintable() or char == "\n" for char in text)


# -- files -------------------------------------------------------------------------------------------------------------


def test_texts_that_are_no_utf8_are_written_and_read_again() -> None:
    run = load("run.json").data
    assert "a\udcffb" in run.notes
    written = Report(run).save("again.json")
    assert load(written).data == run
    for name in ("markdown", "csv", "speedscope", "html"):
        shell(f"gradscope show run.json -f {name} -o out.{name}")
        Path(f"out.{name}").read_text(encoding="utf-8")


def test_names_that_are_no_utf8(run: Runner) -> None:
    os.rename(b"run.json", b"r\xff\x1b.json")
    name, out = os.fsdecode(b"r\xff\x1b.json"), os.fsdecode(b"o\xff\n.json")
    ran = run("show", name, "-f", "json", "-o", out)
    assert (ran.code, ran.out, ran.err) == (0, "", "gradscope: wrote o\\udcff .json\n")
    assert run("show", out).code == 0
    page = run("show", name, "-f", "html")
    assert (page.code, page.err) == (0, "gradscope: wrote r\\udcff\\x1b.html\n")
    assert run("diff", name, out, "-f", "json").code == 0
    assert run("diff", name, out).code == 0


def bad_paths() -> dict[str, str]:
    """Output paths, and what is said of them."""
    here = Path().resolve()
    return {
        "x" * 400: f"{'x' * 149}…{'x' * 150} cannot be written: File name too long.\nChoose another path.",
        "loop": "loop cannot be written: ",
        "run.json/x": f"run.json/x cannot be written: the folder {here}/run.json does not exist.\nCreate it first.",
        "a\x1b\n/x": f"a\\x1b /x cannot be written: the folder {here}/a\\x1b  does not exist.\nCreate it first.",
        "into": "into is a folder.\nGive the path of a file, such as into/run.json.",
    }


def test_paths_that_cannot_be_written(run: Runner) -> None:
    Path("loop").symlink_to("loop")
    os.mkdir("folder")
    Path("into").symlink_to("folder")
    before = sorted(os.listdir())
    for path, message in bad_paths().items():
        ran = run("show", "run.json", "-f", "json", "-o", path)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"gradscope: error: {message}"), path
        assert len(ran.err.splitlines()) <= 3
    assert sorted(os.listdir()) == before
    with pytest.raises(OutputError, match=r"^a\\x00b cannot be written: embedded null byte\.\nChoose another path\.$"):
        check_output("a\0b")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_device() -> None:
    with pytest.raises(OutputError) as caught:
        write_text("/dev/full", "x")
    assert str(caught.value) == "/dev/full cannot be written: No space left on device.\nChoose another path."


def test_a_full_disk_leaves_nothing() -> None:
    """A limit on the size of files fails as a full disk does: in the middle of writing."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000))

    old = Path("run.json").read_bytes()
    for arguments in (["-f", "json", "-o", "run.json"], ["-f", "html"], ["-f", "json", "-o", "new.json"]):
        command = [sys.executable, "-m", "gradscope", "show", "run.json", *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
        name = arguments[-1] if arguments[-1].endswith("json") else "run.html"
        assert (ran.returncode, ran.stdout) == (2, "")
        assert ran.stderr == f"gradscope: error: {name} cannot be written: File too large.\nChoose another path.\n"
    assert os.listdir() == ["run.json"]
    assert Path("run.json").read_bytes() == old


def test_a_long_name_has_room_for_the_file_that_is_written_first() -> None:
    name = "n" * 250 + ".json"
    assert Report(fixtures.mlp()).save(name) == Path(name)
    assert load(name).data == fixtures.mlp()
