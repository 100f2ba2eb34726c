"""Unnecessary copies of tensors.

Example::

    k = k.transpose(1, 2).contiguous()  # scaled_dot_product_attention reads the view as well
    out = torch.cat([out, part], dim=1)  # in a loop: copies all parts so far in every iteration
    x = x + position.repeat(batch, 1, 1)  # an addition broadcasts by itself

Pattern, by the recorded calls, only where the result would be the same without the copy: contiguous or clone of heads
that only attention reads; clone of what nobody writes to; a chain of cat whose links are read by the next link alone;
repeat along dimensions of one for elementwise operations; cat of the results of heads that are modules of one class.
Evidence: bytes written by these calls in one step, and the time of the layer's copies, by their part of the layer's
copied bytes. Estimate: 0.8 of that time, since what reads the result then fetches it itself; of a chain what is more
than one cat of all parts (low: half; high: 1.5 times, as the copies' backward passes go as well).

Source: https://pytorch.org/docs/stable/tensor_view.html; PyTorch's performance tuning guide
(https://pytorch.org/tutorials/recipes/recipes/tuning_guide.html).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule, changed_in_place, replaced_calls, share
from gradscope.diagnose.findings import Estimate, make_finding
from gradscope.ops import ATTENTION
from gradscope.recording.graph import Node
from gradscope.tables import Finding
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import size as size_text

_READING = 0.2  # of a copy's time: its reader is no longer given a tensor that is in the cache
LEAST_TIME, LEAST_BYTES = 0.005, 0.01  # of the step's time and of the bytes that it allocates

_ELEMENTWISE = frozenset({"add", "sub", "rsub", "mul", "div", "rdiv", "where", "maximum", "minimum", "addcmul", "lerp"})
_PRODUCTS = frozenset({"matmul", "bmm", "linear", ATTENTION})
_COPYING = frozenset({"contiguous", "clone", "reshape", "repeat", "flatten"})
_ROWS = frozenset({"aten::copy_", "aten::clone", "aten::contiguous", "aten::repeat", "aten::reshape"})

# kind: message, advice, code
_WORDS = {
    "attention": (
        "Heads are copied before attention, which can read the view directly",
        "Remove the copy: scaled_dot_product_attention accepts any layout whose last dimension is contiguous.",
        "F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))",
    ),
    "clone": (
        "A tensor is cloned, but neither the tensor nor the clone is modified",
        "Remove the clone and use the original tensor.",
        "y = x",
    ),
    "chain": (
        "A tensor grows by torch.cat in every iteration, which copies all of it each time",
        "Append the parts to a list and call torch.cat once after the loop.",
        "parts.append(part); out = torch.cat(parts, dim)",
    ),
    "repeat": (
        "A tensor is repeated for an operation that broadcasts anyway",
        "Remove the repeat, or use expand, which does not copy.",
        "x + y.expand_as(x)",
    ),
    "heads": (
        "Heads are computed one by one and then concatenated",
        "Compute all heads at once: one projection for all heads, and a view with a head dimension.",
        "q = self.q(x).unflatten(-1, (heads, -1)).transpose(1, 2)",
    ),
}


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each line with copies of one kind."""
    left_out, changed = replaced_calls(case), changed_in_place(case)
    found: defaultdict[tuple[str, str], list[Node]] = defaultdict(list)
    for call in case.facts.calls:
        if call.source is None or not _copies(call) or call.outputs[0].storage in changed:
            continue
        kind = _kind(case, call, changed)
        # Whatever a recipe would do besides: attention needs no copy as it is.
        if kind == "attention" or (kind is not None and call.index not in left_out):
            found[kind, call.source].append(call)
    for (kind, source), calls in found.items():
        # A short chain costs no more than the list would.
        if kind != "chain" or len(calls) / len({call.layer for call in calls}) >= 2:
            yield from _findings(case, kind, source, calls)


def _copies(call: Node) -> bool:
    """Check that the call wrote its result to memory of its own."""
    if call.op not in {"contiguous", "clone", "repeat", "cat"} or not call.inputs or not call.outputs:
        return False
    return all(tensor.storage != call.outputs[0].storage for tensor in call.inputs)


def _kind(case: Case, call: Node, changed: set[int]) -> str | None:
    given, users = call.inputs[0], call.outputs[0].users
    if not users:
        return None
    if call.op == "cat":
        return _kind_of_cat(case, call, users)
    if given.strides is None or given.storage in changed:
        return None
    if call.op == "repeat":
        return "repeat" if all(user.op in _ELEMENTWISE for user in users) and _broadcasts(call) else None
    if call.kwargs.get("memory_format") is not None:
        return None
    if all(_reads_views(case, user) for user in users) and given.strides[-1:] == (1,) and 0 not in given.strides:
        return "attention"
    plain = call.op == "clone" and given.producer is not None and given.requires_grad
    return "clone" if plain and given.strides == call.outputs[0].strides else None


def _reads_views(case: Case, user: Node) -> bool:
    """Check that the reader is attention by a kernel that takes strides; on a CPU, dropout needs plain products."""
    return user.op == ATTENTION and (case.on_cuda or not user.argument(4, "dropout_p", 0.0))


def _kind_of_cat(case: Case, call: Node, users: list[Node]) -> str | None:
    if all(user.op == "cat" and (user.source, user.layer) == (call.source, call.layer) for user in users):
        return "chain" if len(users) == 1 else None
    made = call.outputs[0]
    if _dimension(call) not in (-1, len(made.shape) - 1) or len({tensor.shape for tensor in call.inputs}) != 1:
        return None
    makers = [tensor.producer for tensor in call.inputs]
    paths = {maker.layer for maker in makers if maker is not None and maker.op in _PRODUCTS and maker.layer}
    rows = [case.layers[path] for path in paths if path in case.layers]
    same = len({(row.class_name, row.parent) for row in rows}) == 1
    own = same and rows[0].class_name not in {"Linear", "Bilinear"}  # a linear layer is no head
    return "heads" if own and len(rows) == len(makers) >= 2 else None


def _dimension(call: Node) -> int:
    found = call.argument(1, "dim", 0)
    return found if type(found) is int else 0


def _broadcasts(call: Node) -> bool:
    """Check that ``repeat`` only makes more of dimensions of one, or new ones."""
    given, made = call.inputs[0].shape, call.outputs[0].shape
    return all(a in (1, b) for a, b in zip(reversed(given), reversed(made), strict=False)) and given != made


def _findings(case: Case, kind: str, source: str, calls: list[Node]) -> Iterator[Finding]:
    total = sum(call.outputs[0].bytes for call in calls)
    spent = min(sum(_time(case, call) for call in calls), float(_forward_ns(case, source)))
    memory = case.run.memory
    of_weight = memory is not None and total >= LEAST_BYTES * max(memory.step_allocated_bytes, 1)
    if share(round(spent), case) < LEAST_TIME and not of_weight:
        return
    message, advice, code = _WORDS[kind]
    evidence = f"{counted(len(calls))} cop{'y' if len(calls) == 1 else 'ies'}, {size_text(total)} per step"
    if spent:
        evidence += f", {time_text(spent)} of forward"
    saving = round(spent * (1 - _left(kind, calls)))
    yield make_finding(
        RULE.name,
        case,
        Estimate(saving, round(saving / 2), round(saving * 1.5)),
        layers=(call.layer for call in calls),
        line=source,
        message=message,
        evidence=evidence,
        advice=advice,
        code=code,
        cost_ns=max(case.lines_ns([source]), round(spent)),
    )


def _left(kind: str, calls: list[Node]) -> float:
    """Return the part of the copies' time that the cure takes itself."""
    if kind != "chain":
        return _READING
    layers: dict[str | None, int] = {}
    for call in calls:
        layers[call.layer] = max(layers.get(call.layer, 0), call.outputs[0].bytes)
    return sum(layers.values()) / max(sum(call.outputs[0].bytes for call in calls), 1)


def _time(case: Case, call: Node) -> float:
    """Return the time of a copy: its part of what the layer's copies take in forward."""
    cat = call.op == "cat"
    names = {"aten::cat"} if cat else _ROWS
    spent = sum(row.self_ns for row in case.ops.get((call.layer, "forward"), ()) if row.name in names)
    return spent * call.outputs[0].bytes / max(_copied(case, call.layer, cat=cat), 1)


def _copied(case: Case, layer: str | None, *, cat: bool) -> int:
    ops = {"cat"} if cat else _COPYING
    return sum(
        call.outputs[0].bytes
        for call in case.facts.calls
        if call.layer == layer and call.op in ops and call.outputs
        if all(tensor.storage != call.outputs[0].storage for tensor in call.inputs)
    )


def _forward_ns(case: Case, source: str) -> int:
    row = case.lines.get(source)
    return 0 if row is None else row.forward_ns


RULE = Rule("copies", "unnecessary copies", find, edits=True)
