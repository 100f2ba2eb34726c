"""An embedding whose gradient is added by rows into the dense gradient of a tied weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradscope.kernels.check import NoSuchIndexError, dtype_text, refuse, require_dtype, require_same_device, shape_text
from gradscope.kernels.choice import BackendChoice, choose, explained_by
from gradscope.kernels.embedding.accumulate import EXACT, accumulator, add_rows_before
from gradscope.recipes.recipe import Recipe

ABOUT = Recipe(
    name="embedding",
    title="Embedding whose gradient rows are added into an existing or tied dense gradient",
    functions=("embedding",),
    modules=("Embedding",),
    replaces=(
        "F.embedding(ids, weight) or nn.Embedding with a weight tied to the head, or with gradient accumulation",
    ),
    saves=(
        "The zero-filled full-vocabulary gradient and its addition: only the rows of the batch's "
        "tokens are written. The parameter's gradient stays dense."
    ),
    limits=(
        (
            "A weight that is neither tied nor already has a gradient gains nothing: its gradient is "
            "zero-filled as in torch."
        ),
        (
            "float16 and bfloat16 weights, weights with hooks, torch.autograd.grad and "
            "create_graph=True get torch's dense gradient."
        ),
        "If a second parameter in the same pass shares the weight's gradient tensor, it costs one copy.",
        "Compiled graphs, max_norm, scale_grad_by_freq and sparse=True fall back to torch.",
    ),
    backends=(
        ("rows", "any device"),
        ("torch", "any device"),
    ),
    sources=(
        "PyTorch's autograd engine: InputBuffer and AccumulateGrad add a sparse gradient into a dense one in place",
    ),
)

_NAME = "embedding"
_REASONS = {
    "rows": "only the rows of the batch's tokens are added to the dense gradient",
    "torch": "torch.nn.functional.embedding",
}


def _explain(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    backend: str = "auto",
) -> BackendChoice:
    """What :func:`embedding` would do with these arguments, and why."""
    if input.dtype not in (torch.int32, torch.int64):
        refuse(_NAME, "input", f"of dtype {dtype_text(input.dtype)}", "int64 or int32")
    require_dtype(_NAME, "weight", weight)
    if weight.dim() != 2:
        refuse(_NAME, "weight", shape_text(weight), "(tokens, features)")
    require_same_device(_NAME, ("input", input), weight=weight)
    if padding_idx is not None and not -weight.shape[0] <= padding_idx < weight.shape[0]:
        refuse(_NAME, "padding_idx", padding_idx, f"a token in [{-weight.shape[0]}, {weight.shape[0]})")
    return choose(_NAME, backend, _REASONS, {"rows": _why_no_rows(weight, max_norm, scale_grad_by_freq, sparse)})


def _why_no_rows(weight: Tensor, max_norm: float | None, scale_grad_by_freq: bool, sparse: bool) -> str | None:
    if max_norm is not None or scale_grad_by_freq or sparse:
        return "it does not support max_norm, scale_grad_by_freq or sparse=True"
    if torch.compiler.is_compiling():
        return "inside a compiled graph the compiler accumulates gradients"
    if weight.dtype not in EXACT:
        return f"row-wise accumulation would round every addition to {dtype_text(weight.dtype)}"
    if not weight.is_leaf:
        return "the weight is computed from other tensors, whose backward needs its full gradient"
    return None


def _plain(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    backend: str = "auto",
) -> Tensor:
    return functional.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)


@explained_by(_explain, _plain, _REASONS)
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    backend: str = "auto",
) -> Tensor:
    """Compute :func:`torch.nn.functional.embedding`; backward touches only the rows of the tokens that occur.

    ``backward()`` adds the rows in place to the dense ``weight.grad`` of an earlier backward, or to the gradient of the
    weight's other use, a tied head. Where somebody looks at the gradient before (a hook on the weight,
    ``torch.autograd.grad``, ``create_graph=True``), torch's dense gradient is handed over instead. All derivatives
    exist.

    Args:
        input: tokens, any shape, int64 or int32.
        weight: [tokens, features]; float16, bfloat16, float32 or float64.
        padding_idx: a token that gets no gradient; a negative one counts from the end.
        max_norm, norm_type, scale_grad_by_freq, sparse: as torch's, and left to it.
        backend: "auto", "rows" or "torch"; ``embedding.explain`` tells what "auto" takes.

    Returns:
        [*input, features], of the weight's dtype.

    Raises:
        ValueError: a shape, dtype, device or setting does not fit; on the CPU also a token that there is not. On a GPU
            such a token stops the device with an assertion, as torch does.
    """
    choice = _explain(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, backend=backend)
    if torch.compiler.is_compiling():
        return _plain(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    try:
        if choice.backend == "rows" and torch.is_grad_enabled() and weight.requires_grad:
            padding = -1 if padding_idx is None else padding_idx % weight.shape[0]
            return _Embedding.apply(input, weight, padding)  # type: ignore[no-untyped-call]
        return _plain(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    except IndexError:
        wrong = input[(input < 0) | (input >= weight.shape[0])].flatten()
        refuse(_NAME, "input", f"holding {int(wrong[0])}", f"tokens in [0, {weight.shape[0]})", NoSuchIndexError)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, padding: int) -> Tensor:
        ctx.save_for_backward(input)
        ctx.padding, ctx.tokens = padding, weight.shape[0]
        return functional.embedding(input, weight)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        node = accumulator(ctx.next_functions[1][0])
        if node is None:
            # Differentiable itself, so that no derivative is lost.
            dense = torch.ops.aten.embedding_dense_backward(upstream, ids, ctx.tokens, ctx.padding, False)
            return None, dense, None
        add_rows_before(node, upstream, ids, ctx.padding)
        return None, None, None


class Embedding(nn.Embedding):
    """:class:`torch.nn.Embedding` by :func:`embedding`: same arguments, same state."""

    def forward(self, input: Tensor) -> Tensor:
        """The rows of the tokens."""
        return embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
