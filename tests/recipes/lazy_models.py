"""Small models with a lazy head, and the same with a plain one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradscope.recipes import lazy_linear

CLASSES, WIDTH = 11, 6


class Model(nn.Module):
    """An embedding whose weight is the head's too."""

    def __init__(self, lazy: bool = True, vocabulary: int = CLASSES, width: int = WIDTH):
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.fc = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight
        self.lazy = lazy

    def forward(self, ids, targets=None):
        x = torch.tanh(self.fc(self.wte(ids)))
        logits = lazy_linear(self.head, x) if self.lazy else self.head(x)
        loss = None if targets is None else F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


def pair(vocabulary: int = CLASSES, rows: int = 8) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randint(vocabulary, (2, rows)), torch.randint(vocabulary, (2, rows))


def models(dtype: torch.dtype = torch.float32) -> list[Model]:
    """Lazy, and not."""
    made = []
    for lazy in (True, False):
        torch.manual_seed(0)
        made.append(Model(lazy).to(dtype))
    return made


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters()]


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for one, other in zip(gradients(ours), gradients(theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)  # float32, sums in another order
