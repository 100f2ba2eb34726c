"""Changing the user's files: all of them as the diff shows, or none at all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from gradscope.errors import OutputError
from gradscope.fixing import report
from gradscope.fixing.report import Edited, check_writable, write

OLD, NEW = "a = 1\nb = 2\n", "a = 1\nb = 3\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def edited(name: str, content: bytes = OLD.encode()) -> Edited:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(content)
    return Edited(os.path.abspath(name), OLD, NEW)


def test_permissions_and_line_ends_are_kept() -> None:
    file = edited("m.py", OLD.replace("\n", "\r\n").encode())
    os.chmod("m.py", 0o755)
    check_writable([file], force=False)
    assert write([file]) == [("m.py", "m.py.bak")]
    assert Path("m.py").read_bytes() == NEW.replace("\n", "\r\n").encode()
    assert [Path(name).stat().st_mode & 0o777 for name in ("m.py", "m.py.bak")] == [0o755] * 2
    assert Path("m.py.bak").read_bytes() == OLD.replace("\n", "\r\n").encode()


def test_two_kinds_of_line_ends() -> None:
    with pytest.raises(OutputError) as error:
        check_writable([edited("m.py", b"a = 1\r\nb = 2\n")], force=True)
    assert str(error.value) == "m.py mixes two kinds of line ends.\nApply the diff by hand, or make them one kind."


def test_an_installed_package() -> None:
    file = edited("site-packages/m.py")
    with pytest.raises(OutputError) as error:
        check_writable([file], force=False)
    assert str(error.value) == (
        "site-packages/m.py belongs to an installed package.\n"
        "Apply the diff to a copy of your own, or write all the same with --force."
    )
    check_writable([file], force=True)


@pytest.mark.parametrize("mode", [0o644, 0o444])
def test_a_protected_file(monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    """Root may write everything, and is asked all the same."""
    file = edited("m.py")
    os.chmod("m.py", mode)
    monkeypatch.setattr(report.os, "access", lambda path, wanted: mode == 0o444)
    with pytest.raises(OutputError) as error:
        check_writable([file], force=False)
    assert str(error.value) == ("m.py is write-protected.\nChange its permissions, or write all the same with --force.")
    check_writable([file], force=True)


def test_a_file_that_has_gone() -> None:
    file = edited("m.py")
    Path("m.py").unlink()
    with pytest.raises(OutputError, match=r"^m\.py cannot be read: No such file or directory\.$"):
        check_writable([file], force=True)


def test_in_git_a_committed_file_may_be_changed_and_an_ignored_one_too() -> None:
    file, ignored = edited("m.py"), edited("ignored.py")
    Path(".gitignore").write_text("ignored.py\n")
    for arguments in (["init", "-q"], ["add", "m.py"], ["commit", "-qm", "a"]):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True)
    check_writable([file, ignored], force=False)
    with pytest.raises(OutputError, match=r"new\.py has changes that are not committed"):
        check_writable([edited("new.py")], force=False)


def test_an_error_at_the_second_file_undoes_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [edited("one.py"), edited("two.py")]
    real = report.write_text

    def fails(path: Path, text: str, **options: Any) -> Path:
        if Path(path).name == "two.py" and text == NEW:
            raise OutputError("no room")
        return real(path, text, **options)

    monkeypatch.setattr(report, "write_text", fails)
    with pytest.raises(OutputError, match="no room"):
        write(files)
    assert {path.name: path.read_text() for path in Path().iterdir()} == {"one.py": OLD, "two.py": OLD}


def test_an_interrupt_while_backing_up_leaves_no_backup(monkeypatch: pytest.MonkeyPatch) -> None:
    files = [edited("one.py"), edited("two.py")]
    real, calls = Path.read_bytes, [0]

    def interrupted(path: Path) -> bytes:
        calls[0] += 1
        if calls[0] == 4:  # the backup of the second: both were compared before, and the first is copied
            raise KeyboardInterrupt
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(files)
    assert sorted(path.name for path in Path().iterdir()) == ["one.py", "two.py"]


def test_a_link_into_an_installed_package() -> None:
    edited("site-packages/m.py")
    Path("m.py").symlink_to("site-packages/m.py")
    with pytest.raises(OutputError, match=r"m\.py belongs to an installed package"):
        check_writable([Edited(os.path.abspath("m.py"), OLD, NEW)], force=False)
