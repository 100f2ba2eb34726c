"""Memory in the report: its words, its tables, the course over a step, and what all of it looks like."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from gradscope.document.chart import chart_lines, highest
from gradscope.document.glyphs import for_encoding
from gradscope.document.parts import Chart, Document
from gradscope.document.terminal import make_console, print_document, to_text
from gradscope.report import Report
from gradscope.report.document import profile_document
from gradscope.report.header import head_rows
from gradscope.report.memory import OUTSIDE, Holder, KeptTensors, Largest, MemoryView
from gradscope.report.memorysections import memory_sections
from gradscope.report.memorywords import allocator_words, outside_words, peak_place, peak_words, tensor_words
from gradscope.report.nextsteps import next_steps
from gradscope.report.tree import Sort
from gradscope.report.view import ViewOptions, build_view
from gradscope.tables import HolderRow, MemoryInfo, PhaseSpan, RunData, TimelinePoint
from tests import report_fixtures as fixtures
from tests import report_memory_fixtures as memory_fixtures

EXPECTED = Path(__file__).parents[1] / "data" / "report"
GPT = memory_fixtures.gpt(leak=True, cuda=True)
MLP = memory_fixtures.mlp()
RUNS = {"gpt": GPT, "two blocks": memory_fixtures.gpt(2), "mlp": MLP}
OPTIONS = ({}, {"top": 1}, {"top": 100, "min_percent": 0.0}, {"min_percent": 20.0}, {"min_percent": 100.0})


def full_document(run: RunData, options: ViewOptions | None = None) -> Document:
    return profile_document(run, options or ViewOptions(full=True))


def memory_of(run: RunData, **options: Any) -> MemoryView:
    view = build_view(run, ViewOptions(**options)).memory
    assert view is not None
    return view


def info_of(run: RunData, **changes: Any) -> MemoryInfo:
    assert run.memory is not None
    return dataclasses.replace(run.memory, **changes)


def changed(run: RunData, **changes: Any) -> RunData:
    return dataclasses.replace(run, memory=info_of(run, **changes))


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (("SoftmaxBackward0", "output", "8x12x1024x1024", "float32"), "softmax output 8x12x1024x1024 float32"),
        (("LogSoftmaxBackward0", "result", "32x10", "float32"), "log softmax output 32x10 float32"),
        (("GeluBackward0", "self", "8x64", "bfloat16"), "gelu input 8x64 bfloat16"),
        (("BmmBackward0", "mat2", "96x64x64", "float16"), "bmm mat2 96x64x64 float16"),
        (("NativeLayerNormBackward0", "result1", "8x1", "float32"), "native layer norm result1 8x1 float32"),
        (("NllLossBackward0", "total_weight", "scalar", "float32"), "nll loss total_weight scalar float32"),
        (("ScaledDotProductFlashAttentionForCpuBackward0", "query", "1x2", "half"), ""),
        (("ConvolutionBackward12", "input", "", ""), "convolution input"),
        (("MyFlashAttentionBackward", "saved tensor", "4", "int64"), "MyFlashAttention saved tensor 4 int64"),
        (("MyFn", "ctx.mask", "4", "bool"), "MyFn ctx.mask 4 bool"),
    ],
)
def test_what_a_saved_tensor_is_called(row: tuple[str, str, str, str], words: str) -> None:
    assert tensor_words(*row) == (words or "scaled dot product flash attention for cpu query 1x2 half")


def test_when_and_where_the_peak_was() -> None:
    info = info_of(MLP)
    assert peak_words(info, "Net") == "64.3 kB in backward, at 210 µs of 400 µs, while 0 ran AddmmBackward0"
    assert peak_place(info, "Net") == "in backward (0)"
    root = info_of(MLP, peak_layer="", peak_phase="recompute", peak_op="")
    assert peak_words(root, "Net") == "64.3 kB in recompute, at 210 µs of 400 µs, while Net ran"
    assert peak_words(root, "").endswith("while the model ran")
    assert peak_place(root, "Net") == "in recompute (Net)"
    nobody = info_of(MLP, peak_layer=None, peak_phase="optimizer", peak_op="aten::_foreach_add_")
    assert peak_words(nobody, "Net").endswith("in the optimizer, at 210 µs of 400 µs, while aten::_foreach_add_ ran")
    assert peak_place(nobody, "Net") == "in the optimizer"
    phases = (*info.phases, PhaseSpan("other", 400_000, 10**6))
    between = info_of(MLP, peak_layer=None, peak_phase="other", peak_op="", phases=phases)
    assert peak_words(between, "Net").endswith("outside forward, backward and optimizer, at 210 µs of 1.00 ms")


def test_what_the_device_holds_beyond_tensors() -> None:
    assert allocator_words(info_of(MLP)) == outside_words(info_of(MLP)) == ""
    info = info_of(MLP, allocated_bytes=64_340, reserved_bytes=2_097_152, outside_allocator_bytes=600_000_000)
    assert allocator_words(info) == (
        "allocated 64.3 kB · reserved 2.10 MB, 2.03 MB of it unused (cached or fragmented) · "
        "outside the allocator 600 MB"
    )
    assert outside_words(info) == (
        "nvidia-smi shows about 602 MB: it counts all that torch has reserved, in use or not, and also the CUDA "
        "context, libraries such as NCCL, and other processes."
    )
    apart = dataclasses.replace(info, allocated_bytes=66_000, reserved_bytes=66_000, outside_allocator_bytes=None)
    assert allocator_words(apart) == "allocated 66.0 kB (64.3 kB traced) · reserved 66.0 kB"
    assert outside_words(apart).startswith("nvidia-smi shows more: it counts")


# -- tables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_tables_add_up_to_what_was_measured(run: RunData, options: dict[str, Any]) -> None:
    memory, info = memory_of(run, **options), info_of(run)
    tables: list[tuple[int, Largest[Any]]] = [(info.peak_bytes, memory.holders), (info.saved_bytes, memory.saved)]
    some = (
        (info.copied_bytes, memory.copies),
        (info.held_bytes, memory.held),
        (info.retained_after_step_bytes, memory.retained),
    )
    tables += [(whole, table) for whole, table in some if table.whole]
    for whole, table in tables:
        assert table.whole == whole
        assert sum(row.bytes for row in table.rows) + table.more_bytes == whole
        assert (table.more == 0) == (table.more_bytes == 0)
        assert sum(round(10 * float(text.removesuffix(" %"))) for text in table.percents) == 1000
    assert sum(size for _, size in memory.categories) == info.peak_bytes


def test_owners_are_folded_as_the_layers_are() -> None:
    memory = memory_of(GPT, top=1_000, min_percent=0.0)
    softmax = 8 * 12 * 1024 * 1024 * 4
    first = memory.saved.rows[0]
    assert first == KeptTensors(
        what="softmax output 8x12x1024x1024 float32",
        bytes=12 * softmax,
        count=12,
        layer="transformer.h.*.attn",
        line="examples/gpt.py:60",
    )
    assert first.each == softmax == 402_653_184
    rows = [row for row in info_of(GPT).at_peak if row.owner and row.owner.endswith(".attn")]
    kept = sum(row.bytes for row in rows if row.category == "saved activations")
    assert Holder("transformer.h.*.attn", "saved activations", kept) == memory.holders.rows[0]
    # q, k, v; the mask; softmax's output, twice: by softmax and, dropped out, by the product
    assert kept == 12 * (3 * 8 * 1024 * 768 * 4 + 1024 * 1024 + 2 * softmax)
    assert [(row.owner, row.bytes) for row in memory.holders.rows if row.category == "inputs"] == [(OUTSIDE, 131_072)]
    assert [(copy.op, copy.calls, copy.bytes) for copy in memory.copies.rows] == [
        ("SplitBackward0", 12, 12 * 3 * 25_165_824),
        ("aten::matmul", 24, 12 * 2 * 25_165_824),
        ("aten::contiguous", 12, 12 * 25_165_824),
        ("aten::clone", 1, 8_192),
    ]


def test_top_and_min_percent_choose_rows() -> None:
    assert len(memory_of(GPT).holders.rows) == 6
    assert len(memory_of(GPT, top=2).holders.rows) == len(memory_of(GPT, top=2).saved.rows) == 2
    shown = memory_of(GPT, top=100, min_percent=7).holders
    assert [round(100 * shown.share(row.bytes), 1) for row in shown.rows] == [47.2, 7.4, 7.4, 7.4]
    assert (shown.more, memory_of(GPT, top=100, min_percent=0).holders.more) == (32, 0)


def test_sizes_that_differ_have_no_size_each() -> None:
    assert KeptTensors("a", 9, 2, "", "").each is None
    assert KeptTensors("a", 8, 2, "", "").each == 4
    assert KeptTensors("a", 8, 1, "", "").each is None


def test_what_is_not_worth_saying_is_left_out_but_for_leaks() -> None:
    small = memory_of(memory_fixtures.gpt(memory={"held": (), "held_bytes": 0}), min_percent=10)
    assert (small.held.rows, small.retained.rows, small.copies.rows, small.copies.more) == ((), (), (), 0)
    assert memory_of(memory_fixtures.gpt(), min_percent=5).copies.rows
    retained = memory_of(GPT, min_percent=100).retained
    assert [(row.what, row.bytes, row.count, row.leaks) for row in retained.rows] == [
        ("aten::add, forward", 12 * 25_165_824, 12, True)
    ]
    assert memory_of(GPT, min_percent=100).leaked_bytes == 301_989_888
    assert [row.leaks for row in memory_of(GPT).retained.rows] == [True, False]  # the leak first, though it is smaller
    quiet = tuple(dataclasses.replace(row, grows=False) for row in info_of(GPT).retained)
    assert memory_of(changed(GPT, retained=quiet), min_percent=20).retained.rows == ()


def test_the_header_has_the_peak_and_the_leak() -> None:
    assert dict(head_rows(MLP, full=False))["memory"] == "peak 64.3 kB in backward (0) · saved for backward 9.48 kB"
    assert dict(head_rows(GPT, full=False))["memory"] == (
        "peak 22.4 GB in backward (GPT) · saved for backward 17.6 GB · LEAK: 302 MB more with every step"
    )
    assert "memory" not in dict(head_rows(fixtures.mlp(), full=False))


def test_what_several_passes_save_is_said_to_be_a_sum() -> None:
    """Beside a peak that holds one pass's: the sum may be far above it."""
    run = changed(MLP, backward_passes=6)
    summed = "9.48 kB, summed over 6 backward passes"
    header = dict(head_rows(run, full=False))["memory"]
    assert header == f"peak 64.3 kB in backward (0) · saved for backward {summed}"
    assert f"Saved for backward  {summed}; each storage once" in memory_text(run, 140)
    assert f"{summed}; each storage once" in Report(run).to_markdown(full=True)
    for passes in (None, 1):
        assert "backward passes" not in dict(head_rows(changed(MLP, backward_passes=passes), full=False))["memory"]


# -- columns of the other tables ---------------------------------------------------------------------------------------


def section(text: str, title: str) -> list[str]:
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
    body = lines[start + 1 : end]
    while body and body[0].startswith(" " * (len(title) + 2)):  # what it is about, in a second line
        body.pop(0)
    return body


def test_layers_have_a_column_for_what_they_save() -> None:
    rows = section(to_text(full_document(MLP), 100), "Layers")
    assert [row.split()[-3:-1] for row in rows[:5]] == [
        *(["bwd:fwd", "saved"], ["8.19", "kB"], ["0", "B"], ["0", "B"], ["8.19", "kB"])
    ]
    heads = {width: section(to_text(full_document(GPT), width), "Layers")[0].split() for width in (60, 80, 140)}
    assert heads[60] == ["layer", "bwd", "s", "share", "fwd", "s", "saved"]
    assert heads[80] == ["layer", "bwd", "s", "share", "fwd", "s", "bwd:fwd", "saved"]
    assert heads[140][-2:] == ["saved", "calls"]
    assert "saved" not in section(to_text(full_document(fixtures.gpt()), 140), "Layers")[0]


def test_lines_have_it_too_and_add_up() -> None:
    rows = section(to_text(profile_document(GPT, ViewOptions(full=True, lines=3)), 100), "Source lines")
    assert [re.findall(r"[\d.]+ [kMG]?B", row) for row in rows[1:]] == [
        *(["302 MB"], ["604 MB"], ["6.34 GB"], ["9.59 GB"], ["731 MB"])
    ]
    group = build_view(GPT, ViewOptions(lines=3)).lines
    shown = sum(row.saved_bytes or 0 for row in group.rows)
    assert shown + group.more_saved_bytes + group.without_saved_bytes == info_of(GPT).saved_bytes
    assert "saved" not in section(to_text(full_document(fixtures.gpt()), 140), "Source lines")[0]


def test_a_line_that_only_saves_is_counted() -> None:
    idle = dataclasses.replace(MLP.lines[0], line=14, backward_ns=0, saved_bytes=8_192)
    group = build_view(dataclasses.replace(MLP, lines=(*MLP.lines, idle))).lines
    assert (group.more, group.more_ns, group.more_saved_bytes, group.without_saved_bytes) == (1, 0, 8_192, 1_284)


def test_sorting_by_memory_makes_shares_of_what_is_saved() -> None:
    tree = build_view(MLP, ViewOptions(sort="memory")).tree
    assert [(row.node.label, row.node.total.saved_bytes) for row in tree.rows] == [("Sequential", 8_192), ("1", 8_192)]
    assert (tree.whole, tree.rest) == (9_476, 1_284)
    rows = section(to_text(profile_document(MLP, ViewOptions(full=True, sort="memory", min_percent=0)), 140), "Layers")
    assert rows[0].split() == [
        *(
            "layer",
            "class",
            "saved",
            "share",
            "saved",
            "self",
            "fwd",
            "alloc",
            "bwd",
            "alloc",
            "allocs",
            "copied",
            "bwd",
        ),
        *("µs", "calls"),
    ]
    assert rows[-1].split()[:6] == ["outside", "the", "layers", "1.28", "kB", "13.6"]
    text = to_text(profile_document(GPT, ViewOptions(full=True, sort="memory")), 100)
    assert text.index("Layers ") < text.index("Memory at peak, by owner") < text.index("Source lines")
    text = to_text(full_document(GPT), 100)
    assert text.index("Source lines") < text.index("Backward breakdown") < text.index("Memory at peak, by owner")


def test_sorting_by_memory_that_was_not_measured_says_so() -> None:
    view = build_view(fixtures.mlp(notes=("first",)), ViewOptions(sort="memory"))
    assert view.tree.metric == "backward"
    assert view.notes == ("first", "memory was not measured: the layers are sorted by backward instead")


def test_the_next_step_is_the_other_order() -> None:
    def commands(run: RunData, sort: Sort = "backward") -> list[str]:
        tree = build_view(run, ViewOptions(sort=sort)).tree
        return [step.command for step in next_steps(run, tree, "run.json", full=True)]

    assert "gradscope show run.json --sort memory" in commands(MLP)
    assert "gradscope show run.json --sort memory" not in commands(MLP, "memory")
    assert "gradscope show run.json --sort memory" not in commands(fixtures.mlp())


# -- the course over the step ------------------------------------------------------------------------------------------


def course(*pairs: tuple[int, int]) -> tuple[TimelinePoint, ...]:
    return tuple(TimelinePoint(ns, size) for ns, size in pairs)


def points(*pairs: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return pairs


def test_each_column_shows_its_highest_moment() -> None:
    course = points((0, 4), (25, 9), (26, 5), (70, 2), (99, 3))
    assert highest(course, 100, 10) == [4, 4, 9, 5, 5, 5, 5, 2, 2, 3]
    assert highest(course, 100, 4) == [4, 9, 5, 3]
    assert highest(points((50, 7)), 100, 4) == [7, 7, 7, 7]
    assert highest(points((0, 1), (100, 8)), 100, 4) == [1, 1, 1, 8]  # the very end is in the last column


def graph(info: MemoryInfo, width: int, encoding: str = "utf-8") -> list[str]:
    run = dataclasses.replace(MLP, memory=dataclasses.replace(info, categories=None))
    sections = memory_sections(build_view(run))
    (chart,) = [block for section in sections for block in section.blocks if isinstance(block, Chart)]
    return ["".join(text for text, _ in line) for line in chart_lines(chart, width, for_encoding(encoding))]


def test_graph_ruler_and_mark() -> None:
    # 40 columns of 10 µs; 64,340 bytes are 16 steps of 4,021, or 6 steps of 10,723 in ASCII
    assert graph(info_of(MLP), 48) == [
        "64.3 kB     ▁▁▁▄▄▄▄▄▄▄▄▄▄▄▄▄▄█████▄▄▄▄▄▄▄▄▄▄▄▄▄▄",
        "    0 B ▇▇▇▇████████████████████████████████████",
        "        ├forward──├backward───────────├optimizer",
        "                             ▲",
    ]
    assert graph(info_of(MLP), 48, "ascii") == [
        "64.3 kB        ......::::::::#####..............",
        "    0 B ########################################",
        "        |forward--|backward-----------|optimizer",
        "                             ^",
    ]


def test_the_mark_has_its_words_where_there_is_room() -> None:
    assert graph(info_of(MLP), 72)[-1] == " " * 8 + " " * 33 + "▲ peak 64.3 kB at 210 µs"
    late = info_of(MLP, peak_ns=390_000, timeline=course((0, 1_000), (390_000, 64_340)))
    assert graph(late, 72)[-1] == " " * 8 + " " * 39 + "peak 64.3 kB at 390 µs ▲"
    assert graph(late, 72)[0] == "64.3 kB " + " " * 62 + "██"
    assert graph(late, 72)[1] == "    0 B " + "▁" * 62 + "██"  # 1,000 bytes are less than a step, but not nothing


def test_short_phases_are_abbreviated_or_left_blank() -> None:
    spans = (
        PhaseSpan("optimizer", 300_000, 340_000),  # in any order
        PhaseSpan("forward", 20_000, 70_000),
        PhaseSpan("backward", 70_000, 290_000),
        PhaseSpan("other", 290_000, 300_000),
        PhaseSpan("forward", 340_000, 360_000),
        PhaseSpan("backward", 360_000, 361_000),
        PhaseSpan("forward", 361_000, 400_000),
    )
    assert graph(info_of(MLP, phases=spans), 48)[2] == "          ├fwd─├backward───────────── ├opt├f├fwd"
    loading = (PhaseSpan("other", 0, 200_000), PhaseSpan("forward", 200_000, 400_000))
    assert graph(info_of(MLP, phases=loading), 48)[2] == "        ├other──────────────├forward────────────"
    assert graph(info_of(MLP, phases=()), 48)[2] == ""


def test_no_graph_without_room_points_or_time() -> None:
    assert graph(info_of(MLP), 23) == []
    assert len(graph(info_of(MLP), 24)) == 4
    assert graph(info_of(MLP, timeline=()), 48) == []
    assert graph(info_of(MLP, timeline=course((0, 64_340)), phases=(), peak_ns=0), 48) == []
    assert graph(info_of(MLP, peak_bytes=0, at_peak=(), timeline=course((0, 0))), 48) == []
    assert len(graph(info_of(MLP, timeline=course((-5, 3), (10**9, 0))), 48)) == 4


# -- what it looks like ------------------------------------------------------------------------------------------------


def memory_text(run: RunData, width: int, encoding: str = "utf-8") -> str:
    text = to_text(full_document(run), width, encoding)
    return text[text.index("Memory at peak, by owner") :]


@pytest.mark.parametrize(
    ("name", "width", "encoding"), [("80", 80, "utf-8"), ("140", 140, "utf-8"), ("80-ascii", 80, "ascii")]
)
def test_the_report_word_for_word(name: str, width: int, encoding: str) -> None:
    expected = (EXPECTED / f"memory-gpt-{name}.txt").read_text(encoding="utf-8")
    assert memory_text(GPT, width, encoding) == expected


def test_a_small_run_word_for_word() -> None:
    assert memory_text(MLP, 80) == (EXPECTED / "memory-mlp-80.txt").read_text(encoding="utf-8")


def test_memory_takes_about_thirty_lines() -> None:
    text = to_text(full_document(memory_fixtures.gpt(memory={"held": (), "held_bytes": 0})), 100)
    lines = text[text.index("Memory at peak, by owner") :].splitlines()
    assert 25 <= len(lines) <= 35


def test_colour_changes_nothing_but_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")

    def printed(color: bool) -> str:
        stream = io.StringIO()
        print_document(full_document(GPT), make_console(stream, color))
        return stream.getvalue()

    coloured = printed(True)
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == printed(False)
    assert "\x1b" not in printed(False)
    assert "\x1b[1;33mLEAK aten::add, forward\x1b[0m" in coloured
    assert "\x1b[1;31m█\x1b[0m" in coloured  # the peak in the graph


@pytest.mark.parametrize("width", [40, 60, 80, 100, 140, 160])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())
def test_no_line_is_wider_than_asked(run: RunData, encoding: str, width: int) -> None:
    for sort in ("backward", "memory"):
        for line in to_text(full_document(run, ViewOptions(sort=sort)), width, encoding).splitlines():
            assert cell_len(line) <= width
            assert line == line.rstrip()
            assert encoding == "utf-8" or line.isascii()


def test_nothing_is_said_where_memory_was_not_measured() -> None:
    view = build_view(fixtures.gpt())
    assert view.memory is None
    assert memory_sections(view) == []
    assert "memory" not in to_text(full_document(view.run)).lower().replace("--sort memory", "")


def test_a_run_that_held_nothing() -> None:
    names = [field.name for field in dataclasses.fields(MemoryInfo)]
    empty = {name: 0 for name in names if name.endswith(("bytes", "ns")) or name == "allocations"}
    tables = ("at_peak", "timeline", "phases", "saved", "held", "copies", "retained")
    where: dict[str, Any] = {"device": "cpu", "peak_phase": "other", "peak_layer": None, "peak_op": ""}
    memory = MemoryInfo(**{**empty, **dict.fromkeys(tables, ()), **where})
    report = Report(fixtures.mlp(memory=memory))
    assert "memory  peak 0 B outside forward, backward and optimizer · saved for backward 0 B" in str(report)
    assert "Memory at peak" not in str(report)
    assert "Memory at peak" not in report.to_markdown()


def test_names_from_outside_cannot_move_the_cursor() -> None:
    info = info_of(MLP)
    odd = HolderRow("x\x1b[31m", "saved\x07", 64_340)
    row = dataclasses.replace(info.copies[0], op="a\x1bb", line="m\tn.py:1")
    text = to_text(full_document(changed(MLP, at_peak=(odd,), categories=None, copies=(row,), peak_op="\x1b[2J")), 100)
    assert "\x1b" not in text
    assert "\x07" not in text
