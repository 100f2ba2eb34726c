"""What a replacement is expected to save: the calls of its match and the recipe's call, each alone on made-up operands.

Forward and backward find the cache as the rest of the step leaves it: before each, as much memory is read as the step
makes elsewhere. An estimate: the whole step is measured by :mod:`gradscope.patching.verify`, and that decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gradscope.patching.match import Match
from gradscope.patching.replay import CACHE_BYTES, Replay, ordered
from gradscope.patching.sites import Site
from gradscope.trace.memory import peaks_bytes

FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Saving:
    """An estimate for a site in one step; negative is a loss."""

    ns: int | None  # forward and backward; None: it could not be run alone
    bytes: int  # at the peak; where it could not be run alone, what the match keeps for backward
    old_ns: int | None = None  # of the calls that would go, in the same run


def predict(sites: Iterable[Site], rounds: int = FEWEST_ROUNDS, elsewhere: int = CACHE_BYTES) -> dict[Site, Saving]:
    """The expected saving of each site, also of one that is refused; the same work on the same shapes is run once.

    Args:
        rounds: of each way, in turns. Of one, memory is not measured.
        elsewhere: bytes that the step makes outside of the site.
    """
    found: dict[Site, Saving] = {}
    known: dict[object, Saving] = {}
    for site in sites:
        match = site.matches[0]
        key = _work(match)
        if key not in known:
            known[key] = measured(match, rounds, elsewhere)
        times, one = len(site.matches), known[key]
        found[site] = Saving(
            ns=None if one.ns is None else one.ns * times,
            bytes=one.bytes * times,
            old_ns=None if one.old_ns is None else one.old_ns * times,
        )
    return found


def _work(match: Match) -> object:
    """Equal for the same calls on the same shapes."""
    calls = tuple(
        (node.op, repr(node.kwargs.keys()), tuple((value.shape, value.dtype) for value in node.inputs))
        for node in ordered(match)
    )
    return match.recipe, match.function, calls


def measured(match: Match, rounds: int, elsewhere: int) -> Saving:
    """Of one call of the match; by the bytes that it keeps where it cannot be run alone."""
    try:
        with torch.random.fork_rng(_devices()), torch.enable_grad():
            replay, device = Replay(match), match.output.device
            saved_bytes = kept_bytes(match)
            if rounds > 1:
                before, after = peaks_bytes([replay.original, replay.recipe], device)
                saved_bytes = before - after
            old_ns, new_ns = replay.times_ns(rounds, torch.ones(min(elsewhere, CACHE_BYTES) // 4, device=device))
    except Exception:  # what a matcher, the user's operands or the device may raise has no end
        return Saving(None, kept_bytes(match))
    return Saving(old_ns - new_ns, saved_bytes, old_ns)


def kept_bytes(match: Match) -> int:
    """Memory of the tensors that would no longer be made and that backward may need, each storage once."""
    sizes: dict[int, int] = {}
    made = {value for node in match.nodes for value in node.outputs}
    outside = {value.storage for node in match.nodes for value in node.inputs if value not in made}
    for value in match.inner:
        if value.requires_grad and value.storage not in outside:
            size = math.prod(value.shape) * value.dtype.itemsize
            sizes[value.storage] = max(sizes.get(value.storage, 0), size)
    return sum(sizes.values())


def _devices() -> list[int]:
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
