"""Modules whose calls the new code takes the place of: it runs while they are what they were when it was proved.

What they hold, as a weight or a share that is dropped, the new code reads itself. That a module was replaced by another
kind, got a hook, or has another setting than one that is read, is asked at each call, and the old code runs then.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradscope.patching.edit.call_sites import CallSites
from gradscope.patching.edit.guards import settings_read
from gradscope.patching.edit.rewrite import Edit
from gradscope.patching.edit.side_effects import is_hooked
from gradscope.patching.edit.source import FunctionSource
from gradscope.patching.edit.syntax import INLINE, walked
from gradscope.patching.match import Match
from gradscope.patching.sites import Site
from gradscope.tree import modules_of, named_modules_of

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Unchanged:
    """One module below the one that is patched.

    Attributes:
        names: the way to it.
        kind: its class.
        settings: those that the new code does not read.
        parts: the names of what it holds.
        runs: its forward: that of its class, or one that somebody gave this module alone.
    """

    names: tuple[str, ...]
    kind: type[nn.Module]
    settings: tuple[tuple[str, Any], ...]
    parts: tuple[str, ...]
    runs: Any

    def holds(self, root: nn.Module) -> bool:
        """Return whether it is so below ``root``."""
        module: Any = root
        for name in self.names:
            module = module._modules.get(name)
            if module is None:
                return False
        if type(module) is not self.kind or is_hooked(module) or tuple(module._modules) != self.parts:
            return False
        if _runs(module) is not self.runs:
            return False
        return all(getattr(module, name, None) == value for name, value in self.settings)


def unchanged(root: nn.Module, sites: Iterable[Site]) -> tuple[Unchanged, ...]:
    """What must hold below ``root`` for the new code of ``sites``."""
    sites = list(sites)
    paths = {module: path for path, module in named_modules_of(root)}
    read: dict[nn.Module, set[str]] = {}
    for site in sites:
        for match in site.matches:
            for module in _called(match):
                if module is not root and module in paths:
                    read.setdefault(module, set()).update(settings_read(match, module))
    for module in {module for site in sites for module in _identities(site)}:
        if module is not root and module in paths:
            read.setdefault(module, set())
    own = {module for site in sites for match in site.matches for module in _on_the_way(match, root)}
    # Of the user's own modules numbers that matter were refused or are asked for; others, as counters, may change.
    settings = {module: _settings(module, names) for module, names in read.items()}
    settings |= {module: () for module in own if module in paths and module not in read}
    return tuple(
        Unchanged(tuple(paths[module].split(".")), type(module), given, tuple(module._modules), _runs(module))
        for module, given in settings.items()
    )


def _called(match: Match) -> Iterable[nn.Module]:
    """The modules of torch whose calls go, with their parts; a layer that the new code calls itself stays one."""
    for node in match.nodes | match.optional | match.later:
        if isinstance(node.caller, nn.Module) and not isinstance(node.caller, nn.Linear):
            yield from modules_of(node.caller)


def _identities(site: Site) -> Iterator[nn.Module]:
    """The ``nn.Identity`` whose calls go, of which none is recorded: in the replaced text, and in helpers."""
    if site.edit is None:
        return
    edited, files = site.edit.source, {site.edit.source.file.name: site.edit.source.file}
    made = {place.frame.code: (place, node) for match in site.matches for node in match.nodes for place in node.places}
    for code, (place, node) in made.items():
        if code.co_name in INLINE or place.frame.owner is None:
            continue
        source = FunctionSource.of(code, files)
        calls = CallSites(source, place.frame, [], node)
        for part in walked(source.definition):
            if source.definition is not edited.definition or _is_replaced(part, site.edit):
                held = calls.called_module(part) if isinstance(part, ast.Call) else None
                if isinstance(held, nn.Identity):
                    yield held


def _is_replaced(part: ast.AST, edit: Edit) -> bool:
    start = edit.source.file.start(part) if isinstance(part, ast.expr) else -1
    return any(each.start <= start < each.end for each in edit.replacements)


def _on_the_way(match: Match, root: nn.Module) -> Iterable[nn.Module]:
    """The user's own modules below ``root`` whose methods made the calls that go."""
    for node in match.nodes | match.optional | match.later:
        owners = [place.frame.owner for place in node.places]
        if root in owners:
            yield from (owner for owner in owners[: owners.index(root)] if owner is not None and owner is not root)


def _runs(module: nn.Module) -> Any:
    return module.__dict__.get("forward", type(module).forward)


def _settings(module: nn.Module, read: set[str]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if name not in read | {"training"} and not name.startswith("_") and _is_plain(value)
    )


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)
