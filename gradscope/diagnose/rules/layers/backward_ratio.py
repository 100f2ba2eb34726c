"""A layer's backward takes far longer, compared with its forward, than is usual for its kind.

Example::

    bias = self.table[self.position.view(-1)]  # backward: index_put_ with accumulate, one row after the other
    y = MyFunction.apply(x)  # backward: a loop in Python

Pattern: a layer's own backward time against what is usual for the kind, times its own forward time. Measured on a CPU
with one thread: linear layers 2.0, convolutions 2.0 to 2.5, attention 2.1, recurrent layers 1.5 to 1.8, norms 0.2 to
2.3, activations up to 1.6, embeddings 1.5 to 2.9 while the table is not much larger than the batch, grid_sample 3.9.
It fires from twice the norm on, where what is above it is 5 % of the step and half a millisecond, in each measured
step, and one operation makes most of it. An operation that is not known to be slow must be so in four steps,
steadily. Views cost nothing in forward, so concatenating their gradients is no reason; gradients that are made as
large as a table or a sequence have rules of their own (embedding-dense-gradient, tied-embedding, slices-zero-filled,
slices-written). Matmuls in bfloat16 or float16 on a CPU without instructions for them are far slower in backward than
in forward, and are advised to be float32. Each pass that keeps the graph for another adds a norm; where gradients are
differentiated again (``create_graph``) nothing is said, for a layer's backward then has the nodes of that graph as
well.

Evidence: both times, their ratio, and the operation of the backward phase with the largest excess. Estimate: three
quarters of what is above the norm (half to all of it): another way to compute the same takes time as well.

Source: PyTorch issues 15245 (backward of indexing against gather and F.embedding) and 20655 (repeated rows).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from gradscope.diagnose.case import Case, Rule, first, layers_of
from gradscope.diagnose.findings import Estimate, make_finding
from gradscope.diagnose.worth import slowest_line
from gradscope.ops import ATEN, COMPILED_NODE, GENERATED, MATMULS, PRODUCTS, ZEROS_OF_UNUSED
from gradscope.recording.graph import HALVES
from gradscope.tables import Finding, LayerRow, OpRow
from gradscope.units import ns as time_text
from gradscope.units import ratio as ratio_text

_LEAST_SHARE, _LEAST_NS = 0.05, 500_000
_MARGIN = 2.0
_LIKELY = 0.75  # of what is above the norm
_STEPS = 4
_NORM = 2.5
_NORMS = (("Embedding", 3.0), ("Attention", 2.5), ("Conv", 2.5), ("Norm", 2.5), ("Linear", 2.2))
_OWN_NORMS = {"grid_sampler_2d_backward": 4.5, "grid_sampler_3d_backward": 4.5}

# Below this a forward is views and Python: a ratio to it says nothing, unless the operation is known to be slow.
_FORWARD_NS = 50_000

# Part of the operation's name -> what it is, what to do, the line of Python.
_KNOWN = (
    (
        "index_put",
        (
            "accumulates rows one at a time",
            "Use index_select (on a GPU: F.embedding) for the lookup, and look up repeated rows only once",
            "rows = table.index_select(0, index)",
        ),
    ),
    (
        "embedding",
        (
            "accumulates repeated rows one at a time",
            "If the table is small, multiply it with one-hot rows: one matmul",
            "rows = F.one_hot(tokens, len(table)).to(table.dtype) @ table",
        ),
    ),
    (
        "cumprod_backward",
        (
            "divides and sums over every prefix",
            "If all factors are positive, sum their logarithms instead",
            "torch.exp(torch.cumsum(torch.log(x), dim))",
        ),
    ),
)
_ELSEWHERE = ("select_backward", "slice_backward", "SelectBackward", "SliceBackward")
# What views and broadcasting cost in backward only: free in forward, and as it should be.
_OF_VIEWS = ("cat", "sum", "copy_", "clone", "contiguous", "zeros", "zero_", "fill_", "new_zeros", "stack", "col2im")


# Calls that start a backward pass, and what torch names the nodes of a gradient's own gradient.
_PASSES, _SECOND = {"backward", "grad"}, "BackwardBackward"


@dataclass(frozen=True)
class _Slow:
    row: LayerRow
    backward_ns: int
    norm: float
    cause: OpRow

    @property
    def excess_ns(self) -> int:
        return round(self.backward_ns - self.norm * self.row.forward_self_ns)


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for each kind of layer and cause."""
    if _is_differentiated_again(case):
        return
    found: defaultdict[tuple[str, str], list[_Slow]] = defaultdict(list)
    for row in case.layers.values():
        slow = _judged(case, row)
        if slow is not None:
            found[row.class_name, slow.cause.name].append(slow)
    for layers in found.values():
        excess = sum(each.excess_ns for each in layers)
        if excess >= max(_LEAST_NS, _LEAST_SHARE * case.step_ns):
            yield _finding(case, layers, excess)


def _is_differentiated_again(case: Case) -> bool:
    """Check that a pass makes a graph of its own, as for a gradient penalty: by its call, or the nodes' names."""
    asked = any(call.op in _PASSES and call.kwargs.get("create_graph") is True for call in case.facts.calls)
    return asked or any(_SECOND in op.name for op in case.run.ops)


def _passes(case: Case) -> int:
    """Return how often a step may go backward through the same graph."""
    passes = [call for call in case.facts.calls if call.op in _PASSES]
    kept = sum(call.kwargs.get("retain_graph") is True for call in passes)
    return max(1, min(1 + kept, len(passes)))  # the last one may keep it for nobody


def _judged(case: Case, row: LayerRow) -> _Slow | None:
    """The layer, where it is slow in each of the measured steps."""
    backward = min(row.backward_self_steps_ns, default=row.backward_self_ns)
    if not backward:
        return None
    forward = {op.name: op.self_ns for op in case.ops.get((row.path, "forward"), ())}
    rows = case.ops.get((row.path, "backward"), [])
    if not rows:
        return None
    passes = _passes(case)
    norm = _norm(case, row) * passes
    cause = max(rows, key=lambda op: op.self_ns - norm * forward.get(op.name, 0))
    if cause.name.startswith(GENERATED) or cause.name == ZEROS_OF_UNUSED:
        return None  # in compiled code no kernel has one in forward to be compared with
    if any(part in cause.name for part in _ELSEWHERE) or _is_large_table(case, row, cause):
        return None
    norm = max(norm, _OWN_NORMS.get(_plain(cause.name), 0.0) * passes)
    computed = sum(ns for name, ns in forward.items() if name != "(python)")
    known = _known(cause.name) is not None
    if not known and (computed < _FORWARD_NS or _plain(cause.name) in _OF_VIEWS):
        return None
    by_hand = _is_written_by_hand(rows)
    if not known and not by_hand and not _steady(row):
        return None
    slow = _Slow(row, backward, norm, cause)
    if backward < _MARGIN * norm * row.forward_self_ns or slow.excess_ns <= 0:
        return None
    mostly = cause.self_ns - norm * forward.get(cause.name, 0) >= 0.4 * slow.excess_ns
    return slow if mostly or by_hand else None


def _is_large_table(case: Case, row: LayerRow, cause: OpRow) -> bool:
    """Check that an embedding's table has more rows than the batch looks up: its size costs then, not the look-ups."""
    if "mbedding" not in cause.name:
        return False
    ops = {"embedding", "embedding_bag"}
    calls = [call for call in case.facts.calls if call.op in ops and row.path in layers_of(case, call)]
    tables = [(call.inputs[0].elements, call.inputs[1].shape[0]) for call in calls if len(call.inputs) > 1]
    return any(rows >= tokens for tokens, rows in tables)


def _steady(row: LayerRow) -> bool:
    """Check that the layer took about as long in every step: on a busy machine threads wait for each other."""
    steps = row.backward_self_steps_ns
    return len(steps) >= _STEPS and max(steps) <= 2 * min(steps)


def _norm(case: Case, row: LayerRow) -> float:
    name = case.facts.classes.get(row.path, row.class_name)
    return next((norm for part, norm in _NORMS if part in name), _NORM)


def _plain(name: str) -> str:
    return name.removeprefix(ATEN)


def _known(name: str) -> tuple[str, str, str] | None:
    return next((about for part, about in _KNOWN if part in name.lower()), None)


def _is_written_by_hand(rows: list[OpRow]) -> str | None:
    """The name of a node of the user's own autograd.Function: torch's end in a number."""
    names = (op.name for op in rows if "::" not in op.name and op.name != COMPILED_NODE)
    return next((name for name in names if re.fullmatch(r"\w+Backward", name)), None)


def _finding(case: Case, layers: list[_Slow], excess: int) -> Finding:
    paths = tuple(each.row.path for each in layers)
    forward = sum(each.row.forward_self_ns for each in layers)
    backward = sum(each.backward_ns for each in layers)
    cause = layers[0].cause
    known = _known(cause.name)
    by_hand = _is_written_by_hand(case.ops.get((paths[0], "backward"), []))
    if known is not None:
        what, advice, code = known
        message = f"Backward is unusually slow compared with forward: {_plain(cause.name)} {what}"
    elif by_hand is not None:
        message = f"The backward of {by_hand.removesuffix('Backward')} is unusually slow compared with its forward"
        advice = f"Find out why its backward calls {_plain(cause.name)}, and call it less"
        code = f"class {by_hand.removesuffix('Backward')}(torch.autograd.Function): ...  # look at backward"
    elif (half := _half_products(case, paths, cause)) is not None:
        message = f"Backward is unusually slow compared with forward: {half} {_plain(cause.name)} on this CPU"
        advice = f"Try these layers in float32: a CPU without {half} instructions takes longer for {half}, not less"
        code = "torch.autocast('cpu', enabled=False)  # around these layers; or leave the model in float32"
    else:
        message = f"Backward is unusually slow compared with forward; most of the excess is {_plain(cause.name)}"
        advice = f"Rewrite this forward so that its backward does not call {_plain(cause.name)}"
        code = f"# find what calls {_plain(cause.name)} in the backward pass of {first(paths, 1) or 'the model'}"
    calls = sum(each.cause.calls for each in layers)
    spent = sum(each.cause.self_ns for each in layers)
    times = ratio_text(backward / forward) if forward else "no ratio"
    return make_finding(
        RULE.name,
        case,
        Estimate(round(_LIKELY * excess), excess // 2, excess),
        layers=paths,
        line=_line(case, paths),
        message=message,
        evidence=(
            f"forward {time_text(forward)}, backward {time_text(backward)}: {times}, usual is "
            f"{ratio_text(layers[0].norm)}; {cause.name} takes {time_text(spent)} in {round(calls)} "
            "calls"
        ),
        cost_ns=backward,
        advice=f"{advice}.",
        code=code,
    )


def _half_products(case: Case, paths: tuple[str, ...], cause: OpRow) -> str | None:
    """Name the dtype of half the width in which a CPU computes the matmuls of these layers, where they are the cause.

    Measured on an AMD EPYC without such instructions, torch 2.13.0+cpu: a gradient's matmul 114 ms in bfloat16, 1 ms in
    float32, and no more than 8 ms in forward.
    """
    if case.on_cuda or _plain(cause.name) not in MATMULS:
        return None
    calls = [
        call for call in case.facts.calls if call.op in PRODUCTS and set(layers_of(case, call)).intersection(paths)
    ]
    return next((each.dtype_name for call in calls for each in call.outputs if each.dtype in HALVES), None)


def _line(case: Case, paths: tuple[str, ...]) -> str | None:
    """The line of these layers on which most backward time was spent."""
    # A function of the user's own is no line of torch's.
    return slowest_line(case, paths) or case.layers[paths[0]].source


RULE = Rule(
    "backward-ratio", "layers whose backward is far slower than their forward suggests", find, of_times=True, edits=True
)
