"""bias_gelu's Triton kernels, interpreted where there is no GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional

from gradscope.kernels.gelu import triton_launch
from gradscope.kernels.gelu.reference import gelu_reference
from gradscope.recipes.gelu import bias_gelu

from .accuracy import assert_as_accurate, dirty_memory
from .test_gelu import APPROXIMATE, COMPILES, gradients


@APPROXIMATE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (5, 257), (2, 9, 300)])
def test_against_float64(
    triton_device: torch.device, approximate: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, upstream = (torch.randn(shape, device=triton_device).mul(3).to(dtype) for _ in range(2))
    bias = torch.randn(shape[-1], device=triton_device).to(dtype)
    with dirty_memory():
        ours = gradients(partial(bias_gelu, approximate=approximate, backend="triton"), upstream, x, bias)
    eager = gradients(lambda a, b: functional.gelu(a + b, approximate=approximate), upstream, x, bias)
    truth = gradients(lambda a, b: gelu_reference(a + b, approximate), upstream.double(), x.double(), bias.double())
    for name, mine, torchs, true in zip(("output", "input", "bias"), ours, eager, truth, strict=True):
        assert_as_accurate(mine, torchs, true, name)


def test_groups_of_several_rows(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs that walk more rows than they hold, and a last one with fewer."""
    monkeypatch.setattr(triton_launch, "GROUPS", 2)
    x, bias = torch.randn(19, 5, device=triton_device), torch.randn(5, device=triton_device)
    upstream = torch.randn(19, 5, device=triton_device)
    with dirty_memory():
        ours = gradients(partial(bias_gelu, backend="triton"), upstream, x, bias)
    torch.testing.assert_close(ours, gradients(lambda a, b: functional.gelu(a + b), upstream, x, bias))


@pytest.mark.parametrize("layout", ["sliced", "transposed", "expanded"])
def test_strides(triton_device: torch.device, layout: str) -> None:
    """Edge case 11."""
    x = {
        "sliced": torch.randn(6, 9, device=triton_device)[:, 2:7],
        "transposed": torch.randn(5, 6, device=triton_device).t(),
        "expanded": torch.randn(6, 1, device=triton_device).expand(6, 5),
    }[layout]
    bias = torch.randn(5, device=triton_device)
    ours = gradients(partial(bias_gelu, backend="triton"), x, x, bias)
    torch.testing.assert_close(ours, gradients(lambda a, b: functional.gelu(a + b), x, x, bias))


@APPROXIMATE
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, which the interpreter computes with
def test_large_values_stay_finite(triton_device: torch.device, approximate: str) -> None:
    """Edge case 20: neither the cube nor the exponential of a large input spoils its gradient."""
    x = torch.tensor([[-3e38, -1e20, -1e4, -30.0, 30.0, 1e4, 1e20, 3e38]], device=triton_device)
    bias = torch.zeros(8, device=triton_device)
    output, slope, _ = gradients(
        partial(bias_gelu, approximate=approximate, backend="triton"), torch.ones_like(x), x, bias
    )
    assert torch.equal(output, torch.where(x > 0, x, 0.0))
    assert torch.equal(slope, (x > 0).float())


def test_an_empty_batch(triton_device: torch.device) -> None:
    """Edge case 6."""
    x, bias = torch.randn(0, 6, device=triton_device), torch.randn(6, device=triton_device)
    _, _, summed = gradients(partial(bias_gelu, backend="triton"), x, x, bias)
    assert torch.equal(summed, torch.zeros_like(bias))


def test_a_second_backward_and_inputs_unchanged(triton_device: torch.device) -> None:
    """Edge cases 2 and 3."""
    x, bias = (torch.randn(size, device=triton_device, requires_grad=True) for size in ((4, 6), (6,)))
    before, upstream = x.detach().clone(), torch.randn(4, 6, device=triton_device)
    output = bias_gelu(x, bias, backend="triton")
    first = torch.autograd.grad(output, (x, bias), upstream, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(output, (x, bias), upstream)))
    assert torch.equal(x.detach(), before)


@COMPILES
def test_compiles_in_one_graph(triton_device: torch.device) -> None:
    """Edge case 9: each launch is one node."""
    x, bias = (torch.randn(size, device=triton_device, requires_grad=True) for size in ((4, 6), (6,)))
    compiled = torch.compile(partial(bias_gelu, backend="triton"), fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(x, bias).square().sum(), (x, bias))
    torch.testing.assert_close(ours, torch.autograd.grad(functional.gelu(x + bias).square().sum(), (x, bias)))
