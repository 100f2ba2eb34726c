"""Layers whose floating-point operations are not told, and why."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gradscope.attribute.align_steps import Assigned
from gradscope.attribute.cost_table import Contribution
from gradscope.attribute.nodes import nearest
from gradscope.attribute.rows import Category
from gradscope.ops import is_product
from gradscope.tables import LayerRow, RowKind

_UNSEEN = "the step that counts them saw no call of theirs"
EMPTY = "in the step that counts them they were given nothing to compute, as experts without tokens are"
BESIDE = "in other measured steps than the one that counts them they ran uncompiled too, as in an evaluation"
NO_FORMULA = "torch has no formula for what they compute"
NO_FORMULA_OR_COMPILED = (
    "they run inside of functions that torch.compile was given and Inductor did not compile, or torch has no formula "
    "for what they compute"
)
WITHIN = "torch does not tell what some kernels of theirs compute, in compiled code"


def uncounted(
    assigned: Assigned, parts: Sequence[Contribution], names: Sequence[str], rows: Sequence[LayerRow]
) -> tuple[frozenset[int], frozenset[int]]:
    """Rows of layers with products of matrices in forward that nobody counted: of a compiled function.

    Returns:
        Those of what ran beside its graphs, and those of kernels in these whose nodes are not known.
    """
    counted = np.array([is_product(name) for name in names])
    found = set[int](), set[int]()
    for part in parts:
        if part.given is None:  # else a graph's, which counts its own
            owner = part.owner(assigned)
            mine = (part.category(assigned) == Category.FORWARD) & (owner >= 0) & counted[part.op]
            mine &= assigned.steps.of_row[part.row] >= 0
            within = nearest(assigned.skeleton.table, part.row, (RowKind.GRAPH,)) >= 0
            for layers, here in zip(found, (~within, within), strict=True):
                layers.update(owner[mine & here].tolist())
    beside, within_graphs = (frozenset(row for row in layers if not rows[row].forward_flops) for layers in found)
    return beside, within_graphs


def untold(layers: int, *, why: str = _UNSEEN) -> list[str]:
    """The note on so many layers; none where there are none."""
    if not layers:
        return []
    who = "1 layer" if layers == 1 else f"{layers} layers"
    return [f"FLOPs of {who} are not told, nor of what holds them: {why}"]
