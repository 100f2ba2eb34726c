"""Lets Python import gradscope from a checkout where it is not installed: this folder on PYTHONPATH, and the checkout.

gradscope.recipes and gradscope.kernels lie at the top of the repository; an install maps them, and so does this. Python
imports a module of this name by itself.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


class Beside:
    """Finds what does not lie in gradscope's folder; asked first, so that no other install is mixed with it."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Find a module as importlib asks for it."""
        if name not in ("gradscope.recipes", "gradscope.kernels"):
            return None
        folder = REPOSITORY / name.removeprefix("gradscope.")
        return importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )


sys.meta_path.insert(0, Beside)  # type: ignore[arg-type]
