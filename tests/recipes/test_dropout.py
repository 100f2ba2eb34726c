"""Dropout by seed: its numbers, its derivatives, its statistics."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradscope.kernels.dropout import cpu
from gradscope.kernels.dropout.counter import FIRST, NEXT_BLOCK, SECOND, THIRD, Bits, signed, threshold
from gradscope.kernels.dropout.launch import dropout as launch
from gradscope.recipes.dropout import Dropout, dropout

from .accuracy import dirty_memory

# Dynamo makes an instance of every Function that it traces, of which torch itself warns.
COMPILES = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
COUNT = 1 << 20


def by_hand(index: int, seed: int) -> int:
    """The hash in plain integers, as a signed number."""
    low, high, whole = seed % 2**32, (seed >> 32) % 2**32, 2**32 - 1
    h = (index ^ low + NEXT_BLOCK * (index >> 32)) * FIRST & whole
    h ^= h >> 15
    h = (h ^ high) * SECOND & whole
    h ^= h >> 16
    return signed(h * THIRD & whole)


def mask(seed: int, p: float, count: int = COUNT) -> Tensor:
    """1 where an element is dropped, less ``p``, over its standard deviation."""
    dropped = cpu.dropout(torch.ones(count), torch.tensor(seed), p) == 0
    return (dropped.double() - p) / math.sqrt(p * (1 - p))


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF])
@pytest.mark.parametrize("start", [0, 1 << 18, 2**32 - (1 << 18), 2**32, 3 * 2**33])
def test_the_hash_is_the_documented_one(seed: int, start: int) -> None:
    """Edge case 5: also beyond 2^31 and 2^32 elements."""
    bits, expected = Bits(seed, 5), [by_hand(start + i, seed) for i in range(5)]
    for limit in sorted(expected):
        assert bits.below(limit, start, 5).tolist() == [value < limit for value in expected]


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, -1, 1 << 32, 987654321987654321])
def test_statistics(seed: int, p: float) -> None:
    """Edge case 14. Each sum is normal with variance 1; beyond 5 is one in two million, and there are 400 here."""
    values = mask(seed, p)
    found = {"rate": values.sum() / math.sqrt(COUNT)}
    for lag in (1, 2, 3, 4, 8, 64, 768, 1024, 4096, 1 << 16):
        found[f"lag {lag}"] = (values[:-lag] * values[lag:]).sum() / math.sqrt(COUNT - lag)
    for name, other in (("next seed", seed + 1), ("next high half", seed + (1 << 32)), ("mirrored", ~seed)):
        found[name] = (values * mask(other, p)).sum() / math.sqrt(COUNT)
    for dim in (0, 1):  # sums over 1024 rows or columns: chi-square of as many degrees of freedom
        sums = values.view(1024, 1024).sum(dim).square() / 1024
        found[f"dimension {dim}"] = (sums.sum() - 1024) / math.sqrt(2 * 1024)
    assert {name: value.item() for name, value in found.items() if abs(value) > 5} == {}


def test_no_period_stands_out() -> None:
    """Of half a million independent exponential powers the largest is above 30 once in 20 million times."""
    assert torch.fft.rfft(mask(5, 0.5)).abs().square()[1:-1].max() / COUNT < 30


@pytest.mark.parametrize("p", [1e-9, 0.25, 1 - 1e-9])
def test_threshold(p: float) -> None:
    assert (threshold(p) + 2**31) / 2**32 == pytest.approx(p, abs=2**-32)
    assert -(2**31) <= threshold(p) < 2**31


def test_kept_elements_are_scaled_and_others_zero() -> None:
    x = torch.randn(3, 1000)
    found = dropout(x, 0.25)
    assert torch.equal(found, torch.where(found == 0, 0, x * (1 / 0.75)))
    assert dropout(torch.full((1000,), math.inf), 0.5).isnan().sum() == 0


def test_chunks_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    x, seed = torch.ones(1000), torch.tensor(7)
    whole = cpu.dropout(x, seed, 0.5)
    monkeypatch.setattr(cpu, "CHUNK", 64)
    with dirty_memory():
        assert torch.equal(cpu.dropout(x, seed, 0.5), whole)


def test_every_call_drops_others_and_a_seed_repeats_them() -> None:
    """Edge case 14: a seed per call, from torch's generator."""
    x = torch.ones(1000)
    first, second = dropout(x), dropout(x)
    assert not torch.equal(first, second)
    torch.manual_seed(0)
    assert torch.equal(dropout(x), first)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_gradcheck_of_both_derivatives(p: float) -> None:
    """Edge cases 1 and 14: backward drops what forward dropped."""
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)

    def seeded(tensor: Tensor) -> Tensor:
        torch.manual_seed(3)
        return dropout(tensor, p)

    assert torch.autograd.gradcheck(seeded, x)
    assert torch.autograd.gradgradcheck(lambda tensor: seeded(tensor.pow(3)), x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_drops_the_same(reentrant: bool) -> None:
    """Edge case 14: under checkpointing."""
    x = torch.ones(1000, requires_grad=True)
    found = checkpoint(lambda tensor: dropout(tensor * 1.0), x, use_reentrant=reentrant)
    found.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, found.detach())


@settings(deadline=None, derandomize=True, max_examples=30, database=None)
@given(
    shape=st.lists(st.integers(0, 6), max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    layout=st.sampled_from(["contiguous", "transposed", "expanded"]),
    p=st.floats(0.01, 0.99),
)
def test_any_shape_stride_and_dtype(shape: list[int], dtype: torch.dtype, layout: str, p: float) -> None:
    """Edge cases 6 and 11: nothing at all, strided inputs, expanded gradients."""
    x = torch.randn(shape).to(dtype)
    if layout == "transposed":
        x = x.permute(tuple(reversed(range(x.dim()))))
    elif layout == "expanded":
        x = torch.ones((), dtype=dtype).expand(shape)
    x = x.detach().requires_grad_()
    found = dropout(x, p)
    assert found.shape == x.shape and found.dtype == dtype
    upstream = torch.ones((), dtype=dtype).expand(x.shape)
    (gradient,) = torch.autograd.grad(found, x, upstream)
    scale = torch.tensor(1 / (1 - p)).to(dtype)
    dropped = gradient == 0
    torch.testing.assert_close(gradient, torch.where(dropped, 0, scale).to(dtype))
    torch.testing.assert_close(found.detach(), torch.where(dropped, 0, x.detach() * (1 / (1 - p))).to(dtype))


def test_a_retained_graph_gives_the_same_twice_and_inputs_stay() -> None:
    """Edge cases 2, 3 and 4."""
    x, upstream = torch.randn(50, requires_grad=True), torch.randn(50)
    before = x.detach().clone(), upstream.clone()
    found = dropout(x) + x
    first = torch.autograd.grad(found, x, upstream, retain_graph=True)
    assert torch.equal(first[0], torch.autograd.grad(found, x, upstream)[0])
    assert torch.equal(x.detach(), before[0]) and torch.equal(upstream, before[1])


def test_only_a_seed_is_kept() -> None:
    found = dropout(torch.randn(1000, requires_grad=True))
    (kept,) = found.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert kept.shape == () and kept.dtype == torch.int64


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (0.5, False), (1.0, True)])
def test_where_nothing_is_random_it_is_torchs(p: float, training: bool) -> None:
    """Edge cases 14 and 17: off in eval; no number is drawn."""
    x, state = torch.randn(10), torch.get_rng_state()
    assert dropout.explain(x, p, training).backend == "torch"
    assert torch.equal(dropout(x, p, training), functional.dropout(x, p, training))
    assert torch.equal(torch.get_rng_state(), state) or p == 1
    y = x.clone()
    assert dropout(y, 0.5, True, inplace=True) is y


@COMPILES
def test_compiles_in_one_graph() -> None:
    """Edge case 9."""
    x = torch.ones(1000, requires_grad=True)
    compiled = torch.compile(dropout, fullgraph=True, backend="aot_eager")
    found = compiled(x, 0.25)
    (gradient,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(gradient, found.detach())
    assert 0.6 < (found != 0).float().mean() < 0.9  # 0.75, with 11 standard deviations
    assert not torch.equal(compiled(x, 0.25), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 1023, 3000])
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, of products that are to wrap
def test_triton_gives_the_same(triton_device: torch.device, dtype: torch.dtype, count: int) -> None:
    """Edge case 11, too: a strided input."""
    x = torch.randn(2, count).to(dtype).t()
    for seed in (0, -5, 2**62 + 12345):
        scalar = torch.tensor(seed)
        with dirty_memory():
            found = launch(x.to(triton_device), scalar.to(triton_device), 0.3, "triton")
        torch.testing.assert_close(found.cpu(), cpu.dropout(x, scalar, 0.3))


@COMPILES
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # as above
def test_triton_backward_and_compile(triton_device: torch.device) -> None:
    x = torch.ones(3000, device=triton_device, requires_grad=True)
    for function in (dropout, torch.compile(dropout, fullgraph=True, backend="aot_eager")):
        found = function(x, 0.3, backend="triton")
        (gradient,) = torch.autograd.grad(found.sum(), x)
        assert torch.equal(gradient, found.detach())


def test_the_module_is_a_drop_in() -> None:
    module = Dropout(0.3)
    assert repr(module) == repr(nn.Dropout(0.3))
    twin = pickle.loads(pickle.dumps(copy.deepcopy(module))).eval()
    x = torch.randn(1000)
    assert torch.equal(twin(x), x)
    assert 0.1 < (module(x) == 0).float().mean() < 0.5  # 0.3, with 13 standard deviations


def test_explain_says_why() -> None:
    x = torch.randn(3)
    assert str(dropout.explain(x)).splitlines()[1] == "not triton: Triton has no cpu backend"
    assert dropout.explain(x, training=False).refused["cpu"] == "nothing is random: training is off"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dropout(torch.ones(3, dtype=torch.int64)), "dropout: input is of dtype int64; expected float32"),
        (lambda: dropout(torch.ones(3), 1.5), "dropout: p is 1.5; expected a number in [0, 1]"),
        (lambda: dropout(torch.ones(3), math.nan), "dropout: p is nan; expected a number in [0, 1]"),
        (
            lambda: dropout(torch.ones(3), backend="triton"),
            "backend='triton' cannot run here: Triton has no cpu backend",
        ),
        (lambda: Dropout(-1), "Dropout: p is -1; expected a number in [0, 1]"),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert message in str(raised.value)
