"""Rotary position embedding, against what users write, in float64."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gradscope.kernels.rope import cpu, launch
from gradscope.kernels.rope.layout import rope_reference
from gradscope.recipes.rope import RotaryEmbedding, rope

from .accuracy import assert_as_accurate, dirty_memory

COMPILES = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own doing
BOTH = pytest.mark.parametrize("interleaved", [False, True])


def tables(tokens: int, pairs: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    rates = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * rates
    return angles.cos().to(dtype), angles.sin().to(dtype)


def by_hand(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """As Hugging Face's Llama and GPT-J write it; [tokens, pairs] tables."""
    if interleaved:
        doubled = [table.repeat_interleave(2, -1) for table in (cos, sin)]
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    else:
        doubled = [torch.cat((table, table), -1) for table in (cos, sin)]
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * doubled[0] + turned * doubled[1]


@BOTH
@pytest.mark.parametrize("rotary", [8, 6, 2])
def test_gradcheck(interleaved: bool, rotary: int) -> None:
    q = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, 1, 5, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = tables(9, rotary // 2, torch.float64)

    def function(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rope((q, k), cos, sin, interleaved=interleaved, rotary=rotary, offset=4)

    with dirty_memory():
        assert torch.autograd.gradcheck(function, (q, k))


def check(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, upstream: Tensor, backend: str) -> None:
    """Result and gradient, of the whole head, at most twice as far from float64 as what users write."""
    found, torchs, truth = [], [], []
    for into, function, kind in (
        (found, lambda x, c, s: rope(x, c, s, interleaved=interleaved, backend=backend), x.dtype),
        (torchs, lambda x, c, s: by_hand(x, c.to(x.dtype), s.to(x.dtype), interleaved), x.dtype),
        (truth, lambda x, c, s: by_hand(x, c, s, interleaved), torch.float64),
    ):
        leaf = x.detach().to(kind).requires_grad_()
        c, s = (table.double() if kind == torch.float64 else table for table in (cos, sin))
        with dirty_memory():
            out = function(leaf, c, s)
            into += [out.detach(), *torch.autograd.grad(out, leaf, upstream.to(kind))]
    for name, mine, other, true in zip(("output", "gradient"), found, torchs, truth, strict=True):
        assert_as_accurate(mine, other, true, name)


LAYOUTS = ("heads first", "tokens first", "packed", "features first")


def laid_out(layout: str, shape: tuple[int, int, int, int], device: torch.device) -> Tensor:
    batch, heads, tokens, size = shape
    return {
        "heads first": lambda: torch.randn(shape, device=device),
        "tokens first": lambda: torch.randn(batch, tokens, heads, size, device=device).transpose(1, 2),
        "packed": lambda: torch.randn(batch, tokens, 3, heads, size, device=device)[:, :, 1].transpose(1, 2),
        "features first": lambda: torch.randn(batch, heads, size, tokens, device=device).mT,
    }[layout]()


@settings(deadline=None, derandomize=True, max_examples=40, database=None)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 40), st.integers(1, 20)),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    interleaved=st.booleans(),
)
def test_any_shape_layout_and_dtype(
    shape: tuple[int, int, int, int], layout: str, dtype: torch.dtype, interleaved: bool
) -> None:
    """Edge cases 6 and 11."""
    batch, heads, tokens, pairs = shape
    x = laid_out(layout, (batch, heads, tokens, 2 * pairs), torch.device("cpu")).to(dtype)
    upstream = laid_out(LAYOUTS[pairs % 4], (batch, heads, tokens, 2 * pairs), torch.device("cpu")).to(dtype)
    table = torch.float64 if dtype == torch.float64 else torch.float32
    for backend in ("cpu", "torch"):
        check(x, *tables(tokens, pairs, table), interleaved, upstream, backend)


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_triton(triton_device: torch.device, interleaved: bool, layout: str, dtype: torch.dtype) -> None:
    x = laid_out(layout, (2, 3, 13, 10), triton_device).to(dtype)
    upstream = torch.randn(2, 3, 13, 10, device=triton_device).to(dtype)
    cos, sin = (table.to(triton_device) for table in tables(13, 5))
    check(x, cos, sin, interleaved, upstream, "triton")


@BOTH
@pytest.mark.parametrize("backend", ["cpu", "triton", "torch"])
def test_part_of_the_features_offset_and_positions(
    triton_device: torch.device, interleaved: bool, backend: str
) -> None:
    x = torch.randn(2, 3, 7, 11, device=triton_device, requires_grad=True)
    cos, sin = (table.to(triton_device) for table in tables(20, 3))
    upstream = torch.randn_like(x)
    positions = torch.randint(0, 20, (2, 7), device=triton_device)
    for settings_, c, s in (
        ({"offset": 5}, cos[5:12], sin[5:12]),
        ({"positions": positions[0]}, cos[positions[0]], sin[positions[0]]),
        ({"positions": positions}, cos[positions][:, None], sin[positions][:, None]),
    ):
        with dirty_memory():
            out = rope(x, cos, sin, interleaved=interleaved, backend=backend, **settings_)
            (found,) = torch.autograd.grad(out, x, upstream)
        expected = torch.cat((by_hand(x[..., :6], c, s, interleaved), x[..., 6:]), -1)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(found, torch.autograd.grad(expected, x, upstream)[0])


@BOTH
def test_tables_of_every_form_are_the_same(interleaved: bool) -> None:
    """Pairs, doubled as Hugging Face builds them, and one a sample."""
    x = torch.randn(2, 3, 7, 8)
    cos, sin = tables(7, 4)
    expected = rope(x, cos, sin, interleaved=interleaved)
    double = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat((t, t), -1))
    assert torch.equal(rope(x, double(cos), double(sin), interleaved=interleaved), expected)
    assert torch.equal(rope(x, cos.expand(2, 7, 4), sin.expand(2, 7, 4), interleaved=interleaved), expected)
    part = rope(x, cos, sin, interleaved=interleaved, rotary=4 if interleaved else 8)[..., :2]
    assert part.shape == (2, 3, 7, 2)


@pytest.mark.parametrize("heads_at", [1, 2])
@pytest.mark.parametrize("batch", [1, 2])
def test_a_table_may_have_a_dimension_for_the_heads(heads_at: int, batch: int) -> None:
    """[1, tokens, 1, pairs] as nanochat keeps it, or [batch, 1, tokens, pairs] as Hugging Face unsqueezes it."""
    x, (cos, sin) = torch.randn(2, 3, 7, 8), tables(7, 4)
    given = [table.expand(batch, 7, 4).unsqueeze(heads_at) for table in (cos, sin)]
    torch.testing.assert_close(rope(x, *given), rope(x, cos, sin))


def test_halves_of_a_doubled_table_for_part_of_the_head() -> None:
    x = torch.randn(2, 3, 7, 16)
    cos, sin = tables(7, 4)
    doubled = [torch.cat((table, table), -1) for table in (cos, sin)]
    assert torch.equal(rope(x, *doubled, rotary=8), rope(x, cos, sin))


@BOTH
def test_the_reference_is_what_users_write(interleaved: bool) -> None:
    x = torch.randn(2, 3, 7, 8, dtype=torch.float64)
    cos, sin = tables(7, 4, torch.float64)
    truth = rope_reference(x, cos[None, None], sin[None, None], interleaved)
    torch.testing.assert_close(truth, by_hand(x, cos, sin, interleaved))
    if interleaved:
        turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.complex(cos, sin)
        torch.testing.assert_close(truth, torch.view_as_real(turned).flatten(-2))


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_tokens_at_a_time(interleaved: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 7, 8).to(dtype)
    expected = rope(x, *tables(7, 4), interleaved=interleaved)
    monkeypatch.setattr(cpu, "SCRATCH_BYTES", 2 * 2 * 3 * 8 * 4)
    with dirty_memory():
        assert torch.equal(rope(x, *tables(7, 4), interleaved=interleaved), expected)


def odd_offset(x: Tensor) -> Tensor:
    memory = torch.empty(x.numel() + 1)
    return memory[1:].view_as(x).copy_(x)


@pytest.mark.parametrize(
    "laid",
    [
        odd_offset,
        lambda x: torch.nn.functional.pad(x, (0, 1))[..., :-1],  # rows of an odd length
        lambda x: x.mT.contiguous().mT,  # neighbours apart
        lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,  # a negative view
        lambda x: x[:, :1].expand(2, 3, 7, 8),
    ],
)
def test_pairs_that_are_no_complex_numbers_in_memory(laid: Callable[[Tensor], Tensor]) -> None:
    """Edge case 11."""
    given = laid(torch.randn(2, 3, 7, 8))
    x = given.detach().clone().requires_grad_()
    expected = by_hand(x, *tables(7, 4), True)
    (gradient,) = torch.autograd.grad(expected, x, given)
    torch.testing.assert_close(rope(given, *tables(7, 4), interleaved=True), expected)
    torch.testing.assert_close(torch.autograd.grad(rope(x, *tables(7, 4), interleaved=True), x, given)[0], gradient)


def test_layout_of_the_result_lets_heads_merge_without_a_copy() -> None:
    x = torch.randn(2, 7, 3, 8).transpose(1, 2)
    out = rope(x, *tables(7, 4))
    assert out.transpose(1, 2).is_contiguous()
    assert rope(x.contiguous(), *tables(7, 4)).is_contiguous()


def test_only_tables_are_saved_and_nothing_given_changes() -> None:
    """Edge cases 2, 3 and 4."""
    q, k = (torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(2))
    cos, sin = tables(7, 4)
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        a, b = rope((q, k), cos, sin)
    assert [t.data_ptr() for t in saved] == [cos.data_ptr(), sin.data_ptr()]
    upstream = (torch.randn_like(a), torch.randn_like(b))
    before = [t.detach().clone() for t in (q, k, cos, sin, a, b, *upstream)]
    first = torch.autograd.grad((a, b), (q, k), upstream, retain_graph=True)
    second = torch.autograd.grad((a, b), (q, k), upstream)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(before, (q, k, cos, sin, a, b, *upstream), strict=True))


def test_only_the_gradient_that_is_wanted() -> None:
    q, k = torch.randn(2, 3, 7, 8, requires_grad=True), torch.randn(2, 3, 7, 8)
    a, b = rope((q, k), *tables(7, 4))
    assert torch.autograd.grad(a.sum() + b.sum(), q)[0].shape == q.shape
    q, k = (torch.randn(2, 3, 7, 8, requires_grad=True) for _ in range(2))
    a, _ = rope((q, k), *tables(7, 4))
    assert torch.autograd.grad(a.sum(), (q, k), allow_unused=True)[1] is None
    with torch.no_grad():
        assert not rope(q, *tables(7, 4)).requires_grad


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False), (True, True)])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=COMPILES)])
def test_what_is_turned_wants_a_gradient_where_it_did(wanted: tuple[bool, bool], compiled: bool) -> None:
    """One node for both says so of each, and of neither there is a graph without a break."""
    given = tuple(torch.randn(2, 3, 7, 8, requires_grad=each) for each in wanted)

    def run(q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        return rope((q, k), *tables(7, 4), backend="cpu")

    torch.compiler.reset()
    found = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(*given)
    assert tuple(each.requires_grad for each in found) == wanted
    for each, turned in zip(given, found, strict=True):
        alone = rope(each, *tables(7, 4), backend="torch")
        torch.testing.assert_close(turned, alone)
        if each.requires_grad:
            upstream = torch.randn_like(turned)
            ours = torch.autograd.grad(turned, each, upstream, retain_graph=True)
            torch.testing.assert_close(ours, torch.autograd.grad(alone, each, upstream))


@pytest.mark.parametrize("tokens", [7, 600])
@pytest.mark.parametrize("doubled", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_that_are_learnt_get_their_gradient(interleaved: bool, doubled: bool, tokens: int) -> None:
    """Of a doubled table each half its own."""
    x, upstream = (torch.randn(2, 20, tokens, 8, dtype=torch.float64) for _ in range(2))
    angles = torch.randn(tokens, 8 if doubled else 4, dtype=torch.float64)
    leaves = [x.clone().requires_grad_(), angles.cos().requires_grad_(), angles.sin().requires_grad_()]
    found = rope(*leaves, interleaved=interleaved)
    if doubled:
        a, b = (leaves[0][..., ::2], leaves[0][..., 1::2]) if interleaved else leaves[0].chunk(2, -1)
        other = torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)
        expected = leaves[0] * leaves[1] + other * leaves[2]
    else:
        expected = by_hand(*leaves, interleaved)
    torch.testing.assert_close(found, expected)
    for mine, true in zip(*(torch.autograd.grad(y, leaves, upstream) for y in (found, expected)), strict=True):
        torch.testing.assert_close(mine, true)


def test_expanded_gradient() -> None:
    """Edge case 11."""
    x = torch.randn(2, 3, 7, 8, requires_grad=True)
    cos, sin = tables(7, 4)
    found, expected = (torch.autograd.grad(y.sum(), x)[0] for y in (rope(x, cos, sin), by_hand(x, cos, sin, False)))
    torch.testing.assert_close(found, expected)


def test_under_checkpoint_and_autocast() -> None:
    """Edge case 8: not on autocast's lists, each tensor keeps its dtype."""
    x = torch.randn(2, 3, 7, 8, requires_grad=True)
    cos, sin = tables(7, 4)
    out = checkpoint(lambda x: rope(x, cos, sin).square(), x, use_reentrant=False)
    (found,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(found, 2 * x.detach())  # a rotation keeps lengths
    with torch.autocast("cpu", torch.bfloat16):
        assert rope(x, cos, sin).dtype == torch.float32
        assert rope(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_deterministic_mode_is_fine() -> None:
    """Edge case 19."""
    x = torch.randn(2, 3, 7, 8, requires_grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        rope(x, *tables(7, 4)).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


@COMPILES
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # Inductor imports a user of it
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles_without_a_break(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edge case 9."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # Inductor's imports append to it
    module = RotaryEmbedding(8, 20)
    q, k = (torch.randn(2, 7, 3, 8, requires_grad=True) for _ in range(2))

    def function(q: Tensor, k: Tensor) -> Tensor:
        a, b = module(q.transpose(1, 2), k.transpose(1, 2), 3)
        return (a * b).sin().sum()

    torch.compiler.reset()
    found = torch.autograd.grad(torch.compile(function, backend=backend, fullgraph=True)(q, k), (q, k))
    for ours, expected in zip(found, torch.autograd.grad(function(q, k), (q, k)), strict=True):
        torch.testing.assert_close(ours, expected)


def test_module_has_exact_tables_and_no_state() -> None:
    module = RotaryEmbedding(4, 100_001)
    assert not module.state_dict()
    angles = 100_000 * torch.tensor([1.0, 0.01], dtype=torch.float64)
    assert torch.equal(module.cos[-1], angles.cos().float()) and torch.equal(module.sin[-1], angles.sin().float())
    q, k = torch.randn(1, 2, 3, 6), torch.randn(1, 1, 3, 6)
    a, b = module(q, k, offset=2)
    assert torch.equal(a, rope(q, module.cos[2:5], module.sin[2:5], rotary=4))
    assert torch.equal(b[..., 4:], k[..., 4:])
    assert repr(module) == "RotaryEmbedding(4, 100001, interleaved=False)"
    with pytest.raises(ValueError, match="size is 5; expected a positive even number"):
        RotaryEmbedding(5, 10)


def test_explain() -> None:
    choice = rope.explain(torch.randn(1, 2, 3, 4), *tables(3, 2))
    assert choice.backend == "cpu" and choice.refused == {"triton": "Triton has no cpu backend"}
    assert choice.reason == "a multiplication and two fused multiply-adds into the result"
    turned = rope.explain(torch.randn(1, 2, 3, 4), *tables(3, 2), interleaved=True)
    assert turned.reason == "a complex multiplication: interleaved pairs are complex numbers in memory"


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("pairs", [1, 5, 32, 64, 128, 300])
def test_triton_moves_whole_pieces(pairs: int, element_size: int) -> None:
    """A thread has 16 bytes of each half of a head, unless tokens are few, or pairs."""
    block = launch.block_of(4096, pairs, element_size)
    numbers = block * (1 << (pairs - 1).bit_length())
    assert numbers * element_size // 128 == 16 or block == 64 or block == 1
    assert launch.block_of(3, pairs, element_size) <= 4


@pytest.mark.parametrize("interleaved", [False, True])
def test_triton_where_tokens_lie_far_apart(triton_device: torch.device, interleaved: bool) -> None:
    """Offsets within a program's tokens beyond 2^31; the memory between them is never touched."""
    x = torch.randn(1, 2, 17, 8, dtype=torch.float16, device=triton_device)
    apart = (1 << 27) + 8
    far = torch.empty(18 * apart, dtype=torch.float16, device=triton_device)
    spread = far.as_strided((1, 2, 17, 8), (1, 8, apart, 1)).copy_(x)
    cos, sin = (table.to(triton_device)[None, None] for table in tables(17, 4))
    for one, other in zip(
        launch.rotated([x], cos, sin, interleaved, 1, "triton"),
        launch.rotated([spread], cos, sin, interleaved, 1, "triton"),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [None, 4])
@pytest.mark.parametrize("change", ["in place", "data", "another"])
def test_a_doubled_table_whose_halves_differ_later(interleaved: bool, rotary: int | None, change: str) -> None:
    """Each feature is turned by its own number, as by hand; and the fast way again once they agree."""
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    width = rotary or 8
    angles = torch.randn(5, width // 2, dtype=torch.float64)
    full = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    cos, sin = full.cos(), full.sin()

    def by_hand(cos: Tensor, sin: Tensor) -> Tensor:
        part = x[..., :width]
        a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
        other = torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)
        return torch.cat((part * cos + other * sin, x[..., width:]), -1)

    def check(cos: Tensor, sin: Tensor) -> None:
        made, wanted = rope(x, cos, sin, interleaved=interleaved, rotary=rotary), by_hand(cos, sin)
        torch.testing.assert_close(made, wanted)
        upstream = torch.randn_like(made)
        torch.testing.assert_close(
            *(torch.autograd.grad(each, x, upstream)[0] for each in (made, wanted)), rtol=1e-7, atol=1e-9
        )

    check(cos, sin)
    other = sin.clone()
    other[3, -1] += 0.5
    if change == "in place":
        sin.copy_(other)
    elif change == "data":
        sin.data = other
    else:
        sin = other
    check(cos, sin)
    sin.copy_(full.sin())
    check(cos, sin)
