"""What the spellings of attention share: sizes, projections and batches. The pattern itself is never here.

Batch 2, heads 3, tokens 20, size 16, width 48: a wrong axis or a wrong size shows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.patching.corpus.entry import Entry

BATCH, TOKENS, OTHER_TOKENS, WIDTH, HEADS = 2, 20, 27, 48, 3

ENTRIES: list[Entry] = []


class Projections(nn.Module):
    """Four linear layers and the sizes, under the names most people give them."""

    def __init__(self, embed_dim: int = WIDTH, num_heads: int = HEADS, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scale = self.head_dim**-0.5
        self.dropout = dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)


class Packed(nn.Module):
    """One projection for q, k and v."""

    def __init__(self, n_embd: int = WIDTH, n_head: int = HEADS, dropout: float = 0.1) -> None:
        super().__init__()
        self.n_embd = n_embd
        self.n_head = n_head
        self.dropout = dropout
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)


def tokens() -> Tensor:
    """[batch, tokens, width]."""
    return torch.randn(BATCH, TOKENS, WIDTH)


def two_lengths() -> tuple[Tensor, Tensor]:
    """Queries' side and the context, of another length."""
    return torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, OTHER_TOKENS, WIDTH)


def with_causal() -> dict[str, Tensor]:
    """``x`` and a lower triangular ``mask`` of ones."""
    return {"x": tokens(), "mask": torch.tril(torch.ones(TOKENS, TOKENS))}


def with_padding() -> dict[str, Tensor]:
    """``x`` and a ``key_padding_mask`` that is True where there is nothing: each sequence has its own length."""
    lengths = torch.tensor([TOKENS, TOKENS - 7])
    return {"x": tokens(), "key_padding_mask": torch.arange(TOKENS) >= lengths[:, None]}


def squares(output: Any, batch: Any) -> Tensor:
    """A loss whose gradient is not the same everywhere."""
    first = output[0] if isinstance(output, tuple) else output
    return first.square().mean()


def spelling(
    name: str,
    module: Callable[[], nn.Module],
    sites: tuple[tuple[str, str], ...] = (("", "attention"),),
    batch: Callable[[], Any] = tokens,
    refused: str = "",
) -> Entry:
    """The entry of one small module."""
    return Entry(name, lambda: (module(), batch()), sites, squares, refused)
