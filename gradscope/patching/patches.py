"""Recipes put into a model, and taken out again."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from gradscope.patching.edit.rewrite import Edit
from gradscope.patching.plan import Filter, Plan, plan
from gradscope.patching.prove.verify import Result, Verified
from gradscope.patching.prove.verify import verify as verify_plan
from gradscope.patching.sites import Site
from gradscope.patching.swap import Swap, in_file, lines_of, swaps
from gradscope.workload import Workload

if TYPE_CHECKING:
    import pandas as pd


class Patches:
    """The sites of a model, of which those that hold are replaced.

    Args:
        found: the plan.
        verified: the verdicts, where the sites were proved; else every supported site is replaced.
        tried: leave out those that would gain nothing on this batch, as the proof does.
    """

    def __init__(self, found: Plan, verified: Verified | None = None, *, tried: bool = False) -> None:
        self._plan, self.verified = found, verified
        self.kept: list[Site] = found.tried if tried else found.supported
        if verified is not None:
            self.kept = [result.site for result in verified.results if result.status == "kept"]
        self._swaps: list[Swap] = swaps(self.kept, found.files)
        self.kept = [site for swap in self._swaps for site in swap.sites]
        self._on = False

    @property
    def sites(self) -> list[Site]:
        """Return every site that was found, replaced or not."""
        return self._plan.sites

    @property
    def table(self) -> pd.DataFrame:
        """One row a site: path, source, recipe, status, reason, errors and savings as far as they were measured."""
        if self.verified is None:
            return self._plan.table
        import pandas as pd

        return pd.DataFrame([row_of(result) for result in self.verified.results], columns=list(COLUMNS))

    @property
    def diff(self) -> str:
        """What was changed, as a unified diff of the user's source, for ``patch -p1`` in the folder it stands in."""
        return "".join(map(self.diff_of, self.texts))

    def diff_of(self, name: str) -> str:
        """Return the part of :attr:`diff` for one file."""
        return _file_diff(name, *self.texts[name], self._plan.files[name].newline)

    @property
    def swaps(self) -> list[Swap]:
        """Return what was replaced, module by module."""
        return self._swaps

    @property
    def old_calls(self) -> dict[str, int]:
        """Return how many calls of each module ran its own code since :meth:`apply`, by its path; those with none, not.

        They do where a module whose calls the new code replaces is not what it was when that was proved: it got a hook,
        for example.
        """
        return {swap.sites[0].path: swap.old_calls for swap in self._swaps if swap.old_calls}

    @property
    def in_source(self) -> list[Site]:
        """The kept sites whose text may change for all modules that run it; the others are replaced on one alone."""
        kept = set(self.kept)
        left = {site.edit.key for site in self.sites if site.edit is not None and site not in kept}
        return [site for site in self.kept if not site.differs_elsewhere and site.edit and site.edit.key not in left]

    @property
    def texts(self) -> dict[str, tuple[str, str]]:
        """The text of each file that changes, before and after; lines end in ``\\n``."""
        edits: dict[str, dict[object, Edit]] = {}
        for site in self.in_source:
            assert site.edit is not None
            edits.setdefault(site.file, {})[site.edit.key] = site.edit
        files = self._plan.files
        return {name: (files[name].text.decode(), in_file(files[name], edits[name].values())) for name in sorted(edits)}

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


COLUMNS = (
    "path",
    "source",
    "recipe",
    "status",
    "reason",
    "max_grad_error",
    "original_grad_error",
    "time",
    "measured_saving_ns",
    "measured_saving_bytes",
)


def row_of(result: Result) -> dict[str, Any]:
    """Return a site's verdict, by the names of FIX.json."""
    site, errors, saved = result.site, result.errors, result.saved
    return {
        "path": site.path,
        "source": site.source,
        "recipe": site.recipe,
        "status": result.status,
        "reason": result.reason,
        "max_grad_error": None if errors is None else errors.largest(),
        "original_grad_error": None if errors is None else errors.largest(original=True),
        "time": None if saved is None else saved.time.value,
        "measured_saving_ns": None if saved is None else saved.ns,
        "measured_saving_bytes": None if saved is None else saved.bytes,
    }


def _file_diff(name: str, old: str, new: str, newline: str) -> str:
    shown = _shown(name)
    lines = list(difflib.unified_diff(lines_of(old), lines_of(new), f"a/{shown}", f"b/{shown}"))
    text = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    if newline == "\n":
        return text
    # The lines of the file end as they do in it; those of the diff itself do not.
    return "".join(
        line if line.startswith(("---", "+++", "@@", "\\")) else line.removesuffix("\n") + newline
        for line in lines_of(text)
    )


def _shown(name: str) -> str:
    """Return the file's path from the current folder, where it is below that; else its name."""
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
    verify: bool = True,
) -> Patches:
    """Find what recipes can replace in ``model``, prove it, and replace what holds.

    Only the modules that hold a site get a method of their own; classes, parameters, buffers, hooks and state dict
    stay. What was replaced before is found no more, so that patching twice changes nothing.

    Args:
        model, batch, loss, recipes, filter, device: as of :func:`plan`.
        verify: prove each site on this batch against float64, measure it, and leave out what is wrong, slower or
            needs more memory. Without it every supported site is replaced unproved.

    Raises:
        As :func:`plan`. The model is then as it was.
    """
    workload = model if isinstance(model, Workload) else Workload(model, batch, loss=loss)
    found = plan(workload, recipes=recipes, filter=filter, device=device)
    patches = Patches(found, verify_plan(workload, found, device) if verify else None)
    patches.apply()
    return patches


@contextmanager
def patched(model: nn.Module | Workload, batch: Any = None, loss: Any = None, **options: Any) -> Iterator[Patches]:
    """Apply :func:`patch` for the length of a block."""
    patches = patch(model, batch, loss, **options)
    try:
        yield patches
    finally:
        patches.revert()
