"""Truth: gradient sums, accumulation into ``.grad``, tied weights and user hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .burning import Burn, Burning, Meter, Source
from .models import Residual
from .proof import Expected, in_model_mode, prove, rows, summed

X = torch.ones(4, 8)
WIDE = torch.ones(2048, 2048)  # adding two of these takes milliseconds

# A sum is not a burn: what is left of the gap between two burns is at least this long where a sum stands in it.
ROOM_NS = 500_000


def gaps(owners: dict[str, list[tuple[str, str]]], empty: tuple[str, str]) -> Callable[[Meter, int], Expected]:
    """Expect the gaps between two backward burns as an owner's gradient sum; forward adds these wide values too.

    A gap also holds the engine's step and the ends of both burns' functions. What these take is the length of the
    ``empty`` gap, between two burns of the same run with no sum between.
    """

    def expected(meter: Meter, steps: int) -> Expected:
        around = {owner: sum(meter.gaps_ns(*pair) for pair in pairs) for owner, pairs in owners.items()}
        dead = meter.gaps_ns(*empty)
        sums = {owner: (around[owner] - len(pairs) * dead) / steps for owner, pairs in owners.items()}
        return Expected({"gradient_sum_ns": sums}, skip=frozenset({"forward_self_ns"}))

    return expected


def test_residuals_charge_the_sum_to_the_producer(meter: Meter) -> None:
    model = nn.Sequential(Residual(), Burning(1, 1), Burning(1, 1))
    meter.adopt(model)
    # The first block's output is summed before the first block's inner backward, the source's before the source's.
    around = {"0.first": [("0.second.inner", "0.first.inner")], "0.source": [("0.first.inner", "0.source")]}
    report = prove(meter, in_model_mode(model, WIDE, summed), gaps(around, empty=("2", "1")))
    layers = rows(report)
    assert layers["0.first"].gradient_sum_ns > ROOM_NS and layers["0.source"].gradient_sum_ns > ROOM_NS
    sums = [op for op in report.data.ops if op.phase == "gradient_sum"]
    assert {op.layer for op in sums} >= {"0.first", "0.source"}
    assert all("add" in op.name for op in sums if op.layer == "0.source"), sums


class ThreeUsers(nn.Module):
    """One value with three users: the second gradient is added out of place, the third in place."""

    def __init__(self) -> None:
        super().__init__()
        self.source = Source(1, 1)
        self.a, self.b, self.c = Burning(1, 1), Burning(1, 1), Burning(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.source(x)
        out: Tensor = self.a(x) + self.b(x) + self.c(x)
        return out


def test_three_users_make_two_sums(meter: Meter) -> None:
    model = ThreeUsers()
    meter.adopt(model)
    # After c's backward there is one gradient and nothing to add.
    around = {"source": [("b", "a"), ("a", "source")]}
    report = prove(meter, in_model_mode(model, WIDE, summed), gaps(around, empty=("c", "b")))
    assert rows(report)["source"].gradient_sum_ns > ROOM_NS


class InputWithGrad(nn.Module):
    """The input itself has two users: the sum belongs to no layer of the model, and must not be given to one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Burning(1, 1), Burning(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.a(x) + self.b(x)
        return out


def test_the_sum_of_an_input_is_no_layers_self_time(meter: Meter) -> None:
    model = InputWithGrad()
    meter.adopt(model)

    def expected(meter: Meter, steps: int) -> Expected:
        # Whether the root or a row outside holds it is open; that layers a and b do not, is not.
        return Expected({}, skip=frozenset({"outside", "forward_self_ns"}), unknown=frozenset({""}))

    prove(meter, in_model_mode(model, WIDE.clone().requires_grad_(), summed), expected)


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.body = Burning(1, 3)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embed(ids)))
        return out


class Weighted(Burning):
    """A burning layer whose gradient is as wide as its weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__(1, 15)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Burn.apply(self.spec(), x, self.weight)
        return out


def test_the_sum_of_a_tied_weights_gradients_is_no_layers_self_time(meter: Meter) -> None:
    weight = nn.Parameter(torch.zeros(2048, 2048))
    model = nn.Sequential(nn.Linear(8, 8), Weighted(weight), Weighted(weight))
    meter.adopt(model)
    burn_after_accumulation(meter, weight, "1", 1)

    def expected(meter: Meter, steps: int) -> Expected:
        return Expected({}, skip=frozenset({"gradient_sum_ns", "accumulate_ns"}))

    layers = rows(prove(meter, in_model_mode(model, X, summed), expected))
    assert layers["1"].gradient_sum_ns + layers["2"].gradient_sum_ns > ROOM_NS
    assert layers["1"].hook_ns + layers["2"].hook_ns > 0.97e6


def accumulated(owners: set[str]) -> Callable[[Meter, int], Expected]:
    """Expect the burns behind an accumulation over ``owners`` together, and nowhere else."""
    return lambda meter, steps: Expected({}, unknown=frozenset(owners))


def burn_after_accumulation(meter: Meter, parameter: nn.Parameter, owner: str, ms: float) -> Any:
    def hook(_: Tensor) -> None:
        with meter.burn("hook", owner, ms):
            pass

    return parameter.register_post_accumulate_grad_hook(hook)


def test_tied_weights_name_all_their_owners(meter: Meter) -> None:
    model = Tied()
    meter.adopt(model)
    burn_after_accumulation(meter, model.head.weight, "embed", 4)
    report = prove(meter, in_model_mode(model, torch.arange(4), summed), accumulated({"embed", "head"}))
    layers = rows(report)
    named = " ".join([*layers["embed"].tied, *layers["head"].tied])
    assert "embed.weight" in named and "head.weight" in named
    assert not layers["body"].tied
    truth = meter.totals_ns("hook")["embed"] / report.data.workload.steps
    both = layers["embed"].hook_ns + layers["head"].hook_ns
    assert abs(both - truth) <= 0.03 * truth + 300_000


def test_accumulation_belongs_to_the_parameters_owner(meter: Meter) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Burning(1, 2), nn.Linear(8, 8))
    meter.adopt(model)
    burn_after_accumulation(meter, model[0].weight, "0", 3)
    burn_after_accumulation(meter, model[2].bias, "2", 5)
    report = prove(meter, in_model_mode(model, X, summed))
    ops = [op for op in report.data.ops if op.phase == "hook" and op.layer == "2"]
    assert sum(op.self_ns for op in ops) == rows(report)["2"].hook_ns
    assert rows(report)["2"].accumulate_ns > 0


class UserHooks(nn.Module):
    """Tensor hooks of the user: they run inside the node that made the tensor."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter
        self.stem, self.hooked, self.last = nn.Linear(8, 8), Burning(1, 2), Burning(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.hooked(self.stem(x))
        if x.requires_grad:
            x.register_hook(self.slow)
        out: Tensor = self.last(x)
        return out

    def slow(self, grad: Tensor) -> Tensor:
        with self.meter.burn("hook", "hooked", 3):
            return grad * 1.0


def test_user_tensor_hooks(meter: Meter) -> None:
    model = UserHooks(meter)
    meter.adopt(model)
    prove(meter, in_model_mode(model, X, summed))


def test_user_module_hooks(meter: Meter) -> None:
    """Forward hooks and full backward hooks of the user stay the user's: they run, and their nodes do not confuse."""
    model = nn.Sequential(nn.Linear(8, 8), Burning(1, 2), Burning(1, 3))
    meter.adopt(model)
    seen: list[str] = []
    model[1].register_forward_hook(lambda *_: seen.append("forward"))
    model[1].register_full_backward_hook(lambda *_: seen.append("backward"))
    prove(meter, in_model_mode(model, X, summed))
    assert seen.count("forward") == seen.count("backward") > 0
