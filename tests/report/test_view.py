"""The view model: folding, choosing, and that nothing is lost on the way."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from gradscope.errors import UsageError
from gradscope.report.fold import FoldedNode, build_tree
from gradscope.report.header import head_rows, partial_text, subject
from gradscope.report.nextsteps import next_steps
from gradscope.report.tree import SHORT_LAYERS, Sort
from gradscope.report.view import LEDGER_WORDS, View, ViewOptions, build_view
from gradscope.tables import ConservationError, Ledger, RunData, Spread, is_unreliable
from tests import report_fixtures as fixtures

OPTIONS = (
    ViewOptions(),
    ViewOptions(min_percent=0),
    ViewOptions(min_percent=100),
    ViewOptions(depth=0),
    ViewOptions(depth=1, sort="ratio"),
    ViewOptions(top=3, sort="forward"),
    ViewOptions(top=1, min_percent=5, depth=2),
    ViewOptions(sort="memory"),
)


def tree_of(run: RunData) -> list[FoldedNode]:
    return build_tree(run.layers, run.step.backward_ns, run.workload.model)


def names(view: View) -> list[str]:
    return [f"{'  ' * row.level}{row.node.name}" for row in view.tree.rows]


def builder_of(*layers: tuple[str, str, int]) -> fixtures.RunBuilder:
    builder = fixtures.RunBuilder()
    for path, class_name, backward in layers:
        container = class_name == "ModuleList"
        builder.add(path, class_name, backward, 0 if container else 10, calls=0.0 if container else 1.0)
    return builder


# -- conservation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(150))
def test_shown_and_hidden_rows_add_up_to_the_whole(seed: int) -> None:
    run = fixtures.random_run(seed)
    for options in OPTIONS:
        tree = build_view(run, options).tree
        own = [row.node.own for row in tree.rows] + [hidden.own for hidden in tree.hidden]
        assert sum(part.backward_self_ns for part in own) == run.ledger.layers_ns
        assert sum(part.recompute_ns for part in own) == run.ledger.recompute_ns
        assert sum(part.accumulate_ns for part in own) == run.ledger.accumulate_ns
        assert sum(part.gradient_sum_ns for part in own) == run.ledger.gradient_sum_ns
        assert sum(part.forward_ns for part in own) == sum(row.forward_self_ns for row in run.layers)
        if tree.metric == "backward":
            assert sum(part.backward_ns for part in own) + tree.rest == run.step.backward_ns


@pytest.mark.parametrize("seed", range(60))
def test_totals_are_those_of_the_rows(seed: int) -> None:
    run = fixtures.random_run(seed)
    rows = {row.path: row for row in run.layers}
    for root in tree_of(run):
        for node in root.walk():
            assert node.total.backward_ns == sum(rows[path].backward_total_ns for path in node.paths)
            assert node.total.forward_ns == sum(rows[path].forward_total_ns for path in node.paths)
            assert node.calls == pytest.approx(sum(rows[path].calls for path in node.paths))


@pytest.mark.parametrize("seed", range(60))
def test_lines_and_ledger_add_up(seed: int) -> None:
    run = fixtures.random_run(seed)
    for count in (0, 1, 3, 100):
        view = build_view(run, ViewOptions(lines=count))
        group = view.lines
        shown = sum(line.backward_ns for line in group.rows)
        assert shown + group.more_ns + group.without_ns == run.step.backward_ns
        assert sum(part.ns for part in view.ledger) == run.ledger.backward_ns
        if run.step.backward_ns:
            assert sum(round(10 * float(part.percent.removesuffix(" %"))) for part in view.ledger) == 1000


def test_a_view_that_loses_time_is_refused() -> None:
    run = fixtures.mlp()
    row = dataclasses.replace(run.layers[1], path="0", parent="0")  # its own parent: in no tree
    twice = (*run.layers, dataclasses.replace(row, backward_self_ns=0, accumulate_ns=0, forward_self_ns=0))
    with pytest.raises(ConservationError, match=r"shown and hidden layers: \d+ != \d+ ns of backward"):
        build_view(dataclasses.replace(run, layers=twice))


# -- folding -----------------------------------------------------------------------------------------------------------


def test_repeated_blocks_fold_and_sum() -> None:
    run = fixtures.gpt()
    view = build_view(run)
    assert names(view)[:4] == ["GPT", "  transformer", "    h.0-h.11 ×12", "      attn"]
    blocks = view.tree.rows[2].node
    assert blocks.class_name == "Block"
    assert blocks.address == "transformer.h.*"
    assert blocks.calls == 12
    assert blocks.own.layers == 12
    attention = next(row.node for row in view.tree.rows if row.node.label == "attn")
    assert attention.repeats == 1  # it is one in each block; the block says twelve
    expected = sum(row.backward_self_ns for row in run.layers if row.class_name == "Attention")
    assert attention.own.backward_self_ns == expected


def test_leaves_are_never_folded() -> None:
    run = builder_of(("", "M", 1), ("ln_1", "LayerNorm", 5), ("ln_2", "LayerNorm", 5), ("ln_3", "LayerNorm", 5))
    assert names(build_view(run.build())) == ["M", "  ln_1", "  ln_2", "  ln_3"]


def test_blocks_of_another_width_class_or_content_stay_apart() -> None:
    builder = builder_of(("", "M", 1), ("s", "Sequential", 1))
    for i, (class_name, parameters, child) in enumerate(
        (("A", 10, "x"), ("A", 10, "x"), ("A", 20, "x"), ("B", 10, "x"), ("A", 10, "y"))
    ):
        builder.add(f"s.{i}", class_name, 100)
        builder.add(f"s.{i}.{child}", "Linear", 100, parameters=parameters)
    shown = names(build_view(builder.build(), ViewOptions(sort="forward", min_percent=0)))
    folded = [name.strip() for name in shown if name.strip().startswith("s.")]
    assert folded == ["s.0-s.1 ×2", "s.2", "s.3", "s.4"]


def test_alternating_blocks_name_their_numbers() -> None:
    builder = builder_of(("", "M", 1), ("h", "ModuleList", 0))
    for i in range(8):
        builder.add(f"h.{i}", "A" if i in (0, 1, 5) else "B", 100)
        builder.add(f"h.{i}.x", "Linear", 100)
    nodes = [node for root in tree_of(builder.build()) for node in root.walk() if node.repeats > 1]
    assert [(node.label, node.address, node.repeats) for node in nodes] == [
        ("h.0-1,5", "h.0-1,5", 3),
        ("h.2-4,6-7", "h.2-4,6-7", 5),
    ]


def test_numbers_behind_a_name_fold_too() -> None:
    builder = builder_of(("", "M", 1))
    for i in (1, 2, 3):
        builder.add(f"block{i}", "Block", 100)
        builder.add(f"block{i}.fc", "Linear", 100)
    assert names(build_view(builder.build())) == ["M", "  block1-block3 ×3", "    fc"]


def test_folds_inside_folds() -> None:
    builder = builder_of(("", "M", 1), ("h", "ModuleList", 0))
    for i in range(3):
        builder.add(f"h.{i}", "Block", 10)
        builder.add(f"h.{i}.e", "ModuleList", calls=0.0)
        for k in range(4):
            builder.add(f"h.{i}.e.{k}", "Expert", 10)
            builder.add(f"h.{i}.e.{k}.w", "Linear", 10)
    view = build_view(builder.build())
    assert names(view) == ["M", "  h.0-h.2 ×3", "    e.0-e.3 ×4", "      w"]
    assert view.tree.rows[3].node.own.layers == 12
    assert view.tree.rows[3].node.address == "h.*.e.*.w"


def test_a_container_is_shown_only_where_it_holds_several_rows() -> None:
    builder = builder_of(("", "M", 1), ("a", "ModuleList", 0), ("a.0", "Linear", 9), ("b", "ModuleList", 0))
    builder.add("b.0", "Linear", 5)
    builder.add("b.1", "ReLU", 4)
    assert names(build_view(builder.build())) == ["M", "  a.0", "  b", "    b.0", "    b.1"]


def test_several_roots() -> None:
    assert names(build_view(fixtures.gan())) == ["generator", "  up", "  act", "discriminator", "  up", "  act"]


def test_a_parent_without_a_row_is_refused() -> None:
    builder = builder_of(("", "M", 1))
    builder.add("gone.x", "Linear", 5, parent="gone")
    with pytest.raises(ConservationError, match="the roots' backward_total_ns: 1 != 6 ns"):
        builder.build()


def test_an_outlier_is_named_once_where_it_is_narrowed_down_most() -> None:
    said = [(row.node.label, row.outlier) for row in build_view(fixtures.gpt(slow_block=7)).tree.rows if row.outlier]
    assert said == [("attn", "transformer.h.7.attn takes ×1.69 the backward time of its siblings")]
    assert not any(row.outlier for row in build_view(fixtures.gpt()).tree.rows)


def test_times_that_support_no_alarm_make_no_outlier() -> None:
    run = fixtures.gpt(slow_block=7)
    for step in (
        replace(run.step, waited_ns=run.step.wall_ns // 5),
        replace(run.step, spread={"wall": Spread(0, 0, 0, run.step.wall_ns // 3)}),
    ):
        assert is_unreliable(step)
        assert not any(row.outlier for row in build_view(replace(run, step=step)).tree.rows)


def test_one_slow_step_makes_no_outlier() -> None:
    builder = builder_of(("", "M", 1), ("h", "ModuleList", 0))
    for i in range(4):
        steps = (100, 100, 100, 100, 600) if i == 2 else (100, 100, 100, 100, 100)
        builder.add(f"h.{i}", "Block", sum(steps) // 5, backward_self_steps_ns=steps)
        builder.add(f"h.{i}.fc", "Linear", 1, backward_self_steps_ns=(1, 1, 1, 1, 1))
    assert not any(row.outlier for row in build_view(builder.build()).tree.rows)


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_what_is_hidden_is_said() -> None:
    run = fixtures.gpt()
    (hidden,) = build_view(run, ViewOptions(full=True)).tree.hidden
    assert hidden.text == "… 16 layers under 1 %"
    small = {"transformer.wte", "transformer.wpe", "transformer.drop", "transformer.ln_f"}
    small |= {f"transformer.h.{i}.attn.drop" for i in range(12)}
    rows = [row for row in run.layers if row.path in small]
    assert hidden.own.backward_ns == sum(row.backward_total_ns for row in rows)
    texts = [h.text for h in build_view(run, ViewOptions(depth=1, top=1)).tree.hidden]
    assert texts == ["… 2 layers below the top 1", "… 136 layers deeper than level 1"]


def test_depth() -> None:
    assert names(build_view(fixtures.gpt(), ViewOptions(depth=0))) == ["GPT"]
    assert names(build_view(fixtures.gpt(), ViewOptions(depth=1))) == ["GPT", "  transformer", "  lm_head"]


def test_top_keeps_the_layers_above() -> None:
    shown = names(build_view(fixtures.gpt(), ViewOptions(top=1)))
    assert shown == ["GPT", "  transformer", "    h.0-h.11 ×12", "      attn"]


@pytest.mark.parametrize("sort", ["backward", "forward", "ratio"])
def test_siblings_are_sorted(sort: Sort) -> None:
    run = fixtures.gpt()
    rows = build_view(run, ViewOptions(sort=sort, min_percent=0)).tree.rows
    children: dict[tuple[int, str], list[float]] = {}
    above: list[str] = []
    for row in rows:
        above = [*above[: row.level], row.node.address]
        total = row.node.total
        value = {"backward": total.backward_ns, "forward": total.forward_ns, "ratio": total.ratio or 0.0}[sort]
        children.setdefault((row.level, ".".join(above[: row.level])), []).append(value)
    assert sum(len(values) > 1 for values in children.values()) >= 4
    assert all(values == sorted(values, reverse=True) for values in children.values())


def test_memory_sorts_and_shares_by_what_is_saved() -> None:
    builder = fixtures.RunBuilder()
    builder.add("", "M", 10, 10, saved_bytes=0)
    builder.add("a", "Linear", 900, 10, saved_bytes=1_000)
    builder.add("b", "Linear", 100, 10, saved_bytes=3_000)
    tree = build_view(builder.build(), ViewOptions(sort="memory")).tree
    assert [(row.node.label, row.share) for row in tree.rows] == [("M", 1.0), ("b", 0.75), ("a", 0.25)]
    assert tree.whole == 4_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sort": "size"}, "sort must be one of backward, forward, ratio, memory; got 'size'."),
        ({"depth": -1}, "depth must be 0 or more; got -1."),
        ({"top": 0}, "top must be 1 or more; got 0."),
        ({"min_percent": 101}, "min_percent must be between 0 and 100; got 101."),
        ({"lines": -2}, "lines must be 0 or more; got -2."),
        (
            {"show": ("ops", "op")},
            "no section 'op' to show; there are findings, layers, lines, ops, kernels, ledger, device, "
            "buckets, memory, saved, retained, held, copies.",
        ),
    ],
)
def test_options_without_a_meaning(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        ViewOptions(**options)  # type: ignore[arg-type]
    assert str(caught.value) == message


# -- the other sections ------------------------------------------------------------------------------------------------


def test_operations_of_the_costliest_layers() -> None:
    run = fixtures.gpt(recompute=True)
    first = build_view(run).ops[0]
    assert first.address == "transformer.h.*.attn"
    assert [op.name for op in first.ops] == [
        *("BmmBackward0", "aten::addmm (recompute)", "SoftmaxBackward0", "MaskedFillBackward0")
    ]
    bmm = sum(op.self_ns for op in run.ops if op.name == "BmmBackward0")
    assert (first.ops[0].ns, first.ops[0].calls) == (bmm, 12)
    assert sum(op.ns for op in first.ops) + first.more_ns == first.ns


def test_the_ledger_leaves_out_zeros_but_never_the_unattributed() -> None:
    parts = [part.name for part in build_view(fixtures.gpt()).ledger]
    assert parts == ["layers", "fan-out sums", "autograd overhead", "accumulate", "unattributed"]
    every = {field.name for field in dataclasses.fields(Ledger)} - {"backward_ns"}
    assert every == set(Ledger.PARTS) == set(LEDGER_WORDS)


def test_the_head_says_how_it_was_measured() -> None:
    run = fixtures.mlp()
    assert subject(run) == "mlp.py · Sequential, 4810 parameters"
    head = dict(head_rows(run, full=True))
    assert head["measured"] == (
        "5 steps after 3 warm-up · 418 µs to 439 µs, ±1.4 % · overhead ×1.03 (unprofiled step 414 µs)"
    )
    assert head["step"] == (
        "426 µs = forward 93.4 µs (22 %) + backward 228 µs (53 %, ×2.44 forward) + optimizer 90.0 µs (21 %) + "
        "other 15.0 µs (4 %)"
    )
    wall = dataclasses.replace(run.step.spread["wall"], std_ns=80_000)
    unsteady = dataclasses.replace(run, step=dataclasses.replace(run.step, spread={"wall": wall}))
    for full, name in ((True, "measured"), (False, "run")):
        assert "±18.8 % (unsteady: is the machine idle?)" in dict(head_rows(unsteady, full=full))[name]
        assert dict(head_rows(fixtures.mlp(overhead=None), full=full))[name].endswith("overhead not measured")
    partial = fixtures.mlp(partial=True)
    assert partial_text(partial).startswith("PARTIAL: the run ended early; ")
    interrupted = dataclasses.replace(partial, workload=dataclasses.replace(partial.workload, steps_left_out=3))
    assert partial_text(interrupted).startswith("PARTIAL: other work interrupted the other steps; ")
    for count, who in ((3, "torch.compile"), (1, "other work and torch.compile")):
        compiling = dataclasses.replace(interrupted.workload, steps_compiling=count)
        assert partial_text(dataclasses.replace(interrupted, workload=compiling)).startswith(f"PARTIAL: {who} interr")
    for asked, why in ((20, "the run ended early"), (8, "other work interr"), (5, "the run ended early")):
        steps = dataclasses.replace(interrupted.workload, steps_asked=asked)  # 5 count, 3 do not
        assert partial_text(dataclasses.replace(interrupted, workload=steps)).startswith(f"PARTIAL: {why}")


def test_in_short_the_head_takes_a_row_for_the_run() -> None:
    head = head_rows(fixtures.mlp(), full=False)
    assert [name for name, _ in head] == ["run", "step"]
    assert head[0][1].endswith("torch 2.13.0+cpu · float32 · 5 steps ±1.4 % · overhead ×1.03")


def test_in_short_the_costliest_layers_are_shown_and_all_are_counted() -> None:
    run = fixtures.many_modules(300)
    short = build_view(run, ViewOptions()).tree
    assert len(short.rows) == SHORT_LAYERS
    kept = sorted((row.share for row in build_view(run, ViewOptions(full=True, min_percent=0)).tree.rows), reverse=True)
    assert sorted((row.share for row in short.rows), reverse=True) == kept[:SHORT_LAYERS]
    for chosen in ({"depth": 3}, {"top": 40}, {"min_percent": 0.5}, {"full": True}, {"show": ("layers",)}):
        assert ViewOptions(**chosen).most_rows is None  # type: ignore[arg-type]


def test_next_steps_are_commands_for_this_file() -> None:
    run, path = fixtures.gpt(findings=fixtures.findings()), "my runs/gpt.json"
    tree = build_view(run).tree
    assert [step.command for step in next_steps(run, tree, path, full=False)] == [
        "gradscope fix examples/gpt.py",
        "gradscope show 'my runs/gpt.json' --full",
    ]
    assert [step.command for step in next_steps(run, tree, path, full=True)] == [
        "gradscope fix examples/gpt.py",
        "gradscope show 'my runs/gpt.json' --full --min-percent 0",
        "gradscope show 'my runs/gpt.json' --format speedscope > 'my runs/gpt.speedscope.json'",
    ]
    assert next_steps(fixtures.gpt(), tree, None, full=False) == ()


def test_a_run_of_nothing() -> None:
    builder = fixtures.RunBuilder()
    builder.add("", "M", 0, 0)
    view = build_view(builder.build())
    assert [row.share for row in view.tree.rows] == [0.0]
    assert view.lines.rows == ()
    empty = build_view(fixtures.RunBuilder().build())
    assert empty.tree.rows == ()


@pytest.mark.parametrize("run", [fixtures.gpt(48), fixtures.many_modules(5_000)], ids=["gpt 48", "5,000 modules"])
def test_large_models_are_viewed_fast(run: RunData) -> None:
    build_view(run)
    build_view(run, ViewOptions(min_percent=0))
