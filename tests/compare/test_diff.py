"""What a comparison says of two runs: matching, values and their noise, repeats, what else differs."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

import gradscope
from gradscope.compare.build import compare
from gradscope.compare.changes import Change, Comparison, GroupChange
from gradscope.errors import RunFileError, UsageError
from gradscope.report import Report
from gradscope.tables import OpRow, RunData
from tests import report_fixtures, report_memory_fixtures
from tests.diff_fixtures import CPU, MS, around, run


def layer(comparison: Comparison, path: str, metric: str) -> Change:
    return next(one for one in comparison.layers if one.path == path).changes[metric]


def total(comparison: Comparison, metric: str) -> Change:
    return next(change for change in comparison.totals if change.metric == metric)


def group(comparison: Comparison, address: str) -> GroupChange:
    return next(one for one in comparison.groups if one.address == address)


NOTHING = (0, 0, 0, 0, 0)


# --------------------------------------------------------------------------------------------------------------------
# Noise
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("more", "real"), [(1_458_445, False), (1_458_446, True), (-1_458_446, True)])
def test_a_layer_is_judged_by_its_own_steps(more: int, real: bool) -> None:
    before = run({"": NOTHING, "a": around(100 * MS, MS)})
    after = run({"": NOTHING, "a": around(100 * MS + more, MS)})
    change = layer(compare(before, after), "a", "backward_self_ns")
    assert change == Change("backward_self_ns", "ns", 100 * MS, 100 * MS + more, 1_458_445, "steps")
    assert (change.difference, change.real) == (more, real)


def test_the_spread_of_whole_steps_is_the_floor() -> None:
    wall = around(0, 5 * MS)  # 5 % of the step, which is all backward
    before = run({"": NOTHING, "a": around(100 * MS, 10)}, wall=wall)
    after = run({"": NOTHING, "a": around(96 * MS, 10)}, wall=wall)
    change = layer(compare(before, after), "a", "backward_self_ns")
    assert change.noise is not None
    # The larger share is that of the run after: 5 ms of 96, here of the larger value. RUN.json has whole ns.
    assert abs(change.noise - 100 * MS * 5 // 96) <= 2
    assert change.real is False


def test_the_steps_of_a_total_are_those_of_all_below_it() -> None:
    """One layer takes what the other leaves, step by step: their sum does not vary at all."""
    up, down = (90 * MS, 100 * MS, 110 * MS), (110 * MS, 100 * MS, 90 * MS)
    before = run({"": (0, 0, 0), "a": (0, 0, 0), "a.x": up, "a.y": down})
    after = run({"": (0, 0, 0), "a": (0, 0, 0), "a.x": up, "a.y": tuple(v + MS for v in down)})
    comparison = compare(before, after)
    assert layer(comparison, "a", "backward_total_ns") == Change(
        "backward_total_ns", "ns", 200 * MS, 201 * MS, 0, "steps"
    )
    assert layer(comparison, "a.y", "backward_self_ns").real is False


def test_what_was_not_followed_by_step_is_as_unsteady_as_its_layer() -> None:
    before = run({"": NOTHING, "a": around(100 * MS, 10 * MS)}, forward={"a": 10 * MS}, recompute={"a": 50 * MS})
    after = run({"": NOTHING, "a": around(100 * MS, 10 * MS)}, forward={"a": 11 * MS}, recompute={"a": 90 * MS})
    comparison = compare(before, after)
    forward = layer(comparison, "a", "forward_self_ns")
    # 10 % of 10 and of 11 ms: sqrt((1² + 1.1²) / 5) = 0.66483 ms; 2.21² / (1/4 + 1.4641/4) = 7.9, so 7: t = 2.364624.
    assert (forward.basis, forward.noise, forward.real) == ("estimate", 1_572_075, False)
    again = layer(comparison, "a", "recompute_ns")
    assert (again.basis, again.real) == ("estimate", True)
    assert layer(comparison, "a", "backward_own_ns").basis == "estimate"
    assert layer(comparison, "a", "backward_self_ns").basis == "steps"


def test_a_layer_without_backward_nodes_is_as_unsteady_as_the_phase() -> None:
    wall = around(0, 5 * MS)
    before = run({"": NOTHING, "a": around(100 * MS, 0)}, forward={"": 100 * MS}, wall=wall)
    after = run({"": NOTHING, "a": around(100 * MS, 0)}, forward={"": 104 * MS}, wall=wall)
    change = layer(compare(before, after), "", "forward_self_ns")
    # Standard error sqrt(2/5) of 5 ms; two layers have a forward, of which one is tested: t = 2.306004.
    assert (change.basis, change.real) == ("whole", False)
    assert change.noise is not None and abs(change.noise - 5 * 1_458_445) <= 10


def test_what_is_not_there_does_not_vary() -> None:
    wall = around(0, 5 * MS)
    layers = {"": NOTHING, "a": around(100 * MS, MS)}
    before, after = run(layers, wall=wall), run(layers, wall=wall, recompute={"a": 50 * MS})
    change = layer(compare(before, after), "a", "recompute_ns")
    assert (change.before, change.after, change.real) == (0, 50 * MS, True)


def test_one_step_is_no_statement() -> None:
    one = run({"": (0,), "a": (100 * MS,)})
    five = run({"": NOTHING, "a": around(200 * MS, MS)})
    for before, after in ((one, five), (five, one)):
        comparison = compare(before, after)
        assert total(comparison, "backward_ns").real is None
        assert layer(comparison, "a", "backward_self_ns").real is None
    assert "the run before has one measured step, so nothing is said about what is noise: use --steps 5 or more" in (
        compare(one, five).notes
    )
    assert layer(compare(one, one), "a", "backward_self_ns").real is False  # what is equal is no change


def test_parts_of_the_whole_have_its_spread() -> None:
    wall = around(0, MS)
    layers = {"": NOTHING, "a": around(100 * MS, MS)}
    comparison = compare(
        run(layers, wall=wall, optimizer=10 * MS, engine=4 * MS),
        run(layers, wall=wall, optimizer=20 * MS, engine=5 * MS),
    )
    optimizer, engine = total(comparison, "optimizer_ns"), total(comparison, "engine_ns")
    assert (optimizer.basis, optimizer.real) == ("whole", True)
    assert (engine.basis, engine.real) == ("whole", False)
    assert total(comparison, "layers_ns").basis == "steps"
    assert "recompute_ns" not in [change.metric for change in comparison.totals]  # zero in both


def test_bytes_are_exact() -> None:
    layers = {"": NOTHING, "a": around(100 * MS, 20 * MS)}
    comparison = compare(run(layers, saved={"a": 1000}), run(layers, saved={"a": 1001}))
    assert layer(comparison, "a", "saved_bytes") == Change("saved_bytes", "bytes", 1000, 1001, 0, "exact")
    assert layer(comparison, "a", "saved_bytes").real
    assert total(comparison, "peak_bytes").difference == 2
    assert layer(comparison, "a", "allocations").real is False


def test_memory_of_one_run_is_not_compared() -> None:
    layers = {"": NOTHING, "a": around(100 * MS, MS)}
    comparison = compare(run(layers, saved={"a": 1000}), run(layers))
    assert "memory was not measured in the run after, so it is not compared" in comparison.notes
    assert not [change for change in comparison.totals if change.unit != "ns"]
    assert "saved_bytes" not in next(one for one in comparison.layers if one.path == "a").changes
    assert not comparison.memory


def test_unsteady_steps_are_noted() -> None:
    before = run({"": NOTHING, "a": around(100 * MS, MS)}, wall=around(0, 20 * MS))
    notes = compare(before, before).notes
    assert notes[0] == "the steps of the run before are apart by ±20.0 %, so only large differences are beyond noise"


# --------------------------------------------------------------------------------------------------------------------
# Matching
# --------------------------------------------------------------------------------------------------------------------


def test_layers_are_matched_by_path() -> None:
    before = run({"": NOTHING, "a": around(MS, 0), "old": around(2 * MS, 0)}, classes={"a": "GELU"})
    after = run({"": NOTHING, "new": around(3 * MS, 0), "a": around(MS, 0)}, classes={"a": "ReLU"})
    comparison = compare(before, after)
    assert [(one.path, one.status) for one in comparison.layers] == [
        ("", "matched"),
        ("new", "new"),
        ("a", "matched"),
        ("old", "removed"),
    ]
    assert comparison.layers[2].class_name == "GELU → ReLU"
    assert [(one.address, one.backward_ns) for one in comparison.new] == [("new", 3 * MS)]
    assert [(one.address, one.backward_ns) for one in comparison.removed] == [("old", 2 * MS)]
    assert layer(comparison, "new", "backward_self_ns") == Change("backward_self_ns", "ns", None, 3 * MS, None, "steps")


def test_a_renamed_layer_is_a_removed_and_a_new_one() -> None:
    one, other = ({"": NOTHING, name: around(MS, 0)} for name in ("fc", "linear"))
    comparison = compare(run(one), run(other))
    assert [found.address for found in comparison.new] == ["linear"]
    assert [found.address for found in comparison.removed] == ["fc"]


def test_new_layers_are_named_once_with_all_below_them() -> None:
    comparison = compare(report_fixtures.gpt(10), report_fixtures.gpt(12))
    (blocks,) = comparison.new
    assert (blocks.address, blocks.class_name, blocks.layers) == ("transformer.h.*", "Block", 22)
    assert blocks.paths == ("transformer.h.10", "transformer.h.11")
    rows = [row for row in comparison.after.layers if row.path.startswith(blocks.paths)]
    assert blocks.forward_ns == sum(row.forward_self_ns for row in rows)
    assert not comparison.removed


# --------------------------------------------------------------------------------------------------------------------
# Repeats
# --------------------------------------------------------------------------------------------------------------------


def blocks(*values: tuple[int, ...], **options: Any) -> RunData:
    """Blocks ``h.0`` and so on, with one layer ``fc`` each."""
    layers: dict[str, tuple[int, ...]] = {"": NOTHING, "h": NOTHING}
    for i, steps in enumerate(values):
        layers |= {f"h.{i}": NOTHING, f"h.{i}.fc": steps}
    classes = {f"h.{i}": "Block" for i in range(len(values))} | {"h": "ModuleList"}
    return run(layers, classes=classes, **options)


def test_repeats_that_change_alike_are_one_row() -> None:
    before = blocks(*[around(10 * MS, MS)] * 4)
    after = blocks(*[around(15 * MS, MS)] * 4)
    found = group(compare(before, after), "h.*.fc")
    assert found.paths == ("h.0.fc", "h.1.fc", "h.2.fc", "h.3.fc")
    assert (found.backward.before, found.backward.after, found.backward.real) == (40 * MS, 60 * MS, True)


def test_repeats_too_small_to_tell_alone_are_told_together() -> None:
    """Noise of several layers that is not shared averages out in their sum."""
    values = [10 * MS + d for d in (-MS, -MS // 2, 0, MS // 2, MS)]
    turned = [tuple(values[(i + k * 2) % 5] for i in range(5)) for k in range(5)]  # each step's sum is 50 ms
    before = blocks(*turned)
    after = blocks(*[tuple(v + MS // 2 for v in steps) for steps in turned])
    comparison = compare(before, after)
    assert layer(comparison, "h.0.fc", "backward_self_ns").real is False
    found = group(comparison, "h.*.fc").backward
    assert (found.difference, found.noise, found.basis, found.real) == (5 * MS // 2, 0, "steps", True)


def test_a_repeat_that_changes_unlike_the_others_is_apart() -> None:
    before = blocks(*[around(10 * MS, MS // 10)] * 4)
    after = blocks(*[around(10 * MS, MS // 10)] * 2, around(20 * MS, MS // 10), around(10 * MS, MS // 10))
    comparison = compare(before, after)
    assert group(comparison, "h.*.fc").paths == ("h.0.fc", "h.1.fc", "h.3.fc")
    assert group(comparison, "h.*.fc").backward.real is False
    odd = group(comparison, "h.2.fc")
    assert (odd.paths, odd.backward.difference, odd.backward.real) == (("h.2.fc",), 10 * MS, True)


def test_what_one_of_the_runs_does_not_fold_is_not_folded() -> None:
    before = blocks(*[around(10 * MS, 0)] * 3)
    after = dataclasses.replace(
        before,
        layers=[
            dataclasses.replace(row, class_name="Conv1D") if row.path == "h.1.fc" else row for row in before.layers
        ],
    )
    comparison = compare(before, after)
    folded = [found.paths for found in comparison.groups if found.address.endswith("fc")]
    assert sorted(folded) == [("h.0.fc", "h.2.fc"), ("h.1.fc",)]


def test_memory_of_repeats_is_folded_where_it_is_the_same() -> None:
    layers = [around(10 * MS, MS)] * 3
    before = blocks(*layers, saved={"h.0.fc": 100, "h.1.fc": 100, "h.2.fc": 100})
    after = blocks(*layers, saved={"h.0.fc": 150, "h.1.fc": 150, "h.2.fc": 90})
    found = {one.address: one.changes["saved_bytes"] for one in compare(before, after).memory}
    assert {name: (change.before, change.after) for name, change in found.items()} == {
        "h.*.fc": (200, 300),
        "h.2.fc": (100, 90),
    }


def test_every_matched_layer_is_in_one_group() -> None:
    for seed in range(40):
        before, after = report_fixtures.random_run(seed), report_fixtures.random_run(seed + 1)
        comparison = compare(before, after)
        grouped = [path for found in comparison.groups for path in found.paths]
        matched = {row.path for row in before.layers} & {row.path for row in after.layers}
        assert sorted(grouped) == sorted(matched)
        new, removed = ({row.path for row in run.layers} - matched for run in (after, before))
        assert sum(one.layers for one in comparison.new) == len(new)
        assert sum(one.layers for one in comparison.removed) == len(removed)


# --------------------------------------------------------------------------------------------------------------------
# A run and itself, and the other way round
# --------------------------------------------------------------------------------------------------------------------


def vary(run: RunData, seed: int) -> RunData:
    """Some layers made slower or faster, their steps scattered; everything still adds up."""
    rng = random.Random(seed)
    builder = report_fixtures.RunBuilder(file="any.py")
    left_out: set[str] = set()
    for row in run.layers:
        if row.parent in left_out or (row.parent is not None and rng.random() < 0.1):
            left_out.add(row.path)
            continue
        factor = rng.choice((1.0, 1.0, 0.5, 1.7))
        mean = int(row.backward_self_ns * factor)
        apart = int(mean * rng.choice((0.0, 0.02, 0.3)))
        builder.add(
            row.path,
            row.class_name,
            mean,
            int(row.forward_self_ns * rng.choice((1.0, 1.3))),
            recompute=row.recompute_ns,
            parent=row.parent,
            parameters=row.parameters,
            calls=row.calls,
            backward_self_steps_ns=around(mean, apart),
        )
    return builder.build(engine=rng.randrange(MS), target="any.py", model="Model")


@pytest.mark.parametrize("seed", range(25))
def test_a_run_does_not_differ_from_itself(seed: int) -> None:
    one = vary(report_fixtures.random_run(seed), seed)
    for data in (one, report_fixtures.gpt(seed % 5), report_memory_fixtures.gpt(1 + seed % 3)):
        comparison = compare(data, data)
        every = [change for found in comparison.layers for change in found.changes.values()]
        assert not any(change.difference or change.real for change in (*every, *comparison.totals))
        assert not comparison.mismatches
        assert not (comparison.new or comparison.removed or comparison.memory)
        assert not any(found.backward.real or found.forward.real for found in comparison.groups)


@pytest.mark.parametrize("seed", range(25))
def test_the_other_way_round_is_the_mirror(seed: int) -> None:
    one = report_fixtures.random_run(seed)
    before, after = vary(one, seed), vary(one, seed + 100)
    there, back = compare(before, after), compare(after, before)
    assert [_mirrored(change) for change in there.totals] == list(back.totals)
    status = {"new": "removed", "removed": "new", "matched": "matched"}
    reverse = {found.path: found for found in back.layers}
    assert len(there.layers) == len(back.layers)
    for found in there.layers:
        other = reverse[found.path]
        assert other.status == status[found.status]
        assert {name: _mirrored(change) for name, change in found.changes.items()} == dict(other.changes)
    assert (there.new, there.removed) == (back.removed, back.new)
    flat = [{(found.paths, _mirrored(found.backward), _mirrored(found.forward)) for found in there.groups}]
    assert flat == [{(found.paths, found.backward, found.forward) for found in back.groups}]


def _mirrored(change: Change) -> Change:
    return dataclasses.replace(change, before=change.after, after=change.before)


# --------------------------------------------------------------------------------------------------------------------
# What else differs
# --------------------------------------------------------------------------------------------------------------------

LAYERS = {"": NOTHING, "a": around(100 * MS, MS)}


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("device_name", "Apple M3", "machine: AMD EPYC 7B13 before, Apple M3 after"),
        ("device", "cuda", "device: cpu before, cuda after"),
        ("torch", "2.12.0", "torch: 2.13.0+cpu before, 2.12.0 after"),
        ("triton", "3.6.0", "triton: not known before, 3.6.0 after"),
        ("python", "3.11.7", "python: 3.12.4 before, 3.11.7 after"),
        ("threads", 8, "threads: 2 before, 8 after"),
        ("cpus", 8, "CPUs: not known before, 8 after"),
        ("dtype", "bfloat16", "dtype: float32 before, bfloat16 after"),
        ("deterministic", True, "deterministic algorithms: not known before, on after"),
        ("anomaly_mode", True, "anomaly mode: not known before, on after"),
        ("world_size", 4, "ranks: 1 before, 4 after"),
        ("mesh", "2 dp x 4 tp", "device mesh: none before, 2 dp x 4 tp after"),
    ],
)
def test_a_different_environment_is_named(key: str, value: object, text: str) -> None:
    other = run(LAYERS, environment={**CPU, key: value})
    assert [one.text for one in compare(run(LAYERS), other).mismatches] == [text]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"target": "other.py"}, "target: net.py before, other.py after"),
        ({"mode": "loop"}, "mode: model before, loop after"),
        ({"model": "Other"}, "model: Net before, Other after"),
        ({"parameters": 12}, "parameters: 0 before, 12 after"),
        ({"loss": None}, "loss: output before, not known after"),
        ({"warmup": 0}, "warm-up steps: 3 before, 0 after"),
    ],
)
def test_a_different_workload_is_named(changes: dict[str, Any], text: str) -> None:
    one = run(LAYERS)
    other = dataclasses.replace(one, workload=dataclasses.replace(one.workload, **changes))
    assert [found.text for found in compare(one, other).mismatches] == [text]


def test_other_counts_of_steps_are_no_mismatch() -> None:
    assert not compare(run(LAYERS), run({"": (0, 0), "a": (100 * MS, 101 * MS)})).mismatches


def test_partial_runs_and_versions_are_named() -> None:
    one = run(LAYERS)
    other = dataclasses.replace(one, partial=True, gradscope="0.0.9")
    assert [found.text for found in compare(one, other).mismatches] == [
        "the run after is partial: it ended early, after 5 measured steps",
        "gradscope: 0.1.0 before, 0.0.9 after",
    ]
    assert [found.what for found in compare(other, one).mismatches] == ["partial", "gradscope"]


def test_other_shapes_and_sizes_of_layers_are_named() -> None:
    def with_shapes(batch: int) -> RunData:
        made = run(LAYERS, parameters={"a": batch})
        shape = f"[{batch}, 64]"
        ops = [OpRow("a", "forward", name, 1.0, 0, shape) for name in ("aten::addmm", "aten::relu", "aten::mul")]
        return dataclasses.replace(made, ops=ops)

    assert [found.text for found in compare(with_shapes(8), with_shapes(16)).mismatches] == [
        "parameters: 8 before, 16 after",
        "input shapes: aten::addmm of a got [8, 64] before, [16, 64] after; 2 more operations differ",
        "parameters by layer: a has 8 before, 16 after",
    ]


def test_of_gradients_that_are_written_no_shapes_are_compared() -> None:
    """There is one for each parameter of a layer, under one name."""

    def with_shape(shape: str) -> RunData:
        return dataclasses.replace(run(LAYERS), ops=[OpRow("a", "accumulate", "AccumulateGrad", 2.0, 0, shape)])

    assert not compare(with_shape("[128]"), with_shape("[128, 64]")).mismatches


def test_of_operations_that_one_run_has_more_of_no_shapes_are_compared() -> None:
    """What is compiled has none, and the shape in a table is the most frequent one."""

    def with_shape(shape: str, calls: float) -> RunData:
        return dataclasses.replace(run(LAYERS), ops=[OpRow(None, "forward", "aten::to", calls, 0, shape)])

    assert not compare(with_shape("[4, 32, 500]", 3), with_shape("[4, 32]", 1)).mismatches


@pytest.mark.parametrize("both", [True, False])
def test_calls_are_compared_of_runs_that_are_both_compiled_or_not(both: bool) -> None:
    """Inside of a graph no module is called."""
    region = [OpRow("", "forward", "Torch-Compiled Region: 0/0", 1, 0)]
    one = dataclasses.replace(run(LAYERS), ops=region if both else [])
    other = [row if row.parent is None else dataclasses.replace(row, calls=0) for row in one.layers]
    found = compare(one, dataclasses.replace(one, layers=other, ops=region)).mismatches
    assert [each.what for each in found] == ["calls a step by layer"] * both
    other = [dataclasses.replace(row, calls=5 if row.parent is None else 0) for row in one.layers]
    (found_too,) = compare(one, dataclasses.replace(one, layers=other, ops=region)).mismatches
    assert found_too.text.startswith("calls a step by layer: the root has 1 before, 5 after")


def test_graphs_that_are_a_row_each_are_said_to_be_no_layers() -> None:
    """Those of another backend than Inductor's."""
    region = [OpRow("", "forward", "Torch-Compiled Region: 0/0", 1, 0)]
    eager = run(LAYERS)
    whole = dataclasses.replace(eager, ops=region)
    (told,) = [note for note in compare(eager, whole).notes if "a row each" in note]
    assert told.startswith("the graphs of the run after are") and told.endswith("cannot be compared")
    assert not [note for note in compare(whole, whole).notes if "a row each" in note]
    split = [dataclasses.replace(row, estimated_ns=0) for row in eager.layers]  # no kernel is of several
    inductors = dataclasses.replace(whole, layers=split)
    assert not [note for note in compare(eager, inductors).notes if "a row each" in note]


def test_other_counts_of_calls_are_named() -> None:
    one = run(LAYERS)
    rows = [dataclasses.replace(row, calls=2.5) for row in one.layers]
    text = "calls a step by layer: the root has 1 before, 2.5 after; 1 more layer differs"
    assert [found.text for found in compare(one, dataclasses.replace(one, layers=rows)).mismatches] == [text]


# --------------------------------------------------------------------------------------------------------------------
# gradscope.diff
# --------------------------------------------------------------------------------------------------------------------


def test_what_can_be_compared(tmp_path: Any) -> None:
    data = run(LAYERS)
    path = Report(data).save(tmp_path / "run.json")
    assert gradscope.diff(data, Report(data)).data.names == ("before", "after")
    assert gradscope.diff(str(path), path).data.names == (str(path), str(path))
    assert gradscope.diff(gradscope.load_report(path), data).data.names == (str(path), "after")
    with pytest.raises(UsageError) as wrong:
        gradscope.diff(data, 3)  # type: ignore[arg-type]
    assert str(wrong.value) == "after: a value of type int is not a run.\nGive a Report, or the path of a RUN.json."
    with pytest.raises(RunFileError):
        gradscope.diff(tmp_path / "none.json", data)
