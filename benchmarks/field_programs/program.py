"""What the field list says of one public program."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

# In place of a repository: the program is an installed package, which ``commit`` names, run by a few lines of ours.
INSTALLED = "installed"
DEFAULT_LIMIT_S = 300


@dataclass(frozen=True)
class Program:
    """One training program of a public repository, run unmodified at one commit.

    ``without`` are globs of the repository's files that are left out, its data, in whose place ours are made.
    An ``endless`` program would train for hours and has no option against it: gradscope stops it after the measured
    steps, and what it has printed until then must be how the program begins alone.

    ``command`` is a script with its arguments, or ``-m package.module`` with them, run in ``folder`` of the repository.
    ``data`` makes the small files that it reads, given that folder; it must not touch a file of the repository.
    ``seed`` is for programs that set none themselves. ``varies`` are patterns of output that a clock or an address
    decides, ``files_vary`` globs of files that do. ``library``: the training code is a library's, and its lines
    are not the program's.
    """

    name: str
    repo: str
    commit: str
    command: str
    folder: str = "."
    without: tuple[str, ...] = ()
    data: Callable[[Path], None] | None = None
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    seed: int | None = None
    exits: int = 0
    steps: int = 5
    warmup: int = 3
    varies: tuple[str, ...] = ()
    files_vary: tuple[str, ...] = ()
    library: bool = False
    endless: bool = False
    limit_s: int = DEFAULT_LIMIT_S

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.command)

    @property
    def checkout(self) -> str:
        """The name of its folder among the sources: ``owner+name``."""
        return self.repo.replace("/", "+")

    def signature(self) -> dict[str, object]:
        """What a kept result must agree with to be about this program still."""
        made = asdict(self)
        made["data"] = None if self.data is None else getattr(self.data, "__name__", "made")
        made["environment"] = dict(self.environment)
        return made
