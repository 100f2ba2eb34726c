"""Edge cases of linear_cross_entropy, by their number in the list that every recipe passes."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradscope.kernels.linear_cross_entropy.products import add_product, product
from gradscope.recipes.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_and_logits
from gradscope.recipes.linear_cross_entropy_modules import LinearCrossEntropyHead

from .accuracy import assert_as_accurate, dirty_memory
from .test_linear_cross_entropy import NAMES, TOGETHER, gradients, plain, problem

# Dynamo makes an instance of the Function for its own use, of which torch warns.
INSTANCE = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_an_upstream_gradient_that_differs_by_row(rows: int) -> None:
    """Case 1: the weight's gradient cannot be scaled afterwards."""
    x, linear_weight, bias, target = problem(6)
    ours = gradients(linear_cross_entropy, target, x, linear_weight, bias, reduction="none", memory_budget=rows * 56)
    for mine, other in zip(ours, gradients(plain, target, x, linear_weight, bias, reduction="none"), strict=True):
        torch.testing.assert_close(mine, other)


def test_no_argument_is_written() -> None:
    """Cases 2 and 4."""
    x, linear_weight, bias, target = problem(6)
    tensors = [tensor.requires_grad_() for tensor in (x, linear_weight, bias)]
    upstream, before = torch.tensor(3.0, dtype=torch.float64), [tensor.detach().clone() for tensor in tensors]
    linear_cross_entropy(x, linear_weight, target, bias).backward(upstream)
    for tensor, was in zip([*tensors, upstream], [*before, torch.tensor(3.0).double()], strict=True):
        assert torch.equal(tensor, was) and tensor._version == 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_backward_as_often_as_the_graph_is_retained(reduction: str, dtype: torch.dtype) -> None:
    """Case 3."""
    *tensors, target = problem(6, dtype=dtype)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    loss = linear_cross_entropy(leaves[0], leaves[1], target, leaves[2], reduction=reduction)
    upstream = torch.full_like(loss, 2.0)
    found = [torch.autograd.grad(loss, leaves, upstream, retain_graph=retain) for retain in (True, True, False)]
    for first, second, third in zip(*found, strict=True):
        assert torch.equal(first, second) and torch.equal(first, third)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, leaves, upstream)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("rows", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_nothing_counts(reduction: str, rows: int, dtype: torch.dtype) -> None:
    """Case 6: all ignored, and empty; a mean is NaN with gradients of zero."""
    x, linear_weight, bias, _ = problem(rows, dtype=dtype)
    target = torch.full((rows,), -100)
    with dirty_memory():
        loss, *slopes = gradients(linear_cross_entropy, target, x, linear_weight, bias, reduction=reduction)
        beside, logits = linear_cross_entropy_and_logits(x, linear_weight, target, bias, reduction=reduction)
    torch.testing.assert_close(loss, plain(x, linear_weight, target, bias, reduction=reduction), equal_nan=True)
    torch.testing.assert_close(beside, loss, equal_nan=True)
    torch.testing.assert_close(logits, functional.linear(x, linear_weight, bias))
    assert all(torch.equal(slope, torch.zeros_like(slope)) for slope in slopes)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_what_counts_weighs_nothing(dtype: torch.dtype, label_smoothing: float) -> None:
    """Case 6: a mean of 0 / 0, with gradients of NaN for the rows that count and of zero for the others."""
    x, linear_weight, bias, _ = problem(4, dtype=dtype)
    target, weight = torch.tensor([0, 1, -100, 0]), torch.ones(7, dtype=dtype)
    weight[:2] = 0
    settings = {"weight": weight, "label_smoothing": label_smoothing}
    ours = gradients(linear_cross_entropy, target, x, linear_weight, bias, **settings)
    torchs = gradients(plain, target, x, linear_weight, bias, **settings)
    assert ours[0].isnan()
    for mine, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(mine, other, equal_nan=True)


@pytest.mark.parametrize("weight", [None, torch.linspace(0.5, 2.0, 7).double()], ids=["plain", "weighted"])
@pytest.mark.parametrize("batch", [(0,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_no_features(backend: str, batch: tuple[int, ...], weight: Tensor | None) -> None:
    """Case 6: the logits are the bias alone."""
    x, linear_weight, bias, target = problem(*batch, features=0)
    found = linear_cross_entropy(x, linear_weight, target, bias, weight=weight, backend=backend)
    torch.testing.assert_close(found, plain(x, linear_weight, target, bias, weight=weight), equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_weights_gradient_is_summed_in_float32(dtype: torch.dtype) -> None:
    """Case 7: as many chunks as rows, each of which adds to the same class."""
    x = torch.full((600, 2), 1.0, dtype=dtype)
    linear_weight, target = torch.zeros(3, 2, dtype=dtype), torch.zeros(600, dtype=torch.int64)
    found = gradients(linear_cross_entropy, target, x, linear_weight, reduction="sum", memory_budget=1)[2]
    assert torch.equal(found, torch.tensor([[-2 / 3], [1 / 3], [1 / 3]]).mul(600).expand(3, 2).mul(0.5).to(dtype))


def test_products_in_a_narrow_type_are_added_in_float32() -> None:
    """Case 7: where torch cannot add them in float32 by itself, as on the CPU."""
    a, b = torch.randn(5, 9).bfloat16(), torch.randn(9, 4).bfloat16()
    into = torch.empty(5, 4)
    product(a, b, into)
    once = (a @ b).float()
    assert torch.equal(into, once)
    add_product(a, b, into)
    assert torch.equal(into, once + once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("narrow", ["input", "weight", "neither"])
def test_autocast(dtype: torch.dtype, narrow: str) -> None:
    """Case 8: a float32 weight with a narrow activation, and the other way round; torch's dtypes."""
    *tensors, target = problem(8, features=16, classes=50, dtype=torch.float32)
    if narrow != "neither":
        tensors[0 if narrow == "input" else 1] = tensors[0 if narrow == "input" else 1].to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        ours = gradients(linear_cross_entropy, target, *tensors, memory_budget=3 * 200)
        torchs = gradients(plain, target, *tensors)
        _, logits = linear_cross_entropy_and_logits(tensors[0], tensors[1], target, tensors[2])
    assert logits.dtype == dtype
    truth = gradients(plain, target, *(tensor.double() for tensor in tensors))
    for name, *three in zip(NAMES, ours, torchs, truth, strict=True):
        assert_as_accurate(*three, name)


def test_a_loss_scale_that_float16_cannot_hold() -> None:
    """Case 8: the scale of a gradient scaler meets the gradient before float16 does."""
    *tensors, target = problem(6, dtype=torch.float16)
    leaves = [tensor.requires_grad_() for tensor in tensors]
    loss = linear_cross_entropy(leaves[0], leaves[1], target, leaves[2]).float() * 1e-3
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    truth = plain(wide[0], wide[1], target, wide[2]) * 1e-3
    scale = 2.0**20
    expected = torch.autograd.grad(truth * scale, wide)
    for mine, other in zip(torch.autograd.grad(loss * scale, leaves), expected, strict=True):
        # Upstream of the loss is 1049, which float16 rounds to one part in 2^11.
        torch.testing.assert_close(mine.double(), other, rtol=2**-9, atol=2**-9 * other.abs().max().item())


@INSTANCE
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {**TOGETHER, "memory_budget": 100}], ids=str)
def test_compiled_without_a_graph_break(options: dict[str, Any]) -> None:
    """Case 9."""
    torch.compiler.reset()
    *tensors, target = problem(6, dtype=torch.float32)

    def run(x: Tensor, linear_weight: Tensor, y: Tensor, bias: Tensor, **more: Any) -> Tensor:
        return linear_cross_entropy(x * 2, linear_weight, y, bias, **more)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(
        gradients(compiled, target, *tensors, **options), gradients(run, target, *tensors, **options), strict=True
    ):
        torch.testing.assert_close(ours, eager)


@INSTANCE
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # Inductor imports a user of it
def test_compiled_by_inductor_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases 8 and 9."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # importing Inductor appends to it
    torch.compiler.reset()
    *tensors, target = problem(6, dtype=torch.float32)
    compiled = torch.compile(lambda x, w, y, b: linear_cross_entropy(x * 2, w, y, b), fullgraph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = gradients(compiled, target, *tensors)
        eager = gradients(lambda x, w, y, b: linear_cross_entropy(x * 2, w, y, b), target, *tensors)
    for mine, other in zip(ours, eager, strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_operator_keeps_its_promises(dtype: torch.dtype, wanted: bool) -> None:
    """Case 9: what torch.compile believes of the operator is so."""
    x, linear_weight, bias, target = problem(6, dtype=dtype)
    x = x.t().contiguous().t()
    settings = (-100, 0.1, 0.0, None, wanted, wanted, wanted, wanted, dtype, wanted, 60, "cpu")
    torch.library.opcheck(
        torch.ops.gradscope.linear_cross_entropy.default, (x, linear_weight, target, bias, None, None, *settings)
    )


def test_misaligned_labels_and_shifted_sequences() -> None:
    """Case 11."""
    tokens, x = torch.randint(0, 7, (3, 6)), torch.randn(3, 6, 4)
    linear_weight = torch.randn(7, 4)

    def run(loss: Any) -> list[Tensor]:
        return gradients(lambda a, w, y: loss(a[:, :-1], w, y[:, 1:], reduction="none").sum(), tokens, x, linear_weight)

    for mine, other in zip(run(linear_cross_entropy), run(plain), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_tied_weight() -> None:
    """Case 16: the head's and the embedding's gradient arrive in the one parameter, over several steps."""

    def train(tied: bool) -> Tensor:
        torch.manual_seed(1)
        embedding = nn.Embedding(7, 4)
        head = LinearCrossEntropyHead(4, 7, bias=False)
        head.weight = embedding.weight
        tokens = torch.randint(0, 7, (2, 5))
        for _ in range(2):
            x = embedding(tokens)
            loss = head(x, tokens.roll(1)) if tied else plain(x, embedding.weight, tokens.roll(1))
            loss.backward()
        assert embedding.weight.grad is not None
        return embedding.weight.grad

    torch.testing.assert_close(train(True), train(False))


def test_evaluation_computes_no_gradient() -> None:
    """Case 17."""
    x, linear_weight, bias, target = problem(6)
    with torch.no_grad():
        loss = linear_cross_entropy(x, linear_weight.requires_grad_(), target, bias)
    assert not loss.requires_grad
    assert linear_cross_entropy(x, linear_weight, target, bias).requires_grad
    assert not linear_cross_entropy(x, linear_weight.detach(), target, bias).requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_all_settings_together(dtype: torch.dtype, reduction: str) -> None:
    """Case 18."""
    *tensors, target = problem(12, features=8, classes=50, dtype=dtype)
    weight = torch.rand(50).to(dtype)

    def eager(x: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
        logits = functional.linear(x, w, b)
        capped = 3.0 * torch.tanh(logits / 3.0)
        counts, by = y != -100, weight.to(x.dtype)
        loss = functional.cross_entropy(capped, y, by, label_smoothing=0.2, reduction="none")
        normalizer = 0.1 * capped.logsumexp(1).square() * counts
        if reduction == "none":
            return loss + normalizer
        return loss.sum() / by[y[counts]].sum() + normalizer.sum() / counts.sum()

    options: dict[str, Any] = {"weight": weight, "reduction": reduction, "memory_budget": 5 * 200, **TOGETHER}
    ours = gradients(linear_cross_entropy, target, *tensors, **options)
    torchs = gradients(eager, target, *tensors)
    truth = gradients(eager, target, *(tensor.double() for tensor in tensors))
    for name, *three in zip(NAMES, ours, torchs, truth, strict=True):
        assert_as_accurate(*three, name)


def test_deterministic_mode_and_second_derivatives() -> None:
    """Case 19."""
    x, linear_weight, bias, target = problem(6)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (gradients(linear_cross_entropy, target, x, linear_weight, bias) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    loss = linear_cross_entropy(x.requires_grad_(), linear_weight, target, bias)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        slope.sum().backward()


def test_under_checkpoint() -> None:
    x, linear_weight, bias, target = problem(6)

    def run(a: Tensor, w: Tensor, y: Tensor, b: Tensor) -> Tensor:
        return checkpoint(linear_cross_entropy, a * 1.0, w, y, b, use_reentrant=False)

    expected = gradients(plain, target, x, linear_weight, bias)
    for mine, other in zip(gradients(run, target, x, linear_weight, bias), expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_no_more_logits_than_the_budget() -> None:
    """The largest tensor is the weight's gradient, or a chunk."""
    x, linear_weight, _, target = problem(512, features=8, classes=20_000, dtype=torch.float32)
    linear_weight.requires_grad_()
    budget = 64 * 20_000 * 4
    with torch.profiler.profile(
        profile_memory=True, acc_events=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profiler:
        linear_cross_entropy(x, linear_weight, target, memory_budget=budget).backward()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    now = top = 0
    for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
        now += change
        top = max(top, now)
    gradient, cache = linear_weight.numel() * 4, 4 << 20
    assert budget + gradient < top < budget + gradient + cache + (1 << 20)
    assert now <= gradient + 1024  # the weight's gradient became .grad without a copy


def test_an_input_on_a_device_without_autocast_is_named() -> None:
    with pytest.raises(ValueError, match="linear_weight is on cpu; expected meta, where input is"):
        linear_cross_entropy(torch.empty(2, 4, device="meta"), torch.randn(7, 4), torch.tensor([0, 1]))
