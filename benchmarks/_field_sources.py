"""The programs of the field list as they are in their repositories: clones, exports, and the data made for them."""

from __future__ import annotations

import importlib.util
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from _common import ROOT
from _field_compare import file_sums
from field_programs.program import INSTALLED, Program

# Pictures of a repository's documentation: large, and read by none of the programs.
PICTURES = ("*.gif", "*.mp4", "*.ipynb", "*.pdf", "*.svg")


class Missing(Exception):
    """A program or a model cannot be run: what lacks, and how to get it."""


def check_ready(program: Program, sources: Path) -> Path:
    """The program's clone, or Missing with the commands that make it."""
    source = sources / program.checkout
    if program.repo != INSTALLED:
        _check_clone(program, source)
    lacking = [name for name in program.needs if importlib.util.find_spec(name) is None]
    if lacking:
        raise Missing(
            f"{program.name} imports {', '.join(lacking)}, which this Python lacks. Install it:\n"
            f"  {sys.executable} -m pip install --no-deps {' '.join(lacking)}"
        )
    return source


def _check_clone(program: Program, source: Path) -> None:
    if not source.is_dir():
        raise Missing(
            f"{program.name}: {source} is missing. Get it:\n"
            f"  git clone https://github.com/{program.repo} {source}\n"
            f"  or let field.py do so: --get"
        )
    found = subprocess.run(["git", "-C", str(source), "cat-file", "-e", f"{program.commit}^{{commit}}"], check=False)
    if found.returncode:
        raise Missing(
            f"{program.name}: {source} has no commit {program.commit}. Get it:\n"
            f"  git -C {source} fetch origin {program.commit}"
        )


def export(program: Program, source: Path, folder: Path) -> Path:
    """Write the repository as it is at the commit to ``folder``, make the data, and return the folder to run in."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tree = () if program.repo == INSTALLED else read_tree(source, program.commit, program.without)
    for path, content in tree:
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    place = folder / program.folder
    if program.data is not None:
        theirs = file_sums(folder)
        program.data(place)
        ours = file_sums(folder)
        changed = [path for path, digest in theirs.items() if ours.get(path) != digest]
        if changed:
            raise AssertionError(f"{program.name}: the maker of data changed {', '.join(changed)} of the repository")
    return place


def read_tree(source: Path, commit: str, without: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """The path and content of each file of a commit; a clone without its large files, a partial one, lacks those."""
    listing = subprocess.run(
        ["git", "-C", str(source), "ls-tree", "-r", "-z", commit], stdout=subprocess.PIPE, check=True
    )
    found = [entry.partition(b"\t") for entry in listing.stdout.split(b"\0") if entry]
    files = [(about.split(), path.decode(errors="surrogateescape")) for about, _, path in found]
    wanted = [
        (about[2], path)
        for about, path in files
        if about[0] in (b"100644", b"100755") and not any(fnmatch(path, pattern) for pattern in (*PICTURES, *without))
    ]
    batch = ["git", "-C", str(source), "cat-file", "--batch"]
    asked = b"".join(name + b"\n" for name, _ in wanted)
    answer = io.BytesIO(subprocess.run(batch, input=asked, capture_output=True, check=True).stdout)
    for _, path in wanted:
        size = answer.readline().split()[-1]
        if size == b"missing":
            continue
        yield path, answer.read(int(size))
        answer.read(1)


def clone(program: Program, sources: Path, origin: str) -> None:
    """Clone its repository, unless it is there; ``origin`` holds ``{repo}`` or ``{checkout}``."""
    place = sources / program.checkout
    if program.repo == INSTALLED or place.exists():
        return
    sources.mkdir(parents=True, exist_ok=True)
    address = origin.format(repo=program.repo, checkout=program.checkout)
    subprocess.run(["git", "clone", "--quiet", "--no-checkout", address, str(place)], check=True, cwd=ROOT)
