"""Cases made by hand, for what needs a GPU, a script or steady times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gradscope.diagnose.case import Case, StepFacts
from gradscope.recording.graph import Node, Value
from gradscope.tables import Finding, LayerRow, Ledger, LineRow, OpRow, RunData, Spread, StepTimes, WorkloadInfo
from tests.diagnose.made_graph import made_call, made_value

MS = 1_000_000


def check_words(finding: Finding) -> None:
    """How each finding is worded."""
    word = finding.message.split()[0]
    assert (
        word[0].isupper() or word[0].isdigit() or "." in word or "_" in word
    )  # a sentence, or one that begins with a name of code
    assert not finding.message.endswith(".")
    assert finding.advice.endswith(".")
    assert finding.advice.count(". ") == 0
    assert finding.code
    assert any(character.isdigit() for character in finding.evidence)
    if finding.predicted_saving_ns is not None:
        assert finding.predicted_low_ns is not None
        assert finding.predicted_high_ns is not None
        assert finding.predicted_low_ns <= finding.predicted_saving_ns <= finding.predicted_high_ns


def row(path: str, forward: int, backward: int, class_name: str = "Block", **more: Any) -> LayerRow:
    """Of a layer; its totals are its own times."""
    parent = None if not path else path.rpartition(".")[0]
    values: dict[str, Any] = {
        "path": path,
        "class_name": class_name,
        "parent": parent,
        "calls": 1.0,
        "parameters": 10,
        "source": "model.py:5",
        "forward_self_ns": forward,
        "forward_total_ns": forward,
        "backward_self_ns": backward,
        "backward_total_ns": backward,
        "recompute_ns": 0,
        "accumulate_ns": 0,
        "gradient_sum_ns": 0,
        "backward_share": 0.0,
        "backward_self_steps_ns": (backward, backward),
    }
    return LayerRow(**{**values, **more})


def made_case(
    layers: Sequence[LayerRow] = (),
    ops: Sequence[OpRow] = (),
    lines: Sequence[LineRow] = (),
    facts: StepFacts | None = None,
    *,
    wall: int = 100 * MS,
    forward: int = 30 * MS,
    backward: int = 0,
    optimizer: int = 0,
    median: int | None = None,
    mode: Any = "model",
    device: str = "cpu",
) -> Case:
    """Roots are what is given: the sums of a run are made up to fit."""
    own = sum(each.backward_self_ns for each in layers)
    communication = sum(each.communication_ns for each in layers)
    backward = max(backward, own + communication)
    totals = sum(each.backward_self_ns for each in layers)
    root = row("", 0, 0, "Model", forward_total_ns=sum(each.forward_self_ns for each in layers))
    root = replace(root, backward_total_ns=totals, parameters=0, backward_self_steps_ns=())
    middle = wall if median is None else median
    spread = {
        "wall": Spread(middle, middle, max(wall, middle), 0),
        "forward": Spread(forward, forward, forward, 0),
        "backward": Spread(backward, backward, backward, 0),
    }
    other = wall - forward - backward - optimizer
    if wall == 0:
        other = -forward - backward - optimizer
    run = RunData(
        gradscope="0",
        partial=False,
        environment={"device": device},
        workload=WorkloadInfo(target="", mode=mode, steps=2, warmup=1, loss=None),
        step=StepTimes(wall, forward, backward, optimizer, other, spread, None, None),
        ledger=Ledger(backward, own, 0, 0, 0, backward - own - communication, communication, 0, 0),
        layers=(root, *layers) if layers else (),
        lines=tuple(lines),
        ops=tuple(ops),
    )
    return Case(run, facts or StepFacts())


def op(layer: str | None, phase: str, name: str, ns: int, calls: float = 1.0) -> OpRow:
    """Of an operation."""
    return OpRow(layer, phase, name, calls, ns)


def tensor(*shape: int, device: str = "cuda", dtype: str = "float32", parameter: str | None = None) -> Value:
    """On a GPU, unless said otherwise."""
    return made_value(shape, dtype, device, parameter=parameter)


def call(
    op: str,
    inputs: Sequence[Value],
    outputs: Sequence[Value] = (),
    *,
    index: int = 0,
    layer: str | None = "body",
    source: str | None = "model.py:12",
    args: tuple[Any, ...] | None = None,
    **more: Any,
) -> Node:
    """Of line 12."""
    more["args"] = tuple(inputs) if args is None else args
    return made_call(op, inputs, outputs, index=index, layer=layer, source=source, **more)
