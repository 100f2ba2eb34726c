"""Fetch the peers' repositories at the commits that the shim was written for: ``make peers``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.peers.suites import SUITES, Suite


def fetch(suite: Suite) -> None:
    """Put the commit's files into the suite's folder; no history, and nothing where they are there already."""
    folder = suite.folder()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    if (folder / ".git").exists() and git("rev-parse", "--verify", "--quiet", "HEAD") == suite.commit:
        return
    folder.mkdir(parents=True, exist_ok=True)
    git("init", "--quiet")
    git("fetch", "--quiet", "--depth", "1", suite.url, suite.commit)
    git("checkout", "--quiet", "--force", suite.commit)


if __name__ == "__main__":
    for each in SUITES:
        fetch(each)
        print(each.folder())
