"""Rotations of what is no plain table or tensor in memory, on each way to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradscope.kernels.rope.layout import rope_reference
from gradscope.recipes import RotaryEmbedding, rope

BATCH, HEADS, TOKENS, SIZE = 2, 3, 5, 8
EVERY_WAY = pytest.mark.parametrize("backend", ["cpu", "torch"])
BOTH = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def tables(positions: int = TOKENS, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    angles = torch.arange(positions)[:, None] * torch.linspace(0.1, 1.0, SIZE // 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def doubled(table: Tensor, interleaved: bool) -> Tensor:
    return table.repeat_interleave(2, -1) if interleaved else torch.cat((table, table), -1)


def negated() -> Tensor:
    """A view whose numbers torch negates when they are read: the imaginary part of a conjugate."""
    numbers = torch.randn(BATCH, HEADS, TOKENS, SIZE, 1, dtype=torch.complex64)
    x = numbers.squeeze(-1).conj().imag
    assert x.is_neg()
    return x


def packed_negated() -> Tensor:
    x = torch._neg_view(torch.randn(BATCH, HEADS, TOKENS, SIZE))
    assert x.is_neg() and x.stride(3) == 1
    return x


def half_negated() -> Tensor:
    """Torch's copy of such a view into float32 forgets the sign."""
    x = torch._neg_view(torch.randn(BATCH, HEADS, TOKENS, SIZE).half())
    assert x.is_neg()
    return x


def shifted() -> Tensor:
    """It begins at an odd place, and all strides are even."""
    x = torch.randn(BATCH * HEADS * TOKENS * SIZE + 1)[1:].view(BATCH, HEADS, TOKENS, SIZE)
    assert x.storage_offset() % 2
    return x


@pytest.mark.parametrize("make", [negated, packed_negated, half_negated, shifted])
@EVERY_WAY
@BOTH
def test_what_is_no_plain_memory(make: Any, backend: str, interleaved: bool) -> None:
    x, (cos, sin) = make(), tables()
    expected = rope_reference(x, cos[None, None], sin[None, None], interleaved)
    found = rope(x, cos, sin, interleaved=interleaved, backend=backend)
    torch.testing.assert_close(found, expected)


@BOTH
def test_a_table_that_counts_no_versions(interleaved: bool) -> None:
    x = torch.randn(BATCH, HEADS, TOKENS, SIZE)
    cos, sin = tables()
    with torch.inference_mode():
        given = [doubled(each, interleaved) for each in (cos, sin)]
    found = rope(x, *given, interleaved=interleaved, backend="cpu")
    torch.testing.assert_close(found, rope_reference(x, cos[None, None], sin[None, None], interleaved))


@pytest.mark.measured_sizes
@pytest.mark.parametrize("positions", [TOKENS, TOKENS + 3])
@pytest.mark.parametrize("twice", [False, True])
@BOTH
def test_few_by_each_kind_of_table(positions: int, twice: bool, interleaved: bool) -> None:
    """The first positions are those of the tokens."""
    x, (cos, sin) = torch.randn(BATCH, HEADS, TOKENS, SIZE), tables(positions)
    given = [doubled(each, interleaved) if twice else each for each in (cos, sin)]
    found = rope(x, *given, interleaved=interleaved)
    expected = rope_reference(x, cos[None, None, :TOKENS], sin[None, None, :TOKENS], interleaved)
    torch.testing.assert_close(found, expected)


@EVERY_WAY
@BOTH
def test_halves_are_turned_in_float32(backend: str, interleaved: bool) -> None:
    """Rounded once: to the result."""
    x, (cos, sin) = torch.randn(BATCH, HEADS, TOKENS, SIZE).bfloat16(), tables(dtype=torch.bfloat16)
    expected = rope_reference(x.float(), cos[None, None].float(), sin[None, None].float(), interleaved)
    found = rope(x, cos, sin, interleaved=interleaved, backend=backend)
    assert torch.equal(found, expected.bfloat16()) or (found - expected).abs().max() <= 2**-8 * expected.abs().max()


@EVERY_WAY
@BOTH
def test_queries_and_keys_of_two_dtypes_and_one_gradient(backend: str, interleaved: bool) -> None:
    """Each is turned in its own precision; what gets no gradient costs none."""
    q = torch.randn(BATCH, HEADS, TOKENS, SIZE, dtype=torch.float64, requires_grad=True)
    k = torch.randn(BATCH, 1, TOKENS, SIZE)
    cos, sin = tables()
    turned, other = rope((q, k), cos, sin, interleaved=interleaved, backend=backend)
    assert (turned.dtype, other.dtype) == (torch.float64, torch.float32)
    wide = (cos[None, None].double(), sin[None, None].double())
    torch.testing.assert_close(turned, rope_reference(q, *wide, interleaved), rtol=1e-12, atol=1e-12)
    (back,) = torch.autograd.grad(turned, q, turned.detach())
    torch.testing.assert_close(back, q.detach(), rtol=1e-6, atol=1e-6)  # as exact as the tables are unit vectors
    assert not other.requires_grad


def test_angles_far_out_are_exact() -> None:
    module = RotaryEmbedding(SIZE, 100_001)
    rates = 10000.0 ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
    torch.testing.assert_close(module.cos[-1].double(), (100_000 * rates).cos(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "cpu", "torch"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_integers(backend: str, interleaved: bool) -> None:
    """A quarter turn, say: what they are multiplied with says the dtype."""
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    cos, sin = torch.randint(-1, 2, (5, 4)), torch.randint(-1, 2, (5, 4))
    options = {"interleaved": interleaved, "promote": True, "backend": backend}
    found, expected = rope(x, cos, sin, **options), rope(x, cos.double(), sin.double(), **options)
    torch.testing.assert_close(found, expected)
    assert found.dtype is torch.float64


@pytest.mark.measured_sizes
@pytest.mark.parametrize("shape", [(2, 5, 4), (2, 1, 5, 4)])
def test_tables_of_more_sequences_than_there_are(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="rope"):
        rope(torch.randn(1, 2, 5, 8), torch.randn(shape), torch.randn(shape))
