"""What a recipe says about itself; ``gradscope recipes`` shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recipe:
    """One module of this package, for people who choose."""

    name: str  # of the module, and of docs/recipes/<name>.md
    title: str  # one line: what it is
    functions: tuple[str, ...]  # public names in gradscope.recipes
    modules: tuple[str, ...]  # drop-in nn.Modules there
    replaces: tuple[str, ...]  # what users write: one spelling or operation each
    saves: str  # what becomes less, and why; one or two sentences
    limits: tuple[str, ...]  # what it refuses, or leaves to torch; one sentence each
    backends: tuple[tuple[str, str], ...]  # (backend, where it runs and where it was measured)
    sources: tuple[str, ...]  # papers, issues: author, title, where
