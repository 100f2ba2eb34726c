"""Models under torch.compile, as programs that people write: python models.py FOLDER CASE..."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import get_compilation_metrics
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope.compat.inductor import watch

WIDTH = 32
TIMED = range(5, 8)  # calls of the steps that are timed
SETTLED = 4  # calls, after which everything is compiled: the survey comes later
PACKAGE = str(Path(gradscope.__file__).parent)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 64)
        self.broken = broken

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
            if self.broken:
                torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def whole(model: Model) -> Callable[[Tensor], Tensor]:
    return torch.compile(model)


def regional(model: Model) -> Callable[[Tensor], Tensor]:
    for block in model.blocks:
        block.compile()
    return model


def dynamic(model: Model) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, dynamic=True)


def function(model: Model) -> Callable[[Tensor], Tensor]:
    @torch.compile
    def loss_of(tokens: Tensor) -> Tensor:
        return model(tokens) * 2

    return loss_of


def whole_pass(model: Model) -> Callable[[Tensor], Tensor]:
    """Backward too: with compiled autograd one graph of its own."""
    torch._dynamo.config.compiled_autograd = True

    @torch.compile
    def train(tokens: Tensor) -> Tensor:
        loss: Tensor = model(tokens)
        loss.backward()
        return loss

    return train


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return gradient * (gate + x * gate * (1 - gate))


class Gate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Squared.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def custom(model: Model) -> Callable[[Tensor], Tensor]:
    for block in model.blocks:
        block.norm = Gate()  # type: ignore[assignment]
    return torch.compile(model)


class Sum(nn.Module):
    """Two matmuls of one size that are added, which Inductor joins; and blocks that share a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.query, self.key = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        shared = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Sharing(shared) for _ in range(3)])
        self.head = nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens.flatten())
        x = torch.tanh(self.query(x) + self.key(torch.sin(x)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x), tokens.flatten())


class Sharing(nn.Module):
    def __init__(self, shared: nn.Linear) -> None:
        super().__init__()
        self.own, self.shared = nn.Linear(WIDTH, WIDTH), shared

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.shared(torch.tanh(self.own(x))))


class Scored(nn.Module):
    """It returns the logits beside the loss, whose gradient does not come."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.tanh(self.up(self.embed(tokens.flatten())))
        logits = self.head(x)
        return x.mean(), logits, F.cross_entropy(logits, tokens.flatten())


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.packed(x).chunk(3, dim=-1))
        return torch.tanh(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class ByHand(nn.Module):
    """Attention as Inductor knows it, and computes it another way."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.softmax, self.drop = nn.Linear(WIDTH, 3 * WIDTH), nn.Softmax(dim=-1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (each.view(batch, tokens, 4, -1).transpose(1, 2) for each in self.packed(x).chunk(3, dim=-1))
        weights = self.drop(self.softmax(torch.matmul(q, k.transpose(-1, -2)) * 0.5))
        return torch.matmul(weights, v).transpose(1, 2).reshape(batch, tokens, WIDTH)


class Attending(nn.Module):
    """Checkpointed attention, which is run again with the same random numbers, whether it drops anything or not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, 64)
        self.blocks = nn.ModuleList([Attends() for _ in range(2)])
        self.hand = ByHand()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        x = self.hand(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Held(nn.Module):
    """Its weights are parameters of others: a list's, a parametrization's, an embedding's that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH, bias=False))
        self.list = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)])
        self.never = nn.Embedding(64, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.first(self.embed(tokens.flatten())))
        x = torch.tanh(self.normed(x)) @ self.list[0]
        return F.cross_entropy(F.linear(torch.tanh(x), self.never.weight), tokens.flatten())


class InNumpy(torch.autograd.Function):
    """Its forward is not torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(x.detach().numpy() @ weight.detach().numpy())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.T @ gradient


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return InNumpy.apply(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


class Beside(nn.Module):
    """A block that may be compiled, beside torch's own modules, which Dynamo leaves alone, and a Function in NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.product = nn.Embedding(64, WIDTH), Block(), Product()
        self.rest = torch.compiler.disable(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
        self.again = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.block(self.embed(tokens.flatten()))
        x = self.rest(self.product(x))
        x = checkpoint(self.again, x, use_reentrant=False)
        return x.square().mean()


def block(model: Beside) -> Callable[[Tensor], Tensor]:
    model.block.compile()
    return model


def nothing(model: Beside) -> Callable[[Tensor], Tensor]:
    """Torch compiles nothing of a layer of its own."""
    model.again[0].compile()
    return model


def replaced(model: Sum) -> Callable[[Tensor], Tensor]:
    """Another module stands at the place of one that was compiled."""
    compiled, steps = torch.compile(model), count()

    def step(tokens: Tensor) -> Tensor:
        if next(steps) == 1:
            model.query = nn.Linear(WIDTH, WIDTH, bias=False)
        loss: Tensor = compiled(tokens)
        return loss

    return step


def scored(model: Scored) -> Callable[[Tensor], Tensor]:
    compiled = torch.compile(model)
    return lambda tokens: compiled(tokens)[-1]  # type: ignore[no-any-return]


def more(model: Model) -> Callable[[Tensor], Tensor]:
    """Graphs for any size, first compiled for a smaller one."""
    compiled = torch.compile(model, dynamic=True)
    compiled(torch.randint(0, 64, (3, 7))).backward()
    return compiled


def elsewhere(model: Model) -> Callable[[Tensor], Tensor]:
    """Compiled by another thread, which has gone when steps are measured."""
    compiled = torch.compile(model)
    thread = Thread(target=lambda: compiled(torch.randint(0, 64, (8, 32))).backward())
    thread.start()
    thread.join()
    return compiled


def begun(model: Model) -> Callable[[Tensor], Tensor]:
    """The forward pass is compiled before the measurement begins, for a look at the shapes, and backward later."""
    compiled = torch.compile(model)
    compiled(torch.randint(0, 64, (8, 32)))
    return compiled


def evaluated(model: Model) -> Callable[[Tensor], Tensor]:
    """The steps that are timed evaluate the model itself, which is not compiled; the survey's step does not."""
    compiled, steps = torch.compile(model), count()

    def step(tokens: Tensor) -> Tensor:
        if next(steps) in TIMED:
            with torch.no_grad():
                model(tokens)
        return compiled(tokens)  # type: ignore[no-any-return]

    return step


def untold(model: Model) -> Callable[[Tensor], Tensor]:
    """With a torch that does not tell what its kernels are made of."""

    def lacks(*_: Any) -> Any:
        raise AttributeError("this torch has no such name")

    watch.noted = lacks
    return torch.compile(model)


CASES: dict[str, Callable[[Model], Callable[[Tensor], Tensor]]] = {
    "eager": lambda model: model,
    "eager held": lambda model: model,
    "eager beside": lambda model: model,
    "eager attention": lambda model: model,
    "eager sum": lambda model: model,  # before anything is compiled: Dynamo leaves its functions in this module
    "nothing": nothing,  # type: ignore[dict-item]  # before anything is compiled too
    "whole": whole,
    "regional": regional,
    "dynamic": dynamic,
    "broken": whole,
    "function": function,
    "unnamed": function,  # nobody says which model it is of, and no module is called
    "optimizer": whole,  # its step is compiled too
    "autograd": whole_pass,
    "custom": custom,
    "sum": whole,
    "held": whole,
    "attention": whole,
    "beside": block,  # type: ignore[dict-item]
    "sharing": regional,
    "replaced": replaced,  # type: ignore[dict-item]
    "scored": scored,  # type: ignore[dict-item]
    "more": more,
    "elsewhere": elsewhere,
    "begun": begun,
    "evaluated": evaluated,
    "untold": untold,  # the last: it breaks what the others need
}


SUMS = {"eager sum", "sum", "sharing", "replaced"}
HELD = {"eager held", "held"}
ATTENDING = {"eager attention", "attention"}
BESIDE = {"eager beside", "beside", "nothing"}
MADE = {"scored": Scored, **dict.fromkeys(SUMS, Sum), **dict.fromkeys(HELD, Held), **dict.fromkeys(BESIDE, Beside)}
MADE |= dict.fromkeys(ATTENDING, Attending)


def run(case: str, folder: Path) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model: Any = MADE.get(case, partial(Model, broken=case == "broken"))()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    tokens = torch.randint(0, 64, (8, 32))
    begun = CASES[case](model) if case == "begun" else None
    before = settings()
    with gradscope.profiling(None if case == "unnamed" else model, steps=3, warmup=2) as prof:
        step = CASES[case](model) if begun is None else begun
        update = torch.compile(optimizer.step) if case == "optimizer" else optimizer.step
        for number in count():
            if number == SETTLED:
                compiled = len(get_compilation_metrics())
            if prof.step():
                break
            loss = step(tokens)
            if case != "autograd":
                loss.backward()
            update()
            optimizer.zero_grad()
    assert len(get_compilation_metrics()) == compiled, "tracing a step has had something compiled"
    prof.report.save(folder / f"{case}.json", force=True)
    assert settings() == before, "gradscope left Inductor's settings changed"
    ours = {each.co_filename for each in get_compilation_metrics() if PACKAGE in str(each.co_filename)}
    assert not ours, f"Dynamo has compiled gradscope's own code, in {ours}"


def settings() -> list[object]:
    import torch._functorch.config as functorch
    import torch._inductor.compile_fx as compile_fx
    import torch._inductor.config as config
    from torch._dynamo.callback import callback_handler

    return [
        config.trace.provenance_tracking_level,
        config.cpp.enable_kernel_profile,
        config.fx_graph_cache,
        functorch.enable_autograd_cache,
        compile_fx._InProcessFxCompile.codegen_and_compile,
        len(callback_handler.start_callbacks),
        len(callback_handler.end_callbacks),
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        run(name, Path(sys.argv[1]))
