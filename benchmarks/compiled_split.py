"""How far off is a fused kernel's split between layers, beside the same groups of nodes compiled alone?

Each TARGET is ``file.py:factory``, as for ``gradscope profile``. Its graphs are compiled by Inductor; of each kernel on
the CPU that computes several layers, each layer's nodes are made a graph of their own, compiled, and timed: what a
layer's part takes then is taken for the truth. A kernel's misassigned share is half the sum of the differences to
gradscope's.

Alone a part reads and writes what stays in registers within the fused kernel: it is a truth of parts, not of the whole.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, Result, finish, parser, print_table
from torch import fx

from gradscope.attribute.compiled.blocks import Moved
from gradscope.attribute.compiled.fused import Nodes, shares_of
from gradscope.compat import GraphWatch, watching_graphs
from gradscope.compat.inductor import notes, watch
from gradscope.tables import CompiledGraph, FusedNode, GraphNote
from gradscope.workload import load_target

_RUNS = 15
_CALL_S = 3e-5  # what calling a compiled graph takes
_LEAST_S = 1e-6


def main() -> int:
    options = parser(__doc__)
    options.add_argument("targets", nargs="*", default=[str(ROOT / "examples" / "gpt.py")])
    arguments = options.parse_args()
    torch.set_num_threads(1)
    results: list[Result] = []
    for target in arguments.targets:
        kernels = [kernel for graph, note in compiled_graphs(target) for kernel in fused_kernels(graph, note)]
        torch._dynamo.reset()
        spent = sum(sum(alone.values()) for alone, _ in kernels)
        wrong = sum(sum(alone.values()) * misassigned(alone, shares) for alone, shares in kernels)
        name = Path(target.partition(":")[0]).stem + (f":{target.partition(':')[2]}" if ":" in target else "")
        results.append(Result(f"{name}: kernels of several layers", len(kernels), ""))
        results.append(Result(f"{name}: misassigned of their time", 100.0 * wrong / max(spent, 1e-9), "%"))
        print_table(target, results[-2:])
    return finish("compiled_split", results, arguments.device, arguments.json)


def misassigned(alone: dict[Any, float], shares: dict[Any, int]) -> float:
    """The share of a kernel's time that gradscope gives to another layer than the times of its parts alone."""
    whole, weights = sum(alone.values()), sum(shares.values())
    return sum(abs(alone[layer] / whole - shares.get(layer, 0) / weights) for layer in alone) / 2


def compiled_graphs(target: str) -> list[tuple[fx.GraphModule, GraphNote]]:
    """The graphs that one step of the model is compiled to, with what gradscope notes of them."""
    kept: list[tuple[fx.GraphModule, GraphNote]] = []
    original = watch.noted

    def noted(graph: Any, *rest: Any) -> GraphNote:
        note = original(graph, *rest)
        kept.append((graph, note))
        return note

    def failed(error: Exception) -> None:
        raise error

    workload: Any = load_target(target)
    model, batch = torch.compile(workload.model), workload.batch
    watch.noted = noted
    try:
        with watching_graphs(GraphWatch(), failed):
            out = model(**batch) if isinstance(batch, dict) else model(batch)
            loss = next((each for each in _tensors(out) if each.requires_grad and each.ndim == 0), None)
            (next(_tensors(out)).sum() if loss is None else loss).backward()
    finally:
        watch.noted = original
    return kept


def _tensors(value: Any) -> Any:
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif hasattr(value, "to_tuple"):
        yield from _tensors(value.to_tuple())


def fused_kernels(graph: fx.GraphModule, note: GraphNote) -> list[tuple[dict[Any, float], dict[Any, int]]]:
    """Of each kernel of several layers the seconds that each layer's part takes alone, and gradscope's weights."""
    layers: dict[str, int] = {}
    nodes = {
        name: FusedNode.of(
            node,
            layer=layers.setdefault(node.modules[-1].path, len(layers)) if node.modules else -1,
            line=0 if node.frames else -1,
        )
        for name, node in note.nodes.items()
    }
    known = Nodes.of(CompiledGraph(note.kernels, nodes))
    found = []
    for kernel, names in note.kernels:
        if not kernel.startswith("cpp_"):
            continue
        groups: dict[int | None, list[str]] = defaultdict(list)
        for name in names:
            node = nodes.get(name)
            if node is not None and not node.is_view and (node.layer >= 0 or node.line >= 0):
                groups[node.layer if node.layer >= 0 else None].append(name)
        if len(groups) < 2:
            continue
        shares: dict[int | None, int] = defaultdict(int)
        for share in shares_of(known, names, Moved(None)):
            shares[share.layer] += share.weight
        try:
            alone: dict[Any, float] = {layer: seconds_alone(graph, mine) for layer, mine in groups.items()}
        except Exception as error:  # a part whose inputs cannot be made up, sizes that are not fixed, say
            print(f"left out {kernel}: {type(error).__name__}", file=sys.stderr)
            continue
        found.append((alone, dict(shares)))
    return found


def seconds_alone(graph: fx.GraphModule, names: Sequence[str]) -> float:
    """What these nodes take as a graph of their own, on random numbers."""
    part, inputs = _part(graph, set(names))
    run: Any = torch._inductor.compile(part, inputs)
    for _ in range(3):
        run(*inputs)
    seconds = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        run(*inputs)
        seconds.append(time.perf_counter() - began)
    return max(statistics.median(seconds) - _CALL_S, _LEAST_S)


def _part(graph: fx.GraphModule, mine: set[str]) -> tuple[fx.GraphModule, list[Any]]:
    """A graph of these nodes with the views between them, and its inputs."""
    made, copies, inputs = fx.Graph(), dict[fx.Node, fx.Node](), list[Any]()
    needed: dict[fx.Node, None] = {}

    def need(node: fx.Node) -> None:
        if node not in needed:
            if _is_inside(node, mine):
                for each in node.all_input_nodes:
                    need(each)
            needed[node] = None

    for node in graph.graph.nodes:
        if node.name in mine:
            need(node)
    for node in needed:
        if not _is_inside(node, mine):
            copies[node] = made.placeholder(node.name)
            inputs.append(_made_up(node.meta["val"]))
    for node in needed:
        if _is_inside(node, mine):
            copies[node] = made.node_copy(node, lambda each: copies[each])
    outputs = [
        node
        for node in needed
        if node.name in mine and (not node.users or any(each.name not in mine for each in node.users))
    ]
    made.output(tuple(copies[node] for node in outputs if torch.is_tensor(node.meta.get("val"))))
    return fx.GraphModule(graph, made), inputs


def _is_inside(node: fx.Node, mine: set[str]) -> bool:
    """One of the nodes, a view of something, or a constant."""
    return node.name in mine or (
        node.op == "call_function" and (notes.is_view(node.target) or not node.all_input_nodes)
    )


def _made_up(value: Any) -> Any:
    if not torch.is_tensor(value):
        return value
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    if value.dtype.is_floating_point:
        return made.normal_()
    return made.random_(2) if value.dtype == torch.bool else made.zero_()  # numbers may be indices


if __name__ == "__main__":
    sys.exit(main())
