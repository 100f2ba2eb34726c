"""Whose FSDP's work is, whatever the modules are called and however deep they lie."""

from __future__ import annotations

import itertools

import pytest

from gradscope.attribute.align_steps import assign
from gradscope.attribute.result import Attribution, build_result
from gradscope.attribute.rows import read_skeleton
from gradscope.attribute.sharding import owners_of_pieces
from gradscope.tables import ModuleInfo, RowKind

from .hand import Row, spans, table_of

UNKNOWN = -5
PARTS = ("c", "bc", "abc")


def test_a_piece_is_of_a_module_of_whole_names() -> None:
    """``c`` is no part of ``bc``: of all paths of these names, those count that end with the whole of each."""
    paths = [".".join(parts) for parts in itertools.product(PARTS, repeat=2)] + ["", "x.c"]
    for named in (*PARTS, *(".".join(parts) for parts in itertools.product(PARTS, repeat=2))):
        wanted = named.split(".")
        for number in range(1, len(paths) + 1):
            known = paths[:number]
            fits = [place for place, path in enumerate(known) if path.split(".")[-len(wanted) :] == wanted]
            expected = known.index(named) if named in known else fits[0] if len(fits) == 1 else UNKNOWN
            assert owners_of_pieces([f"FSDP::all_gather ({named})"], known, UNKNOWN).tolist() == [expected]


DEPTH = 5
PATHS = tuple(".".join("abcde"[:depth]) for depth in range(DEPTH))  # each holds the next
MODULES = tuple(
    ModuleInfo(path, "Layer", PATHS[depth - 1] if depth else None, 0, None) for depth, path in enumerate(PATHS)
)
WORK = "FullyShardedDataParallel._pre_forward"


def _found(wrapping: tuple[int, ...], *rows: Row) -> Attribution:
    """Modules inside of each other, of which some wrap; numbers of nodes are their depth."""
    table = table_of(
        Row(RowKind.STEP, 0, 0, "step", argument=0),
        *(Row(RowKind.CALL, 20 * depth, 400 - 20 * depth, "call", argument=depth) for depth in range(DEPTH)),
        *(Row(RowKind.SHARDING, 20 * depth + 5, 20 * depth + 10, WORK) for depth in wrapping),
        *rows,
        Row(RowKind.STEP, 2000, 2000, "step", argument=1),
    )
    calls = spans(*((depth, depth, 9) for depth in range(DEPTH)))
    parents = [depth - 1 for depth in range(DEPTH)]
    skeleton = read_skeleton(table, calls, parents, paths=PATHS)
    return build_result(assign(skeleton, 0, None), MODULES, (), None, {}, has_flops=False)


def _pass(begin: int, length: int) -> list[Row]:
    """A node of each of the modules, with work of the wrapping one of a time of its own in it."""
    rows = [Row(RowKind.BACKWARD, begin, begin + DEPTH * length, "backward", argument=0)]
    for depth in range(DEPTH):
        at = begin + depth * length
        rows += [
            Row(RowKind.NODE, at, at + length, f"Node{depth}", sequence=depth, forward_thread=1),
            Row(RowKind.SHARDING, at + 2, at + 3 + depth, "FullyShardedDataParallel._pre_backward_hook"),
        ]
    return rows


def _communication(found: Attribution) -> list[int]:
    return [row.communication_ns for row in found.layers]


@pytest.mark.parametrize("wrapping", [each for n in range(1, 4) for each in itertools.combinations(range(DEPTH), n)])
def test_work_is_of_the_next_wrapping_module_however_far_above(wrapping: tuple[int, ...]) -> None:
    expected = [0] * DEPTH
    for depth in range(DEPTH):
        above = [each for each in wrapping if each <= depth]
        expected[max(above, default=depth)] += 1 + depth  # where none is, it is that of the node
    assert _communication(_found(wrapping, *_pass(500, 100))) == expected


@pytest.mark.parametrize("kind", [RowKind.NODE, RowKind.ACCUMULATE])
def test_a_pass_in_a_modules_call_makes_it_no_wrapping_one(kind: RowKind) -> None:
    """What runs in a pass is in nobody's forward, also where a module's call runs the pass."""
    inner = (
        Row(RowKind.BACKWARD, 200, 230, "backward", argument=0),
        Row(kind, 205, 225, "AccumulateGrad", sequence=-1 if kind == RowKind.ACCUMULATE else 4, forward_thread=1),
        Row(RowKind.SHARDING, 210, 220, "FullyShardedDataParallel._post_backward_hook"),
    )
    found = _communication(_found((1,), *inner, *_pass(500, 100)))
    alone = _communication(_found((1,), *_pass(500, 100)))
    assert found[2:] == alone[2:] == [0, 0, 0]
