"""Attention's Triton kernels where public libraries broke: masks, dropout, extreme values, memory, what is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradscope.kernels.attention import triton_blocks, triton_launch
from gradscope.kernels.attention.options import AttentionOptions
from gradscope.kernels.attention.reference import attention
from gradscope.kernels.attention.triton_arguments import form_of
from gradscope.kernels.attention.triton_blocks import Tiling

from .attention_triton import check, kernels, problem


@pytest.fixture(autouse=True)
def _small(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("forward_blocks", "keys_blocks", "queries_blocks", "one_pass_blocks"):
        monkeypatch.setattr(triton_blocks, name, lambda *_: Tiling(16, 16, 4, 1))


def test_edge_2_and_4_nothing_given_is_written(triton_device: torch.device) -> None:
    """Edge cases 2 and 4: inputs, output and its gradient keep their values, and their versions."""
    p = problem(triton_device, 20, 20, bias=torch.randn(20, 20))
    out, logsumexp = triton_launch.forward(p.q, p.k, p.v, p.bias, p.options, None)
    given = [p.q, p.k, p.v, p.bias, p.grad_out, out, logsumexp]
    before = [tensor.clone() for tensor in given if tensor is not None]
    versions = [tensor._version for tensor in given if tensor is not None]
    triton_launch.backward(p.grad_out, p.q, p.k, p.v, p.bias, out, logsumexp, p.options, None, True)
    for tensor, values, version in zip(given, before, versions, strict=True):
        assert tensor is not None and torch.equal(tensor, values) and tensor._version == version


def test_edge_3_and_19_the_same_at_each_run(triton_device: torch.device) -> None:
    """Edge cases 3 and 19: a second backward, and a second run, give the same bits; the bias's gradient too."""
    p = problem(triton_device, 33, 33, kv_heads=1, bias=torch.randn(1, 1, 33, 33), dropout_p=0.2)
    first, second = kernels(p, repeatable=True)[1], kernels(p, repeatable=True)[1]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_edge_5_more_than_2_to_the_31_elements(triton_device: torch.device) -> None:
    """Edge case 5: rows that lie more than 2^31 elements apart. The memory between them is never touched."""
    p = problem(triton_device, 17, 17, 8, heads=1, dtype=torch.float16)
    apart = (1 << 27) + 8
    far = torch.empty(17 * apart, dtype=torch.float16, device=triton_device).as_strided((1, 1, 17, 8), (1, 1, apart, 1))
    assert far.stride(2) * 16 > 1 << 31
    want, logsumexp = triton_launch.forward(p.q, p.k, p.v, None, p.options, None)
    for name in ("q", "k", "v"):
        far.copy_(getattr(p, name))
        out, _ = triton_launch.forward(*(far if n == name else getattr(p, n) for n in "qkv"), None, p.options, None)
        assert torch.equal(out, want), name
    arguments = (p.grad_out, p.q, p.k, p.v, None, want, logsumexp, p.options, None, False)
    gradients = triton_launch.backward(*arguments)
    for written in range(3):
        into = [torch.empty_like(tensor) for tensor in (p.q, p.k, p.v)]
        into[written] = far
        assert torch.equal(triton_launch.backward(*arguments, into=tuple(into))[written], gradients[written])


def test_one_pass_or_two_kernels(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """dq is summed by atomics, but where deterministic algorithms are asked for and there are several blocks."""
    calls = []
    one_pass = triton_launch._in_one_pass
    monkeypatch.setattr(triton_launch, "_in_one_pass", lambda *given: (calls.append(1), one_pass(*given)))
    was = torch.are_deterministic_algorithms_enabled()
    for keys, asked, used in ((16, False, True), (17, False, True), (16, True, True), (17, True, False)):
        p = problem(triton_device, 20, keys)
        out, logsumexp = triton_launch.forward(p.q, p.k, p.v, None, p.options, None)
        calls.clear()
        torch.use_deterministic_algorithms(asked)
        try:
            triton_launch.backward(p.grad_out, p.q, p.k, p.v, None, out, logsumexp, p.options, None, False)
        finally:
            torch.use_deterministic_algorithms(was)
        assert bool(calls) is used, (keys, asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_beyond_the_band_get_no_gradient(triton_device: torch.device, dtype: torch.dtype) -> None:
    """Rows of dq that no key sees are not visited, with one block of keys or several: they are 0."""
    for keys in (9, 40):
        check(problem(triton_device, 80, keys, window=(3, None), dtype=dtype))


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_edge_6_nothing_to_attend(triton_device: torch.device, batch: int, queries: int, keys: int) -> None:
    """Edge case 6: an empty batch, no query, no key: zeros, and a logsumexp of -inf."""
    p = problem(triton_device, queries, keys, batch=batch, bias=torch.randn(queries, keys))
    logsumexp, (out, *gradients) = kernels(p)
    assert out.shape == p.grad_out.shape and not out.any()
    assert logsumexp.isneginf().all()
    for gradient, tensor in zip(gradients, (p.q, p.k, p.v, p.bias), strict=True):
        assert tensor is not None and gradient.shape == tensor.shape and not gradient.any()


def test_edge_11_an_expanded_gradient_and_broadcast_keys(triton_device: torch.device) -> None:
    """Edge case 11: stride 0 in the gradient (``out.sum().backward()``), in k and in v, which differ in strides."""
    p = problem(triton_device, 20, 24, batch=2, heads=2)
    p.grad_out = torch.ones((), device=triton_device).expand(p.grad_out.shape)
    p.k = p.k[:1, :1].expand(p.k.shape)
    p.v = p.v.mT.contiguous().mT[:, :, :1].expand(p.v.shape)
    check(p)


@pytest.mark.parametrize("kind", ["mask", "bias", "band"])
def test_edge_13_rows_without_a_key(triton_device: torch.device, kind: str) -> None:
    """Edge case 13: rows that see no key give 0, a logsumexp of -inf and finite gradients; their own are 0."""
    seen = torch.rand(30, 20, device=triton_device) > 0.3
    seen[[0, 7, 29]] = False
    added = torch.zeros(30, 20, device=triton_device).masked_fill(~seen, -torch.inf)
    if kind == "band":
        p = problem(triton_device, 30, 20, window=(3, None))  # row 23 and later
        empty = torch.arange(30, device=triton_device) > 22
    else:
        p = problem(triton_device, 30, 20, bias=seen if kind == "mask" else added)
        empty = ~seen.any(1)
    check(p)
    logsumexp, (out, dq, *_) = kernels(p)
    assert not out[:, :, empty].any() and not dq[:, :, empty].any()
    assert torch.equal(logsumexp[0, 0].isneginf(), empty)


@pytest.mark.parametrize(("queries", "keys"), [(20, 50), (50, 20)])
def test_edge_13_causal_begins_at_the_top_left(triton_device: torch.device, queries: int, keys: int) -> None:
    """Edge case 13: causal with other lengths of queries and keys, as SDPA aligns it."""
    p = problem(triton_device, queries, keys, is_causal=True)
    check(p)
    out = kernels(p)[1][0]
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(p.q, p.k, p.v, is_causal=True))


@pytest.mark.parametrize(
    ("options", "unseen"), [({"is_causal": True}, slice(32, None)), ({"window": (2, 2)}, slice(0))]
)
def test_blocks_outside_the_band_are_not_read(
    triton_device: torch.device, options: dict[str, object], unseen: slice
) -> None:
    """NaN beyond the last block that a causal mask sees, and in the rows whose blocks no key of a window reaches."""
    p = problem(triton_device, 20, 70, **options)
    clean = kernels(p)[1]
    for tensor in (p.k, p.v):
        tensor[:, :, unseen if unseen.start else slice(48, None)] = torch.nan
    for got, want, name in zip(kernels(p)[1], clean, ("out", "dq", "dk", "dv"), strict=True):
        assert torch.equal(got, want), name


def test_edge_14_dropout_keeps_what_it_should(triton_device: torch.device) -> None:
    """Edge case 14: the share that is kept, no two neighbours, rows, heads or seeds alike, the same at each call."""
    q = torch.empty(2, 3, 64, 1, device=triton_device)
    k = torch.empty(2, 3, 96, 1, device=triton_device)
    options = AttentionOptions(scale=1.0, kv_heads=3, dropout_p=0.3)
    seeds = [torch.tensor(seed, device=triton_device) for seed in (0, 1, -1, 1 << 33)]
    masks = [triton_launch.kept(q, k, options, seed) for seed in seeds]
    assert torch.equal(masks[0], triton_launch.kept(q, k, options, seeds[0]))
    count = masks[0].numel()
    spread = (0.3 * 0.7 / count) ** 0.5
    for mask in masks:
        assert abs(mask.double().mean().item() - 0.7) < 4 * spread
    flat = torch.cat([mask.flatten(0, 1) for mask in masks]).double() - 0.7
    for distance, dim in [(1, 0), (3, 0), (6, 0), (1, 1), (2, 1), (16, 1), (1, 2), (2, 2), (4, 2), (16, 2)]:
        rest = flat.shape[dim] - distance
        product = flat.narrow(dim, 0, rest) * flat.narrow(dim, distance, rest)
        assert abs(product.mean().item()) < 4.5 * 0.21 / product.numel() ** 0.5, (distance, dim)


def test_edge_14_dropout_does_not_depend_on_lengths_or_blocks(
    triton_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edge case 14: the same mask in forward, in backward and in a recompute cut otherwise."""
    p = problem(triton_device, 40, 40, dropout_p=0.5)
    whole = triton_launch.kept(p.q, p.k, p.options, p.seed)
    part = triton_launch.kept(p.q[:, :, :17], p.k[:, :, :21], p.options, p.seed)
    assert torch.equal(part, whole[:, :, :17, :21])
    check(p)
    small = kernels(p)[1]
    for name in ("forward_blocks", "keys_blocks", "queries_blocks", "one_pass_blocks"):
        monkeypatch.setattr(triton_blocks, name, lambda *_: Tiling(64, 32, 4, 1))
    for got, want in zip(kernels(p)[1], small, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # one other element dropped would be 0.1 or more


def test_edge_14_everything_dropped(triton_device: torch.device) -> None:
    """Edge case 14: with probability 1 output and gradients are 0; the logsumexp is that without dropout."""
    p = problem(triton_device, 20, 20, dropout_p=1.0)
    logsumexp, found = kernels(p)
    assert not any(tensor.any() for tensor in found)
    torch.testing.assert_close(logsumexp, attention(p.q, p.k, p.v, None, p.options)[1])


def test_edge_18_rows_that_are_sure(triton_device: torch.device) -> None:
    """Edge case 18: scores in the hundreds, where all probability lies on one key.

    Of numbers whose products are exact in float32, in whatever order a processor adds them up: else the last bit of a
    score in the hundreds decides by how much a weight is off.
    """
    p = problem(triton_device, 30, 30)
    p.q, p.k = (p.q * 200).round(), (p.k * 16).round() / 16
    check(p)


@pytest.mark.parametrize(("size_of_q", "scale"), [(64.0, 0.125), (2000.0, 64.0)])
def test_edge_20_float16_does_not_overflow(triton_device: torch.device, size_of_q: float, scale: float) -> None:
    """Edge case 20: products of 262,144 are beyond float16; so would q be, times a scale of 64."""
    p = problem(triton_device, 20, 20, 64, dtype=torch.float16, scale=scale)
    signs = p.k.sign()
    p.q, p.k = signs * size_of_q, signs * 64  # each query is one key's, and scores that one thousands above the rest
    out, logsumexp = triton_launch.forward(p.q, p.k, p.v, None, p.options, None)
    assert torch.equal(out, p.v)
    assert torch.equal(logsumexp, torch.full_like(logsumexp, size_of_q * 64 * 64 * scale))
    if scale < 1:  # beyond, float32 has no digits left for what a score is less the logsumexp
        dq, dk, dv, _ = triton_launch.backward(p.grad_out, p.q, p.k, p.v, None, out, logsumexp, p.options, None, False)
        assert dq.isfinite().all() and dk.isfinite().all()
        torch.testing.assert_close(dv, p.grad_out, rtol=2**-7, atol=0)  # 47,274 in float32 has steps of 2^-8


def test_edge_21_tf32_is_the_users(triton_device: torch.device) -> None:
    """Edge case 21: products of float32 are exact unless torch's own may be TF32; the setting is only read."""
    p = problem(triton_device, 4, 4)
    matmul = torch.backends.cuda.matmul
    was = matmul.fp32_precision
    try:
        for setting, used in (("ieee", "ieee"), ("tf32", "tf32")):
            matmul.fp32_precision = setting
            form = form_of(p.q, p.v, None, p.options, wide=False)
            found = triton_launch._settings(p.q, p.k, p.options, form, Tiling(16, 16, 4, 1))
            assert found["PRECISION"] == used and matmul.fp32_precision == setting
    finally:
        matmul.fp32_precision = was


def test_gradients_go_where_they_are_wanted(triton_device: torch.device) -> None:
    """Into views of one packed buffer: nothing else of it is written."""
    p = problem(triton_device, 20, 20, heads=2, kv_heads=1)
    out, logsumexp = triton_launch.forward(p.q, p.k, p.v, None, p.options, None)
    arguments = (p.grad_out, p.q, p.k, p.v, None, out, logsumexp, p.options, None, False)
    want = triton_launch.backward(*arguments)
    packed = torch.full((1, 20, 5, 16), 7.0, device=triton_device)
    views = tuple(packed[:, :, part].transpose(1, 2) for part in (slice(0, 2), slice(2, 3), slice(3, 4)))
    assert len(views) == 3
    found = triton_launch.backward(*arguments, into=views)
    assert all(a is b for a, b in zip(found[:3], views, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found[:3], want[:3], strict=True))
    assert (packed[:, :, 4] == 7).all()


@pytest.mark.parametrize("packed", [False, True])
def test_the_output_is_laid_out_as_q(triton_device: torch.device, packed: bool) -> None:
    """So that heads next to each other merge without a copy."""
    p = problem(triton_device, 6, 6)
    q = p.q.transpose(1, 2).contiguous().transpose(1, 2) if packed else p.q
    out, _ = triton_launch.forward(q, p.k, p.v, None, p.options, None)
    assert out.transpose(1, 2).is_contiguous() is packed


def test_what_is_refused_and_why(triton_device: torch.device) -> None:
    p = problem(triton_device, 4, 4)
    assert triton_launch.why_not(p.q, p.k, p.v, None, p.options) is None
    double = p.q.double()
    assert triton_launch.why_not(double, double, double, None, p.options) == (
        "the kernels compute in float32, and float64 needs higher precision"
    )
    assert triton_launch.why_not(p.q, p.k, p.v.half(), None, p.options) == "q, k and v differ in dtype"
    assert triton_launch.why_not(p.q, p.k, p.v, torch.zeros(4, 4, dtype=torch.float64), p.options) == (
        "the bias is float64, and the kernels take float32, float16 or bfloat16"
    )
    wide = torch.empty(1, 2, 4, 257, device=triton_device)
    assert triton_launch.why_not(wide, wide, p.v, None, replace(p.options, scale=1.0)) == (
        "the head size is 257, and the kernels' maximum is 256"
    )


def test_importing_the_launcher_loads_no_triton(tmp_path: Path) -> None:
    code = "import sys, gradscope.kernels.attention.triton_launch; print('triton' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert run.stdout.strip() == "False"
