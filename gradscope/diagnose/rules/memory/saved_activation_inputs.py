"""An activation or a norm whose input and output are both saved for backward, the output by the next matmul.

Example::

    return self.down(F.gelu(self.up(x)))  # GELU saves self.up(x), self.down saves its GELU: twice the widest tensor

Pattern: GELU, SiLU, layer or RMS normalisation whose result one linear layer reads and nothing else. Evidence: what
both keep for backward, as the memory steps measured it, from 5 % of all that is kept on. The result can be recomputed
from the input at the cost of one cheap pass. Estimate: the bytes of the kept results. Checkpointing without reentry
stops as soon as all that backward needs is there, so the matmul itself is not recomputed.

Source: V. Korthikanti et al., Reducing activation recomputation in large transformer models (arXiv:2205.05198);
https://pytorch.org/docs/stable/checkpoint.html (early stop).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

from gradscope.diagnose.case import Case, Rule, layers_of, replaced_calls
from gradscope.diagnose.findings import Estimate, make_finding, several
from gradscope.diagnose.worth import alive_at_peak, ops_ns
from gradscope.ops import LINEAR_NODES, NODE_OF
from gradscope.recording.graph import Node
from gradscope.tables import Finding, MemoryInfo, SavedRow
from gradscope.units import ns as time_text
from gradscope.units import over_passes, percent
from gradscope.units import size as size_text

LEAST_SHARE = 0.05

# op: its name in words, what its node keeps, its operations
_CHEAP = {
    "gelu": ("GELU", NODE_OF["gelu"], frozenset({"aten::gelu"})),
    "silu": ("SiLU", NODE_OF["silu"], frozenset({"aten::silu"})),
    "layer_norm": ("layer norm", NODE_OF["layer_norm"], frozenset({"aten::native_layer_norm"})),
    "rms_norm": ("RMS norm", NODE_OF["rms_norm"], frozenset({"aten::_fused_rms_norm"})),
}
_FIRST = frozenset({"self", "mat1", "input"})


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each line with such a pair."""
    memory = case.run.memory
    if memory is None or not memory.saved_bytes:
        return
    left_out = replaced_calls(case)
    pairs: defaultdict[tuple[str, str | None], list[tuple[Node, list[Node]]]] = defaultdict(list)
    for call in case.facts.calls:
        if call.op not in _CHEAP or call.layer is None or not call.grad or call.index in left_out or not call.outputs:
            continue
        users = call.outputs[0].users
        # With several readers all of them would have to be checkpointed together.
        if len(users) == 1 and users[0].op == "linear" and users[0].inputs[0] == call.outputs[0]:
            pairs[call.op, call.source].append((call, users))
    for (op, source), found in pairs.items():
        kept = _kept(case, memory, op, found)
        if sum(result.bytes for _, result in kept) > LEAST_SHARE * memory.saved_bytes:
            yield _finding(case, memory, source, found[0], kept)


def _kept(
    case: Case, memory: MemoryInfo, op: str, pairs: list[tuple[Node, list[Node]]]
) -> list[tuple[SavedRow, SavedRow]]:
    """Return what a node keeps as its input, and a linear layer as the result."""
    found: list[tuple[SavedRow, SavedRow]] = []
    taken: Counter[tuple[str | None, str]] = Counter()
    order = {path: i for i, path in enumerate(case.layers)}
    for call, users in pairs:
        inputs = [
            row
            for row in _rows(case, memory, [call])
            if row.node == _CHEAP[op][1] and row.what in _FIRST and _elements(row) == call.outputs[0].elements
            if taken[row.layer, row.node] < row.count
        ]
        results = [
            row
            for row in _rows(case, memory, users)
            if row.node in LINEAR_NODES and row.what in _FIRST and _elements(row) == call.outputs[0].elements
        ]
        if inputs and results:
            at = order.get(inputs[0].layer or "", -1)
            # Of a sequence's layers, the one after.
            results.sort(key=lambda row: order.get(row.layer or "", -1) <= at)
            taken[inputs[0].layer, inputs[0].node] += 1
            found.append((inputs[0], replace(results[0], count=1, bytes=results[0].bytes // results[0].count)))
    return found


def _rows(case: Case, memory: MemoryInfo, calls: list[Node]) -> list[SavedRow]:
    """Return what the calls' nodes keep."""
    places = {(path, call.source) for call in calls for path in layers_of(case, call)}
    return [row for row in memory.saved if (row.layer, row.line) in places]


def _elements(row: SavedRow) -> int:
    found = 1
    for size in row.shape.split("x"):
        found *= int(size) if size.isdigit() else 1
    return found


def _finding(
    case: Case,
    memory: MemoryInfo,
    source: str | None,
    pair: tuple[Node, list[Node]],
    kept: list[tuple[SavedRow, SavedRow]],
) -> Finding:
    call, users = pair
    name, _, names = _CHEAP[call.op]
    total = sum(result.bytes for _, result in kept)
    layers = tuple(dict.fromkeys(row.layer for row, _ in kept if row.layer is not None))
    again = ops_ns(case, layers, names.__contains__, phases=("forward",))
    part = percent(total / max(memory.saved_bytes, 1))
    results = several(len(kept), "result")
    summed = over_passes(memory.backward_passes)
    evidence = f"{results}, {size_text(total)}, {part} of what is saved for backward{summed}"
    if again:
        evidence += f"; recomputing {'it' if len(kept) == 1 else 'them'} takes about {time_text(again)} per step"
    inner, outer = _names(case, call, users[0], kept[0])
    return make_finding(
        RULE.name,
        case,
        Estimate(bytes=alive_at_peak(result for _, result in kept)),
        severity="info",
        layers=layers,
        line=source,
        message=f"Both the input and the output of {name} are saved for backward",
        evidence=evidence,
        advice=(
            f"If memory is short, checkpoint {name} together with the linear layer after it: only {name} is recomputed."
        ),
        code=f"checkpoint(lambda h: {outer}({inner}), h, use_reentrant=False)",
    )


def _names(case: Case, call: Node, user: Node, kept: tuple[SavedRow, SavedRow]) -> tuple[str, str]:
    """Return how the innermost class that holds both would call them: "self.down", "mlp[2]", "self.mlp.up"."""
    first, second = kept[0].layer or "", kept[1].layer or ""
    given = ', approximate="tanh"' if call.argument(1, "approximate") == "tanh" else ""
    # A function in a layer of its own is called as that layer.
    alone = call.module is not None or not any(row.parent == first for row in case.run.layers)
    linear = user.module is not None
    above = _above([path for path, known in ((first, alone), (second, linear)) if known])
    inner = f"{_name(first, above)}(h)" if alone else f"F.{call.op}(h{given})"
    return inner, _name(second, above) if linear else "F.linear"


def _above(paths: list[str]) -> str:
    """The layer that holds all of these."""
    parts = [path.split(".")[:-1] for path in paths]
    same = 0
    while parts and all(len(each) > same and each[same] == parts[0][same] for each in parts):
        same += 1
    return ".".join(parts[0][:same]) if parts else ""


def _name(path: str, above: str) -> str:
    """Return a layer's name as its holder calls it; a part of a sequence by the sequence's own."""
    below = path.removeprefix(f"{above}.") if above else path
    if below.isdigit() and above:
        return f"{above.rpartition('.')[2]}[{below}]"
    return "self" + "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in below.split("."))


RULE = Rule(
    "saved-activation-inputs",
    "a cheap operation whose input and output are both saved for backward",
    find,
    trades=True,
    edits=True,
)
