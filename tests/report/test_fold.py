"""Which repeats fold, what their rows are called, and which of them stands out: at the borders of each rule."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gradscope.report.fold import OUTLIER_RATIO, OUTLIER_SHARE, FoldedNode, build_tree
from gradscope.tables import LayerRow

WHOLE = 1_000_000


def row(path: str, backward: int = 0, steps: Sequence[int] = (), **changes: object) -> LayerRow:
    """A layer that is called once and takes ``backward`` ns."""
    parent = path.rpartition(".")[0] if path else None
    values = {
        "class_name": "Model" if not path else "Block" if path.rpartition(".")[2].isdigit() else "Linear",
        "parent": parent,
        "calls": 1.0,
        "parameters": 0,
        "source": None,
        "forward_self_ns": 0,
        "forward_total_ns": 0,
        "backward_self_ns": backward,
        "backward_total_ns": backward,
        "recompute_ns": 0,
        "accumulate_ns": 0,
        "gradient_sum_ns": 0,
        "backward_share": 0.0,
        "backward_self_steps_ns": tuple(steps),
        **changes,
    }
    return LayerRow(path=path, **values)  # type: ignore[arg-type]


def blocks(costs: Sequence[int], steps: Sequence[Sequence[int]] = (), first: int = 0) -> list[LayerRow]:
    """A model of numbered blocks, each with one layer that takes all its time."""
    found = [row("")]
    for number, cost in enumerate(costs, first):
        own = steps[number - first] if steps else ()
        found += [row(f"{number}", 0, [0] * len(own)), row(f"{number}.fc", cost, own)]
    return found


def folded(rows: Sequence[LayerRow], whole: int = WHOLE) -> FoldedNode:
    """The one row that the blocks became."""
    (root,) = build_tree(rows, whole)
    (node,) = root.children
    return node


def outlier(costs: Sequence[int], steps: Sequence[Sequence[int]] = (), whole: int = WHOLE) -> str | None:
    found = folded(blocks(costs, steps), whole).outlier
    return None if found is None else found.path


def test_one_of_two_is_no_outlier() -> None:
    assert outlier([100_000, 300_000]) is None
    assert outlier([100_000, 100_000, 300_000]) == "2"


@pytest.mark.parametrize(
    ("cost", "path"),
    [(125_000, None), (125_001, "2"), (300_000, "2"), (80_000, None), (79_999, "2"), (0, "2")],
)
def test_an_outlier_lies_beyond_the_ratio_on_either_side(cost: int, path: str | None) -> None:
    assert OUTLIER_RATIO == 1.25
    assert outlier([100_000, 100_000, cost, 100_000]) == path


def test_the_others_own_range_is_the_yardstick() -> None:
    """They are 0.77, 1 and 1.27 times their others: three times that range is left on either side of it."""
    others = [100_000, 120_000, 140_000]
    assert outlier([*others, 333_986]) is None
    assert outlier([*others, 333_987]) == "3"
    assert outlier([*others, 36_769]) is None
    assert outlier([*others, 36_768]) == "3"
    found = folded(blocks([*others, 30_000])).outlier
    assert found is not None and found.ratio == 0.25  # over the median of the others


def test_an_outlier_matters_to_the_whole_pass() -> None:
    costs = [1_000, 1_000, 6_000]
    assert OUTLIER_SHARE == 0.005
    assert outlier(costs, whole=WHOLE) == "2"
    assert outlier(costs, whole=WHOLE + 200) is None


@pytest.mark.parametrize(
    ("slow_steps", "count", "path"),
    [(0, 5, None), (3, 5, None), (4, 5, "2"), (5, 5, "2"), (3, 4, None), (4, 4, "2"), (7, 10, None), (8, 10, "2")],
)
@pytest.mark.parametrize("odd", [400_000, 10_000])
def test_an_outlier_is_odd_in_four_of_five_steps(slow_steps: int, count: int, path: str | None, odd: int) -> None:
    usual = [100_000] * count
    steps = [usual, usual, [odd] * slow_steps + [100_000] * (count - slow_steps)]
    assert outlier([100_000, 100_000, odd], steps) == path


def test_time_of_layers_below_counts_for_the_block() -> None:
    """Of every kind that backward has."""
    for column in ("recompute_ns", "accumulate_ns", "gradient_sum_ns"):
        rows = [*blocks([100_000] * 3), row("2.more", **{column: 300_000})]
        rows += [row("0.more"), row("1.more")]
        assert folded(rows).outlier is not None, column
        assert folded(rows).outlier.path == "2", column  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("numbers", "label", "address"),
    [
        ([0, 1, 2], "0-2", "*"),
        ([0, 2], "0,2", "0,2"),
        ([0, 2, 4], "0,2,4", "0,2,4"),
        ([0, 1, 3, 4, 6], "0-1,3-4,6", "0-1,3-4,6"),
        ([0, 2, 4, 6], "0,2,…,6", "0,2,…,6"),
    ],
)
def test_labels_name_the_numbers_and_a_star_means_all(numbers: list[int], label: str, address: str) -> None:
    """The numbers between are blocks of another class."""
    rows = [row("")]
    for number in range(max(numbers) + 1):
        kind = "Block" if number in numbers else f"Other{number}"
        rows += [row(f"{number}", class_name=kind), row(f"{number}.fc")]
    (root,) = build_tree(rows, WHOLE)
    (node,) = (child for child in root.children if child.class_name == "Block")
    assert (node.label, node.repeats, node.address) == (label, len(numbers), address)


def test_a_star_where_all_of_them_begin_at_another_number() -> None:
    node = folded(blocks([1, 1], first=3))
    assert (node.label, node.address, node.paths) == ("3-4", "*", ("3", "4"))


@pytest.mark.parametrize("change", [{"class_name": "Other"}, {"parameters": 7}])
def test_blocks_that_differ_stay_apart(change: dict[str, object]) -> None:
    rows = [row(""), row("0"), row("0.fc"), row("1"), row("1.fc", **change), row("2"), row("2.fc")]
    (root,) = build_tree(rows, WHOLE)
    assert [(node.label, node.repeats) for node in root.children] == [("0,2", 2), ("1", 1)]


@pytest.mark.parametrize(
    "busy", [{"calls": 1.0}, {"backward_self_ns": 5}, {"forward_self_ns": 5}, {"saved_bytes": 5}, {}]
)
def test_a_container_that_does_something_keeps_its_row(busy: dict[str, object]) -> None:
    rows = [row(""), row("body", **{"calls": 0.0, **busy}), row("body.fc", 10)]
    (root,) = build_tree(rows, WHOLE)
    assert [node.label for node in root.children] == (["body"] if busy else ["body.fc"])


def test_amounts_are_summed_over_repeats() -> None:
    node = folded(blocks([10, 20, 30]))
    (child,) = node.children
    assert (node.total.backward_ns, node.own.backward_ns, child.own.backward_ns, node.calls) == (60, 0, 60, 3)
