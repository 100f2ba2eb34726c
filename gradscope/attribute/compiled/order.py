"""Which kernel of a compiled graph's code each row, or each activity of a device, is.

Kernels run in the order of the generated code. Those that Inductor has generated bear their name everywhere: they hold
the order. A graph that is run as rows has a row for each operation of torch's between them. One that a CUDA graph
replays has no rows, but the device's activities in the order of the stream: of what lies between two generated kernels
an operation's are told by what their names say that they compute, where there are several operations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum

from gradscope import ops
from gradscope.ops import GENERATED

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
    """What an operation computes, and how the names of kernels tell that they do."""

    PRODUCT = re.compile(r"gemm|gemv|cutlass|xmma|nvjet|dot_kernel|cublas", re.IGNORECASE)
    CONVOLUTION = re.compile(r"conv(?!ert)|wgrad|dgrad|fprop|winograd|cudnn|im2col", re.IGNORECASE)
    ATTENTION = re.compile(r"fmha|flash|attention|sdpa|dot_do_o|convert_dq", re.IGNORECASE)


# Matmuls, and of these what copies nothing of its inputs.
_PRODUCTS = frozenset({*ops.ATEN_MATMULS, "aten::mv", "aten::addmv", "aten::dot", "aten::_int_mm", "aten::_scaled_mm"})
_BARE = frozenset({"aten::mm", "aten::bmm", "aten::mv", "aten::dot"})
_REDUCES = re.compile(r"split_?k_?reduce|reduce_?split_?k", re.IGNORECASE)  # what a product has left in parts
_FILLS = re.compile(r"^memset", re.IGNORECASE)  # the workspace of what runs next


def _between(activities: Sequence[str], kernels: Sequence[str], places: range) -> list[tuple[int, ...]]:
    """Whose the activities between two generated kernels are."""
    mine = tuple(place for place in places if not kernels[place].startswith(GENERATED))
    if len(mine) < 2 or not activities:
        return [mine] * len(activities)
    does = [_of_activity(name) for name in activities]
    working = [number for number, work in enumerate(does) if work is not None]
    needs = [_of_operation(kernels[place]) for place in mine]
    dealt = _dealt_out([does[number] for number in working], needs)
    if dealt is None:
        return [mine] * len(activities)
    owner = dict(zip(working, dealt, strict=True))
    found: list[tuple[int, ...]] = []
    for number, name in enumerate(activities):
        if number in owner:
            found.append((mine[owner[number]],))
            continue
        before = max((owner[at] for at in working if at < number), default=-1)
        after = min((owner[at] for at in working if at > number), default=-1)
        if _REDUCES.search(name) and before >= 0:
            found.append((mine[before],))
            continue
        first, last = max(before, 0), after if after >= 0 else len(mine) - 1
        around = list(range(first, last + 1))
        if _FILLS.search(name) and after >= 0:
            # Of what runs next: of one of the operations that compute unknown things.
            around = [each for each in around if each == after or (each != before and needs[each] is None)]
        else:
            around = [each for each in around if row_name(kernels[mine[each]]) not in _BARE] or around
        found.append(tuple(mine[each] for each in around))
    return found


def _of_activity(name: str) -> _Work | None:
    if _REDUCES.search(name) or _FILLS.search(name):
        return None
    return next((work for work in (_Work.ATTENTION, _Work.CONVOLUTION, _Work.PRODUCT) if work.value.search(name)), None)


def _of_operation(kernel: str) -> _Work | None:
    name = row_name(kernel)
    if name in _PRODUCTS:
        return _Work.PRODUCT
    if "::" in name and name.partition("::")[2].strip("_").startswith(("convolution", "cudnn_convolution")):
        return _Work.CONVOLUTION
    return _Work.ATTENTION if "attention" in name or "attn" in name else None


# Activities of one operation that its name tells of: a convolution's layouts, two gradients; attention's preparation.
_MOST = {_Work.PRODUCT: 1, _Work.CONVOLUTION: 8, _Work.ATTENTION: 4}


def _dealt_out(does: Sequence[_Work | None], needs: Sequence[_Work | None]) -> list[int] | None:
    """Of each activity the operation that it is of, all in order; None where there are several ways, or none.

    An operation that computes something known has one activity of that at least; one that computes something unknown
    has any, or none.
    """
    # ways[i][j]: to deal the activities from the j-th on to the operations from the i-th on; two stands for more.
    ways = [[0] * (len(does) + 1) for _ in range(len(needs) + 1)]
    ways[-1][-1] = 1
    for number in reversed(range(len(needs))):
        behind = 0
        for begin in reversed(range(len(does) + 1)):
            behind = min(behind + ways[number + 1][begin], 2)
            if needs[number] is None:
                ways[number][begin] = behind
            else:
                ends = _ends(does, needs[number], begin)
                ways[number][begin] = min(sum(ways[number + 1][end] for end in ends), 2)
    if ways[0][0] != 1:
        return None
    found: list[int] = []
    for number, work in enumerate(needs):
        begin = len(found)
        (end,) = (end for end in _ends(does, work, begin) if ways[number + 1][end])
        found += [number] * (end - begin)
    return found


def _ends(does: Sequence[_Work | None], work: _Work | None, begin: int) -> list[int]:
    """Behind which activities an operation may end whose first is this."""
    if work is None:
        return list(range(begin, len(does) + 1))
    found = []
    for end in range(begin + 1, min(begin + _MOST[work], len(does)) + 1):
        if does[end - 1] is not work and not (work is _Work.CONVOLUTION and does[end - 1] is _Work.PRODUCT):
            break
        found.append(end)
    return found
