"""Nodes of compiled autograd's graphs, found again among those of the graphs that it copies."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from gradscope.compat.compiled_autograd import CopiedNodes, in_both
from gradscope.tables import CalledFrom, NodeNote


def longest(first: list[int], second: list[int]) -> int:
    """By the table of all lengths."""
    row = [0] * (len(second) + 1)
    for one in first:
        before = row[:]
        for place, other in enumerate(second):
            row[place + 1] = before[place] + 1 if one == other else max(before[place + 1], row[place])
    return row[-1]


@pytest.mark.parametrize("seed", range(50))
def test_what_is_common_is_longest_and_in_order(seed: int) -> None:
    pick = random.Random(seed)
    first, second = ([pick.randrange(3) for _ in range(pick.randrange(80))] for _ in range(2))
    pairs = in_both(first, second)
    assert len(pairs) == longest(first, second)
    assert all(first[one] == second[other] for one, other in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))


def node(op: str, layer: str = "", size: int = 8, line: int = 0) -> NodeNote:
    modules = (CalledFrom(1, layer, "Linear"),) if layer else ()
    frames = (("model.py", line, "forward"),) if line else ()
    return NodeNote(modules=modules, frames=frames, op=op, bytes=size, forward=False, is_view=False, inputs=())


def copied() -> CopiedNodes:
    copies = CopiedNodes()
    copies.begin()
    copies.copied(0, [node(""), node("mm", "a", line=1), node("mul", "a", line=2), node("sum", "b", 4, line=3)])
    return copies


def of_inductors(*ops: NodeNote) -> dict[str, NodeNote]:
    return {f"{each.op}_{number}": each for number, each in enumerate(ops)}


def test_what_the_engine_adds_between_copied_nodes_is_of_nobody() -> None:
    ops = node(""), node("mm"), node("new_empty"), node("mul"), node("sum", size=4)
    found = copied().with_origins(of_inductors(*ops))
    layers = {name: [each.path for each in note.modules] for name, note in found.items()}
    assert layers == {"_0": [], "mm_1": ["a"], "new_empty_2": [], "mul_3": ["a"], "sum_4": ["b"]}
    assert found["sum_4"].frames == (("model.py", 3, "forward"),) and found["sum_4"].bytes == 4


def test_a_pass_in_two_graphs_goes_on_where_the_first_ended() -> None:
    copies = copied()
    assert copies.with_origins(of_inductors(node("mm")))["mm_0"].modules
    found = copies.with_origins(of_inductors(node("mm"), node("mul"), node("sum", size=4)))
    assert not found["mm_0"].modules and found["sum_2"].modules[0].path == "b"


def test_of_a_pass_for_few_parameters_nothing_is_told() -> None:
    """What is not run may be what another layer's is taken for."""
    copies = CopiedNodes()
    copies.begin()
    copies.copied(0, [node("mm", layer, line=1) for layer in "abcdefghij"])
    found = copies.with_origins(of_inductors(node("mul"), node("mm")))
    assert not any(each.modules for each in found.values())


def test_sizes_that_torch_has_seen_otherwise_are_the_same_node() -> None:
    ops = node("mm", size=80), node("mul", size=80), node("sum", size=40)
    found = copied().with_origins(of_inductors(*ops))
    assert [each.modules[0].path for each in found.values()] == ["a", "a", "b"]


def test_of_blocks_that_share_a_graph_the_line_is_known_alone() -> None:
    copies = copied()
    copies.copied(0, [node("mm", "a", line=1)])
    found = copies.with_origins(of_inductors(node("mm"), node("mul"), node("sum", size=4), node("mm")))
    assert not any(each.modules for each in found.values())
    assert [each.frames[0][1] for each in found.values()] == [1, 2, 3, 1]


def test_another_pass_forgets_what_was_left() -> None:
    copies = copied()
    copies.begin()
    assert not copies.with_origins(of_inductors(node("mm")))["mm_0"].modules


def told(copies: CopiedNodes, *ops: NodeNote) -> list[bool]:
    return [bool(each.modules) for each in copies.with_origins(of_inductors(*ops)).values()]


def chain(*, views: int = 0) -> CopiedNodes:
    """Ten operations of their own kinds, and views between them."""
    copies = CopiedNodes()
    copies.begin()
    nodes = [node(f"op{number}", "a") for number in range(10)]
    copies.copied(
        0, [*nodes[:9], *[replace(node(f"view{number}", "a"), is_view=True) for number in range(views)], nodes[9]]
    )
    return copies


@pytest.mark.parametrize(("missing", "known"), [(0, True), (1, True), (2, False)])
@pytest.mark.parametrize("views", [0, 30])
def test_one_of_ten_may_be_missing_and_any_view(missing: int, known: bool, views: int) -> None:
    """Exactly nine tenths of what computes are enough; views cost nothing, and torch makes others of them."""
    rest = [node(f"op{number}") for number in range(missing, 10)]
    assert told(chain(views=views), *rest) == [known] * len(rest)


@pytest.mark.parametrize("views", [0, 30])
def test_views_that_are_found_make_up_for_nothing(views: int) -> None:
    seen = [replace(node(f"view{number}"), is_view=True) for number in range(views)]
    rest = [*[node(f"op{number}") for number in range(2, 9)], *seen, node("op9")]
    assert not any(told(chain(views=views), *rest))


@pytest.mark.parametrize("name", ["reshape", "_unsafe_view"])
def test_a_view_may_have_another_name(name: str) -> None:
    copies = CopiedNodes()
    copies.begin()
    copies.copied(0, [node("mm", "a"), node("view", "b"), node("mul", "c")])
    assert told(copies, node("mm"), node(name), node("mul")) == [True] * 3


def test_each_pass_counts_its_graphs_anew() -> None:
    copies = copied()
    copies.begin()
    copies.copied(0, [node("mm", "a")])
    assert told(copies, node("mm")) == [True]
    assert told(copies, node("mul"), node("sum", size=4)) == [False, False]
