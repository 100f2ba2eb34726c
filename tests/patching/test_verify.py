"""Patching with proof: what is kept, what is undone, and that the model is as it was in every other respect."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradscope
from gradscope import recipes
from gradscope.kernels import pays
from gradscope.patching.advice import what_to_do
from gradscope.patching.prove import choice, verify
from gradscope.patching.prove.choice import FEWEST_ROUNDS, Times
from gradscope.patching.swap import swaps
from tests.made_times import BETTER, HUNGRIER, SLOWER, Saves, made_times
from tests.patching import small

BATCH = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(5))


class Two(nn.Module):
    """Two layers, one of them counting its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = small.Causal(), small.Causal()
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        out: Tensor = self.second(x + self.first(x))
        return out


def everything(model: nn.Module) -> Any:
    """What must not change: attributes of every module, contents of tensors, gradients, random state."""
    modules = {path: dict(vars(module)) for path, module in model.named_modules()}
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    grads = {name: copy.copy(value.grad) for name, value in model.named_parameters()}
    return modules, tensors, grads, torch.get_rng_state()


def assert_same(before: Any, after: Any) -> None:
    for old, new in zip(before[0].items(), after[0].items(), strict=True):
        assert old[0] == new[0] and list(old[1]) == list(new[1])
        assert all(old[1][name] is new[1][name] for name in old[1]), old[0]
    for name, value in before[1].items():
        assert torch.equal(value, after[1][name]), name
    assert before[2] == after[2]
    assert torch.equal(before[3], after[3])


@pytest.fixture(name="use")
def use_fixture(monkeypatch: pytest.MonkeyPatch) -> Callable[[Saves], None]:
    """No clock: every group of places saves what the test sets, first of all a lot."""
    return made_times(monkeypatch)


def test_kept_and_reverted(use: Callable[[Saves], None]) -> None:
    model = Two()
    before = everything(model)
    patches = gradscope.patch(model, BATCH)
    assert patches.verified is not None and [result.status for result in patches.verified.results] == ["kept", "kept"]
    assert {path for path, module in model.named_modules() if "forward" in vars(module)} == {"first", "second"}
    assert list(patches.table["path"]) == ["first", "second"]
    assert (patches.table["max_grad_error"] > 0).all() and not patches.verified.failed
    patches.revert()
    assert_same(before, everything(model))


def test_with_block_reverts_after_an_error(use: Callable[[Saves], None]) -> None:
    model = Two()
    before = everything(model)
    with pytest.raises(ZeroDivisionError), gradscope.patched(model, BATCH):
        assert "forward" in vars(model.first)
        raise ZeroDivisionError
    assert_same(before, everything(model))


@pytest.mark.parametrize(
    ("saves", "reason"),
    [
        (SLOWER, "the step is slower with it"),
        (HUNGRIER, "the step needs more memory with it"),
        (Saves(), "neither time nor memory improves beyond noise"),
    ],
)
def test_what_gains_nothing_is_undone(use: Callable[[Saves], None], saves: Saves, reason: str) -> None:
    use(saves)
    model = Two()
    before = everything(model)
    patches = gradscope.patch(model, BATCH)
    assert patches.verified is not None
    assert [(result.status, result.reason) for result in patches.verified.results] == [("undone", reason)] * 2
    measured = [result.saved is not None for result in patches.verified.results]
    assert measured == [saves != Saves()] * 2, "a figure that is noise is not shown"
    assert not patches.verified.failed, "slow is not wrong"
    assert patches.verified.step is None and patches.diff == ""
    assert_same(before, everything(model))


def test_what_is_wrong_is_undone(use: Callable[[Saves], None], monkeypatch: pytest.MonkeyPatch) -> None:
    from gradscope import recipes

    right = recipes.attention
    monkeypatch.setattr(recipes, "attention", lambda *args, **kwargs: right(*args, **kwargs) + 1e-3)
    model = Two()
    before = everything(model)
    patches = gradscope.patch(model, BATCH)
    assert patches.verified is not None and patches.verified.failed
    assert all("is off by" in result.reason for result in patches.verified.results)
    monkeypatch.undo()
    assert_same(before, everything(model))


class Both(small.Causal):
    """Two places in one method."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2).chunk(3, -1)
        y = ((q @ k.transpose(-2, -1)) * 0.3).softmax(-1) @ v
        z = ((y @ k.transpose(-2, -1)) * 0.5).softmax(-1) @ v
        return z.transpose(1, 2).reshape(x.shape)


def only_one_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two groups the second saves nothing."""

    def measured(ways: Any, *args: Any, **kwargs: Any) -> Any:
        times = [2_000_000, 1_000_000, 1_000_000][: len(ways)]
        rounds = FEWEST_ROUNDS
        return [Times([each] * rounds, [each] * rounds) for each in times], [10 << 20] * len(ways)

    made_times(monkeypatch)
    monkeypatch.setattr(choice, "measured", measured)
    monkeypatch.setattr(choice, "peaks_bytes", lambda works, *args, **kwargs: [10 << 20] * len(works))


def test_what_is_kept_of_a_module_is_proved_together(monkeypatch: pytest.MonkeyPatch) -> None:
    only_one_gains(monkeypatch)
    proved: list[int] = []
    real = verify.prove

    def prove(swap: Any, *args: Any) -> Any:
        proved.append(len(swap.sites))
        return real(swap, *args)

    monkeypatch.setattr(verify, "prove", prove)
    model = Both()
    patches = gradscope.patch(model, BATCH)
    assert patches.verified is not None
    assert sorted(result.status for result in patches.verified.results) == ["kept", "undone"]
    assert proved == [2, 1], "both together, and once more what is left"
    assert len(patches.kept) == 1 and "forward" in vars(model)


def test_what_is_wrong_without_the_others_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    only_one_gains(monkeypatch)
    real = verify.prove

    def prove(swap: Any, *args: Any) -> Any:
        found = real(swap, *args)
        return found if len(swap.sites) == 2 else dict.fromkeys(swap.sites, "wrong alone")

    monkeypatch.setattr(verify, "prove", prove)
    model = Both()
    before = everything(model)
    patches = gradscope.patch(model, BATCH)
    assert patches.verified is not None and patches.verified.failed
    assert [result.status for result in patches.verified.results] == ["undone"] * 2
    assert {result.reason for result in patches.verified.results} == {"wrong alone"}
    assert patches.verified.step is None
    assert_same(before, everything(model))


def test_equal_parts_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made_times(monkeypatch, Saves(1_000_001, (8 << 20) + 1))
    patches = gradscope.patch(Two(), BATCH)
    assert patches.verified is not None and patches.verified.step is not None
    parts = [result.saved for result in patches.verified.results]
    assert sum(part.ns for part in parts if part) == patches.verified.step.saved_ns == 1_000_001
    assert sum(part.bytes for part in parts if part) == patches.verified.step.saved_bytes


def test_places_that_are_right_each_alone_are_proved_together(monkeypatch: pytest.MonkeyPatch) -> None:
    made_times(monkeypatch)
    real, counts = verify.prove, list[int]()

    def prove(swap: Any, *args: Any) -> Any:
        found = real(swap, *args)
        counts.append(len(swap.sites))
        if len(counts) == 1:  # as if both together were wrong, and each alone right
            return {site: copy.copy(proof) for site, proof in found.items()}
        return dict.fromkeys(swap.sites, "wrong together")

    monkeypatch.setattr(verify, "prove", prove)
    patches = gradscope.patch(Both(), BATCH)
    assert counts == [2, 2] and patches.verified is not None
    assert {result.reason for result in patches.verified.results} == {"wrong together"}


class Sized(nn.Module):
    """Layers on more and on fewer tokens, by the same code."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self.layers, self.tokens = nn.ModuleList(small.Causal() for _ in tokens), tokens

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x[:, :size]) for layer, size in zip(self.layers, self.tokens, strict=True)], 1)


def states_of(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> list[set[str]]:
    """The layers that run a recipe in each state of the step that is measured, there and back."""
    made_times(monkeypatch)
    made = choice.measured
    seen: list[set[str]] = []

    def measured(ways: Any, *args: Any, **kwargs: Any) -> Any:
        for way in (*ways, *reversed(ways)):
            way.switch()
            seen.append({path for path, module in model.named_modules() if "forward" in vars(module)})
        return made(ways, *args, **kwargs)

    monkeypatch.setattr(choice, "measured", measured)
    return seen


def test_each_state_of_the_step_holds_its_groups_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text on the same shapes is one group; on other shapes it may gain where here it does not."""
    model = Sized(12, 7, 12)
    states = states_of(monkeypatch, model)
    gradscope.patch(model, BATCH)
    there = [set[str](), {"layers.0", "layers.2"}, {"layers.0", "layers.1", "layers.2"}]
    assert states == [*there, *reversed(there)]


def test_many_shapes_of_one_text_are_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Sized(*range(3, 12))
    states = states_of(monkeypatch, model)
    gradscope.patch(model, BATCH)
    assert [len(state) for state in states] == [0, 9, 9, 0]


class Bare(small.Causal):
    """What it returns is the very result of its attention."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        weights = ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1)
        return weights @ v


class Particular(nn.Module):
    """It takes what one of its layers returned only from torch's own operations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Bare(), Bare()

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if y.grad_fn is not None and not type(y.grad_fn).__name__.endswith("ViewBackward0"):
            raise RuntimeError(f"not made as ever: {type(y.grad_fn).__name__}")
        return self.second(y.squeeze(1))


def test_a_place_that_its_caller_does_not_stand_is_undone(use: Callable[[Saves], None]) -> None:
    model = Particular()
    before = everything(model)
    patches = gradscope.patch(model, BATCH)
    assert patches.verified is not None and not patches.verified.failed
    found = {result.site.path: (result.status, result.reason) for result in patches.verified.results}
    assert found["second"] == ("kept", "")
    status, reason = found["first"]
    assert status == "undone" and reason.startswith("the step raises an error with it: RuntimeError: not made as ever")
    model(BATCH).sum().backward()
    model.zero_grad(set_to_none=True)
    patches.revert()
    assert_same(before, everything(model))


def test_places_that_the_step_does_not_stand_together(monkeypatch: pytest.MonkeyPatch) -> None:
    step = verify._Step(gradscope.Workload(Two(), BATCH), BATCH)
    found = gradscope.plan(Two(), BATCH)
    one, two = swaps(found.supported, found.files)
    monkeypatch.setattr(step, "_fails", lambda held: ValueError("both") if len(held) > 1 else None)
    assert step.failing([one, two]) == dict.fromkeys(two.sites, "the step raises an error with it: ValueError: both")


def test_the_losses_difference_is_not_of_dropout(use: Callable[[Saves], None]) -> None:
    model = Two()
    model.second.eval()
    patches = gradscope.patch(model, BATCH)
    assert patches.verified is not None and len(patches.kept) == 2
    assert patches.verified.loss_difference < 1e-5
    assert [module.training for module in (model, model.first, model.second)] == [True, True, False]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("change", [0.01, -0.01])
def test_the_losses_difference_is_a_share_of_its_size(
    use: Callable[[Saves], None], monkeypatch: pytest.MonkeyPatch, sign: float, change: float
) -> None:
    """Never negative, whichever way the loss moved and whatever its sign."""
    values = iter([sign * 50.0, sign * 50.0 * (1 + change)])
    step = verify._Step(gradscope.Workload(Two(), BATCH), BATCH)
    monkeypatch.setattr(verify, "_loss_of", lambda *given: torch.tensor(next(values), dtype=torch.float64))
    assert step.loss_difference([]) == pytest.approx(0.01)


def test_a_loss_of_zero_has_a_difference_too(monkeypatch: pytest.MonkeyPatch) -> None:
    values = iter([0.0, -0.25])
    step = verify._Step(gradscope.Workload(Two(), BATCH), BATCH)
    monkeypatch.setattr(verify, "_loss_of", lambda *given: torch.tensor(next(values)))
    assert step.loss_difference([]) == 0.25


class Raises(Two):
    """Raises in its n-th call."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.at, self.error, self.calls_made = at, error, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.count()
        return super().forward(x)

    def count(self) -> None:
        counter[0] += 1
        if counter[0] == self.at:
            raise self.error("at last")


counter = [0]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
@pytest.mark.parametrize("at", [1, 2, 4, 5])
def test_an_error_in_the_middle_leaves_all_as_it_was(
    use: Callable[[Saves], None], at: int, error: type[BaseException]
) -> None:
    """1 is the recording, 2 the run that captures what modules are given, 4 and 5 the losses without and with."""
    counter[0] = 0
    model = Raises(at, error)
    before = everything(model)
    with pytest.raises(error, match="at last"):
        gradscope.patch(model, BATCH)
    assert_same(before, everything(model))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_an_error_with_all_places_at_once(use: Callable[[Saves], None], error: type[BaseException]) -> None:
    """3 is the whole step with them: where it fails, each is tried alone."""
    counter[0] = 0
    model = Raises(3, error)
    before = everything(model)
    if error is KeyboardInterrupt:
        with pytest.raises(error, match="at last"):
            gradscope.patch(model, BATCH)
    else:
        patches = gradscope.patch(model, BATCH)
        assert patches.verified is not None
        assert [result.status for result in patches.verified.results] == ["kept", "kept"]
        patches.revert()
    assert_same(before, everything(model))


def test_interrupted_inside_a_proof(use: Callable[[Saves], None], monkeypatch: pytest.MonkeyPatch) -> None:
    from gradscope.patching.prove import proof

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(proof, "compare", interrupted)
    model = Two()
    before = everything(model)
    with pytest.raises(KeyboardInterrupt):
        gradscope.patch(model, BATCH)
    assert_same(before, everything(model))


def test_filter_and_recipes_by_name(use: Callable[[Saves], None]) -> None:
    model = Two()
    found = gradscope.plan(model, BATCH, filter=lambda path, module: path == "second")
    assert [site.path for site in found.sites] == ["second"]
    with pytest.raises(gradscope.UsageError, match=r"there is no recipe 'atention' to patch in\. Known recipes: "):
        gradscope.plan(model, BATCH, recipes=["atention"])


def test_planning_changes_nothing() -> None:
    model = Two()
    before = everything(model)
    found = gradscope.plan(model, BATCH)
    assert_same(before, everything(model))
    assert list(found.table["supported"]) == [True, True]
    assert found.table["source"][0].endswith("small.py:28")


def test_twice_is_once(use: Callable[[Saves], None]) -> None:
    model = Two()
    first = gradscope.patch(model, BATCH)
    held = dict(vars(model.first))
    second = gradscope.patch(model, BATCH)
    assert not second.kept and dict(vars(model.first)) == held
    first.revert()
    assert "forward" not in vars(model.first)


class Language(nn.Module):
    """A head and its loss; the logits are returned too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 50)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(x).tanh())
        return logits, nn.functional.cross_entropy(logits.view(-1, 50), targets.view(-1))


LANGUAGE = (BATCH, torch.randint(50, (2, 12), generator=torch.Generator().manual_seed(6)))


def test_few_logits_are_left_as_they_are(use: Callable[[Saves], None]) -> None:
    """Planned, for it would be right; neither proved nor measured, for it gains nothing."""
    model = Language()
    assert [site.supported for site in gradscope.plan(model, LANGUAGE).sites] == [True]
    patches = gradscope.patch(model, LANGUAGE)
    assert patches.verified is not None
    (result,) = patches.verified.results
    assert (result.status, result.saved, patches.verified.failed) == ("refused", None, False)
    assert result.reason == "fewer than 3,000,000 logits: torch's own is faster"
    assert "forward" not in vars(model)


@pytest.mark.usefixtures("nothing_is_idle")
def test_lazy_logits_are_proved_by_the_loss(use: Callable[[Saves], None]) -> None:
    patches = gradscope.patch(Language(), LANGUAGE)
    assert patches.verified is not None
    (result,) = patches.verified.results
    assert (result.site.recipe, result.status) == ("linear_cross_entropy", "kept")
    assert result.errors is not None and 0 < result.errors.largest(original=True) < 1e-5
    assert "gradient of body.weight" in {each.name for each in result.errors.distances}


@pytest.mark.usefixtures("nothing_is_idle")
@pytest.mark.parametrize(("saves", "status"), [(SLOWER, "undone"), (BETTER, "kept")])
def test_lazy_logits_are_measured_by_the_step(use: Callable[[Saves], None], saves: Saves, status: str) -> None:
    use(saves)
    model = Language()
    patches = gradscope.patch(model, LANGUAGE)
    assert patches.verified is not None
    assert [result.status for result in patches.verified.results] == [status]
    assert (patches.verified.step is None) is (status == "undone")
    assert ("forward" in vars(model)) is (status == "kept")


def test_source_that_does_not_compile_is_a_reason(
    use: Callable[[Saves], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradscope.patching import swap
    from gradscope.patching.edit.source import Refusal

    real = swap.rebuilt

    def refusing(function: Any, *args: Any) -> Any:
        if refusing.calls == 0:  # type: ignore[attr-defined]
            refusing.calls += 1  # type: ignore[attr-defined]
            raise Refusal("the edited source does not compile")
        return real(function, *args)

    refusing.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(swap, "rebuilt", refusing)
    patches = gradscope.patch(Two(), BATCH)
    assert patches.verified is not None
    assert [(result.status, result.reason) for result in patches.verified.results] == [
        ("refused", "the edited source does not compile"),
        ("kept", ""),
    ]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 64)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.wide(x).chunk(2, dim=-1)
        return functional.silu(gate) * up


def test_what_auto_would_leave_to_torch_is_planned_and_not_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the rule that the recipe itself goes by."""
    monkeypatch.setattr(pays, "FEWEST", {"swiglu of a packed tensor": {"elements": (129, 129)}})
    few, enough = torch.randn(4, 16), torch.randn(5, 16)
    for batch, idle in ((few, "fewer than 129 elements: torch's own is faster"), (enough, "")):
        (site,) = gradscope.plan(Gated(), batch).supported
        assert (site.recipe, site.idle) == ("swiglu", idle)
        explained = recipes.swiglu.explain(torch.randn(len(batch), 64))
        assert explained.refused.get("cpu", "") == idle
    model = Gated()
    patches = gradscope.patch(model, few)
    assert patches.verified is not None
    (result,) = patches.verified.results
    assert (result.status, result.reason) == ("refused", "fewer than 129 elements: torch's own is faster")
    assert "forward" not in vars(model)


class Inside(small.Causal):
    """It runs only where its parent has opened it: alone it cannot be run again."""

    opened = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.opened:
            raise ValueError("it is closed")
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        weights = ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1)
        return torch.as_tensor((weights @ v).squeeze(1))


class Opening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inside(), small.Causal()

    def forward(self, x: Tensor) -> Tensor:
        self.first.opened = True
        try:
            return torch.as_tensor(self.second(self.first(x)))
        finally:
            self.first.opened = False


def test_a_place_without_a_proof_is_refused_and_nothing_has_failed(use: Callable[[Saves], None]) -> None:
    use(BETTER)
    patches = gradscope.patch(Opening(), BATCH, recipes=["attention"])
    assert patches.verified is not None and not patches.verified.failed
    found = {result.site.path: (result.status, result.reason) for result in patches.verified.results}
    reason = "it could not be rerun for verification: ValueError: it is closed"
    assert found == {"first": ("refused", reason), "second": ("kept", "")}


class Reentrant(Inside):
    """Its attention is run again in backward."""

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        weights = ((q @ k.transpose(-2, -1)) * 0.25).softmax(-1)
        return torch.as_tensor((weights @ v).squeeze(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(checkpoint(self.attend, x, use_reentrant=True))


def test_a_reentrant_checkpoint_inside_the_place_is_told_with_what_to_do(use: Callable[[Saves], None]) -> None:
    use(BETTER)
    patches = gradscope.patch(nn.Sequential(nn.Linear(32, 32), Reentrant()), BATCH, recipes=["attention"])
    assert patches.verified is not None and not patches.verified.failed
    (reason,) = {result.reason for result in patches.verified.results}
    assert reason == "it calls a checkpoint with use_reentrant=True, which hides gradients from the verification"
    assert what_to_do(reason).startswith("call it with use_reentrant=False")
