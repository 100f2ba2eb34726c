"""Attention beside its weights: what plain operations give, computed only where somebody reads it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradscope.kernels import pays
from gradscope.recipes import attention, attention_with_weights
from gradscope.recipes import attention_with_weights as function
from gradscope.recipes.lazy_tensor import LazyTensor, is_computed

EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}  # float64: other sums of at most a hundred numbers
KEYS = 70  # more than are read at once
MASK = torch.ones(5, KEYS, dtype=torch.bool).tril(60)


def operands(queries: int = 5, kv_heads: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(1)
    sizes = ((4, queries), (kv_heads, KEYS), (kv_heads, KEYS))
    return [torch.randn(2, heads, rows, 8, dtype=dtype, requires_grad=True) for heads, rows in sizes]


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    scores = (q @ k.transpose(-2, -1)) * options.get("scale", q.shape[-1] ** -0.5)
    if "softcap" in options:
        scores = (scores / options["softcap"]).tanh() * options["softcap"]
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if options.get("is_causal"):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    weights = scores.softmax(-1)
    return weights @ v, weights


@pytest.fixture(params=["torch's kernel", "our blocks"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where torch has a kernel and no dropout that; else our own blocks at every size, or plain operations."""
    if request.param == "torch's kernel":
        monkeypatch.setitem(pays.FEWEST, "attention with dropout", {"scores": (pays.NEVER, pays.NEVER)})
    yield


@pytest.mark.parametrize("reads", ["both", "weights", "output"])
@pytest.mark.parametrize(
    ("mask", "options", "kv_heads"),
    [
        (None, {}, 4),
        (None, {"scale": 0.3}, 4),
        (None, {"is_causal": True}, 4),
        (MASK, {}, 4),
        (MASK.double() * 0.5, {"scale": -0.2}, 4),
        (None, {"softcap": 2.0}, 4),
        (None, {"enable_gqa": True}, 2),
        (None, {"enable_gqa": True, "is_causal": True}, 1),
    ],
)
def test_as_plain_operations(mask: Tensor | None, options: dict[str, Any], kv_heads: int, reads: str) -> None:
    """Results, and gradients of whatever is read of them."""
    given = operands(kv_heads=kv_heads)
    found, expected = (each(*given, mask, **options) for each in (attention_with_weights, by_hand))
    assert is_lazy(found[1])
    parts = {"both": (0, 1), "weights": (1,), "output": (0,)}[reads]
    torch.manual_seed(2)
    factors = [torch.randn(each.shape, dtype=each.dtype) for each in expected]
    for part in parts:
        torch.testing.assert_close(found[part] + 0, expected[part], **EXACT)
    one, other = (sum((each[part] * factors[part]).sum() for part in parts) for each in (found, expected))
    for mine, theirs in zip(grads(one, given), grads(other, given), strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, **EXACT)


def is_lazy(weights: Tensor) -> bool:
    return isinstance(weights, LazyTensor) and not is_computed(weights)


def grads(loss: Any, given: list[Tensor]) -> tuple[Tensor | None, ...]:
    return torch.autograd.grad(loss, given, allow_unused=True)


def test_nothing_is_computed_until_it_is_read() -> None:
    given = operands()
    out, weights = attention_with_weights(*given)
    assert weights.shape == (2, 4, 5, KEYS) and weights.dtype == torch.float64 and weights.requires_grad
    assert weights.dim() == 4 and weights.device.type == "cpu" and len(weights) == 2 and weights.grad_fn is not None
    out.sum().backward()
    assert is_lazy(weights)
    weights = weights.mean(1)
    assert type(weights) is Tensor


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.usefixtures("either")
def test_dropout(after: bool) -> None:
    """The weights that were multiplied with the values, or those before some were dropped."""
    given = operands()
    torch.manual_seed(5)
    out, weights = attention_with_weights(*given, dropout_p=0.4, after_dropout=after)
    plain = by_hand(*given)[1]
    if not after:
        torch.testing.assert_close(weights + 0, plain, **EXACT)
        return
    kept = weights != 0
    assert 0.5 < kept.double().mean() < 0.7
    torch.testing.assert_close(weights + 0, plain * kept / 0.6, **EXACT)
    torch.testing.assert_close(out, weights @ given[2], **EXACT)
    factor = torch.randn_like(plain)
    mine, theirs = (grads((each * factor).sum(), given)[:2] for each in (weights, plain * kept / 0.6))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_from_one_seed_dropout_is_that_of_attention() -> None:
    given = operands()
    torch.manual_seed(7)
    found = attention_with_weights(*given, dropout_p=0.4, backend="cpu")[0]
    torch.manual_seed(7)
    assert torch.equal(found, attention(*given, dropout_p=0.4, backend="cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype: torch.dtype) -> None:
    given = operands(dtype=dtype)
    weights = attention_with_weights(*given)[1]
    assert weights.dtype == dtype and (weights + 0).dtype == dtype
    wide = attention_with_weights(*given, weights_dtype=torch.float32)[1]
    assert wide.dtype == torch.float32 and (wide + 0).dtype == torch.float32


@pytest.mark.parametrize("wanted", [None, torch.float32])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_under_autocast(wanted: torch.dtype | None, dropout_p: float) -> None:
    """As softmax gives them there, read inside of it or behind it."""
    given = operands(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out, inside = attention_with_weights(*given, dropout_p=dropout_p, weights_dtype=wanted)
        behind = attention_with_weights(*given, dropout_p=0.0, weights_dtype=wanted)[1]
        read = inside + 0
        expected = (given[0] @ given[1].transpose(-2, -1) * 8**-0.5).softmax(-1)
    assert out.dtype == torch.bfloat16
    assert read.dtype == (behind + 0).dtype == behind.dtype == (wanted or expected.dtype)
    # bfloat16 scores of size 3 are off by 1/128, and so is the logarithm of the weights; twice, and both are rounded.
    torch.testing.assert_close((behind + 0).float(), expected.float(), rtol=4e-2, atol=1e-3)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_at_once_without_gradients(grad: Any) -> None:
    given = operands()
    with grad():
        out, weights = attention_with_weights(*given)
    assert type(weights) is Tensor and not weights.requires_grad
    expected = by_hand(*given)
    torch.testing.assert_close(out, expected[0].detach(), **EXACT)
    torch.testing.assert_close(weights, expected[1].detach(), **EXACT)


def test_under_compile_they_are_computed() -> None:
    given = operands()

    @torch.compile(fullgraph=True, backend="eager")
    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return function(q, k, v)

    for mine, theirs in zip(run(*given), by_hand(*given), strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)


@pytest.mark.parametrize("reentrant", [True, False])
def test_in_a_checkpoint(reentrant: bool) -> None:
    given = operands()

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return function(q, k, v)

    found = checkpoint(run, *given, use_reentrant=reentrant)
    expected = by_hand(*given)
    losses = [(out * 2).sum() + weights.square().sum() for out, weights in (found, expected)]
    mine = grads_of(losses[0], given)
    for one, other in zip(mine, grads_of(losses[1], given), strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def grads_of(loss: Tensor, given: list[Tensor]) -> list[Tensor]:
    for each in given:
        each.grad = None
    loss.backward()
    return [each.grad.clone() for each in given if each.grad is not None]


def test_of_changed_operands_they_are_not_computed() -> None:
    given = operands()
    key = given[1] * 1.0
    weights = attention_with_weights(given[0], key, given[2])[1]
    with torch.no_grad():
        key.mul_(2.0)
    with pytest.raises(RuntimeError, match="the queries, keys or mask were modified in place before it"):
        weights.sum()


def test_of_a_parameter_that_was_written_to_below_autograd_they_are_not_computed() -> None:
    query = nn.Parameter(torch.randn(2, 4, 5, 8, dtype=torch.float64))
    weights = attention_with_weights(query, *operands()[1:])[1]
    query.data.mul_(2.0)  # counts no version
    with pytest.raises(RuntimeError, match="the queries, keys or mask were modified in place before it"):
        weights.sum()


def test_learnt_queries_are_kept_before_an_optimizer_steps() -> None:
    query = nn.Parameter(torch.randn(2, 4, 5, 8, dtype=torch.float64))
    _, key, value = operands()
    out, weights = attention_with_weights(query, key, value)
    expected = by_hand(query, key, value)[1].detach()
    out.sum().backward()
    torch.optim.SGD([query], 1.0).step()
    torch.testing.assert_close(weights.detach() + 0, expected, **EXACT)


def test_a_change_in_place_is_seen_by_those_who_read_later() -> None:
    given = operands()
    weights = attention_with_weights(*given)[1]
    same = weights
    weights.mul_(3.0)
    torch.testing.assert_close(same + 0, by_hand(*given)[1] * 3, **EXACT)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # a softmax's result may not change
        weights.sum().backward()


def test_copies_and_pickles_hold_the_numbers() -> None:
    given = [each.detach() for each in operands()]
    weights = attention_with_weights(*given)[1]
    assert torch.equal(copy.deepcopy(weights), weights + 0)


@pytest.mark.parametrize("shapes", [((3, 5, 8),) * 3, ((5, 8),) * 3, ((2, 2, 3, 5, 8),) * 3])
def test_any_number_of_dimensions(shapes: Any) -> None:
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    out, weights = attention_with_weights(*given)
    expected = (given[0] @ given[1].transpose(-2, -1) * 8**-0.5).softmax(-1)
    assert weights.shape == expected.shape
    torch.testing.assert_close(weights + 0, expected, **EXACT)
    torch.testing.assert_close(out, expected @ given[2], **EXACT)


@pytest.mark.parametrize("read", [False, True])
@pytest.mark.parametrize("ask", ["retain_grad", "register_hook", "grad", "backward"])
def test_their_own_gradient_is_not_given_in_part(ask: str, read: bool) -> None:
    """The output is computed without them: what it adds to their gradient would be lost, and a hook not called."""
    out, weights = attention_with_weights(*operands())
    loss = out.square().sum() + (weights.square().sum() if read else 0.0)
    calls = {
        "retain_grad": weights.retain_grad,
        "register_hook": lambda: weights.register_hook(lambda grad: grad * 2),
        "grad": lambda: torch.autograd.grad(loss, weights),
        "backward": lambda: loss.backward(inputs=[weights]),
    }
    with pytest.raises(
        RuntimeError, match=f"{ask} needs the gradient of the weights, but the output was computed without them"
    ):
        calls[ask]()


def test_without_a_graph_they_become_a_leaf() -> None:
    weights = attention_with_weights(*[each.detach() for each in operands()])[1]
    weights.requires_grad_().square().sum().backward()
    torch.testing.assert_close(weights.grad, weights.detach() * 2)


def test_first_read_in_inference_mode_they_keep_their_graph() -> None:
    given = operands()
    found, expected = attention_with_weights(*given)[1], by_hand(*given)[1]
    with torch.inference_mode():
        assert not found.mean().requires_grad
    for one, other in zip(*(grads(each.square().sum(), given)[:2] for each in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, **EXACT)
