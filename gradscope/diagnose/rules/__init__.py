"""The rules, in families, one a file. A file defines RULE; its docstring says what, by an example, and where from.

A file has the name of its rule. What several rules of a family share lies beside them, in a file without a RULE; what
several families share lies in :mod:`gradscope.diagnose`.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace

from gradscope.diagnose.case import Rule


def _every() -> dict[str, Rule]:
    modules = [info.name for info in pkgutil.walk_packages(__path__, f"{__name__}.") if not info.ispkg]
    found: dict[str, Rule] = {}
    for module in sorted(modules, key=lambda name: name.rpartition(".")[2]):
        loaded = importlib.import_module(module)
        rule: Rule | None = getattr(loaded, "RULE", None)
        if rule is not None:
            found[rule.name] = replace(rule, about=loaded.__doc__ or "")
    return found


RULES: dict[str, Rule] = _every()
