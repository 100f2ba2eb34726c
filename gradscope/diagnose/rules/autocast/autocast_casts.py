"""Autocast casts the same float32 weights at every use in one step.

Example::

    for step in range(T):
        with torch.autocast("cuda", dtype=torch.bfloat16):  # the cache is cleared at every exit
            h = self.cell(x[:, step], h)

Pattern: a layer whose float32 parameters are used several times under autocast between two backward passes of the
recorded step, and which ran more casts than it has such parameters: the cache is off, or emptied between the uses. One
cast for each backward pass is needed: gradients may be collected over several, each with an autocast of its own. Or:
code that casts a parameter itself, again at each use. Evidence: casts that were run, casts that would do, bytes. Casts
of activations are taken off. Estimate: the measured time of the casts that repeat, in forward, and half of it in
backward (low: half of both; high: both): the gradients of all uses are still added up.

Source: PyTorch, Automatic Mixed Precision package, torch.autocast (cache_enabled); torch.clear_autocast_cache.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.findings import Estimate, make_finding, only
from gradscope.ops import ATEN_CASTS, CAST_NODE, CASTS
from gradscope.recording.graph import HALVES, Node, Value
from gradscope.tables import Finding, OpRow
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import size as size_text

# A float32 number is read and one of half its size is written.
_BYTES_A_CAST = 6


_Use = tuple[int, str]  # backward passes before it, path of the parameter


@dataclass
class _Layer:
    uses: Counter[_Use] = field(default_factory=Counter)  # of float32 parameters
    elements: dict[str, int] = field(default_factory=dict)
    others: int = 0  # casts that are not of these, at most
    lines: Counter[str] = field(default_factory=Counter)  # of these uses

    @property
    def line(self) -> str | None:
        """The one with most uses."""
        return max(self.lines, key=lambda line: self.lines[line], default=None)

    @property
    def repeats(self) -> int:
        """Count the casts beyond each parameter's first, if none is remembered."""
        return sum(self.uses.values()) - len(self.uses)


@dataclass(frozen=True)
class _Repeated:
    path: str
    line: str | None
    casts: int
    needed: int
    bytes: int
    forward_ns: int  # of the casts that repeat
    backward_ns: int
    cost_ns: int  # of all casts


@dataclass(frozen=True)
class _Caster:
    """Who casts.

    Attributes:
        layers: finds the layers and what they use.
        code: the line to write; ``{device}`` is what autocast is told.
    """

    layers: Callable[[Case], dict[str, _Layer]]
    message: str
    advice: str
    code: str


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for all layers where autocast casts, and one for all where the code does."""
    for kind in _KINDS:
        layers = {path: layer for path, layer in kind.layers(case).items() if layer.repeats > 0}
        found = [each for path, layer in layers.items() if (each := _repeated(case, path, layer)) is not None]
        if found:
            yield _finding(case, kind, found)


def _finding(case: Case, kind: _Caster, found: list[_Repeated]) -> Finding:
    forward, backward = (sum(getattr(each, name) for each in found) for name in ("forward_ns", "backward_ns"))
    spent, saving = forward + backward, forward + backward // 2
    return make_finding(
        RULE.name,
        case,
        Estimate(saving, spent // 2, spent),
        layers=tuple(each.path for each in found),
        line=only(each.line for each in found),
        message=kind.message,
        evidence=(
            f"{counted(sum(each.casts for each in found))} weight casts per step where "
            f"{counted(sum(each.needed for each in found))} are enough: "
            f"{size_text(sum(each.bytes for each in found))} of unnecessary reads and writes, "
            f"{time_text(spent)} per step in forward and backward"
        ),
        advice=kind.advice,
        code=kind.code.format(device="cuda" if case.on_cuda else "cpu"),
        cost_ns=sum(each.cost_ns for each in found),
    )


def _by_autocast(case: Case) -> dict[str, _Layer]:
    found: defaultdict[str, _Layer] = defaultdict(_Layer)
    rounds = 0
    for call in case.facts.calls:
        rounds += call.op == "backward"
        if call.layer is None:
            continue
        if call.op in CASTS:
            found[call.layer].others += 1
        elif call.autocast:
            _note(found[call.layer], call, rounds)
    return dict(found)


def _by_code(case: Case) -> dict[str, _Layer]:
    found: defaultdict[str, _Layer] = defaultdict(_Layer)
    rounds = 0
    for call in case.facts.calls:
        rounds += call.op == "backward"
        if call.layer is None:
            continue
        layer, given, made = found[call.layer], call.inputs[:1], call.outputs[:1]
        if call.op not in CASTS:
            layer.others += sum(each.dtype not in {one.dtype for one in made} for each in call.inputs) * call.autocast
        elif given and made and _is_weight(given[0]) and given[0].dtype == torch.float32 and made[0].dtype in HALVES:
            _add(layer, given[0], call, rounds)
        else:
            layer.others += 1
    return dict(found)


def _note(layer: _Layer, call: Node, rounds: int) -> None:
    lowered = any(each.dtype in HALVES for each in call.outputs)
    for each in call.inputs:
        if lowered and each.dtype == torch.float32 and _is_weight(each):
            _add(layer, each, call, rounds)
        else:
            layer.others += any(each.dtype != made.dtype for made in call.outputs)


def _add(layer: _Layer, weight: Value, call: Node, rounds: int) -> None:
    path = str(weight.parameter)
    layer.uses[rounds, path] += 1
    layer.elements[path] = weight.elements
    layer.lines.update([call.source] if call.source is not None else [])


def _is_weight(tensor: Value) -> bool:
    return tensor.parameter is not None and tensor.requires_grad


def _repeated(case: Case, path: str, layer: _Layer) -> _Repeated | None:
    forward = _named(case.ops.get((path, "forward"), []))
    made = round(forward["aten::_to_copy"].calls) if "aten::_to_copy" in forward else 0
    needed = len(layer.uses)
    again = made - layer.others - needed
    # With the cache none repeats. Anything between is a cast that is not understood.
    if again <= 0 or again > layer.repeats:
        return None
    part = again / layer.repeats
    wasted = sum((uses - 1) * layer.elements[name] for (_, name), uses in layer.uses.items()) * part
    casts = sum(row.self_ns for name, row in forward.items() if name in ATEN_CASTS)
    spent, cost = casts * again / made, float(casts)
    copies = forward.get("aten::copy_")
    if copies is not None:
        spent += copies.self_ns * again / max(copies.calls, made)
        cost += copies.self_ns
    backward = _named(case.ops.get((path, "backward"), []))
    node = backward.get(CAST_NODE)
    spent_backward = 0.0
    if node is not None:
        nodes = sum(row.self_ns for name, row in backward.items() if name in {CAST_NODE, "aten::to"})
        spent_backward = nodes * min(again / max(node.calls, 1), 1)
        cost += nodes
    return _Repeated(
        path=path,
        line=layer.line,
        casts=again + needed,
        needed=needed,
        bytes=round(wasted * _BYTES_A_CAST),
        forward_ns=round(spent),
        backward_ns=round(spent_backward),
        cost_ns=round(cost),
    )


def _named(rows: list[OpRow]) -> dict[str, OpRow]:
    return {row.name: row for row in rows}


_KINDS = (
    _Caster(
        _by_autocast,
        "Autocast casts the same float32 weights at every use: its cache is off or cleared in between",
        "Enter torch.autocast once around the whole forward pass and keep cache_enabled=True.",
        'with torch.autocast("{device}", dtype=torch.bfloat16): loss = step(batch)',
    ),
    _Caster(
        _by_code,
        "The same float32 weights are cast again at every use",
        "Cast each weight once before its first use, and reuse the result.",
        "weight = self.weight.to(x.dtype)  # once, before the loop",
    ),
)

RULE = Rule("autocast-casts", "weights that are cast again at every use", find, edits=True)
