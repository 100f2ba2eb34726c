"""Parts and heads of a packed projection as views, whose gradients are put together with one copy or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradscope.kernels.check import NoSuchIndexError, refuse, require_dtype, shape_text
from gradscope.kernels.choice import or_torch
from gradscope.kernels.heads import layout
from gradscope.kernels.once import first_derivative_only, token
from gradscope.recipes.recipe import Recipe

ABOUT = Recipe(
    name="heads",
    title="Split and merge of heads and packed projections without double copies",
    functions=("split", "chunk", "split_qkv", "split_heads", "merge_heads"),
    modules=(),
    replaces=(
        "q, k, v = c_attn(x).split(width, dim=2), each then .view(...).transpose(1, 2)",
        "x.view(batch, tokens, heads, size).transpose(1, 2).contiguous()",
        "y.transpose(1, 2).contiguous().view(batch, tokens, width)",
    ),
    saves=(
        "The gradients of q, k and v are written once into the projection's gradient. Torch "
        "first copies each, then concatenates them. Nothing is copied if they already share one "
        "buffer."
    ),
    limits=(
        "With the gradients of scaled_dot_product_attention, torch also copies only once.",
        "A second derivative raises RuntimeError.",
        "Under torch.compile the parts are concatenated, because the compiler plans its own buffers.",
    ),
    backends=(("torch", "every device; views and copies only"),),
    sources=("xformers, ops/unbind.py: a backward that returns a view", "llm.c: one buffer for dq, dk and dv"),
)

_INSTEAD = "torch's split, unflatten, transpose and flatten support second derivatives"


@or_torch(torch.split)
def split(tensor: Tensor, split_size_or_sections: int | Sequence[int], dim: int = 0) -> tuple[Tensor, ...]:
    """Split as :func:`torch.split`. Backward copies nothing where the gradients of the parts lie beside each other.

    Otherwise it allocates the whole once and copies each part once. A part that is not used costs its zeros.

    Args:
        tensor: any shape but a scalar.
        split_size_or_sections: size of each part (the last may be smaller), or of all parts.
        dim: along which.

    Returns:
        Views of ``tensor``.

    Raises:
        ValueError: the sizes do not add up to the dimension's, or one is negative.
    """
    dim = _dimension("split", "tensor", tensor, dim)
    size = tensor.shape[dim]
    if isinstance(split_size_or_sections, int):
        each = split_size_or_sections
        if each < 0 or (each == 0 and size):
            refuse("split", "split_size_or_sections", each, "a positive size")
        sections = [min(each, size - start) for start in range(0, size, each)] if size else [0]
    else:
        sections = list(split_size_or_sections)
        if sum(sections) != size or min(sections, default=0) < 0:
            refuse("split", "split_size_or_sections", sections, f"sizes that add up to {size}, dimension {dim}'s")
    return _split(tensor, sections, dim)


@or_torch(torch.chunk)
def chunk(input: Tensor, chunks: int, dim: int = 0) -> tuple[Tensor, ...]:
    """Chunk as :func:`torch.chunk`, with the backward of :func:`split`.

    Raises:
        ValueError: ``chunks`` is not positive, or ``dim`` none of the tensor's.
    """
    dim = _dimension("chunk", "input", input, dim)
    if chunks < 1:
        refuse("chunk", "chunks", chunks, "a positive number")
    size = input.shape[dim]
    if not size:
        return _split(input, [0] * chunks, dim)
    each = (size + chunks - 1) // chunks
    return _split(input, [min(each, size - start) for start in range(0, size, each)], dim)


def _plain_qkv(qkv: Tensor, heads: int, *, kv_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    each = heads if kv_heads is None else kv_heads
    size = qkv.shape[-1] // (heads + 2 * each)
    parts = torch.split(qkv, [heads * size, each * size, each * size], -1)
    q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in parts)
    return q, k, v


@or_torch(_plain_qkv)
def split_qkv(qkv: Tensor, heads: int, *, kv_heads: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a packed projection, each split into heads, all three as views.

    Backward writes the three gradients, whatever their strides, once each into one tensor of ``qkv``'s shape. Where a
    kernel left them there already, that is returned and nothing is copied.

    Args:
        qkv: [batch, tokens, (heads + 2 · kv heads) · size]: all of q, then all of k, then all of v.
        heads: of the queries.
        kv_heads: of keys and values (grouped heads); None for ``heads``.

    Returns:
        [batch, heads, tokens, size], and twice [batch, kv heads, tokens, size].

    Raises:
        ValueError: the last dimension is not made of so many heads, or ``heads`` is no multiple of ``kv_heads``.
    """
    kv_heads = check_packed("split_qkv", qkv, heads, kv_heads)
    q, k, v, _ = _SplitQKV.apply(qkv, heads, kv_heads)  # type: ignore[no-untyped-call]
    return q, k, v


@or_torch(lambda x, heads: x.unflatten(-1, (heads, -1)).transpose(1, 2))
def split_heads(x: Tensor, heads: int) -> Tensor:
    """[batch, tokens, heads · size] as a view [batch, heads, tokens, size].

    Backward is a view where the gradient lies as [batch, tokens, heads, size], else one copy.

    Raises:
        ValueError: not three dimensions, or the last is no multiple of ``heads``.
    """
    if x.dim() != 3:
        refuse("split_heads", "x", shape_text(x), "[batch, tokens, heads · size]")
    if heads < 1 or x.shape[2] % heads:
        refuse("split_heads", "heads", heads, f"a divisor of {x.shape[2]}, x's last dimension")
    found: Tensor
    found, _ = _SplitHeads.apply(x, heads)  # type: ignore[no-untyped-call]
    return found


@or_torch(lambda x: x.transpose(1, 2).flatten(2))
def merge_heads(x: Tensor) -> Tensor:
    """[batch, heads, tokens, size] as [batch, tokens, heads · size]: a view where the strides allow one, else one copy.

    They do for what scaled_dot_product_attention returns of views of a projection. Backward is always a view.

    Raises:
        ValueError: not four dimensions.
    """
    if x.dim() != 4:
        refuse("merge_heads", "x", shape_text(x), "[batch, heads, tokens, size]")
    found: Tensor
    found, _ = _MergeHeads.apply(x)  # type: ignore[no-untyped-call]
    return found


def check_packed(function: str, qkv: Tensor, heads: int, kv_heads: int | None) -> int:
    """The number of key heads; ``ValueError`` unless ``qkv`` is packed of these heads."""
    require_dtype(function, "qkv", qkv)
    if qkv.dim() != 3:
        refuse(function, "qkv", shape_text(qkv), "[batch, tokens, (heads + 2 · kv_heads) · size]")
    if heads < 1:
        refuse(function, "heads", heads, "a positive number")
    kv_heads = heads if kv_heads is None else kv_heads
    if kv_heads < 1 or heads % kv_heads:
        refuse(function, "kv_heads", kv_heads, f"a divisor of heads={heads}")
    if not qkv.shape[2] or qkv.shape[2] % (heads + 2 * kv_heads):
        expected = f"a last dimension that is a multiple of heads + 2 · kv_heads = {heads + 2 * kv_heads}"
        refuse(function, "qkv", shape_text(qkv), expected)
    return kv_heads


def _dimension(function: str, argument: str, tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        expected = f"a dimension of {argument}, which is {shape_text(tensor)}"
        refuse(function, "dim", dim, expected, NoSuchIndexError)
    return dim % tensor.dim()


def _split(tensor: Tensor, sections: list[int], dim: int) -> tuple[Tensor, ...]:
    *parts, _ = _Split.apply(tensor, sections, dim)  # type: ignore[no-untyped-call]
    return tuple(parts)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, sections: list[int], dim: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sections, ctx.dim = sections, dim
        ctx.shape, ctx.like = tensor.shape, {"dtype": tensor.dtype, "device": tensor.device}
        link = token(tensor)
        ctx.save_for_backward(link)
        return *tensor.split_with_sizes(sections, dim), link

    @staticmethod
    @first_derivative_only("split or chunk", "torch's versions support second derivatives")
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, None, None]:
        whole = layout.whole_of(gradients[:-1], ctx.dim)
        if whole is None:
            whole = torch.empty(ctx.shape, **ctx.like)
            layout.fill_parts(whole.split_with_sizes(ctx.sections, ctx.dim), gradients[:-1])
        return whole, None, None


class _SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.heads, ctx.kv_heads = heads, kv_heads
        ctx.shape, ctx.like = qkv.shape, {"dtype": qkv.dtype, "device": qkv.device}
        link = token(qkv)
        ctx.save_for_backward(link)
        return *layout.qkv_views(qkv, heads, kv_heads), link

    @staticmethod
    @first_derivative_only("split_qkv", _INSTEAD)
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None]:
        whole = layout.whole_of(gradients[:-1], 1)
        if whole is not None:
            return layout.merge_heads(whole), None, None
        packed = torch.empty(ctx.shape, **ctx.like)
        layout.fill_parts(layout.qkv_views(packed, ctx.heads, ctx.kv_heads), gradients[:-1])
        return packed, None, None


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        link = token(x)
        ctx.save_for_backward(link)
        return layout.split_heads(x, heads), link

    @staticmethod
    @first_derivative_only("split_heads", _INSTEAD)
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        return layout.merge_heads(gradient), None


class _MergeHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.heads = x.shape[1]
        link = token(x)
        ctx.save_for_backward(link)
        return layout.merge_heads(x), link

    @staticmethod
    @first_derivative_only("merge_heads", _INSTEAD)
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor]:
        return (layout.split_heads(gradient, ctx.heads),)
