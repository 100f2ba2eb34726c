"""Models that copy or keep more than they need, and the same without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradscope.recipes import Dropout
from tests.diagnose.run_case import Twin

WIDTH = 64


class Gate(nn.Module):
    """A product of two halves."""

    def __init__(self, sliced: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.sliced = sliced

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.sliced:
            a = h[..., : 4 * WIDTH]
            b = h[..., 4 * WIDTH :]
        else:
            a, b = h.chunk(2, -1)
        return self.down(a * b)


class Rounds(nn.Module):
    """A recurrence over the steps of a sequence."""

    def __init__(self, selected: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.cell = nn.Linear(WIDTH, WIDTH)
        self.selected = selected

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        state = torch.zeros_like(x[:, 0])
        parts = None if self.selected else x.unbind(1)
        for step in range(x.shape[1]):
            part = x[:, step] if parts is None else parts[step]
            state = torch.tanh(self.cell(state) + part)
        return state


class Written(nn.Module):
    """What each step of a sequence gives, gathered in one tensor."""

    def __init__(self, written: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.written = written

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.head(part) for part in self.embed(x).unbind(1)]
        if not self.written:
            return torch.stack(parts)
        outputs = torch.zeros(x.shape[1], x.shape[0], 4 * WIDTH)
        for step, part in enumerate(parts):
            outputs[step] = part
        return outputs


class Interleaved(nn.Module):
    """Even and odd features."""

    def __init__(self, sliced: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * WIDTH)
        self.sliced = sliced

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.sliced:
            return h[..., ::2] * h[..., 1::2]
        even, odd = h.unflatten(-1, (-1, 2)).unbind(-1)
        return even * odd


class Attention(nn.Module):
    """Torch's own attention."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.copied = copied

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]
        if self.copied:
            parts = [part.contiguous() for part in parts]
        y = F.scaled_dot_product_attention(*parts)
        return self.out(y.transpose(1, 2).flatten(2))


class Growing(nn.Module):
    """A result made part by part."""

    def __init__(self, grows: bool) -> None:
        super().__init__()
        self.part = nn.Linear(WIDTH, WIDTH)
        self.grows = grows

    def forward(self, x: Tensor) -> Tensor:
        if not self.grows:
            return torch.cat([self.part(x) for _ in range(12)], dim=1)
        out = self.part(x)
        for _ in range(11):
            out = torch.cat([out, self.part(x)], dim=1)
        return out


class Repeated(nn.Module):
    """A position added to every sequence."""

    def __init__(self, repeats: bool) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 256, WIDTH))
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        if self.repeats:
            position = self.position.repeat(x.shape[0], 1, 1)
            return x + position
        return x + self.position


class Cloned(nn.Module):
    """A residual that is kept aside."""

    def __init__(self, clones: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.clones = clones

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        aside = h.clone() if self.clones else h
        return torch.tanh(h) + aside


class Head(nn.Module):
    """One head of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))


class Heads(nn.Module):
    """Several heads, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], dim=-1)


class Dropped(nn.Module):
    """Dropout after a projection."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.up, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dropout(self.up(x)))


class Wide(nn.Module):
    """A feed-forward block."""

    def __init__(self, run_again: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.run_again = run_again

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.run_again:
            return checkpoint(lambda h: self.down(F.gelu(h)), h, use_reentrant=False)
        return self.down(F.gelu(h))


class Checkpointed(nn.Module):
    """Blocks whose forward backward runs again."""

    def __init__(self, run_again: bool, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide(width=4 * WIDTH) for _ in range(3))
        self.run_again, self.options = run_again, options

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.options) if self.run_again else block(x)
        return x


class Remembering(nn.Module):
    """A loss that is written down."""

    def __init__(self, leaks: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.losses: list[Any] = []
        self.leaks = leaks

    def forward(self, x: Tensor) -> Tensor:
        loss = self.up(x).pow(2).mean()
        self.losses.append(loss if self.leaks else loss.item())
        return loss


class Items(nn.Module):
    """A table of which a batch touches little."""

    def __init__(self, sparse: bool, rows: int = 40_000) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 32, sparse=sparse)
        self.out = nn.Linear(32, 8)

    def forward(self, items: Tensor) -> Tensor:
        return self.out(self.table(items))


def _run(model: nn.Module, *shape: int) -> dict[str, Any]:
    return {"model": model, "batch": torch.randn(*shape)}


def _items(sparse: bool, rows: int = 40_000) -> dict[str, Any]:
    return {"model": Items(sparse, rows), "batch": torch.randint(0, rows, (8, 32))}


TWINS: list[Twin] = [
    Twin(
        "halves by slices",
        "slices-zero-filled",
        bad=lambda: _run(Gate(sliced=True), 8, 128, WIDTH),
        good=lambda: _run(Gate(sliced=False), 8, 128, WIDTH),
    ),
    Twin(
        "steps by index",
        "slices-zero-filled",
        bad=lambda: _run(Rounds(selected=True), 8, 48, WIDTH),
        good=lambda: _run(Rounds(selected=False), 8, 48, WIDTH),
        also=frozenset({"tiny-layers"}),  # it is a loop over steps either way
    ),
    Twin(
        "even and odd by slices",
        "slices-zero-filled",
        bad=lambda: _run(Interleaved(sliced=True), 8, 128, WIDTH),
        good=lambda: _run(Interleaved(sliced=False), 8, 128, WIDTH),
    ),
    Twin(
        "steps written to one tensor",
        "slices-written",
        bad=lambda: _run(Written(written=True), 8, 48, WIDTH),
        good=lambda: _run(Written(written=False), 8, 48, WIDTH),
        also=frozenset({"tiny-layers"}),  # it is a loop over steps either way
    ),
    Twin(
        "heads copied before attention",
        "copies",
        bad=lambda: _run(Attention(copied=True), 8, 128, WIDTH),
        good=lambda: _run(Attention(copied=False), 8, 128, WIDTH),
        also=frozenset({"heads-copied"}),  # a packed projection before torch's own attention
    ),
    Twin(
        "growing by cat",
        "copies",
        bad=lambda: _run(Growing(grows=True), 8, 64, WIDTH),
        good=lambda: _run(Growing(grows=False), 8, 64, WIDTH),
    ),
    Twin(
        "repeat for an addition",
        "copies",
        bad=lambda: _run(Repeated(repeats=True), 8, 256, WIDTH),
        good=lambda: _run(Repeated(repeats=False), 8, 256, WIDTH),
    ),
    Twin(
        "clone that nobody writes to",
        "copies",
        bad=lambda: _run(Cloned(clones=True), 32, 512, WIDTH),
        good=lambda: _run(Cloned(clones=False), 32, 512, WIDTH),
    ),
    Twin(
        "heads as modules",
        "copies",
        bad=lambda: _run(Heads(4), 8, 128, WIDTH),
        good=lambda: _run(Attention(copied=False), 8, 128, WIDTH),
        also=frozenset({"heads-copied"}),  # a packed projection before torch's own attention
    ),
    Twin(
        "dropout",
        "saved-dropout",
        bad=lambda: _run(Dropped(nn.Dropout(0.1)), 8, 256, WIDTH),
        good=lambda: _run(Dropped(Dropout(0.1)), 8, 256, WIDTH),
    ),
    Twin(
        "GELU before a linear layer",
        "saved-activation-inputs",
        bad=lambda: _run(Wide(), 8, 256, WIDTH),
        good=lambda: _run(Wide(run_again=True), 8, 256, WIDTH),
    ),
    Twin(
        "checkpointed blocks",
        "checkpoint-share",
        bad=lambda: _run(Checkpointed(run_again=True), 8, 128, 4 * WIDTH),
        good=lambda: _run(Checkpointed(run_again=False), 8, 128, 4 * WIDTH),
    ),
    Twin(
        "losses kept with their graph",
        "leak",
        bad=lambda: _run(Remembering(leaks=True), 8, 64, WIDTH),
        good=lambda: _run(Remembering(leaks=False), 8, 64, WIDTH),
    ),
    Twin(
        "table of many rows",
        "embedding-dense-gradient",
        bad=lambda: _items(sparse=False),
        good=lambda: _items(sparse=True),
    ),
]
