"""A residual convolutional network with BatchNorm and ReLU in place.

    gradscope profile examples/convnet.py

What to look for: the in-place ReLUs keep their own rows (backward hooks would raise on them), and the residual
additions show in the ledger as gradient sums, not in the convolution that happened to run last.

Nothing is planted here that would have to be found.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(channels)
        self.conv_2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.norm_1(self.conv_1(x)))
        y = self.norm_2(self.conv_2(y))
        y += x
        return self.relu(y)


class ConvNet(nn.Module):
    def __init__(self, channels: int = 32, blocks: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        )
        self.blocks = nn.Sequential(*(Residual(channels) for _ in range(blocks)))
        self.head = nn.Linear(channels, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))


def loss(logits: torch.Tensor, batch: tuple[torch.Tensor]) -> torch.Tensor:
    """Cross entropy against labels that are made up: the images are noise too."""
    labels = torch.arange(len(logits), device=logits.device) % logits.shape[1]
    return F.cross_entropy(logits, labels)


def workload() -> dict[str, Any]:
    """Sixteen images of 32 x 32, with an optimizer."""
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return {"model": model, "batch": (torch.randn(16, 3, 32, 32),), "loss": loss, "optimizer": optimizer}


def main() -> None:
    parts = workload()
    model, batch, optimizer = parts["model"], parts["batch"], parts["optimizer"]
    for step in range(5):
        optimizer.zero_grad()
        value = loss(model(*batch), batch)
        value.backward()
        optimizer.step()
        print(f"step {step}: loss {value.item():.3f}")


if __name__ == "__main__":
    main()
