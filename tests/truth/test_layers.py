"""Truth: plain layers, and how modules may hold, call and feed each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .burning import OUTSIDE, BurnBackward, Burning, BurnSpec, Meter, Source, burn
from .models import Chain, Flood, KeywordOnly, Shared, Table
from .proof import Expected, in_model_mode, prove, rows, summed

X = torch.ones(4, 8)


def test_plain_chain(meter: Meter) -> None:
    model = Chain()
    meter.adopt(model)
    report = prove(meter, in_model_mode(model, X, summed))
    layers = rows(report)
    root = layers[""]
    assert root.backward_total_ns == sum(
        row.backward_self_ns + row.recompute_ns + row.gradient_sum_ns + row.accumulate_ns + row.hook_ns
        for row in layers.values()
    )
    assert layers["dear"].calls == 1 and layers["idle"].backward_self_ns == 0
    assert layers["dear"].backward_share > layers["cheap"].backward_share > layers["even"].backward_share > 0


def test_every_measured_step_is_kept_by_layer(meter: Meter) -> None:
    """A layer that costs more in every step shows its own spread, and its mean is the mean of its steps."""

    class Slower(Burning):
        def forward(self, x: Tensor) -> Tensor:
            self.backward_ms += 1
            return super().forward(x)

    model = nn.Sequential(nn.Linear(8, 8), Slower(1, 1))
    meter.adopt(model)
    row = rows(prove(meter, in_model_mode(model, X, summed)))["1"]
    steps = list(row.backward_self_steps_ns)
    assert len(steps) == 3 and len(set(steps)) == 3
    assert row.backward_self_ns == pytest.approx(sum(steps) / 3, abs=10)
    truth = [burned.elapsed_ns for burned in meter.measured if burned.kind == "backward"]
    assert steps == pytest.approx(truth, rel=0.1, abs=1e6)


class Nested(nn.Module):
    """Containers burn too, before, between and after their children."""

    def __init__(self, meter: Meter, depth: int, path: str = "") -> None:
        super().__init__()
        self.meter, self.path = meter, path
        self.leaf = Burning(1, 1)
        self.child = Nested(meter, depth - 1, f"{path}.child".lstrip(".")) if depth else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = burn(self.meter, self.path, self.leaf(x), forward_ms=1, backward_ms=2)
        return burn(self.meter, self.path, self.child(x), forward_ms=1, backward_ms=1)


def test_containers_have_self_time(meter: Meter) -> None:
    model = Nested(meter, 2)
    meter.adopt(model)
    layers = rows(prove(meter, in_model_mode(model, X.clone().requires_grad_(), summed)))
    assert layers["child.child"].parent == "child" and layers[""].parent is None
    # Totals contain the children: three of the children's 4 ms inside the root, two inside its child.
    assert layers[""].backward_total_ns > layers["child"].backward_total_ns + 3e6
    assert layers[""].forward_total_ns > layers["child"].forward_total_ns + 2e6


class Recursive(nn.Module):
    """A module that calls itself; only the innermost call sees the leaf."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter
        self.leaf = Burning(1, 3)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = burn(self.meter, "again", x, forward_ms=1, backward_ms=2)
        x = self(x, depth - 1) if depth else self.leaf(x)
        return burn(self.meter, "again", x, forward_ms=0.5, backward_ms=0.5)


def test_a_module_that_calls_itself(meter: Meter) -> None:
    model = nn.Sequential()
    model.add_module("stem", nn.Linear(8, 8))
    model.add_module("again", Recursive(meter))
    meter.adopt(model)
    # Its forward is not compared: three calls and six Functions are work of its own that does not burn (0.55 ms seen).
    working = Expected({}, working=frozenset({"again"}))
    layers = rows(prove(meter, in_model_mode(model, X, summed), lambda meter, steps: working))
    assert layers["again"].calls == 3 and layers["again.leaf"].calls == 1
    # A call inside a call of the same module counts once in the total: no more than the whole step.
    assert layers["again"].forward_total_ns <= layers[""].forward_total_ns


def test_a_shared_module_used_twice(meter: Meter) -> None:
    model = Shared()
    meter.adopt(model)
    layers = rows(prove(meter, in_model_mode(model, X, summed)))
    assert layers["twice"].calls == 2
    assert layers["left.0"].calls == 2, "held under two names: one module, one row, under its first name"


class CalledTwice(nn.Module):
    """A parent called twice, whose child is called once in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.parent = nn.Sequential(Burning(1, 2), Burning(2, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.parent(self.parent(self.stem(x)))
        return out


def test_a_shared_module_across_calls_of_its_parent(meter: Meter) -> None:
    model = CalledTwice()
    meter.adopt(model)
    layers = rows(prove(meter, in_model_mode(model, X, summed)))
    assert layers["parent"].calls == layers["parent.0"].calls == 2


class Hidden(nn.Module):
    """A plain dict hides its modules from named_modules: their time is the holder's own."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.experts = nn.ModuleDict({"a": Burning(1, 2), "b": Burning(2, 1)})
        self.stack = nn.ModuleList([Burning(1, 1), nn.ModuleList([Burning(1, 2)])])
        self.plain = {"hidden": Burning(2, 3)}
        self.plain["hidden"].meter, self.plain["hidden"].owner = meter, ""

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.stem(x)
        parts = [expert(x) for expert in self.experts.values()]
        x = self.stack[1][0](self.stack[0](parts[0] + parts[1]))  # type: ignore[index]
        return {"out": [self.plain["hidden"](x), "a text"], "aux": (x.detach(), None)}


def test_modules_in_dicts_and_lists_and_dict_outputs(meter: Meter) -> None:
    model = Hidden(meter)
    meter.adopt(model)
    layers = rows(prove(meter, in_model_mode(model, X, lambda output, batch: output["out"][0].sum())))
    assert {"experts", "experts.a", "experts.b", "stack", "stack.0", "stack.1.0"} <= set(layers)


def test_keyword_only_inputs(meter: Meter) -> None:
    model = KeywordOnly()
    meter.adopt(model)
    prove(meter, in_model_mode(model, {"x": X, "scale": 2.0}, summed))


def test_inputs_without_gradient(meter: Meter) -> None:
    model = nn.Sequential(Table(), Burning(1, 2))
    meter.adopt(model)
    prove(meter, in_model_mode(model, torch.arange(4), summed))


def test_frozen_layers(meter: Meter) -> None:
    """Frozen in front: no backward at all. Frozen in the middle: the gradient still passes through."""
    model = nn.Sequential(Source(2, 9), Source(1, 3), Source(1, 4), Burning(1, 2))
    for index in (0, 2):
        model[index].requires_grad_(False)
    meter.adopt(model)
    layers = rows(prove(meter, in_model_mode(model, X, summed)))
    assert layers["0"].backward_total_ns == 0 and layers["0"].forward_self_ns > 0
    assert ("backward", "0") not in meter.counts() and ("backward", "2") in meter.counts()
    assert layers["2"].accumulate_ns == 0


class Passing(nn.Module):
    """Makes a new layer in every forward, and forgets it: its time is the maker's own."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def forward(self, x: Tensor) -> Tensor:
        made = Burning(1, 3)
        made.meter, made.owner = self.meter, "1"
        out: Tensor = made(x)
        return out


def test_modules_made_while_running(meter: Meter) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Passing(meter), Burning(1, 1))
    meter.adopt(model)
    prove(meter, in_model_mode(model, X, summed))


class PartlyWithoutGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student, self.head = Source(3, 9), Source(1, 4), Burning(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        with torch.inference_mode():
            self.teacher(x)
        out: Tensor = self.head(self.student(x + target))
        return out


def test_parts_without_grad(meter: Meter) -> None:
    model = PartlyWithoutGrad()
    meter.adopt(model)
    layers = rows(prove(meter, in_model_mode(model, X, summed)))
    assert layers["teacher"].calls == 2 and layers["teacher"].backward_total_ns == 0


class CallsForward(nn.Module):
    """Calls a child's forward by hand, so no hook fires, in a method that is not forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.direct, self.hooked = Burning(1, 3), Burning(2, 1)

    def helper(self, x: Tensor) -> Tensor:
        return self.direct.forward(x)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.hooked(self.helper(self.stem(x)))
        return out


def test_forward_called_by_hand_is_a_call(meter: Meter) -> None:
    model = CallsForward()
    meter.adopt(model)
    layers = rows(prove(meter, in_model_mode(model, X, summed)))
    assert layers["direct"].calls == 1


def test_a_functional_loss_is_outside_the_modules(meter: Meter) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Burning(1, 2))
    meter.adopt(model)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return burn(meter, OUTSIDE, output, forward_ms=2, backward_ms=5).sum()

    report = prove(meter, in_model_mode(model, X, loss))
    assert report.data.ledger.outside_modules_ns > 4.5e6
    assert any(op.layer is None and op.phase == "backward" and op.name == "BurnBackward" for op in report.data.ops)


def test_in_place_relu(meter: Meter) -> None:
    model = Flood()
    meter.adopt(model)
    layers = rows(prove(meter, in_model_mode(model, X, summed)))
    assert 0 < layers["relu_a"].backward_self_ns < 0.3e6


class Pair(torch.autograd.Function):
    """Two outputs, one of them not differentiable; burns only in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, meter: Meter, owner: str) -> tuple[Tensor, Tensor]:
        ctx.meter, ctx.owner = meter, owner
        mask = x > 0
        ctx.mark_non_differentiable(mask)
        ctx.set_materialize_grads(False)
        return x * 2, mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, None, None]:
        with ctx.meter.burn("backward", ctx.owner, 4):
            return None if grad is None else grad * 2, None, None


class Custom(nn.Module):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def forward(self, x: Tensor) -> Tensor:
        y, mask = Pair.apply(x, self.meter, "1")
        out: Tensor = y * mask
        return out


def test_custom_functions(meter: Meter) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Custom(meter), Burning(1, 1))
    meter.adopt(model)
    report = prove(meter, in_model_mode(model, X, summed))
    ops = [op for op in report.data.ops if op.layer == "1" and op.phase == "backward"]
    assert any(op.name == "PairBackward" and op.calls == 1 for op in ops), ops


class Again(torch.autograd.Function):
    """A Function whose backward applies another Function, as fused layers do that share their kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: BurnSpec) -> Tensor:
        ctx.spec = spec
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return BurnBackward.apply(grad, ctx.spec), None


class UsesAgain(nn.Module):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter = meter

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Again.apply(x, BurnSpec(self.meter, "1", 0, 4))
        return out


def test_a_function_applied_inside_a_backward_is_no_recompute(meter: Meter) -> None:
    model = nn.Sequential(nn.Linear(8, 8), UsesAgain(meter), Burning(1, 1))
    meter.adopt(model)
    prove(meter, in_model_mode(model, X, summed))
