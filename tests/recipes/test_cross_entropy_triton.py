"""The Triton kernels of cross_entropy, interpreted where there is no GPU, beside float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradscope.kernels.cross_entropy.reference import cross_entropy_reference
from gradscope.kernels.cross_entropy.terms import Terms
from gradscope.recipes.cross_entropy import cross_entropy

from .accuracy import assert_as_accurate, dirty_memory
from .test_cross_entropy import gradient

pytestmark = pytest.mark.usefixtures("triton_device")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (5, 1000), (4, 9, 3), (2, 33, 2, 2)])
def test_as_accurate_as_torch(
    shape: tuple[int, ...], reduction: str, dtype: torch.dtype, triton_device: torch.device
) -> None:
    logits = (3 * torch.randn(shape, device=triton_device)).to(dtype)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]), device=triton_device)
    if target.numel() > 1:
        target.view(-1)[1] = -100
    weight = (torch.rand(shape[1], device=triton_device) + 0.1).to(dtype)
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1}
    assert cross_entropy.explain(logits, target, weight, **options).backend == "triton"
    with dirty_memory():
        ours = gradient(lambda x: cross_entropy(x, target, weight, **options), logits)
    torchs = gradient(lambda x: functional.cross_entropy(x, target, weight, **options), logits)
    truth = gradient(lambda x: functional.cross_entropy(x, target, weight.double(), **options), logits.double())
    # At the target nearly all of the row's weight may be taken off a share of nearly 1: of that size a rounding is.
    rows = target.numel() - (target == -100).sum() if reduction == "mean" else 1
    cancelling = {"loss": 0.0, "gradient": (weight.max() / weight.min() / rows).clamp(max=1.1).item()}
    for what, *three in zip(("loss", "gradient"), ours, torchs, truth, strict=True):
        assert_as_accurate(*three, what, inner=cancelling[what])


@pytest.mark.parametrize("classes", [5, 4097, 9000])  # less than a block, two blocks of which one is nearly empty
@pytest.mark.parametrize("extras", [{}, {"z_loss": 0.1}, {"softcap": 3.0}, {"z_loss": 0.1, "softcap": 3.0}], ids=str)
def test_extras(classes: int, extras: dict[str, float], triton_device: torch.device) -> None:
    logits = 5 * torch.randn(3, classes, device=triton_device)
    target = torch.tensor([0, classes - 1, -100], device=triton_device)
    terms = Terms(None, -100, 0.0, extras.get("z_loss", 0.0), extras.get("softcap"))
    ours = gradient(lambda x: cross_entropy(x, target, backend="triton", **extras), logits)
    plain = gradient(lambda x: cross_entropy_reference(x, target, terms, "mean"), logits)
    truth = gradient(lambda x: cross_entropy_reference(x, target, terms, "mean"), logits.double())
    for what, *three in zip(("loss", "gradient"), ours, plain, truth, strict=True):
        assert_as_accurate(*three, what)


@pytest.mark.parametrize("layout", ["sliced", "classes inside", "expanded"])
def test_strides(layout: str, triton_device: torch.device) -> None:
    """Case 11."""
    logits = torch.randn(4, 7, 3, device=triton_device)
    if layout == "sliced":
        logits = torch.stack([logits, logits], -1)[..., 0]
    elif layout == "classes inside":
        logits = logits.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        logits = logits[:1].expand(4, 7, 3)
    labels = torch.randint(0, 7, (13,), device=triton_device)
    target = labels[1:].view(3, 4).t()
    ours = gradient(lambda x: cross_entropy(x, target, reduction="none"), logits)
    expected = gradient(lambda x: functional.cross_entropy(x, target, reduction="none"), logits)
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_the_gradient_may_lie_over_the_logits(triton_device: torch.device) -> None:
    from gradscope.kernels.cross_entropy.launch import losses_by

    logits = torch.randn(4, 9000, 1, device=triton_device)
    target = torch.tensor([[0], [8999], [-100], [4096]], device=triton_device)
    terms = Terms(None, -100, 0.1, 0.01, 5.0)
    apart, scale = torch.empty_like(logits), torch.rand(4, 1, device=triton_device)
    losses = losses_by("triton")
    loss = losses(logits, target, terms, scale, apart)
    assert torch.equal(losses(logits, target, terms, scale, logits), loss)
    assert torch.equal(logits, apart)
    assert apart[2].abs().max() == 0


@pytest.mark.parametrize("retain", [False, True])
def test_the_upstream_gradient_is_applied(retain: bool, triton_device: torch.device) -> None:
    """Cases 1 and 3; and float16, whose mean waits for the upstream gradient."""
    for dtype in DTYPES:
        logits = torch.randn(5, 11, device=triton_device).to(dtype).requires_grad_()
        target = torch.randint(0, 11, (5,), device=triton_device)
        loss = cross_entropy(logits, target)
        (once,) = torch.autograd.grad(loss, logits, retain_graph=True)
        (thrice,) = torch.autograd.grad(loss, logits, torch.tensor(3.0, dtype=dtype), retain_graph=retain)
        # One rounding of each, of values up to 0.6.
        torch.testing.assert_close(thrice, 3 * once, rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).tiny)


def test_confident_and_infinite_rows(triton_device: torch.device) -> None:
    """Case 18; and logits of minus infinity, as masks of a vocabulary set them."""
    logits = torch.zeros(3, 8, device=triton_device)
    logits[0, 0], logits[1, 1], logits[2, 3:] = 10.0, 90.0, -float("inf")
    target = torch.arange(3, device=triton_device)
    ours = gradient(lambda x: cross_entropy(x, target, reduction="none"), logits)
    torchs = gradient(lambda x: functional.cross_entropy(x, target, reduction="none"), logits)
    truth = gradient(lambda x: functional.cross_entropy(x, target, reduction="none"), logits.double())
    for what, *three in zip(("loss", "gradient"), ours, torchs, truth, strict=True):
        assert_as_accurate(*three, what)


def test_nothing_to_launch(triton_device: torch.device) -> None:
    """Case 6."""
    empty = torch.zeros(0, dtype=torch.int64, device=triton_device)
    loss, slope = gradient(lambda x: cross_entropy(x, empty), torch.zeros(0, 5, device=triton_device))
    assert loss.isnan() and slope.shape == (0, 5)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_counts_weighs_nothing(dtype: torch.dtype, label_smoothing: float, triton_device: torch.device) -> None:
    """Case 6."""
    logits = torch.randn(4, 5, device=triton_device).to(dtype)
    target = torch.tensor([0, 1, -100, 0], device=triton_device)
    weight = torch.tensor([0.0, 0.0, 1.0, 2.0, 0.5], device=triton_device).to(dtype)
    settings: dict[str, Any] = {"weight": weight, "label_smoothing": label_smoothing}
    ours = gradient(lambda x: cross_entropy(x, target, **settings), logits)
    torchs = gradient(lambda x: functional.cross_entropy(x, target, **settings), logits)
    assert ours[0].isnan()
    torch.testing.assert_close(ours, torchs, equal_nan=True)


def test_rows_are_read_in_units_where_both_tensors_have_them() -> None:
    """A unit at another address than a multiple of 16 bytes is an error on a GPU."""
    from gradscope.kernels.cross_entropy.triton_launch import _lanes

    wide = torch.zeros(4, 24)
    rows = wide[:, :16, None]
    assert _lanes(rows, rows) == 4 and _lanes(rows.bfloat16(), rows.bfloat16()) == 8
    others = [torch.zeros(4, 16, 1), wide[:, 1:17, None], torch.zeros(16, 4).t()[:, :, None]]
    for other in others:
        assert _lanes(rows, other) == _lanes(other, rows) == 1


def test_float64_is_not_the_kernels(triton_device: torch.device) -> None:
    logits: Tensor = torch.zeros(2, 3, dtype=torch.float64, device=triton_device)
    choice = cross_entropy.explain(logits, torch.zeros(2, dtype=torch.int64, device=triton_device))
    assert choice.refused["triton"] == "only the other backends support float64"
