"""Compiled graphs on timelines made by hand: what names tell of a replay, and what of a run counts."""

from __future__ import annotations

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
from gradscope.compat.inductor import notes
from gradscope.tables import CompiledGraph, FusedNode, RowKind

from .hand import Row
from .test_compiled import (
    ATTENTION,
    AX,
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


def test_of_what_a_branch_computes_no_operations_are_told() -> None:
    """Nor of the layers of a graph whose kernels are others than it was compiled to."""
    from torch.fx.experimental.proxy_tensor import make_fx

    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x @ x)

    branch = make_fx(Branch())(torch.ones(2, 2))
    whole: Any = SimpleNamespace(graph=torch.fx.Graph(), named_modules=lambda: (("", branch), ("true_graph_0", branch)))
    (note,) = notes._in_branches(whole).items()
    assert note[0].startswith("true_graph_0.mm") and note[1].flops == -1 and not note[1].inputs
    nodes = {"x": fused(-1), "p": fused(AX, "x", flops=7)}
    found = run({0: graph(nodes, cpp_1="p")}, *backward(1000, 5, ("cpp_another", 70)))
    assert {row.path: (row.forward_flops, row.backward_flops) for row in found.layers}["a.x"] == (None, None)
    assert any("branches and loops" in note for note in found.notes)


def test_what_ran_other_kernels_behind_the_steps_leaves_flops_told() -> None:
    nodes = {"x": fused(-1), "p": fused(A, "x", flops=7)}
    known = graph(nodes, cpp_1="p")
    rows = [*called(10, 0), *backward(1000, 5, ("cpp_1", 40)), *backward(11_000, 6, ("cpp_other", 40))]
    found = run({0: known}, *rows)
    assert {row.path: row.backward_flops for row in found.layers}["a"] == 7


def called(start: int, number: int) -> list[Row]:
    return [
        Row(RowKind.GRAPH, start, start + 20, GRAPH, argument=number),
        Row(RowKind.OP, start, start + 20, "cpp_1"),
    ]


@pytest.mark.parametrize("is_pass", [True, False])
def test_a_graph_outside_of_all_modules_is_none_of_compiled_autograds(is_pass: bool) -> None:
    made = replace(graph({"x": fused(-1), "p": fused(-1, "x", flops=7)}, cpp_1="p"), is_pass=is_pass)
    known = graph({"x": fused(-1), "p": fused(A, "x", flops=7)}, cpp_1="p")
    passed = Row(RowKind.BACKWARD, 990, 1020, "backward", argument=0)
    found = run({0: made, 1: known}, *called(10, 1), passed, *called(1000, 0))
    assert {row.path: row.backward_flops for row in found.layers}["a"] == (None if is_pass else 0)
