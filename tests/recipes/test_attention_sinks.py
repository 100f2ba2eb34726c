"""Attention with sinks: values and gradients beside the plain formula's, at every backend that runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from gradscope.kernels.attention import cpu_blocks
from gradscope.kernels.attention.dropout import draw_seed, keep_mask
from gradscope.recipes.attention import Attention, attention
from gradscope.recipes.attention_function import AttentionFunction, AttentionSettings
from gradscope.recipes.attention_with_weights import attention_with_weights

from .accuracy import assert_as_accurate, dirty_memory
from .attention_cases import qkv, run

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # by torch's own tracing
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # by its forward-mode derivatives
]

NAMES = ("out", "dq", "dk", "dv", "dsinks", "dbias")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"softcap": 1.5},
    {"window": (2, 1)},
    {"scale": 0.7, "softcap": 2.0, "is_causal": True, "alibi_slopes": torch.tensor([0.5, 0.25])},
]


@pytest.fixture(params=["one block", "many blocks"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that hold everything, and blocks far smaller than the tensors."""
    if request.param == "many blocks":
        monkeypatch.setattr(cpu_blocks, "ROWS", 4)
        monkeypatch.setattr(cpu_blocks, "KEYS", 3)
        monkeypatch.setattr(cpu_blocks, "SCORES", 24)


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    bias: Tensor | None = None,
    *,
    keep: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    window: tuple[int, int] | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """As gpt-oss has it: one more column for the softmax, which is dropped after it."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    i, j = (torch.arange(each.shape[2], device=q.device) for each in (q, k))
    i = i[:, None]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if alibi_slopes is not None:
        scores = scores - alibi_slopes[:, None, None] * (i - j).abs()
    hidden = (j > i) & is_causal
    if window is not None:
        hidden = hidden | (j < i - window[0]) | (j > i + window[1])
    scores = scores.masked_fill(hidden, -torch.inf)
    column = sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1).to(scores.dtype)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    if keep is not None:
        weights = weights * keep / (1 - dropout_p)
    return weights @ v


def operands(*sizes: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """q, k, v and sinks, some of which weigh much and some little."""
    q, k, v = qkv(*sizes, dtype=dtype)
    return q, k, v, torch.linspace(-2.0, 3.0, q.shape[1], dtype=torch.float64).to(dtype)


def ours(*tensors: Tensor, backend: str = "cpu", **options: Any) -> Tensor:
    q, k, v, sinks, *bias = tensors
    grouped = q.shape[1] != k.shape[1]
    return attention(q, k, v, *bias, sinks=sinks, enable_gqa=grouped, backend=backend, **options)


def assert_same(mine: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> None:
    for name, one, other in zip(NAMES, mine, truth, strict=False):
        # float64, sums in another order
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_the_derivative_is_right(options: dict[str, Any], dropout_p: float, cut: None) -> None:
    tensors = [x.requires_grad_() for x in (*operands(1, 2, 1, 5, 4, 2), torch.randn(2, 5, 1, dtype=torch.float64))]

    def function(*given: Tensor) -> Tensor:
        torch.manual_seed(3)  # the same dropout at each evaluation
        return ours(*given, dropout_p=dropout_p, **options)

    assert torch.autograd.gradcheck(function, tensors, fast_mode=False)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("backend", ["cpu", "math", "auto"])
@pytest.mark.parametrize("lengths", [(1, 1), (9, 14), (14, 9), (97, 97)])
def test_values_are_those_of_one_more_column(
    options: dict[str, Any], backend: str, lengths: tuple[int, int], cut: None
) -> None:
    tensors = operands(3, 2, 1, *lengths, 8, 5)
    with dirty_memory():
        mine = run(lambda *x: ours(*x, backend=backend, **options), tensors)
    assert_same(mine, run(lambda *x: by_hand(*x, **options), tensors))


@pytest.mark.parametrize("dropout_p", [0.4, 1.0])
def test_dropout_comes_after_the_column_is_dropped(dropout_p: float, cut: None) -> None:
    tensors = operands(3, 4, 2, 9, 14, 8)
    torch.manual_seed(1)
    keep = keep_mask(draw_seed(torch.device("cpu")), (3, 4, 9, 14), dropout_p)
    torch.manual_seed(1)
    mine = run(lambda *x: ours(*x, dropout_p=dropout_p), tensors)
    kept = min(dropout_p, 0.9)  # of everything dropped nothing is left to be scaled
    assert_same(mine, run(lambda *x: by_hand(*x, keep=keep, dropout_p=kept), tensors))


@pytest.mark.parametrize("backend", ["cpu", "math"])
def test_a_learnt_bias_beside_it(backend: str, cut: None) -> None:
    tensors = (*operands(2, 4, 2, 6, 9, 4), torch.randn(4, 6, 9, dtype=torch.float64))
    mine = run(lambda *x: ours(*x, backend=backend, is_causal=True), tensors)
    assert_same(mine, run(lambda *x: by_hand(*x, is_causal=True), tensors))


@pytest.mark.parametrize("backend", ["cpu", "math"])
@pytest.mark.parametrize("sink", [0.5, -torch.inf])
def test_a_row_that_sees_no_key_gives_nothing(backend: str, sink: float) -> None:
    """All its weight is the sink's, whose gradient is 0; where the sink has none either, no number is NaN."""
    q, k, v, _ = operands(2, 2, 2, 5, 5, 4)
    mask = torch.ones(5, 5, dtype=torch.bool).tril(-1)
    sinks = torch.full((2,), sink, dtype=torch.float64)
    mine = run(lambda *x: attention(*x[:3], mask, sinks=x[3], backend=backend), (q, k, v, sinks))
    assert all(each.isfinite().all() for each in mine)
    assert not mine[0][:, :, 0].any()
    if sink > -torch.inf:
        truth = run(lambda *x: by_hand(*x, mask.double().log()), (q, k, v, sinks))
        assert_same(mine, truth)
    else:  # no sink at all
        truth = run(lambda *x: attention(*x, mask, backend=backend), (q, k, v))
        assert_same(mine[:4], truth)
        assert not mine[4].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 4, 2, 97, 97, 24), (1, 3, 3, 200, 64, 8), (2, 2, 1, 1, 33, 64)], ids=str)
def test_it_is_as_accurate_as_by_hand(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    tensors = operands(*shape, dtype=dtype)
    mine = run(ours, tensors)
    plain = run(by_hand, tensors)
    truth = run(by_hand, tuple(each.double() for each in tensors))
    q, k, v = (each.double() for each in tensors[:3])
    # In ds = p (dp - D) the difference nearly cancels: what is left is the rounding of dp and D, times a factor.
    dp = (torch.full(truth[0].shape, 2.0).double() @ v.abs().repeat_interleave(q.shape[1] // v.shape[1], 1).mT).max()
    inner = (dp * max(q.abs().max(), k.abs().max()) / q.shape[-1] ** 0.5).item()
    for name, one, other, true in zip(NAMES, mine, plain, truth, strict=False):
        rows = shape[0] * shape[3] * dp.item()  # the sinks' gradient is a sum over batch and queries
        assert_as_accurate(one, other, true, name, inner={"out": 0.0, "dsinks": rows}.get(name, inner))


def test_sinks_of_float32_beside_half_operands() -> None:
    q, k, v, _ = operands(2, 4, 2, 9, 9, 8, dtype=torch.bfloat16)
    sinks = torch.linspace(-1, 1, 4).requires_grad_()
    out = attention(q, k, v, sinks=sinks, enable_gqa=True, backend="cpu")
    (grad,) = torch.autograd.grad(out.float().square().sum(), sinks)
    assert (out.dtype, grad.dtype) == (torch.bfloat16, torch.float32)
    wide = by_hand(q.float(), k.float(), v.float(), sinks)
    torch.testing.assert_close(out.float(), wide, rtol=0.02, atol=0.02)  # a few roundings of 2^-8


def test_upstream_gradients_that_are_expanded() -> None:
    tensors = [x.requires_grad_() for x in operands(2, 2, 2, 6, 7, 4)]
    mine = torch.autograd.grad(ours(*tensors).sum(), tensors)
    assert_same(mine, torch.autograd.grad(by_hand(*tensors).sum(), tensors))


def test_a_second_derivative_raises_but_of_plain_operations() -> None:
    tensors = [x.requires_grad_() for x in operands(1, 2, 2, 3, 4, 2)]
    grads = torch.autograd.grad(ours(*tensors).square().sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="attention"):
        sum(each.sum() for each in grads).backward()  # type: ignore[union-attr]
    assert torch.autograd.gradgradcheck(lambda *x: ours(*x, backend="math"), tensors)


def test_backward_twice_gives_the_same() -> None:
    tensors = [x.requires_grad_() for x in operands(2, 2, 2, 6, 7, 4)]
    out = ours(*tensors)
    first = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    assert all(torch.equal(*each) for each in zip(first, torch.autograd.grad(out.sum(), tensors), strict=True))


@pytest.mark.parametrize("after_dropout", [True, False])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
def test_the_weights_leave_the_sinks_out(dropout_p: float, after_dropout: bool) -> None:
    tensors = [x.requires_grad_() for x in operands(2, 4, 2, 6, 7, 4)]
    q, k, v, sinks = tensors
    torch.manual_seed(2)
    out, weights = attention_with_weights(
        q, k, v, dropout_p=dropout_p, enable_gqa=True, sinks=sinks, backend="cpu", after_dropout=after_dropout
    )
    torch.manual_seed(2)
    keep = keep_mask(draw_seed(torch.device("cpu")), (2, 4, 6, 7), dropout_p) if dropout_p else None
    drops = {"keep": keep, "dropout_p": dropout_p}
    eye = torch.eye(7, dtype=torch.float64).expand(2, 2, 7, 7)
    wanted = by_hand(q, k, eye, sinks, **(drops if after_dropout else {}))  # type: ignore[arg-type]
    torch.testing.assert_close(weights + 0, wanted, rtol=1e-11, atol=1e-13)
    loss = out.square().sum() + weights.square().sum()
    truth = by_hand(q, k, v, sinks, **drops).square().sum() + wanted.square().sum()  # type: ignore[arg-type]
    assert_same(torch.autograd.grad(loss, tensors), torch.autograd.grad(truth, tensors))


def test_weights_are_not_read_after_the_sinks_changed() -> None:
    q, k, v, sinks = operands(2, 2, 2, 6, 7, 4)
    learnt = torch.nn.Parameter(sinks)
    _, weights = attention_with_weights(q, k, v, sinks=learnt, backend="cpu")
    learnt.data[1] += 1.0  # which counts no version
    with pytest.raises(RuntimeError, match="modified in place"):
        weights.sum()


@pytest.mark.parametrize("how", ["grad", "vmap", "jvp"])
def test_transforms(how: str) -> None:
    tensors = operands(2, 2, 2, 5, 6, 4)
    q, k, v, sinks = tensors
    if how == "grad":
        mine = torch.func.grad(lambda s: attention(q, k, v, sinks=s).square().sum())(sinks)
        wanted = torch.func.grad(lambda s: by_hand(q, k, v, s).square().sum())(sinks)
    elif how == "vmap":
        several = torch.stack([sinks, sinks.flip(0), sinks * 0])
        mine = torch.vmap(lambda s: attention(q, k, v, sinks=s))(several)
        wanted = torch.stack([by_hand(q, k, v, each) for each in several])
    else:
        mine = torch.func.jvp(lambda s: attention(q, k, v, sinks=s), (sinks,), (torch.ones_like(sinks),))[1]
        wanted = torch.func.jvp(lambda s: by_hand(q, k, v, s), (sinks,), (torch.ones_like(sinks),))[1]
    torch.testing.assert_close(mine, wanted, rtol=1e-11, atol=1e-13)


def test_compiled_whole() -> None:
    tensors = operands(2, 2, 2, 9, 9, 4)
    compiled = torch.compile(lambda *x: ours(*x, is_causal=True), fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, tensors), run(lambda *x: by_hand(*x, is_causal=True), tensors))


def test_autocast() -> None:
    q, k, v, sinks = (x.float() for x in operands(2, 2, 2, 9, 9, 4))
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, sinks=sinks.requires_grad_(), backend="cpu")
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), by_hand(q, k, v, sinks), rtol=0.03, atol=0.03)
    assert torch.autograd.grad(out.sum(), sinks)[0].dtype == torch.float32


def test_no_keys_and_no_batch() -> None:
    sinks = torch.zeros(2)
    assert not attention(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4), torch.randn(1, 2, 0, 4), sinks=sinks).any()
    none = torch.randn(0, 2, 3, 4)
    assert attention(none, none, none, sinks=sinks).shape == (0, 2, 3, 4)


def test_what_does_not_fit_is_refused() -> None:
    q = torch.randn(2, 4, 5, 8)
    with pytest.raises(ValueError, match=r"sinks is of shape \(2,\); expected \(4,\), one for each head of the query"):
        attention(q, q, q, sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="sinks"):
        attention(q, q, q, sinks=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="sinks is on meta; expected cpu, where query is"):
        attention(q, q, q, sinks=torch.zeros(4, device="meta"))
    for backend in ("flash", "efficient", "cudnn"):
        with pytest.raises(
            ValueError, match="it does not support sinks" if backend == "flash" else "the tensors are on cpu"
        ):
            attention(q, q, q, sinks=torch.zeros(4), backend=backend)


@pytest.mark.measured_sizes
def test_explain_says_which_and_why() -> None:
    q = torch.randn(1, 4, 1024, 8)
    found = attention.explain(q, q, q, sinks=torch.zeros(4))
    assert found.backend == "cpu"
    assert found.refused["flash"] == "it does not support sinks"
    assert attention.explain(q[:, :, :5], q, q, sinks=torch.zeros(4)).backend == "math"


def test_the_module_takes_them() -> None:
    q = torch.randn(2, 4, 5, 8)
    sinks = torch.randn(4)
    assert torch.equal(Attention(is_causal=True)(q, q, q, sinks=sinks), attention(q, q, q, is_causal=True, sinks=sinks))


def test_by_the_triton_kernels(triton_device: torch.device) -> None:
    """Their logsumexp and backward are the CPU path's: what is put on top is the same. A row sees no key."""
    torch.manual_seed(0)
    q, k, v, sinks = (each.to(triton_device) for each in operands(2, 2, 1, 33, 17, 16, dtype=torch.float32))
    mask = torch.ones(33, 17, dtype=torch.bool, device=triton_device).tril(5)
    mask[3] = False
    settings = AttentionSettings(0.25, False, 0.0, None, None, None, "triton")

    def by_triton(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out: Tensor = AttentionFunction.apply(  # type: ignore[no-untyped-call]
            q, k, v, mask[None, None], None, None, sinks, settings
        )
        return out

    mine = run(by_triton, (q, k, v, sinks))
    tensors = tuple(each.double() for each in (q, k, v, sinks))
    truth = run(lambda *x: by_hand(*x, mask.double().log(), scale=0.25), tensors)
    for name, one, other in zip(NAMES, mine, truth, strict=False):
        # float32 sums of up to 33 terms of about 1; the sinks' of 66 rows
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")
    assert not mine[0][:, :, 3].any()
