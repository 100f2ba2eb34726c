"""benchmarks/recipe_gpu on the CPU: every way computes what the first does, and the counts are right.

Only the clock is missing: a stub stands for it.
"""

from __future__ import annotations

import pytest
import torch

from .gpu_fixtures import (
    LIMITS,
    Budget,
    Inputs,
    Kind,
    Problem,
    Stub,
    everywhere,
    measure,
    ops,
    report,
    shapes,
)

__all__ = ["everywhere"]  # a fixture

GPT_2, LLAMA = shapes.GPT_2, shapes.LLAMA
attention, packed_attention = ops.attention, ops.packed_attention
TINY = shapes.Model("tiny", 2, 12, 32, 4, 2, 24, 19)  # heads of 8
NAMES = list(ops.OPS)
WITH_LIGER = {"cross_entropy", "linear_cross_entropy", "swiglu", "norm", "rope"}


def problems_of(op: str) -> list[Problem]:
    """At a tiny shape, and the cases that only GPT-2's attention has."""
    named = [TINY]
    if op == "attention":
        named.append(shapes.Model("GPT-2", *(getattr(TINY, name) for name in TINY.__slots__[1:])))
    return [problem for model in named for problem in ops.OPS[op](model)]


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("op", NAMES)
def test_every_way_gives_the_gradients_of_the_first(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops.dropout, "SHARE", 0.0)
    monkeypatch.setattr(ops.norm, "SHARE", 0.0)
    for problem in problems_of(op):
        torch.manual_seed(0)
        inputs = problem.make("cpu", torch.float32)
        if "dropout 0.1" in problem.name:
            continue  # of attention weights; measured below
        first, *others = problem.ways
        expected = problem.step(first.run, inputs)()
        assert len(expected) == len(inputs.leaves) > 0
        for way in others:
            own = inputs.copy() if way.overwrites else inputs
            found = problem.step(way.run, own)()
            for ours, right in zip(found, expected, strict=True):
                # Single precision: sums of some tens of terms, taken in another order.
                torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5, msg=f"{problem.name}, {way.name}")


@pytest.mark.usefixtures("everywhere")
@pytest.mark.parametrize("op", NAMES)
def test_all_is_measured_in_half_precision(op: str) -> None:
    """The whole way through, with ways that overwrite what they are given: their copies are restored."""
    for problem in problems_of(op):
        torch.manual_seed(0)
        figures = list(
            measure.measure(
                problem, Stub(), LIMITS, Budget(1e12), rounds=3, problems_after=0, device="cpu", begin=lambda _: None
            )
        )
        assert [figure.way for figure in figures] == [way.name for way in problem.ways]
        for figure in figures:
            assert figure.failure is None, (problem.name, figure)
            assert (figure.ms, figure.host_ms, figure.peak_bytes) == (2.0, 0.5, 3 << 20)
            if problem.random or figure is figures[0]:
                assert figure.error is None
            else:
                assert figure.error is not None and figure.error < measure.LARGEST_ERROR, (problem.name, figure)
        assert sum(figure.kind == Kind.RECIPE for figure in figures) == 1
        assert {figure.waits for figure in figures} == {None, False}
        assert "MISSED" not in {r.verdict for r in report.results_of(problem, figures) if "faster" in r.name}


@pytest.mark.usefixtures("everywhere")
def test_every_op_has_what_is_asked_for() -> None:
    """Eager by hand or torch's, the recipe and the compiler everywhere; Liger and SDPA where they have the op."""
    with_liger, with_sdpa = set(), set()
    for op in NAMES:
        for problem in problems_of(op):
            kinds = {way.kind for way in problem.ways}
            assert {Kind.EAGER, Kind.RECIPE, Kind.COMPILE} <= kinds, problem.name
            assert problem.op == op and (problem.bytes > 0) != (problem.flop > 0)
            with_liger |= {op} if Kind.LIGER in kinds else set()
            with_sdpa |= {op} if Kind.SDPA in kinds else set()
    assert with_liger == WITH_LIGER
    assert with_sdpa == {"attention", "packed_attention"}


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # of what Dynamo imports
@pytest.mark.parametrize("op", NAMES)
def test_what_the_compiler_is_given_is_one_graph(op: str) -> None:
    for problem in problems_of(op)[:2]:
        inputs = problem.make("cpu", torch.float32)
        for way in problem.ways:
            if way.kind == Kind.COMPILE:
                torch._dynamo.reset()
                torch.compile(way.run, backend="eager", fullgraph=True, dynamic=False)(*inputs.tensors)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("op", "index", "size"),
    [
        ("cross_entropy", 0, 2 * 8192 * 50257 * 2),
        ("gelu", 0, 5 * 8192 * 3072 * 2),
        ("gelu", 1, 5 * 8192 * 3072 * 2 + 3 * 3072 * 2),
        ("swiglu", 0, 8 * 8192 * 3072 * 2),
        ("norm", 0, 5 * 8192 * 768 * 2),
        ("norm", 1, 5 * 8192 * 768 * 2),
        ("norm", 2, 8 * 8192 * 768 * 2),
        ("norm", 3, 9 * 8192 * 768 * 2),
        ("dropout", 0, 4 * 8192 * 768 * 2),
        ("rope", 0, 4 * 8192 * 2 * 768 * 2),
        ("embedding", 0, 3 * 50257 * 768 * 4 + 5 * 8192 * 768 * 4),
        ("heads", 0, 2 * 8192 * 768 * 2 + 2 * 8192 * 3 * 768 * 2),
    ],
)
def test_bytes_by_hand(op: str, index: int, size: int) -> None:
    assert ops.OPS[op](GPT_2)[index].bytes == size


def test_flop_by_hand() -> None:
    """Attention: q kᵀ and p v forward; backward q kᵀ again, do vᵀ, and the gradients of q, k and v. Half is masked."""
    product = 2 * 8 * 12 * 1024 * 1024 * 64
    assert attention.problems(GPT_2)[0].flop == 7 * product // 2
    assert packed_attention.problems(GPT_2)[0].flop == 7 * product // 2
    assert attention.problems(LLAMA)[0].flop == 7 * (2 * 32 * 4096 * 4096 * 128) // 2
    head = ops.linear_cross_entropy.problems(LLAMA)[0]
    assert head.flop == 3 * (2 * 4096 * 4096 * 128256)
    assert measure.least_ms(head, LIMITS) == pytest.approx(1e3 * head.flop / 8e14)
    logits = ops.cross_entropy.problems(GPT_2)[0]
    assert measure.least_ms(logits, LIMITS) == pytest.approx(0.411705, abs=1e-5)  # 1.6468 GB at 4 TB/s


def test_grouped_heads_are_counted() -> None:
    assert LLAMA.packed == 6144 and LLAMA.size == 128 and GPT_2.packed == 2304
    assert ops.rope.problems(LLAMA)[0].bytes == 4 * 4096 * 40 * 128 * 2
    assert ops.heads.problems(LLAMA)[0].bytes == 2 * 4096 * (4096 + 6144) * 2


def test_all_problems_and_only_some() -> None:
    found = ops.all_problems()
    assert [problem.op for problem in found if problem.name.startswith("Llama")].count("norm") == 4
    assert len({(problem.op, problem.name) for problem in found}) == len(found) == 37
    assert {problem.op for problem in ops.all_problems("rope")} == {"rope"}
    for problem in found:
        assert len({way.name for way in problem.ways}) == len(problem.ways)


def test_ways_that_overwrite_have_tensors_of_their_own() -> None:
    packed = torch.randn(2, 3, 4)
    inputs = Inputs((packed.transpose(0, 1).requires_grad_(), torch.arange(3)), (torch.ones(2),))
    own = inputs.copy()
    assert [tensor.requires_grad for tensor in own.tensors] == [True, False]
    assert own.tensors[0].stride() == inputs.tensors[0].stride()
    own.tensors[0].data.fill_(7)
    own.upstream[0].fill_(7)
    own.restore(inputs)
    torch.testing.assert_close(own.tensors[0], inputs.tensors[0])
    torch.testing.assert_close(own.upstream[0], inputs.upstream[0])
