"""The versions of torch and Python that gradscope's tests ran on: what is newer is allowed, with a word about it."""

from __future__ import annotations

import platform
import re

__all__ = ["PYTHON", "TORCH", "tested", "untried"]

#: Oldest and newest that the whole suite ran on; docs/versions.md has the results.
TORCH = ("2.11", "2.15")
PYTHON = ("3.11", "3.13")


def tested() -> str:
    """Return the range of torch, for messages: "torch 2.11 to 2.15"."""
    return f"torch {TORCH[0]} to {TORCH[1]}"


def untried(torch: str, python: str | None = None) -> list[str]:
    """A sentence for each of the two that lies outside what was tried; empty where both were.

    Args:
        torch: ``torch.__version__``, of any build.
        python: as of ``platform.python_version()``, the running one by default.
    """
    running = platform.python_version() if python is None else python
    return [
        f"{name} {version} was not tried: gradscope is tested on {name} {oldest} to {newest}; "
        "'gradscope doctor' shows what answers here"
        for name, version, (oldest, newest) in (("torch", torch, TORCH), ("Python", running, PYTHON))
        if not _release(oldest) <= _release(version) <= _release(newest)
    ]


def _release(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version; (0, 0) for text that does not begin with them."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
