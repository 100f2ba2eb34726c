"""Attention's arguments, the choice of its backend, and what it says of both."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional

from gradscope.recipes import attention_backends
from gradscope.recipes.attention import ABOUT, attention
from gradscope.recipes.attention_arguments import arguments
from gradscope.recipes.attention_backends import REASONS, against
from gradscope.recipes.attention_layout import with_gradient_as_laid_out

recipe: Any = importlib.import_module("gradscope.recipes.attention")  # the package has the function by that name
X = torch.randn(2, 4, 8, 16)
FLASH = 1  # torch.nn.attention.SDPBackend.FLASH_ATTENTION


def torchs_choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, **given: Any) -> int:
    given = {"dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False, **given}
    return torch._fused_sdp_choice(q, k, v, mask, **given)


@pytest.mark.parametrize(
    ("tensors", "given"),
    [
        ((X, X, X), {}),
        ((X, X, X), {"is_causal": True}),
        ((X, X, X), {"dropout_p": 0.1}),
        ((X, X, X[..., :8]), {}),
        ((X, X[:, :, :5], X[:, :, :5]), {"is_causal": True}),
        ((X[:, :, :0], X, X), {}),
        ((X, X[:, :, :0], X[:, :, :0]), {}),
        ((X.mT.contiguous().mT, X, X), {}),
        ((X, X.mT.contiguous().mT, X), {}),
        ((X, X, X.mT.contiguous().mT), {}),
        ((X.transpose(1, 2).contiguous().transpose(1, 2), X, X), {}),
        ((X[..., :3], X[..., :3], X[..., :3]), {}),
        ((X.repeat(1, 1, 1, 20),) * 3, {}),
        ((X.double(),) * 3, {}),
        ((X.half(),) * 3, {}),
        ((X.bfloat16(),) * 3, {}),
        ((X, X[:, :2], X[:, :2]), {"enable_gqa": True}),
        ((X, X, X, torch.ones(8, 8) > 0), {}),
        ((X, X, X, torch.ones(2, 1, 1, 8)), {}),
        ((X, X, X, torch.ones(2, 4, 8, 1)), {}),
        ((X, X, X, torch.ones(8, 8, requires_grad=True)), {}),
    ],
)
def test_flash_where_torch_has_it_on_the_cpu(tensors: tuple[torch.Tensor, ...], given: dict[str, Any]) -> None:
    choice = attention.explain(*tensors, **given)
    assert (choice.backend == "flash") == (torchs_choice(*tensors, **given) == FLASH)
    assert choice.backend in ("flash", "cpu") or "dropout_p" in given  # math for dropout of few scores alone


def test_explain_says_why_and_why_not() -> None:
    x = torch.randn(4, 4, 112, 16)  # 200,704 scores
    assert str(attention.explain(x, x, x, dropout_p=0.1, backend="auto")) == (
        "cpu: blocks of keys on the CPU: does not store the scores, with dropout and every option\n"
        "not cudnn: the tensors are on cpu, and it is for CUDA\n"
        "not flash: on the CPU it has no dropout\n"
        "not efficient: the tensors are on cpu, and it is for CUDA"
    )
    both = attention.explain(X, X, X, softcap=2.0, window=(3, None))
    assert both.refused["flash"] == "it does not support soft-cap or window"
    assert str(attention.explain(X, X, X, backend="cpu")) == "cpu: asked for"


def test_few_scores_with_dropout_are_torchs() -> None:
    """The same numbers as SDPA's, from the same generator."""
    assert str(attention.explain(X, X, X, dropout_p=0.1)) == (
        "math: unfused operations: for so few scores they are faster than iterating over blocks\n"
        "not cudnn: the tensors are on cpu, and it is for CUDA\n"
        "not flash: on the CPU it has no dropout\n"
        "not efficient: the tensors are on cpu, and it is for CUDA\n"
        "not cpu: fewer than 200,000 scores: torch's own is faster\n"
        "not triton: Triton has no cpu backend"
    )
    mask = torch.rand(8, 8) > 0.3
    grouped = (X, X[:, :2], X[:, :2])
    for tensors, given in (((X, X, X, mask), {}), ((X, X, X), {"is_causal": True}), (grouped, {"enable_gqa": True})):
        torch.manual_seed(1)
        mine = attention(*tensors, dropout_p=0.3, **given)
        torch.manual_seed(1)
        assert torch.equal(mine, functional.scaled_dot_product_attention(*tensors, dropout_p=0.3, **given))


@pytest.mark.parametrize(
    "given",
    [
        {"softcap": 2.0},
        {"attn_mask": torch.ones(8, 8, requires_grad=True)},
        {"query": X.bfloat16(), "key": X.bfloat16(), "value": X.bfloat16()},
    ],
)
def test_few_scores_that_torch_has_no_better_path_for(given: dict[str, Any]) -> None:
    assert attention.explain(**{"query": X, "key": X, "value": X, **given}, dropout_p=0.1).backend == "cpu"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"key": X[:, :, :5], "value": X[:, :, :5]},
        {"query": X[0], "key": X[0], "value": X[0]},
        {"query": X[:, :, :0], "key": X[:, :, :0], "value": X[:, :, :0]},
        {"query": X.mT.contiguous().mT},
        {"key": X.mT.contiguous().mT},
        {"value": X.mT.contiguous().mT},
        {"query": X.half(), "key": X.half(), "value": X.half()},
        {"dropout_p": 0.1},
        {"softcap": 2.0},
        {"attn_mask": torch.ones(8, 8, requires_grad=True)},
    ],
)
def test_what_runs_is_what_explain_says(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a shortcut leaves checks out."""
    whole = {"query": X, "key": X, "value": X, **given}
    ran: list[str] = []
    flash, others, own = recipe.flash_on_the_cpu, recipe.by_torch, recipe.AttentionFunction.apply
    math = recipe.math_on_the_cpu
    monkeypatch.setattr(recipe, "math_on_the_cpu", lambda *args: ran.append("math") or math(*args))
    monkeypatch.setattr(recipe, "flash_on_the_cpu", lambda *args: ran.append("flash") or flash(*args))
    monkeypatch.setattr(recipe, "by_torch", lambda given, chosen: ran.append(chosen) or others(given, chosen))
    monkeypatch.setattr(
        recipe, "AttentionFunction", SimpleNamespace(apply=lambda *args: ran.append(args[-1].backend) or own(*args))
    )
    attention(**whole)
    assert ran == [attention.explain(**whole).backend]


def test_explain_says_what_a_causal_mask_would_gain() -> None:
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    note = "; the mask's values are not inspected: if it is causal, is_causal=True skips half of the work"
    assert attention.explain(X, X, X, mask).reason == REASONS["flash"] + note
    assert attention.explain(X, X, X, mask, is_causal=True).reason == REASONS["cpu"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "fast"}, "attention: backend is 'fast'; expected 'auto' or 'cudnn' or 'flash'"),
        (
            {"backend": "flash", "dropout_p": 0.5},
            "attention: backend='flash' cannot run here: on the CPU it has no dropout",
        ),
        (
            {"backend": "efficient"},
            "attention: backend='efficient' cannot run here: the tensors are on cpu, and it is for",
        ),
        ({"query": X.int()}, "attention: query is of dtype int32; expected float32 or float64 or float16 or bfloat16"),
        ({"query": X[0, 0, 0]}, r"attention: query is of shape \(16,\); expected \(..., heads, length, size\)"),
        ({"key": X.double()}, "attention: key is of dtype float64; expected float32, as query is"),
        ({"key": X.to("meta")}, "attention: key is on meta; expected cpu, where query is"),
        ({"key": X[..., :8]}, r"attention: key is of shape \(2, 4, 8, 8\); expected size 16 at the end, as query has"),
        ({"value": X[:, :, :3]}, r"attention: value is of shape \(2, 4, 3, 16\); expected length 8, as key has"),
        (
            {"key": X[:, :3]},
            "attention: key is of 3 heads; expected 4, as query has, or a divisor of them with enable_gqa",
        ),
        (
            {"key": X[:, :3], "value": X[:, :3], "enable_gqa": True},
            "query is of 4 heads; expected a multiple of key's 3",
        ),
        ({"key": X[:, :2], "enable_gqa": True}, "value is of 4 heads; expected 2, as key has"),
        (
            {"key": X[:, :, :, :].repeat(2, 1, 1, 1)[:3]},
            r"key is of shape \(3, 4, 8, 16\); expected a batch that broad",
        ),
        (
            {"attn_mask": torch.ones(3, 8)},
            r"attn_mask is of shape \(3, 8\); expected a shape that broadcasts to \(2, 4, 8, 8\)",
        ),
        ({"attn_mask": torch.ones(8, 8).int()}, "attn_mask is of dtype int32; expected bool, float32 or float32"),
        ({"dropout_p": 1.5}, r"dropout_p is 1.5; expected a number in \[0, 1\]"),
        ({"softcap": 0.0}, r"softcap is 0.0; expected a number in \(0, inf\)"),
        ({"window": (-1, 0)}, r"window is \(-1, 0\); expected \(left, right\), each an int of at least 0, or None"),
        ({"alibi_slopes": torch.ones(3)}, r"alibi_slopes is of shape \(3,\); expected \(4,\) or \(2, 4\)"),
        ({"alibi_slopes": torch.ones(4, requires_grad=True)}, "alibi_slopes is a tensor that requires a gradient"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_messages(given: dict[str, Any], message: str) -> None:
    """Before anything runs; explain says the same."""
    for function in (attention, attention.explain):
        with pytest.raises(ValueError, match=message):
            function(**{"query": X, "key": X, "value": X, **given})


def test_math_can_do_everything() -> None:
    """The last resort, on devices that nothing else knows: with a seed of torch's own."""
    given = {"is_causal": True, "softcap": 2.0, "window": (3, 1), "alibi_slopes": torch.rand(4)}
    mask = torch.rand(8, 8) > 0.2
    expected = attention(X, X, X, mask, backend="cpu", **given)
    torch.testing.assert_close(attention(X, X, X, mask, backend="math", **given), expected)
    assert not torch.equal(attention(X, X, X, mask, dropout_p=0.5, backend="math", **given), expected)


def test_every_backend_is_told_of() -> None:
    given = arguments(X, X, X, None, 0.0, False, None, False, None, None, None)
    assert set(REASONS) == {name for name, _ in ABOUT.backends}
    assert list(against(given, "auto")) == ["cudnn", "flash"]  # no more is asked than is needed
    assert list(against(given, "triton")) == ["triton"]


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [
        (torch.bfloat16, {}, "cudnn"),
        (torch.bfloat16, {"dropout_p": 0.1, "is_causal": True}, "cudnn"),
        (torch.float32, {}, "efficient"),
        (torch.bfloat16, {"attn_mask": torch.bool}, "triton"),  # edge case 12: cuDNN's gradients can be NaN
        (torch.float32, {"attn_mask": torch.float32}, "efficient"),
        (torch.bfloat16, {"softcap": 2.0}, "triton"),
        (torch.float32, {"window": (3, 1), "dropout_p": 0.1}, "triton"),
        (torch.bfloat16, {"attn_mask": torch.bool, "is_causal": True}, "triton"),
        (torch.float64, {}, "math"),
    ],
)
def test_what_a_hopper_gpu_would_take(
    dtype: torch.dtype, given: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tensors that only say that they are on a GPU: the choice reads nothing else of them."""
    assert taken_on_hopper(dtype, given, monkeypatch) == expected


@pytest.mark.parametrize(
    ("dtype", "given", "ours_first", "other_first"),
    [
        (torch.bfloat16, {"attn_mask": torch.bool}, "triton", "efficient"),
        (torch.bfloat16, {"attn_mask": torch.bfloat16}, "triton", "efficient"),
        (torch.float32, {"attn_mask": torch.float32}, "efficient", "efficient"),  # of which nothing was measured
        (torch.float32, {}, "efficient", "efficient"),
    ],
)
def test_the_rule_for_a_mask_is_one_constant(
    dtype: torch.dtype, given: dict[str, Any], ours_first: str, other_first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert taken_on_hopper(dtype, given, monkeypatch) == ours_first
    monkeypatch.setattr(attention_backends, "EFFICIENT_BEFORE_TRITON", True)
    assert taken_on_hopper(dtype, given, monkeypatch) == other_first


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 2, 1, 0)])
def test_a_gradient_comes_in_the_layout_of_the_output(order: tuple[int, ...]) -> None:
    """And with the same values; one that lies so already is not copied."""
    shape = (2, 3, 5, 4)
    inverse = [order.index(axis) for axis in range(4)]
    leaf = torch.randn([shape[axis] for axis in order]).permute(inverse).requires_grad_()
    given, seen = torch.randn(shape), []
    out = with_gradient_as_laid_out(leaf * 1)
    out.grad_fn.next_functions[0][0].register_prehook(seen.extend)
    out.backward(given)
    assert torch.equal(seen[0], given)
    assert seen[0].stride() == leaf.stride() == out.stride()
    assert (seen[0].data_ptr() == given.data_ptr()) == (order == (0, 1, 2, 3))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_of_two_layouts_after_one_another() -> None:
    """torch runs the second with the first one's plan where the strides of q, k and v are alike."""
    packed = torch.randn(2, 256, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (each.transpose(1, 2).requires_grad_() for each in packed.unbind(2))
    upstream = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    found = [
        torch.autograd.grad(attention(q, k, v, is_causal=True, backend="cudnn"), (q, k, v), laid_out)
        for laid_out in (upstream, upstream.transpose(1, 2).contiguous().transpose(1, 2))
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-6, atol=2**-6)  # the kernel adds in no fixed order


def taken_on_hopper(dtype: torch.dtype, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr("gradscope.kernels.choice.why_torch", lambda values: None)  # for fake tensors
    with FakeTensorMode():
        x = torch.empty(2, 4, 8, 16, dtype=dtype, device="cuda")
        if "attn_mask" in given:
            given = {**given, "attn_mask": torch.ones(8, 8, dtype=given["attn_mask"], device="cuda")}
        return attention.explain(x, x, x, **given).backend


def test_a_mask_that_wants_a_gradient_costs_nothing_where_none_is_taken() -> None:
    q, mask = torch.randn(1, 2, 8, 4), torch.zeros(8, 8, requires_grad=True)
    assert attention.explain(q, q, q, mask).backend == "cpu"
    with torch.no_grad():
        assert attention.explain(q, q, q, mask).backend == "flash"


def test_a_negative_share_is_refused_also_where_little_is_looked_at() -> None:
    q = torch.randn(1, 2, 8, 4)
    with pytest.raises(ValueError, match=r"attention: dropout_p is -0.1; expected a number in \[0, 1\]"):
        attention(q, q, q, dropout_p=-0.1)


@pytest.mark.parametrize("window", [(None, 1), (1, None), (0, 0), (None, None)], ids=str)
def test_each_side_of_a_window_is_heeded(window: tuple[int | None, int | None]) -> None:
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    left, right = (8 if side is None else side for side in window)
    behind = torch.arange(8)[:, None] - torch.arange(8)
    seen = (behind <= left) & (-behind <= right)
    expected = functional.scaled_dot_product_attention(q, k, v, seen)
    torch.testing.assert_close(attention(q, k, v, window=window), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(1, 3, 3), (3, 1, 1), (3, 1, 3), (1, 1, 3), (1, 3, 1)], ids=str)
@pytest.mark.parametrize("backend", ["auto", "cpu", "math"])
def test_one_head_is_that_of_all(heads: tuple[int, int, int], backend: str) -> None:
    q, k, v = (torch.randn(2, each, 8, 4) for each in heads)
    expected = functional.scaled_dot_product_attention(*(each.expand(2, 3, 8, 4) for each in (q, k, v)))
    torch.testing.assert_close(attention(q, k, v, backend=backend), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "cpu", "math"])
def test_float64_stays_float64_under_autocast(backend: str) -> None:
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    expected = functional.scaled_dot_product_attention(q, q, q)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention(q, q, q, backend=backend)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("backend", ["cpu", "math"])
def test_slopes_of_float64_are_not_rounded(backend: str) -> None:
    q = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    slopes = torch.tensor([0.1, 0.3], dtype=torch.float64)
    away = (torch.arange(8)[:, None] - torch.arange(8)).abs()
    expected = functional.scaled_dot_product_attention(q, q, q, -slopes[:, None, None] * away)
    torch.testing.assert_close(attention(q, q, q, alibi_slopes=slopes, backend=backend), expected, rtol=1e-12, atol=0)
