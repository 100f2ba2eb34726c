"""Amounts of memory as the user types them."""

from __future__ import annotations

import re
from fractions import Fraction

from gradscope.errors import UsageError
from gradscope.safe_text import cut, visible

# "24g" means 24 GiB: on a memory card, in Docker and to Java a bare letter is the binary multiple.
_FACTORS = {
    "": 1,
    "b": 1,
    **{f"{letter}{suffix}": 1024**power for power, letter in enumerate("kmgt", 1) for suffix in ("", "ib")},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
}
_AMOUNT = re.compile(r"\s*(\d{1,18}(?:\.\d{0,9})?|\.\d{1,9})\s*([a-z]*)\s*", re.IGNORECASE)


def bytes_of(value: str | int, name: str = "--device-memory") -> int:
    """An amount of memory in bytes: ``6GiB``, ``6GB``, ``24g`` (GiB), ``512MiB``, ``1.5g``, or a number of bytes.

    Raises:
        UsageError: it is none of these, or nothing.
    """
    text = str(value)
    match = _AMOUNT.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None or isinstance(value, (bool, float)):
        raise UsageError(
            f"{name}: {cut(visible(text), 60) or repr(text)} is not an amount of memory.\n"
            "Give a number with a unit: 6GiB, 6GB, 24g (GiB), 512MiB; without one it is bytes."
        )
    amount = int(Fraction(match[1].rstrip(".") if not match[1].startswith(".") else f"0{match[1]}") * factor)
    if amount < 1:
        raise UsageError(
            f"{name}: {text} is no memory at all.\nGive a number with a unit: 6GiB, 6GB, 24g (GiB), 512MiB."
        )
    return amount
