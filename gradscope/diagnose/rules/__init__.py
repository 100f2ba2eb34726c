"""The rules, one a file. A file defines RULE; its docstring says what, by an example, and where the method is from."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace

from gradscope.diagnose.case import Rule


def _every() -> dict[str, Rule]:
    found: dict[str, Rule] = {}
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__)):
        loaded = importlib.import_module(f"{__name__}.{module}")
        rule: Rule | None = getattr(loaded, "RULE", None)
        if rule is not None:
            found[rule.name] = replace(rule, about=loaded.__doc__ or "")
    return found


RULES: dict[str, Rule] = _every()
