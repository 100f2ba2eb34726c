"""Attention by the best backend for the case, and never by the slow one without a word."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from gradscope.kernels.attention.dropout import draw_seed
from gradscope.kernels.choice import BackendChoice, choose, explained_by
from gradscope.recipes.attention_arguments import NAME, arguments
from gradscope.recipes.attention_backends import (
    REASONS,
    against,
    by_sdpa,
    by_torch,
    flash_on_the_cpu,
    is_plain_on_the_cpu,
    is_small_on_the_cpu,
    math_on_the_cpu,
    needs_plain_operations,
    reason_of,
    taken,
)
from gradscope.recipes.attention_function import AttentionFunction, AttentionSettings
from gradscope.recipes.recipe import Recipe

ABOUT = Recipe(
    name="attention",
    title="Attention that never stores the score matrix, with dropout and every common option",
    functions=("attention", "attention_mask", "attention_with_weights"),
    modules=("Attention",),
    replaces=(
        "(q @ k.transpose(-2, -1) * scale).softmax(-1) @ v, with a causal mask or dropout in between",
        "torch.nn.functional.scaled_dot_product_attention where it falls to the math kernel: dropout on the CPU, a "
        "bias with a gradient, a last dimension that is not contiguous",
        "unfused soft-capped, ALiBi and sliding-window attention",
        "attention with sinks: one learned score per head that takes part in the softmax and is dropped after it",
    ),
    saves=(
        "The score and probability matrices (queries × keys per head) are never stored: backward "
        "recomputes them block by block from the saved logsumexp. Blocks that a causal mask or a "
        "window masks out are skipped."
    ),
    limits=(
        "Second derivatives are supported only by backend='math'.",
        "ALiBi slopes get no gradient.",
        "The values of a mask are not inspected: for a causal mask, is_causal=True is faster.",
        (
            "On a GPU, float64 and head sizes above 256 fall back to unfused operations, which store "
            "the full score matrix."
        ),
    ),
    backends=(
        ("flash", "torch's kernel; CPU: without dropout and gradient of the mask; CUDA: float16, bfloat16, no mask"),
        ("cpu", "CPU, every option; with dropout alone from 1,000,000 scores on; measured"),
        ("cudnn", "CUDA from compute capability 9.0, float16 and bfloat16 without a mask"),
        ("efficient", "CUDA, masks and biases"),
        ("triton", "CUDA from compute capability 8.0, every option"),
        ("math", "everywhere, storing the full score matrix; on the CPU for few scores with dropout"),
    ),
    sources=(
        "Dao, Fu, Ermon, Rudra, Ré: FlashAttention, arXiv:2205.14135",
        "Rabe, Staats: Self-attention does not need O(n²) memory, arXiv:2112.05682",
        "Milakov, Gimelshein: Online normalizer calculation for softmax, arXiv:1805.02867",
        "Press, Smith, Lewis: Train short, test long (ALiBi), arXiv:2108.12409",
        "Ainslie et al.: GQA, arXiv:2305.13245",
        "Gemma 2 (soft-cap), arXiv:2408.00118; Beltagy, Peters, Cohan: Longformer (window), arXiv:2004.05150",
        "cuDNN's gradients with a mask: pytorch#196678",
    ),
)


def _explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> BackendChoice:
    """What :func:`attention` would do with these arguments, and why."""
    query, scale = positive_scale(query, scale)
    given = arguments(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, alibi_slopes, window, sinks
    )
    choice = choose(NAME, backend, REASONS, against(given, backend))
    if backend == "auto":
        choice = dataclasses.replace(choice, reason=reason_of(choice.backend, given))
    if given.bias is None or is_causal or given.q.shape[2] != given.k.shape[2] or given.q.shape[2] == 1:
        return choice
    note = "; the mask's values are not inspected: if it is causal, is_causal=True skips half of the work"
    if given.q.device.type == "cuda":
        note += " and lets a faster kernel run"
    return dataclasses.replace(choice, reason=choice.reason + note)


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    query, scale = positive_scale(query, scale)
    other = softcap is not None or alibi_slopes is not None or window is not None or sinks is not None
    if not other and not (is_causal and (attn_mask is not None or needs_plain_operations(query))):
        return by_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    given = arguments(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, alibi_slopes, window, sinks
    )
    return by_torch(given, "math").reshape(given.shape)


@explained_by(_explain, _plain, REASONS)
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute :func:`torch.nn.functional.scaled_dot_product_attention` by a backend that holds no scores.

    A row that sees no key gives 0, and finite gradients. Query i and key j count from 0, also where there are not as
    many of the one as of the other: a causal mask begins at the top left.

    Args:
        query: [..., heads, queries, size], any strides; float16, bfloat16, float32 or float64.
        key: [..., heads, keys, size]; with ``enable_gqa`` a divisor of the query's heads.
        value: [..., heads, keys, value size], with the key's heads.
        attn_mask: boolean, True takes part, or float32 or the query's dtype, added to the scores; broadcasts to
            [..., heads, queries, keys]. An added one may require a gradient. May be given beside ``is_causal``.
        dropout_p: share of the attention weights that is dropped, whether training or not.
        is_causal: key j is seen by query i where j <= i.
        scale: of the scores; None is ``1 / sqrt(size)``. A tensor of one number gets a gradient.
        enable_gqa: query heads read the key heads in equal groups.
        softcap: the scores are ``softcap · tanh(scores / softcap)`` before mask and ALiBi.
        alibi_slopes: [heads] or [..., heads]; ``slope · |i - j|`` is subtracted from the scores.
        window: (left, right): key j is seen by query i where ``i - left <= j <= i + right``; None is no limit.
        sinks: [heads], a floating dtype: the score of one more key of each query, whose value is 0. The others' weights
            add up to less than 1; a row that sees no key still gives 0. May require a gradient.
        backend: "auto", "cudnn", "flash", "efficient", "cpu", "triton" or "math"; ``attention.explain`` tells what
            "auto" takes.

    Returns:
        [..., heads, queries, value size] in the query's dtype; under autocast in autocast's.

    Raises:
        ValueError: a shape, dtype, device or setting does not fit, or ``backend`` cannot run here.
    """
    query, scale = positive_scale(query, scale)
    no_option = attn_mask is None and softcap is None and alibi_slopes is None and window is None and sinks is None
    no_option = no_option and not enable_gqa
    if no_option and dropout_p == 0 and backend in ("auto", "flash") and is_plain_on_the_cpu(query, key, value):
        return flash_on_the_cpu(query, key, value, is_causal, None, scale)
    if no_option and 0 < dropout_p <= 1 and backend == "auto" and is_small_on_the_cpu(query, key, value):
        return math_on_the_cpu(query, key, value, dropout_p, is_causal, scale)
    given = arguments(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, alibi_slopes, window, sinks
    )
    chosen = taken(given, backend)
    if chosen in ("cpu", "triton"):
        seed = draw_seed(query.device) if dropout_p > 0 else None
        settings = AttentionSettings(given.scale, is_causal, given.dropout_p, softcap, given.left, given.right, chosen)
        q, k, v = given.q, given.k, given.v
        if torch.compiler.is_compiling():  # it refuses a Function that is given one tensor twice
            k, v = k.view_as(k), v.view_as(v)
        out: Tensor = AttentionFunction.apply(  # type: ignore[no-untyped-call]
            q, k, v, given.bias, given.alibi, seed, given.sinks, settings
        )
    else:
        out = by_torch(given, chosen)
    return out if out.shape == given.shape else out.reshape(given.shape)


def positive_scale(query: Tensor, scale: float | Tensor | None) -> tuple[Tensor, float | None]:
    """Give the same scores from a scale above 0: torch's kernel multiplies what it hid with it, minus infinity."""
    if scale is None or (type(scale) is float and scale > 0):
        return query, scale
    if isinstance(scale, Tensor):
        return query * scale.to(query.dtype), 1.0
    if scale < 0:
        return -query, -scale
    return (query, scale) if scale > 0 else (query * scale, 1.0)


class Attention(nn.Module):
    """:func:`attention` with its settings; dropout only while training.

    Args:
        dropout_p, is_causal, scale, enable_gqa, softcap, window, backend: as there.
        alibi_slopes: as there; a buffer that is not part of the state dict.
    """

    alibi_slopes: Tensor | None

    def __init__(
        self,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
        window: tuple[int | None, int | None] | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.dropout_p, self.is_causal, self.scale, self.enable_gqa = dropout_p, is_causal, scale, enable_gqa
        self.softcap, self.window, self.backend = softcap, window, backend
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention of [..., heads, length, size]."""
        return attention(
            query,
            key,
            value,
            attn_mask,
            self.dropout_p if self.training else 0.0,
            self.is_causal,
            self.scale,
            self.enable_gqa,
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
            window=self.window,
            sinks=sinks,
            backend=self.backend,
        )

    def extra_repr(self) -> str:
        """The settings that are not the defaults."""
        settings = {
            "dropout_p": (self.dropout_p, 0.0),
            "is_causal": (self.is_causal, False),
            "scale": (self.scale, None),
            "enable_gqa": (self.enable_gqa, False),
            "softcap": (self.softcap, None),
            "window": (self.window, None),
            "backend": (self.backend, "auto"),
        }
        return ", ".join(f"{name}={value!r}" for name, (value, default) in settings.items() if value != default)
