"""Activation checkpointing recomputes expensive matmuls, whose outputs are small for their time.

Example::

    x = checkpoint(block, x, use_reentrant=False)  # recomputes everything, also the most expensive matmuls

Pattern: forward that backward runs again (recompute) behind a checkpoint. Evidence: its measured time, how much of it
is matmuls, and, from the recorded calls, about what the covered layers would otherwise keep. Estimate: the matmuls'
time, which is saved when their outputs are kept (selective checkpointing); the cheap operations between them are still
recomputed, and the policy is asked at each operation, in forward and again: 6 µs each are taken off (a dispatch mode
that does nothing took 5.5). Low: that over 1.5; high: all that is run again less the same.

Source: T. Chen et al., Training deep nets with sublinear memory cost (arXiv:1604.06174); V. Korthikanti et al.,
Reducing activation recomputation in large transformer models (arXiv:2205.05198), selective recomputation;
https://pytorch.org/docs/stable/checkpoint.html (create_selective_checkpoint_contexts).
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule, first, layers_of, share
from gradscope.diagnose.compiled import facts_of, is_the_partitioners
from gradscope.diagnose.findings import Estimate, make_finding
from gradscope.diagnose.worth import self_ns, slowest_line
from gradscope.ops import (
    ATEN,
    ATEN_ATTENTION,
    ATEN_CONVOLUTIONS,
    ATEN_MATMULS,
    ATTENTION,
    PRODUCTS,
    SAVES_EACH_OTHER,
    SAVES_INPUT,
    SAVES_RESULT,
)
from gradscope.recording.graph import Node, Value
from gradscope.tables import CHECKPOINT, Finding, OpRow
from gradscope.units import ns as time_text
from gradscope.units import percent
from gradscope.units import size as size_text

LEAST_SHARE = 0.03  # of the step
_ASKED_NS = 6_000  # selective checkpointing's policy, an operation
LEAST_OF_CHEAP = 0.10  # without matmuls and convolutions: less is what checkpointing is taken for

_PRODUCT_ROWS = ATEN_MATMULS | ATEN_CONVOLUTIONS | {"aten::mv"}
_SAVES_INPUTS = PRODUCTS | SAVES_EACH_OTHER


def find(case: Case) -> Iterator[Finding]:
    """Yield one finding for all that is run again."""
    again = case.run.ledger.recompute_ns
    if share(again, case) < LEAST_SHARE or is_the_partitioners(case) or not _is_checkpointed(case):
        return
    rows = [row for row in case.run.ops if row.phase == "recompute"]
    products = [row for row in rows if row.name in _PRODUCT_ROWS or row.name.startswith(ATEN_ATTENTION)]
    layers = sorted({row.layer for row in rows if row.layer is not None and row.name.startswith(ATEN)})
    # A bias is copied to where the matmul is added to it.
    biases = [row for row in rows if row.name == "aten::copy_" and _is_product(case, row)]
    saving = self_ns((*products, *biases))
    asking = round(2 * sum(row.calls for row in rows if row.name.startswith(ATEN)) * _ASKED_NS)
    worth = 2 * saving >= again and saving > asking
    if not worth and share(again, case) < LEAST_OF_CHEAP:
        return
    held, results = _bytes_of(case, set(layers))
    evidence = f"recomputing forward takes {time_text(again)}, {percent(share(again, case))} of the step"
    if saving:
        evidence += f"; matmuls are {time_text(saving)} of that"
    if saving and results > held:  # what backward does not read is kept too where a policy says so
        evidence += f"; saving their outputs instead would take about {size_text(results)}"
    elif held:
        evidence += f"; saving these layers' tensors instead would take about {size_text(held)}"
        if results and saving:
            evidence += f", of which matmul outputs are {size_text(results)}"
    units = _units(case)
    gain = Estimate(saving - asking, round((saving - asking) / 1.5), again - asking) if worth else None
    yield make_finding(
        RULE.name,
        case,
        gain,
        layers=units,
        line=_line(case, set(layers)),
        message="Checkpointing recomputes the forward pass" + (", mostly expensive matmuls" if worth else ""),
        evidence=evidence,
        advice=(
            "Save the matmul outputs and recompute only the cheap operations (selective checkpointing)."
            if worth
            else f"If memory allows, checkpoint fewer layers: {_costs(units)}."
        ),
        code=_code(products) if worth else "checkpoint(block, x, use_reentrant=False) if index % 2 else block(x)",
        cost_ns=again,
    )


def _is_checkpointed(case: Case) -> bool:
    """Check that it is checkpointing that runs forward again, as far as that can be told.

    A custom Function's ``backward`` may do so for reasons of its own: torchdiffeq's adjoint solves an equation there.
    """
    if facts_of(case).get("checkpointed") or any(row.node == CHECKPOINT for row in case.saved):
        return True
    return not case.saved or any("heckpoint" in row.name for row in case.run.ops)


def _units(case: Case) -> dict[str, int]:
    """The layers that are run again as a whole, in the order of the model, and the time of each; not those below."""
    again = {row.path: row.recompute_ns for row in case.run.layers if row.recompute_ns and row.path}
    found: dict[str, int] = {}
    for path in again:
        parts = path.split(".")
        above = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
        top = next(each for each in above if each in again)
        found[top] = found.get(top, 0) + again[path]
    return found


def _costs(units: dict[str, int]) -> str:
    if not units:
        return "each costs one extra forward"
    if len(units) == 1:
        return f"{first(list(units))} takes {time_text(sum(units.values()))}"
    return f"{first(list(units))} take {time_text(sum(units.values()) // len(units))} each on average"


def _is_product(case: Case, row: OpRow) -> bool:
    """Check that the row's layer is a matmul or a convolution and nothing else."""
    layer = case.layers.get(row.layer) if row.layer is not None else None
    return layer is not None and layer.class_name in {"Linear", "Conv1d", "Conv2d", "Conv3d"}


def _line(case: Case, layers: set[str]) -> str | None:
    """Return the checkpoint call's line, where a node tells it; else that of most time in the layers."""
    calls = (row.line for row in case.saved if row.node == "CheckpointFunctionBackward" and row.line is not None)
    call = next(calls, None)
    if call is not None:
        return call
    return slowest_line(case, layers)


def _code(products: list[OpRow]) -> str:
    short = [row.name.removeprefix(ATEN) for row in products]
    # Every kernel of convolution's is called through the one operation.
    names = sorted({"convolution" if "conv" in name else name for name in short})
    ops = ", ".join(f"torch.ops.aten.{name}.default" for name in names)
    contexts = f"functools.partial(create_selective_checkpoint_contexts, [{ops}])"
    return f"checkpoint(block, x, use_reentrant=False, context_fn={contexts})"


def _bytes_of(case: Case, layers: set[str]) -> tuple[int, int]:
    """Estimate what these layers would save without checkpointing, beyond what they do; and matmuls' results."""
    covered = {path for path in layers if path in case.layers and not case.layers[path].saved_bytes}
    kept: dict[int, int] = {}
    results: dict[int, int] = {}
    masks = 0
    for call in case.facts.calls:
        if not call.grad or covered.isdisjoint(layers_of(case, call)):
            continue
        masks += _mask_bytes(case, call)
        for tensor in _kept(call):
            kept[tensor.storage] = max(kept.get(tensor.storage, 0), tensor.bytes)
        if call.op in PRODUCTS:
            results |= {tensor.storage: tensor.bytes for tensor in call.outputs}
    already = sum(row.bytes for row in case.saved if row.node == CHECKPOINT)
    return max(sum(kept.values()) + masks - already, 0), sum(results.values())


def _kept(call: Node) -> list[Value]:
    found: list[Value] = []
    if call.op in _SAVES_INPUTS:
        found += call.inputs
    elif call.op in SAVES_INPUT:
        found += call.inputs[:1]
    if call.op in SAVES_RESULT | {ATTENTION}:
        found += call.outputs
    return [tensor for tensor in found if tensor.parameter is None and tensor.dtype.is_floating_point]


def _mask_bytes(case: Case, call: Node) -> int:
    if call.op != "dropout" or not call.outputs or call.argument(2, "training", True) is False:
        return 0
    return call.outputs[0].elements if case.on_cuda else call.outputs[0].bytes


RULE = Rule("checkpoint-share", "checkpointing that recomputes expensive matmuls", find)
