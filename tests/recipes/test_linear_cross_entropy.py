"""The CPU path of linear_cross_entropy: its derivatives, its values beside torch's, its modules, its messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from gradscope.kernels.linear_cross_entropy.chunks import chunk_rows
from gradscope.recipes.linear_cross_entropy import ABOUT, linear_cross_entropy, linear_cross_entropy_and_logits
from gradscope.recipes.linear_cross_entropy_modules import LinearCrossEntropyHead, LinearCrossEntropyLoss

from .accuracy import assert_as_accurate, dirty_memory
from .opinfo import samples

TOGETHER = {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 3.0}
NAMES = ("loss", "input", "linear_weight", "linear_bias")


def plain(
    x: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None = None, **options: Any
) -> Tensor:
    """What the recipe replaces."""
    logits = functional.linear(x, linear_weight, linear_bias).reshape(-1, linear_weight.shape[0])
    loss = functional.cross_entropy(logits, target.reshape(-1), **options)
    return loss.reshape(target.shape) if options.get("reduction") == "none" else loss


def gradients(loss: Callable[..., Tensor], target: Tensor, *tensors: Tensor, **options: Any) -> list[Tensor]:
    """Loss and the gradients of input, weight and bias, for an upstream gradient that differs by row."""
    x, linear_weight, *bias = [tensor.detach().requires_grad_() for tensor in tensors]
    found = loss(x, linear_weight, target, *([bias[0]] if bias else []), **options)
    upstream = torch.linspace(0.5, 2.0, found.numel(), device=found.device).reshape(found.shape).to(found.dtype)
    return [found.detach(), *torch.autograd.grad(found, (x, linear_weight, *bias), upstream)]


def problem(
    *batch: int, features: int = 4, classes: int = 7, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, bias and a target with ignored rows."""
    target = torch.randint(0, classes, batch)
    target.view(-1)[1::3] = -100
    tensors = torch.randn(*batch, features), torch.randn(classes, features), torch.randn(classes)
    x, linear_weight, bias = (tensor.to(dtype) for tensor in tensors)
    return x, linear_weight, bias, target


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("extras", [{}, {"label_smoothing": 0.2}, {"z_loss": 0.1}, {"softcap": 3.0}, TOGETHER], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_the_derivatives_are_right(reduction: str, weighted: bool, extras: dict[str, float], rows: int) -> None:
    x, linear_weight, bias, target = problem(5, features=2, classes=4)
    weight = torch.rand(4, dtype=torch.float64) if weighted else None
    options: dict[str, Any] = {"weight": weight, "reduction": reduction, "memory_budget": rows * 4 * 8, **extras}
    assert torch.autograd.gradcheck(
        lambda a, b, c: linear_cross_entropy(a, b, target, c, **options),
        tuple(tensor.requires_grad_() for tensor in (x, linear_weight, bias)),
    )


def test_pytorchs_own_samples_take_both_ways() -> None:
    """test_opinfo.py compares what they give."""
    if not hasattr(functional, "linear_cross_entropy"):
        pytest.skip("this torch has no linear_cross_entropy")
    backends = []
    for sample in samples("linear_cross_entropy", torch.float64):
        options = {name: value for name, value in sample.kwargs.items() if name != "options"}
        backends.append(linear_cross_entropy.explain(sample.input, *sample.args, **options).backend)
    assert set(backends) == {"cpu", "torch"}, "probabilities and several positions are torch's"
    assert len(backends) > 20


@settings(deadline=None, derandomize=True, max_examples=40, database=None)
@given(
    batch=st.sampled_from([(), (0,), (1,), (9,), (2, 5), (3, 0), (2, 2, 3)]),
    features=st.integers(1, 9),
    classes=st.integers(1, 40),
    rows=st.integers(1, 12),
    layout=st.sampled_from(["contiguous", "sliced", "transposed", "expanded"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1]),
    biased=st.booleans(),
)
def test_any_shape_stride_and_dtype(
    batch: tuple[int, ...],
    features: int,
    classes: int,
    rows: int,
    layout: str,
    dtype: torch.dtype,
    reduction: str,
    smoothing: float,
    biased: bool,
) -> None:
    torch.manual_seed(features * 100 + classes)
    x, linear_weight = torch.randn(*batch, features).to(dtype), torch.randn(classes, features).to(dtype)
    if layout == "sliced":
        x, linear_weight = torch.stack([x, x], -1)[..., 0], torch.stack([linear_weight] * 2, -1)[..., 1]
    elif layout == "transposed":
        x, linear_weight = x.movedim(-1, 0).contiguous().movedim(0, -1), linear_weight.t().contiguous().t()
    elif layout == "expanded" and batch and batch[0]:
        x = x[:1].expand(batch[0], *x.shape[1:])
    target = torch.randint(0, classes, batch)
    tensors = (x, linear_weight, torch.randn(classes).to(dtype)) if biased else (x, linear_weight)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    ours = gradients(linear_cross_entropy, target, *tensors, memory_budget=rows * classes * 4, **options)
    torchs = gradients(plain, target, *tensors, **options)
    truth = gradients(plain, target, *(tensor.double() for tensor in tensors), **options)
    for name, mine, other, true in zip(NAMES, ours, torchs, truth, strict=False):
        if true.isnan().any():
            assert torch.equal(mine.isnan(), true.isnan()), name
        else:
            assert_as_accurate(mine, other, true, name)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_what_needs_a_gradient_is_computed(wanted: tuple[bool, bool, bool], reduction: str) -> None:
    x, linear_weight, bias, target = problem(6)
    everything = gradients(linear_cross_entropy, target, x, linear_weight, bias, reduction=reduction)[1:]
    tensors = [
        tensor.requires_grad_(is_wanted) for tensor, is_wanted in zip((x, linear_weight, bias), wanted, strict=True)
    ]
    loss = linear_cross_entropy(tensors[0], tensors[1], target, tensors[2], reduction=reduction)
    saved = [tensor for tensor in loss.grad_fn.saved_tensors if tensor is not None] if reduction == "mean" else []
    assert sum(tensor.numel() for tensor in saved) == sum(
        tensor.numel() for tensor, is_wanted in zip(tensors, wanted, strict=True) if is_wanted and saved
    )
    loss.backward(torch.linspace(0.5, 2.0, loss.numel()).reshape(loss.shape).to(loss.dtype))
    for tensor, expected, is_wanted in zip(tensors, everything, wanted, strict=True):
        assert (tensor.grad is not None) == is_wanted
        if tensor.grad is not None:
            torch.testing.assert_close(tensor.grad, expected)


@pytest.mark.parametrize("rows", [2, 100])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("grad", [False, True])
def test_logits_on_demand(rows: int, softcap: float | None, grad: bool) -> None:
    """Case 17."""
    x, linear_weight, bias, target = problem(2, 3, dtype=torch.float32)
    options: dict[str, Any] = {"softcap": softcap, "memory_budget": rows * 7 * 4}
    linear_weight.requires_grad_(grad)
    with dirty_memory():
        loss, logits = linear_cross_entropy_and_logits(x, linear_weight, target, bias, **options)
        expected = linear_cross_entropy(x, linear_weight, target, bias, **options)
    torch.testing.assert_close(loss, expected)
    assert loss.requires_grad == grad and not logits.requires_grad
    torchs = functional.linear(x, linear_weight, bias)
    torch.testing.assert_close(logits, torchs if softcap is None else softcap * torch.tanh(torchs / softcap))
    if grad:
        (ours,) = torch.autograd.grad(loss, linear_weight)
        torch.testing.assert_close(ours, torch.autograd.grad(expected, linear_weight)[0])


def test_logits_beside_probabilities_come_from_torch() -> None:
    x, linear_weight, bias, _ = problem(5, dtype=torch.float32)
    target = torch.rand(5, 7).softmax(1)
    loss, logits = linear_cross_entropy_and_logits(x, linear_weight.requires_grad_(), target, bias)
    torchs = functional.linear(x, linear_weight, bias)
    torch.testing.assert_close(loss, functional.cross_entropy(torchs, target))
    torch.testing.assert_close(logits, torchs.detach())
    assert not logits.requires_grad


@pytest.mark.parametrize(
    ("rows", "classes", "itemsize", "device", "budget", "expected"),
    [
        (2048, 50257, 4, "cpu", None, 512),
        (100, 50257, 4, "cpu", None, 100),
        (8192, 50257, 2, "cuda", None, 2048),
        (16384, 128256, 2, "cuda", None, 2048),
        (131072, 128256, 2, "cuda", None, 16384),  # 8 chunks, never more
        (256, 50257, 2, "cuda", None, 256),
        (8192, 50257, 2, "cuda", 1, 1),
        (8192, 4096, 2, "cuda", None, 8192),  # 64 MiB
        (8193, 4096, 2, "cuda", None, 2049),
        (10, 7, 4, "cpu", 3 * 7 * 4, 3),
        (10, 7, 4, "cpu", 4 * 7 * 4 - 1, 3),  # never more than the budget
        (0, 7, 4, "cpu", None, 1),
    ],
)
def test_rows_of_a_chunk(
    rows: int, classes: int, itemsize: int, device: str, budget: int | None, expected: int
) -> None:
    assert chunk_rows(rows, classes, itemsize, device, budget) == expected


X, W, TARGET = torch.zeros(4, 3), torch.zeros(5, 3), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": X.long()}, r"input is of dtype int64; expected float32 or"),
        (
            {"input": torch.zeros(4, 2)},
            r"input is of shape \(4, 2\); expected \(\.\.\., 3\) for linear_weight of shape",
        ),
        ({"linear_weight": torch.zeros(3)}, r"linear_weight is of shape \(3,\); expected \(classes, features\)"),
        ({"linear_weight": torch.zeros(0, 3)}, r"linear_weight is of shape \(0, 3\); expected at least one class"),
        ({"linear_weight": W.double()}, r"linear_weight is of dtype float64; expected float32, as input is"),
        ({"linear_bias": torch.zeros(4)}, r"linear_bias is of shape \(4,\); expected \(5,\)"),
        ({"target": TARGET[1:]}, r"target is of shape \(3,\); expected \(4,\) for input of shape \(4, 3\) and"),
        ({"target": TARGET.int()}, r"target is of dtype int32; expected int64 or uint8, or probabilities"),
        ({"target": TARGET + 5}, r"target contains 5; expected a class in \[0, 5\) or ignore_index=-100"),
        ({"target": TARGET.to("meta")}, r"target is on meta; expected cpu, where input is"),
        ({"target": torch.zeros(4, 5), "ignore_index": 1}, r"ignore_index is 1; expected None if target contains"),
        ({"weight": torch.zeros(4)}, r"weight is of shape \(4,\); expected \(5,\)"),
        ({"reduction": "average"}, r"reduction is 'average'; expected 'mean' or 'sum' or 'none'"),
        ({"label_smoothing": 1.1}, r"label_smoothing is 1\.1; expected a number in \[0, 1\]"),
        ({"z_loss": float("inf")}, r"z_loss is inf; expected a number in \[0, inf\)"),
        ({"softcap": -1.0}, r"softcap is -1\.0; expected a number in \(0, inf\)"),
        ({"memory_budget": 0}, r"memory_budget is 0; expected a number in \[1, inf\)"),
        (
            {"backend": "torch", "memory_budget": 9},
            r"backend='torch' cannot run here: it does not support z_loss, softcap and",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^linear_cross_entropy: {message}"):
        linear_cross_entropy(**{"input": X, "linear_weight": W, "target": TARGET, **change})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("positions", [(), (2,)])
def test_the_loss_module_is_torchs(bias: bool, positions: tuple[int, ...]) -> None:
    weight = torch.rand(7)
    ours = LinearCrossEntropyLoss(4, 7, out_features=positions, bias=bias, weight=weight, label_smoothing=0.1)
    x, target = torch.randn(5, 4), torch.randint(0, 7, (5, *positions))
    if hasattr(nn, "LinearCrossEntropyLoss"):
        torchs = nn.LinearCrossEntropyLoss(4, 7, out_features=positions, bias=bias, weight=weight, label_smoothing=0.1)
        torchs.load_state_dict(ours.state_dict())
        torch.testing.assert_close(ours(x, target), torchs(x, target))
    assert set(ours.state_dict()) == {"weight", "linear.weight", *(["linear.bias"] if bias else [])}


def test_the_head_is_a_linear_layer() -> None:
    """Cases 16 and 17: keys of state_dict, logits without a target, a weight shared with an embedding."""
    linear, head = nn.Linear(4, 7), LinearCrossEntropyHead(4, 7, ignore_index=0)
    head.load_state_dict(linear.state_dict())
    x, target = torch.randn(2, 3, 4), torch.randint(0, 7, (2, 3))
    assert torch.equal(head(x), linear(x))
    expected = plain(x, linear.weight, target, linear.bias, ignore_index=0)
    torch.testing.assert_close(head(x, target), expected)
    loss, logits = head.loss_and_logits(x, target)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits, linear(x).detach())
    assert repr(head) == "LinearCrossEntropyHead(in_features=4, out_features=7, bias=True, ignore_index=0)"


def test_explain_and_about() -> None:
    assert linear_cross_entropy.explain(X, W, TARGET).backend == "cpu"
    assert linear_cross_entropy.explain(X, W, torch.zeros(4, 5)).backend == "torch"
    names = {*vars(sys.modules["gradscope.recipes"])}
    assert names >= {*ABOUT.functions} and ABOUT.modules == ("LinearCrossEntropyLoss", "LinearCrossEntropyHead")


@pytest.mark.parametrize("backend", ["auto", "cpu", "torch"])
def test_smoothing_below_0_is_none_as_torch_has_it(backend: str) -> None:
    """A schedule may end there."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    made = linear_cross_entropy(x, w, TARGET, label_smoothing=-0.1, backend=backend)
    wanted = functional.cross_entropy(functional.linear(x, w), TARGET, label_smoothing=-0.1)
    torch.testing.assert_close(made, wanted)
    for one, other in zip(*(torch.autograd.grad(each, (x, w)) for each in (made, wanted)), strict=True):
        torch.testing.assert_close(one, other)
