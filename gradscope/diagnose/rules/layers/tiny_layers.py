"""A Python loop of many tiny operations: call overhead takes longer than the computation.

Example::

    for t in range(x.shape[1]):  # 3 operations of a few numbers, for each time step
        h = torch.tanh(self.w(x[:, t]) + self.u(h))

Pattern: 64 or more calls a step in one function, where the same call, of one layer or of the layers of a list that do
not follow from each other, is made at least 8 times as often as the function runs, 80 % of them so small that what a
call costs by itself is more than what it computes: fewer than 16,384 numbers and 400,000 floating-point operations on a
CPU, a million and 100 million on a GPU. The lines must make 10 % of the step and take less than 100 µs a call, forward
and backward: else it is not the calls.

Evidence: calls a step, the number of iterations, the mean time of a call with its backward. Estimate: 0.7 and more of
that time with all iterations in one call; 0.3 to 0.9 where each iteration needs the one before (on a CPU, Python loops
against torch's own: RNN 0.4, GRU 0.3, LSTM 0.7 to 0.9).

Source: PyTorch, Performance Tuning Guide (fuse operations, torch.compile); H. He, Making Deep Learning Go Brrrr From
First Principles (2022), on overhead.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule, share
from gradscope.diagnose.findings import Estimate, make_finding, several
from gradscope.ops import CONVOLUTIONS, MATMULS
from gradscope.recording.graph import Node, Value
from gradscope.tables import Finding
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import percent

_CALLS, _ROUNDS, _TINY, _SHARE = 64, 8, 0.8, 0.10
_MEAN_NS = 100_000
_ELEMENTS, _FLOPS = {"cpu": 16_384, "cuda": 1_000_000}, {"cpu": 400_000, "cuda": 100_000_000}
_PRODUCTS = MATMULS | CONVOLUTIONS
_FREE = frozenset({"getitem", "view", "reshape", "transpose", "unsqueeze", "squeeze", "backward", "detach", "chunk"})

_Place = tuple[str | None, str, str]  # source, operation, layer with a star for its last number
_LAST_NUMBER = re.compile(r"(?<![^.])\d+(?=(?:\.[^.\d][^.]*)*$)")


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each function that loops over tiny operations."""
    functions: defaultdict[tuple[str, str], list[Node]] = defaultdict(list)
    for call in case.facts.calls:
        if call.source is not None and call.function_name is not None and call.layer is not None and call.grad:
            functions[call.source.rpartition(":")[0], call.function_name].append(call)
    for calls in functions.values():
        finding = _judged(case, calls)
        if finding is not None:
            yield finding


def _judged(case: Case, calls: list[Node]) -> Finding | None:
    looped = _looped(case, calls)
    working = [call for call in looped if call.op not in _FREE]
    if len(working) < _CALLS or sum(map(_is_tiny, working)) < _TINY * len(working):
        return None
    sources = Counter(call.source for call in looped)
    lines = [source for source in sources if source is not None]
    spent = case.lines_ns(lines)
    mean = spent / len(looped)
    if share(spent, case) < _SHARE or mean > _MEAN_NS:
        return None
    # A call on the same line may be made in some iterations only.
    rounds = min((len(made) for made in _turns(working).values() if len(made) >= _ROUNDS), default=_ROUNDS)
    in_turn = _in_turn(case, working)
    low, high = (0.3, 0.9) if in_turn else (0.7, 1 - 1 / rounds)
    saving = round(spent * (low + high) / 2)
    if in_turn:
        advice = "Use nn.LSTM, nn.GRU or a scan where one fits, torch.compile the loop, or use a larger batch"
        code = "model = torch.compile(model)"
    else:
        advice = "Replace the loop by one batched matmul, or torch.compile it"
        code = "torch.einsum('bhqd,bhkd->bhqk', q, k)  # all heads at once, instead of one by one"
    most = max(lines, key=lambda source: case.lines_ns([source]))
    return make_finding(
        RULE.name,
        case,
        Estimate(saving, round(spent * low), round(spent * high)),
        layers=(call.layer for call in looped),
        line=most,
        message="A Python loop calls many tiny operations: call overhead takes longer than the computation",
        evidence=(
            f"{counted(len(looped))} calls per step on {several(len(lines), 'line')}, "
            f"{counted(rounds)} iterations; {time_text(mean)} per call including backward, "
            f"{time_text(spent)} in total, {percent(share(spent, case))} of the step"
        ),
        cost_ns=spent,
        advice=f"{advice}.",
        code=code,
    )


def _looped(case: Case, calls: list[Node]) -> list[Node]:
    """The calls on lines that run far more often than their function: those of a loop."""
    runs = _runs(case, calls)
    turns = _turns(calls)
    often = {key: made for key, made in turns.items() if _count(case, made) >= _ROUNDS * runs}
    # Layers of a list that follow from each other are a stack, and no loop that could be one call.
    inside = {
        key[0] for key, made in often.items() if len({call.layer for call in made}) == 1 or not _needs(case, made)
    }
    return [call for call in calls if call.source in inside]


def _count(case: Case, made: list[Node]) -> float:
    """Count a call's iterations of the loop: layers inside an nn.Sequential are a stack, all of them one."""
    stacks = {call.layer for call in made if call.module == "Sequential" and call.layer in case.layers}
    inside = sum(call.layer in stacks for call in made)
    return len(made) - inside + min(inside, sum(case.layers[path].calls for path in stacks if path is not None))


def _turns(calls: list[Node]) -> dict[_Place, list[Node]]:
    """The same call on the same line, of one layer or of those of one list."""
    found: defaultdict[_Place, list[Node]] = defaultdict(list)
    for call in calls:
        found[call.source, call.op, _LAST_NUMBER.sub("*", call.layer or "")].append(call)
    return dict(found)


def _runs(case: Case, calls: list[Node]) -> float:
    """Count how often the function ran: as often as the module whose method it is, the outermost layer."""
    own = {call.layer for call in calls if call.module is None and call.layer is not None}
    layers = own or {call.layer.rpartition(".")[0] for call in calls if call.layer is not None}
    return max((case.layers[path].calls for path in layers if path in case.layers), default=1.0) or 1.0


def _is_tiny(call: Node) -> bool:
    tensors = (*call.inputs, *call.outputs)
    device = "cuda" if any(tensor.device.type == "cuda" for tensor in tensors) else "cpu"
    if call.op in _PRODUCTS:
        return _flops(call) <= _FLOPS[device]
    return max((tensor.elements for tensor in tensors), default=0) <= _ELEMENTS[device]


def _flops(call: Node) -> int:
    """Return a matmul's FLOPs, or a bound: each number of the result is a sum along what operands share."""
    made = sum(tensor.elements for tensor in call.outputs)
    inner = min((_width(tensor) for tensor in call.inputs[:2]), default=1)
    return 2 * made * inner


def _width(tensor: Value) -> int:
    rows = tensor.shape[0] if tensor.shape else 1
    return max(tensor.elements // rows if tensor.parameter and rows else tensor.shape[-1] if tensor.shape else 1, 1)


def _in_turn(case: Case, calls: list[Node]) -> bool:
    """Check that an iteration needs a matmul of the one before, as in a recurrence; a running sum is none."""
    by_place = _turns(calls)
    products = [turns for (_, op, _), turns in by_place.items() if op in _PRODUCTS]
    return any(_needs(case, turns) for turns in products or by_place.values())


def _needs(case: Case, turns: list[Node]) -> bool:
    if len(turns) < 2:
        return False
    earlier, later = turns[0], turns[-1]
    reached = {later.index}
    for index in range(later.index, earlier.index, -1):
        if index in reached:
            reached |= {one.producer.index for one in case.call(index).inputs if one.producer is not None}
    return earlier.index in reached


RULE = Rule("tiny-layers", "a loop of operations so small that call overhead dominates", find, edits=True)
