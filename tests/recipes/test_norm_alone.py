"""rms_norm and layer_norm by themselves, on the CPU."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradscope.kernels.norm import cpu
from gradscope.recipes.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm

from .accuracy import assert_as_accurate
from .test_norm import EPS


@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck_alone(weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edge case 1; over several chunks, too."""
    x = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 5, dtype=torch.float64, requires_grad=True) if weighted else None
    assert rms_norm.explain(x, (2, 5), weight).backend == "cpu"
    for chunk in (cpu.CHUNK, 20):
        monkeypatch.setattr(cpu, "CHUNK", chunk)
        assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, (2, 5), w), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rms_norm_is_as_exact_as_torch(dtype: torch.dtype) -> None:
    x, weight, upstream = torch.randn(70, 300).to(dtype), torch.randn(300).to(dtype), torch.randn(70, 300).to(dtype)

    def run(function: Any, kind: torch.dtype) -> list[Tensor]:
        leaves = [tensor.to(kind).detach().requires_grad_() for tensor in (x, weight)]
        output = function(leaves[0], (300,), leaves[1], EPS)
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(kind))]

    results = (run(rms_norm, dtype), run(functional.rms_norm, dtype), run(functional.rms_norm, torch.float64))
    for name, *tensors in zip(("output", "input", "weight"), *results, strict=True):
        assert_as_accurate(*tensors, name)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("least", [1e-12, 0.5, 0.0, -1.0])
@pytest.mark.parametrize("chunk", [cpu.CHUNK, 20])
def test_rows_over_their_length(
    chunk: int, least: float, dtype: torch.dtype, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are shorter than the least length are a multiple of themselves, rows of zeros among them."""
    monkeypatch.setattr(cpu, "CHUNK", chunk)
    x, weight, upstream = torch.randn(4, 3, 6), torch.randn(6), torch.randn(4, 3, 6)
    if least > 0:
        x[0, 0], x[1], x[2, 0] = 0.0, x[1] * 1e-14, x[2, 0] * 0.05

    def run(kind: torch.dtype, *, ours: bool) -> list[Tensor]:
        leaves = [each.to(kind).requires_grad_() for each in ((x, weight) if weighted else (x,))]
        scale = leaves[1] if weighted else None
        if ours:
            output = rms_norm(leaves[0], (6,), scale, 0.0, least=least, backend="cpu")
        else:
            output = functional.normalize(leaves[0], dim=-1, eps=least) * 6**0.5
            output = output if scale is None else output * scale
        return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(kind))]

    results = (run(dtype, ours=True), run(dtype, ours=False), run(torch.float64, ours=False))
    for name, *tensors in zip(("output", "input", "weight"), *results, strict=False):
        assert_as_accurate(*tensors, name)


def test_lengths_that_no_kernel_takes() -> None:
    x, least = torch.randn(3, 6, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    torch.testing.assert_close(rms_norm(x, (6,), None, 0.0, least=least), rms_norm(x, (6,), None, 0.0, least=0.5))
    assert rms_norm.explain(x, (6,), None, 0.0, least=least).backend == "torch"
    with pytest.raises(ValueError, match=r"eps is 0\.1; expected 0 with least"):
        rms_norm(x, (6,), None, 0.1, least=0.5)
    of_rows = rms_norm(x.view(3, 2, 3), (2, 3), torch.ones(2, 3), 0.0, least=1e-3, backend="torch")
    torch.testing.assert_close(of_rows.double().view(3, 6), rms_norm(x, (6,), None, 0.0, least=1e-3))


def test_a_sum_as_loss_gives_an_expanded_gradient() -> None:
    """Edge case 11."""
    x, weight = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    found = torch.autograd.grad(rms_norm(x, (6,), weight).sum(), (x, weight))
    torch.testing.assert_close(found, torch.autograd.grad(functional.rms_norm(x, (6,), weight).sum(), (x, weight)))


def _parameter_errors(function: Any, rows: int, **options: Any) -> list[float]:
    """Of the gradients of weight and bias, against float64, as a share of each."""
    random = torch.Generator().manual_seed(0)
    x, upstream = (torch.randn(rows, 64, generator=random) for _ in range(2))
    weight, bias = torch.ones(64), torch.zeros(64)

    def gradients(function: Any, dtype: torch.dtype, **options: Any) -> tuple[Tensor, ...]:
        leaves = [each.to(dtype).requires_grad_() for each in (x, weight, bias)]
        output = function(leaves[0], (64,), *leaves[1:], EPS, **options)
        return torch.autograd.grad(output, leaves, upstream.to(dtype))

    found, exact = gradients(function, torch.float32, **options), gradients(functional.layer_norm, torch.float64)
    torch.testing.assert_close(found[0], exact[0].float())
    return [float((one - other).norm() / other.norm()) for one, other in zip(found[1:], exact[1:], strict=True)]


def test_layer_norms_sums_over_many_rows_are_more_exact_than_torchs() -> None:
    """Torch adds 8,192 rows up in one float32; sums of 128 leave a small part of its error here, at most a third."""
    given = torch.ones(8192, 64), (64,), torch.ones(64)
    assert layer_norm.explain(*given, exact=True).backend == "cpu" and layer_norm.explain(*given).backend == "torch"
    ours, torchs = _parameter_errors(layer_norm, 8192, exact=True), _parameter_errors(layer_norm, 8192)
    assert all(one < other / 3 for one, other in zip(ours, torchs, strict=True)), (ours, torchs)


@pytest.mark.parametrize("rows", [400, 1600, 8192])
def test_on_one_thread_layer_norms_sums_are_as_exact_as_a_norms_by_hand(rows: int) -> None:
    """What a patch puts in the place of one is held to that: at most twice its error, and a rounding."""

    def by_hand(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return weight * ((x - mean) / torch.sqrt(variance + eps)) + bias

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ours, plain = _parameter_errors(layer_norm, rows, exact=True), _parameter_errors(by_hand, rows)
    finally:
        torch.set_num_threads(threads)
    assert all(one < 2 * other + torch.finfo(torch.float32).eps for one, other in zip(ours, plain, strict=True)), (
        ours,
        plain,
    )


def test_layer_norm_in_parts_gives_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a last part that is smaller, and with bias or weight alone."""
    monkeypatch.setattr(cpu, "SUMMED", 4)
    x, upstream, weight, bias = torch.randn(11, 6), torch.randn(11, 6), torch.randn(6), torch.randn(6)
    _, mean, factor = torch.native_layer_norm(x, [6], weight, bias, EPS)
    for given in ((weight, bias), (weight, None), (None, None)):
        wanted = [True, *(each is not None for each in given)]
        expected = torch.ops.aten.native_layer_norm_backward(upstream, x, [6], mean, factor, *given, wanted)
        found = cpu.layer_backward(upstream, x, mean, factor, *given)
        for one, other, asked in zip(found, expected, wanted, strict=True):
            assert one is not None if asked else not isinstance(one, Tensor) or not one.numel()
            if asked:
                torch.testing.assert_close(one, other)


def test_layer_norm_refuses_a_second_derivative_on_its_own_way_alone() -> None:
    weight = torch.ones(4, requires_grad=True)
    for rows, backend in ((600, "cpu"), (8, "torch")):
        x = torch.randn(rows, 4, requires_grad=True)
        assert layer_norm.explain(x, (4,), weight, exact=True).backend == backend
        (first,) = torch.autograd.grad(layer_norm(x, (4,), weight, exact=True).square().sum(), x, create_graph=True)
        if backend == "torch":
            first.sum().backward()
        else:
            with pytest.raises(RuntimeError, match=r'layer_norm.*backend="torch" supports second derivatives'):
                first.sum().backward()


@pytest.mark.parametrize("kinds", list(itertools.product([None, "own", torch.float32], repeat=2)), ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("function", [layer_norm, add_layer_norm])
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_weight_and_bias_may_each_be_float32(backend: str, function: Any, dtype: torch.dtype, kinds: Any) -> None:
    """Beside an input of another dtype, whichever is: torch's kernel takes both of them so at most, or neither."""
    x, upstream = torch.randn(4, 6).to(dtype).requires_grad_(), torch.randn(4, 6).to(dtype)
    kinds = [dtype if kind == "own" else kind for kind in kinds]
    given = [None if kind is None else torch.randn(6).to(kind).requires_grad_() for kind in kinds]
    leaves = [x, *(each for each in given if each is not None)]
    if function is layer_norm:
        made = layer_norm(x, (6,), *given, backend=backend)
    else:
        made = add_layer_norm(x, torch.zeros_like(x), *given, backend=backend)[0]
    exact = functional.layer_norm(x.double(), (6,), *(None if each is None else each.double() for each in given))
    assert made.dtype == dtype
    # What bfloat16 holds of a few numbers of size one, and of their sum over four rows.
    torch.testing.assert_close(made.double(), exact, rtol=2**-7, atol=2**-7)
    found, true = (torch.autograd.grad(each, leaves, upstream.to(each.dtype)) for each in (made, exact))
    for one, other, leaf in zip(found, true, leaves, strict=True):
        assert one.dtype == leaf.dtype
        torch.testing.assert_close(one, other, rtol=2**-5, atol=2**-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_no_eps_is_the_one_that_torch_takes(backend: str, dtype: torch.dtype) -> None:
    """Small features show which: of bfloat16's own, 0.008, little but it would be left."""
    x = torch.tensor([[0.01, -0.02, 0.03, 0.005]], dtype=dtype)
    torch.testing.assert_close(rms_norm(x, (4,), backend=backend), functional.rms_norm(x, (4,)))
    added = add_rms_norm(x, torch.zeros_like(x), torch.ones_like(x[0]), backend=backend)[0]
    torch.testing.assert_close(added, functional.rms_norm(x, (4,)))


@pytest.mark.parametrize("features", [(), (6,)])
@pytest.mark.parametrize("function", [rms_norm, layer_norm, add_rms_norm, add_layer_norm])
def test_an_eps_that_is_learnt(function: Any, features: tuple[int, ...]) -> None:
    """As a norm by hand takes it: it gets its gradient."""
    x, weight, eps = torch.randn(4, 6).double(), torch.randn(6).double(), torch.full(features, 0.3).double()
    leaves = [each.requires_grad_() for each in (x, weight, eps)]
    added = function in (add_rms_norm, add_layer_norm)
    stream = 2 * x if added else x
    centred = stream - stream.mean(-1, keepdim=True) if function in (layer_norm, add_layer_norm) else stream
    wanted = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    made = function(x, x, weight, eps=eps)[0] if added else function(x, (6,), weight, eps=eps)
    torch.testing.assert_close(made, wanted)
    upstream = torch.randn(4, 6).double()
    for one, other in zip(*(torch.autograd.grad(each, leaves, upstream) for each in (made, wanted)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("function", [rms_norm, layer_norm, add_rms_norm, add_layer_norm])
def test_explain_names_a_learnt_eps(function: Any) -> None:
    """The kernels take a number."""
    x, eps = torch.randn(600, 8), torch.tensor(0.1)
    given = (x, x) if function in (add_rms_norm, add_layer_norm) else (x, (8,))
    choice = function.explain(*given, eps=eps)
    assert choice.backend == "torch" and choice.refused["cpu"] == "eps is a tensor, which may require a gradient"
    with pytest.raises(ValueError, match="backend='cpu' cannot run here: eps is a tensor"):
        function(*given, eps=eps, backend="cpu")
