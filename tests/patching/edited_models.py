"""Small attention modules for what an edit must keep, or refuse; pytest would rewrite their asserts in a test file."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, SIZE, LENGTH = 2, 4, 6
WIDTH = HEADS * SIZE


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.window, self.fill, self.causal, self.step, self.temperature = 30, -torch.inf, True, 0, 2.0
        self.register_buffer("tril", torch.ones(16, 16).tril())
        self.seen: list[Any] = []

    def heads(self, x: Tensor) -> list[Tensor]:
        b, t, _ = x.shape
        return [each.view(b, t, HEADS, SIZE).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1)]

    def merged(self, y: Tensor) -> Tensor:
        return self.proj(y.transpose(1, 2).flatten(2))


def x(length: int = LENGTH, batch: int = 2) -> Tensor:
    torch.manual_seed(5)
    return torch.randn(batch, length, WIDTH)


class Window(Base):
    """Causal as long as the window is wider than the sequence."""

    def forward(self, x):
        q, k, v = self.heads(x)
        t = x.size(1)
        att = q @ k.transpose(-2, -1) / 2
        mask = torch.ones(t, t).tril().triu(-self.window)
        att = att.masked_fill(mask == 0, float("-inf"))
        return self.merged(att.softmax(-1) @ v)


class WindowLiteral(Base):
    def forward(self, x):
        q, k, v = self.heads(x)
        t = x.size(1)
        att = q @ k.transpose(-2, -1) / 2
        mask = torch.ones(t, t).tril().triu(-8)
        att = att.masked_fill(mask == 0, float("-inf"))
        return self.merged(att.softmax(-1) @ v)


class Offset(Base):
    """The diagonal is a number that happens to be 1."""

    def forward(self, x):
        q, k, v = self.heads(x)
        i, j = q.size(-2), k.size(-2)
        att = q @ k.transpose(-2, -1) / 2
        hidden = torch.ones(i, j, dtype=torch.bool).triu(j - i + 1 + self.step)
        att = att.masked_fill(hidden, float("-inf"))
        return self.merged(att.softmax(-1) @ v)


class MaskBySetting(Base):
    """A method makes the mask, one way or another."""

    def mask(self, t):
        if self.causal:
            return torch.ones(t, t).tril()
        return torch.ones(t, t)

    def forward(self, x):
        q, k, v = self.heads(x)
        att = q @ k.transpose(-2, -1) / 2
        att = att.masked_fill(self.mask(x.size(1)) == 0, float("-inf"))
        return self.merged(att.softmax(-1) @ v)


class MaskUnderCondition(Base):
    def forward(self, x):
        q, k, v = self.heads(x)
        t = x.size(1)
        att = q @ k.transpose(-2, -1) / 2
        mask = torch.ones(t, t).tril()
        if not self.causal:
            mask = mask.triu(-1)
        att = att.masked_fill(mask == 0, float("-inf"))
        return self.merged(att.softmax(-1) @ v)


class MaskChosen(Base):
    def forward(self, x):
        q, k, v = self.heads(x)
        t = x.size(1)
        mask = torch.ones(t, t).tril() if self.causal else torch.ones(t, t)
        att = q @ k.transpose(-2, -1) / 2
        att = att.masked_fill(mask == 0, float("-inf"))
        return self.merged(att.softmax(-1) @ v)


class ScaleByStep(Base):
    """The number is read before the count goes on."""

    def forward(self, x):
        q, k, v = self.heads(x)
        att = (q @ k.transpose(-2, -1)) * (1.0 / (1 + self.step))
        self.step += 1
        return self.merged(att.softmax(-1) @ v)


class ConditionBoundInside(Base):
    """What a condition asks for is bound in the middle of the pattern."""

    def forward(self, x):
        q, k, v = self.heads(x)
        causal = True
        att = q @ k.transpose(-2, -1) / 2
        causal = self.causal
        if causal:
            att = att.masked_fill(self.tril[: x.size(1), : x.size(1)] == 0, float("-inf"))
        return self.merged(att.softmax(-1) @ v)


class ConditionChangedInside(Base):
    def forward(self, x):
        q, k, v = self.heads(x)
        att = q @ k.transpose(-2, -1) / 2
        self.causal = self.step > 2
        if not self.causal:
            att = att.masked_fill(self.tril[: x.size(1), : x.size(1)] == 0, float("-inf"))
        return self.merged(att.softmax(-1) @ v)


class DropoutOfTheirOwn(nn.Module):
    p = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.0

    def forward(self, x):
        return F.dropout(x, self.rate, self.training)


class OwnDropout(Base):
    def __init__(self) -> None:
        super().__init__()
        self.drop = DropoutOfTheirOwn()

    def forward(self, x):
        q, k, v = self.heads(x)
        att = self.drop((q @ k.transpose(-2, -1) / 2).softmax(-1))
        return self.merged(att @ v)


class HelperWithCondition(Base):
    def masked(self, att):
        if self.causal:
            t = att.size(-1)
            att = att.masked_fill(torch.ones(t, t).tril() == 0, float("-inf"))
        return att

    def forward(self, x):
        q, k, v = self.heads(x)
        att = self.masked(q @ k.transpose(-2, -1) / 2)
        return self.merged(att.softmax(-1) @ v)


class DimensionByArgument(Base):
    def forward(self, x, dim=-1):
        q, k, v = self.heads(x)
        att = (q @ k.transpose(-2, -1) / 2).softmax(dim)
        return self.merged(att @ v)


class Ticks(Base):
    """A call that makes no tensor stands inside an expression that goes."""

    def tick(self, att):
        self.step += 1
        return att

    def forward(self, x):
        q, k, v = self.heads(x)
        att = F.softmax(self.tick(q @ k.transpose(-2, -1) / 2), dim=-1)
        return self.merged(att @ v)


class FloorDivision(Base):
    def forward(self, x):
        q, k, v = self.heads(x)
        att = torch.div(q @ k.transpose(-2, -1), 0.1, rounding_mode="floor")
        return self.merged(att.softmax(-1) @ v)


class ScaledAfterBias(Base):
    def forward(self, x):
        q, k, v = self.heads(x)
        att = (q @ k.transpose(-2, -1) + self.tril[: x.size(1), : x.size(1)]) / 2
        return self.merged(att.softmax(-1) @ v)


class SoftmaxModule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.Softmax(-1)

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.merged(self.softmax(q @ k.transpose(-2, -1) / 2) @ v)


class PartWithoutGradient(Base):
    def forward(self, x):
        q, k, v = self.heads(x)
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        att = (q @ k.transpose(-2, -1) / 2).softmax(-1)
        torch.set_grad_enabled(before)
        return self.merged(att @ v)


class Counts(Base):
    """Statements that have nothing to do with the pattern stand between its own."""

    def forward(self, x):
        q, k, v = self.heads(x)
        att = q @ k.transpose(-2, -1) / 2
        self.step += 1
        att = att.softmax(-1)
        self.seen.append(x.size(1))
        return self.merged(att @ v)


def attention(_):
    """A name that the recipe has too."""
    return 1.0


class Named(Base):
    def forward(self, x):
        q, k, v = self.heads(x)
        scale = 0.5 * attention(x)
        att = (q @ k.transpose(-2, -1)) * scale
        att = att.softmax(-1)
        return self.merged(att @ v)


class Loop(Base):
    """One site in a loop, in each round of which the names are bound anew."""

    def forward(self, x):
        outs = []
        for _ in range(3):
            q, k, v = self.heads(x)
            att = q @ k.transpose(-2, -1) / math.sqrt(SIZE)
            att = att.softmax(-1)
            outs.append(att @ v)
        return self.merged(sum(outs))


class WeightsOnRequest(Base):
    def forward(self, x, output_attentions=False):
        q, k, v = self.heads(x)
        att = (q @ k.transpose(-2, -1) / 2).softmax(-1)
        y = self.merged(att @ v)
        if output_attentions:
            return y, att
        return y


class DroppedInTraining(Base):
    def forward(self, x):
        q, k, v = self.heads(x)
        att = (q @ k.transpose(-2, -1) / 2).softmax(-1)
        att = self.drop(att) if self.training else att
        return self.merged(att @ v)


class SizesOfScores(Base):
    """The mask is cut out by the sizes of the scores, which are no longer made."""

    def forward(self, x):
        q, k, v = self.heads(x)
        w = q @ k.transpose(-2, -1)
        w = w / math.sqrt(v.size(-1))
        nd, ns = w.size(-2), w.size(-1)
        mask = self.tril[ns - nd : ns, :ns]
        w = w.masked_fill(mask == 0, torch.finfo(w.dtype).min)
        assert w.size(-1) == x.size(1), "sizes"
        w = w.softmax(dim=-1)
        return self.merged(w @ v)


class MaskCutInBranch(Base):
    def forward(self, x, mask=None):
        q, k, v = self.heads(x)
        w = q @ k.transpose(-2, -1) / 2
        if mask is not None:
            cut = mask[
                : x.size(1),
                : x.size(1),
            ]
            w = w + cut
        w = w.softmax(dim=-1)
        return self.merged(w @ v)


class Attending(nn.Module):
    def forward(self, q, k, v):
        return (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v


class PartInAList(Base):
    """Its part is in no list of PyTorch's."""

    def __init__(self):
        super().__init__()
        self.parts = [Attending()]

    def forward(self, x):
        return self.merged(self.parts[0](*self.heads(x)))


class Formula:
    def attend(self, q, k, v):
        return (q @ k.transpose(-2, -1) / 2).softmax(-1) @ v


class OfAnObject(Base):
    def __init__(self):
        super().__init__()
        self.formula = Formula()

    def forward(self, x):
        return self.merged(self.formula.attend(*self.heads(x)))
