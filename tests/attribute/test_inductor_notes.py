"""What is noted of the nodes of a compiled graph, from the nodes that Inductor has."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gradscope.capture.naming import ModuleNames
from gradscope.compat import GraphWatch
from gradscope.compat.inductor import DEBUG, graphs, notes, sums, work
from gradscope.graphs import compiled_graphs
from gradscope.tables import CalledFrom, GraphNote, GraphRun, NodeNote


def noted(
    path: str, *inputs: str, op: str = "mul", is_sum: bool = False, forward: bool = False, flops: int = 0
) -> NodeNote:
    return NodeNote(
        modules=(CalledFrom(0, path, "L"),) if path else (),
        frames=((path, 1, "forward"),) if path else (),
        inputs=inputs,
        op=op,
        is_sum=is_sum,
        forward=forward,
        flops=flops,
        bytes=4,
        is_view=False,
    )


def owners(nodes: dict[str, NodeNote]) -> dict[str, tuple[str, int]]:
    """Of each sum the innermost module that it is told to lie in, and its line."""
    found = sums.with_owners(nodes)
    return {
        name: (node.modules[-1].path if node.modules else "", node.frames[-1][1] if node.frames else 0)
        for name, node in found.items()
        if node.is_sum
    }


def in_modules(path: str, *inputs: str, line: int = 1, **more: object) -> NodeNote:
    """A node in a module and those around it, called on line 10 of the model and ``line`` of its block."""
    parts = path.split(".") if path else []
    around = tuple(CalledFrom(k, ".".join(parts[: k + 1]), "L") for k in range(len(parts)))
    frames = (("model.py", 10, "forward"), ("block.py", line, "forward"))
    return NodeNote(
        modules=around,
        frames=frames,
        inputs=inputs,
        **{"op": "mul", "forward": False, "bytes": 4, "is_view": False, **more},
    )  # type: ignore[arg-type]


def test_a_sum_is_of_the_node_that_waits_for_it() -> None:
    nodes = {
        "x": in_modules("", op=""),
        "sum": in_modules("stale", "x", "x", is_sum=True, line=99),
        "again": in_modules("b.other", "sum", forward=True),
        "relu": in_modules("b.relu", "sum", line=5),
        "output": in_modules("", "sum", "relu", op=""),
    }
    assert owners(nodes) == {"sum": ("b.relu", 5)}


def test_an_addition_hands_its_gradient_on_to_both_sides() -> None:
    """x + mlp(norm(x)), twice: each sum is of the block's own addition, that of what came first of the embedding."""
    nodes = {
        "x": in_modules("", op=""),
        "norm1": in_modules("b1.norm", "x", line=7),
        "sum1": in_modules("b1.norm", "x", "norm1", is_sum=True),
        "down0": in_modules("b0.mlp.down", "sum1", line=8),
        "norm0": in_modules("b0.norm", "down0", line=7),
        "sum0": in_modules("b0.norm", "sum1", "norm0", is_sum=True),
        "embed": in_modules("embed", "sum0", line=3),
    }
    assert owners(nodes) == {"sum1": ("b0", 8), "sum0": ("embed", 3)}


def test_three_readers_make_one_sum_in_two_parts() -> None:
    nodes = {
        "x": in_modules("", op=""),
        "q": in_modules("q", "x"),
        "k": in_modules("k", "x"),
        "v": in_modules("v", "x"),
        "part": in_modules("stale", "q", "k", is_sum=True),
        "sum": in_modules("stale", "part", "v", is_sum=True),
        "tanh": in_modules("act", "sum", line=6),
    }
    assert owners(nodes) == {"part": ("act", 6), "sum": ("act", 6)}


def test_a_sum_that_nobody_reads_is_of_what_it_adds_up() -> None:
    """The gradient of a weight that one layer uses twice, and of what a graph was given."""
    nodes = {
        "x": in_modules("", op=""),
        "mm1": in_modules("a.layer", "x", line=4),
        "mm2": in_modules("a.layer", "x", line=5),
        "weight": in_modules("stale", "mm1", "mm2", is_sum=True),
        "given": in_modules("stale", "mm1", "x", is_sum=True),
        "output": in_modules("", "weight", "given", op=""),
    }
    found = owners(nodes)
    assert found["weight"][0] == "a.layer" and found["given"][0] == ""


def test_a_sum_of_three_that_nobody_reads_is_of_what_is_around_all() -> None:
    """The gradient of a parameter that three layers use, and with it all that it is summed up of."""
    nodes = {
        "x": in_modules("", op=""),
        "mul1": in_modules("a.p", "x", line=4),
        "mul2": in_modules("a.q", "x", line=5),
        "mul3": in_modules("a.r", "x", line=6),
        "part": in_modules("stale", "mul1", "mul2", is_sum=True),
        "weight": in_modules("stale", "part", "mul3", is_sum=True),
        "output": in_modules("", "weight", op=""),
    }
    found = owners(nodes)
    assert (found["part"][0], found["weight"][0]) == ("a", "a")


@pytest.mark.parametrize("is_sum", [True, False])
def test_torch_tells_of_sums(is_sum: bool) -> None:
    made = torch.fx.Graph()
    node = made.placeholder("x")
    node.meta["is_gradient_acc"] = is_sum
    assert notes.node_note(node).is_sum is is_sum


def test_of_two_matmuls_that_may_have_been_joined_neither_is_told() -> None:
    made = torch.fx.Graph()
    node = made.placeholder("joined")
    node.meta["from_node"] = [SimpleNamespace(name="add")]
    earlier = {"m": noted("a", flops=8), "n": noted("b", flops=8), "add": noted("c", "m", "n")}
    note = noted("", flops=8)
    assert notes._with_origin(node, note, earlier, {"joined"}) is note
    assert notes._with_origin(node, note, earlier, {"joined", "n"}).modules == earlier["m"].modules


def test_a_matmul_that_is_joined_and_is_there_still_is_told_by_what_it_multiplies() -> None:
    """Another reads it too: of a module that is called twice on one input, say, whose work Inductor does once."""
    made = torch.fx.Graph()
    node = made.placeholder("joined")
    node.meta["from_node"] = [SimpleNamespace(name="add")]
    earlier = {
        "m": noted("a", "x", "w", flops=8),
        "n": noted("b", "x", "v", flops=8),
        "add": noted("c", "m", "n"),
    }
    for added, weight, origin in (("n", "w", "m"), ("m", "v", "n")):
        note = noted("", added, "x", weight, flops=8)
        assert notes._with_origin(node, note, earlier, {"joined", "m", "n"}).modules == earlier[origin].modules


def test_a_graphs_note_has_its_own_kernels_and_its_sums_at_what_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    debug = SimpleNamespace(_inductor_triton_kernel_to_post_grad_node_info={"cpp_1:1": ["x"], "cpp_2:2": ["m"]})
    monkeypatch.setitem(sys.modules, DEBUG, debug)
    made = torch.fx.Graph()
    x = made.placeholder("x")
    added = made.call_function(torch.add, (x, x))
    added.meta["is_gradient_acc"] = True
    read = made.call_function(torch.neg, (added,))
    read.meta["fwd_nn_module_stack"] = {"1": ("L['self'].a", torch.nn.Linear)}
    made.output(read)
    found = notes.noted(SimpleNamespace(graph=made, named_modules=lambda: ()), 1, {})
    assert found.kernels == (("cpp_2", ("m",)),)
    assert found.nodes["add"].modules == found.nodes["neg"].modules != ()


def test_gradients_that_are_all_zero_are_found_among_what_a_graph_is_run_with() -> None:
    names = ("primals_1", "tangents_1", "tangents_2", "tangents_3", "tangents_4")
    inputs = [torch.zeros(2), torch.zeros(2), torch.tensor([0.0, 1.0]), 3, nn.Parameter(torch.zeros(2))]
    assert graphs._zeros(names, inputs) == ("tangents_1",)
    assert graphs._zeros(names, []) == ()


def sized_note(flops_at: Callable[[Sequence[int]], Mapping[str, int] | None] | None) -> GraphNote:
    made = NodeNote(forward=True, is_view=False, bytes=4, inputs=(), flops=7, op="mm", modules=(), frames=())
    return GraphNote((("aten::mm", ("p",)),), {"p": made}, sizes=(3,), flops_at=flops_at)


@pytest.mark.parametrize(
    ("sizes", "flops_at", "flops", "sized"),
    [
        ((3,), lambda _: {"p": 70}, 7, True),  # those that it was compiled with
        ((5,), lambda sizes: {"p": 10 * sizes[0]}, 50, True),
        ((5,), lambda _: {}, 0, True),
        ((5,), lambda _: None, 0, False),
        ((5,), None, 0, False),
    ],
)
def test_flops_of_a_run_are_those_of_its_sizes(sizes: tuple[int, ...], flops_at: Any, flops: int, sized: bool) -> None:
    (found,) = compiled_graphs(
        [sized_note(flops_at)],
        [GraphRun(0, (), sizes)],
        {},
        {},
        ModuleNames((), {}, (), ()),
        [],
        lambda _: (),
        [{}],
    ).values()
    assert (found.nodes["p"].flops, found.sized) == (flops, sized)


def test_operations_of_a_branch_are_unknown_with_other_sizes_too() -> None:
    note = sized_note(lambda _: {"p": 70})
    branch = replace(note.nodes["p"], flops=-1)
    note = replace(note, nodes={**note.nodes, "true_graph_0.p": branch})
    names = ModuleNames((), {}, (), ())
    (found,) = compiled_graphs([note], [GraphRun(0, (), (5,))], {}, {}, names, [], lambda _: (), [{}]).values()
    assert {name: node.flops for name, node in found.nodes.items()} == {"p": 70, "true_graph_0.p": -1}


def test_a_size_that_torch_finds_out_while_it_runs_is_unknown() -> None:
    """The number of elements that are not zero, say: it is none of the sizes that a graph is run with."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.nonzero().float() @ weight, x @ weight

    graph_module = make_fx(function, tracing_mode="symbolic")(torch.ones(6, 2), torch.ones(2, 4))
    unknown, known = (node for node in graph_module.graph.nodes if node.target is torch.ops.aten.mm.default)
    assert (work.flops(unknown), work.flops(known)) == (-1, 2 * 6 * 2 * 4)
    at = work.work_of(known), work.work_of(unknown)
    sizes = [size for each in known.args for size in each.meta["val"].shape]
    given = {size.node.expr: size.node.hint for size in sizes} | {sizes[0].node.expr: 10}
    assert at[0] is not None and at[0](given) == 2 * 10 * 2 * 4
    with pytest.raises(work._UnknownSizeError):
        assert at[1] is not None and at[1](given)


def note_of(monkeypatch: pytest.MonkeyPatch, kernels: Mapping[str, Sequence[str]], *frames: str) -> GraphNote:
    """Of a graph whose nodes are called on these lines, behind kernel 3."""
    debug = SimpleNamespace(_inductor_triton_kernel_to_post_grad_node_info=kernels)
    monkeypatch.setitem(sys.modules, DEBUG, debug)
    made = torch.fx.Graph()
    node = made.placeholder("x")
    for frame in frames:
        node = made.call_function(torch.neg, (node,))
        node.meta["stack_trace"] = f'  File "{frame}", line 3, in step\n    x = -x\n'
    made.output(node)
    return notes.noted(SimpleNamespace(graph=made, named_modules=lambda: ()), 3, {})


def test_kernels_are_in_the_order_of_their_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = {f"cpp_{number}:{number}": ["neg"] for number in (10, 4, 9, 3)}
    assert [name for name, _ in note_of(monkeypatch, kernels).kernels] == ["cpp_4", "cpp_9", "cpp_10"]


def test_a_graph_is_an_optimizers_where_each_of_its_lines_is(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = os.path.join("torch", "optim", "adam.py"), "train.py"
    assert note_of(monkeypatch, {}, own, own).is_optimizer
    assert not note_of(monkeypatch, {}, own, other).is_optimizer  # a step that is compiled whole
    assert not note_of(monkeypatch, {}).is_optimizer


def test_whose_a_node_is_torch_tells_by_the_forward_it_is_of() -> None:
    made = torch.fx.Graph()
    node = made.call_function(torch.neg, (made.placeholder("x"),))
    node.meta["nn_module_stack"] = {"7": ("L['self'].other", torch.nn.Linear)}
    assert [each.path for each in notes.node_note(node).modules] == ["L['self'].other"]
    node.meta["fwd_nn_module_stack"] = {"8@1": ("L['self'].own", "torch.nn.modules.linear.Linear")}
    assert notes.node_note(node).modules == (CalledFrom(8, "L['self'].own", "Linear"),)  # which is called again


@pytest.mark.parametrize(
    ("tag", "forward"), [("is_forward", True), ("must_be_in_forward", True), ("is_backward", False), (None, False)]
)
def test_forward_in_a_graph_of_backward_has_a_tag(tag: str | None, forward: bool) -> None:
    made = torch.fx.Graph()
    given = made.placeholder("x")
    node = made.call_function(torch.neg, (given,))
    for each in (given, node):
        each.meta["partitioner_tag"] = tag
    assert notes.node_note(node).forward is forward and not notes.node_note(given).forward


def test_what_computes_nothing_is_a_view() -> None:
    aten = torch.ops.aten
    views = (operator.getitem, aten.view.default, aten.t.default, aten.split.Tensor)
    assert all(map(notes.is_view, views))
    assert not any(map(notes.is_view, (aten.add_.Tensor, aten.mm.default, aten.clone.default, torch.neg)))


def test_a_joined_matmul_that_forward_needs_is_still_computed_again() -> None:
    node = torch.fx.Graph().placeholder("joined")
    node.meta["from_node"] = [SimpleNamespace(name="add")]
    earlier = {"m": in_modules("a", flops=8, forward=True), "add": in_modules("b", "m")}
    found = notes._with_origin(node, in_modules("", flops=8), earlier, {"joined"})
    assert found.forward and found.modules == earlier["m"].modules and found.frames == earlier["m"].frames


def test_below_a_mode_of_the_programs_nothing_is_looked_at() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[object] = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Noting():
        assert graphs._zeros(("tangents_1",), [torch.zeros(2)]) is None
    assert [each for each in seen if "any" in str(each)] == []


def test_a_run_is_told_of_once_by_its_parameters_and_its_sizes() -> None:
    watch, told, read = GraphWatch(), [], []
    watch.told, watch.reads = told.append, lambda number, _: read.append(number)
    watch.graphs = [GraphNote((), {})]
    weight = nn.Parameter(torch.ones(2))
    for inputs in ([weight, 3], [weight, 3], [weight, 5], [torch.ones(2), 3], [weight, True, 3]):
        watch.run(0, inputs)
    assert [(ran.parameters, ran.sizes) for ran in watch.runs] == [((0,), (3,)), ((0,), (5,)), ((), (3,))]
    assert read == [0, 0, 1, 2, 0]  # each time
    assert told == [[weight], [weight]]  # of what is new, and has any


def test_a_region_that_blocks_share_is_each_ones() -> None:
    """``torch.compiler.nested_compile_region``: its operations are told as those of one block."""
    stacks = {block: {str(block): (f"L['self'].{block}", "model.Block")} for block in (1, 2)}
    part = torch.fx.Graph()
    product = part.call_function(torch.ops.aten.mm.default, (part.placeholder("x"), part.placeholder("y")))
    product.meta |= {
        "val": torch.empty(2, 2, device="meta"),
        "nn_module_stack": {**stacks[1], "3": ("L['self'].1.up", "Up")},
    }
    for each in product.args:
        each.meta["val"] = torch.empty(2, 2, device="meta")  # type: ignore[union-attr]
    whole = torch.fx.Graph()
    for block, stack in stacks.items():
        shared = whole.get_attr("region")
        called = whole.call_function(torch.ops.higher_order.invoke_subgraph, (shared, f"region_{block}"))
        called.meta["nn_module_stack"] = stack
    module = torch.fx.GraphModule({"region": torch.fx.GraphModule({}, part)}, whole)
    found = notes._in_branches(module)
    assert {each.modules[-1].path for each in found.values()} == {"L['self'].1.up", "L['self'].2.up"}
    assert {each.flops for each in found.values()} == {-1}


def parameters(count: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(count)]


def test_a_parameter_that_has_the_id_of_one_that_is_gone_is_another() -> None:
    """``load_state_dict(assign=True)``, or an update that makes new ones: their ids may be those of other layers'."""
    watch = GraphWatch()
    watch.graphs = [GraphNote((), {})]
    inputs = parameters(2)
    watch.run(0, inputs)
    made = parameters(2)
    watch._numbers = {id(each): number for number, each in enumerate(made)}  # as if the ids had been theirs
    watch.run(0, made)
    assert [ran.parameters for ran in watch.runs] == [(0, 1), (2, 3)]
    assert watch.layers((2, 3), {id(made[0]): 7}, ()) == (7, -1)


def test_whose_a_parameter_was_when_a_graph_was_run_with_it_counts() -> None:
    """Two layers exchange their weights between two steps; and a model is gone when the run has ended."""
    watch = GraphWatch()
    watch.graphs = [GraphNote((), {})]
    one, other = parameters(2)
    holds = {id(one): (0,), id(other): (1, 2)}
    watch.owners_of = lambda each: holds[id(each)]
    watch.run(0, [one, other])
    holds = {id(one): (1, 2), id(other): (0,)}
    watch.run(0, [other, one])
    rows = (5, -1, 4)
    assert [watch.layers(ran.parameters, {}, rows) for ran in watch.runs] == [(5, 4), (5, 4)]
    assert watch.layers((0,), {id(one): 9}, rows) == (9,)  # never together by itself: what holds it now


def test_what_is_known_of_branches_is_noted_with_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "_in_branches", lambda _: {"true_graph_0.mm": in_modules("a", flops=-1)})
    assert note_of(monkeypatch, {}, "model.py").nodes["true_graph_0.mm"].flops == -1
