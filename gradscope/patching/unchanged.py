"""Modules whose calls the new code takes the place of: it runs while they are what they were when it was proved.

What they hold, as a weight or a share that is dropped, the new code reads itself. That a module was replaced by another
kind, got a hook, or has another setting than one that is read, is asked at each call, and the old code runs then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from gradscope.patching.dynamics import is_hooked
from gradscope.patching.match import Match
from gradscope.patching.relied import settings_read
from gradscope.patching.sites import Site
from gradscope.tree import named_modules_of

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Unchanged:
    """One module below the one that is patched.

    Attributes:
        names: the way to it.
        kind: its class.
        settings: those that the new code does not read.
    """

    names: tuple[str, ...]
    kind: type[nn.Module]
    settings: tuple[tuple[str, Any], ...]

    def holds(self, root: nn.Module) -> bool:
        """Whether it is so below ``root``."""
        module: Any = root
        for name in self.names:
            module = module._modules.get(name)
            if module is None:
                return False
        if type(module) is not self.kind or is_hooked(module):
            return False
        return all(getattr(module, name, None) == value for name, value in self.settings)


def unchanged(root: nn.Module, sites: Iterable[Site]) -> tuple[Unchanged, ...]:
    """What must hold below ``root`` for the new code of ``sites``."""
    paths = {module: path for path, module in named_modules_of(root)}
    read: dict[nn.Module, set[str]] = {}
    for site in sites:
        for match in site.matches:
            for module in _called(match):
                if module is not root and module in paths:
                    read.setdefault(module, set()).update(settings_read(match, module))
    return tuple(
        Unchanged(tuple(paths[module].split(".")), type(module), _settings(module, names))
        for module, names in read.items()
    )


def _called(match: Match) -> Iterable[nn.Module]:
    """The modules of torch whose calls go; a layer that the new code calls itself stays one."""
    for node in match.nodes | match.optional | match.later:
        if isinstance(node.caller, nn.Module) and not isinstance(node.caller, nn.Linear):
            yield node.caller


def _settings(module: nn.Module, read: set[str]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if name not in read | {"training"} and not name.startswith("_") and _is_plain(value)
    )


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN)
