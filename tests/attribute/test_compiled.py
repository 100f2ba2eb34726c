"""Compiled graphs on timelines made by hand: whose each kernel is, and how one of several layers is split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gradscope.attribute.align_steps import assign
from gradscope.attribute.compiled.order import match, match_replay
from gradscope.attribute.result import Attribution, build_result
from gradscope.attribute.rows import read_skeleton
from gradscope.tables import CompiledGraph, EventTable, FusedNode, KernelTable, LineInfo, ModuleInfo, RowKind

from .hand import Row, spans, table_of

GRAPH = "## Call CompiledFxGraph"
PATHS = ("", "a", "a.x", "b", "b.x")
MODULES = tuple(ModuleInfo(path, "Layer", path.rpartition(".")[0] if path else None, 0, None) for path in PATHS)
ROOT, A, AX, B, BX = range(5)
LINES = (LineInfo("model.py", 1, "forward"), LineInfo("model.py", 2, "forward"))


def fused(layer: int, *inputs: str, size: int = 4, line: int = -1, again: bool = False, **more: object) -> FusedNode:
    return FusedNode(layer=layer, line=line, forward=again, inputs=inputs, bytes=size, **{"is_view": False, **more})  # type: ignore[arg-type]


def graph(nodes: dict[str, FusedNode], **kernels: str) -> CompiledGraph:
    return CompiledGraph(tuple((name, tuple(text.split())) for name, text in kernels.items()), nodes)


def run(
    graphs: dict[int, CompiledGraph],
    *rows: Row,
    calls: tuple[tuple[int, int, int], ...] = ((ROOT, 0, 9),),
    on_device: dict[str, tuple[int, int]] | None = None,
) -> Attribution:
    """One step, whose calls are each 95 long and draw the numbers that they are given.

    Args:
        on_device: from when until when the kernel runs that the row of that name launches.
    """
    table = table_of(
        Row(RowKind.STEP, 0, 0, "step", argument=0),
        *(Row(RowKind.CALL, 100 * k, 100 * k + 95, "call", argument=k) for k in range(len(calls))),
        *rows,
        Row(RowKind.STEP, 10_000, 10_000, "step", argument=1),
    )
    if on_device is not None:
        table = replace(table, kernels=launched(table, on_device))
    skeleton = read_skeleton(table, spans(*calls), [-1, 0, 1, 0, 3], paths=PATHS)
    return build_result(assign(skeleton, 0, None), MODULES, LINES, None, {}, has_flops=False, graphs=graphs)


def launched(table: EventTable, on_device: dict[str, tuple[int, int]]) -> KernelTable:
    """Kernels in order of start, each called ``k_`` and what its row is called.

    One that no row is called like is called like that itself, and launched by the run of the graph, as in a replay.
    """
    names = sorted(on_device, key=lambda name: on_device[name])
    called = [name if name in table.names else GRAPH for name in names]
    row = [int(np.flatnonzero(table.name == table.names.index(name))[0]) for name in called]
    start, end = np.array([on_device[name] for name in names], np.int64).T
    nothing = np.zeros(len(names), np.int64)
    shown = tuple(f"k_{name}" if name in table.names else name for name in names)
    return KernelTable(shown, np.arange(len(names)), start, end, nothing, nothing, np.array(row))


def backward(start: int, sequence: int, *kernels: tuple[str, int], number: int = 0) -> list[Row]:
    """A pass of one compiled node, whose kernels take so long one after the other."""
    end = start + sum(ns for _, ns in kernels)
    rows = [
        Row(RowKind.BACKWARD, start, end, "backward", argument=0),
        Row(RowKind.NODE, start, end, "CompiledFunctionBackward", sequence=sequence, forward_thread=1),
        Row(RowKind.GRAPH, start, end, GRAPH, argument=number),
    ]
    for name, ns in kernels:
        rows.append(Row(RowKind.OP, start, start + ns, name))
        start += ns
    return rows


def layers(found: Attribution, column: str = "backward_self_ns") -> dict[str, int]:
    return {row.path: value for row in found.layers if (value := getattr(row, column))}


def test_a_kernel_of_one_layer_is_that_layers_and_no_estimate() -> None:
    nodes = {"x": fused(-1), "p": fused(AX, "x", line=0), "q": fused(B, "p", line=1)}
    found = run(
        {0: graph(nodes, cpp_fused_p="p", cpp_fused_q="q")},
        *backward(1000, 5, ("cpp_fused_p", 300), ("cpp_fused_q", 50)),
    )
    assert layers(found) == {"a.x": 300, "b": 50}
    assert layers(found, "estimated_ns") == {}
    assert {(row.line, row.layer): row.backward_ns for row in found.lines} == {(1, "a.x"): 300, (2, "b"): 50}
    assert found.ledger.layers_ns == 350


def test_what_is_fused_is_split_by_what_each_would_move_alone() -> None:
    """The first reads 8 and writes 4, which the second reads; that writes 24."""
    nodes = {"x": fused(-1, size=8), "p": fused(A, "x"), "q": fused(B, "p", size=24)}
    found = run({0: graph(nodes, cpp_fused_p_q="p q")}, *backward(1000, 5, ("cpp_fused_p_q", 400)))
    assert layers(found) == {"a": 400 * 12 // 40, "b": 400 * 28 // 40}
    assert layers(found, "estimated_ns") == layers(found)
    assert [row.calls for row in found.ops if row.name == "cpp_fused_p_q"] == [1, 0]


def test_what_stays_within_a_layer_moves_nothing() -> None:
    nodes = {
        "x": fused(-1, size=10),
        "p1": fused(A, "x", size=1000),
        "p2": fused(A, "p1", size=1000),
        "p3": fused(A, "p2", size=10),
        "q": fused(B, "p3", size=10),
    }
    found = run({0: graph(nodes, cpp_fused="p1 p2 p3 q")}, *backward(1000, 5, ("cpp_fused", 400)))
    assert layers(found) == {"a": 200, "b": 200}


@pytest.mark.parametrize(("kernel", "random"), [("cpp_fused", 400 * 176 // 192), ("triton_fused", 200)])
def test_computing_takes_time_on_a_processor_alone(kernel: str, random: int) -> None:
    """Each moves 16 bytes; random numbers take twenty times as long as writing them. A device computes meanwhile."""
    nodes = {
        "x": fused(-1, size=8),
        "p": fused(A, "x", size=8, op="inductor_random"),
        "q": fused(B, "x", size=8, op="mul"),
    }
    found = run({0: graph(nodes, **{kernel: "p q"})}, *backward(1000, 5, (kernel, 400)))
    assert layers(found)["a"] == pytest.approx(random, abs=1)


def test_views_are_looked_through() -> None:
    nodes = {
        "x": fused(-1, size=8),
        "p": fused(A, "x"),
        "v": fused(B, "p", is_view=True, size=99),
        "q": fused(A, "v", size=8),
    }
    found = run({0: graph(nodes, cpp_fused="p v q")}, *backward(1000, 5, ("cpp_fused", 400)))
    assert layers(found) == {"a": 400} and layers(found, "estimated_ns") == {}


def test_a_copy_for_a_view_is_of_the_layer_that_views() -> None:
    nodes = {"x": fused(-1), "v": fused(B, "x", is_view=True)}
    found = run({0: graph(nodes, cpp_fused_view="v")}, *backward(1000, 5, ("cpp_fused_view", 400)))
    assert layers(found) == {"b": 400}


def test_an_operation_of_torch_computes_the_node_of_that_name() -> None:
    """Inductor names all that it was made from: what gave a convolution its input, too."""
    nodes = {"x": fused(-1), "p": fused(A, "x", op="where"), "q": fused(B, "p", op="convolution_backward")}
    kernels = {"torch.ops.aten.convolution_backward.default": "p q"}
    found = run({0: graph(nodes, **kernels)}, *backward(1000, 5, ("aten::convolution_backward", 400)))
    assert layers(found) == {"b": 400} and layers(found, "estimated_ns") == {}


def test_forward_in_a_graph_of_backward_is_recompute() -> None:
    nodes = {"x": fused(-1), "p": fused(A, "x", again=True), "q": fused(A, "x")}
    found = run({0: graph(nodes, cpp_1="p", cpp_2="q")}, *backward(1000, 5, ("cpp_1", 30), ("cpp_2", 70)))
    assert (layers(found, "recompute_ns"), layers(found)) == ({"a": 30}, {"a": 70})
    assert found.ledger.recompute_ns == 30


def test_nodes_without_a_layer_are_of_the_one_that_runs_the_graph() -> None:
    """The loss in a model's own forward; what Inductor has made itself is of whatever the others are."""
    nodes = {"x": fused(-1), "loss": fused(-1, "x", line=0), "made": fused(-1, size=99), "p": fused(A, "x", line=0)}
    found = run({0: graph(nodes, cpp_1="loss made", cpp_2="p made")}, *backward(1000, 5, ("cpp_1", 30), ("cpp_2", 70)))
    assert layers(found) == {"": 30, "a": 70}


def test_blocks_that_share_a_graph_have_their_own_layers() -> None:
    """It was compiled in the first."""
    nodes = {"x": fused(-1), "p": fused(AX, "x"), "rest": fused(A, "x"), "none": fused(-1, "x", line=0)}
    one = graph(nodes, cpp_1="p", cpp_2="rest", cpp_3="none")
    kernels = (("cpp_1", 30), ("cpp_2", 70), ("cpp_3", 5))
    calls = ((A, 0, 4), (B, 4, 9))
    found = run({0: one}, *backward(1000, 5, *kernels), *backward(2000, 2, *kernels), calls=calls)
    assert layers(found) == {"a": 75, "a.x": 30, "b": 75, "b.x": 30}


def test_blocks_that_share_a_graph_of_other_sizes_each() -> None:
    """FLOPs are of the sizes, and so are the nodes that hold them; the second runs with its own parameters alone."""

    def ran(flops: int) -> CompiledGraph:
        nodes = {"x": fused(-1), "p": fused(AX, "x", flops=flops), "rest": fused(A, "x")}
        return replace(graph(nodes, cpp_1="p", cpp_2="rest"), compiled=7)

    graphs = {0: replace(ran(1), moved=((AX, AX),)), 1: replace(ran(2), moved=((AX, BX),))}
    kernels = (("cpp_1", 30), ("cpp_2", 70))
    calls = ((A, 0, 4), (B, 4, 9))
    found = run(graphs, *backward(1000, 5, *kernels, number=1), *backward(2000, 2, *kernels), calls=calls)
    assert layers(found) == {"a": 70, "a.x": 30, "b": 70, "b.x": 30}
    assert {row.path: row.backward_flops for row in found.layers if row.backward_flops} == {"a.x": 1, "b.x": 2}


@pytest.mark.parametrize("untold", [True, False])
def test_backward_of_a_pass_of_which_nobody_tells_the_layers_is_not_known(untold: bool) -> None:
    """One graph of the whole pass, of compiled autograd: an operation of no layer may be of any that has none."""
    ahead = {"x": fused(-1), "p": fused(A, "x", again=True, flops=7), "q": fused(B, "x", again=True, flops=7)}
    behind = {"x": fused(-1), "p": fused(A, "x", flops=5), "q": fused(-1 if untold else B, "x", flops=5)}
    graphs = {0: graph(ahead, cpp_1="p q"), 1: replace(graph(behind, cpp_1="p", cpp_2="q"), is_pass=True)}
    rows = [
        Row(RowKind.GRAPH, 10, 90, GRAPH, argument=0),
        Row(RowKind.OP, 10, 40, "cpp_1"),
        Row(RowKind.BACKWARD, 1000, 1100, "backward", argument=0),
        Row(RowKind.GRAPH, 1000, 1100, GRAPH, argument=1),
        Row(RowKind.OP, 1000, 1030, "cpp_1"),
        Row(RowKind.OP, 1030, 1090, "cpp_2"),
    ]
    found = {row.path: (row.forward_flops, row.backward_flops) for row in run(graphs, *rows).layers}
    assert (found["a"], found["b"]) == ((7, 5), (7, None if untold else 5))


def test_sizes_that_a_graph_finds_out_itself() -> None:
    """Of a layer that computes with such a size the operations are not known, and a note says so."""
    ahead = {"x": fused(-1), "p": fused(A, "x", again=True, flops=7), "q": fused(B, "x", again=True, flops=-1)}
    rows = [
        Row(RowKind.GRAPH, 10, 90, GRAPH, argument=0),
        Row(RowKind.OP, 10, 40, "cpp_1"),
    ]
    found = run({0: graph(ahead, cpp_1="p q")}, *rows)
    assert {row.path: row.forward_flops for row in found.layers if row.path in "ab" and row.path} == {"a": 7, "b": None}
    assert any("finds out while it runs" in note for note in found.notes)


def test_forward_has_layers_too() -> None:
    nodes = {"x": fused(-1), "p": fused(A, "x", again=True, flops=7), "q": fused(B, "x", again=True)}
    rows = [
        Row(RowKind.GRAPH, 10, 90, GRAPH, argument=0),
        Row(RowKind.OP, 10, 40, "cpp_1"),
        Row(RowKind.OP, 40, 90, "cpp_2"),
    ]
    found = run({0: graph(nodes, cpp_1="p", cpp_2="q")}, *rows)
    assert layers(found, "forward_self_ns") == {"": 15, "a": 30, "b": 50}
    assert {row.path: (row.flops, row.forward_flops) for row in found.layers if row.flops} == {"a": (7, 7)}


def test_a_graph_that_ran_other_kernels_is_one_row() -> None:
    nodes = {"x": fused(-1), "p": fused(A, "x")}
    found = run({0: graph(nodes, cpp_1="p")}, *backward(1000, 5, ("cpp_2", 70)))
    assert layers(found) == {"": 70}
    assert any("1 of 1 runs of compiled graphs ran other kernels" in note for note in found.notes)


def test_a_graph_that_nobody_noted_is_one_row_without_a_word() -> None:
    found = run({}, *backward(1000, 5, ("cpp_2", 70)))
    assert layers(found) == {"": 70} and found.notes == ()


MM, CPP1, CPP2 = "extern_kernels.mm", "cpp_fused_1", "cpp_fused_2"


@pytest.mark.parametrize(
    ("rows", "kernels", "found"),
    [
        ([CPP1, "aten::mm", CPP2], [CPP1, MM, CPP2], [0, 1, 2]),
        ([CPP1, "aten::empty", CPP2], [CPP1, CPP2], [0, -1, 1]),  # of the code around the kernels
        ([CPP1, CPP2], [CPP1, MM, CPP2], [0, 2]),  # one that writes no row
        ([CPP1, CPP1], [CPP1, CPP1], [0, 1]),
        ([CPP2, CPP1], [CPP1, CPP2], None),
        ([CPP1], [CPP1, CPP2], None),
        ([CPP1, CPP2], [CPP1], None),
        (["aten::addmm"], ["extern_kernels.bias_addmm"], [0]),
        (["aten::_flash"], ["torch.ops.aten._flash.default"], [0]),
        (["mkldnn::_linear_pointwise"], ["torch.ops.mkldnn._linear_pointwise.binary"], [0]),
        (["aten::bmm"], [MM], [-1]),
        (["triton_poi_fused_0"], ["triton_poi_fused_0"], [0]),
    ],
)
def test_kernels_run_in_the_order_of_the_code(rows: list[str], kernels: list[str], found: list[int] | None) -> None:
    assert match(rows, kernels) == found


def test_a_devices_kernels_are_of_the_layers_that_they_compute() -> None:
    """One of several layers is in pieces, which add up; so is what launching it took."""
    nodes = {"x": fused(-1, size=8), "p": fused(A, "x", size=4), "q": fused(B, "p", size=24), "m": fused(A, "q")}
    graphs = {0: graph(nodes, triton_1="p q", triton_2="m")}
    rows = backward(1000, 5, ("triton_1", 40), ("triton_2", 10))
    ran = {"triton_1": (1500, 1900), "triton_2": (1900, 2000)}
    found = run(graphs, *rows, on_device=ran)
    assert layers(found, "device_ns") == {"a": 120 + 100, "b": 280}
    assert layers(found, "launch_ns") == {"a": 12 + 10, "b": 28}
    assert layers(found) == {"a": 12 + 10 + 220, "b": 28 + 280}
    assert layers(found, "estimated_ns") == {"a": 12 + 120, "b": 28 + 280}
    kernels = {(row.layer, row.name): (row.device_ns, row.busy_ns, row.calls) for row in found.kernels}
    assert kernels == {
        ("a", "k_triton_1"): (120, 120, 1),
        ("b", "k_triton_1"): (280, 280, 0),
        ("a", "k_triton_2"): (100, 100, 1),
    }


def test_the_estimate_is_of_the_measured_steps() -> None:
    nodes = {"x": fused(-1, size=8), "p": fused(A, "x"), "q": fused(B, "p", size=24)}
    graphs = {0: graph(nodes, cpp_1="p q")}
    behind = backward(11_000, 6, ("cpp_1", 400))  # the step has ended
    found = run(graphs, *backward(1000, 5, ("cpp_1", 400)), *behind)
    assert layers(found, "estimated_ns") == layers(found)


def test_a_layer_that_blocks_share_stays_where_it_is() -> None:
    """Compiled for block ``a`` and run by ``b`` too: what lies below moves with the block, the shared one does not."""
    shared = {"x": fused(-1), "p": fused(AX, "x"), "s": fused(ROOT, "p")}
    found = run(
        {0: graph(shared, cpp_p="p", cpp_s="s")},
        *backward(1000, 105, ("cpp_p", 30), ("cpp_s", 5)),
        *backward(3000, 205, ("cpp_p", 40), ("cpp_s", 6)),
        calls=((ROOT, 0, 9), (A, 100, 109), (B, 200, 209)),
    )
    assert layers(found) == {"": 11, "a.x": 30, "b.x": 40}


GEMM, SPLIT, FILL = "sm90_xmma_gemm_f32f32_tn", "void cublasLt::splitKreduce_kernel<32, 16>", "Memset (Unknown)"
FLASH, COPY = "fmha_cutlassB_f32_aligned_64x64_k64_sm80", "void at::native::elementwise_kernel<128, 2>"
ATTENTION = "torch.ops.aten._scaled_dot_product_efficient_attention_backward.default"
ONE, TWO = "triton_poi_fused_1", "triton_red_fused_2"


@pytest.mark.parametrize(
    ("activities", "kernels", "found"),
    [
        ([ONE, GEMM, TWO], [ONE, MM, TWO], [(0,), (1,), (2,)]),
        ([ONE, TWO], [ONE, MM, TWO], [(0,), (2,)]),  # cut off by a trace that began behind it, say
        ([TWO, ONE], [ONE, TWO], None),
        ([ONE], [ONE, TWO], None),
        ([GEMM], [MM, TWO], None),
        ([COPY, ONE], [ONE], [(), (0,)]),  # nothing of the code
        # All that lies between two kernels is of the one operation that is there, whatever it is called.
        ([ONE, COPY, FILL, FLASH, TWO], [ONE, ATTENTION, TWO], [(0,), (1,), (1,), (1,), (2,)]),
        # Of two products' each has one; the sum of its parts is of the one before, the workspace of the one behind.
        ([GEMM, FILL, GEMM, SPLIT, ONE], [MM, MM, ONE], [(0,), (1,), (1,), (1,), (2,)]),
        ([GEMM, SPLIT, GEMM, SPLIT], [MM, MM], [(0,), (0,), (1,), (1,)]),
        # What nothing is known of is of the operation that is no product.
        ([GEMM, COPY, FLASH, ONE], [MM, ATTENTION, ONE], [(0,), (1,), (1,), (2,)]),
        ([GEMM, COPY, GEMM], [MM, "aten.index_put", MM], [(0,), (1,), (2,)]),
        # Three kernels of two products: it may be either.
        ([GEMM, GEMM, GEMM], [MM, MM], [(0, 1), (0, 1), (0, 1)]),
        ([GEMM, COPY, GEMM], [MM, MM], [(0,), (0, 1), (1,)]),
    ],
)
def test_whose_a_replayed_activity_is(
    activities: list[str], kernels: list[str], found: list[tuple[int, ...]] | None
) -> None:
    assert match_replay(activities, kernels) == found


def test_many_operations_between_two_kernels_take_no_time_to_tell_apart() -> None:
    convolutions = ["extern_kernels.convolution"] * 40
    found = match_replay(["cudnn_fprop"] * 80, convolutions)
    assert found is not None and found[0] == tuple(range(40))


def test_a_cuda_graphs_kernels_are_of_the_layers_that_they_compute() -> None:
    """It is replayed without rows: what launching took stays with the graph."""
    nodes = {"x": fused(-1, size=8), "p": fused(A, "x", size=4), "q": fused(B, "p", size=24), "m": fused(A, "q")}
    graphs = {0: graph(nodes, triton_1="p q", **{MM: "m"})}
    ran = {"triton_1": (1500, 1900), "gemm": (1900, 2000), "splitKreduce": (2000, 2010)}
    found = run(graphs, *backward(1000, 5, ("cudaGraphLaunch", 40)), on_device=ran)
    assert layers(found, "device_ns") == {"a": 120 + 110, "b": 280}
    assert layers(found, "estimated_ns") == {"a": 120, "b": 280}
    assert layers(found, "launch_ns") == {"": 40}
    assert found.notes == ()
    ops = {(row.layer, row.name): (row.self_ns, row.calls) for row in found.ops if row.layer}
    assert ops == {("a", "triton_1"): (120, 1), ("b", "triton_1"): (280, 0), ("a", "aten::mm"): (110, 1)}
    kernels = {(row.layer, row.op, row.name): (row.device_ns, row.calls) for row in found.kernels}
    assert kernels == {
        ("a", "triton_1", "triton_1"): (120, 1),
        ("b", "triton_1", "triton_1"): (280, 0),
        ("a", "aten::mm", "gemm"): (100, 1),
        ("a", "aten::mm", "splitKreduce"): (10, 1),
    }


def test_a_cuda_graph_in_parts_has_rows_between_them() -> None:
    """A random number that is drawn outside of the replay: its row is no replay's, and what it launches is in order."""
    nodes = {"x": fused(-1), "p": fused(A, "x"), "r": fused(B, "x", op="random"), "q": fused(AX, "r")}
    graphs = {0: graph(nodes, triton_1="p", **{"aten.random": "r"}, triton_2="q")}
    ran = {"triton_1": (1500, 1600), "aten::random": (1600, 1650), "triton_2": (1650, 1700)}
    found = run(graphs, *backward(1000, 5, ("aten::random", 40)), on_device=ran)
    assert layers(found, "device_ns") == {"a": 100, "a.x": 50, "b": 50}


def test_a_replay_of_other_kernels_is_one_row() -> None:
    nodes = {"x": fused(-1), "p": fused(A, "x")}
    found = run({0: graph(nodes, triton_1="p")}, *backward(1000, 5), on_device={"triton_2": (1500, 1600)})
    assert layers(found, "device_ns") == {"": 100}
    assert any("1 of 1 runs of compiled graphs ran other kernels" in note for note in found.notes)


def test_a_sum_of_gradients_is_one() -> None:
    """As in eager, where the engine adds up what comes from several sides."""
    nodes = {"x": fused(-1), "s": fused(A, "x", is_sum=True, op="add"), "q": fused(A, "s", size=12)}
    found = run({0: graph(nodes, cpp_1="s q")}, *backward(1000, 5, ("cpp_1", 240)))
    assert (layers(found, "gradient_sum_ns"), layers(found)) == ({"a": 80}, {"a": 160})
    assert found.ledger.gradient_sum_ns == 80
