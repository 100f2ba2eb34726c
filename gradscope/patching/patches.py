"""Recipes put into a model, and taken out again."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from gradscope.patching.functions import in_file
from gradscope.patching.plan import Filter, Plan, plan
from gradscope.patching.sites import Site
from gradscope.patching.swap import Swap, swaps
from gradscope.workload import Workload

if TYPE_CHECKING:
    import pandas as pd


class Patches:
    """The sites of a model that were replaced.

    Args:
        found: the plan; of its sites those that are supported are replaced.
    """

    def __init__(self, found: Plan) -> None:
        self._plan = found
        self._swaps: list[Swap] = swaps(found.supported, found.files)
        self._on = False

    @property
    def sites(self) -> list[Site]:
        """Every site that was found, replaced or not."""
        return self._plan.sites

    @property
    def table(self) -> pd.DataFrame:
        """One row a site."""
        return self._plan.table

    @property
    def diff(self) -> str:
        """What was changed, as a unified diff of the user's source, for ``patch -p1`` in the folder it stands in."""
        by_file: dict[str, list[Site]] = {}
        for site in self._plan.supported:
            by_file.setdefault(site.file, []).append(site)
        return "".join(_file_diff(self._plan, name, sites) for name, sites in sorted(by_file.items()))

    def apply(self) -> None:
        """Put the recipes in; once is enough."""
        if not self._on:
            for swap in self._swaps:
                swap.put()
            self._on = True

    def revert(self) -> None:
        """Take the recipes out: the model is as it was."""
        if self._on:
            for swap in self._swaps:
                swap.take_off()
            self._on = False


def _file_diff(found: Plan, name: str, sites: list[Site]) -> str:
    file = found.files[name]
    edits = list({site.edit.key: site.edit for site in sites if site.edit is not None}.values())
    old = file.text.decode().splitlines(keepends=True)
    new = in_file(file, edits).splitlines(keepends=True)
    shown = _shown(name)
    return "".join(difflib.unified_diff(old, new, f"a/{shown}", f"b/{shown}"))


def _shown(name: str) -> str:
    """The file's path from the current folder, where it is below that; else its name."""
    path = Path(name)
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return path.name


def patch(
    model: nn.Module | Workload,
    batch: Any = None,
    loss: Any = None,
    *,
    recipes: Iterable[str] | None = None,
    filter: Filter | None = None,
    device: str = "auto",
) -> Patches:
    """Find what recipes can replace in ``model`` and replace it; arguments as of :func:`plan`.

    Only the modules that hold a site get a method of their own; classes, parameters, buffers, hooks and state dict
    stay. What was replaced before is found no more, so that patching twice changes nothing.
    """
    patches = Patches(plan(model, batch, loss, recipes=recipes, filter=filter, device=device))
    patches.apply()
    return patches


@contextmanager
def patched(model: nn.Module | Workload, batch: Any = None, loss: Any = None, **options: Any) -> Iterator[Patches]:
    """:func:`patch` for the length of a block."""
    patches = patch(model, batch, loss, **options)
    try:
        yield patches
    finally:
        patches.revert()
