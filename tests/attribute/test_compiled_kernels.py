"""Compiled graphs on timelines made by hand: what names tell of a replay, and what of a run counts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gradscope.attribute.compiled.blocks import Moved
from gradscope.attribute.compiled.order import match_replay
from gradscope.attribute.compiled.read import _Known
from gradscope.attribute.result import Attribution
from gradscope.capture.naming import ModuleNames
from gradscope.compat import inductor
from gradscope.graphs import compiled_graphs
from gradscope.ops import ZEROS_OF_UNUSED
from gradscope.tables import CalledFrom, CompiledGraph, FusedNode, GraphNote, GraphRun, NodeNote, RowKind

from .hand import Row
from .test_compiled import (
    ATTENTION,
    AX,
    BX,
    COPY,
    FLASH,
    GEMM,
    GRAPH,
    MM,
    ONE,
    A,
    B,
    backward,
    fused,
    graph,
    layers,
    run,
)

CONV, BACK = "extern_kernels.convolution", "torch.ops.aten.convolution_backward.default"
PRODUCTS = (
    "gemv2T_kernel_val<int>",
    "void cutlass::Kernel2<cutlass_80_simt>",
    "sm80_xmma_f32",
    "nvjet_tst_128x8",
    "dot_kernel<float>",
    "cublasLt::epilogue",
)
CONVOLUTIONS = (
    "conv_depthwise2d_forward_kernel",
    "sm80_xmma_wgrad",
    "sm80_xmma_dgrad",
    "xmma_fprop",
    "winograd_nonfused",
    "cudnn::ops::nchwToNhwcKernel",
)
ATTENTIONS = ("fmha_cutlassF_f32", "void pytorch_flash::flash_fwd_kernel", "AttentionKernel<float>", "native_sdpa_sm90")


@pytest.mark.parametrize(
    ("activities", "kernels", "found"),
    [
        ([ONE], ["cpp_1", ONE], [(1,)]),  # what runs on a processor is in no replay
        ([COPY, ONE], ["cpp_1", MM, ONE], [(1,), (2,)]),
        *(
            ([COPY, name, COPY, FLASH], ["aten.index_put", MM, "aten.cumsum", ATTENTION], [(0,), (1,), (2, 3), (3,)])
            for name in PRODUCTS
        ),
        *(([name, GEMM], [CONV, MM], [(0,), (1,)]) for name in CONVOLUTIONS),
        *(([name, GEMM], [ATTENTION, MM], [(0,), (1,)]) for name in ATTENTIONS),
        ([FLASH, FLASH, FLASH, GEMM], [ATTENTION, MM], [(0,), (0,), (0,), (1,)]),
        (["dgrad", "wgrad", GEMM], [BACK, MM], [(0,), (0,), (1,)]),
        (["fprop", "fprop", "fprop"], [CONV, CONV], [(0, 1)] * 3),  # two ways are one too many
        (["fprop", GEMM, FLASH], [CONV, ATTENTION], [(0,), (0,), (1,)]),  # a convolution by a product
        ([GEMM, "void cutlass::reduction::kernel::ReduceSplitK<1>", GEMM], [MM, MM], [(0,), (0,), (1,)]),
        ([COPY, FLASH, GEMM], [ATTENTION, MM], [(0,), (0,), (1,)]),
        ([GEMM, GEMM], ["torch.ops.aten._scaled_mm.default", "extern_kernels.bias_addmm"], [(0,), (1,)]),
    ],
)
def test_what_names_tell(activities: list[str], kernels: list[str], found: list[tuple[int, ...]]) -> None:
    assert match_replay(activities, kernels) == found


def replay(
    nodes: dict[str, FusedNode], kernels: list[tuple[str, str]], ran: dict[str, tuple[int, int]], *rows: tuple[str, int]
) -> Attribution:
    made = CompiledGraph(tuple((name, tuple(text.split())) for name, text in kernels), nodes)
    return run({0: made}, *backward(1000, 5, *(rows or (("cudaGraphLaunch", 40),))), on_device=ran)


def test_communication_in_a_replay_is_no_kernel_of_the_code() -> None:
    nodes = {"x": fused(-1), "p": fused(A, "x"), "m": fused(B, "p", op="mm")}
    ran = {"triton_1": (1500, 1600), "ncclDevKernel_AllReduce": (1600, 1700), "gemm": (1700, 1730)}
    found = replay(nodes, [("triton_1", "p"), (MM, "m")], ran)
    assert {(row.layer, row.name): row.device_ns for row in found.kernels} == {
        ("a", "triton_1"): 100,
        ("", "ncclDevKernel_AllReduce"): 100,
        ("b", "gemm"): 30,
    }


def test_what_a_graph_without_a_replay_launches_is_of_its_rows() -> None:
    nodes = {"x": fused(-1), "m": fused(B, "x", op="mm")}
    found = replay(nodes, [(MM, "m")], {"aten::mm": (1500, 1600)}, ("triton_9", 10), ("aten::mm", 10))
    assert layers(found, "device_ns") == {"": 100} and any("other kernels" in note for note in found.notes)


def test_where_rows_tell_all_a_replay_has_what_no_row_launched() -> None:
    nodes = {"x": fused(-1), "m": fused(A, "x", op="mm"), "n": fused(B, "m", op="mm")}
    ran = {"gemm 1": (1500, 1600), "aten::mm": (1600, 1650), "gemm 2": (1650, 1660)}
    found = replay(nodes, [(MM, "m"), (MM, "n")], ran, ("aten::mm", 10))
    assert layers(found, "device_ns") == {"a": 150, "b": 10}


def test_what_is_copied_for_a_replay_is_no_kernel_of_the_code() -> None:
    nodes = {"x": fused(-1), "p": fused(A, "x"), "m": fused(B, "p", op="mm")}
    ran = {"triton_1": (1500, 1600), "aten::_foreach_copy_": (1600, 1650), "gemm": (1650, 1660)}
    found = replay(nodes, [("triton_1", "p"), (MM, "m")], ran, ("aten::_foreach_copy_", 10))
    assert layers(found, "device_ns") == {"": 50, "a": 100, "b": 10}


def test_flops_are_of_the_phase_and_of_measured_steps() -> None:
    nodes = {"x": fused(-1), "p": fused(A, "x", flops=7)}
    behind = backward(11_000, 6, ("cpp_1", 400))
    found = run({0: graph(nodes, cpp_1="p")}, *backward(1000, 5, ("cpp_1", 40)), *behind)
    assert {row.path: row.backward_flops for row in found.layers if row.backward_flops} == {"a": 7}
    # Its forward ran in a graph that nobody told of.
    assert {row.path: (row.flops, row.forward_flops) for row in found.layers}["a"] == (None, None)


@pytest.mark.parametrize(("flops", "shares"), [((1, 3), (25, 75)), ((0, 3), (50, 50))])
def test_what_may_be_one_of_several_is_split_by_their_work(flops: tuple[int, int], shares: tuple[int, int]) -> None:
    """However many bytes each moves."""
    nodes = {
        "x": fused(-1),
        "m": fused(A, "x", op="mm", flops=flops[0]),
        "n": fused(B, "m", op="mm", flops=flops[1], size=4000),
    }
    ran = {"gemm 1": (1500, 1510), "gemm 2": (1510, 1590), "gemm 3": (1590, 1600)}
    found = replay(nodes, [(MM, "m"), (MM, "n")], ran)
    assert [layers(found, "device_ns")[each] for each in "ab"] == pytest.approx(shares, abs=3)


def test_several_lines_of_one_layer_are_no_estimate() -> None:
    nodes = {"x": fused(-1), "p": fused(A, "x", line=0, size=30), "q": fused(A, "x", line=1, size=10)}
    found = run({0: graph(nodes, cpp_1="p q")}, *backward(1000, 5, ("cpp_1", 400)))
    assert layers(found) == {"a": 400} and layers(found, "estimated_ns") == {}
    assert {row.line: row.backward_ns for row in found.lines} == {1: 300, 2: 100}  # by bytes


def test_a_function_that_is_compiled_runs_in_no_call() -> None:
    nodes = {"x": fused(-1, size=8), "p": fused(A, "x", again=True), "q": fused(B, "p", size=24, again=True)}
    rows = [Row(RowKind.GRAPH, 200, 300, GRAPH, argument=0), Row(RowKind.OP, 200, 300, "cpp_1")]
    found = run({0: graph(nodes, cpp_1="p q")}, *rows)
    assert layers(found, "forward_self_ns")["a"] == 30 and layers(found, "forward_estimated_ns") == {"a": 30, "b": 70}
    assert layers(found, "estimated_ns") == {}


def test_a_sum_that_is_computed_again_is_recompute() -> None:
    nodes = {"x": fused(-1), "s": fused(A, "x", again=True, is_sum=True)}
    found = run({0: graph(nodes, cpp_1="s")}, *backward(1000, 5, ("cpp_1", 240)))
    assert (layers(found, "recompute_ns"), layers(found, "gradient_sum_ns")) == ({"a": 240}, {})


def test_names_of_layers_that_begin_alike_are_told_apart() -> None:
    moved = Moved.of(0, 1, ("a.1", "a.2", "a.10", "a.1.x", "a.2.x"))
    assert [moved.layer(each) for each in range(5)] == [1, 1, 2, 4, 4]


def test_what_holds_a_shared_weight_stays() -> None:
    paths = ("a", "a.shared", "b")
    assert Moved.of(0, 2, paths, {1}).layer(1) == 1 and Moved.of(0, 2, paths).layer(1) == 2


def test_a_run_outside_of_all_layers_moves_nothing() -> None:
    assert Moved.of(0, -1, ("a", "b")).to is None and Moved.of(-1, 1, ("a", "b")).to is None


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
    found = inductor._with_owners(nodes)
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


@pytest.mark.parametrize("is_sum", [True, False])
def test_torch_tells_of_sums(is_sum: bool) -> None:
    made = torch.fx.Graph()
    node = made.placeholder("x")
    node.meta["is_gradient_acc"] = is_sum
    assert inductor._node(node).is_sum is is_sum


def test_of_two_matmuls_that_may_have_been_joined_neither_is_told() -> None:
    made = torch.fx.Graph()
    node = made.placeholder("joined")
    node.meta["from_node"] = [SimpleNamespace(name="add")]
    earlier = {"m": noted("a", flops=8), "n": noted("b", flops=8), "add": noted("c", "m", "n")}
    note = noted("", flops=8)
    assert inductor._with_origin(node, note, earlier, {"joined"}) is note
    assert inductor._with_origin(node, note, earlier, {"joined", "n"}).modules == earlier["m"].modules


def test_a_graphs_note_has_its_own_kernels_and_its_sums_at_what_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    debug = SimpleNamespace(_inductor_triton_kernel_to_post_grad_node_info={"cpp_1:1": ["x"], "cpp_2:2": ["m"]})
    monkeypatch.setitem(sys.modules, inductor._DEBUG, debug)
    made = torch.fx.Graph()
    x = made.placeholder("x")
    added = made.call_function(torch.add, (x, x))
    added.meta["is_gradient_acc"] = True
    read = made.call_function(torch.neg, (added,))
    read.meta["fwd_nn_module_stack"] = {"1": ("L['self'].a", torch.nn.Linear)}
    made.output(read)
    found = inductor._noted(SimpleNamespace(graph=made, named_modules=lambda: ()), 1, {})
    assert found.kernels == (("cpp_2", ("m",)),)
    assert found.nodes["add"].modules == found.nodes["neg"].modules != ()


def test_an_estimate_behind_the_steps_is_not_counted() -> None:  # the layer has more that is exact
    nodes = {"x": fused(-1, size=8), "p": fused(A, "x"), "q": fused(B, "p", size=24), "r": fused(A, "x")}
    graphs = {0: graph(nodes, cpp_1="p q", cpp_2="r")}
    found = run(
        graphs, *backward(1000, 5, ("cpp_1", 400), ("cpp_2", 900)), *backward(11_000, 6, ("cpp_1", 400), ("cpp_2", 9))
    )
    assert layers(found, "estimated_ns")["a"] == 120


def test_an_input_is_read_where_there_is_a_line_too() -> None:
    made = CompiledGraph((), {"x": fused(-1), "loss": fused(-1, "x", line=1)}, inputs=("x",))
    assert _Known.of(made, Moved(None)).readers == ((None, 1),)


def test_every_kernel_of_a_processor_computes() -> None:
    nodes = {
        "x": fused(-1, size=8),
        "p": fused(A, "x", size=8, op="inductor_random"),
        "q": fused(B, "x", size=8, op="mul"),
    }
    found = run({0: graph(nodes, cpp_1="p q")}, *backward(1000, 5, ("cpp_1", 400)))
    assert layers(found)["a"] == pytest.approx(400 * 176 // 192, abs=1)


def zeros(*ns: int) -> list[tuple[str, int]]:
    return [("aten::zeros", each) for each in ns]


def returned(*unused: str) -> dict[int, CompiledGraph]:
    """A graph of backward that is run with the gradients of a large value of A's and a small one of B's."""
    nodes = {
        "tangents_1": fused(-1, size=400),
        "tangents_2": fused(-1, size=4),
        "p": fused(A, "tangents_1", line=0, op="mul"),
        "q": fused(B, "tangents_2", line=1, op="mul"),
    }
    kernels = (("cpp_1", ("p", "q")),)
    return {0: CompiledGraph(kernels, nodes, inputs=("tangents_1", "tangents_2"), zeros=unused)}


def node(start: int, sequence: int, *rows: tuple[str, int], number: int = 0) -> list[Row]:
    """A pass of one compiled node, in which these run, and the graph where the name is empty."""
    end = start + sum(ns for _, ns in rows)
    found = [
        Row(RowKind.BACKWARD, start, end, "backward", argument=0),
        Row(RowKind.NODE, start, end, "CompiledFunctionBackward", sequence=sequence, forward_thread=1),
    ]
    for name, ns in rows:
        if name:
            found.append(Row(RowKind.OP, start, start + ns, name))
        else:
            found.append(Row(RowKind.GRAPH, start, start + ns, GRAPH, argument=number))
            found.append(Row(RowKind.OP, start, start + ns, "cpp_1"))
        start += ns
    return found


def of_unused(found: Attribution) -> dict[str | None, int]:
    return {row.layer: row.self_ns for row in found.ops if row.name == ZEROS_OF_UNUSED}


@pytest.mark.parametrize(
    ("unused", "made", "expected"),
    [
        (("tangents_2",), (30,), {"b": 30}),  # not of the largest, which is used
        (("tangents_1",), (30,), {"a": 30}),
        (("tangents_1", "tangents_2"), (30, 5), {"a": 30, "b": 5}),  # in their order
        (("tangents_1", "tangents_2"), (30,), {"a": 30}),  # in this step one of them is used
        (("tangents_2", "tangents_1"), (30,), {"a": 30}),  # and what is large takes the time
        (("tangents_1", "tangents_2"), (30, 5, 7), {"a": 42}),
        ((), (30,), {}),  # the program's own
    ],
)
def test_zeros_are_of_the_values_that_nobody_used(
    unused: tuple[str, ...], made: tuple[int, ...], expected: dict[str | None, int]
) -> None:
    found = run(returned(*unused), *node(1000, 5, *zeros(*made), ("", 100)))
    assert of_unused(found) == expected
    lines = {"a": 1, "b": 2}
    assert {(row.line, row.layer) for row in found.lines if row.backward_ns} >= {(lines[x], x) for x in expected if x}
    assert found.ledger.backward_ns == 100 + sum(made)


def test_zeros_behind_a_graph_or_in_another_node_are_not_of_its_values() -> None:
    behind = node(1000, 5, ("", 100), *zeros(30))
    assert of_unused(run(returned("tangents_1"), *behind)) == {}
    elsewhere = node(1000, 5, *zeros(30)), node(3000, 6, ("", 100))
    assert of_unused(run(returned("tangents_1"), *elsewhere[0], *elsewhere[1])) == {}
    inside = node(1000, 5, *zeros(30), ("", 100))
    outer = Row(RowKind.OP, 1000, 1030, "what makes them itself")
    assert of_unused(run(returned("tangents_1"), *inside[:2], outer, *inside[2:])) == {}
    assert of_unused(run(returned("tangents_1"), *behind, *node(3000, 6, ("", 100)))) == {}


def test_zeros_are_of_the_graph_that_follows() -> None:
    """Two in one node, of which the first has no zeros in front."""
    graphs = {0: returned("tangents_1")[0], 1: returned("tangents_2")[0]}
    rows = node(1000, 5, *zeros(30), ("", 100))
    again = [
        Row(RowKind.OP, 1130, 1150, "aten::zeros"),
        Row(RowKind.GRAPH, 1150, 1200, GRAPH, argument=1),
        Row(RowKind.OP, 1150, 1200, "cpp_1"),
    ]
    longer = [replace(row, end=1200) if row.kind in (RowKind.BACKWARD, RowKind.NODE) else row for row in rows]
    assert of_unused(run(graphs, *longer, *again)) == {"a": 30, "b": 20}


def test_zeros_in_front_of_a_graph_of_forward_are_the_programs_own() -> None:
    rows = (
        Row(RowKind.OP, 5, 15, "aten::zeros"),
        Row(RowKind.GRAPH, 15, 80, GRAPH, argument=0),
        Row(RowKind.OP, 15, 80, "cpp_1"),
    )
    assert of_unused(run(returned("tangents_1"), *rows, *node(1000, 5, ("", 100)))) == {}


def test_gradients_that_are_all_zero_are_found_among_what_a_graph_is_run_with() -> None:
    names = ("primals_1", "tangents_1", "tangents_2", "tangents_3", "tangents_4")
    inputs = [torch.zeros(2), torch.zeros(2), torch.tensor([0.0, 1.0]), 3, nn.Parameter(torch.zeros(2))]
    assert inductor._zeros(names, inputs) == ("tangents_1",)
    assert inductor._zeros(names, []) == ()


def test_blocks_that_lie_in_others_of_the_same_name() -> None:
    paths = ("net.first.h.0.up", "net.first.h.0.down", "net.second.h.0.up", "net.second.h.0.down", "net", "net.first")
    paths += ("net.second", "net.first.h", "net.second.h", "net.first.h.0", "net.second.h.0")
    moved = Moved.by_layers([(1, 3)], paths)
    assert [moved.layer(0), moved.layer(1)] == [2, 3]


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
        [sized_note(flops_at)], [GraphRun(0, (), sizes)], {}, ModuleNames((), {}, (), ()), []
    ).values()
    assert (found.nodes["p"].flops, found.sized) == (flops, sized)


def test_operations_of_a_branch_are_unknown_with_other_sizes_too() -> None:
    note = sized_note(lambda _: {"p": 70})
    branch = replace(note.nodes["p"], flops=-1)
    note = replace(note, nodes={**note.nodes, "true_graph_0.p": branch})
    (found,) = compiled_graphs([note], [GraphRun(0, (), (5,))], {}, ModuleNames((), {}, (), ()), []).values()
    assert {name: node.flops for name, node in found.nodes.items()} == {"p": 70, "true_graph_0.p": -1}


def test_a_size_that_torch_finds_out_while_it_runs_is_unknown() -> None:
    """The number of elements that are not zero, say: it is none of the sizes that a graph is run with."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.nonzero().float() @ weight, x @ weight

    graph_module = make_fx(function, tracing_mode="symbolic")(torch.ones(6, 2), torch.ones(2, 4))
    unknown, known = (node for node in graph_module.graph.nodes if node.target is torch.ops.aten.mm.default)
    assert (inductor._flops(unknown), inductor._flops(known)) == (-1, 2 * 6 * 2 * 4)
    at = inductor._work(known), inductor._work(unknown)
    sizes = [size for each in known.args for size in each.meta["val"].shape]
    given = {size.node.expr: size.node.hint for size in sizes} | {sizes[0].node.expr: 10}
    assert at[0] is not None and at[0](given) == 2 * 10 * 2 * 4
    with pytest.raises(inductor._UnknownSizeError):
        assert at[1] is not None and at[1](given)


TWO = ("", "a", "a.p", "a.act", "a.q", "b", "b.p", "b.act", "b.q", "head.1", "head.2")


def moved(*pairs: tuple[str, str]) -> dict[str, str]:
    """Where each layer goes of which another's parameters stand at the place of its own."""
    found = Moved.by_layers([(TWO.index(one), TWO.index(other)) for one, other in pairs], TWO)
    return {} if found.to is None else {TWO[one]: TWO[to] for one, to in found.to.items() if one != to}


def test_a_layer_is_that_whose_parameters_stand_at_its_place() -> None:
    """And what lies beside it goes with it, whatever is frozen, shared, or of other models."""
    tower = {"a": "b", "a.p": "b.p", "a.act": "b.act", "a.q": "b.q"}
    assert moved(("a.p", "b.p"), ("a.q", "b.q")) == tower == moved(("a.q", "b.q"))
    assert moved(("a.p", "a.p"), ("a.q", "b.q")) == {path: to for path, to in tower.items() if path != "a.p"}
    assert moved(("head.1", "head.2")) == {"head.1": "head.2"}
    assert moved(("a.q", "b.q"), ("head.1", "head.2")) == tower | {"head.1": "head.2"}
    assert moved(("a.p", "a.q")) == {"a.p": "a.q"}  # two layers of one size
    assert moved(("a.p", "a.p")) == moved() == {}
    assert moved(("a.q", "a.q"), ("a.q", "b.q")) == tower == moved(("a.q", "b.q"), ("a.q", "a.q"))  # a weight is tied


def called(start: int, number: int, sequence: int) -> list[Row]:
    """A compiled function that makes a node."""
    return [
        Row(RowKind.OP, start, start + 20, "CompiledFunction", sequence=sequence),
        Row(RowKind.GRAPH, start + 5, start + 15, GRAPH, argument=number),
        Row(RowKind.OP, start + 5, start + 15, "cpp_1"),
    ]


def test_backward_is_of_the_model_whose_forward_made_its_node() -> None:
    """Though it is run with no parameter: of one layer, say, whose input needs no gradient."""
    nodes = {"x": fused(-1), "p": fused(AX, "x", flops=7)}
    forward = replace(graph(nodes, cpp_1="p"), moved=((AX, AX),), holders=frozenset({AX}))
    other = replace(graph(nodes, cpp_1="p"), moved=((AX, BX),), holders=frozenset({BX}))
    graphs = {0: forward, 1: other, 2: replace(graph(nodes, cpp_1="p"), inputs=("tangents_1",))}
    rows = [*called(10, 0, 5), *called(40, 1, 6)]
    passes = [*backward(1000, 6, ("cpp_1", 70), number=2), *backward(2000, 5, ("cpp_1", 30), number=2)]
    found = run(graphs, *rows, *passes)
    assert layers(found) == {"a.x": 30, "b.x": 70}
    flops = {row.path: (row.forward_flops, row.backward_flops) for row in found.layers if row.flops}
    assert flops == {"a.x": (7, 7), "b.x": (7, 7)}


def test_what_a_checkpoint_runs_again_in_the_node_of_another_is_its_own() -> None:
    """Two functions in one checkpoint: the second's node runs both, and makes the node of the first's backward."""
    nodes = {"x": fused(-1), "p": fused(AX, "x", flops=7)}
    first = replace(graph(nodes, cpp_1="p"), moved=((AX, AX),), holders=frozenset({AX}))
    second = replace(graph(nodes, cpp_1="p"), moved=((AX, BX),), holders=frozenset({BX}))
    graphs = {0: first, 1: second, 2: replace(graph(nodes, cpp_1="p"), inputs=("tangents_1",))}
    again = [
        Row(RowKind.BACKWARD, 1000, 1300, "backward", argument=0),
        Row(RowKind.NODE, 1000, 1100, "CompiledFunctionBackward", sequence=6, forward_thread=1),
        *called(1010, 0, 7),
        *called(1040, 1, 8),
        Row(RowKind.GRAPH, 1070, 1100, GRAPH, argument=2),
        Row(RowKind.OP, 1070, 1100, "cpp_1"),
        Row(RowKind.NODE, 1200, 1300, "CompiledFunctionBackward", sequence=7, forward_thread=1),
        Row(RowKind.GRAPH, 1200, 1300, GRAPH, argument=2),
        Row(RowKind.OP, 1200, 1300, "cpp_1"),
    ]
    found = run(graphs, *called(10, 0, 5), *called(40, 1, 6), *again)
    flops = {row.path: (row.forward_flops, row.backward_flops) for row in found.layers if row.flops}
    assert flops == {"a.x": (7, 14), "b.x": (7, 14)}
    assert layers(found) == {"": 50, "a.x": 110, "b.x": 40}  # the rest is what Python and the engine do


def test_of_what_a_branch_computes_no_operations_are_told() -> None:
    """Nor of the layers of a graph whose kernels are others than it was compiled to."""
    from torch.fx.experimental.proxy_tensor import make_fx

    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x @ x)

    branch = make_fx(Branch())(torch.ones(2, 2))
    whole: Any = SimpleNamespace(named_modules=lambda: (("", branch), ("true_graph_0", branch)))
    (note,) = inductor._in_branches(whole).items()
    assert note[0].startswith("true_graph_0.mm") and note[1].flops == -1 and not note[1].inputs
    nodes = {"x": fused(-1), "p": fused(AX, "x", flops=7)}
    found = run({0: graph(nodes, cpp_1="p")}, *backward(1000, 5, ("cpp_another", 70)))
    assert {row.path: (row.forward_flops, row.backward_flops) for row in found.layers}["a.x"] == (None, None)
    assert any("branches and loops" in note for note in found.notes)
