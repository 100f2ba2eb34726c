"""Activation checkpointing: memory bought with a second forward.

    gradscope profile examples/checkpoint.py               checkpointed without reentering the engine
    gradscope profile examples/checkpoint.py:reentrant     with a nested backward, the older kind
    gradscope profile examples/checkpoint.py:plain         without checkpointing

What to look for: the ledger's ``recompute`` row is the price of it, charged to the layers that are run again and not to
the backward of whichever node happened to need them first. ``down`` shows which kind it is: without reentering, a
block's second forward stops as soon as nothing more is needed, before its last product; a nested backward runs it all.
``plain`` pays nothing again, and keeps the input of every GELU beside its result.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Checkpointed(nn.Module):
    def __init__(self, width: int = 256, depth: int = 4, reentrant: bool | None = False) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


def _make(reentrant: bool | None) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Checkpointed(reentrant=reentrant), torch.randn(256, 256)


def workload() -> tuple[nn.Module, torch.Tensor]:
    """Every block checkpointed."""
    return _make(False)


def reentrant() -> tuple[nn.Module, torch.Tensor]:
    """Every block checkpointed with a nested backward."""
    return _make(True)


def plain() -> tuple[nn.Module, torch.Tensor]:
    """The same network, holding all its activations."""
    return _make(None)


def main() -> None:
    model, batch = workload()
    model(batch).backward()
    print(f"gradient of the embedding: {model.embed.weight.grad.norm().item():.3e}")


if __name__ == "__main__":
    main()
