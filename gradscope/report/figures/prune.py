"""Frames that are too small to see, or too many to draw, become one frame "other" beside those that stay.

No value changes: a frame "other" is worth what it stands for, and everything that was left out is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from gradscope import units
from gradscope.report.figures.frame import FlameFrame

# Where frames have to be left out because they are too many, those of about the same size go together: of two hundred
# equal blocks, not some with and some without what is inside them.
_ALIKE = 1.25
_COUNTED = ("layer", "part", "operation", "tensor")


@dataclass(slots=True)
class Pruned:
    """Frames that are drawn, and what is not."""

    root: FlameFrame
    left_out: Counter[str] = field(default_factory=Counter)  # frames by kind; layers by module
    largest: int = 0  # value of the largest frame that is not drawn by itself
    value: int = 0  # worth of all frames "other", and of what is left out inside frames that are drawn

    @property
    def words(self) -> str:
        """``17 layers and 120 operations``; empty where nothing was left out."""
        return _counted(self.left_out, " and ")


def prune(root: FlameFrame, least: float, most: int) -> Pruned:
    """Keep the root and the largest frames.

    Args:
        root: left as it is; what is returned is a copy.
        least: smaller values are left out; zeros always are, and not counted.
        most: frames at most, those that stand for others included; at least 2.
    """
    kept = _kept(root, least, most)
    result = Pruned(root)
    result.root = _copy(root, kept, result)
    return result


def _kept(root: FlameFrame, least: float, most: int) -> set[int]:
    """``id`` of each frame to draw: the largest ones, and never one without its parent."""
    frames = [(frame, parent) for parent in root.walk() for frame in parent.children if frame.value > 0]
    waiting = Counter(id(parent) for _, parent in frames)  # children that are not drawn yet
    depth = {id(root): 0}
    for frame, parent in frames:
        depth[id(frame)] = depth[id(parent)] + 1
    kept, started, count = {id(root)}, set[int](), 1
    chosen: list[FlameFrame] = []
    for frame, parent in sorted(frames, key=lambda pair: (-pair[0].value, depth[id(pair[0])])):
        if frame.value < least:
            break
        remaining = waiting[id(parent)] - 1
        # The first child brings an "other" with it, the last one takes its place.
        grows = 1 + (id(parent) not in started and remaining > 0) - (id(parent) in started and remaining == 0)
        if count + grows > most:
            larger = [one for one in chosen if one.value > _ALIKE * frame.value]
            return {id(root), *map(id, larger)} if 2 * len(larger) > most else kept
        kept.add(id(frame))
        chosen.append(frame)
        started.add(id(parent))
        waiting[id(parent)] = remaining
        count += grows
    return kept


def _copy(frame: FlameFrame, kept: set[int], result: Pruned) -> FlameFrame:
    children = [child for child in frame.children if child.value > 0]
    drawn = [child for child in children if id(child) in kept]
    gone = [child for child in children if id(child) not in kept]
    if not gone:
        return replace(frame, children=[_copy(child, kept, result) for child in drawn])
    if len(gone) == 1 and drawn:
        # A frame of its own is no more than "other" would be.
        return replace(frame, children=[_copy(child, kept, result) for child in children])
    counts, value = _count(gone), sum(child.value for child in gone)
    result.left_out += counts
    result.value += value
    result.largest = max(result.largest, *(child.value for child in gone))
    if not drawn:
        return replace(frame, children=[], about=(*frame.about, f"inside, not drawn: {_counted(counts, ', ')}"))
    about = ("too small, or too many, to be drawn by themselves:", *_largest(gone))
    other = FlameFrame(f"other ({_counted(counts, ', ')})", value, "other", "#d0d4db" if frame.colour else "", about)
    return replace(frame, children=[*(_copy(child, kept, result) for child in drawn), other])


def _count(frames: Sequence[FlameFrame]) -> Counter[str]:
    """Modules; operations and tensors only where they are not inside a layer that is counted."""
    counts: Counter[str] = Counter()
    for top in frames:
        if top.kind == "layer":
            counts["layer"] += sum(frame.layers for frame in top.walk() if frame.value > 0)
        else:
            counts[top.kind] += 1
    return counts


def _counted(counts: Counter[str], joint: str) -> str:
    parts = [(counts[kind], kind) for kind in _COUNTED if counts[kind]]
    return joint.join(f"{units.count(many)} {kind}{'' if many == 1 else 's'}" for many, kind in parts)


def _largest(frames: Sequence[FlameFrame]) -> list[str]:
    """Names of the largest few."""
    by_size = sorted(frames, key=lambda frame: -frame.value)
    names = [frame.title or frame.name for frame in by_size[:4]]
    return [*names, f"… {len(by_size) - 4} more"] if len(by_size) > 4 else names
