"""Edge case 5, of attention's Triton kernels: more than 2^31 elements, by their strides and by their programs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradscope.kernels.attention import triton_launch as attention
from gradscope.kernels.attention.options import AttentionOptions

from .far_memory import Programs, programs, spread, zeros

__all__ = ["programs"]  # a fixture

SEED = torch.tensor(12345)
EXACT = {"rtol": 0, "atol": 0}
# Of float32 against bfloat16, whose results have 8 bits; the kernels compute in float32.
ROUNDED = {"rtol": 2**-7, "atol": 2**-7}
hashes_wrap = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, as they are to


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def problem(axis: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Attention's tensors [batch, heads, rows, size], and the same with neighbours along one axis far apart."""
    near = {name: drawn(2, 2, 3, 2) for name in ("q", "k", "v", "grad_out")}
    near["bias"] = torch.randn(2, 2, 3, 3)
    return near, {name: spread(tensor, axis) for name, tensor in near.items()}


def both_passes(given: dict[str, Tensor], far: int | None, **options: Any) -> list[Tensor]:
    settings = AttentionOptions(0.7, 2, **options)
    q, k, v, bias, grad_out = (given[name] for name in ("q", "k", "v", "bias", "grad_out"))
    seed = SEED if settings.dropout_p else None
    out, logsumexp = attention.forward(q, k, v, bias, settings, seed)
    into = None
    if far is not None:
        out = spread(out, far)
        into = tuple(spread(torch.zeros_like(tensor), far) for tensor in (q, k, v))
    gradients = attention.backward(
        grad_out,
        q,
        k,
        v,
        bias,
        out,
        logsumexp,
        settings,
        seed,
        True,
        into=into,  # type: ignore[arg-type]
    )
    return [out, logsumexp, *(gradient for gradient in gradients if gradient is not None)]


@hashes_wrap
@pytest.mark.parametrize("axis", range(4), ids=["batch", "head", "row", "column"])
def test_strides(programs: Programs, axis: int) -> None:
    near, far = problem(axis)
    options = {"is_causal": True, "dropout_p": 0.3, "alibi": torch.rand(2, 2)}
    for ours, expected in zip(both_passes(far, axis, **options), both_passes(near, None, **options), strict=True):
        torch.testing.assert_close(ours, expected, **EXACT)


HEADS, TOKENS = (1 << 24) + 1, 1 << 7


@pytest.mark.parametrize("kernel", ["forward", "deltas", "keys_and_values", "queries_alone"])
def test_programs(programs: Programs, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 2^31 rows, one number each."""
    monkeypatch.setattr(attention, "repeatable", lambda: True)  # else one kernel makes all gradients
    monkeypatch.setattr(attention.triton_blocks, "one_pass_blocks", lambda *kind: None)
    rows = {name: drawn(1, 1, TOKENS, 1) for name in ("q", "k", "v", "grad_out")}
    settings = AttentionOptions(0.7, 1)
    q, k, v, grad_out = rows.values()
    out, logsumexp = attention.forward(q, k, v, None, settings, None)
    expected = attention.backward(grad_out, q, k, v, None, out, logsumexp, settings, None, False)[:3]
    q, k, v, grad_out = (tensor.expand(1, HEADS, -1, -1) for tensor in (q, k, v, grad_out))
    far = zeros(1, HEADS, TOKENS, dtype=torch.float32)
    far[:, -1] = logsumexp[:, 0]
    with programs.only(kernel):
        if kernel == "forward":
            attention.forward(q, k, v, None, AttentionOptions(0.7, HEADS), None)
        attention.backward(grad_out, q, k, v, None, out.expand_as(q), far, AttentionOptions(0.7, HEADS), None, False)
    found = programs.arguments
    if kernel == "forward":
        assert torch.equal(found["out"].pointer[0, -1, :16], out[0, 0, :16])  # the last program is the first rows'
        assert torch.equal(found["logsumexp"][0, -1, :16], logsumexp[0, 0, :16])
    elif kernel == "deltas":
        delta = (out.float() * grad_out[:, :1].float()).sum(-1)
        torch.testing.assert_close(found["delta"][0, -1, -64:], delta[0, 0, -64:], **EXACT)
    elif kernel == "queries_alone":
        # Without delta, which is 0 as fresh memory is: dq is the sum of p · do v k.
        p = (0.7 * q[0, 0].float() @ k[0, 0].float().T - logsumexp[0, 0, :, None]).exp()
        dq = 0.7 * (p * (grad_out[0, 0].float() @ v[0, 0].float().T)) @ k[0, 0].float()
        torch.testing.assert_close(found["dq"].pointer[0, -1, :16].float(), dq[:16], **ROUNDED)
    else:
        assert torch.equal(found["dv"].pointer[0, -1, -16:], expected[2][0, 0, -16:])  # which needs no delta


@pytest.mark.parametrize("shared", ["nothing", "rows", "columns"])
def test_bias(programs: Programs, shared: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile of the gradient, or its part where rows or columns share it, beyond 2^31."""
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)  # for delta, which is not computed
    tokens = {"nothing": 46_400, "rows": 600_000, "columns": 300_000}[shared]
    q, k, v, grad_out, out = (drawn(1, 1, tokens, 1) for _ in range(5))
    size = {"nothing": (tokens, tokens), "rows": (1, tokens), "columns": (tokens, 1)}[shared]
    bias = zeros(*size, dtype=torch.float32)
    logsumexp = torch.full((1, 1, tokens), 3.0)
    with programs.only("bias_gradient"):
        attention.backward(grad_out, q, k, v, bias, out, logsumexp, AttentionOptions(0.7, 1), None, True)
    found = programs.arguments
    rows, columns = (tokens - 1) % found["BLOCK_M"] + 1, (tokens - 1) % found["BLOCK_N"] + 1
    last_q, last_do = (tensor[0, 0, -rows:, 0].float() for tensor in (q, grad_out))
    last_k, last_v = (tensor[0, 0, -columns:, 0].float() for tensor in (k, v))
    expected = (0.7 * last_q[:, None] * last_k - 3.0).exp() * last_do[:, None] * last_v
    parts = found["into"].pointer[0, 0]
    assert parts.numel() > 1 << 31
    ours = {
        "nothing": parts[-rows:, -columns:],
        "rows": parts[-1, -columns:],
        "columns": parts[-rows:, -1],
    }[shared]
    if shared != "nothing":
        expected = expected.sum(0 if shared == "rows" else 1)
    # q is rounded to bfloat16 after it is multiplied by a power of two: exact; the sums have few terms.
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_kept(programs: Programs) -> None:
    tokens = 46_400
    q = torch.zeros(1, 1, 1, 1).expand(1, 1, tokens, 1)
    with programs.only("keep"):
        attention.kept(q, q, AttentionOptions(1.0, 1, dropout_p=0.5), SEED)
    mask = programs.arguments["into"][0, 0, -32:, -32:]
    # Of 1024 coins, with 8 standard deviations; memory that was not written is 0.
    assert 384 < mask.sum() < 640
