"""What FSDP does in a trace: it writes a row around each piece of its work, with the module that the piece is for.

The rows are ``record_function("FSDP::...")`` of torch.distributed.fsdp: all-gathers, what is copied before and behind
them, reduce-scatters. They run in hooks on the tensors of other modules, in whose backward nodes they lie.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from gradscope.tables import IntColumn

_PIECE = re.compile(r"FSDP::(\w+)(?: for)?(?: \(?([^()]*)\)?)?")


def piece_of(text: str) -> str:
    """``FSDP::all_gather`` of ``FSDP::all_gather (layers.0)``; other names stay."""
    found = _PIECE.fullmatch(text)
    return f"FSDP::{found[1]}" if found else text


def owners_of_pieces(names: Sequence[str], paths: Sequence[str], unknown: int) -> IntColumn:
    """The index of the layer that each name of a row is for; ``unknown`` where it names none.

    FSDP names a module below its root, and the root may lie somewhere in the model that is known. Of several modules
    that one collective is for the first counts.
    """
    index = {path: number for number, path in enumerate(paths)}
    found = np.full(len(names), unknown, np.int64)
    for number, text in enumerate(names):
        match = _PIECE.fullmatch(text)
        module = match[2].split(",")[0].strip() if match and match[2] else ""
        if not module:
            continue
        below = [path for path in paths if path.endswith("." + module)]
        if module in index:
            found[number] = index[module]
        elif len(below) == 1:
            found[number] = index[below[0]]
    return found
