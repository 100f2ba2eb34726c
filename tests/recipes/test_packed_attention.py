"""Attention over a packed projection, against SDPA on its parts in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradscope.kernels import pays
from gradscope.kernels.attention.dropout import keep_mask
from gradscope.kernels.heads import cpu
from gradscope.recipes.packed_attention import PackedSelfAttention, packed_attention

from .accuracy import assert_as_accurate, dirty_memory


def views(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    size = qkv.shape[2] // (heads + 2 * kv_heads)
    parts = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=2)
    return tuple(part.unflatten(2, (-1, size)).transpose(1, 2) for part in parts)


def with_sdpa(qkv: Tensor, heads: int, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
    kv_heads = options.pop("kv_heads", None) or heads
    options.pop("backend", None)
    q, k, v = views(qkv, heads, kv_heads)
    out = functional.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=heads != kv_heads, **options)
    return out.transpose(1, 2).reshape(*qkv.shape[:2], -1)


def run(function: Callable[..., Tensor], qkv: Tensor, upstream: Tensor, *args: Any, **options: Any) -> list[Tensor]:
    """Output and gradient."""
    x = qkv.detach().requires_grad_()
    out = function(x, *args, **options)
    return [out.detach(), *torch.autograd.grad(out, x, upstream.to(out.dtype))]


def compare(qkv: Tensor, heads: int, *args: Any, upstream: Tensor | None = None, **options: Any) -> None:
    if upstream is None:
        kv_heads = options.get("kv_heads") or heads
        upstream = torch.randn(*qkv.shape[:2], qkv.shape[2] // (heads + 2 * kv_heads) * heads)
        upstream = upstream.to(qkv)
    with dirty_memory():
        ours = run(packed_attention, qkv, upstream, heads, *args, **options)
    torchs = run(with_sdpa, qkv, upstream, heads, *args, **options)
    wide = [a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args]
    truth = run(with_sdpa, qkv.double(), upstream.double(), heads, *wide, **options)
    for name, mine, other, true in zip(("output", "gradient"), ours, torchs, truth, strict=True):
        assert_as_accurate(mine, other, true, name)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("backend", "kv_heads"),
    [("held", 4), *((backend, kv_heads) for backend in ("cpu", "attention") for kv_heads in (4, 2, 1))],
)
@pytest.mark.parametrize("tokens", [5, 17])
def test_gradcheck(is_causal: bool, kv_heads: int, backend: str, tokens: int) -> None:
    qkv = torch.randn(2, tokens, (4 + 2 * kv_heads) * 3, dtype=torch.float64, requires_grad=True)
    with dirty_memory():
        assert torch.autograd.gradcheck(
            lambda x: packed_attention(x, 4, is_causal=is_causal, kv_heads=kv_heads, backend=backend), qkv
        )


def test_gradcheck_with_a_bias() -> None:
    qkv = torch.randn(2, 5, 18, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 5, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, b: packed_attention(x, 2, b, is_causal=True, backend="cpu"), (qkv, bias))


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 97, 200, 1025])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths(tokens: int, is_causal: bool) -> None:
    """Edge case 15."""
    compare(torch.randn(1, tokens, 3 * 2 * 16), 2, is_causal=is_causal, backend="cpu")


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 13, 15, 16, 17, 31, 64])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_whose_scores_are_held(tokens: int, is_causal: bool) -> None:
    """Edge case 15: below, at and above what fills a register."""
    compare(torch.randn(3, tokens, 3 * 4 * 8), 4, is_causal=is_causal, backend="held")


@pytest.mark.parametrize("size", [1, 8, 20, 33, 64, 100, 256])
def test_head_sizes(size: int) -> None:
    """Edge case 15."""
    compare(torch.randn(2, 70, 9 * size), 3, is_causal=True, backend="cpu")
    compare(torch.randn(2, 13, 9 * size), 3, is_causal=True, backend="held")


@settings(deadline=None, derandomize=True, max_examples=30, database=None)
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 150),
    kv_heads=st.integers(1, 3),
    repeats=st.integers(1, 3),
    size=st.integers(1, 24),
    is_causal=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    layout=st.sampled_from(["contiguous", "tokens first", "features first", "padded"]),
)
def test_any_shape_layout_and_dtype(
    batch: int,
    tokens: int,
    kv_heads: int,
    repeats: int,
    size: int,
    is_causal: bool,
    scale: float | None,
    dtype: torch.dtype,
    layout: str,
) -> None:
    """Edge case 11, of the input."""
    heads = kv_heads * repeats
    width = (heads + 2 * kv_heads) * size
    qkv = {
        "contiguous": torch.randn(batch, tokens, width),
        "tokens first": torch.randn(tokens, batch, width).transpose(0, 1),
        "features first": torch.randn(batch, width, tokens).transpose(1, 2),
        "padded": torch.randn(batch, tokens, width + 5)[..., 3:-2],
    }[layout].to(dtype)
    compare(qkv, heads, is_causal=is_causal, scale=scale, kv_heads=kv_heads, backend="cpu")
    if repeats == 1 and dtype == torch.float32:
        compare(qkv, heads, is_causal=is_causal, scale=scale, backend="held")


def test_many_blocks_of_heads_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads that the blocks do not divide, and rows that do not fill the last."""
    monkeypatch.setattr(cpu, "ROWS", 16)
    monkeypatch.setattr(cpu, "SCORES", 16 * 70 * 2)
    compare(torch.randn(2, 70, 5 * 3 * 8), 5, is_causal=True, backend="cpu")
    compare(torch.randn(2, 70, 14 * 8), 10, is_causal=True, kv_heads=2, backend="cpu")


def test_gradients_of_any_strides() -> None:
    """Edge cases 1 and 11: not uniform, transposed, expanded."""
    qkv = torch.randn(2, 70, 48)
    for backend in ("cpu", "held"):
        compare(qkv, 2, is_causal=True, backend=backend, upstream=torch.randn(70, 2, 16).transpose(0, 1))
        compare(qkv, 2, is_causal=True, backend=backend, upstream=torch.ones(()).expand(2, 70, 16))


def test_every_value_counts_once_in_one_buffer() -> None:
    """The gradient is one allocation of the projection's size, contiguous, with nothing joined afterwards."""
    qkv = torch.randn(2, 128, 3 * 64, requires_grad=True)
    out = packed_attention(qkv, 4, is_causal=True, backend="cpu")
    upstream = torch.randn(2, 128, 64)
    with torch.profiler.profile(
        profile_memory=True, acc_events=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profiler:
        (found,) = torch.autograd.grad(out, qkv, upstream)
    sizes = [e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]" and e.nbytes() > 0]
    names = {event.key for event in profiler.key_averages()}
    assert sizes.count(found.numel() * 4) == 1
    assert found.is_contiguous() and found._base is None
    assert not names & {"aten::cat", "aten::stack", "aten::split", "SplitBackward0"}


def test_forward_copies_no_head_out_of_the_projection() -> None:
    """Saved for backward: the projection itself, and neither heads nor output nor scores."""
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    qkv = torch.randn(2, 300, 3 * 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        packed_attention(qkv, 4, is_causal=True)
    assert [tensor.data_ptr() for tensor in saved if tensor.numel()] == [qkv.data_ptr()]


@pytest.mark.parametrize("kind", ["boolean", "float", "row without keys"])
def test_masks(kind: str) -> None:
    """Edge case 13: a row that sees nothing is 0, its gradients finite."""
    qkv = torch.randn(2, 70, 48)
    mask = torch.rand(2, 1, 70, 70) > 0.4
    mask[..., 0] = True
    if kind == "float":
        compare(qkv, 2, torch.randn(70, 70), backend="cpu")
        return
    if kind == "boolean":
        compare(qkv, 2, mask, backend="cpu")
        return
    mask[:, :, 3] = False
    out, gradient = run(packed_attention, qkv, torch.randn(2, 70, 16), 2, mask, backend="cpu")
    assert not out[:, 3].any()
    assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", ["auto", "attention", "math"])
@pytest.mark.parametrize("tokens", [5, 70, 300])
def test_a_scale_that_is_learnt_gets_its_gradient(tokens: int, backend: str) -> None:
    qkv, scale = torch.randn(2, tokens, 48, dtype=torch.float64), nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    upstream = torch.randn(2, tokens, 16, dtype=torch.float64)
    q, k, v = views(qkv, 2, 2)
    expected = ((q @ k.mT * scale).softmax(-1) @ v).transpose(1, 2).flatten(2)
    found = packed_attention(qkv, 2, scale=scale, backend=backend)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found, scale, upstream), torch.autograd.grad(expected, scale, upstream)
    )


def test_a_scale_that_is_learnt_is_refused_where_it_would_get_none() -> None:
    message = "packed_attention: backend='held' cannot run here: the scale is a tensor, which may require a gradient"
    with pytest.raises(ValueError, match=message):
        packed_attention(torch.randn(2, 5, 48), 2, scale=torch.tensor(0.3), backend="held")  # type: ignore[arg-type]


def test_dropout_is_that_of_its_seed() -> None:
    """Edge case 14: the same weights are dropped in forward and backward, as many as asked for, the others scaled."""
    qkv = torch.randn(2, 100, 48, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(3)
    out = packed_attention(qkv, 2, dropout_p=0.3, is_causal=True, backend="cpu")
    torch.manual_seed(3)
    seed = torch.randint(0, 2**62, (1,), dtype=torch.int64)
    kept = keep_mask(seed, (2, 2, 100, 100), 0.3)
    assert abs(kept.double().mean().item() - 0.7) < 5 * (0.21 / kept.numel()) ** 0.5
    q, k, v = views(qkv, 2, 2)
    scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(100, 100).triu(1) > 0, -torch.inf)
    expected = ((scores.softmax(-1) * kept / 0.7) @ v).transpose(1, 2).reshape(2, 100, 16)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    found, truth = (torch.autograd.grad(y, qkv, upstream)[0] for y in (out, expected))
    torch.testing.assert_close(found, truth)


def test_dropout_under_checkpoint_and_off() -> None:
    """Edge case 14: the same mask in recompute; none where p is 0 or the module evaluates."""
    qkv = torch.randn(1, 300, 48, requires_grad=True)

    def drop(x: Tensor) -> Tensor:
        return packed_attention(x, 2, dropout_p=0.5, is_causal=True)

    found = []
    for function in (drop, lambda x: checkpoint(drop, x, use_reentrant=False)):
        torch.manual_seed(1)
        out = function(qkv)
        found.append([out, *torch.autograd.grad(out.square().sum(), qkv)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    module = PackedSelfAttention(nn.Linear(16, 48), nn.Linear(16, 16), 2, dropout_p=0.5).eval()
    x = torch.randn(1, 300, 16)
    assert torch.equal(module(x), module(x))
    assert not torch.equal(module.train()(x), module(x))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_triton_writes_into_the_buffer(triton_device: torch.device, is_causal: bool, kv_heads: int) -> None:
    qkv = torch.randn(2, 37, (4 + 2 * kv_heads) * 16, device=triton_device)
    compare(qkv, 4, is_causal=is_causal, kv_heads=kv_heads, backend="triton")


def test_explain_says_what_runs_and_why() -> None:
    qkv = torch.randn(1, 300, 96)
    assert packed_attention.explain(qkv, 4).backend == "cpu"
    few = packed_attention.explain(qkv[:, :40], 4)
    assert (few.backend, few.refused["cpu"]) == ("attention", "fewer than 256 tokens: torch's own is faster")
    long = torch.randn(1, 1_025, 48)
    assert packed_attention.explain(long, 2).refused["cpu"] == "more than 1,024 tokens: torch's own is as fast"
    assert packed_attention.explain(long, 2, dropout_p=0.1).backend == "cpu"
    assert packed_attention.explain(long[:, :1_024], 2).backend == "cpu"
    short = packed_attention.explain(qkv.bfloat16(), 4)
    assert (short.backend, short.refused["cpu"]) == ("attention", "torch's matmul is faster in this dtype")
    assert packed_attention.explain(qkv.bfloat16(), 4, dropout_p=0.1).backend == "cpu"
    fewer = packed_attention.explain(qkv[:, :64], 4, dropout_p=0.1)
    assert (fewer.backend, fewer.refused["cpu"]) == ("attention", "fewer than 200,000 scores: torch's own is faster")
    assert packed_attention.explain(qkv, 2, backend="attention").reason == "asked for"


def test_scores_are_held_where_that_pays() -> None:
    """What the shortcut for small problems takes is what explain says."""
    qkv = torch.randn(64, 13, 192, requires_grad=True)
    cases = [
        (qkv, "held", None),
        (qkv[:4], "attention", "fewer than 10,000 scores: torch's own is faster"),
        (torch.randn(64, 64, 192, requires_grad=True), "attention", "more than 300,000 scores: torch's own is as fast"),
        (qkv.bfloat16(), "attention", "it does not support bfloat16"),
        (torch.randn(64, 0, 192, requires_grad=True), "attention", "a dimension is 0"),
    ]
    for x, backend, why in cases:
        choice = packed_attention.explain(x, 4, is_causal=True)
        assert (choice.backend, choice.refused.get("held")) == (backend, why)
        node = packed_attention(x, 4, is_causal=True).grad_fn
        assert (type(node).__name__ == "_HeldAttentionBackward") == (backend == "held")
    assert packed_attention.explain(qkv, 4, dropout_p=0.1).refused["held"] == "it supports neither a mask nor dropout"
    assert packed_attention.explain(qkv, 4, kv_heads=4).backend == "held"
    with torch.autocast("cpu"):
        assert packed_attention.explain(qkv, 4).refused["held"] == "under autocast the attention recipe runs"
    compare(qkv.detach(), 4, is_causal=True)


def test_small_problems_are_walked_over_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pays, "FEWEST", {"packed_attention with held scores": {"scores": (pays.NEVER, pays.NEVER)}})
    qkv = torch.randn(2, 5, 48, requires_grad=True)
    assert packed_attention.explain(qkv, 2).backend == "cpu"
    assert type(packed_attention(qkv, 2).grad_fn).__name__ == "_PackedAttentionBackward"


@pytest.mark.measured_sizes
def test_scores_are_held_when_that_is_asked_for() -> None:
    """Measured it pays nowhere."""
    qkv = torch.randn(64, 13, 192, requires_grad=True)
    assert packed_attention.explain(qkv, 4).refused["held"] == "torch's own is as fast"
    assert type(packed_attention(qkv, 4, backend="held").grad_fn).__name__ == "_HeldAttentionBackward"
    assert type(packed_attention(qkv, 4).grad_fn).__name__ != "_HeldAttentionBackward"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, r"packed_attention: qkv is of shape \(1, 6, 48\); expected a last dimension .* = 15"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads is 3; expected a divisor of heads=4"),
        ({"dropout_p": 1.5}, r"dropout_p is 1.5; expected a number in \[0, 1\]"),
        ({"scale": float("nan")}, r"scale is nan; expected a number in \(-inf, inf\)"),
        (
            {"attn_mask": torch.ones(6, 6, dtype=torch.int64)},
            "attn_mask is of dtype int64; expected bool or",
        ),
        (
            {"attn_mask": torch.ones(5, 6)},
            r"attn_mask is of shape \(5, 6\); expected a shape that broadcasts",
        ),
        (
            {"backend": "flash"},
            "backend is 'flash'; expected 'auto' or 'held' or 'cpu' or 'triton' or 'attention' or 'math'",
        ),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_attention(torch.randn(1, 6, 48), **{"heads": 2, **options})


class NanoGPTAttention(nn.Module):
    """As in nanoGPT, with SDPA."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(with_sdpa(self.c_attn(x), self.heads, is_causal=True))


def test_module_around_nanogpts_projections() -> None:
    theirs = NanoGPTAttention(32, 4)
    parts = copy.deepcopy(theirs)
    ours = PackedSelfAttention(parts.c_attn, parts.c_proj, 4)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 300, 32)
    for module in (ours, theirs):
        module(x).square().sum().backward()
    torch.testing.assert_close(ours(x), theirs(x))
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)  # sums over 600 rows, other order
    assert repr(ours).startswith("PackedSelfAttention(\n  heads=4, kv_heads=4, dropout_p=0.0, is_causal=True")
