"""Truth: what attention keeps for backward, by hand and fused, and how views are resolved to their storages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .measuring import BOOL, F32, F64, Kept, assert_saved, measured

N, T, H, D = 2, 4, 3, 5  # batch, tokens, heads, size of a head
C = H * D
X = torch.linspace(-1, 1, N * T * C).reshape(N, T, C)

INPUT = N * T * C * F32  # also the size of q, k, v and the output, each
SCORES = N * H * T * T * F32


class Attention(nn.Module):
    """Causal attention; ``attend`` turns heads of q, k and v (N, H, T, D) into heads of the output."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.qkv = nn.Linear(C, 3 * C)
        self.proj = nn.Linear(C, C)
        self.register_buffer("mask", torch.ones(T, T, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(N, T, H, D).transpose(1, 2) for part in self.qkv(x).split(C, dim=2))
        heads = self.attend(q, k, v, self.mask)
        out: Tensor = self.proj(heads.transpose(1, 2).reshape(N, T, C))
        return out


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * D**-0.5
    return scores.masked_fill(mask, float("-inf")).softmax(-1) @ v


def by_hand_with_a_mask_of_its_own(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) * D**-0.5
    return scores.masked_fill(~mask[:T, :T] == 0, float("-inf")).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor, _mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


#: ``@`` copies heads that are views (N, H, T, D) of (N, T, 3C) before it can multiply them: the copies are kept.
BY_HAND = (
    Kept("qkv", "AddmmBackward0", "mat1", "8x15", "float32", INPUT),
    Kept("", "BmmBackward0", "self", "6x4x5", "float32", INPUT),  # q
    Kept("", "BmmBackward0", "mat2", "6x5x4", "float32", INPUT),  # k
    Kept("", "MulBackward0", "other", "scalar", "float64", F64),  # D**-0.5 as a tensor
    Kept("", "SoftmaxBackward0", "output", "2x3x4x4", "float32", SCORES),  # which the second product keeps, too
    Kept("", "BmmBackward0", "mat2", "6x4x5", "float32", INPUT),  # v
    Kept("proj", "AddmmBackward0", "mat1", "8x15", "float32", INPUT),  # the merged heads
)


def test_attention_by_hand() -> None:
    """The mask is a buffer: MaskedFill keeps it at no cost."""
    assert_saved(measured(Attention(by_hand), X), *BY_HAND)


def test_a_mask_made_in_forward_is_kept() -> None:
    mask = Kept("", "MaskedFillBackward0", "mask", "4x4", "bool", T * T * BOOL)
    assert_saved(measured(Attention(by_hand_with_a_mask_of_its_own), X), *BY_HAND, mask)


def test_fused_attention_keeps_its_inputs_output_and_one_number_a_row() -> None:
    """q, k and v are views of one storage, which counts once: under the first that the node keeps."""
    node = "ScaledDotProductFlashAttentionForCpuBackward0"
    assert_saved(
        measured(Attention(fused), X),
        Kept("qkv", "AddmmBackward0", "mat1", "8x15", "float32", INPUT),
        Kept("", node, "key", "2x3x4x5", "float32", 3 * INPUT),
        Kept("", node, "logsumexp", "2x3x4", "float32", N * H * T * F32),
        # The output of the kernel is (N, T, H, D) in memory: merging its heads is a view that proj keeps as well.
        Kept("", node, "output", "2x3x4x5", "float32", INPUT),
    )


def test_fused_attention_of_separate_tensors_keeps_three() -> None:
    class Separate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))

    heads = torch.ones(N, H, T, D)
    node = "ScaledDotProductFlashAttentionForCpuBackward0"
    assert_saved(
        measured(Separate(), heads),
        Kept("q", "AddmmBackward0", "mat1", "24x5", "float32", INPUT),  # the batch: k and v keep it, too
        *(Kept("", node, name, "2x3x4x5", "float32", INPUT) for name in ("query", "key", "value", "output")),
        Kept("", node, "logsumexp", "2x3x4", "float32", N * H * T * F32),
    )


# --------------------------------------------------------------------------------------------------------------------
# Views
# --------------------------------------------------------------------------------------------------------------------


class Viewing(nn.Module):
    """``view`` of a Linear's output (4 x 6), each of whose parts an exp keeps ... as its input's square."""

    def __init__(self, view: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        parts = self.view(self.stem(x))
        return torch.stack([part.square().sum() for part in parts]).sum()


VIEWS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], str]] = {
    "chunk": (lambda y: y.chunk(3, dim=1), "4x2"),
    "split": (lambda y: y.split([4, 2], dim=1), "4x4"),
    "unbind": (lambda y: y.unbind(0), "6"),
    "transposed": (lambda y: (y.t(),), "6x4"),
    "one small view": (lambda y: (y[0, :1],), "1"),
    "expanded": (lambda y: (y[:, None, :].expand(4, 100, 6),), "4x100x6"),
    "as strided": (lambda y: (y.as_strided((2, 2), (7, 1)),), "2x2"),
    "detached and itself": (lambda y: (y, y.detach()), "4x6"),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_keeps_its_whole_storage_once(name: str) -> None:
    """``square`` keeps its input, a view of the stem's output: 4 x 6 numbers, however many views of whatever shape."""
    view, shape = VIEWS[name]
    data = measured(Viewing(view), torch.ones(4, 6), None)
    assert_saved(
        data,
        Kept("stem", "AddmmBackward0", "mat1", "4x6", "float32", 4 * 6 * F32),
        Kept("", "PowBackward0", "self", shape, "float32", 4 * 6 * F32),
    )


class Batches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x.expand(5, 3) * self.scale


def test_a_view_of_the_batch_keeps_the_batch() -> None:
    """It counts as saved, for the node does keep it, and as an input at the peak."""
    data = measured(Batches(), torch.ones(64, 3)[:1])
    assert_saved(data, Kept("", "MulBackward0", "self", "5x3", "float32", 64 * 3 * F32))
