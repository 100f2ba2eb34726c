"""Packed attention at the edges: what is left alone, repeated backward, empty and large input, autocast, compilers."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from gradscope.recipes.attention_mask import attention_mask
from gradscope.recipes.packed_attention import packed_attention

from .test_packed_attention import run, views, with_sdpa

COMPILES = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing


@pytest.mark.parametrize("backend", ["cpu", "held"])
def test_nothing_of_what_was_given_changes(backend: str) -> None:
    """Edge cases 2 and 4."""
    qkv, upstream = torch.randn(2, 70, 48, requires_grad=True), torch.randn(2, 70, 16)
    before = (qkv.detach().clone(), upstream.clone())
    out = packed_attention(qkv, 2, is_causal=True, backend=backend)
    kept, version = out.detach().clone(), out._version
    torch.autograd.grad(out, qkv, upstream)
    assert torch.equal(qkv, before[0]) and torch.equal(upstream, before[1]) and torch.equal(out, kept)
    assert (qkv._version, upstream._version, out._version) == (0, 0, version)


@pytest.mark.parametrize("backend", ["cpu", "held"])
def test_backward_again(backend: str) -> None:
    """Edge case 3: right with a retained graph, refused without."""
    qkv = torch.randn(2, 70, 48, requires_grad=True)
    out = packed_attention(qkv, 2, is_causal=True, backend=backend).sum()
    first = torch.autograd.grad(out, qkv, retain_graph=True)[0]
    second = torch.autograd.grad(out, qkv)[0]
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, qkv)


@pytest.mark.parametrize("backend", ["cpu", "held"])
def test_second_derivative_is_refused_and_deterministic_mode_is_fine(backend: str) -> None:
    """Edge case 19."""
    qkv = torch.randn(2, 70, 48, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        found = [torch.autograd.grad(packed_attention(qkv, 2, backend=backend).sum(), qkv)[0] for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*found)
    upstream = torch.ones(2, 70, 16, requires_grad=True)
    out = packed_attention(qkv, 2, backend=backend)
    (first,) = torch.autograd.grad(out, qkv, upstream, create_graph=True)
    message = "packed_attention: second derivatives are not supported .* backend='math'"
    with pytest.raises(RuntimeError, match=message):
        first.sum().backward()
    (first,) = torch.autograd.grad(packed_attention(qkv, 2, backend=backend).sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(first.sum(), qkv)


@pytest.mark.parametrize("shape", [(0, 5, 24), (2, 0, 24), (0, 300, 24)])
@pytest.mark.parametrize("backend", ["cpu", "auto"])
def test_empty(shape: tuple[int, int, int], backend: str) -> None:
    """Edge case 6."""
    qkv = torch.randn(shape, requires_grad=True)
    out = packed_attention(qkv, 2, is_causal=True, backend=backend)
    assert out.shape == (*shape[:2], 8)
    assert torch.autograd.grad(out.sum(), qkv)[0].shape == shape


@pytest.mark.parametrize("scale", [-1.0, 0.0])
@pytest.mark.parametrize("backend", ["cpu", "held", "attention", "auto"])
def test_a_scale_that_is_not_positive(scale: float, backend: str) -> None:
    """SDPA on the CPU gives NaN for these where it is causal: it scales -inf."""
    qkv = torch.randn(1, 6, 24, dtype=torch.float64, requires_grad=True)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()
    ours = packed_attention(qkv, 2, is_causal=True, scale=scale, backend=backend)
    q, k, v = views(qkv, 2, 2)
    weights = (scale * (q @ k.mT)).masked_fill(~causal, -torch.inf).softmax(-1)
    torch.testing.assert_close(ours, (weights @ v).transpose(1, 2).reshape(1, 6, 8))


def test_large_float16_does_not_overflow() -> None:
    """Edge case 20: scores beyond 65504 before they are scaled."""
    qkv = (torch.randn(1, 20, 3 * 64) * 90).half()
    out, gradient = run(packed_attention, qkv, torch.ones(1, 20, 64), 1, backend="cpu")
    assert out.isfinite().all() and gradient.isfinite().all()


def test_autocast() -> None:
    """Edge case 8: cast as SDPA casts."""
    qkv = torch.randn(2, 300, 48, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours, torchs = packed_attention(qkv, 2, is_causal=True), with_sdpa(qkv, 2, is_causal=True)
    assert ours.dtype == torchs.dtype == torch.bfloat16
    assert torch.autograd.grad(ours.sum(), qkv)[0].dtype == torch.float32


@COMPILES
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}, {"kv_heads": 1}, {"backend": "attention"}], ids=str)
def test_compiles_without_a_break(options: dict[str, Any]) -> None:
    """Edge case 9."""
    kv_heads = options.get("kv_heads", 2)
    qkv = torch.randn(1, 300, (2 + 2 * kv_heads) * 8, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        return packed_attention(x * 2, 2, is_causal=True, **options).sin()

    torch.compiler.reset()
    out = torch.compile(function, backend="aot_eager", fullgraph=True)(qkv)
    (found,) = torch.autograd.grad(out.sum(), qkv)
    assert found.shape == qkv.shape and found.isfinite().all()
    if not options.get("dropout_p"):
        expected = function(qkv)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), qkv)[0])


@COMPILES
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # Inductor imports a user of it
def test_compiled_by_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edge case 9."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # Inductor's imports append to it
    qkv = torch.randn(1, 300, 48, requires_grad=True)
    torch.compiler.reset()
    found = []
    for function in (torch.compile(packed_attention, fullgraph=True), packed_attention):
        out = function(qkv, 2, is_causal=True)
        found.append([out, *torch.autograd.grad(out.square().sum(), qkv)])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("tokens", [6, 300])
def test_whatever_a_mask_asks_for(tokens: int) -> None:
    """A row that a number as low as finfo.min hides whole weighs all keys equally, as by hand."""
    qkv = torch.randn(1, tokens, 24, dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(tokens, tokens, dtype=torch.float64)
    mask[2] = torch.finfo(torch.float64).min
    ours = packed_attention(qkv, 2, **attention_mask(mask))
    q, k, v = views(qkv, 2, 2)
    weights = (0.5 * (q @ k.mT) + mask).softmax(-1)
    by_hand = (weights @ v).transpose(1, 2).reshape(1, tokens, 8)
    torch.testing.assert_close(ours, by_hand)
    upstream = torch.randn_like(ours)
    gradients = [torch.autograd.grad(each, qkv, upstream)[0] for each in (ours, by_hand)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["auto", "cpu", "attention"])
def test_added_masks_of_any_dtype(backend: str, dtype: torch.dtype, kind: torch.dtype) -> None:
    """Whichever backend the size chooses."""
    qkv, mask = torch.randn(2, 6, 24), torch.randn(6, 6).to(kind)
    found = packed_attention(qkv.to(dtype), 2, mask, backend=backend)
    exact = packed_attention(qkv.to(dtype).double(), 2, mask.double(), backend="cpu")
    tolerance = 2**-5 if dtype == torch.bfloat16 else 1e-5  # of numbers of size one
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
