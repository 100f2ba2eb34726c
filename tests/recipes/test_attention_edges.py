"""What broke other libraries' attention, by its number in the list of edge cases."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradscope.kernels.attention import cpu_forward
from gradscope.recipes.attention import Attention, attention

from .accuracy import dirty_memory
from .attention_cases import NAMES, assert_all_as_accurate, by_reference, ours, qkv, run

BACKENDS = ("flash", "cpu", "math")


@pytest.mark.parametrize("backend", BACKENDS)
def test_expanded_gradients(backend: str) -> None:
    """Edge cases 1 and 11: sum() gives a gradient of stride 0."""
    tensors = [x.requires_grad_() for x in qkv(2, 2, 2, 9, 9, 4)]
    mine = torch.autograd.grad(attention(*tensors, backend=backend).sum(), tensors)
    plain = torch.autograd.grad(by_reference(*tensors).sum(), tensors)
    for name, one, other in zip(NAMES[1:4], mine, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_nothing_given_is_written_to(dropout_p: float) -> None:
    """Edge cases 2 and 4."""
    tensors = [x.requires_grad_() for x in (*qkv(2, 2, 2, 9, 9, 4), torch.randn(9, 9, dtype=torch.float64))]
    before = [x.detach().clone() for x in tensors]
    upstream = torch.randn(2, 2, 9, 4, dtype=torch.float64)
    kept = upstream.clone()
    torch.autograd.grad(ours(*tensors, dropout_p=dropout_p), tensors, upstream)
    for one, other in zip((*tensors, upstream), (*before, kept), strict=True):
        assert torch.equal(one, other)
        assert one._version == 0


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_backward_twice(dropout_p: float) -> None:
    """Edge case 3: the second is the first, with retain_graph; without it, it raises."""
    tensors = [x.requires_grad_() for x in qkv(2, 2, 2, 9, 9, 4)]
    out = ours(*tensors, dropout_p=dropout_p).square().sum()
    first = torch.autograd.grad(out, tensors, retain_graph=True)
    second = torch.autograd.grad(out, tensors)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, tensors)


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 0, 4)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_nothing_at_all(shape: tuple[int, ...], dropout_p: float) -> None:
    """Edge case 6."""
    x = torch.randn(shape, requires_grad=True)
    out = attention(x, x, x, dropout_p=dropout_p)
    out.sum().backward()
    assert out.shape == shape
    assert x.grad is not None
    assert x.grad.shape == shape


@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize("heads", [0, 1])
def test_no_heads_with_a_mask(heads: int, learnt: bool) -> None:
    """Edge case 6: gradients of nothing, and zeros for a mask that all heads would share."""
    x, mask = torch.randn(2, 0, 5, 4, requires_grad=True), torch.ones(1, heads, 5, 5, dtype=torch.bool).tril()
    mask = mask.float().requires_grad_() if learnt else mask
    grads = torch.autograd.grad(attention(x, x, x, mask).sum(), (x, mask) if learnt else x)
    assert all(torch.equal(one, torch.zeros_like(other)) for one, other in zip(grads, (x, mask), strict=False))


def test_no_keys() -> None:
    """Edge cases 6 and 13: every row is fully masked."""
    q, k = torch.randn(1, 2, 5, 4, requires_grad=True), torch.randn(1, 2, 0, 4, requires_grad=True)
    with dirty_memory():
        out = attention(q, k, k)
        grads = torch.autograd.grad(out.sum(), (q, k))
    assert torch.equal(out, torch.zeros(1, 2, 5, 4))
    assert torch.equal(grads[0], torch.zeros(1, 2, 5, 4))
    assert grads[1].shape == k.shape


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_autocast(dropout_p: float) -> None:
    """Edge case 8: computed and returned in autocast's dtype, gradients in the inputs' own."""
    tensors = [x.requires_grad_() for x in qkv(2, 2, 2, 9, 9, 4, dtype=torch.float32)]
    mask = torch.randn(9, 9)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*tensors, mask, dropout_p=dropout_p)
        assert functional.scaled_dot_product_attention(*tensors, mask).dtype == out.dtype == torch.bfloat16
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cast_to", [torch.float16, torch.bfloat16])
def test_a_mask_of_half_the_width_under_autocast(cast_to: torch.dtype, dtype: torch.dtype) -> None:
    """As torch's own attention takes it: hidden stays hidden, and the mask's gradient is in its dtype."""
    tensors = qkv(2, 2, 2, 9, 9, 4, dtype=torch.float32)
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    added = torch.randn(9, 9, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min).requires_grad_()
    with torch.autocast("cpu", cast_to):
        out = attention(*tensors, added)
        expected = functional.scaled_dot_product_attention(*tensors, added)
    assert out.dtype == expected.dtype == cast_to
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    (grad,) = torch.autograd.grad(out.sum(), (added,))
    assert grad.dtype == dtype and not grad[~seen].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("as_bool", [True, False])
def test_fully_masked_rows(backend: str, as_bool: bool) -> None:
    """Edge case 13: 0, and gradients that are finite, those of the row 0."""
    mask = torch.rand(9, 12) > 0.3
    mask[4] = False
    given = mask if as_bool else torch.zeros(9, 12).masked_fill(~mask, -torch.inf)
    tensors = tuple(x.float() for x in qkv(2, 2, 2, 9, 12, 4))
    mine = run(lambda *x: attention(*x, given, backend=backend), tensors)
    truth = run(lambda *x: by_reference(*x, mask=mask), tuple(x.double() for x in tensors))
    assert torch.equal(mine[0][:, :, 4], torch.zeros(2, 2, 4))
    assert torch.equal(mine[1][:, :, 4], torch.zeros(2, 2, 4))
    for one, other in zip(mine, truth, strict=False):
        torch.testing.assert_close(one, other.float())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (1, 9)])
def test_causal_begins_at_the_top_left(backend: str, lengths: tuple[int, int]) -> None:
    """Edge case 13: as SDPA documents it, ones.tril()."""
    tensors = qkv(2, 2, 2, *lengths, 4)
    mask = torch.ones(lengths, dtype=torch.bool).tril()
    mine = attention(*tensors, is_causal=True, backend=backend)
    expected = functional.scaled_dot_product_attention(*tensors, mask)
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("size", [1, 7, 8, 40, 129, 256, 300])
@pytest.mark.parametrize("length", [1, 97, 200])
def test_any_head_size_and_length(size: int, length: int) -> None:
    """Edge case 15."""
    tensors = qkv(1, 2, 1, length, length, size, dtype=torch.float32)
    mine = run(lambda *x: ours(*x, is_causal=True), tensors)
    torchs = run(lambda *x: by_reference(*x, is_causal=True), tensors)
    truth = run(lambda *x: by_reference(*x, is_causal=True), tuple(x.double() for x in tensors))
    assert_all_as_accurate(mine, torchs, truth, tensors)


def test_a_length_beyond_every_block() -> None:
    """Edge case 15."""
    tensors = qkv(1, 2, 2, 1025, 1025, 8, dtype=torch.float32)
    mine = run(lambda *x: ours(*x, is_causal=True), tensors)
    torchs = run(lambda *x: by_reference(*x, is_causal=True), tensors)
    truth = run(lambda *x: by_reference(*x, is_causal=True), tuple(x.double() for x in tensors))
    assert_all_as_accurate(mine, torchs, truth, tensors)


def test_no_gradient_work_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edge case 17."""
    tensors = [x.requires_grad_() for x in qkv(1, 2, 2, 9, 9, 4)]
    with torch.no_grad():
        assert ours(*tensors, dropout_p=0.5).grad_fn is None
    assert not ours(*(x.detach() for x in tensors), dropout_p=0.5).requires_grad
    tensors[1].requires_grad_(False)
    out = ours(*tensors)
    grads = torch.autograd.grad(out.sum(), [tensors[0], tensors[2]])
    assert all(grad.abs().max() > 0 for grad in grads)


def test_a_second_derivative_is_refused() -> None:
    """Edge case 19."""
    tensors = [x.requires_grad_() for x in qkv(1, 2, 2, 9, 9, 4)]
    (grad,) = torch.autograd.grad(ours(*tensors).square().sum(), tensors[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_deterministic() -> None:
    """Edge case 19: the same from run to run, bit by bit."""
    tensors = [x.requires_grad_() for x in qkv(2, 4, 2, 300, 300, 8, dtype=torch.float32)]
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(ours(*tensors, is_causal=True).square().sum(), tensors) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, other) for one, other in zip(*runs, strict=True))


def test_large_float16_values_do_not_overflow() -> None:
    """Edge case 20: q · k is beyond float16's largest value, scale · q · k is not."""
    q = torch.full((1, 1, 4, 64), 40.0, dtype=torch.float16)
    v = torch.randn(1, 1, 4, 64, dtype=torch.float16)
    out = ours(q, q, v)
    assert (q.double() @ q.double().transpose(-2, -1)).max() > torch.finfo(torch.float16).max
    torch.testing.assert_close(out, v.float().mean(2, keepdim=True).expand(1, 1, 4, 64).half())


def test_scores_beyond_exps_range() -> None:
    """Edge case 20: exp of the scores would overflow, and of their differences does not."""
    tensors = tuple(30 * x for x in qkv(1, 2, 2, 20, 20, 16))
    mine, truth = (run(function, tensors) for function in (ours, by_reference))
    for one, other in zip(mine, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)  # float64; scores of 10⁴ round to 10⁻¹²


def test_a_saved_tensor_that_was_changed_is_noticed() -> None:
    """Edge case 2."""
    q, k, v = (x.requires_grad_() for x in qkv(1, 2, 2, 9, 9, 4))
    inner = k * 1
    out = ours(q, inner, v)
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_what_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of queries · keys: q, k, v, the output, the logsumexp and the seed."""
    tensors = [x.requires_grad_() for x in qkv(2, 3, 3, 50, 50, 4)]
    shapes: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ours(*tensors, dropout_p=0.5, is_causal=True)
    assert sorted(shapes) == [(1,), (2, 3, 50), *[(2, 3, 50, 4)] * 4]


def test_blocks_that_nobody_sees_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 blocks of 128 queries and 256 keys a causal mask leaves 20, and a window of 256 keys 14 of these."""
    seen: list[object] = []
    scores = cpu_forward.BlockWork.scores
    monkeypatch.setattr(cpu_forward.BlockWork, "scores", lambda self, *args: seen.append(0) or scores(self, *args))
    tensors = qkv(1, 1, 1, 1024, 1024, 8, dtype=torch.float32)
    for given, expected in (({}, 32), ({"is_causal": True}, 20), ({"is_causal": True, "window": (256, None)}, 14)):
        seen.clear()
        ours(*tensors, **given)
        assert len(seen) == expected


def test_merging_heads_copies_nothing() -> None:
    """Where query comes from one projection, the result has its heads next to each other."""
    projected = torch.randn(2, 9, 3 * 8)
    q, k, v = (x.view(2, 9, 2, 4).transpose(1, 2) for x in projected.split(8, dim=2))
    out = ours(q, k, v)
    assert out.transpose(1, 2).is_contiguous()


def test_the_module_survives_copies() -> None:
    q, k, v = qkv(1, 2, 2, 9, 9, 4)
    module = Attention(is_causal=True, softcap=2.0, alibi_slopes=torch.tensor([0.5, 0.25]), window=(3, None))
    expected = module(q, k, v)
    assert module.state_dict() == {}
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other(q, k, v), expected)
    assert repr(module) == "Attention(is_causal=True, softcap=2.0, window=(3, None))"


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"enable_gqa": True},
        {"attn_mask": torch.ones(4, 4).tril().bool()},
        {"dropout_p": 0.2},
        {"softcap": 3.0},
        {"window": (1, 1)},
    ],
    ids=str,
)
def test_a_head_size_of_nothing(sizes: tuple[int, int], options: dict[str, Any]) -> None:
    """Without features every key is as good as any other: as torch's, where it has the option."""
    query = torch.zeros(2, 3, 4, sizes[0], requires_grad=True)
    value = torch.randn(2, 3, 4, sizes[1], requires_grad=True)
    found = attention(query, query, value, **options)
    found.sum().backward()
    assert query.grad is not None and query.grad.shape == query.shape
    assert value.grad is not None and value.grad.isfinite().all()
    if not {"dropout_p", "softcap", "window"} & options.keys():
        torch.testing.assert_close(found, functional.scaled_dot_product_attention(query, query, value, **options))


@pytest.mark.parametrize("tokens", [4, 64])
@pytest.mark.parametrize("backend", ["auto", "cpu", "math"])
def test_a_narrower_mask_in_float64(tokens: int, backend: str) -> None:
    """torch's CPU kernel reads the float32 numbers as float64."""
    q, k, v = torch.randn(3, 2, 3, tokens, 8, dtype=torch.float64)
    mask = torch.randn(tokens, tokens)
    truth = ((q @ k.mT / 8**0.5 + mask).softmax(-1) @ v).detach()
    torch.testing.assert_close(attention(q, k, v, mask, backend=backend), truth)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [-1.5, 0.0, 0, 2])
def test_a_scale_of_any_sign(scale: float, causal: bool, backend: str) -> None:
    """torch's kernel for the CPU gives NaN below 0 where it is causal: it multiplies minus infinity with it."""
    tensors = [x.requires_grad_() for x in qkv(2, 2, 2, 9, 9, 4)]
    q, k, v = tensors
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1) & causal
    plain = (scale * (q @ k.mT)).masked_fill(hidden, -torch.inf).softmax(-1) @ v
    mine = attention(q, k, v, is_causal=causal, scale=scale, backend=backend)
    torch.testing.assert_close(mine, plain)
    upstream = torch.randn_like(mine)
    for one, other in zip(*(torch.autograd.grad(each, tensors, upstream) for each in (mine, plain)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_a_scale_that_is_learnt(backend: str) -> None:
    tensors = [x.requires_grad_() for x in (*qkv(2, 2, 2, 9, 9, 4), torch.tensor(0.7, dtype=torch.float64))]
    q, k, v, scale = tensors
    plain = (scale * (q @ k.mT)).softmax(-1) @ v
    mine = attention(q, k, v, scale=scale, backend=backend)
    upstream = torch.randn_like(mine)
    for one, other in zip(*(torch.autograd.grad(each, tensors, upstream) for each in (mine, plain)), strict=True):
        torch.testing.assert_close(one, other)


def test_a_scale_that_wants_a_gradient_can_be_asked_about() -> None:
    """Without a warning, and as it would run: the query is scaled before."""
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    for scale in (torch.tensor(0.5, requires_grad=True), torch.tensor(-0.5), -1.0, 0.0):
        assert attention.explain(q, q, q, scale=scale).backend == "flash"  # type: ignore[arg-type]
