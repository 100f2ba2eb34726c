"""Models as others write them, with a problem that no recipe takes away, and the same without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.diagnose.run_case import Twin


class Points(nn.Module):
    """Attention over the points of an image, as diffusion models have it."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv2d(32, 32, 1) for _ in range(3))
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = (part(x).reshape(b, 1, c, h * w) for part in (self.q, self.k, self.v))
        if self.by_hand:
            weights = torch.bmm(q[:, 0].transpose(1, 2), k[:, 0]) * c**-0.5
            weights = F.softmax(weights, dim=2)
            return torch.bmm(v[:, 0], weights.permute(0, 2, 1)).reshape(b, c, h, w)
        y = F.scaled_dot_product_attention(*(part.transpose(2, 3).contiguous() for part in (q, k, v)))
        return y.transpose(2, 3).reshape(b, c, h, w)


class Multi(nn.Module):
    """Torch's module for attention, whose weights nobody reads."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, **self.given)
        return y


class Bags(nn.Module):
    """Tables of categories, as recommendation models have them."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50_000, 32, mode="sum", **given) for _ in range(4))
        self.top = nn.Linear(4 * 32, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(torch.cat([table(ids) for table in self.tables], 1))


def _with(make: Callable[[], nn.Module], *shape: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": make(), "batch": torch.randn(*shape)}


def _ids(make: Callable[[], nn.Module]) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": make(), "batch": torch.randint(50_000, (64, 3))}


TWINS = [
    Twin(
        "attention over the points of an image",
        "attention-by-hand",
        _with(lambda: Points(by_hand=True), 2, 32, 24, 24),
        _with(lambda: Points(by_hand=False), 2, 32, 24, 24),
    ),
    Twin(
        "weights of MultiheadAttention that nobody reads",
        "attention-math-kernel",
        _with(Multi, 2, 512, 64),
        _with(lambda: Multi(need_weights=False), 2, 512, 64),
    ),
    Twin(
        "dropout in torch's own encoder",
        "attention-math-kernel",
        _with(lambda: nn.TransformerEncoderLayer(64, 4, 64, dropout=0.1, batch_first=True), 2, 512, 64),
        _with(lambda: nn.TransformerEncoderLayer(64, 4, 64, dropout=0.0, batch_first=True), 2, 512, 64),
    ),
    Twin("tables of embedding bags", "embedding-dense-gradient", _ids(Bags), _ids(lambda: Bags(sparse=True))),
]
