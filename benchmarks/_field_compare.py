"""Check that a program did the same alone and profiled: what it printed and the files it left, but for clocks."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

_NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?", re.IGNORECASE)
_CLOCKS = (
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?",  # a date with its time
    r"\b\d{1,2}:\d\d(?::\d\d)?(?:\.\d+)?\b",  # a time of day, or tqdm's
    r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?\s?(?:ms|us|µs|s|sec|secs|seconds|min|minutes|it/s|s/it|ms/batch|tok/s|FPS)\b",
    r"0x[0-9a-f]{6,}",  # an address
    r"\?(?:it/s|s/it|B/s)",
)
REPORT_HEAD = re.compile(r"^gradscope \d[^\n]*\n(?:[^\n]*\n){0,6}?(?:run|device) ", re.MULTILINE)
OUR_PROGRESS = re.compile(r"^gradscope: .*$", re.MULTILINE)


@dataclass(frozen=True)
class Same:
    """The answer of a comparison; ``said`` is how many numbers or files were compared, ``difference`` what differs."""

    alike: bool
    said: int
    difference: str = ""


def split_report(stdout: str) -> tuple[str, str]:
    """What the program printed, and the report that follows it."""
    found = list(REPORT_HEAD.finditer(stdout))
    return (stdout[: found[-1].start()], stdout[found[-1].start() :]) if found else (stdout, "")


def masked(text: str, varies: Iterable[str] = ()) -> str:
    """``text`` without what a clock or an address decides; what rewrites a line of a terminal is a line each."""
    for pattern in (*varies, *_CLOCKS):
        text = re.sub(pattern, "#", text, flags=re.IGNORECASE)
    lines = (line.rstrip() for line in text.replace("\r", "\n").split("\n"))
    return "\n".join(line for line in lines if line)


def compare_text(alone: str, profiled: str, varies: Sequence[str] = ()) -> Same:
    """Compare two outputs line by line, all their numbers with them."""
    before, after = masked(alone, varies), masked(profiled, varies)
    difference = difflib.unified_diff(before.split("\n"), after.split("\n"), "alone", "profiled", lineterm="", n=0)
    return Same(before == after, len(_NUMBER.findall(before)), "\n".join(list(difference)[:40]))


def file_sums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below ``folder``, by its path in it."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts
    }


def compare_files(
    before: dict[str, str],
    alone: dict[str, str],
    profiled: dict[str, str],
    varies: Sequence[str],
    patterns: Sequence[str] = (),
) -> Same:
    """Compare the files that the two runs made or changed, ``before`` being those that were there.

    ``varies`` are globs of files whose content a clock decides, ``patterns`` what it decides of a name.
    """
    before, alone, profiled = (
        {masked(path, patterns): digest for path, digest in files.items()} for files in (before, alone, profiled)
    )
    made = {path for files in (alone, profiled) for path, digest in files.items() if before.get(path) != digest}
    kept = sorted(path for path in made if not any(fnmatch(path, pattern) for pattern in varies))
    said = []
    for path in kept:
        if path not in alone:
            said.append(f"only profiled: {path}")
        elif path not in profiled:
            said.append(f"only alone: {path}")
        elif alone[path] != profiled[path]:
            said.append(f"other content: {path}")
    return Same(not said, len(kept), "\n".join(said))


def new_lines(alone: str, profiled: str, varies: Sequence[str] = ()) -> list[str]:
    """Lines on stderr that only the profiled run has, gradscope's own progress aside; bars of progress are left out."""
    known = Counter(masked(alone, varies).split("\n"))
    lines = masked(OUR_PROGRESS.sub("", profiled), varies).split("\n")
    return [line for line in dict.fromkeys(lines) if line not in known and not re.search(r"\d+%\|| \|#", line)]
