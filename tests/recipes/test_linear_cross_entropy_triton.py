"""linear_cross_entropy over the Triton kernel, interpreted where there is no GPU, beside float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradscope.recipes.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_and_logits

from .accuracy import assert_as_accurate, dirty_memory
from .test_linear_cross_entropy import NAMES, TOGETHER, gradients, plain, problem

pytestmark = pytest.mark.usefixtures("triton_device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("rows", "features", "classes"), [(1, 3, 1), (11, 5, 97), (7, 16, 1000)])
def test_as_accurate_as_torch(
    rows: int, features: int, classes: int, reduction: str, dtype: torch.dtype, triton_device: torch.device
) -> None:
    *tensors, target = (
        tensor.to(triton_device) for tensor in problem(rows, features=features, classes=classes, dtype=dtype)
    )
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1}
    assert linear_cross_entropy.explain(tensors[0], tensors[1], target).backend == "triton"
    with dirty_memory():
        ours = gradients(linear_cross_entropy, target, *tensors, memory_budget=4 * classes * 4, **options)
    torchs = gradients(plain, target, *tensors, **options)
    truth = gradients(plain, target, *(tensor.double() for tensor in tensors), **options)
    for name, *three in zip(NAMES, ours, torchs, truth, strict=True):
        assert_as_accurate(*three, name)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_as_the_cpu_path(reduction: str, triton_device: torch.device) -> None:
    """All settings, and the logits."""
    *tensors, target = problem(9, features=6, classes=40, dtype=torch.float32)
    options: dict[str, Any] = {
        "weight": torch.rand(40), "reduction": reduction, "memory_budget": 4 * 40 * 4, **TOGETHER
    }  # fmt: skip
    expected = gradients(linear_cross_entropy, target, *tensors, backend="cpu", **options)
    there = [tensor.to(triton_device) for tensor in tensors]
    options["weight"] = options["weight"].to(triton_device)
    ours = gradients(linear_cross_entropy, target.to(triton_device), *there, backend="triton", **options)
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine.cpu(), other)
    _, logits = linear_cross_entropy_and_logits(
        there[0], there[1], target.to(triton_device), there[2], softcap=3.0, backend="triton"
    )
    torch.testing.assert_close(logits, 3.0 * torch.tanh(torch.nn.functional.linear(*there) / 3.0))


@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_counts(rows: int, triton_device: torch.device) -> None:
    """Case 6."""
    *tensors, _ = (tensor.to(triton_device) for tensor in problem(rows, dtype=torch.float32))
    target = torch.full((rows,), -100, device=triton_device)
    with dirty_memory():
        loss, *slopes = gradients(linear_cross_entropy, target, *tensors)
    assert loss.isnan()
    assert all(torch.equal(slope, torch.zeros_like(slope)) for slope in slopes)
