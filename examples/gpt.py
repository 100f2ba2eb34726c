"""A GPT-2 style decoder with the attention written by hand, as many models still have it.

    gradscope profile examples/gpt.py           a size for two CPU cores
    gradscope profile examples/gpt.py:full      GPT-2 small: 12 layers, 768 wide, 1024 tokens, batch 8
    python examples/gpt.py --steps 20           trains, and knows nothing of gradscope; --full for GPT-2 small

What to look for: the lines of ``CausalSelfAttention.forward`` between the scores and the product. The matrices of
batch x heads x tokens x tokens are written, read and saved again by each of mask, softmax and dropout, both forward and
backward. At full size, too, the head's gradient over the vocabulary, no multiple of 64, and the embedding tied to it.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    vocab_size: int = 256
    n_layer: int = 4
    n_head: int = 8
    n_embd: int = 256
    block_size: int = 256
    batch_size: int = 4
    dropout: float = 0.1


FULL = Config(vocab_size=50257, n_layer=12, n_head=12, n_embd=768, block_size=1024, batch_size=8)


class CausalSelfAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.n_head = config.n_head
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.resid_dropout = nn.Dropout(config.dropout)
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("mask", mask.view(1, 1, config.block_size, config.block_size), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        q = q.view(batch, tokens, self.n_head, width // self.n_head).transpose(1, 2)
        k = k.view(batch, tokens, self.n_head, width // self.n_head).transpose(1, 2)
        v = v.view(batch, tokens, self.n_head, width // self.n_head).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        scores = scores.masked_fill(self.mask[:, :, :tokens, :tokens] == 0, float("-inf"))
        weights = F.softmax(scores, dim=-1)
        weights = self.attn_dropout(weights)
        y = weights @ v
        y = y.transpose(1, 2).contiguous().view(batch, tokens, width)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                scale = 1.0 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """The loss over ``targets``, or the logits where there are none; both of shape (batch, tokens)."""
        positions = torch.arange(idx.shape[1], device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](positions))
        for block in self.transformer["h"]:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text() -> str:
    """Prose that every Python brings along: its own language reference."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def encode(config: Config) -> torch.Tensor:
    """The text as token numbers: bytes, or words where the vocabulary is larger than that."""
    if config.vocab_size <= 256:
        return torch.tensor(list(text().encode()), dtype=torch.long)
    words = text().split()
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    return torch.tensor([numbers[word] % config.vocab_size for word in words], dtype=torch.long)


def get_batch(data: torch.Tensor, config: Config) -> dict[str, torch.Tensor]:
    starts = torch.randint(len(data) - config.block_size - 1, (config.batch_size,)).tolist()
    idx = torch.stack([data[start : start + config.block_size] for start in starts])
    targets = torch.stack([data[start + 1 : start + 1 + config.block_size] for start in starts])
    return {"idx": idx, "targets": targets}


def make(config: Config) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(1337)
    return GPT(config), get_batch(encode(config), config)


def workload() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """What ``gradscope profile examples/gpt.py`` measures."""
    return make(Config())


def full() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """GPT-2 small at full length: for a GPU, or for patience; on a CPU its saved tensors alone take 22 GB."""
    return make(FULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--full", action="store_true", help="GPT-2 small instead of the small size")
    options = parser.parse_args()
    config = FULL if options.full else Config()
    torch.manual_seed(1337)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = GPT(config).to(device)
    data = encode(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(options.steps):
        optimizer.zero_grad()
        loss = model(**get_batch(data, config))
        loss.backward()
        optimizer.step()
        print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
