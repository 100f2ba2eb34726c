"""Train a small character transformer that makes up words: an ordinary script that knows nothing of gradscope.

    python examples/names.py --steps 200
    gradscope profile examples/names.py -- --batch-size 32

What to look for: the script is not edited; gradscope finds the steps at ``optimizer.step()``, stops it when it has
measured enough, and the evaluation under ``no_grad`` costs forward but no backward. Attention is written out, and the
optimizer is not fused.
"""

import argparse
import math
import re
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn


class CharacterAttention(nn.Module):
    def __init__(self, width, heads, block_size):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.register_buffer("future", torch.ones(block_size, block_size, dtype=torch.bool).triu(1))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        att = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        att = att.masked_fill(self.future[:length, :length], float("-inf"))
        y = F.softmax(att, dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class CharacterBlock(nn.Module):
    def __init__(self, width, heads, block_size):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CharacterAttention(width, heads, block_size)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class CharacterTransformer(nn.Module):
    def __init__(self, letters, width, heads, layers, block_size):
        super().__init__()
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Parameter(torch.zeros(block_size, width))
        self.blocks = nn.Sequential(*(CharacterBlock(width, heads, block_size) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, letters)

    def forward(self, x, y=None):
        h = self.letter(x) + self.place[: x.shape[1]]
        logits = self.head(self.norm(self.blocks(h)))
        loss = None if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)
        return logits, loss


def make_data():
    """Words of Python's language reference, one row each: letters are numbered from 1, 0 is the end."""
    words = sorted({word for topic in topics.values() for word in re.findall(r"\b[a-z]{3,12}\b", topic)})
    x = torch.zeros(len(words), 13, dtype=torch.long)
    y = torch.full((len(words), 13), -1, dtype=torch.long)
    for row, word in enumerate(words):
        letters = torch.tensor([ord(letter) - 96 for letter in word])
        x[row, 1 : len(word) + 1] = letters
        y[row, : len(word)] = letters
        y[row, len(word)] = 0
    return x, y


@torch.no_grad()
def evaluate(model, x, y, batch_size=256):
    model.eval()
    _, loss = model(x[:batch_size], y[:batch_size])
    model.train()
    return loss.item()


@torch.no_grad()
def sample(model, generator):
    x = torch.zeros(1, 1, dtype=torch.long)
    while x.shape[1] < 13:
        logits, _ = model(x)
        letter = torch.multinomial(logits[0, -1].softmax(-1), 1, generator=generator)
        if letter.item() == 0:
            break
        x = torch.cat([x, letter.view(1, 1)], dim=1)
    return "".join(chr(96 + letter) for letter in x[0, 1:].tolist())


def main():
    parser = argparse.ArgumentParser(description="Make up words, letter by letter.")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--n-layer", type=int, default=4)
    parser.add_argument("--n-head", type=int, default=4)
    parser.add_argument("--n-embd", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--seed", type=int, default=3407)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    x, y = make_data()
    order = torch.randperm(len(x))
    x, y = x[order], y[order]
    split = len(x) // 10
    model = CharacterTransformer(27, args.n_embd, args.n_head, args.n_layer, x.shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    print(f"{len(x)} words, {sum(p.numel() for p in model.parameters())} parameters")
    for step in range(args.steps):
        rows = torch.randint(split, len(x), (args.batch_size,))
        _, loss = model(x[rows], y[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % args.eval_every == 0:
            print(
                f"step {step}: training loss {loss.item():.3f}, test loss {evaluate(model, x[:split], y[:split]):.3f}"
            )
    generator = torch.Generator().manual_seed(args.seed)
    print("made up:", ", ".join(sample(model, generator) for _ in range(5)))


if __name__ == "__main__":
    main()
