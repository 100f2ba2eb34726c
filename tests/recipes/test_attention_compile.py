"""Attention under torch.compile: edge case 9."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradscope.recipes.attention import attention
from gradscope.recipes.packed_attention import packed_attention
from gradscope.recipes.rope import rope

from .attention_cases import qkv

# torch's own tracing of a Function instantiates it.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def forgets() -> Any:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"is_causal": True, "dropout_p": 0.3},
        {"backend": "cpu", "softcap": 2.0, "window": (3, None), "alibi_slopes": torch.tensor([0.5, 0.25])},
    ],
    ids=str,
)
@pytest.mark.parametrize("shared", [False, True])
def test_one_graph(given: dict[str, Any], shared: bool) -> None:
    """Edge case 9: without a break, the same result and gradients; also where query is key is value."""
    tensors = [x.requires_grad_() for x in qkv(2, 2, 2, 40, 40, 8)]
    bias = torch.randn(1, 2, 40, 40, dtype=torch.float64, requires_grad=True)
    tensors = [tensors[0]] * 3 if shared else tensors
    wanted = [*dict.fromkeys(tensors), bias]

    def attend(*args: torch.Tensor) -> torch.Tensor:
        return attention(*args, **given).square().sum()

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for attempt in range(2):
        torch.manual_seed(attempt)
        found = torch.autograd.grad(compiled(*tensors, bias), wanted)
        torch.manual_seed(attempt)
        expected = torch.autograd.grad(attend(*tensors, bias), wanted)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_few_scores_with_dropout_in_one_graph() -> None:
    """By torch's math kernel, with the mask drawn within the graph: other numbers than eager's, finite and dropped."""
    tensors = [x.requires_grad_() for x in qkv(2, 2, 2, 40, 40, 8)]
    assert attention.explain(*tensors, dropout_p=0.5).backend == "math"
    compiled = torch.compile(lambda *x: attention(*x, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    out = compiled(*tensors)
    assert not torch.equal(out, compiled(*tensors))
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), tensors))


def test_flash_in_one_graph() -> None:
    tensors = [x.requires_grad_() for x in qkv(2, 2, 2, 40, 40, 8)]
    compiled = torch.compile(lambda *x: attention(*x, is_causal=True), fullgraph=True, backend="aot_eager")
    for one, other in zip(
        torch.autograd.grad(compiled(*tensors).sum(), tensors),
        torch.autograd.grad(attention(*tensors, is_causal=True).sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # Inductor imports a user of it
def test_inductor() -> None:
    tensors = [x.requires_grad_() for x in qkv(2, 2, 2, 40, 40, 8)]
    compiled = torch.compile(lambda *x: attention(*x, is_causal=True, backend="cpu"), fullgraph=True)
    out = compiled(*tensors)
    torch.testing.assert_close(out, attention(*tensors, is_causal=True), rtol=1e-12, atol=1e-13)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), tensors))


@pytest.mark.parametrize("recipe", ["attention", "packed_attention", "rope"])
def test_a_size_that_is_not_fixed_may_equal_one_that_is(recipe: str) -> None:
    """A mask as long as the longest batch; one table for each sample. There ``8 in (1, size)`` is false."""
    tokens = 8
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    cos, sin = torch.randn(2, 4, tokens, 2).unbind()

    def call(x: torch.Tensor) -> torch.Tensor:
        if recipe == "packed_attention":
            return packed_attention(x, 2, attn_mask=mask)
        turned = x.unflatten(2, (2, 12)).transpose(1, 2)
        return rope(turned[..., :4], cos, sin) if recipe == "rope" else attention(*turned.chunk(3, -1), attn_mask=mask)

    x = torch.randn(4, tokens, 24)
    torch._dynamo.maybe_mark_dynamic(x, 0 if recipe == "rope" else 1)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), call(x))
