"""Runs for the tests of the page."""

from __future__ import annotations

import dataclasses

from gradscope.tables import KernelRow, RunData, SavedRow
from tests import diff_fixtures
from tests import report_fixtures as fixtures
from tests import report_memory_fixtures as memory_fixtures
from tests.report_fixtures import CPU

# What a page may choke on: markup, quotes, NUL, marks that turn the direction of writing, formulas, length.
HOSTILE = (
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<!--<script>",
    "\"quoted\" 'twice' `thrice` ${window.hacked=1}",
    "nul\0tab\tline\nend\u2028\u2029",
    "\u202egnp.exe\u202c\u2066\u200f",
    "=HYPERLINK(1)",
    "\udcff&amp;&#60;%3Cb%3E/slash",
    "é\U0001f600" + "x" * 3_998,
)


def gpt() -> RunData:
    """Twelve blocks with memory, one of them slow."""
    return memory_fixtures.gpt(12)


def device() -> RunData:
    """A run on a device, with findings and notes: two kernels for each layer with a backward.

    They take two thirds of its first operation, which launched them; for one layer that is not recorded.
    """
    run = fixtures.gpt(3, cuda=True, recompute=True, findings=fixtures.findings(), notes=("a note",))
    kernels = []
    for op in {op.layer: op for op in reversed(run.ops) if op.phase == "backward" and op.layer and op.self_ns}.values():
        recorded = op.layer != "lm_head"
        for name, part in (("sgemm_nn", 2), ("reduce_kernel", 6)):
            busy = op.self_ns // part
            launched = (op.name, busy) if recorded else (None, None)
            kernels.append(KernelRow(op.layer, "backward", name, 1.0, busy, *launched))
    return dataclasses.replace(run, kernels=tuple(kernels), device=fixtures.device(), buckets=fixtures.buckets())


def limited() -> RunData:
    """Every layer at half of its limit in backward, and a finding whose lines are long."""
    run = gpt()
    layers = [
        dataclasses.replace(
            row,
            bound_by="compute" if row.class_name == "Linear" else "bandwidth",
            forward_limit_ns=row.forward_self_ns // 4,
            backward_limit_ns=(row.backward_self_ns + row.accumulate_ns + row.gradient_sum_ns) // 2,
            backward_self_ns=row.backward_self_ns + row.accumulate_ns + row.gradient_sum_ns,
            accumulate_ns=0,
            gradient_sum_ns=0,
        )
        for row in run.layers
    ]
    ledger = run.ledger
    own = ledger.layers_ns + ledger.accumulate_ns + ledger.gradient_sum_ns
    ledger = dataclasses.replace(ledger, layers_ns=own, accumulate_ns=0, gradient_sum_ns=0)
    finding = fixtures.findings()[0]
    long = dataclasses.replace(finding, message=f"{finding.message}; " * 5, evidence="why " * 100)
    return dataclasses.replace(run, layers=layers, ledger=ledger, findings=(long,))


def hostile() -> RunData:
    """Every name of a run is one of :data:`HOSTILE`."""
    builder = fixtures.RunBuilder(file=HOSTILE[0])
    builder.add("", HOSTILE[1], 5_000, 3_000)
    for i, name in enumerate(HOSTILE):
        part = name.replace(".", "_")
        builder.add(part, name, 1_000 * (i + 1), 500, parent="")
        builder.add(f"{part}.{part}", name, 700, 100, parent=part)
    run = builder.build(engine=900, target=HOSTILE[0], model=HOSTILE[8], notes=HOSTILE)
    saved = [
        SavedRow(row.path, name, name, name, name, name, 1, 8) for row, name in zip(run.layers, HOSTILE, strict=False)
    ]
    layers = [
        dataclasses.replace(row, source=HOSTILE[i % 9], saved_bytes=8 if i < len(saved) else 0, saved_total_bytes=0)
        for i, row in enumerate(run.layers)
    ]
    layers[0] = dataclasses.replace(layers[0], saved_total_bytes=8 * len(saved))
    ops = [dataclasses.replace(op, name=HOSTILE[i % 9], shape=HOSTILE[i % 7]) for i, op in enumerate(run.ops)]
    lines = [fixtures.LineRow(name, 1, name, name, layers[1].path, 10, 20, 8) for name in HOSTILE]
    memory = memory_fixtures.mlp().memory
    assert memory is not None
    memory = dataclasses.replace(
        memory,
        peak_op=HOSTILE[0],
        peak_layer=layers[1].path,
        at_peak=[dataclasses.replace(row, owner=layers[1].path) for row in memory.at_peak],
        spans=memory_fixtures.spans_in_turn(layers, memory.phases),
        saved=saved,
        saved_bytes=8 * len(saved),
    )
    environment = {**run.environment, "device_name": HOSTILE[0], "dtype": HOSTILE[5]}
    return dataclasses.replace(run, environment=environment, layers=layers, ops=ops, lines=lines, memory=memory)


def pair() -> tuple[RunData, RunData]:
    """Before and after: one layer slower, one within noise, one new, one removed, one of another class."""
    ms = diff_fixtures.MS
    root = {"": (0, 0, 0, 0, 0), "h": (0, 0, 0, 0, 0)}
    blocks = {f"h.{i}{below}": diff_fixtures.around(10 * ms, ms // 10) for i in range(3) for below in ("", ".fc")}
    saved = dict.fromkeys(blocks, 1_000)
    before = diff_fixtures.run({**root, **blocks, "old": diff_fixtures.around(4 * ms, ms // 10)}, saved=saved)
    slower = {**blocks, "h.1.fc": diff_fixtures.around(30 * ms, ms // 10), "h.2": diff_fixtures.around(10 * ms + 9, ms)}
    after = diff_fixtures.run(
        {**root, **slower, "fresh": diff_fixtures.around(6 * ms, ms // 10)},
        saved={**saved, "h.0.fc": 400},
        classes={"": "Net", **dict.fromkeys(blocks, "Linear"), "h.0.fc": "Conv1D", "fresh": "Linear"},
        environment={**CPU, "torch": "9.9.9"},
    )
    return before, after
