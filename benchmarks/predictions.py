"""How well findings about recipes predict what ``gradscope.patch`` then measures.

    python benchmarks/predictions.py [--only NAME ...] [--json benchmarks/results/predictions.jsonl]

Each case is profiled, and each recipe that a finding of it names is put in and measured alone. A row says by which
factor the prediction is off, above or below: 1 is right. Where nothing is found, that is right if patching gains
nothing that would be shown. ``--tiny`` runs all at sizes that say nothing about speed: to see that the benchmark itself
works.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from _common import Result, finish, median, parser, print_table
from torch import Tensor, nn

import gradscope
from gradscope.patching.prove.verify import Result as Verdict

GOAL = 1.5  # times too much or too little
_MOST = 99.0  # where nothing was gained, or a prediction said so
SMALLEST = 0.01  # of the step: findings below are not shown


class Attention(nn.Module):
    """Attention written out, of projections of their own."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(k.shape[-1])
        weights = F.softmax(scores.masked_fill(hidden, -math.inf), dim=-1)
        y = self.dropout(weights) @ v
        return x + y.transpose(1, 2).flatten(2)


class Masked(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + y.transpose(1, 2).flatten(2)


class Packed(nn.Module):
    """Torch's attention of the heads of one projection."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.c_attn(x).split(width, dim=2)
        q = q.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        k = k.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        v = v.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return y.transpose(1, 2).contiguous().view(batch, tokens, width)


class Language(nn.Module):
    """An embedding, a layer, and a head over the vocabulary."""

    def __init__(self, words: int, width: int, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(words, width), nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.layer(self.embedding(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class WithAccuracy(Language):
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.layer(self.embedding(tokens)))).flatten(0, 1)
        loss = F.cross_entropy(logits, tokens.flatten())
        return loss, logits.argmax(1)


class Between(nn.Module):
    """Two layers, and what a subclass does between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, width), nn.Linear(width, 64)
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.between(self.up(x)))

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Rms(Between):
    def between(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class RmsByTorch(Between):
    def between(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)


class LayerNorm(Between):
    def between(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class Gelu(Between):
    def between(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class Gated(nn.Module):
    """The feed-forward layer of Llama."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Halves(Between):
    def between(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return torch.cat((F.silu(gate) * up, x[..., : x.shape[-1] // 2]), dim=-1)


class Rope(nn.Module):
    def __init__(self, heads: int, size: int, tokens: int) -> None:
        super().__init__()
        self.heads, self.size, self.layer = heads, size, nn.Linear(64, heads * size)
        angles = torch.arange(tokens)[:, None] / 10_000 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("cos", torch.cat((angles, angles), dim=-1).cos())
        self.register_buffer("sin", torch.cat((angles, angles), dim=-1).sin())

    def forward(self, x: Tensor) -> Tensor:
        q = self.layer(x).unflatten(2, (self.heads, self.size)).transpose(1, 2)
        turned = torch.cat((-q[..., self.size // 2 :], q[..., : self.size // 2]), dim=-1)
        return q * self.cos + turned * self.sin


@dataclass(frozen=True)
class ModelSize:
    """Of a case; ``small`` stands for itself, in place of large numbers, where nothing is to be told of speed."""

    tiny: bool

    def of(self, large: int, small: int) -> int:
        return small if self.tiny else large


Made = tuple[nn.Module, Tensor]


def _attention(size: ModelSize, layers: int = 1, tokens: int = 512, batch: int = 2, dropout: float = 0.0) -> Made:
    model = nn.Sequential(*(Attention(size.of(256, 16), 4, dropout) for _ in range(layers)))
    return model, torch.randn(batch, size.of(tokens, 16), size.of(256, 16))


def _words(made: Callable[..., Language], size: ModelSize, words: int, **options: bool) -> Made:
    words = size.of(words, 5_000)
    return made(words, size.of(256, 128), **options), torch.randint(words, (2, size.of(256, 220)))


def _rows(made: Callable[[int], nn.Module], size: ModelSize, width: int = 1024) -> Made:
    return made(size.of(width, 32)), torch.randn(size.of(4096, 16), 64)


CASES: dict[str, Callable[[ModelSize], Made]] = {
    "attention": _attention,
    "attention, 1024 tokens": lambda size: _attention(size, tokens=1024, batch=1),
    "attention, 4 layers of 128 tokens": lambda size: _attention(size, layers=4, tokens=128, batch=4),
    "attention with dropout": lambda size: _attention(size, dropout=0.1),
    "a causal mask": lambda size: (
        Masked(size.of(256, 16), 4),
        torch.randn(1, size.of(1024, 16), size.of(256, 16)),
    ),
    "the math kernel": lambda size: (
        Packed(size.of(256, 64), 4, 0.1),
        torch.randn(2, size.of(512, 256), size.of(256, 64)),
    ),
    "heads": lambda size: (Packed(size.of(512, 16), 8), torch.randn(8, size.of(256, 16), size.of(512, 16))),
    "logits of 20,000 words": lambda size: _words(Language, size, 20_000),
    "logits of 50,000 words": lambda size: _words(Language, size, 50_000),
    "logits that are read too": lambda size: _words(WithAccuracy, size, 20_000),
    "RMS norm": lambda size: _rows(Rms, size),
    "torch's RMS norm": lambda size: _rows(RmsByTorch, size),
    "layer norm": lambda size: _rows(LayerNorm, size),
    "GELU": lambda size: _rows(Gelu, size, 2048),
    "SwiGLU": lambda size: (
        Gated(size.of(256, 16), size.of(1024, 32)),
        torch.randn(size.of(4096, 16), size.of(256, 16)),
    ),
    "SwiGLU of halves": lambda size: _rows(Halves, size, 2048),
    "rotary positions": lambda size: (
        Rope(8, size.of(64, 8), size.of(512, 16)),
        torch.randn(8, size.of(512, 16), 64),
    ),
    "a tied embedding": lambda size: _words(Language, size, 50_000, tied=True),
}


def measure(name: str, size: ModelSize, device: str) -> list[Result]:
    """A row for each recipe that the case's findings name."""
    torch.manual_seed(0)
    model, batch = CASES[name](size)
    model, batch = model.to(device), batch.to(device)
    report = gradscope.profile(model, batch, steps=3, warmup=2, device=device)
    predicted: defaultdict[str, int] = defaultdict(int)
    for finding in report.data.findings:
        saving = finding.predicted_saving_ns or 0
        if finding.recipe is not None and (size.tiny or saving >= SMALLEST * report.data.step.wall_ns):
            predicted[finding.recipe] += saving
    goal = None if size.tiny else GOAL
    rows = [] if predicted else [_nothing_found(name, model, batch, device, report.data.step.wall_ns, goal)]
    for recipe, saving in predicted.items():
        patches = gradscope.patch(model, batch, recipes=[recipe], device=device)
        patches.revert()
        assert patches.verified is not None
        if all(each.saved is None for each in patches.verified.results):  # none was right enough to be measured
            rows.append(Result(f"{name}, {recipe}: predicted, not measured", saving / 1e6, "ms"))
            continue
        saved = _saved(patches.verified.results)
        rows += [
            Result(f"{name}, {recipe}: predicted", saving / 1e6, "ms"),
            Result(f"{name}, {recipe}: measured", saved / 1e6, "ms"),
            Result(f"{name}, {recipe}: off", _off(saving, saved), "x", goal),
        ]
    return rows


def _nothing_found(name: str, model: nn.Module, batch: Tensor, device: str, step_ns: int, goal: float | None) -> Result:
    """Right where patching gains nothing that would be shown."""
    patches = gradscope.patch(model, batch, device=device)
    patches.revert()
    kept = [] if patches.verified is None else [each for each in patches.verified.results if each.status == "kept"]
    gains = _saved(kept) >= SMALLEST * step_ns
    return Result(f"{name}, no finding: off", _MOST if gains else 1.0, "x", goal)


def _saved(results: list[Verdict]) -> int:
    """By all places: those of one text have equal parts of what is saved."""
    return sum(each.saved.ns for each in results if each.saved is not None)


def _off(predicted: int, measured: int) -> float:
    if predicted <= 0 or measured <= 0:
        return _MOST
    return min(max(predicted / measured, measured / predicted), _MOST)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=list(CASES), metavar="NAME", help=", ".join(CASES))
    made.add_argument("--tiny", action="store_true", help="small sizes, without goals")
    options = made.parse_args()
    results = []
    for name in options.only or CASES:
        results += measure(name, ModelSize(options.tiny), options.device)
    off = [result.value for result in results if result.name.endswith(": off")] or [_MOST]
    results.append(Result("predictions", len(off), "recipes"))
    results.append(Result(f"within a factor of {GOAL:g}", sum(each <= GOAL for each in off) / len(off), "of all"))
    results.append(Result("off, median", median(off), "x"))
    print_table(f"predictions on {options.device}, {torch.get_num_threads()} threads", results)
    return finish("predictions", results, options.device, options.json)


if __name__ == "__main__":
    sys.exit(main())
