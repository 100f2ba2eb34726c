"""Training steps of many structures; each function builds its model and gives the step.

Sizes are odd and differ, so that no two tensors that matter are of one size.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

Step = Callable[[], object]


def network(width: int = 33, out: int = 7) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(19, width), nn.Tanh(), nn.Linear(width, width + 2), nn.GELU(), nn.Linear(width + 2, out)
    )


def plain() -> Step:
    model, x = network(), torch.randn(21, 19)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def gradient_penalty() -> Step:
    model = network(out=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        x = torch.randn(257, 19, requires_grad=True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        ((slope.norm(dim=1) - 1) ** 2).mean().backward()
        optimizer.step()

    return step


def gradient_penalty_that_collects() -> Step:
    """The points of the penalty are leaves whose gradient is asked for by ``backward``."""
    model = network(out=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        x = torch.randn(257, 19, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a cycle, which is broken below
            model(x).sum().backward(create_graph=True)
        assert x.grad is not None
        penalty = x.grad.square().sum()
        x.grad = None
        for parameter in model.parameters():
            parameter.grad = None
        penalty.backward()
        optimizer.step()

    return step


def physics() -> Step:
    """A PINN: new points each step, their derivatives of two orders."""
    model = nn.Sequential(nn.Linear(2, 31), nn.Tanh(), nn.Linear(31, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        x, t = torch.rand(301, 1, requires_grad=True), torch.rand(301, 1, requires_grad=True)
        u = model(torch.cat([x, t], 1))
        u_t = torch.autograd.grad(u.sum(), t, create_graph=True)[0]
        u_x = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        u_xx = torch.autograd.grad(u_x.sum(), x, create_graph=True)[0]
        (u_t - u_xx).square().mean().backward()
        optimizer.step()

    return step


def per_sample_gradients() -> Step:
    model, x = network(out=1), torch.randn(23, 19)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(values: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, values, (one[None],)).square().sum()

    def step() -> None:
        found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
        for name, value in parameters.items():
            value.sub_(found[name].mean(0), alpha=0.1)
        model.zero_grad()
        model(x).mean().backward()

    return step


def function_transform_in_the_loss() -> Step:
    """``torch.func.grad`` of a function whose arguments are leaves of the step."""
    model = network(out=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        points = torch.randn(91, 19, requires_grad=True)
        slopes = vmap(grad(lambda one: model(one[None]).sum()))(points)
        slopes.square().mean().backward()
        optimizer.step()

    return step


def replaced_head() -> Step:
    body = network(out=40)
    x = torch.randn(21, 19)

    def step() -> None:
        body.head = nn.Linear(40, 201)
        optimizer = torch.optim.SGD(body.parameters(), lr=0.1)
        body(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def head_outside_the_model() -> Step:
    body, x = network(out=40), torch.randn(21, 19)
    optimizer = torch.optim.SGD(body.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        nn.Linear(40, 301)(body(x)).square().mean().backward()
        optimizer.step()

    return step


def deep_copies() -> Step:
    """As in MAML: an inner step on a copy, whose gradients go to the original."""
    model, x = network(), torch.randn(21, 19)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        learner = copy.deepcopy(model)
        inner = torch.optim.SGD(learner.parameters(), lr=0.1)
        learner(x).square().mean().backward()
        inner.step()
        inner.zero_grad()
        learner(x).square().mean().backward()
        for mine, theirs in zip(model.parameters(), learner.parameters(), strict=True):
            mine.grad = theirs.grad
        optimizer.step()

    return step


def average_teacher() -> Step:
    student, x = network(), torch.randn(21, 19)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        with torch.no_grad():
            goal = teacher(x)
        (student(x + 0.1) - goal).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
                old.lerp_(new, 0.01)

    return step


def _checkpointed(*, reentrant: bool) -> Step:
    blocks, x = nn.ModuleList(network(out=19) for _ in range(3)), torch.randn(61, 19)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        y = x.clone().requires_grad_()
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=reentrant)
        y.square().mean().backward()
        optimizer.step()

    return step


def checkpoint_without_reentrance() -> Step:
    return _checkpointed(reentrant=False)


def checkpoint_with_reentrance() -> Step:
    return _checkpointed(reentrant=True)


def saved_on_cpu() -> Step:
    model, x = network(), torch.randn(61, 19)

    def step() -> None:
        model.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            loss = model(x).square().mean()
        loss.backward()

    return step


def accumulation() -> Step:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for _ in range(4):
            (model(torch.randn(61, 19)).square().mean() / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def adversaries() -> Step:
    maker, judge = nn.Sequential(nn.Linear(5, 43), nn.ReLU(), nn.Linear(43, 19)), network(out=1)
    for_maker = torch.optim.Adam(maker.parameters())
    for_judge = torch.optim.RMSprop(judge.parameters())
    loss = nn.BCEWithLogitsLoss()

    def step() -> None:
        made = maker(torch.randn(37, 5))
        for_judge.zero_grad()
        ones = torch.ones(37, 1)
        (loss(judge(torch.randn(37, 19)), ones) + loss(judge(made.detach()), 1 - ones)).backward()
        for_judge.step()
        for_maker.zero_grad()
        loss(judge(made), ones).backward()
        for_maker.step()

    return step


def sparse_embedding() -> Step:
    table, head = nn.Embedding(503, 29, sparse=True), nn.Linear(29, 3)
    optimizers = (torch.optim.SparseAdam(table.parameters()), torch.optim.SGD(head.parameters(), lr=0.1))

    def step() -> None:
        for each in optimizers:
            each.zero_grad()
        head(table(torch.randint(503, (17, 5)))).square().mean().backward()
        for each in optimizers:
            each.step()

    return step


def tied_weights() -> Step:
    table, body, head = nn.Embedding(211, 29), nn.Linear(29, 29), nn.Linear(29, 211, bias=False)
    head.weight = table.weight
    model = nn.Sequential(table, body, nn.Tanh(), head)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(211, (7, 13))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()

    return step


class Scaled(Tensor):
    """A subclass of two parts: numbers, and their scale."""

    numbers: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> Scaled:
        made: Scaled = Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)  # type: ignore[attr-defined]
        return made

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _meta: Any, _size: Any, _stride: Any) -> Scaled:
        return Scaled(inner["numbers"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.numbers * value.scale if isinstance(value, Scaled) else value

        if func is torch.ops.aten.detach.default:
            return Scaled(args[0].numbers, args[0].scale)
        args, kwargs = torch.utils._pytree.tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def tensor_subclass() -> Step:
    """A frozen weight whose parts are two tensors of its own."""
    model = network(out=27)
    frozen = Scaled(torch.randint(-8, 8, (27, 51)).to(torch.int8), torch.rand(27, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(21, 19)

    def step() -> None:
        optimizer.zero_grad()
        (model(x) @ frozen).square().mean().backward()
        optimizer.step()

    return step


class Growing(nn.Module):
    """A buffer that a step makes longer, in place and by a new one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.register_buffer("seen", torch.zeros(5))
        self.register_buffer("count", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        with torch.no_grad():
            self.seen.resize_(len(self.seen) + 101).zero_()
            self.count = torch.cat([self.count, y.detach().mean(0)])
        return y


def growing_buffer() -> Step:
    model, x = Growing(), torch.randn(21, 19)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def leaking_list() -> Step:
    model, x = network(), torch.randn(21, 19)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[Tensor] = []

    def step() -> None:
        optimizer.zero_grad()
        output = model(x)
        output.square().mean().backward()
        optimizer.step()
        kept.append(output)

    return step


def looking_ahead() -> Step:
    """The next batch is there before the step of this one ends, as in an accelerated loader."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def batches() -> Iterator[Tensor]:
        waiting = torch.randn(63, 19)
        while True:
            following = torch.randn(63, 19)
            yield waiting
            waiting = following

    loader = batches()

    def step() -> None:
        x = next(loader)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def last_outputs() -> Step:
    """Keeps some last outputs: full from the start, so it does not grow."""
    model, x = network(), torch.randn(21, 19)
    kept: deque[Tensor] = deque((torch.zeros(21, 7) for _ in range(3)), maxlen=3)

    def step() -> None:
        model.zero_grad()
        output = model(x)
        output.square().mean().backward()
        kept.append(output.detach())

    return step


def retained_graph() -> Step:
    model, x = network(), torch.randn(21, 19)

    def step() -> None:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()

    return step


def carried_state() -> Step:
    """A recurrent net whose hidden state goes from step to step."""
    model, head = nn.GRU(19, 23, batch_first=True), nn.Linear(23, 2)
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
    carried = [torch.zeros(1, 11, 23)]

    def step() -> None:
        optimizer.zero_grad()
        out, state = model(torch.randn(11, 9, 19), carried[0])
        head(out).square().mean().backward()
        carried[0] = state.detach()
        optimizer.step()

    return step


def autocast() -> Step:
    model, x = network(), torch.randn(21, 19)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()

    return step


def double_backward() -> Step:
    model, x = network(), torch.randn(21, 19)
    parameters = tuple(model.parameters())

    def step() -> None:
        gradients = torch.autograd.grad(model(x).square().mean(), parameters, create_graph=True)
        product = torch.stack([g.square().sum() for g in gradients]).sum()
        for parameter, value in zip(parameters, torch.autograd.grad(product, parameters), strict=True):
            parameter.data.sub_(value, alpha=0.01)

    return step


class Keeps(torch.autograd.Function):
    """Keeps tensors as attributes of its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.held = x.exp()
        ctx.pair = {"twice": 2 * ctx.held}
        return ctx.held.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.held * ctx.pair["twice"].cos()


def context_attributes() -> Step:
    model, x = network(), torch.randn(21, 19)

    def step() -> None:
        model.zero_grad()
        Keeps.apply(model(x)).sum().backward()

    return step


def hooks_with_closures() -> Step:
    """Hooks of a step that hold tensors of it."""
    model, x = network(), torch.randn(21, 19)

    def step() -> None:
        model.zero_grad()
        output = model(x)
        weight = torch.rand(21, 7)
        output.register_hook(lambda gradient: gradient * weight)
        output.square().mean().backward()

    return step


def optimizer_of_the_step() -> Step:
    """A new optimizer in each step, stepped by a new one at its end."""
    model, x = network(), torch.randn(21, 19)

    def step() -> None:
        optimizer = torch.optim.Adam(model.parameters())
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@contextmanager
def sharded() -> Iterator[Callable[[], Step]]:
    """FSDP2 on one process."""
    from torch.distributed.fsdp import fully_shard

    from tests.process_group import alone

    def build() -> Step:
        model, x = network(), torch.randn(21, 19)
        for each in (model[0], model[2], model):
            fully_shard(each)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        return step

    with alone():
        yield build


STRUCTURES: tuple[Callable[[], Step], ...] = (
    plain,
    gradient_penalty,
    gradient_penalty_that_collects,
    physics,
    per_sample_gradients,
    function_transform_in_the_loss,
    replaced_head,
    head_outside_the_model,
    deep_copies,
    average_teacher,
    checkpoint_without_reentrance,
    checkpoint_with_reentrance,
    saved_on_cpu,
    accumulation,
    adversaries,
    sparse_embedding,
    tied_weights,
    tensor_subclass,
    growing_buffer,
    leaking_list,
    looking_ahead,
    last_outputs,
    retained_graph,
    carried_state,
    autocast,
    double_backward,
    context_attributes,
    hooks_with_closures,
    optimizer_of_the_step,
)
