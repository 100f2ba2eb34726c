"""Files from strangers: a reader takes them or says in three lines why not, and what it takes shows everywhere."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gradscope.compare.check_config import find_settings
from gradscope.config import find_config
from gradscope.errors import RunFileError, UsageError
from gradscope.fixing import load_fix
from gradscope.limits import read as read_limits
from gradscope.limits import store
from gradscope.report.runfile import from_json, load_run, to_json
from tests import report_fixtures as fixtures
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)
from tests.report.strange_files import (
    BASES,
    changed,
)
from tests.report.strange_fixtures import (
    render_diff,
    render_run,
)

pytestmark = pytest.mark.usefixtures("folder")

WRITE = "Write one with: gradscope profile TARGET"
AGAIN = "Profile again to write a new one."

# -- files that are none -----------------------------------------------------------------------------------------------


def _fifo() -> None:
    os.mkfifo("x")


def _socket() -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("x")


def _sparse() -> None:
    with open("x", "wb") as file:
        file.truncate(600_000_000)


def _loop() -> None:
    Path("x").symlink_to("x")


NO_FILES: dict[str, tuple[Callable[[], object], str]] = {
    "missing": (lambda: None, "x: no such file."),
    "folder": (lambda: os.mkdir("x"), "x cannot be read: it is a folder."),
    "pipe": (_fifo, "x cannot be read: it is a pipe, not a file."),
    "socket": (_socket, "x cannot be read: it is a socket, not a file."),
    "device": (lambda: Path("x").symlink_to("/dev/zero"), "x cannot be read: it is a device, not a file."),
    "huge": (_sparse, "x cannot be read: it has 600 MB, and at most 500 MB are read."),
    "loop": (_loop, "x cannot be read: Too many levels of symbolic links."),
    "dangling link": (lambda: Path("x").symlink_to("nowhere"), "x: no such file."),
    "empty": (lambda: Path("x").write_bytes(b""), "x is not JSON: it is empty."),
    "blank": (lambda: Path("x").write_bytes(b" \n"), "x is not JSON: it is empty."),
    "cut off": (
        lambda: Path("x").write_bytes(b'{"a": 1,'),
        "x is not JSON: Expecting property name enclosed in double quotes (line 1, column 9).",
    ),
    "no UTF-8": (lambda: Path("x").write_bytes(b'{"a": "\xff"}'), "x cannot be read: it is not UTF-8 text (byte 7)."),
    "zeros": (lambda: Path("x").write_bytes(bytes(100)), "x is not JSON: Expecting value (line 1, column 1)."),
    "deep list": (lambda: Path("x").write_text("[" * 5_000), "x is not JSON: its brackets are nested too deeply."),
    "deep object": (
        lambda: Path("x").write_text('{"a":' * 5_000),
        "x is not JSON: its brackets are nested too deeply.",
    ),
    "not a number": (lambda: Path("x").write_text('{"a": -Infinity}'), "x is not JSON: it contains -Infinity."),
}


@pytest.mark.skipif(os.name == "nt", reason="kinds of files as on POSIX")
@pytest.mark.parametrize(("make", "message"), NO_FILES.values(), ids=NO_FILES.keys())
def test_what_is_no_file_of_ours(make: Callable[[], object], message: str, run: Runner) -> None:
    make()
    Path("run.json").write_text(to_json(BASES[0]))
    answer = (2, "", f"gradscope: error: {message}\n{WRITE}\n")
    commands = (
        ("show", "x"),
        ("diff", "x", "run.json"),
        ("diff", "run.json", "x"),
        ("check", "x", "--max-peak", "1GiB"),
        ("check", "run.json", "--baseline", "x", "--max-regression", "5%"),
    )
    for command in commands:
        ran = run(*command)
        assert (ran.code, ran.out, ran.err) == answer, command
    with pytest.raises(RunFileError) as caught:
        load_fix("x")
    assert str(caught.value) == f"{message}\nWrite one with: gradscope fix TARGET"
    assert sorted(os.listdir()) == sorted({"run.json", *(["x"] if os.path.lexists("x") else [])})


def test_names_of_files_do_nothing_to_the_terminal(run: Runner) -> None:
    for name, shown in (
        ("a\x1b[31m.json", "a\\x1b[31m.json"),
        ("a\nb.json", "a b.json"),
        ("\u202ea.json", "\\u202ea.json"),
        (os.fsdecode(b"a\xff.json"), "a\\udcff.json"),
    ):
        assert run("show", name).err == f"gradscope: error: {shown}: no such file.\n{WRITE}\n"
    long = "n" * 5_000
    assert run("show", long).err == (
        f"gradscope: error: {'n' * 149}…{'n' * 150} cannot be read: File name too long.\n{WRITE}\n"
    )
    with pytest.raises(RunFileError, match=r"^a\\x00 cannot be read: a path cannot hold the character \\x00\.\n"):
        load_run("a\0")


# -- values ------------------------------------------------------------------------------------------------------------


BAD_VALUES = {
    ("step/wall_ns", "1" * 5_000): "step.wall_ns is too large a number",
    ("step/wall_ns", "9007199254740993"): "step.wall_ns is too large a number",
    ("layers/0/flops", "9223372036854775808"): "layers[0].flops is too large a number",
    ("step/wall_ns", "1e999"): "step.wall_ns is too large a number",
    ("step/wall_ns", "-1e999"): "step.wall_ns is too large a number",
    ("step/wall_ns", "-5"): "step.wall_ns is the number -5, and cannot be negative",
    ("step/overhead", "1e999"): "step.overhead is too large a number",
    ("step/overhead", "1e30"): "step.overhead is too large a number",
    ("step/overhead", "-0.5"): "step.overhead is the number -0.5, and cannot be negative",
    ("step/wall_ns", "1.0"): "step.wall_ns is the number 1.0, not an integer",
    ("step/wall_ns", "true"): "step.wall_ns is true or false, not an integer",
    ("step/wall_ns", "null"): "step.wall_ns is missing",
    ("workload/steps", "-1"): "workload.steps is the number -1, and cannot be negative",
    ("workload/mode", "[[[]]]"): "workload.mode is a list, not one of model, script, loop, trace",
    ("workload/mode", json.dumps("\x1b" + "x" * 500)): (
        f"workload.mode is '\\x1b{'x' * 24}…{'x' * 29}', not one of model, script, loop, trace"
    ),
    ("environment/threads", "[1]"): "environment.threads is a list, not a string, a number, true or false",
    ("environment/threads", "null"): "environment.threads is null, not a string, a number, true or false",
    ("environment", '{"a\\u001b\\n": {}}'): (
        "environment.'a\\x1b ' is an object, not a string, a number, true or false"
    ),
    ("environment/threads", "1e999"): "environment.threads is too large a number",
    ("step/spread", '{"wall": 1}'): "step.spread.wall is the number 1, not an object",
    ("memory/timeline/0/bytes", "[" * 500 + "]" * 500): "memory.timeline[0].bytes is a list, not an integer",
    ("notes", '["a", 1]'): "notes[1] is the number 1, not a string",
    ("findings/0/layers", "[null]"): "findings[0].layers[0] is null, not a string",
}


@pytest.mark.parametrize(("place", "message"), BAD_VALUES.items(), ids=range(len(BAD_VALUES)))
def test_values_that_no_field_can_have(place: tuple[str, str], message: str) -> None:
    with pytest.raises(RunFileError) as caught:
        from_json(changed(*place), "run.json")
    assert str(caught.value) == f"run.json is damaged: {message}.\n{AGAIN}"


def test_versions() -> None:
    for version, shown in (
        ("1e999", "inf"),
        ('"\\u001b"', r"'\x1b'"),
        ("true", "True"),
        ("[[1]]", "[[1]]"),
        ("0", "0"),
    ):
        with pytest.raises(RunFileError) as caught:
            from_json(changed("schema_version", version), "run.json")
        assert str(caught.value) == f"run.json is not a RUN.json: its schema_version is {shown}.\n{WRITE}"
    record = json.loads(to_json(BASES[0])) | {"schema_version": 9, "gradscope": "\x1b[31m" + "9" * 500}
    with pytest.raises(RunFileError) as newer:
        from_json(json.dumps(record), "run.json")
    assert str(newer.value) == (
        "run.json has schema_version 9; this gradscope reads up to 1.\n"
        f"It was written by gradscope \\x1b[31m{'9' * 11}…{'9' * 20}: update gradscope, or profile again."
    )


def test_what_may_be_a_loss_may_be_negative() -> None:
    text = changed("findings/0/predicted_saving_ns", "-3")
    assert from_json(text).findings[0].predicted_saving_ns == -3


# -- trees -------------------------------------------------------------------------------------------------------------


def with_layers(*more: dict[str, Any], **parents: str) -> str:
    """The text of a run with more layers, without a cost of their own, and other parents for those that it has."""
    record = json.loads(to_json(fixtures.mlp()))
    zero = {key: 0 for key, value in record["layers"][1].items() if type(value) in (int, float)}
    for row in record["layers"]:
        row |= {"parent": parents[row["path"]]} if row["path"] in parents else {}
    record["layers"] += [{"class": "Linear", **zero, **row} for row in more]
    return json.dumps(record)


BAD_TREES = {
    "twice": (
        with_layers({"path": "a", "parent": ""}, {"path": "a", "parent": ""}),
        "layers[{1}].path is 'a', as that of layers[{0}]",
    ),
    "itself": (
        with_layers({"path": "a", "parent": "a"}),
        "layers[{0}].parent is 'a', which makes a layer its own parent",
    ),
    "a ring": (
        with_layers({"path": "a", "parent": "b"}, {"path": "b", "parent": "c"}, {"path": "c", "parent": "a"}),
        "layers[{0}].parent is 'b', which makes a layer its own parent",
    ),
    "a ring by a parent without a row": (
        with_layers({"path": "a", "parent": "a.b.c"}, {"path": "a.b", "parent": "a"}),
        "layers[{0}].parent is 'a.b.c', which makes a layer its own parent",
    ),
    "deep": (
        with_layers(*({"path": f"a{i}", "parent": f"a{i - 1}" if i else ""} for i in range(5_000))),
        "layers[{999}] is more than 1000 levels deep",
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD_TREES.values(), ids=BAD_TREES.keys())
def test_layers_that_are_no_tree(text: str, message: str) -> None:
    first = len(fixtures.mlp().layers)
    shown = re.sub(r"\{(\d+)\}", lambda match: str(first + int(match[1])), message)
    with pytest.raises(RunFileError) as caught:
        from_json(text, "run.json")
    assert str(caught.value) == f"run.json is damaged: {shown}.\n{AGAIN}"


@pytest.mark.parametrize("levels", [90, 300])
def test_deep_layers_are_shown_everywhere(levels: int, no_plotly: None) -> None:
    names = ["deep" + ".0" * i for i in range(levels)]
    rows = [{"path": name, "parent": above} for name, above in zip(names, ["", *names], strict=False)]
    run = from_json(with_layers(*rows))
    texts = render_run(run) | render_diff(run, run)
    assert json.loads(texts["speedscope"])
    assert texts["csv layers"].count("\n") == 1 + len(run.layers)


# -- settings and limits -----------------------------------------------------------------------------------------------

MEND = "Fix it, or run in a folder that is not below it."
BAD_SETTINGS = {
    "number of 5,000 digits": (
        "x = " + "1" * 5_000,
        f" is not TOML: a number in it has too many digits.\n{MEND}",
    ),
    "deep": ("x = " + "[" * 5_000, f" is not TOML: its brackets are nested too deeply.\n{MEND}"),
    "no text": (b"\xff\xfe", f" cannot be read: it is not UTF-8 text (byte 0).\n{MEND}"),
    "hostile key": (
        '[tool.gradscope]\n"a\\u001b\\n" = 1',
        ": tool.gradscope has no key a\\x1b .\nThere are ignore, memory-budget, check.",
    ),
    "huge value": (
        "[tool.gradscope]\nignore = 0x" + "f" * 5_000,
        ": tool.gradscope.ignore is not a list but a very long value.\n"
        'Write ignore = ["a-rule", "another-rule"]; gradscope rules lists them.',
    ),
    "long value": (
        f"[tool.gradscope]\nignore = '{'x' * 500}'",
        f": tool.gradscope.ignore is not a list but '{'x' * 28}…{'x' * 29}'.\n"
        'Write ignore = ["a-rule", "another-rule"]; gradscope rules lists them.',
    ),
    "table of check": (
        "[tool.gradscope]\ncheck = [[1]]",
        ": tool.gradscope.check is not a table.\nWrite [tool.gradscope.check] and its keys below it.",
    ),
    "huge limit": (
        "[tool.gradscope.check]\nmax-peak = 0x" + "f" * 5_000,
        ': tool.gradscope.check.max-peak is not text but a very long value.\nWrite max-peak = "6GiB"',
    ),
}


@pytest.mark.parametrize(("text", "message"), BAD_SETTINGS.values(), ids=BAD_SETTINGS.keys())
def test_settings_that_are_none(text: str | bytes, message: str, folder: Path) -> None:
    file = folder / "pyproject.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UsageError) as caught:
        find_settings(folder)
        find_config(folder)
    assert str(caught.value) == f"pyproject.toml{message}"  # as it is seen from the working folder


@pytest.mark.parametrize("value", ["9" * 5_000 + "%", "=" + "9" * 5_000 + "%", "9" * 5_000 + "GiB"])
def test_limits_of_thousands_of_digits(value: str, run: Runner) -> None:
    Path("run.json").write_text(to_json(BASES[0]))
    for option in ("--max-regression", "--max-peak"):
        ran = run("check", "run.json", "--baseline", "run.json", option, value)
        assert ran.code == 2
        assert ran.err.startswith(f"gradscope: error: {option}: ")
        assert len(ran.err) < 250


def test_a_working_folder_that_is_gone(run: Runner, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("run.json").write_text(to_json(BASES[0]))

    def gone() -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "cwd", gone)
    for command in (("show",), ("check", "--max-peak", "1GiB")):
        ran = run(command[0], str(folder / "run.json"), *command[1:])
        message = "gradscope: error: the working folder does not exist any more.\nChange to one that does.\n"
        assert (ran.code, ran.out, ran.err) == (2, "", message)


def test_limits_of_the_machine_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "limits_file", lambda: Path("limits.json"))
    os.mkfifo("limits.json")
    assert read_limits().problem == "it is a pipe, not a file"
    os.unlink("limits.json")
    Path("limits.json").write_text("9" * 5_000)
    assert read_limits().problem == "it was not written by this version of gradscope"
