"""Self-attention from a packed projection to merged heads, with one gradient buffer and no copy of a head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from gradscope.kernels import pays
from gradscope.kernels.attention import triton_launch
from gradscope.kernels.attention.dropout import draw_seed
from gradscope.kernels.attention.options import AttentionOptions, default_scale
from gradscope.kernels.check import FLOATING, dtype_text, refuse, require_range, require_same_device, shape_text
from gradscope.kernels.choice import BackendChoice, choose, explained_by
from gradscope.kernels.heads import held, packed
from gradscope.kernels.heads.layout import merge_heads, qkv_views
from gradscope.kernels.once import first_derivative_only, token
from gradscope.recipes.heads import check_packed, split_qkv
from gradscope.recipes.recipe import Recipe

ABOUT = Recipe(
    name="packed_attention",
    title="Attention over a packed q, k, v projection, with its gradient written into one buffer",
    functions=("packed_attention",),
    modules=("PackedSelfAttention",),
    replaces=(
        "q, k, v = c_attn(x).split(...), split heads, scaled_dot_product_attention, merge heads",
        "the same with unfused attention",
    ),
    saves=(
        "The concatenation of the q, k and v gradients: they are written directly into one "
        "(batch, tokens, 3 · width) tensor. On the CPU, full rows of scores need fewer passes "
        "than torch's flash kernel."
    ),
    limits=(
        (
            "On a GPU it is the attention recipe on views: torch's kernels allocate their own "
            "gradients, so one copy remains."
        ),
        "Self-attention only: queries, keys and values have the same number of tokens.",
        (
            "On the CPU it is also the attention recipe, except for 512 to 768 tokens and, with dropout, from "
            "1,000,000 scores; without dropout, float16 and bfloat16 always use the attention recipe."
        ),
        "A second derivative raises RuntimeError.",
    ),
    backends=(
        ("cpu", "CPU; measured there"),
        ("held", "CPU, float32 and float64, without mask and dropout, if selected; measured"),
        ("triton", "NVIDIA GPUs from compute capability 8.0, if selected"),
        ("attention", "everything else that the attention recipe supports"),
        ("math", "torch's unfused operations, if selected: an added mask may need it"),
    ),
    sources=(
        "T. Dao et al., FlashAttention (arXiv:2205.14135): flash_attn_qkvpacked_func writes into one dqkv",
        "A. Karpathy, nanoGPT, model.py: CausalSelfAttention",
    ),
)

_NAME = "packed_attention"
SHORT = 256  # tokens: below, the views are made by torch's operations
_REASONS = {
    "held": (
        "many short sequences: the full score matrix is small enough to store, and each "
        "operation is one call for all heads"
    ),
    "cpu": "blocks of scores stay in the cache, and gradients are written directly into one buffer",
    "triton": "gradients are written directly into one buffer",
    "attention": "the attention recipe on views of the projection",
    "math": "the attention recipe on views of the projection, using torch's unfused operations",
}


def _explain(
    qkv: Tensor,
    heads: int,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    kv_heads: int | None = None,
    sees: Tensor | None = None,
    backend: str = "auto",
) -> BackendChoice:
    """What :func:`packed_attention` would do with these arguments, and why."""
    kv_heads = check_packed(_NAME, qkv, heads, kv_heads)
    _check(qkv, heads, attn_mask, dropout_p, scale)
    against = {
        "held": _against_held(qkv, heads, kv_heads, attn_mask, dropout_p),
        "cpu": None if qkv.device.type == "cpu" else f"the tensors are on {qkv.device}",
        "triton": triton_launch.why_not(*qkv_views(qkv, heads, kv_heads), attn_mask, AttentionOptions(1.0, kv_heads)),
    }
    if sees is not None:
        against = dict.fromkeys(against, "queries with no visible key get no gradient")
    elif isinstance(scale, Tensor):
        against = dict.fromkeys(against, "the scale is a tensor, which may require a gradient")
    if backend == "auto":
        plain = attn_mask is None and not dropout_p
        few = _against_size(qkv, heads, dropout_p)
        against["held"] = against["held"] or _against_holding(qkv, heads)
        short = (
            ("torch's matmul is faster in this dtype")
            if plain and qkv.dtype in (torch.float16, torch.bfloat16)
            else None
        )
        against["cpu"] = against["cpu"] or few or short
        against["triton"] = against["triton"] or "torch's own kernels save more than the avoided copy"
    return choose(_NAME, backend, _REASONS, against)


def _plain(
    qkv: Tensor,
    heads: int,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    kv_heads: int | None = None,
    sees: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    from gradscope.recipes.attention import attention

    q, k, v = split_qkv(qkv, heads, kv_heads=kv_heads)
    q, attn_mask = q if sees is None else q * sees, _cast(attn_mask, qkv)
    return merge_heads(attention(q, k, v, attn_mask, dropout_p, is_causal, scale, kv_heads not in (None, heads)))


@explained_by(_explain, _plain, _REASONS)
def packed_attention(
    qkv: Tensor,
    heads: int,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    kv_heads: int | None = None,
    sees: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Scaled dot-product attention of queries, keys and values that one projection computed.

    The arguments are those of :func:`torch.nn.functional.scaled_dot_product_attention`, which it equals, with the
    projection in place of query, key and value. Under autocast ``qkv`` is cast as SDPA's arguments are.

    Args:
        qkv: [batch, tokens, (heads + 2 · kv heads) · size]: all of q, then all of k, then all of v; float16, bfloat16,
            float32 or float64.
        heads: of the queries.
        attn_mask: boolean (True takes part) or floating (added to the scores, with a gradient where it requires one),
            broadcastable to [batch, heads, tokens, tokens]. A row without any key gives 0.
        dropout_p: of the attention weights, in [0, 1]; applied whenever it is above 0, as in SDPA.
        is_causal: a query sees itself and what is before it, in addition to ``attn_mask``.
        scale: of the scores; None for ``1 / sqrt(size)``. A tensor of one number gets a gradient.
        kv_heads: of keys and values (grouped heads); None for ``heads``.
        sees: [..., tokens, 1], as :func:`~gradscope.recipes.attention_mask` gives it with ``packed=True``: where it is
            False, the query weighs by the mask alone and gets no gradient.
        backend: "auto", "held", "cpu", "triton", "attention" or "math"; ``packed_attention.explain`` tells what "auto"
            takes.

    Returns:
        [batch, tokens, heads · size].

    Raises:
        ValueError: a shape, dtype, device or setting does not fit.
    """
    # The commonest small case, known to be right by fewer looks: explaining takes longer than the products here.
    scalable = scale is None or (isinstance(scale, (int, float)) and math.isfinite(scale))
    plain = backend == "auto" and attn_mask is None and sees is None and dropout_p == 0 and scalable
    if plain and _is_small(qkv, heads, kv_heads):
        if _against_dtype(qkv) is None and _against_holding(qkv, heads) is None:
            return _held(qkv, heads, is_causal, scale)
        return _on_views(qkv, heads, heads, None, 0.0, is_causal, scale)
    choice = _explain(qkv, heads, attn_mask, dropout_p, is_causal, scale, kv_heads=kv_heads, sees=sees, backend=backend)
    kv_heads = heads if kv_heads is None else kv_heads
    if torch.is_autocast_enabled(qkv.device.type) and qkv.dtype == torch.float32:
        qkv = qkv.to(torch.get_autocast_dtype(qkv.device.type))
    if choice.backend == "held":
        return _held(qkv, heads, is_causal, scale)
    if choice.backend in ("attention", "math"):
        inner = "math" if choice.backend == "math" else "auto"
        return _on_views(qkv, heads, kv_heads, attn_mask, dropout_p, is_causal, scale, inner, sees)
    seed = draw_seed(qkv.device) if dropout_p > 0 else None
    settings = (heads, kv_heads, is_causal, float(dropout_p))
    factor = default_scale(qkv.shape[2] // (heads + 2 * kv_heads)) if scale is None else float(scale)
    found: Tensor = _PackedAttention.apply(  # type: ignore[no-untyped-call]
        qkv, attn_mask, seed, (*settings, factor, choice.backend)
    )
    return found


def _is_small(qkv: Tensor, heads: int, kv_heads: int | None) -> bool:
    """Check that ``qkv`` is a well-formed problem on the CPU that auto leaves to attention on plain views."""
    return (
        type(heads) is int
        and heads > 0
        and kv_heads in (None, heads)
        and qkv.is_cpu
        and not qkv.is_nested
        and qkv.dim() == 3
        and qkv.shape[1] < SHORT
        and pays.against(_NAME, tokens=qkv.shape[1]) is not None
        and qkv.shape[2] > 0
        and qkv.shape[2] % (3 * heads) == 0
        and qkv.dtype in FLOATING
    )


def _against_held(qkv: Tensor, heads: int, kv_heads: int, attn_mask: Tensor | None, dropout_p: float) -> str | None:
    """Why the scores cannot be held."""
    if qkv.device.type != "cpu":
        return f"the tensors are on {qkv.device}"
    if attn_mask is not None or dropout_p:
        return "it supports neither a mask nor dropout"
    if kv_heads != heads:
        return "it needs as many key heads as query heads"
    if not qkv.numel():
        return "a dimension is 0"
    return _against_dtype(qkv)


def _against_dtype(qkv: Tensor) -> str | None:
    if qkv.dtype not in (torch.float32, torch.float64):
        return f"it does not support {dtype_text(qkv.dtype)}"
    return "under autocast the attention recipe runs" if torch.is_autocast_enabled(qkv.device.type) else None


def _against_holding(qkv: Tensor, heads: int) -> str | None:
    """Why the scores should not be held where they can be; a problem of another rank is refused before."""
    batch, tokens = qkv.shape[0], qkv.shape[1]
    return pays.against(f"{_NAME} with held scores", scores=batch * heads * tokens * tokens)


def _against_size(qkv: Tensor, heads: int, dropout_p: float) -> str | None:
    """Why blocks of scores are not walked over, though they could be."""
    batch, tokens = qkv.shape[0], qkv.shape[1]
    if dropout_p:
        return pays.against("attention with dropout", scores=batch * heads * tokens * tokens)
    return pays.against(_NAME, tokens=tokens)


def _held(qkv: Tensor, heads: int, is_causal: bool, scale: float | None) -> Tensor:
    factor = default_scale(qkv.shape[2] // (3 * heads)) if scale is None else float(scale)
    found, _ = _HeldAttention.apply(qkv, heads, is_causal, factor)  # type: ignore[no-untyped-call]
    return found  # type: ignore[no-any-return]


def _on_views(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    backend: str = "auto",
    sees: Tensor | None = None,
) -> Tensor:
    from gradscope.recipes.attention import attention

    attn_mask = _cast(attn_mask, qkv)
    if sees is None and qkv.device.type == "cpu" and heads == kv_heads and qkv.shape[1] < SHORT:
        # What a Function in Python takes, some 0.1 ms a step, is more than one copy of so little.
        batch, tokens, width = qkv.shape
        parts = qkv.view(batch, tokens, 3, heads, width // (3 * heads)).unbind(2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        found = attention(q, k, v, attn_mask, dropout_p, is_causal, scale, backend=backend)
        return found.transpose(1, 2).reshape(batch, tokens, width // 3)
    q, k, v = split_qkv(qkv, heads, kv_heads=kv_heads)
    q = q if sees is None else q * sees
    found = attention(q, k, v, attn_mask, dropout_p, is_causal, scale, heads != kv_heads, backend=backend)
    return merge_heads(found)


def _cast(mask: Tensor | None, qkv: Tensor) -> Tensor | None:
    """A mask of any floating dtype as the attention recipe takes it."""
    return mask if mask is None or mask.dtype in (torch.bool, qkv.dtype) else mask.float()


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        bias: Tensor | None,
        seed: Tensor | None,
        settings: tuple[int, int, bool, float, float, str],
    ) -> Tensor:
        out, logsumexp = packed.forward(qkv, bias, seed, *settings)
        dropout_p, backend = settings[3], settings[5]
        kept = None if packed.without_logsumexp(qkv, bias, dropout_p, backend) else out
        ctx.save_for_backward(qkv, bias, seed, kept, logsumexp)
        ctx.settings = settings
        return out

    @staticmethod
    @first_derivative_only(_NAME, "attention(..., backend='math') supports second derivatives")
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        qkv, bias, seed, out, logsumexp = ctx.saved_tensors
        wants_bias = ctx.needs_input_grad[1]
        heads, kv_heads, is_causal, dropout_p, scale, backend = ctx.settings
        options = (heads, kv_heads, is_causal, dropout_p, scale, backend, wants_bias)
        dqkv, dbias = packed.backward(upstream, qkv, bias, seed, out, logsumexp, *options)
        return dqkv, dbias if wants_bias else None, None, None


class _HeldAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        out, *kept = held.forward(qkv, heads, is_causal, scale)
        link = token(qkv)
        ctx.save_for_backward(*kept, link)
        ctx.settings = (heads, scale)
        return out, link

    @staticmethod
    @first_derivative_only(_NAME, "attention(..., backend='math') supports second derivatives")
    def backward(ctx: Any, upstream: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if upstream is None:
            return None, None, None, None
        *kept, _link = ctx.saved_tensors
        return held.backward(upstream, *kept, *ctx.settings), None, None, None


class PackedSelfAttention(nn.Module):
    """nanoGPT's CausalSelfAttention around projections that exist: :func:`packed_attention` between them.

    The projections are the user's own modules, under the names that GPT-2's checkpoints have: the state dict is the
    same as before.

    Args:
        c_attn: [..., width] to [..., (heads + 2 · kv heads) · size].
        c_proj: [..., heads · size] to the output.
        heads, kv_heads, is_causal, scale: see :func:`packed_attention`.
        dropout_p: of the attention weights, in training only.
        resid_dropout: applied to the output; None for nothing.
    """

    def __init__(
        self,
        c_attn: nn.Module,
        c_proj: nn.Module,
        heads: int,
        *,
        kv_heads: int | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = True,
        scale: float | None = None,
        resid_dropout: nn.Module | None = None,
    ) -> None:
        super().__init__()
        require_range("PackedSelfAttention", "dropout_p", dropout_p, 0.0, 1.0)
        self.c_attn, self.c_proj, self.resid_dropout = c_attn, c_proj, resid_dropout
        self.heads, self.kv_heads = heads, kv_heads
        self.dropout_p, self.is_causal, self.scale = dropout_p, is_causal, scale

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """[batch, tokens, width] to [batch, tokens, width of c_proj's output]."""
        found = packed_attention(
            self.c_attn(x),
            self.heads,
            attn_mask,
            self.dropout_p if self.training else 0.0,
            self.is_causal,
            self.scale,
            kv_heads=self.kv_heads,
        )
        projected: Tensor = self.c_proj(found)
        return projected if self.resid_dropout is None else self.resid_dropout(projected)

    def extra_repr(self) -> str:
        """The settings."""
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        return f"heads={self.heads}, kv_heads={kv_heads}, dropout_p={self.dropout_p}, is_causal={self.is_causal}"


def _check(qkv: Tensor, heads: int, attn_mask: Tensor | None, dropout_p: float, scale: float | None) -> None:
    require_range(_NAME, "dropout_p", dropout_p, 0.0, 1.0)
    if scale is not None:
        require_range(_NAME, "scale", scale, -float("inf"), float("inf"), open_low=True, open_high=True)
    if attn_mask is None:
        return
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        refuse(_NAME, "attn_mask", f"of dtype {dtype_text(attn_mask.dtype)}", "bool or a floating dtype")
    full = (qkv.shape[0], heads, qkv.shape[1], qkv.shape[1])
    own = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    # Not "in (1, size)": under torch.compile that is false of equal sizes where one is not fixed.
    if len(own) != 4 or any(mine != 1 and mine != size for mine, size in zip(own, full, strict=True)):
        refuse(_NAME, "attn_mask", shape_text(attn_mask), f"a shape that broadcasts to {full}")
    require_same_device(_NAME, ("qkv", qkv), attn_mask=attn_mask)
