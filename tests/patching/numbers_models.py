"""Patterns whose numbers stand in attributes, globals, arguments and local names."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, LENGTH, CLASSES = 32, 12, 40

SLOPE = 0.044715
FILL = -math.inf


class Numbers(nn.Module):
    """Each attribute here is a number that a schedule or a user may change.

    Attributes:
        changes: by name of an attribute what another step may hold.
    """

    changes: ClassVar[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.lift = nn.Linear(WIDTH, WIDTH)


class RMSNorm(Numbers):
    changes: ClassVar = {"power": 4.0, "size": 8, "eps": 0.5}

    def __init__(self) -> None:
        super().__init__()
        self.power, self.size, self.eps = 2.0, WIDTH, 1e-5
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        return x * torch.rsqrt(x.pow(self.power).sum(-1, keepdim=True) / self.size + self.eps) * self.weight


class NormInAHelper(Numbers):
    """The numbers stand in another method of the same module."""

    changes: ClassVar = {"power": 4.0}

    def __init__(self) -> None:
        super().__init__()
        self.power = 2.0
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(self.power).mean(-1, keepdim=True) + 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        return self._norm(x) * self.weight


def _over_mean_power(x: Tensor, power: float, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(power).mean(-1, keepdim=True) + eps)


class NormIsHandedNumbers(Numbers):
    """What the helper is handed is the module's, one by name."""

    changes: ClassVar = {"power": 4.0, "eps": 0.5}

    def __init__(self) -> None:
        super().__init__()
        self.power, self.eps, self.weight = 2.0, 1e-3, nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        return _over_mean_power(x, self.power, eps=self.eps) * self.weight


def _often(x: Tensor, power: float, times: int) -> Tensor:
    if times > 1:
        return _often(x, power, times - 1)
    return x * torch.rsqrt(x.pow(power).mean(-1, keepdim=True) + 1e-5)


class NormCallsItself(Numbers):
    """A function of the file calls itself."""

    changes: ClassVar = {"power": 4.0, "times": 1}

    def __init__(self) -> None:
        super().__init__()
        self.power, self.times = 2.0, 2

    def forward(self, x: Tensor) -> Tensor:
        return x + _often(self.lift(x), self.power, self.times)


class Exact(Numbers):
    changes: ClassVar = {"root": 1.0, "share": 0.75, "one": 0.5}

    def __init__(self) -> None:
        super().__init__()
        self.root, self.share, self.one = math.sqrt(2), 0.5, 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        return self.share * x * (self.one + torch.erf(x / self.root))


class ByTanh(Numbers):
    """One number is a global, one a local name of an attribute."""

    changes: ClassVar = {"factor": 1.5, "global SLOPE": 0.2}

    def __init__(self) -> None:
        super().__init__()
        self.factor = math.sqrt(2 / math.pi)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        factor = self.factor
        return 0.5 * x * (1.0 + torch.tanh(factor * (x + SLOPE * x**3)))


class ByTensors(Numbers):
    """The numbers are made into tensors first."""

    changes: ClassVar = {"two": 3.0, "share": 0.75}

    def __init__(self) -> None:
        super().__init__()
        self.two, self.share = 2.0, 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        root, share = torch.sqrt(torch.tensor(self.two)), torch.full((), self.share)
        return share * x * (1.0 + torch.erf(x / root))


class InBuffers(Numbers):
    """The numbers are held as tensors, one of them in a helper."""

    changes: ClassVar = {"root": torch.tensor(1.2), "share": torch.tensor(0.75), "fill": torch.tensor(-1.0)}

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("root", torch.tensor(2.0).sqrt())
        self.register_buffer("share", torch.tensor(0.5))
        self.register_buffer("fill", torch.tensor(-math.inf))
        self.register_buffer("seen", torch.ones(LENGTH, LENGTH).tril().bool())

    def _erf(self, x: Tensor) -> Tensor:
        return torch.erf(x / self.root)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        x = self.share * x * (1.0 + self._erf(x))
        scores = torch.where(self.seen, x @ x.mT * 0.25, self.fill)
        return scores.softmax(-1) @ x


class FilledByAMadeNumber(Numbers):
    """What hides is made into a tensor."""

    changes: ClassVar = {"fill": -1.0}

    def __init__(self) -> None:
        super().__init__()
        self.fill = -math.inf
        self.register_buffer("seen", torch.ones(LENGTH, LENGTH).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        fill = torch.full([], self.fill)
        scores = torch.where(self.seen, x @ x.mT * 0.25, fill)
        return scores.softmax(-1) @ x


class OfASum(Numbers):
    """A word says which function it is."""

    changes: ClassVar = {"how": "none"}

    def __init__(self) -> None:
        super().__init__()
        self.how, self.bias = "tanh", nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.lift(x) + self.bias, approximate=self.how)


class OverDimensions(Numbers):
    """Several numbers in one attribute."""

    changes: ClassVar = {"dimensions": (-2,)}

    def __init__(self) -> None:
        super().__init__()
        self.dimensions = (-1,)
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        return x * torch.rsqrt(x.pow(2).mean(self.dimensions, keepdim=True) + 1e-5) * self.weight


class Swish(Numbers):
    changes: ClassVar = {"beta": 2.0}

    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate(x), self.lift(x)
        return gate * torch.sigmoid(self.beta * gate) * up


class InParts(Numbers):
    """The parts are read by their index: there may be more of them."""

    changes: ClassVar = {"parts": 4}

    def __init__(self) -> None:
        super().__init__()
        self.parts = 2

    def forward(self, x: Tensor) -> Tensor:
        halves = self.lift(x).chunk(self.parts, -1)
        return functional.silu(halves[0]) * halves[1]


class ShownAgain(Numbers):
    """The losses of rows are shown as so many, or as a column."""

    changes: ClassVar = {"form": (2 * LENGTH, 1)}

    def __init__(self) -> None:
        super().__init__()
        self.form = 2 * LENGTH

    def forward(self, x: Tensor) -> Tensor:
        logits = self.lift(x).flatten(0, 1)
        targets = torch.arange(len(logits)) % WIDTH
        losses = -logits.log_softmax(-1).gather(-1, targets[:, None]).view(self.form)
        return losses + losses.mT if losses.dim() > 1 else losses


class UserSizes(Numbers):
    """What is called as a tensor's form is called, and is the user's own."""

    changes: ClassVar = {"size": (4, 2.5), "ndim": 4, "shape": (1, 1.5), "sqrt": lambda: 0.25, "dim": lambda: 0.25}

    def __init__(self) -> None:
        super().__init__()
        self.size, self.ndim, self.shape = (4, 0.5), 2, (1, 1.0)
        self.dim = self.sqrt = halved
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        x = self.sqrt() * x * (1.0 + torch.erf(x * 0.5**0.5))
        _, half = self.size
        x = half * x * (self.shape[1] + torch.erf(x / math.sqrt(2)))
        x = x * torch.rsqrt(x.pow(self.ndim).mean(-1, keepdim=True) + 1e-5) * self.weight
        return self.dim() * x * (1.0 + torch.erf(x * 0.5**0.5))


def halved() -> float:
    """A number that is made in a function."""
    return 0.5


class Attention(Numbers):
    changes: ClassVar = {"hidden": 1.0, "scale": 0.9, "axis": -2, "global FILL": -1.0, "share": 0.3}

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.hidden, self.scale, self.axis, self.share = 0.0, 0.25, -1, 0.0
        mask = torch.tril(torch.ones(LENGTH, LENGTH)) + 0.0
        mask[0, 1] = 2.0  # it stays hidden or seen whichever number hides
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)) * self.scale
        scores = scores.masked_fill(self.mask == self.hidden, FILL)
        weights = functional.dropout(scores.softmax(dim=self.axis), self.share, self.training)
        return (weights @ v).squeeze(1)


class Assigned(Attention):
    """Scores are hidden by assignment."""

    changes: ClassVar = {"fill": -1.0, "scale": 0.9}

    def __init__(self) -> None:
        super().__init__()
        self.fill = -math.inf

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)) * self.scale
        scores[:, :, self.mask == 0] = self.fill
        return (scores.softmax(-1) @ v).squeeze(1)


class Loss(Numbers):
    changes: ClassVar = {"ignored": 1, "smoothing": 0.3, "temperature": 3.0, "how": "sum"}

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.ignored, self.smoothing, self.temperature, self.how = -1, 0.0, 1.0, "mean"

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.lift(x)) / self.temperature
        target = torch.arange(x.shape[0] * x.shape[1]) % CLASSES
        return functional.cross_entropy(
            logits.view(-1, CLASSES),
            target,
            ignore_index=self.ignored,
            label_smoothing=self.smoothing,
            reduction=self.how,
        )


KINDS: tuple[type[Numbers], ...] = (
    *(
        RMSNorm,
        NormInAHelper,
        NormCallsItself,
        Exact,
        ByTanh,
        ByTensors,
        InBuffers,
        FilledByAMadeNumber,
        OfASum,
        OverDimensions,
    ),
    *(Swish, InParts, ShownAgain, UserSizes, Attention, Assigned, Loss),
)
