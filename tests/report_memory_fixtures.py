"""Runs whose memory was measured: GPT-2 small with its attention by hand, a small MLP, and figures of a CUDA device.

Sizes are worked out from shapes as torch's allocator would give them, and conserve to the byte.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradscope.tables import (
    CategoryCourse,
    CopyRow,
    HeldRow,
    HolderRow,
    LayerRow,
    LayerSpan,
    MemoryCategory,
    MemoryInfo,
    PhaseSpan,
    RetainedRow,
    RunData,
    SavedRow,
    TimelinePoint,
)
from tests import report_fixtures as fixtures

ITEM = {"float32": 4, "int64": 8, "bool": 1}
MS = 1_000_000


def size_of(shape: str, dtype: str) -> int:
    """Bytes of a tensor: ``size_of("8x12x1024x1024", "float32")``."""
    size = ITEM[dtype]
    for part in shape.split("x"):
        size *= int(part)
    return size


@dataclass
class MemoryBuilder:
    """Collects rows and makes a :class:`MemoryInfo` of them; sums are worked out."""

    file: str = "examples/gpt.py"
    saved: list[SavedRow] = field(default_factory=list)
    at_peak: list[HolderRow] = field(default_factory=list)
    copies: list[CopyRow] = field(default_factory=list)

    def save(self, layer: str | None, line: int | None, node: str, what: str, shape: str, dtype: str) -> None:
        """One tensor kept for backward, which is alive at the peak as well."""
        where = None if line is None else f"{self.file}:{line}"
        size = size_of(shape, dtype)
        self.saved.append(SavedRow(layer, where, node, what, shape, dtype, 1, size))
        self.hold(layer, "saved activations", size)

    def hold(self, owner: str | None, category: str, size: int) -> None:
        """One more part of the live set at the peak; parts of one owner and category are summed."""
        if not size:
            return
        for i, row in enumerate(self.at_peak):
            if (row.owner, row.category) == (owner, category):
                self.at_peak[i] = dataclasses.replace(row, bytes=row.bytes + size)
                return
        self.at_peak.append(HolderRow(owner, category, size))

    def copy(self, layer: str | None, line: int, op: str, phase: str, calls: int, size: int) -> None:
        """Copies made by one op of one line."""
        self.copies.append(CopyRow(layer, f"{self.file}:{line}", phase, op, calls, size))

    def build(self, timeline: Sequence[TimelinePoint], phases: Sequence[PhaseSpan], **fields: Any) -> MemoryInfo:
        """The whole; the peak must be the highest point of ``timeline``."""
        peak = sum(row.bytes for row in self.at_peak)
        top = max(timeline, key=lambda point: point.bytes)
        assert top.bytes == peak, (top, peak)
        held: Sequence[HeldRow] = fields.setdefault("held", ())
        retained: Sequence[RetainedRow] = fields.setdefault("retained", ())
        settings: dict[str, Any] = {
            "device": "cpu",
            "peak_bytes": peak,
            "peak_ns": top.ns,
            "at_peak": _largest_first(self.at_peak),
            "start_bytes": timeline[0].bytes,
            "end_bytes": timeline[-1].bytes,
            "timeline": tuple(timeline),
            "phases": tuple(phases),
            "saved_bytes": sum(row.bytes for row in self.saved),
            "saved": _largest_first(self.saved),
            "held_bytes": sum(row.bytes for row in held),
            "copied_bytes": sum(row.bytes for row in self.copies),
            "copies": _largest_first(self.copies),
            "retained_after_step_bytes": sum(row.bytes for row in retained),
        }
        return MemoryInfo(**{**settings, **fields})


def timed(parts: Mapping[int, Mapping[str, int]]) -> tuple[list[TimelinePoint], tuple[CategoryCourse, ...]]:
    """Time -> bytes by category, as a timeline and its categories."""
    points = [TimelinePoint(ns, sum(sizes.values())) for ns, sizes in parts.items()]
    courses = [
        CategoryCourse(category.value, tuple(sizes.get(category.value, 0) for sizes in parts.values()))
        for category in MemoryCategory
    ]
    return points, tuple(course for course in courses if any(course.bytes))


def spans_in_turn(layers: Sequence[LayerRow], phases: Sequence[PhaseSpan]) -> tuple[LayerSpan, ...]:
    """Each layer once in forward, the root last for the loss, and in backward once in the opposite order.

    Each runs for its part of the phase's time.
    """
    found: list[LayerSpan] = []
    for phase in phases:
        if phase.phase not in ("forward", "backward"):
            continue
        column = f"{phase.phase}_self_ns"
        ordered = [row for row in sorted(layers, key=lambda row: row.path == "") if getattr(row, column)]
        if phase.phase == "backward":
            ordered.reverse()
        whole, done = sum(getattr(row, column) for row in ordered), 0
        for row in ordered:
            first, done = done, done + getattr(row, column)
            length = phase.end_ns - phase.start_ns
            start, end = (phase.start_ns + length * part // whole for part in (first, done))
            found.append(LayerSpan(row.path, phase.phase, start, end))
    return tuple(found)


def _largest_first(rows: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(rows, key=lambda row: -row.bytes))


def with_memory(run: RunData, memory: MemoryInfo, **fields: Any) -> RunData:
    """``run`` with ``memory``, and what its layers and lines have of it."""
    saved: dict[str, int] = {}
    lines: dict[str, int] = {}
    copied: dict[str, int] = {}
    for row in memory.saved:
        if row.layer is not None:
            saved[row.layer] = saved.get(row.layer, 0) + row.bytes
        if row.line is not None:
            lines[row.line] = lines.get(row.line, 0) + row.bytes
    for copy in memory.copies:
        if copy.layer is not None:
            copied[copy.layer] = copied.get(copy.layer, 0) + copy.bytes
    totals = dict.fromkeys((row.path for row in run.layers), 0)
    parents = {row.path: row.parent for row in run.layers}
    for path, size in saved.items():
        at: str | None = path
        while at is not None:
            totals[at] += size
            at = parents[at]
    layers = tuple(
        dataclasses.replace(
            row,
            saved_bytes=saved.get(row.path, 0),
            saved_total_bytes=totals[row.path],
            peak_bytes=2 * saved.get(row.path, 0),
            allocated_bytes=5 * saved.get(row.path, 0),
            allocations=7 * int(row.calls),
            forward_allocated_bytes=2 * saved.get(row.path, 0),
            forward_allocations=3 * int(row.calls),
            backward_allocated_bytes=3 * saved.get(row.path, 0),
            backward_allocations=4 * int(row.calls),
            copied_bytes=copied.get(row.path, 0),
        )
        for row in run.layers
    )
    source = tuple(
        dataclasses.replace(row, saved_bytes=lines.get(f"{row.file}:{row.line}", 0), copied_bytes=0)
        for row in run.lines
    )
    return dataclasses.replace(run, layers=layers, lines=source, memory=memory, **fields)


# -- GPT-2 small -------------------------------------------------------------------------------------------------------

B, T, C, H, V = 8, 1024, 768, 12, 50257
HIDDEN, WIDE, SCORES, LOGITS = f"{B}x{T}x{C}", f"{B}x{T}x{4 * C}", f"{B}x{H}x{T}x{T}", f"{B * T}x{V}"
HEADS = f"{B}x{H}x{T}x{C // H}"


def gpt(blocks: int = 12, *, cuda: bool = False, leak: bool = False, memory: dict[str, Any] | None = None) -> RunData:
    """GPT-2 small at batch 8 with AdamW; the peak is where the loss's backward begins.

    With ``leak`` a list collects the outputs of the blocks, and a variable keeps the last logits.
    """
    run = _timed(blocks, cuda=cuda)
    builder = MemoryBuilder()
    builder.hold(None, "inputs", 2 * size_of(f"{B}x{T}", "int64"))
    for row in run.layers:
        builder.hold(row.path, "parameters", 4 * row.parameters)
        builder.hold(row.path, "optimizer state", 8 * row.parameters)
    _save_all(builder, blocks)
    kept = sum(row.bytes for row in builder.saved)
    builder.hold("", "temporaries", size_of(LOGITS, "float32"))
    builder.hold("lm_head", "other activations", size_of(LOGITS, "float32"))
    for i in range(blocks):
        path = f"transformer.h.{i}"
        builder.hold(f"{path}.attn", "buffers", 4 * T * T)
        builder.copy(f"{path}.attn", 62, "aten::contiguous", "forward", 1, size_of(HIDDEN, "float32"))
        builder.copy(f"{path}.attn", 58, "aten::matmul", "forward", 2, 2 * size_of(HIDDEN, "float32"))
        builder.copy(f"{path}.attn", 53, "SplitBackward0", "backward", 1, 3 * size_of(HIDDEN, "float32"))
    builder.copy(None, 140, "aten::clone", "forward", 1, 8 * T)
    gradients = 4 * sum(row.parameters for row in run.layers)
    line = f"{builder.file}:125"
    logits = size_of(LOGITS, "float32")
    fields: dict[str, Any] = {
        "peak_phase": "backward",
        "peak_layer": "",
        "peak_op": "LogSoftmaxBackward0",
        "held": (HeldRow("lm_head", line, "aten::linear", 1, logits),),
        "allocations": 4_812,
        "step_allocated_bytes": 3 * kept,
    }
    if leak:
        kept_logits = RetainedRow("lm_head", line, "aten::linear", "forward", 1, logits, grows=False)
        cached = [
            RetainedRow(
                f"transformer.h.{i}", f"{builder.file}:92", "aten::add", "forward", 1, size_of(HIDDEN, "float32"), True
            )
            for i in range(blocks)
        ]
        fields["retained"] = (kept_logits, *cached)
    if cuda:
        peak = sum(row.bytes for row in builder.at_peak)
        fields |= {
            "device": "cuda:0",
            "allocated_bytes": peak,
            "reserved_bytes": peak + 1_862_270_976,
            "outside_allocator_bytes": 545_259_520,
            "device_total_bytes": 150_109_880_320,
        }
    timeline, categories, phases = _course(builder, kept, gradients, blocks)
    fields |= {"categories": categories, "spans": spans_in_turn(run.layers, phases), "spans_left_out": 0}
    return with_memory(run, builder.build(timeline, phases, **{**fields, **(memory or {})}))


def _timed(blocks: int, *, cuda: bool) -> RunData:
    """The times of the same model: tenths of those of :func:`tests.report_fixtures.gpt`'s smaller one do not matter."""
    builder = fixtures.RunBuilder()

    def layer(path: str, class_name: str, backward: int, parameters: int = 0) -> None:
        builder.add(path, class_name, backward * MS, backward * MS // 2, parameters=parameters)

    layer("", "GPT", 610)
    builder.add("transformer", "ModuleDict", calls=0.0)
    layer("transformer.wte", "Embedding", 42, V * C)
    layer("transformer.wpe", "Embedding", 2, T * C)
    layer("transformer.drop", "Dropout", 3)
    builder.add("transformer.h", "ModuleList", calls=0.0)
    for i in range(blocks):
        path = f"transformer.h.{i}"
        layer(path, "Block", 4)
        layer(f"{path}.ln_1", "LayerNorm", 9, 2 * C)
        layer(f"{path}.attn", "Attention", 322)
        layer(f"{path}.attn.c_attn", "Linear", 120, 3 * C * C + 3 * C)
        layer(f"{path}.attn.c_proj", "Linear", 40, C * C + C)
        layer(f"{path}.attn.attn_dropout", "Dropout", 51)
        layer(f"{path}.attn.resid_dropout", "Dropout", 2)
        layer(f"{path}.ln_2", "LayerNorm", 9, 2 * C)
        layer(f"{path}.mlp", "MLP", 1)
        layer(f"{path}.mlp.c_fc", "Linear", 161, 4 * C * C + 4 * C)
        layer(f"{path}.mlp.gelu", "GELU", 33)
        layer(f"{path}.mlp.c_proj", "Linear", 163, 4 * C * C + C)
        layer(f"{path}.mlp.dropout", "Dropout", 2)
    layer("transformer.ln_f", "LayerNorm", 9, 2 * C)
    layer("lm_head", "Linear", 905)
    environment = fixtures.CUDA if cuda else fixtures.CPU
    return builder.build(
        engine=31 * MS, optimizer=124 * MS, other=22 * MS, target="examples/gpt.py:full", environment=environment
    )


def _save_all(builder: MemoryBuilder, blocks: int) -> None:
    def save_norm(path: str, line: int) -> None:
        builder.save(path, line, "NativeLayerNormBackward0", "input", HIDDEN, "float32")
        builder.save(path, line, "NativeLayerNormBackward0", "result1", f"{B}x{T}x1", "float32")
        builder.save(path, line, "NativeLayerNormBackward0", "result2", f"{B}x{T}x1", "float32")

    for i in range(blocks):
        path = f"transformer.h.{i}"
        save_norm(f"{path}.ln_1", 91)
        builder.save(f"{path}.attn.c_attn", 53, "AddmmBackward0", "mat1", f"{B * T}x{C}", "float32")
        for what in ("self", "mat2"):
            builder.save(f"{path}.attn", 58, "BmmBackward0", what, f"{B * H}x{T}x{C // H}", "float32")
        builder.save(f"{path}.attn", 59, "MaskedFillBackward0", "mask", f"1x1x{T}x{T}", "bool")
        builder.save(f"{path}.attn", 60, "SoftmaxBackward0", "output", SCORES, "float32")
        builder.save(f"{path}.attn.attn_dropout", 61, "NativeDropoutBackward0", "result1", SCORES, "bool")
        builder.save(f"{path}.attn", 61, "BmmBackward0", "self", f"{B * H}x{T}x{T}", "float32")
        builder.save(f"{path}.attn", 61, "BmmBackward0", "mat2", f"{B * H}x{T}x{C // H}", "float32")
        builder.save(f"{path}.attn.c_proj", 63, "AddmmBackward0", "mat1", f"{B * T}x{C}", "float32")
        builder.save(f"{path}.attn.resid_dropout", 63, "NativeDropoutBackward0", "result1", HIDDEN, "bool")
        save_norm(f"{path}.ln_2", 92)
        builder.save(f"{path}.mlp.c_fc", 74, "AddmmBackward0", "mat1", f"{B * T}x{C}", "float32")
        builder.save(f"{path}.mlp.gelu", 74, "GeluBackward0", "self", WIDE, "float32")
        builder.save(f"{path}.mlp.c_proj", 74, "AddmmBackward0", "mat1", f"{B * T}x{4 * C}", "float32")
        builder.save(f"{path}.mlp.dropout", 74, "NativeDropoutBackward0", "result1", HIDDEN, "bool")
    save_norm("transformer.ln_f", 125)
    builder.save("lm_head", 125, "MmBackward0", "self", f"{B * T}x{C}", "float32")
    builder.save("", 128, "LogSoftmaxBackward0", "output", LOGITS, "float32")


def _course(
    builder: MemoryBuilder, kept: int, gradients: int, blocks: int
) -> tuple[list[TimelinePoint], tuple[CategoryCourse, ...], list[PhaseSpan]]:
    """Up through the blocks of forward, the loss, down through those of backward, then the optimizer."""
    logits, scores = size_of(LOGITS, "float32"), 2 * size_of(SCORES, "float32")
    base: dict[str, int] = {}
    for row in builder.at_peak:
        if row.category in ("inputs", "parameters", "buffers", "optimizer state"):
            base[row.category] = base.get(row.category, 0) + row.bytes

    def alive(saved: int = 0, **more: int) -> dict[str, int]:
        return {**base, "saved activations": saved, **{name.replace("_", " "): size for name, size in more.items()}}

    a_block = (kept - logits) // (blocks + 1)
    step = 4_900 * MS // blocks
    parts = {0: alive()}
    parts |= {12 * MS + i * step: alive(i * a_block) for i in range(blocks + 1)}
    loss = max(parts) + 800 * MS
    parts[loss] = alive(kept, other_activations=logits)
    parts[loss + 40 * MS] = alive(kept, other_activations=logits, temporaries=logits)
    down = 2 * step
    for i in range(blocks):
        at, done = loss + 900 * MS + i * down, gradients * i // blocks
        parts[at] = alive((blocks - i) * a_block, gradients=done)
        parts[at + down // 3] = alive((blocks - i) * a_block, gradients=done, activation_gradients=scores)
    end = max(parts) + down
    parts[end] = parts[end + 124 * MS] = alive(gradients=gradients)
    points, categories = timed(parts)
    phases = [
        PhaseSpan("other", 0, 12 * MS),
        PhaseSpan("forward", 12 * MS, loss + 20 * MS),
        PhaseSpan("backward", loss + 20 * MS, end),
        PhaseSpan("optimizer", end, end + 124 * MS),
        PhaseSpan("other", end + 124 * MS, end + 146 * MS),
    ]
    return points, categories, phases


# -- a small MLP -------------------------------------------------------------------------------------------------------


def mlp(memory: dict[str, Any] | None = None, **build: Any) -> RunData:
    """A classifier whose loss is outside every module, at batch 32: 64 wide, 10 classes."""
    builder = MemoryBuilder(file="mlp.py")
    builder.hold(None, "inputs", size_of("32x64", "float32") + size_of("32", "int64"))
    builder.hold("0", "parameters", 4 * 4_160)
    builder.hold("2", "parameters", 4 * 650)
    builder.hold("2", "gradients", 4 * 650)
    builder.save("1", 14, "ReluBackward0", "result", "32x64", "float32")
    builder.save(None, 22, "LogSoftmaxBackward0", "result", "32x10", "float32")
    builder.save(None, None, "NllLossBackward0", "total_weight", "1", "float32")
    builder.hold("2", "activation gradients", size_of("32x64", "float32"))
    builder.hold("0", "temporaries", size_of("64x64", "float32"))
    builder.copy("1", 14, "aten::clone", "forward", 2, 9_000)
    at_peak: dict[str, int] = {}
    for row in builder.at_peak:
        at_peak[row.category] = at_peak.get(row.category, 0) + row.bytes
    base = {name: at_peak[name] for name in ("inputs", "parameters")}
    gradients = {**base, "gradients": 19_240}
    timeline, categories = timed(
        {
            0: base,
            40_000: {**base, "saved activations": 8_312},
            70_000: {**base, "saved activations": 8_312, "temporaries": 11_000},
            130_000: {**base, "saved activations": 9_476, "activation gradients": 12_836},
            210_000: at_peak,
            260_000: gradients,
            400_000: gradients,
        }
    )
    phases = [
        PhaseSpan("forward", 0, 100_000),
        PhaseSpan("backward", 100_000, 300_000),
        PhaseSpan("optimizer", 300_000, 400_000),
    ]
    fields: dict[str, Any] = {
        "peak_phase": "backward",
        "peak_layer": "0",
        "peak_op": "AddmmBackward0",
        "allocations": 31,
        "step_allocated_bytes": 91_480,
    }
    run = fixtures.mlp(**build)
    fields |= {"categories": categories, "spans": spans_in_turn(run.layers, phases), "spans_left_out": 0}
    info = builder.build(timeline, phases, **{**fields, **(memory or {})})
    return with_memory(run, info)
