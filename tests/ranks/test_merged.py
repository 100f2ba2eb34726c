"""Runs of several ranks side by side, made by hand."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradscope.document.terminal import to_text
from gradscope.errors import RunFileError, UsageError
from gradscope.ranks import Merged, merge, ranks_document
from gradscope.ranks.merged import RankStep, Straggler, _own_ns, _straggler
from gradscope.report.runfile import to_json
from gradscope.tables import RunData, TakenStep
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (used by its name)
from tests.diff_fixtures import MS, run
from tests.report_fixtures import CPU


def rank(number: int, layers: dict[str, int], wait: int, *, size: int = 2, **build: Any) -> RunData:
    """A rank whose layers take so many ms, and which waits for so many."""
    environment = {**CPU, "rank": number, "world_size": size}
    made = run({path: [ms * MS] * 3 for path, ms in layers.items()}, environment=environment, **build)
    ledger = replace(
        made.ledger,
        backward_ns=made.ledger.backward_ns + wait * MS,
        communication_ns=made.ledger.communication_ns + wait * MS,
    )
    step = replace(
        made.step,
        wall_ns=made.step.wall_ns + wait * MS,
        backward_ns=ledger.backward_ns,
        communication_ns=ledger.communication_ns,
    )
    return replace(made, ledger=ledger, step=step)


def silent(data: RunData) -> RunData:
    """Without collectives."""
    return replace(data, step=replace(data.step, communication_ns=None))


def of_model(data: RunData, name: str) -> RunData:
    return replace(data, workload=replace(data.workload, model=name))


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(*runs: RunData) -> list[Path]:
        paths = [tmp_path / f"run.rank{number}.json" for number in range(len(runs))]
        for path, data in zip(paths, runs, strict=True):
            path.write_text(to_json(data), encoding="utf-8")
        return paths

    return write


FAST, SLOW = {"": 1, "a": 10, "b": 10}, {"": 1, "a": 10, "b": 50}


def test_a_straggler_works_longest_and_waits_least(written: Any) -> None:
    """Wall time is alike on all: it tells nothing."""
    merged = merge(written(rank(0, FAST, 41, size=3), rank(1, SLOW, 1, size=3), rank(2, FAST, 41, size=3)))
    assert len({step.wall_ns for step in merged.ranks}) == 1
    assert merged.straggler is not None
    assert merged.straggler == Straggler((1,), 40 * MS, 40 * MS)
    (layer,) = [layer for layer in merged.layers if layer.path == "b"]
    assert (layer.slowest, layer.others_ns, layer.more_ns) == (1, 10 * MS, 40 * MS)
    text = " ".join(to_text(ranks_document(merged)).split())
    assert "Rank 1 works 40.0 ms a step longer than the others, and waits least" in text
    assert "b takes 50.0 ms there and 10.0 ms elsewhere." in text
    assert "×5.00" in text


def test_several_that_work_longer_are_told_together(written: Any) -> None:
    """Which of two waits a little less is chance."""
    for less in (0, 1):
        runs = [rank(0, FAST, 41, size=4), rank(1, FAST, 41, size=4)]
        runs += [rank(2, SLOW, 1 + less, size=4), rank(3, SLOW, 2 - less, size=4)]
        merged = merge(written(*runs))
        assert merged.straggler is not None
        assert set(merged.straggler.ranks) == {2, 3}
        assert (merged.straggler.more_ns, merged.straggler.saves_ns) == (40 * MS, 40 * MS)
        text = " ".join(to_text(ranks_document(merged)).split())
        assert "work 40.0 ms a step longer than the others, and wait least: they wait for them." in text
        assert text.count("works longer") == 2


def test_ranks_that_never_talk_have_no_straggler(written: Any) -> None:
    merged = merge(written(silent(rank(0, SLOW, 0)), silent(rank(1, FAST, 0))))
    assert merged.straggler is None
    text = to_text(ranks_document(merged))
    assert "No rank waits for another" in text and "waits least" not in text


def test_what_steps_differ_by_is_said_where_it_decides(written: Any) -> None:
    slow = rank(1, {"": 1, "a": 10, "b": 20}, 1)
    spread = dict(slow.step.spread)
    spread["wall"] = replace(spread["wall"], std_ns=40 * MS)
    slow = replace(slow, step=replace(slow.step, spread=spread))
    merged = merge(written(rank(0, FAST, 11), slow))
    assert merged.straggler is None
    assert "No rank stands out: own work is 21.0 ms to 31.0 ms a step, known to ±" in to_text(ranks_document(merged))


def test_other_models_meshes_and_devices_are_noted(written: Any) -> None:
    other = rank(1, FAST, 5)
    environment = {**other.environment, "mesh": "2 dp", "device_name": "another"}
    other = replace(other, environment=environment, workload=replace(other.workload, parameters=7))
    notes = " ".join(merge(written(rank(0, FAST, 5), other)).notes)
    assert all(f"different {what}" in notes for what in ("parameters", "device meshes", "devices"))


def test_means_of_different_steps_are_noted(written: Any) -> None:
    one, other = rank(0, FAST, 5), rank(1, FAST, 5)
    taken = (TakenStep(MS, left_out=False), TakenStep(MS, left_out=True), TakenStep(MS, left_out=False))
    other = replace(other, step=replace(other.step, taken=taken))
    one = replace(one, step=replace(one.step, taken=taken[::-1]))
    assert not any("left out" in note for note in merge(written(one, other)).notes)
    one = replace(one, step=replace(one.step, taken=taken[::2]))
    assert any("left out different steps" in note for note in merge(written(one, other)).notes)


@pytest.mark.parametrize(("number", "size"), [(5, 2), (-1, 2), (2, 2), (0, 10**12), (True, 2)])
def test_a_rank_that_cannot_be(number: int, size: int, written: Any, run: Runner) -> None:
    paths = written(rank(number, FAST, 5, size=size), rank(1, FAST, 5, size=size))
    ran = run("merge", *map(str, paths))
    assert ran.code == 2 and len(ran.err.splitlines()) <= 3 and "Traceback" not in ran.err


def test_many_missing_ranks_are_told_in_a_line(written: Any) -> None:
    merged = merge(written(rank(0, FAST, 5, size=512), rank(1, FAST, 5, size=512)))
    assert "no file of ranks 2 to 511, of 512" in merged.notes


@pytest.mark.parametrize(
    "runs",
    [
        (rank(0, FAST, 5), rank(1, FAST, 5)),
        (rank(0, FAST, 5), rank(1, {"": 1, "a": 10, "b": 10}, 4)),
        (rank(0, FAST, 1), rank(1, SLOW, 30)),  # works longer, and others do not wait for it
    ],
    ids=["alike", "within noise", "waits itself"],
)
def test_where_nobody_is_waited_for(runs: tuple[RunData, ...], written: Any) -> None:
    merged = merge(written(*runs))
    assert merged.straggler is None
    assert "No rank stands out" in to_text(ranks_document(merged))


def test_layers_of_some_ranks_alone(written: Any) -> None:
    """A pipeline: each rank has layers of its own."""
    merged = merge(written(rank(0, {"": 1, "a": 10}, 5), rank(1, {"": 1, "b": 10}, 5)))
    assert "2 layers are in some of the ranks alone" in merged.notes
    assert "Layers that differ" not in to_text(ranks_document(merged))


def test_what_is_missing_is_said(written: Any) -> None:
    merged = merge(written(rank(0, FAST, 5, size=4), rank(3, FAST, 5, size=4)))
    assert merged.missing == (1, 2)
    assert "no file of ranks 1 to 2, of 4" in merged.notes


@pytest.mark.parametrize(
    ("runs", "error", "said"),
    [
        ((rank(0, FAST, 5),), UsageError, "give the files of two or more"),
        ((rank(0, FAST, 5), rank(0, FAST, 5)), UsageError, "are both of rank 0"),
        ((run({"": [MS]}), rank(1, FAST, 5)), RunFileError, "is of no rank"),
        ((rank(0, FAST, 5), rank(1, FAST, 5, size=8)), UsageError, "different programs: ranks 2 and 8"),
        ((rank(0, FAST, 5), of_model(rank(1, FAST, 5), "ResNet")), UsageError, "different programs: model"),
    ],
    ids=["one", "twice", "alone", "sizes", "models"],
)
def test_what_cannot_be_merged(
    runs: tuple[RunData, ...], error: type[Exception], said: str, written: Any, run: Runner
) -> None:
    paths = written(*runs)
    with pytest.raises(error, match=said):
        merge(paths)
    ran = run("merge", *map(str, paths))
    assert ran.code == 2 and said in ran.err and len(ran.err.splitlines()) <= 3


def test_the_command(written: Any, run: Runner, tmp_path: Path) -> None:
    paths = [*map(str, written(rank(0, FAST, 41), rank(1, SLOW, 1)))]
    ran = run("merge", *paths, "--json", str(tmp_path / "ranks.json"))
    assert ran.code == 0 and "Straggler" in ran.out and "wrote" in ran.err
    record = json.loads((tmp_path / "ranks.json").read_text(encoding="utf-8"))
    assert (record["kind"], record["straggler"]["ranks"], record["missing"]) == ("ranks", [1], [])
    assert record["layers"][2] == {
        "path": "b",
        "class": "Linear",
        "own_ns": {"0": 10 * MS, "1": 50 * MS},
        "communication_ns": {"0": 0, "1": 0},
        "min_ns": 10 * MS,
        "median_ns": 30 * MS,
        "max_ns": 50 * MS,
        "slowest_rank": 1,
    }
    assert json.loads(run("merge", *paths, "--json", "-").out) == record
    assert run("merge", *paths, "--json", str(tmp_path / "ranks.json")).code == 0  # its own may be replaced
    (tmp_path / "mine.txt").write_text("mine")
    assert run("merge", *paths, "--json", str(tmp_path / "mine.txt")).code != 0


def test_own_work_is_without_what_forward_waited_for(written: Any) -> None:
    """FSDP gathers parameters in forward."""
    one = rank(0, FAST, 5, forward={"a": 30 * MS})
    layers = tuple(replace(row, forward_communication_ns=25 * MS) if row.path == "a" else row for row in one.layers)
    merged: Merged = merge(written(replace(one, layers=layers), rank(1, FAST, 5)))
    (layer,) = [layer for layer in merged.layers if layer.path == "a"]
    assert layer.own_ns == {0: 15 * MS, 1: 10 * MS}
    assert layer.communication_ns == {0: 25 * MS, 1: 0}


def slower(number: int, own: int, *, wait: int = 20, size: int = 2, std: float = 0.0, steps: int = 1) -> RunData:
    """A rank of one layer that works for so many ms, and whose steps differ by so many."""
    made = rank(number, {"": 0, "a": own}, wait, size=size)
    spread = {**made.step.spread, "wall": replace(made.step.spread["wall"], std_ns=round(std * MS))}
    return replace(made, step=replace(made.step, spread=spread), workload=replace(made.workload, steps=steps, warmup=0))


@pytest.mark.parametrize(("own", "told"), [(101, False), (102, False), (104, True), (110, True)])
def test_who_works_a_little_longer_is_no_straggler(own: int, told: bool, written: Any) -> None:
    """No step would get shorter by as much as steps differ from each other."""
    merged = merge(written(slower(0, 100), slower(1, own, wait=5)))
    assert (merged.straggler is not None) == told


@pytest.mark.parametrize(("steps", "told"), [(1, False), (4, False), (25, True), (100, True)])
def test_more_steps_tell_more(steps: int, told: bool, written: Any) -> None:
    """A mean of n is off by a standard deviation over the root of n: here twice that, of 20 ms, beside 10 ms."""
    merged = merge(written(slower(0, 100, std=20, steps=steps), slower(1, 110, wait=5, std=20, steps=steps)))
    assert merged.spread_ns == round(2 * 20 * MS / steps**0.5)
    assert (merged.straggler is not None) == told


def test_what_a_step_would_save_is_told_by_the_slowest(written: Any) -> None:
    """All wait for it; what several have more is told by their medians."""
    runs = [slower(0, 100, size=4), slower(1, 110, size=4), slower(2, 150, wait=2, size=4)]
    merged = merge(written(*runs, slower(3, 170, wait=1, size=4)))
    assert merged.straggler == Straggler((3, 2), 160 * MS - 105 * MS, 170 * MS - 110 * MS)
    wall = max(step.wall_ns for step in merged.ranks)
    text = " ".join(to_text(ranks_document(merged)).split())
    assert f"would be up to 60.0 ms shorter ({100 * 60 * MS / wall:.1f} %)" in text


@pytest.mark.parametrize(
    ("column", "sign"),
    [
        *((f"{part}_ns", 1) for part in ("backward_self", "recompute", "accumulate", "gradient_sum", "hook")),
        ("forward_self_ns", 1),
        ("forward_communication_ns", -1),
        ("communication_ns", 0),
    ],
)
def test_every_time_of_a_layer_is_its_own_work_but_communication(column: str, sign: int) -> None:
    (row,) = [row for row in rank(0, FAST, 5).layers if row.path == "b"]
    assert _own_ns(replace(row, **{column: getattr(row, column) + 7})) == _own_ns(row) + 7 * sign


@pytest.mark.parametrize("count", [2, 3, 4])
def test_others_are_those_but_the_slowest(count: int, written: Any) -> None:
    own = [10, 40, 20, 30][:count]
    merged = merge(written(*(rank(place, {"": 1, "a": ms}, 5, size=count) for place, ms in enumerate(own))))
    layer = merged.layers[1]
    assert layer.slowest == 1
    assert layer.others_ns == statistics.median([ms for ms in own if ms != 40]) * MS


@pytest.mark.parametrize("lacking", [0, 1, 2])
def test_a_layer_that_any_rank_lacks_is_not_everywhere(lacking: int, written: Any) -> None:
    runs = [rank(number, {"": 1, "a": 10} if number == lacking else FAST, 5, size=3) for number in range(3)]
    assert "1 layer is in some of the ranks alone" in merge(written(*runs)).notes


def test_layers_are_listed_from_the_most_that_differs(written: Any) -> None:
    """And no more of them than asked for, with how many are left."""
    names = [f"layer{number}" for number in range(6)]
    more = dict(zip(names, (3, 9, 6, 12, 1, 20), strict=True))
    runs = [rank(0, {"": 1, **dict.fromkeys(names, 10)}, 60), rank(1, {"": 1, **{n: 10 + more[n] for n in names}}, 9)]
    text = to_text(ranks_document(merge(written(*runs)), top=4))
    listed = [name for line in text.splitlines() for name in names if line.strip().startswith(name)]
    assert listed == sorted(names, key=lambda name: -more[name])[:4]
    assert "… 2 more" in text


def test_layers_are_listed_from_the_most_that_is_communicated(written: Any) -> None:
    """Also where one rank alone does."""
    spent = {"a": (2, 2), "b": (9, 9), "c": (0, 4)}
    runs = []
    for number in (0, 1):
        made = rank(number, {"": 1, **dict.fromkeys(spent, 10)}, 20)
        layers = tuple(
            replace(row, communication_ns=spent[row.path][number] * MS) if row.path in spent else row
            for row in made.layers
        )
        runs.append(replace(made, layers=layers))
    text = to_text(ranks_document(merge(written(*runs))))
    lines = [line.split() for line in text[text.index("Communication") :].splitlines()]
    listed = [line[0] for line in lines if line and line[0] in spent]
    assert listed == ["b", "a", "c"] and "Layers that differ" not in text


def test_who_waits_least_is_marked(written: Any) -> None:
    runs = [rank(0, FAST, 41, size=3), rank(1, SLOW, 1, size=3), rank(2, FAST, 30, size=3)]
    lines = to_text(ranks_document(merge(written(*runs)))).splitlines()
    assert [line.split()[0] for line in lines if line.endswith("waits least")] == ["1"]
    assert [line.split()[0] for line in lines if "works longer" in line] == ["1"]


# --------------------------------------------------------------------------------------------------------------------
# Any ranks
# --------------------------------------------------------------------------------------------------------------------


def _step(number: int, own: int, *, wait: int, std: int = 0) -> RankStep:
    return RankStep(number, own + wait, wait, 0, 0, std, 1, None, "")


@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("slow", range(1, 8))
def test_stragglers_are_half_of_all_at_most(ranks: int, slow: int) -> None:
    """Where more work long, it is the others that work less than all."""
    if slow >= ranks:
        return
    steps = [_step(n, 200 if n < slow else 100, wait=10 if n < slow else 110) for n in range(ranks)]
    found = _straggler(steps)
    assert (found is not None) == (2 * slow <= ranks)
    assert found is None or set(found.ranks) == set(range(slow))


@pytest.mark.parametrize("gap", [29, 30, 31])
def test_stragglers_stand_out_more_than_the_others_differ(gap: int) -> None:
    steps = [_step(0, 100, wait=90), _step(1, 130, wait=60), _step(2, 130 + gap, wait=10)]
    assert (_straggler(steps) is not None) == (gap > 30)


@pytest.mark.parametrize("unsteady", range(4))
@pytest.mark.parametrize(("std", "told"), [(0, True), (20, True), (30, False)])
def test_steps_of_any_rank_may_be_the_accident(unsteady: int, std: int, told: bool) -> None:
    """Two standard deviations of one step, beside 50 more."""
    own = [100, 100, 100, 150]
    steps = [_step(n, ns, wait=200 - ns, std=std if n == unsteady else 0) for n, ns in enumerate(own)]
    assert (_straggler(steps) is not None) == told
