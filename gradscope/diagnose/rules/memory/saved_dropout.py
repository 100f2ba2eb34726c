"""Dropout saves its mask for backward, although a seed is enough to recompute it.

Example::

    x = x + F.dropout(self.project(y), 0.1, self.training)  # on a CPU four bytes an element, on a GPU one

Pattern: what nodes of dropout save: on a CPU the factor of the product with the mask, on a GPU the mask of
``native_dropout``. Evidence: bytes of these storages, as the memory steps measured them, and the time of drawing the
mask. Estimate: all their bytes; the recipe keeps 8 bytes a call. A dropout that another recipe takes over, or that
goes with unfused attention, is left to that finding.

Source: N. Srivastava et al., Dropout (JMLR 15, 2014); V. Korthikanti et al., Reducing activation recomputation in large
transformer models (arXiv:2205.05198), section 4: masks are one of the larger parts of what is kept.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gradscope.diagnose.case import Case, Rule, layers_of, replaced_calls
from gradscope.diagnose.findings import Estimate, make_finding, several, shape_text
from gradscope.diagnose.rules.recipes.attention_by_hand import calls_without_recipe
from gradscope.diagnose.worth import alive_at_peak, ops_ns
from gradscope.recording.graph import Node
from gradscope.tables import Finding, MemoryInfo, SavedRow, Severity
from gradscope.units import ns as time_text
from gradscope.units import over_passes, percent
from gradscope.units import size as size_text

# From how many elements on the recipe pays on a CPU, with several threads: as in kernels/pays.py, which needs torch.
FEWEST_ON_CPU = 1_000_000

_RECIPE = "Use the dropout recipe: it saves a seed instead of the mask and recomputes the mask in backward."

# A smaller part of what is kept is not worth another function.
LEAST_SHARE = 0.03


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each line with dropout whose masks are of weight."""
    memory = case.run.memory
    if memory is None or not memory.saved_bytes:
        return
    masks: defaultdict[str | None, list[SavedRow]] = defaultdict(list)
    modules: defaultdict[str | None, bool] = defaultdict(bool)
    for (_, source), calls in _dropouts(case).items():
        masks[source] += _masks(case, memory, source, calls)
        modules[source] |= any(call.module is not None for call in calls)
    for source, rows in masks.items():
        if sum(row.bytes for row in rows) >= LEAST_SHARE * memory.saved_bytes:
            yield _finding(case, memory, source, rows, modules[source])


def _dropouts(case: Case) -> dict[tuple[str | None, str | None], list[Node]]:
    """Return the calls that drop something with a gradient, by layer and line."""
    found: defaultdict[tuple[str | None, str | None], list[Node]] = defaultdict(list)
    left_out = replaced_calls(case) | calls_without_recipe(case)
    for call in case.facts.calls:
        if call.op != "dropout" or call.layer is None or call.index in left_out or not call.grad:
            continue
        training = call.argument(2, "training", True) is not False
        if training and call.argument(1, "p", 0.5) != 0 and call.outputs and call.outputs[0].requires_grad:
            found[call.layer, call.source].append(call)
    return dict(found)


def _masks(case: Case, memory: MemoryInfo, source: str | None, calls: list[Node]) -> list[SavedRow]:
    """A row for each of as many masks as there are calls; the line may save other factors of the same shape."""
    shapes = {shape_text(call.outputs[0].shape) for call in calls}
    below = layers_of(case, calls[0])[1:]
    layers = {calls[0].layer, *(path for path in below if case.layers[path].class_name == "Dropout")}
    rows = [row for row in memory.saved if row.line == source and row.layer in layers and _is_mask(row, shapes)]
    return [one for row in rows for one in [_one_of(row)] * row.count][: len(calls)]


def _one_of(row: SavedRow) -> SavedRow:
    at_peak = None if row.at_peak_bytes is None else row.at_peak_bytes // row.count
    return replace(row, count=1, bytes=row.bytes // row.count, at_peak_bytes=at_peak)


def _is_mask(row: SavedRow, shapes: set[str]) -> bool:
    if row.node == "NativeDropoutBackward0":
        return row.dtype == "bool"
    return row.node == "MulBackward0" and row.what == "other" and row.shape in shapes


def _finding(case: Case, memory: MemoryInfo, source: str | None, kept: list[SavedRow], module: bool) -> Finding:
    layers = tuple(dict.fromkeys(row.layer for row in kept if row.layer is not None))
    total = sum(row.bytes for row in kept)
    drawing_op = "aten::native_dropout" if case.on_cuda else "aten::bernoulli_"
    drawing = ops_ns(case, layers, lambda name: name == drawing_op, phases=("forward",))
    part = total / max(memory.saved_bytes, 1)
    masks = several(len(kept), "mask")
    summed = over_passes(memory.backward_passes)
    evidence = f"{masks}, {size_text(total)}, {percent(part)} of what is saved for backward{summed}"
    if drawing:
        evidence += f"; generating them takes {time_text(drawing)} per step"
    freed = alive_at_peak(kept)
    severity: Severity = "warning" if freed >= 0.1 * memory.peak_bytes else "info"
    advice, code = _cure(case, kept, module=module)
    return make_finding(
        RULE.name,
        case,
        Estimate(bytes=freed),
        severity=severity,
        layers=layers,
        line=source,
        message="Dropout masks are saved for backward",
        evidence=evidence,
        advice=advice,
        code=code,
    )


def _cure(case: Case, kept: Sequence[SavedRow], *, module: bool) -> tuple[str, str]:
    """The recipe; where it would leave so few elements to torch, for its time, as one has to ask for it."""
    few = case.run.environment.get("threads") == 1 or all(_elements(row) < FEWEST_ON_CPU for row in kept)
    if few and not case.on_cuda:
        advice = f"{_RECIPE} So few elements take it longer than torch, so it has to be asked for."
        return advice, 'gradscope.recipes.dropout(x, p, self.training, backend="cpu")'
    return _RECIPE, "from gradscope.recipes import Dropout" if module else "from gradscope.recipes import dropout"


def _elements(row: SavedRow) -> int:
    return math.prod(int(size) for size in row.shape.split("x") if size.isdigit())


RULE = Rule("saved-dropout", "dropout masks saved for backward", find, edits=True)
