"""Edge case 5, of every Triton kernel: tensors of more than 2^31 elements, by their strides and by their programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradscope import recipes
from gradscope.kernels.cross_entropy.launch import losses_by
from gradscope.kernels.cross_entropy.terms import Terms
from gradscope.kernels.dropout import counter
from gradscope.kernels.dropout.launch import dropout
from gradscope.kernels.gated import launch as gated
from gradscope.kernels.gelu import triton_launch as gelu
from gradscope.kernels.heads import layout
from gradscope.kernels.norm import triton_launch as norm
from gradscope.kernels.scaling import launch as scaling

from .far_memory import FAR, Programs, programs, spread, zeros

__all__ = ["programs"]  # a fixture

ROWS, COLUMNS = (1 << 19) + 3, 4096  # more than 2^31 elements
SEED = torch.tensor(12345)
EXACT = {"rtol": 0, "atol": 0}
# Of float32 against bfloat16, whose results have 8 bits; the kernels compute in float32.
ROUNDED = {"rtol": 2**-7, "atol": 2**-7}
hashes_wrap = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, as they are to


def tail(*last: Tensor) -> list[Tensor]:
    """[ROWS, COLUMNS] each, of zeros but for the last rows, which are these."""
    found = []
    for rows in last:
        far = zeros(ROWS, COLUMNS)
        far[-rows.shape[0] :] = rows
        found.append(far)
    return found


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def test_a_kernel_in_32_bits_is_found(programs: Programs) -> None:
    """The check can fail."""
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # where the interpreter looks for it

    @triton.jit
    def narrow(x, row):  # type: ignore[no-untyped-def]
        tl.store(x + tl.program_id(0) * row + tl.arange(0, 16), 1.0)

    @triton.jit
    def wide(x, row):  # type: ignore[no-untyped-def]
        tl.store(x + tl.program_id(0).to(tl.int64) * row + tl.arange(0, 16), 1.0)

    x = zeros(ROWS, COLUMNS)
    programs.last_only = True
    wide[(ROWS,)](x, COLUMNS)
    assert x[-1, :17].tolist() == [1.0] * 16 + [0.0]
    with pytest.raises(IndexError, match="outside of the kernel's arguments"):
        narrow[(ROWS,)](x, COLUMNS)


def test_scaling(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.last_only = True
    monkeypatch.setattr(scaling, "_PROGRAMS", 1 << 30)  # so that the last has the last block alone
    x = zeros(FAR)
    x[-3:] = torch.tensor([1.0, 2.0, 3.0])
    scaling.scale_in_place(x, torch.tensor(2.0), backend="triton")
    assert x[-4:].tolist() == [0.0, 2.0, 4.0, 6.0]


@hashes_wrap
def test_dropout(programs: Programs) -> None:
    programs.last_only = True
    x = zeros(FAR)
    x[-64:] = 1.0
    found = dropout(x, SEED, 0.5, "triton")[-64:]
    # The elements from 2^31 on.
    dropped = counter.Bits(int(SEED), 64).below(counter.threshold(0.5), 1 << 31, 64)
    assert torch.equal(found, torch.where(dropped, 0.0, 2.0).bfloat16())


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_bias_gelu(programs: Programs, approximate: str) -> None:
    programs.last_only = True
    last, bias, upstream = drawn(3, COLUMNS), drawn(COLUMNS), drawn(3, COLUMNS)
    block = slice(COLUMNS - gelu.COLUMNS, None)  # of the last program
    pre = (last.float() + bias.float()).requires_grad_()
    expected = functional.gelu(pre, approximate=approximate)
    (slope,) = torch.autograd.grad(expected, pre, upstream.float())
    far, given = tail(last, upstream)
    found = gelu.forward(far, bias, approximate)
    torch.testing.assert_close(found[-3:, block].float(), expected[:, block].detach(), **ROUNDED)
    gradient, _ = gelu.backward(given, far, bias, approximate)
    torch.testing.assert_close(gradient[-3:, block].float(), slope[:, block], **ROUNDED)


@pytest.mark.parametrize(
    ("activation", "plain"),
    [("silu", functional.silu), ("gelu", functional.gelu), ("gelu_tanh", partial(functional.gelu, approximate="tanh"))],
)
def test_gated(programs: Programs, activation: str, plain: Callable[[Tensor], Tensor]) -> None:
    programs.last_only = True
    rows, upstream = (drawn(1, COLUMNS).float().requires_grad_() for _ in range(2)), drawn(1, COLUMNS)
    gate, up = rows
    block = slice(COLUMNS - gated._BLOCK, None)
    expected = plain(gate) * up
    slopes = torch.autograd.grad(expected, (gate, up), upstream.float())
    far_gate, far_up, given = tail(gate.detach().bfloat16(), up.detach().bfloat16(), upstream)
    found = gated.forward(far_gate, far_up, "triton", activation)
    torch.testing.assert_close(found[-1:, block].float(), expected[:, block].detach(), **ROUNDED)
    gradients = gated.backward(given, far_gate, far_up, "triton", activation)
    for gradient, slope in zip(gradients, slopes, strict=True):
        torch.testing.assert_close(gradient[-1:, block].float(), slope[:, block], **ROUNDED)


@hashes_wrap
@pytest.mark.parametrize("p", [0.0, 0.5])
@pytest.mark.parametrize("centred", [False, True])
def test_norm(programs: Programs, centred: bool, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    programs.last_only = True
    monkeypatch.setattr(norm, "WARPS", 1 << 20)  # so that one has few rows
    x, residual, upstream, passed = (drawn(1, COLUMNS) for _ in range(4))
    seed, keep = None, torch.ones(COLUMNS)
    if p:
        seed, start = SEED, (ROWS - 1) * COLUMNS
        whole = start // counter.CHUNK * counter.CHUNK
        bits = counter.Bits(int(SEED), counter.CHUNK).below(counter.threshold(p), whole, counter.CHUNK)
        keep = (~bits[start - whole :][:COLUMNS]).float() / (1 - p)
    far = tail(x, residual, upstream, passed)
    output, stream, means, factors = norm.forward(far[0], far[1], None, None, seed, 1e-5, p, centred)
    h = stream[-1:].float()
    torch.testing.assert_close(h, residual.float() + x.float() * keep, **ROUNDED)
    h.requires_grad_()
    normal = functional.layer_norm(h, (COLUMNS,)) if centred else functional.rms_norm(h, (COLUMNS,), eps=1e-5)
    torch.testing.assert_close(output[-1:].float(), normal.detach(), **ROUNDED)
    (slope,) = torch.autograd.grad(normal, h, upstream.float())
    slope = slope + passed.float()
    # Of all rows only the last has a mean and a factor: the others are as memory is, which is 0 only where it is new.
    means[:-1], factors[:-1] = 0, 0
    found, of_x, _, _ = norm.backward(far[2], far[3], stream, None, seed, means, factors, p, centred, False)
    torch.testing.assert_close(found[-1:].float(), slope, **ROUNDED)
    if p:
        torch.testing.assert_close(of_x[-1:].float(), slope * keep, **ROUNDED)


def test_cross_entropy(programs: Programs) -> None:
    programs.last_only = True
    (far,) = tail(drawn(1, COLUMNS))
    last = far[-1:].float().requires_grad_()
    target = torch.full((ROWS, 1), 17)
    expected = functional.cross_entropy(last, target[-1])
    (slope,) = torch.autograd.grad(expected, last)
    loss = losses_by("triton")(far[..., None], target, Terms(), None, far[..., None])
    torch.testing.assert_close(loss[-1, 0], expected.detach())
    torch.testing.assert_close(far[-1:].float(), slope, **ROUNDED)


def test_rope(programs: Programs) -> None:
    heads = FAR // (32 * 16)
    last, angles = drawn(1, 1, 32, 16), torch.rand(32, 8)
    near = recipes.rope(last, angles.cos(), angles.sin(), backend="triton")
    programs.last_only = True
    far = recipes.rope(last.expand(heads, -1, -1, -1), angles.cos(), angles.sin(), backend="triton")
    assert torch.equal(far[-1, :, -1], near[-1, :, -1])  # the last tokens are a program's


def rows_of(run: Callable[..., Any], *near: Tensor, axis: int = 0) -> None:
    """The same of tensors whose neighbours are far apart."""
    expected, found = run(*near), run(*(spread(tensor, axis) for tensor in near))
    if isinstance(expected, Tensor):
        expected, found = (expected,), (found,)
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other, **EXACT)


@hashes_wrap
def test_strides_of_rows(programs: Programs) -> None:
    """Of every other kernel that takes them."""
    a, b, c, d = (drawn(2, 40) for _ in range(4))
    vector = drawn(40)
    rows_of(lambda x: gelu.forward(x, vector, "tanh"), a)
    rows_of(lambda upstream, x: gelu.backward(upstream, x, vector, "tanh"), a, b)
    rows_of(lambda gate, up: gated.forward(gate, up, "triton", "silu"), a, b)
    rows_of(lambda packed: gated.forward(packed, None, "triton", "silu"), a)
    rows_of(lambda upstream, gate, up: gated.backward(upstream, gate, up, "triton", "silu"), a, b, c)
    kept = norm.forward(a, b, vector, vector, SEED, 1e-5, 0.5, True)
    rows_of(lambda x, residual: norm.forward(x, residual, vector, vector, SEED, 1e-5, 0.5, True), a, b)
    rows_of(
        lambda upstream, passed: norm.backward(
            upstream, passed, kept[1], vector, SEED, kept[2], kept[3], 0.5, True, True
        ),
        c,
        d,
    )


@pytest.mark.parametrize("axis", range(3), ids=["batch", "class", "position"])
def test_strides_of_cross_entropy(programs: Programs, axis: int) -> None:
    near, target = drawn(2, 3, 2), torch.tensor([[0, 2], [2, -100]])
    far = spread(near, axis)
    losses, terms = losses_by("triton"), Terms(label_smoothing=0.1)
    expected = losses(near, target, terms, None, near)
    torch.testing.assert_close(losses(far, spread(target, axis and 1), terms, None, far), expected, **EXACT)
    torch.testing.assert_close(far, near, **EXACT)


@pytest.mark.parametrize("axis", range(4), ids=["batch", "head", "token", "feature"])
def test_strides_of_rope(programs: Programs, axis: int) -> None:
    angles = torch.rand(3, 1)
    rows_of(
        lambda x: recipes.rope(x, angles.cos(), angles.sin(), interleaved=True, backend="triton"),
        drawn(2, 2, 3, 3),
        axis=axis,
    )


TARGET = torch.tensor([3, 1])


ON_THE_CPU: dict[str, Callable[[Tensor], Tensor]] = {
    "bias_gelu": lambda x: recipes.bias_gelu(x, x[0]),
    "rms_norm": lambda x: recipes.rms_norm(x, x.shape[-1:], x[1]),
    "add_layer_norm": lambda x: recipes.add_layer_norm(x, x, x[0], x[1])[0],
    "swiglu": recipes.swiglu,
    "cross_entropy": lambda x: recipes.cross_entropy(x, TARGET, label_smoothing=0.1),
    "linear_cross_entropy": lambda x: recipes.linear_cross_entropy(x, x, TARGET % 2),
    "attention": lambda x: recipes.attention(*(x[None, None],) * 3, dropout_p=0.1),
    "packed_attention": lambda x: recipes.packed_attention(x[:, None, :36], 3, backend="cpu"),
    "rope": lambda x: recipes.rope(x[:, None, None], *torch.rand(2, 1, 20)),
    "split": lambda x: torch.cat(recipes.split(x, 20, 1)[::-1]),
    "embedding": lambda x: recipes.embedding(TARGET % 2, x),
    "dropout": lambda x: recipes.dropout(x, 0.5),
}


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_on_the_cpu(name: str) -> None:
    """The paths for the CPU, both passes."""
    near = drawn(2, 40).float()
    found = []
    for x in (near, spread(near, 0)):
        torch.manual_seed(3)
        x.requires_grad_()
        out = ON_THE_CPU[name](x)
        found.append((out.detach(), *torch.autograd.grad(out, x, torch.ones_like(out))))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, **EXACT)


def test_gradients_of_heads_that_lie_far_apart() -> None:
    """Views beside each other are put together by their offsets."""
    whole = zeros(2, FAR)
    parts = whole.split_with_sizes([FAR - 5, 5], 1)
    found = layout.whole_of(parts, 1)
    assert found is not None
    assert (found.shape, found.stride(), found.data_ptr()) == (whole.shape, whole.stride(), whole.data_ptr())
    assert layout.whole_of(parts[::-1], 1) is None
