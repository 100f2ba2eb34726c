"""Leaves warnings out without making Python forget which it has shown.

``warnings.catch_warnings`` and ``filterwarnings`` make it forget: every warning of the user's that is shown once a
place would come again, once for each time that gradscope did so.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def unheard(message: str = "", *, module: str = "") -> Iterator[None]:
    """Ignore warnings whose text, and whose module, begin like these regular expressions, until the block is left."""
    filters: list[object] = warnings.filters  # type: ignore[assignment]
    entry = ("ignore", re.compile(message, re.IGNORECASE), Warning, re.compile(module), 0)
    filters.insert(0, entry)
    try:
        yield
    finally:
        # The user's code may have put other filters in their place meanwhile.
        for each in (filters, warnings.filters):
            with suppress(ValueError):
                each.remove(entry)  # type: ignore[union-attr]
