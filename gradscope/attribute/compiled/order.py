"""Which kernel of a compiled graph's code each row, or each activity of a device, is.

Kernels run in the order of the generated code. Those that Inductor has generated bear their name everywhere: they hold
the order. A graph that is run as rows has a row for each operation of torch's between them. One that a CUDA graph
replays has no rows, but the device's activities in the order of the stream: of what lies between two generated kernels
an operation's are told by what their names say that they compute, where there are several operations.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum

from gradscope import ops

# Kernels that Inductor generates, by how their names begin; all others are operations of torch's.
GENERATED = ("cpp_", "triton_")
_ON_DEVICE = "triton_"


def match(rows: Sequence[str], kernels: Sequence[str]) -> list[int] | None:
    """Of each row the kernel that it is, -1 for none; None where they do not fit.

    Those that Inductor has generated must all be there, and no others; of torch's own operations some write no row, and
    others come from the code around kernels.
    """
    found: list[int] = []
    next_one = 0
    for row in rows:
        place = next_one
        while place < len(kernels) and not is_of(row, kernels[place]) and not kernels[place].startswith(GENERATED):
            place += 1
        if place < len(kernels) and is_of(row, kernels[place]):
            found.append(place)
            next_one = place + 1
        elif row.startswith(GENERATED):
            return None
        else:
            found.append(-1)
    return None if any(kernel.startswith(GENERATED) for kernel in kernels[next_one:]) else found


def is_of(row: str, kernel: str) -> bool:
    """Check that a row of that name is a kernel of the code."""
    if kernel.startswith(GENERATED):
        return row == kernel
    # extern_kernels.mm, torch.ops.aten.mm.default and aten.mm are the row aten::mm.
    _, _, name = row.rpartition("::")
    parts = [part.removeprefix("bias_") for part in kernel.split(".")]
    return name in parts[-2:] if len(parts) > 1 else name == kernel


def row_name(kernel: str) -> str:
    """The name of the row that an operation of torch's would have written: ``aten::mm``."""
    parts = kernel.split(".")
    if kernel.startswith(GENERATED) or len(parts) == 1:
        return kernel
    if parts[:2] == ["torch", "ops"] and len(parts) > 3:
        return f"{parts[2]}::{parts[3]}"
    return f"aten::{parts[1].removeprefix('bias_')}"


def match_replay(activities: Sequence[str], kernels: Sequence[str]) -> list[tuple[int, ...]] | None:
    """Of each activity of a device the kernels that it may be, none or one where that is known.

    Returns:
        None where the kernels that Inductor has generated for a device are not all there, in their order.
    """
    found: list[tuple[int, ...]] = []
    next_one = 0
    waiting: list[str] = []  # behind the last that is known
    for activity in activities:
        if not activity.startswith(_ON_DEVICE):
            waiting.append(activity)
            continue
        place = next_one
        while place < len(kernels) and not kernels[place].startswith(_ON_DEVICE):
            place += 1
        if place == len(kernels) or kernels[place] != activity:
            return None
        found += [*_between(waiting, kernels, range(next_one, place)), (place,)]
        waiting, next_one = [], place + 1
    if any(kernel.startswith(_ON_DEVICE) for kernel in kernels[next_one:]):
        return None
    return found + _between(waiting, kernels, range(next_one, len(kernels)))


class _Work(Enum):
    PRODUCT = re.compile(r"gemm|gemv|cutlass|xmma|nvjet|dot_kernel|cublas", re.IGNORECASE)
    CONVOLUTION = re.compile(r"conv|wgrad|dgrad|fprop|winograd|cudnn", re.IGNORECASE)
    ATTENTION = re.compile(r"fmha|flash|attention|sdpa", re.IGNORECASE)


_REDUCES = re.compile(
    r"split_?k_?reduce|reduce_?split_?k", re.IGNORECASE
)  # what a product left in parts: belongs to what ran before
_PREPARES = re.compile(r"^memset", re.IGNORECASE)  # a product's workspace: belongs to what runs next


def _between(activities: Sequence[str], kernels: Sequence[str], places: range) -> list[tuple[int, ...]]:
    """Whose the activities between two generated kernels are."""
    mine = tuple(place for place in places if not kernels[place].startswith(GENERATED))
    if len(mine) < 2 or not activities:
        return [mine] * len(activities)
    does = [_of_activity(name) for name in activities]
    needs = [_of_operation(kernels[place]) for place in mine]
    heads = _heads(does, needs)
    if heads is None:
        return [mine] * len(activities)
    found: list[tuple[int, ...]] = []
    for number, (name, work) in enumerate(zip(activities, does, strict=True)):
        before = max((at for at in heads if at <= number), default=-1)
        after = min((at for at in heads if at > number), default=-1)
        if work is not None or _REDUCES.search(name):
            found.append((mine[heads[before]],) if before >= 0 else mine)
        elif _PREPARES.search(name) and after >= 0:
            found.append((mine[heads[after]],))
        else:
            first = heads[before] if before >= 0 else -1
            last = heads[after] if after >= 0 else len(mine)
            found.append(tuple(mine[each] for each in range(first + 1, last) or _beside(needs, first, last)))
    return found


def _beside(needs: Sequence[_Work | None], first: int, last: int) -> Sequence[int]:
    """Of two operations that follow each other those that may have an activity between them which says nothing.

    A product has none but its own and those that are known by name.
    """
    both = [each for each in (first, last) if 0 <= each < len(needs)]
    return [each for each in both if needs[each] is not _Work.PRODUCT] or both


def _of_activity(name: str) -> _Work | None:
    if _REDUCES.search(name) or _PREPARES.search(name):
        return None
    return next((work for work in (_Work.ATTENTION, _Work.CONVOLUTION, _Work.PRODUCT) if work.value.search(name)), None)


def _of_operation(kernel: str) -> _Work | None:
    name = row_name(kernel)
    if name in ops.ATEN_MATMULS or name.endswith("_mm"):
        return _Work.PRODUCT
    if "convolution" in name:
        return _Work.CONVOLUTION
    return _Work.ATTENTION if "attention" in name else None


def _heads(does: Sequence[_Work | None], needs: Sequence[_Work | None]) -> dict[int, int] | None:
    """Of each operation that computes something known its first activity: which operation begins at which.

    None where the activities can be dealt out in more than one way, or in none.
    """
    working = [number for number, work in enumerate(does) if work is not None]
    asking = [number for number, work in enumerate(needs) if work is not None]
    ways: list[list[int]] = []
    if len(asking) > _TOO_MANY:
        return None
    for way in _ways([does[number] for number in working], [needs[number] for number in asking]):
        ways.append(way)
        if len(ways) > 1:
            return None
    if not ways:
        return None
    return {working[at]: number for number, at in zip(asking, ways[0], strict=True)}


# Activities of one operation that its name tells of: a convolution's layouts, two gradients; attention's preparation.
_MOST = {_Work.PRODUCT: 1, _Work.CONVOLUTION: 8, _Work.ATTENTION: 4}
_TOO_MANY = 12  # operations between two generated kernels: the ways to deal out grow with a power of them


def _ways(does: Sequence[_Work | None], needs: Sequence[_Work | None], begin: int = 0) -> Iterator[list[int]]:
    """The ways to deal activities out to operations, all of them, in order: of each operation its first."""
    if not needs:
        if begin == len(does):
            yield []
        return
    wanted = needs[0]
    assert wanted is not None
    for end in range(begin + 1, min(begin + _MOST[wanted], len(does)) + 1):
        fits = does[end - 1] is wanted or (wanted is _Work.CONVOLUTION and does[end - 1] is _Work.PRODUCT)
        if not fits:
            return
        for rest in _ways(does, needs[1:], end):
            yield [begin, *rest]
