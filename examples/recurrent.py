"""A recurrent network over bytes: one cell called again and again, beside torch's own LSTM.

    gradscope profile examples/recurrent.py

What to look for: ``cell`` is one row with as many calls as there are steps in time, and its weight's gradients are
summed over these calls (gradient sums of ``cell``); the LSTM is a single node, fast in forward and slow in backward.
``x[:, step]`` fills a whole x of zeros in backward at every step, where ``x.unbind(1)`` would write it once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Recurrent(nn.Module):
    def __init__(self, vocabulary: int = 256, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.cell = nn.GRUCell(width, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(idx)
        state = x.new_zeros(x.shape[0], x.shape[2])
        states = []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            states.append(state)
        y, _ = self.lstm(torch.stack(states, dim=1))
        return F.cross_entropy(self.head(y).flatten(0, 1), targets.flatten())


def workload() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Sixteen sequences of 32 bytes."""
    torch.manual_seed(0)
    idx = torch.randint(256, (16, 33))
    return Recurrent(), {"idx": idx[:, :-1], "targets": idx[:, 1:]}


def main() -> None:
    model, batch = workload()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
