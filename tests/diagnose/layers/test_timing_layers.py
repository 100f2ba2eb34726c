"""Slow layers, made by hand: times are steady and a GPU can be had."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradscope.diagnose.case import Case, StepFacts
from gradscope.diagnose.rules.layers import backward_ratio, slow_repeat, vocabulary_multiple
from gradscope.ops import ZEROS_OF_UNUSED
from tests.diagnose.timing_cases import MS, call, check_words, made_case, op, row, tensor


def _backward_case(cause: str, forward: int, backward: int, wall: int | None = None, **more: Any) -> Case:
    ops = [
        op("body", "forward", "aten::index", forward),
        op("body", "backward", cause, backward - MS // 10),
        op("body", "backward", "IndexBackward0", MS // 10),
    ]
    rows = [row("body", forward, backward, **more)]
    return made_case(rows, ops) if wall is None else made_case(rows, ops, wall=wall)


def test_indexing_whose_backward_adds_row_by_row() -> None:
    (found,) = backward_ratio.find(_backward_case("aten::_index_put_impl_", MS, 20 * MS))
    check_words(found)
    assert found.layers == ("body",)
    assert "_index_put_impl_" in found.message
    assert "×20.0" in found.evidence
    # 20 ms of which 2.5 are usual: what is above is not all saved.
    assert (found.predicted_low_ns, found.predicted_saving_ns, found.predicted_high_ns) == (
        17_500_000 // 2,
        13_125_000,
        17_500_000,
    )
    assert found.cost_ns == 20 * MS


def test_an_operation_that_is_fast_elsewhere_must_be_slow_in_steady_steps() -> None:
    busy = _backward_case("aten::mm", MS, 20 * MS, backward_self_steps_ns=(20 * MS, 20 * MS))
    assert list(backward_ratio.find(busy)) == []
    steady = _backward_case("aten::mm", MS, 20 * MS, backward_self_steps_ns=(20 * MS,) * 4)
    (found,) = backward_ratio.find(steady)
    check_words(found)


@pytest.mark.parametrize(
    ("dtype", "device", "told"), [("bfloat16", "cpu", True), ("float32", "cpu", False), ("bfloat16", "cuda", False)]
)
def test_matmuls_of_half_the_width_on_a_cpu_are_advised_to_be_float32(dtype: str, device: str, told: bool) -> None:
    product = call("linear", [tensor(256, 256), tensor(64, 256)], [tensor(256, 64, dtype=dtype)])
    ops = [op("body", "forward", "aten::addmm", MS), op("body", "backward", "aten::mm", 20 * MS)]
    rows = [row("body", MS, 20 * MS, backward_self_steps_ns=(20 * MS,) * 4)]
    (found,) = backward_ratio.find(
        made_case(rows, ops, facts=StepFacts(calls=(product,), recorded=True), device=device)
    )
    check_words(found)
    assert ("bfloat16 mm on this CPU" in found.message) is told
    assert ("in float32" in found.advice) is told


@pytest.mark.parametrize("cause", ["cpp_fused_gelu_0", "triton_poi_fused_gelu_0", ZEROS_OF_UNUSED])
def test_what_a_graph_runs_has_no_forward_to_be_compared_with(cause: str) -> None:
    slow = _backward_case(cause, MS, 20 * MS, backward_self_steps_ns=(20 * MS,) * 4)
    assert list(backward_ratio.find(slow)) == []


def test_the_node_of_a_compiled_graph_is_no_function_of_the_users() -> None:
    rows = [row("body", MS, 20 * MS, backward_self_steps_ns=(20 * MS,) * 4)]
    for name, by_hand in (("CompiledFunctionBackward", False), ("SquareBackward", True)):
        ops = [op("body", "forward", "aten::addmm", MS), op("body", "backward", "aten::mm", 19 * MS)]
        (found,) = backward_ratio.find(made_case(rows, [*ops, op("body", "backward", name, MS)]))
        assert ("autograd.Function" in found.code) is by_hand


def test_equal_layers_are_one_finding() -> None:
    rows = [row(f"h.{n}", MS, 10 * MS) for n in range(2)]
    ops = [op(each.path, "forward", "aten::index", MS) for each in rows]
    ops += [op(each.path, "backward", "aten::_index_put_impl_", 9 * MS) for each in rows]
    (found,) = backward_ratio.find(made_case(rows, ops))
    assert found.layers == ("h.0", "h.1")


@pytest.mark.parametrize(
    ("cause", "forward", "backward"),
    [
        ("aten::_index_put_impl_", MS, 4 * MS),  # below twice the norm
        ("aten::_index_put_impl_", MS // 100, 400_000),  # too little to matter
        ("aten::cat", MS, 20 * MS),  # of views
        ("aten::select_backward", MS, 20 * MS),  # a rule of its own
        ("aten::some_backward", 10_000, 20 * MS),  # a forward of views
        ("aten::grid_sampler_2d_backward", MS, 6 * MS),  # as it is
    ],
)
def test_a_backward_that_is_as_it_should_be(cause: str, forward: int, backward: int) -> None:
    assert list(backward_ratio.find(_backward_case(cause, forward, backward))) == []


@pytest.mark.parametrize(
    ("forward", "backward", "wall", "found"),
    [
        (MS, 6 * MS, 72 * MS, 0),  # 3.5 ms above the norm: less than a twentieth of the step
        (MS, 6 * MS, 68 * MS, 1),
        (MS // 10, 740_000, 5 * MS, 0),  # 0.49 ms above it, a tenth of the step
        (MS // 10, 760_000, 5 * MS, 1),
    ],
)
def test_what_is_above_the_norm_must_matter(forward: int, backward: int, wall: int, found: int) -> None:
    case = _backward_case("aten::_index_put_impl_", forward, backward, wall)
    assert len(list(backward_ratio.find(case))) == found


def test_one_slow_step_is_no_slow_backward() -> None:
    case = _backward_case("aten::_index_put_impl_", MS, 20 * MS, backward_self_steps_ns=(38 * MS, 2 * MS))
    assert list(backward_ratio.find(case)) == []


def _blocks(slow_backward: tuple[int, ...]) -> Case:
    rows = []
    ops = []
    for n in range(5):
        steps = slow_backward if n == 2 else (2 * MS + n * 1000, 2 * MS, 2 * MS, 2 * MS)
        mean = sum(steps) // len(steps)
        rows.append(row(f"h.{n}", MS, mean, backward_self_steps_ns=steps))
        ops += [op(f"h.{n}", "forward", "aten::addmm", MS), op(f"h.{n}", "backward", "aten::mm", mean)]
    return made_case(rows, ops)


def test_a_block_whose_product_is_slower_in_each_step() -> None:
    (found,) = slow_repeat.find(_blocks((8 * MS, 9 * MS, 8 * MS, 9 * MS)))
    check_words(found)
    assert found.layers == ("h.2",)
    assert "aten::mm" in found.message
    assert found.cost_ns == pytest.approx(6.5 * MS, rel=0.01)
    assert found.predicted_saving_ns == pytest.approx(0.8 * 6.5 * MS, rel=0.01)


def test_an_interrupted_block_is_not_slow() -> None:
    assert list(slow_repeat.find(_blocks((14 * MS, 14 * MS, 14 * MS, 2 * MS)))) == []
    assert list(slow_repeat.find(_blocks((14 * MS, 14 * MS)))) == []


def test_experts_called_more_often_are_not_slow() -> None:
    case = _blocks((8 * MS, 9 * MS, 8 * MS, 9 * MS))
    rows = [replace(each, calls=3.0) if each.path == "h.2" else each for each in case.run.layers]
    assert list(slow_repeat.find(Case(replace(case.run, layers=tuple(rows)), StepFacts()))) == []


def _head(classes: int, device: str, dtype: str = "float32") -> Case:
    x, weight = tensor(512, 64, device=device), tensor(classes, 64, device=device, parameter="head.weight")
    y = tensor(512, classes, device=device, dtype=dtype)
    product = call("linear", (x, weight), (y,), layer="head", module="Linear")
    ops = [op("head", "forward", "aten::addmm", 10 * MS)]
    return made_case([row("head", 10 * MS, 20 * MS, "Linear")], ops, facts=StepFacts(calls=(product,), recorded=True))


def test_an_odd_vocabulary_on_a_gpu_has_no_estimate() -> None:
    (found,) = vocabulary_multiple.find(_head(50257, "cuda", "bfloat16"))
    check_words(found)
    assert "50,304" in found.advice
    assert found.predicted_saving_ns is None
    (cpu,) = vocabulary_multiple.find(_head(50257, "cpu"))
    added = 47 / 50257
    expected = [round(10 * MS * (part - added)) for part in (0.01, 0.04, 0.10)]
    assert [cpu.predicted_low_ns, cpu.predicted_saving_ns, cpu.predicted_high_ns] == expected
    assert cpu.cost_ns == 10 * MS


@pytest.mark.parametrize(
    ("classes", "device", "dtype"),
    [
        (50304, "cuda", "float32"),
        (1000, "cuda", "float32"),
        (50256, "cpu", "float32"),  # a multiple of 16
        (50257, "cpu", "bfloat16"),
    ],
)
def test_a_vocabulary_that_suits(classes: int, device: str, dtype: str) -> None:
    assert list(vocabulary_multiple.find(_head(classes, device, dtype))) == []
