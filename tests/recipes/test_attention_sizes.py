"""Attention of few scores on the CPU: torch's own operations, given all that hides as one mask."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gradscope.kernels import pays
from gradscope.kernels.attention import reference
from gradscope.kernels.attention.options import AttentionOptions, default_scale
from gradscope.recipes import attention

pytestmark = pytest.mark.measured_sizes
BATCH, HEADS, QUERIES, KEYS, SIZE = 2, 4, 7, 5, 8
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])

MASKS = {
    "none": None,
    "boolean": torch.tensor(
        [[True, True, False, True, True]] * 3 + [[False] * 5] + [[False, True, True, True, True]] * 3
    ),
    "of keys": torch.tensor([True, True, True, False, False]).expand(BATCH, 1, 1, KEYS),
    "added": torch.linspace(-1, 1, QUERIES * KEYS).view(QUERIES, KEYS),
    "hides": torch.zeros(QUERIES, KEYS).masked_fill(torch.arange(KEYS) > 2, -torch.inf),
}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": (2, 1)},
    "left": {"window": (1, None)},
    "ALiBi": {"alibi_slopes": SLOPES},
    "ALiBi of each": {"alibi_slopes": torch.stack((SLOPES, 2 * SLOPES))},
    "ALiBi, window": {"alibi_slopes": SLOPES, "window": (None, 0)},
    "soft-cap": {"softcap": 1.5},
    "soft-cap, window": {"softcap": 1.5, "window": (2, 2), "alibi_slopes": SLOPES},
}  # fmt: skip


def given(dtype: torch.dtype, *, wide: bool = False, grouped: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    heads = HEADS // 2 if grouped else HEADS
    shapes = ((HEADS, QUERIES, SIZE), (heads, KEYS, SIZE), (heads, KEYS, SIZE + 3 if wide else SIZE))
    return tuple(torch.randn(BATCH, *shape, dtype=dtype) for shape in shapes)  # type: ignore[return-value]


def truth(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Tensor:
    kept = {name: value for name, value in options.items() if name != "alibi_slopes"}
    alibi = options.get("alibi_slopes")
    kept["alibi"] = None if alibi is None else alibi.double()
    return reference.attention(q, k, v, mask, AttentionOptions(default_scale(SIZE), k.shape[1], **kept))[0]


def run(function: Any, tensors: tuple[Tensor, ...], mask: Tensor | None, learnt: bool) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    bias = mask.detach().clone().requires_grad_() if mask is not None and learnt else mask
    out = function(*leaves, bias)
    wanted = [*leaves, bias] if learnt and bias is not None else leaves
    upstream = torch.linspace(-1, 2, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, wanted, upstream)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("kind", MASKS)
def test_every_option_is_as_by_plain_operations(kind: str, extra: str, dtype: torch.dtype) -> None:
    """Results and all gradients, rows that see nothing among them."""
    mask = MASKS[kind]
    for causal, wide, grouped, learnt in itertools.product((False, True), repeat=4):
        if learnt and (mask is None or mask.dtype == torch.bool or bool(torch.isinf(mask).any())):
            continue
        options = {"is_causal": causal, **EXTRAS[extra]}
        tensors = given(dtype, wide=wide, grouped=grouped)
        bias = mask.to(dtype) if mask is not None and mask.dtype != torch.bool else mask
        choice = attention.explain(*tensors, bias, enable_gqa=grouped, **options)
        found = run(partial(attention, enable_gqa=grouped, **options), tensors, bias, learnt)
        expected = run(
            partial(truth, options=options),
            tuple(x.double() for x in tensors),
            bias.double() if bias is not None and bias.dtype != torch.bool else bias,
            learnt,
        )
        assert choice.backend in ("math", "flash"), (options, choice)
        for one, other in zip(found, expected, strict=True):
            # float32's own rounding of a sum of 8 products and 5 weights, with scores below 4.
            limits = {"rtol": 1e-5, "atol": 5e-6} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
            torch.testing.assert_close(one.double(), other, **limits)


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("kind", MASKS)
def test_dropout_drops_weights_and_scales_the_rest(kind: str, extra: str) -> None:
    """With the unit matrix for values the result is the weights."""
    q, k, _ = given(torch.float64)
    v = torch.eye(KEYS, dtype=torch.float64).expand(BATCH, HEADS, KEYS, KEYS)
    mask = MASKS[kind]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    whole = truth(q, k, v, mask, {"is_causal": True, **EXTRAS[extra]})
    dropped = attention(q, k, v, mask, 0.25, True, **EXTRAS[extra])
    assert attention.explain(q, k, v, mask, 0.25, True, **EXTRAS[extra]).backend == "math"
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], whole[kept] / 0.75, rtol=1e-10, atol=1e-12)
    assert 0 < int((~kept & (whole != 0)).sum()) < int((whole != 0).sum()) // 2


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"dropout_p": 0.1, "is_causal": True}, "attention with dropout"),
        ({"dropout_p": 0.1, "attn_mask": "seen"}, "attention with dropout and a mask"),
        ({"dropout_p": 0.1, "window": (4, 0)}, "attention with dropout and a mask"),
        ({"attn_mask": "learnt"}, "attention with a learnt bias"),
        ({"attn_mask": "learnt", "dropout_p": 0.1, "is_causal": True}, "attention with a learnt bias and dropout"),
        ({"softcap": 2.0, "window": (4, 0), "dropout_p": 0.1}, "attention with a soft-cap"),
        ({"sinks": torch.zeros(4)}, "attention with a soft-cap"),
        ({"window": (4, 0)}, "attention with a narrow window"),
        ({"window": (4, None), "is_causal": True}, "attention with a narrow window"),
        ({"window": (None, 0)}, "attention with a combined mask"),
        ({"window": (200, 0)}, "attention with a combined mask"),
        ({"window": (15, 0)}, "attention with a narrow window"),  # sees a quarter of the keys
        ({"window": (16, 0)}, "attention with a combined mask"),
        ({"attn_mask": "seen", "is_causal": True}, "attention with a combined mask"),
        ({"alibi_slopes": SLOPES}, "attention with ALiBi"),
        ({"value": "wide"}, "attention with wide values"),
        ({"value": "wide", "attn_mask": "seen"}, "attention with wide values"),
    ],
)
def test_each_option_has_its_rule(options: dict[str, Any], rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Own code from the rule's number of scores on, torch's below; no other rule decides."""
    tokens = 64
    x = torch.zeros(2, HEADS, tokens, SIZE)
    masks = {"seen": torch.ones(tokens, tokens) > 0, "learnt": torch.zeros(tokens, tokens, requires_grad=True)}
    arguments = {"query": x, "key": x, "value": x, **options}
    arguments["attn_mask"] = masks.get(options.get("attn_mask", ""))
    if options.get("value") == "wide":
        arguments["value"] = torch.zeros(2, HEADS, tokens, 2 * SIZE)
    scores = 2 * HEADS * tokens * tokens
    for fewest, own in ((scores, True), (scores + 1, False)):
        monkeypatch.setattr(pays, "FEWEST", {rule: {"scores": (fewest, fewest)}})
        choice = attention.explain(**arguments)
        assert (choice.backend == "cpu") is own, (fewest, choice)
        if not own:
            assert f"not cpu: fewer than {fewest:,} scores: torch's own is faster" in str(choice) or (
                choice.backend == "flash" and "combined into one mask" in choice.reason
            )


def test_scores_are_queries_times_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.zeros(2, HEADS, 16, SIZE), torch.zeros(2, HEADS, 48, SIZE)
    for fewest, own in ((2 * HEADS * 16 * 48, True), (2 * HEADS * 16 * 48 + 1, False)):
        monkeypatch.setattr(pays, "FEWEST", {"attention with a soft-cap": {"scores": (fewest, fewest)}})
        assert (attention.explain(q, k, k, softcap=2.0).backend == "cpu") is own


def test_half_precision_is_ours() -> None:
    """Where torch's plain operations would add up in 8 bits of it."""
    x = torch.zeros(1, HEADS, 16, SIZE, dtype=torch.bfloat16)
    assert attention.explain(x, x, x, torch.zeros(16, 16).bfloat16().requires_grad_()).backend == "cpu"
    assert attention.explain(x, x, x, is_causal=True, window=(4, 0)).backend == "cpu"


def test_nothing_to_see_is_ours() -> None:
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 0, 4)
    assert attention.explain(q, k, k, softcap=2.0).backend == "cpu"
    assert torch.equal(attention(q, k, k, softcap=2.0), torch.zeros(1, 2, 3, 4))


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("slopes", [torch.float64, torch.float32, torch.bfloat16])
def test_slopes_of_any_dtype(slopes: torch.dtype, dtype: torch.dtype, extra: str) -> None:
    """Of more keys than the CPU handles at once: torch's kernel takes a mask of another dtype for one of its own."""
    options = dict(EXTRAS[extra])
    options["alibi_slopes"] = options.get("alibi_slopes", SLOPES).to(slopes)
    tensors = tuple(torch.randn(BATCH, HEADS, 19, SIZE, dtype=dtype) for _ in range(3))
    found = run(partial(attention, **options), tensors, None, False)
    expected = run(partial(truth, options=options), tuple(x.double() for x in tensors), None, False)
    for one, other in zip(found, expected, strict=True):
        # float32's own rounding of sums of 19 products.
        limits = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
        torch.testing.assert_close(one.double(), other, **limits)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("grouped", [False, True])
def test_traced(extra: str, grouped: bool) -> None:
    tensors = given(torch.float64, grouped=grouped)
    attend = partial(attention, enable_gqa=grouped, **EXTRAS[extra])
    traced = torch.jit.trace(lambda *x: attend(*x), tensors, check_trace=False)
    torch.testing.assert_close(traced(*tensors), attend(*tensors), rtol=1e-12, atol=1e-13)


def test_of_sizes_that_a_compiler_leaves_open() -> None:
    """By torch's plain operations and by its kernel: neither takes what a compiler makes of sizes that it compares."""
    torch._dynamo.reset()
    for wide, learnt, extra in ((True, False, "plain"), (False, True, "ALiBi, window"), (False, False, "ALiBi")):
        attend = partial(attention, enable_gqa=True, **EXTRAS[extra])
        compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
        tensors = given(torch.float64, wide=wide, grouped=True)
        bias = torch.linspace(-1, 1, QUERIES * KEYS, dtype=torch.float64).view(QUERIES, KEYS) if learnt else None
        found, expected = (run(each, tensors, bias, learnt) for each in (compiled, attend))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
    torch._dynamo.reset()
