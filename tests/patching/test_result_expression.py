"""The expression that is replaced makes the result and nothing besides; new names of two edits do not meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.patching import swapped
from tests.patching.corpus.entry import Entry

HEADS, SIZE = 3, 8
WIDTH = HEADS * SIZE


class MadeInAHelper(nn.Module):
    """The product stands in a method that does more with it."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def out(self, weights: Tensor, v: Tensor) -> Tensor:
        y = weights @ v
        return torch.relu(y)

    def forward(self, x: Tensor) -> Tensor:
        q = k = v = self.proj(x)[:, None]
        return self.out(F.softmax(q @ k.transpose(-2, -1) * 0.25, dim=-1), v)


class Tied(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(20, WIDTH), *layers)
        self.head = nn.Linear(WIDTH, 20, bias=False)
        self.head.weight = self.net[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.net(ids))


class Checkpointed(Tied):
    def forward(self, ids: Tensor) -> Tensor:
        return self.head(checkpoint(self.net, ids, use_reentrant=False))


class Beside(nn.Module):
    """Two attentions whose projections are both evaluated before either result."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.one(x).view(b, t, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        q2, k2, v2 = self.two(x).view(b, t, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, c)
        z = F.scaled_dot_product_attention(q2, k2, v2).transpose(1, 2).reshape(b, t, c)
        return y - 2 * z


class Rounds(nn.Module):
    """The same lines in several rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            b, t, c = x.shape
            q, k, v = self.one(x).view(b, t, 3, HEADS, SIZE).unbind(2)
            att = torch.einsum("bthd,bshd->bhts", q, k) * SIZE**-0.5
            x = x + self.out(torch.einsum("bhts,bshd->bthd", att.softmax(-1), v).reshape(b, t, c))
        return x


def ids() -> Tensor:
    return torch.randint(0, 20, (2, 5))


def tokens() -> Tensor:
    return torch.randn(2, 5, WIDTH)


# Up to torch 2.12 checkpoint makes an empty tensor of its own, which is seen first.
CHECKPOINT = ("checkpoint contains submodules", "line 49: the same call also runs empty")


@pytest.mark.parametrize(
    ("build", "batch", "recipe", "reason"),
    [
        (MadeInAHelper, tokens, "attention", "the result of matmul is computed in out"),
        (lambda: Tied(nn.Linear(WIDTH, WIDTH)), ids, "embedding", "the same call also runs linear"),
        (Tied, ids, "embedding", "self.net contains submodules"),
        (Checkpointed, ids, "embedding", CHECKPOINT),
    ],
    ids=["helper", "more layers", "a module inside", "checkpoint"],
)
def test_refused(build: Any, batch: Any, recipe: str, reason: str | tuple[str, ...]) -> None:
    entry = Entry(recipe, lambda: (build(), batch()))
    found = swapped.planned(entry, *swapped.built(entry), (recipe,))
    assert [site.supported for site in found.sites] == [False]
    assert found.sites[0].reasons[0].endswith(reason)


@pytest.mark.parametrize(("build", "sites"), [(Beside, 2), (Rounds, 1)])
def test_several_in_one_function(build: Any, sites: int) -> None:
    entry = Entry("several", lambda: (build(), tokens()))
    model, batch = swapped.built(entry)
    found = swapped.planned(entry, model, batch, ("packed_attention",))
    assert len(found.supported) == sites
    swapped.assert_exact(entry, model, batch, found, 1e-6)  # float32 rounding of sums over 5 keys
