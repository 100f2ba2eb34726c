"""What torch's operations are, by their names in a recording: products, views, casts; and the bytes of a dtype.

The one place that says so. Rules and patterns that mean fewer of them say which, beside these.
"""

from __future__ import annotations

import re


def names(*lines: str) -> frozenset[str]:
    """The names of operations in ``lines``, separated by spaces."""
    return frozenset(name for line in lines for name in line.split())


# Products of matrices, any number of them in a batch.
MATMULS = names("matmul rmatmul linear mm bmm addmm addbmm baddbmm einsum tensordot")
# Of these, those of two activations: queries with keys, weights with values.
BATCHED_MATMULS = names("matmul rmatmul bmm baddbmm einsum")
CONVOLUTIONS = names("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution")
ATTENTION = "scaled_dot_product_attention"

# The same numbers in the same memory, another form of them.
RESHAPES = names("view view_as reshape reshape_as flatten unflatten ravel squeeze unsqueeze")
TURNS = names("transpose swapaxes swapdims t T mT H mH adjoint permute movedim moveaxis")
EXPANSIONS = names("expand expand_as broadcast_to")
# Some of the numbers, in the same memory.
PARTS = names(
    "getitem narrow select diagonal unfold chunk split tensor_split hsplit vsplit dsplit unbind",
    "unsafe_chunk unsafe_split split_with_sizes as_strided",
)
VIEWS = RESHAPES | TURNS | EXPANSIONS | PARTS
# Another dtype, or the tensor itself where it has that already.
CASTS = names("to type type_as float double half bfloat16")


def item_bytes(dtype: str) -> int:
    """Bytes of one element: the first number in the name of its dtype has the bits."""
    bits = re.search(r"\d+", dtype)
    return max(int(bits.group()) // 8, 1) if bits else 1
