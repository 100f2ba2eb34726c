"""Which layers keep more for backward with each further sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradscope.fitting.result import LayerGrowth
from gradscope.report.fold import FoldedNode, build_tree
from gradscope.tables import LayerRow, ModuleInfo


def layer_growth(infos: Sequence[ModuleInfo], growth: Mapping[str | None, int]) -> tuple[LayerGrowth, ...]:
    """One row a layer, in the order of ``infos``, from the bytes of each path."""
    totals = {info.path: growth.get(info.path, 0) for info in infos}
    for info in reversed(infos):  # parents come before their children
        if info.parent is not None:
            totals[info.parent] += totals[info.path]
    return tuple(
        LayerGrowth(
            info.path, info.class_name, info.parent, info.parameters, growth.get(info.path, 0), totals[info.path]
        )
        for info in infos
    )


@dataclass(frozen=True, slots=True)
class FoldedGrowth:
    """Layers of one kind, repeats summed."""

    address: str  # "transformer.h.*.attn"
    class_name: str
    layers: int
    bytes: int  # self


def folded_growth(layers: Sequence[LayerGrowth], model: str) -> list[FoldedGrowth]:
    """Layers that keep more with each sample by themselves, largest first; repeated blocks are one."""
    nodes = [node for root in build_tree([_row(layer) for layer in layers], 0, model) for node in root.walk()]
    grown = [_folded(node, model) for node in nodes if node.own.saved_bytes]
    return sorted(grown, key=lambda item: -item.bytes)


def _folded(node: FoldedNode, model: str) -> FoldedGrowth:
    return FoldedGrowth(
        node.address or node.label or model, node.class_name, len(node.paths), node.own.saved_bytes or 0
    )


def _row(layer: LayerGrowth) -> LayerRow:
    return LayerRow(
        path=layer.path,
        class_name=layer.class_name,
        parent=layer.parent,
        calls=1,
        parameters=layer.parameters,
        source=None,
        forward_self_ns=0,
        forward_total_ns=0,
        backward_self_ns=0,
        backward_total_ns=0,
        recompute_ns=0,
        accumulate_ns=0,
        gradient_sum_ns=0,
        backward_share=0.0,
        saved_bytes=layer.saved_bytes_per_sample,
        saved_total_bytes=layer.saved_total_bytes_per_sample,
    )
