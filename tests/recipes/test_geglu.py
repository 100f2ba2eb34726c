"""GeGLU, exact and by tanh, beside torch's own operations."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradscope.kernels.gated import cpu
from gradscope.recipes.swiglu import GeGLU, geglu

from .accuracy import assert_as_accurate, dirty_memory

pytestmark = pytest.mark.parametrize("approximate", ["none", "tanh"])


def gradients(function: Callable[..., Tensor], upstream: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The result, and the gradient of each input."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    return (output.detach(), *torch.autograd.grad(output, leaves, upstream))


def assert_accurate(approximate: str, backend: str, upstream: Tensor, *inputs: Tensor) -> None:
    def eager(gate: Tensor, up: Tensor) -> Tensor:
        return functional.gelu(gate, approximate=approximate) * up

    with dirty_memory():
        ours = gradients(partial(geglu, approximate=approximate, backend=backend), upstream, *inputs)
    torchs = gradients(eager, upstream, *inputs)
    truth = gradients(eager, upstream.double(), *(tensor.double() for tensor in inputs))
    for name, mine, other, true in zip(("output", "gate", "up"), ours, torchs, truth, strict=True):
        assert_as_accurate(mine, other, true, name)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_gradcheck(approximate: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Edge case 1; in chunks of one row, too."""
    operands = tuple(torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    function = partial(geglu, approximate=approximate, backend="cpu")
    for chunk in (cpu.CHUNK, 4):
        monkeypatch.setattr(cpu, "CHUNK", chunk)
        assert torch.autograd.gradcheck(function, operands)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0,), (1,), (0, 6), (3, 7), (2, 5, 9)])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "halves", "expanded"])
def test_any_shape_stride_and_dtype(approximate: str, dtype: torch.dtype, shape: tuple[int, ...], layout: str) -> None:
    """Edge cases 6 and 11."""

    def tensor() -> Tensor:
        if layout == "transposed":
            return torch.randn(shape[::-1]).permute(tuple(reversed(range(len(shape))))).to(dtype)
        if layout == "halves":
            return torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype)[..., : shape[-1]]
        return torch.randn(()).to(dtype).expand(shape) if layout == "expanded" else torch.randn(shape).to(dtype)

    assert_accurate(approximate, "cpu", tensor(), tensor(), tensor())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 2, 1025), (0, 6)])
def test_triton_against_float64(
    triton_device: torch.device, approximate: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    gate, up, upstream = (torch.randn(shape, device=triton_device).mul(3).to(dtype) for _ in range(3))
    assert_accurate(approximate, "triton", upstream, gate, up)


def test_only_the_operands_are_kept(approximate: str) -> None:
    gate, up = (torch.randn(5, 4, requires_grad=True) for _ in range(2))
    kept = geglu(gate, up, approximate, backend="cpu").grad_fn.saved_tensors  # type: ignore[union-attr]
    assert [tensor.data_ptr() for tensor in kept] == [gate.data_ptr(), up.data_ptr()]


def test_a_second_derivative_is_refused(approximate: str) -> None:
    """Edge case 19."""
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(geglu(x, x, approximate, backend="cpu").sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    assert torch.autograd.gradgradcheck(partial(geglu, approximate=approximate, backend="torch"), (x, x))


def test_the_module(approximate: str) -> None:
    twin = pickle.loads(pickle.dumps(copy.deepcopy(GeGLU(approximate))))
    gate, up = torch.randn(2, 3, 4)
    torch.testing.assert_close(twin(gate, up), functional.gelu(gate, approximate=approximate) * up)
    assert approximate in repr(twin)


def test_bad_input_is_named(approximate: str) -> None:
    with pytest.raises(ValueError, match="geglu: approximate is 'fast'; expected 'none' or 'tanh'"):
        geglu(torch.ones(4), torch.ones(4), "fast")
    with pytest.raises(ValueError, match="geglu: gate is a scalar"):
        geglu(torch.tensor(1.0), torch.ones(4), approximate)
    with pytest.raises(ValueError, match="or a shape that broadcasts with it"):
        geglu(torch.ones(4), torch.ones(3), approximate)
