"""Views of a packed projection, and what their backward copies: counted in bytes."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gradscope.recipes.heads import chunk, merge_heads, split, split_heads, split_qkv

from .accuracy import dirty_memory

BATCH, TOKENS, HEADS, SIZE = 2, 5, 4, 3
WIDTH = HEADS * SIZE
UNIT = BATCH * TOKENS * WIDTH * 4  # bytes of q, k or v


def allocated(step: Callable[[], object]) -> list[int]:
    """Bytes of each allocation while ``step`` runs, in order."""
    with torch.profiler.profile(
        profile_memory=True, acc_events=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profiler:
        kept = step()
    results = profiler.profiler.kineto_results
    found = [event.nbytes() for event in results.events() if event.name() == "[memory]" and event.nbytes() > 0]
    assert kept is not None
    return found


def torch_qkv(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
    size = qkv.shape[2] // (heads + 2 * kv_heads)
    parts = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=2)
    return tuple(part.unflatten(2, (-1, size)).transpose(1, 2) for part in parts)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: split(x, 5, 2),
        lambda x: split(x, [7, 1, 16], -1),
        lambda x: split(x, 1, 0),
        lambda x: chunk(x, 5, 2),
        lambda x: split_qkv(x, 4),
        lambda x: split_qkv(x, 4, kv_heads=2),
        lambda x: split_heads(x, 3),
        lambda x: merge_heads(x.unflatten(2, (4, 6))),
        lambda x: merge_heads(split_heads(x, 3)),
    ],
)
def test_gradcheck(function: Callable[[Tensor], Tensor | tuple[Tensor, ...]]) -> None:
    x = torch.randn(2, 3, 24, dtype=torch.float64, requires_grad=True)
    with dirty_memory():
        assert torch.autograd.gradcheck(function, x)


@settings(deadline=None, derandomize=True, max_examples=40, database=None)
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_split_and_chunk_are_torchs(shape: list[int], data: st.DataObject, dtype: torch.dtype) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    order = data.draw(st.permutations(range(len(shape))))
    base = torch.randn([shape[i] for i in order]).to(dtype)
    x = base.permute([order.index(i) for i in range(len(shape))]).requires_grad_()
    if data.draw(st.booleans()):
        number = data.draw(st.integers(1, 6))
        ours, torchs = chunk(x, number, dim), torch.chunk(x, number, dim)
    else:
        sizes = data.draw(st.integers(1, 6))
        ours, torchs = split(x, sizes, dim), torch.split(x, sizes, dim)
    assert len(ours) == len(torchs)
    for one, other in zip(ours, torchs, strict=True):
        assert one.stride() == other.stride() and one.data_ptr() == other.data_ptr()
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    upstream = [torch.randn(part.shape).to(dtype) for part in torchs]
    found, expected = (torch.autograd.grad(parts, x, upstream)[0] for parts in (ours, torchs))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_split_qkv_is_split_view_and_transpose(kv_heads: int) -> None:
    qkv = torch.randn(2, 5, (4 + 2 * kv_heads) * 3, requires_grad=True)
    ours, torchs = split_qkv(qkv, 4, kv_heads=kv_heads), torch_qkv(qkv, 4, kv_heads)
    for one, other in zip(ours, torchs, strict=True):
        assert one.shape == other.shape and one.stride() == other.stride() and one.data_ptr() == other.data_ptr()
    upstream = [torch.randn(part.shape) for part in torchs]
    found, expected = (torch.autograd.grad(parts, qkv, upstream)[0] for parts in (ours, torchs))
    assert torch.equal(found, expected)


def test_forward_allocates_nothing() -> None:
    qkv = torch.randn(BATCH, TOKENS, 3 * WIDTH, requires_grad=True)
    assert allocated(lambda: split_qkv(qkv, HEADS)) == []
    assert allocated(lambda: split(qkv, WIDTH, 2)) == []
    assert allocated(lambda: merge_heads(split_heads(qkv, HEADS))) == []


def test_gradients_of_heads_are_copied_once_where_torch_copies_them_twice() -> None:
    """Of contiguous (B, H, T, d), as products written by hand give them."""
    qkv = torch.randn(BATCH, TOKENS, 3 * WIDTH, requires_grad=True)
    upstream = [torch.randn(BATCH, HEADS, TOKENS, SIZE) for _ in range(3)]
    ours, torchs = split_qkv(qkv, HEADS), torch_qkv(qkv, HEADS, HEADS)
    assert allocated(lambda: torch.autograd.grad(torchs, qkv, upstream)) == [UNIT, UNIT, UNIT, 3 * UNIT]
    assert allocated(lambda: torch.autograd.grad(ours, qkv, upstream)) == [3 * UNIT]


def test_gradients_that_share_a_buffer_are_returned_as_a_view() -> None:
    qkv = torch.randn(BATCH, TOKENS, 3 * WIDTH, requires_grad=True)
    whole = torch.randn(BATCH, TOKENS, 3 * WIDTH)
    for parts, upstream in (
        (split_qkv(qkv, HEADS), torch_qkv(whole, HEADS, HEADS)),
        (split(qkv, WIDTH, 2), whole.split(WIDTH, 2)),
    ):
        found: list[Tensor] = []

        def step(parts: object = parts, upstream: object = upstream, found: list[Tensor] = found) -> list[Tensor]:
            found += torch.autograd.grad(parts, qkv, upstream)  # type: ignore[arg-type]
            return found

        assert allocated(step) == []
        assert found[0].data_ptr() == whole.data_ptr()
        assert torch.equal(found[0], whole)


def test_gradients_beside_each_other_in_another_order_are_no_whole() -> None:
    x = torch.randn(2, 6, requires_grad=True)
    whole = torch.randn(2, 6)
    upstream = tuple(reversed(whole.split(2, 1)))
    (found,) = torch.autograd.grad(split(x, 2, 1), x, upstream)
    assert torch.equal(found, torch.cat(upstream, 1))
    assert found.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


def test_one_gradient_for_all_parts_is_no_whole() -> None:
    """Edge case 11: what is added gets one and the same gradient; of a sum it is expanded, stride 0."""
    x = torch.randn(2, 6, requires_grad=True)
    same = torch.randn(2, 2)
    a, b, c = split(x, 2, 1)
    (found,) = torch.autograd.grad(a + b + c, x, same)
    assert torch.equal(found, same.repeat(1, 3))
    a, b, c = split(x, 2, 1)
    (found,) = torch.autograd.grad((a + b + c).sum(), x)
    assert torch.equal(found, torch.ones(2, 6))
    q, k, v = split_qkv(x.view(1, 2, 6), 1)
    (found,) = torch.autograd.grad((q + k + v).sum(), x)
    assert torch.equal(found, torch.ones(2, 6))


def test_a_part_that_nobody_uses_gets_zeros() -> None:
    x = torch.randn(2, 5, 9, requires_grad=True)
    with dirty_memory():
        (found,) = torch.autograd.grad(split(x, 3, 2)[1].sum(), x)
        (heads,) = torch.autograd.grad(split_qkv(x, 1)[2].sum(), x)
    expected = torch.zeros(2, 5, 9)
    expected[..., 3:6] = 1
    assert torch.equal(found, expected)
    assert torch.equal(heads, expected.roll(3, -1))


def test_merge_copies_only_where_the_strides_force_it() -> None:
    packed = torch.randn(BATCH, TOKENS, HEADS, SIZE, requires_grad=True)
    strided = packed.transpose(1, 2)
    assert merge_heads(strided).data_ptr() == packed.data_ptr()
    contiguous = torch.randn(BATCH, HEADS, TOKENS, SIZE, requires_grad=True)
    merged = merge_heads(contiguous)
    assert torch.equal(merged, contiguous.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))
    assert allocated(lambda: merge_heads(contiguous)) == [UNIT]
    assert allocated(lambda: torch.autograd.grad(merged, contiguous, torch.ones_like(merged))) == [UNIT]  # the ones


def test_backward_twice_and_retained_graph() -> None:
    """Edge case 3."""
    x = torch.randn(2, 5, 9, requires_grad=True)
    q, k, v = split_qkv(x, 1)
    total = (q * k * v).sum()
    (first,) = torch.autograd.grad(total, x, retain_graph=True)
    (second,) = torch.autograd.grad(total, x)
    assert torch.equal(first, second)


def test_gradients_are_left_alone() -> None:
    """Edge cases 2 and 4: nothing is written over what backward was given."""
    x = torch.randn(2, 5, 9, requires_grad=True)
    upstream = [torch.randn(2, 1, 5, 3) for _ in range(3)]
    before, versions = [g.clone() for g in upstream], [g._version for g in upstream]
    torch.autograd.grad(split_qkv(x, 1), x, upstream)
    assert [g._version for g in upstream] == versions
    assert all(torch.equal(a, b) for a, b in zip(upstream, before, strict=True))


def test_under_checkpoint() -> None:
    x = torch.randn(2, 5, 9, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        q, k, v = split_qkv(x, 1)
        return merge_heads(q * k * v)

    found, expected = (torch.autograd.grad(y.sum(), x)[0] for y in (checkpoint(run, x, use_reentrant=False), run(x)))
    assert torch.equal(found, expected)


def test_second_derivative_is_refused() -> None:
    """Edge case 19."""
    x = torch.randn(2, 5, 9, requires_grad=True)
    q, k, v = split_qkv(x, 1)
    (first,) = torch.autograd.grad((q * k * v).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# Dynamo makes an instance of every Function that it traces, of which torch itself warns; Inductor uses torch.jit.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_without_a_break(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edge case 9."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # Inductor's imports append to it

    def run(x: Tensor) -> Tensor:
        q, k, v = split_qkv(x, 2, kv_heads=1)
        a, b = split(x, [5, 7], 2)
        return merge_heads(q * k + v).sin().sum() + split_heads(a, 5).exp().sum() + b.cos().sum()

    x = torch.randn(2, 5, 12, requires_grad=True)
    torch.compiler.reset()
    (found,) = torch.autograd.grad(torch.compile(run, backend=backend, fullgraph=True)(x), x)
    (expected,) = torch.autograd.grad(run(x), x)
    torch.testing.assert_close(found, expected)


def test_bad_input_is_named() -> None:
    x = torch.randn(2, 5, 12)
    for function, message in (
        (lambda: split(x, [5, 5], 2), r"split: split_size_or_sections is \[5, 5\]; expected sizes that add up to 12"),
        (lambda: split(x, 0, 2), "split: split_size_or_sections is 0; expected a positive size"),
        (lambda: split(x, 3, 3), r"split: dim is 3; expected a dimension of tensor, which is of shape \(2, 5, 12\)"),
        (lambda: chunk(x, 0), "chunk: chunks is 0; expected a positive number"),
        (lambda: split_qkv(x, 5), r"split_qkv: qkv is of shape \(2, 5, 12\); expected a last dimension .* = 15"),
        (lambda: split_qkv(x, 4, kv_heads=3), "split_qkv: kv_heads is 3; expected a divisor of heads=4"),
        (lambda: split_qkv(x[0], 4), r"split_qkv: qkv is of shape \(5, 12\)"),
        (lambda: split_qkv(x.long(), 4), "split_qkv: qkv is of dtype int64; expected float32"),
        (lambda: split_heads(x, 5), "split_heads: heads is 5; expected a divisor of 12"),
        (lambda: merge_heads(x), r"merge_heads: x is of shape \(2, 5, 12\); expected \[batch, heads"),
    ):
        with pytest.raises(ValueError, match=message):
            function()
