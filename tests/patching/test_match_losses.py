"""Heads with their losses, and losses alone: found in the corpus at their sites, replaced exactly, and put back."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradscope.kernels import pays
from gradscope.patching.patches import Patches
from gradscope.patching.plan import Plan, plan
from gradscope.patching.swap import in_file
from gradscope.recipes.lazy_tensor import LazyTensor, is_computed
from gradscope.workload import Workload, call_model, scalar_loss
from tests.patching.corpus import lookalikes_losses, losses, losses_gathered, losses_made, losses_spelled
from tests.patching.corpus.entry import Entry

RECIPES = ("linear_cross_entropy", "cross_entropy")
MEASURED = dict(pays.FEWEST)  # the rules that users have
ENTRIES: list[Entry] = [
    *losses.ENTRIES,
    *losses_spelled.ENTRIES,
    *losses_gathered.ENTRIES,
    *losses_made.ENTRIES,
    *lookalikes_losses.ENTRIES,
]
FOUND = [entry for entry in ENTRIES if not entry.refused]
REFUSED = [entry for entry in ENTRIES if entry.refused]


pytestmark = pytest.mark.filterwarnings("ignore:size_average and reduce args:UserWarning")


def built(entry: Entry) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, batch = entry.build()
    return model.train(entry.train), batch


def planned(entry: Entry, model: nn.Module, batch: Any) -> Plan:
    return plan(Workload(model, batch, loss=entry.loss), recipes=RECIPES)


def tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from tensors(part)
    elif isinstance(result, dict):
        yield from tensors(list(result.values()))


def step(entry: Entry, model: nn.Module, batch: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and loss; gradients."""
    model.zero_grad()
    torch.manual_seed(1)
    output = call_model(model, batch)
    loss, _ = scalar_loss(output, batch, entry.loss)
    lazy = [each for each in tensors(output) if isinstance(each, LazyTensor)]
    assert not any(is_computed(each) for each in lazy) or entry.refused
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return [each.detach().clone() for each in (*tensors(output), loss)], gradients


def assert_same_step(entry: Entry, model: nn.Module, batch: Any, found: Plan) -> None:
    before = step(entry, model, batch)
    patches = Patches(found)
    patches.apply()
    after = step(entry, model, batch)
    patches.revert()
    again = step(entry, model, batch)
    half = "autocast" in entry.name
    for old, new, restored in zip(before, after, again, strict=True):
        assert len(old) == len(new)
        # Of the largest value: a gradient may be zero but for rounding. Sums of some hundred terms in another order;
        # in half precision the products' rounding too, which the recipe does not do.
        largest = max((float(each.abs().max()) for each in old), default=0.0)
        for one, other, third in zip(old, new, restored, strict=True):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=0.0, atol=largest * (4e-3 if half else 1e-6))
            assert torch.equal(one, third)


@pytest.mark.parametrize("entry", FOUND, ids=lambda entry: entry.name)
def test_found_at_its_sites_and_exact(entry: Entry) -> None:
    model, batch = built(entry)
    state = copy.deepcopy(model.state_dict())
    found = planned(entry, model, batch)
    wanted = sorted(site for site in entry.sites if site[1] in RECIPES)
    assert sorted((site.path, site.recipe) for site in found.supported) == wanted
    assert_same_step(entry, model, batch, found)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry.name)
def test_lookalikes_are_refused_or_exact(entry: Entry) -> None:
    model, batch = built(entry)
    found = planned(entry, model, batch)
    assert {(site.path, site.recipe) for site in found.supported} <= set(entry.sites)
    if found.supported:
        assert_same_step(entry, model, batch, found)


IN_EVALUATION = (
    "lce_loss_outside",
    "lce_nll_modules",
    "lce_end_of_sequential",
    "lce_matmul_parameter",
    "ce_nll_module",
)


@pytest.mark.parametrize(
    "entry", [entry for entry in FOUND if entry.name in IN_EVALUATION], ids=lambda entry: entry.name
)
def test_found_in_evaluation_too(entry: Entry) -> None:
    model, batch = built(entry)
    in_training = [(site.path, site.recipe, site.line) for site in planned(entry, model, batch).supported]
    found = planned(entry, model.eval(), batch)
    assert [(site.path, site.recipe, site.line) for site in found.supported] == in_training


def changed_lines(entry: Entry) -> list[str]:
    model, batch = built(entry)
    found = planned(entry, model, batch)
    (site,) = found.supported
    assert site.edit is not None
    old = site.edit.source.file.text.decode().splitlines()
    new = in_file(site.edit.source.file, [site.edit]).splitlines()
    return [line for line in new if line not in old]


def by_name(name: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.name == name)


TEXTS = {
    "lce_nano_logits_and_loss": [
        "from gradscope.recipes import lazy_linear",
        "            logits = lazy_linear(self.lm_head, x)",
    ],
    "lce_end_of_sequential": [
        "from gradscope.recipes import lazy_linear",
        "        log_probs = lazy_linear(self.classifier,",
    ],
    "lce_weight_transposed": [
        "from gradscope.recipes import lazy_linear",
        "        logits = lazy_linear(self.wte.weight, x)",
    ],
    "lce_addmm": [
        "from gradscope.recipes import lazy_linear",
        "        logits = lazy_linear(self.weight.T, h.view(-1, h.size(-1)), self.bias)",
    ],
    "lce_einsum_permute": [
        "from gradscope.recipes import lazy_linear",
        "        logits = lazy_linear(self.unembed, self.embed(x))",
    ],
    "ce_with_accuracy": [
        "from gradscope.recipes import cross_entropy",
        "        loss = cross_entropy(logits, label)",
    ],
    "made_capped": [
        "from gradscope.recipes import cross_entropy",
        "        return cross_entropy(",
        "            logits.view(-1, VOCAB),",
        "            labels.reshape(-1),",
        "            weight=loss_fct.weight,",
        "            ignore_index=loss_fct.ignore_index,",
        "            reduction=loss_fct.reduction,",
        "            label_smoothing=loss_fct.label_smoothing,",
        "        ) / 7, logits",
    ],
    "ce_log_softmax_nll": [
        "from gradscope.recipes import cross_entropy",
        "        logits_ = self.conv(image)",
        '        return cross_entropy(logits_, mask, ignore_index=255, reduction="sum") / 100',
    ],
}


@pytest.mark.parametrize("name", TEXTS)
def test_text(name: str) -> None:
    assert changed_lines(by_name(name)) == TEXTS[name]


REASONS = {
    "like_auxiliary_loss": "the logits are also read by softmax",
    "like_two_losses_on_logits": "two losses read the logits, so they would be computed twice",
    "like_soft_labels": "the targets are probabilities",
    "like_classes_not_last": "the loss and the head have the classes in different dimensions",
    "like_input_changed_later": "mul modifies the head's input in place",
    "like_force_penalty": "the step computes a second derivative, which recipes do not support",
}


@pytest.mark.parametrize("name", REASONS)
def test_reason(name: str) -> None:
    entry = by_name(name)
    refused = [site for site in planned(entry, *built(entry)).sites if site.recipe == "linear_cross_entropy"]
    assert [site.reasons for site in refused] == [[REASONS[name]]]


MADE = {
    "like_made_in_a_loop": "line {}: loss_fct may contain different modules in another call",
    "like_made_in_a_try": "line {}: loss_fct may contain different modules in another call",
    "like_made_by_an_expression": (
        "line {}: (CrossEntropyLoss if self.ignored else nn.MultiMarginLoss)() may contain "
        "different modules in another call"
    ),
    "like_made_of_unpacked_settings": "line {}: cannot interpret the arguments of CrossEntropyLoss",
    "like_made_weighted_of_two": "line {}: loss_fct may contain different modules in another call",
    "like_made_weighted_and_moved": (
        "line {}: CrossEntropyLoss(weight=self.class_weights).to(labels.device) may contain "
        "different modules in another call"
    ),
    "like_made_weighted_and_moved_in_one": "cannot tell how the call of cross_entropy specifies its weight",
    "like_made_weighted_and_hooked": "the CrossEntropyLoss has hooks, which would no longer be called",
    "like_made_weighted_of_an_own_class": (  # it is gone, and with it of which class it was
        "forward is called neither by its own name nor as an attribute of the module"
    ),
    "like_made_weighted_unpacked": "line {}: cannot interpret the arguments of CrossEntropyLoss",
    "like_made_weighted_summed": "line {}: cannot interpret the arguments of CrossEntropyLoss",
    "like_made_summed": "line {}: cannot interpret the arguments of CrossEntropyLoss",
    "like_made_not_reduced": "line {}: cannot interpret the arguments of CrossEntropyLoss",
    "like_made_one_of_two": "line {}: loss_fct may contain different modules in another call",
    "like_made_by_a_method": "line {}: self.make_loss() may contain different modules in another call",
    "like_made_of_an_own_class": "forward belongs to OwnLoss, which is not part of the model",
    "like_made_and_hooked": "the CrossEntropyLoss has hooks, which would no longer be called",
    "like_made_with_soft_targets": "the targets are probabilities",
}


WRITTEN = {
    "made_by_problem": "loss_fct.label_smoothing",
    "made_in_one_expression_plain": "cross_entropy(logits.view(-1, VOCAB), labels.reshape(-1))",
    "made_in_one_expression_set": (
        "cross_entropy(logits.view(-1, VOCAB), labels.reshape(-1), ignore_index=self.ignored)"
    ),
    "made_weighted_in_one_expression": (
        "cross_entropy(logits.view(-1, VOCAB), labels.reshape(-1), weight=self.class_weights)"
    ),
    "made_weighted_by_name": "weight=loss_fct.weight,",
    "made_weighted_nll": "weight=criterion.weight,",
    "made_weighted_head": "lazy_linear(self.lm_head, self.model(input_ids))",
}


@pytest.mark.parametrize("name", WRITTEN)
def test_settings_of_a_loss_are_read_where_it_was_made(name: str) -> None:
    entry = by_name(name)
    assert WRITTEN[name] in Patches(planned(entry, *built(entry))).diff


def _of_other_size(model: nn.Module) -> None:
    model.class_weights = model.class_weights * torch.linspace(0.0, 3.0, losses.VOCAB, dtype=torch.float64)


def _changed_in_place(model: nn.Module) -> None:
    model.class_weights.mul_(2).add_(1)


def _none(model: nn.Module) -> None:
    model.class_weights = None


def _plain_tensor(model: nn.Module) -> None:
    del model.class_weights
    model.class_weights = torch.arange(losses.VOCAB, dtype=torch.float64)


def _frozen_parameter(model: nn.Module) -> None:
    weights = model.class_weights
    del model.class_weights
    model.class_weights = nn.Parameter(weights + 1, requires_grad=False)


def _other_ignored(model: nn.Module) -> None:
    model.ignored = 5


@pytest.mark.parametrize(
    "change", [_of_other_size, _changed_in_place, _none, _plain_tensor, _frozen_parameter, _other_ignored]
)
@pytest.mark.parametrize(
    "name",
    ["made_weighted_in_one_expression", "made_weighted_by_name", "made_weighted_nll", "made_weighted_head"],
)
def test_classes_weights_of_a_loss_made_in_forward_later(name: str, change: Callable[[nn.Module], None]) -> None:
    entry = by_name(name)
    model, batch = built(entry)
    model.double()
    found = planned(entry, model, batch)
    assert [site.recipe for site in found.supported] == [recipe for _, recipe in entry.sites]
    change(model)
    assert_same_step(entry, model, batch, found)


@pytest.mark.parametrize("weights", ["learnt", "too few"])
@pytest.mark.parametrize("name", ["made_weighted_in_one_expression", "made_weighted_by_name", "made_weighted_nll"])
def test_classes_weights_that_torch_refuses_later(name: str, weights: str) -> None:
    """Or of which it makes no gradient: they are refused by the new code too."""
    entry = by_name(name)
    model, batch = built(entry)
    model.double()
    found = planned(entry, model, batch)
    changed = {
        "learnt": nn.Parameter(model.class_weights.clone()),
        "too few": model.class_weights[:-1],
    }[weights]
    del model.class_weights
    model.class_weights = changed
    patches = Patches(found)
    for _ in range(2):
        with pytest.raises((RuntimeError, ValueError)):
            step(entry, model, batch)
        patches.apply()
    patches.revert()


@pytest.mark.parametrize("name", MADE)
def test_reason_why_a_loss_made_in_forward_is_left(name: str) -> None:
    entry = by_name(name)
    (site,) = planned(entry, *built(entry)).sites
    assert [re.sub(r"line \d+", "line {}", reason) for reason in site.reasons] == [MADE[name]]


def test_a_loss_outside_of_the_model_is_not_rewritten() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 7, 1)
    image, mask = losses.segmentation_batch()

    def loss(output: Tensor, batch: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, mask, ignore_index=255)

    (site,) = plan(Workload(model, image, loss=loss), recipes=RECIPES).sites
    assert site.reasons == ["the code does not belong to any module of the model"]


def test_what_was_replaced_is_not_found_again() -> None:
    entry = by_name("lce_shifted_labels")
    model, batch = built(entry)
    patches = Patches(planned(entry, model, batch))
    patches.apply()
    assert planned(entry, model, batch).sites == []


class KeepsItsLoss(nn.Module):
    """The loss is an attribute, the logits are what is returned."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.last_loss = nn.Linear(8, 40), torch.zeros(())

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        self.last_loss = nn.functional.cross_entropy(logits.view(-1, 40), targets.view(-1))
        return logits


def test_logits_are_not_read_by_a_loss_of_ours() -> None:
    targets = torch.randint(40, (2, 6))
    (site,) = plan(KeepsItsLoss(), (torch.randn(2, 6, 8), targets), recipes=["linear_cross_entropy"]).sites
    assert not site.reasons


class TwoHeads(nn.Module):
    """The loss of logits that are no single product."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, classes), nn.Linear(4, classes)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.one(x) * self.other(x), targets)


@pytest.mark.parametrize(("rows", "idle"), [(1000, False), (6, True)])
def test_a_loss_alone_is_found_by_the_rule_of_its_size(monkeypatch: pytest.MonkeyPatch, rows: int, idle: bool) -> None:
    """Of enough logits it is put in, of few it is named and left to torch."""
    monkeypatch.setattr(pays, "FEWEST", MEASURED)
    batch = torch.randn(rows, 4), torch.randint(5001, (rows,))
    (site,) = plan(TwoHeads(5001), batch, recipes=RECIPES).sites
    assert (site.recipe, site.supported, bool(site.idle)) == ("cross_entropy", True, idle)


@pytest.mark.parametrize("name", ["ce_gather_of_tokens", "ce_gather_squeezed_whole", "ce_focal"])
@pytest.mark.parametrize("shape", [(1, 20), (2, 7), (1, 1)])
def test_gathered_losses_of_other_sizes(name: str, shape: tuple[int, int]) -> None:
    """Other batches and lengths than the recorded ones, a batch of one too."""
    entry = next(each for each in losses_gathered.ENTRIES if each.name == name)
    model, batch = built(entry)
    x, y = (torch.randint(1, losses.VOCAB, shape) for _ in range(2))
    original = copy.deepcopy(model)
    patches = Patches(planned(entry, model, batch))
    patches.apply()
    made = []
    for each in (original, model):
        loss = each(x, y)
        loss.backward()
        made.append([loss.detach(), each.head.weight.grad])
    torch.testing.assert_close(made[1], made[0], rtol=1e-5, atol=1e-6)  # float32, the recipe sums in another order
    patches.revert()


@pytest.mark.parametrize("name", ["ce_gather_of_tokens", "ce_gather_squeezed_whole"])
@pytest.mark.parametrize("first", [torch.int64, torch.int32], ids=str)
def test_gathered_losses_of_targets_of_either_dtype(name: str, first: torch.dtype) -> None:
    """Gather takes both, and so does what stands for it, whichever the recorded step had."""
    entry = next(each for each in losses_gathered.ENTRIES if each.name == name)
    model, (x, y) = built(entry)
    original = copy.deepcopy(model)
    patches = Patches(planned(entry, model, (x, y.to(first))))
    assert [site.recipe for site in patches.kept] == ["cross_entropy"]
    patches.apply()
    for dtype in (torch.int64, torch.int32):
        new, old = (each(x, y.to(dtype)) for each in (model, original))
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-6)  # float32, the recipe sums in another order
    patches.revert()


def test_fewer_targets_than_rows_are_left_to_gather() -> None:
    """What gather takes and the recipe does not: the old code runs."""

    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.first = nn.Linear(8, 9), 6

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            logits = self.head(x)
            y = y[: self.first]
            return -logits.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()

    torch.manual_seed(0)
    model, x, y = Some(), torch.randn(6, 8), torch.randint(9, (6,))
    found = plan(model, (x, y), recipes=RECIPES)
    assert [site.recipe for site in found.supported] == ["cross_entropy"]
    patches = Patches(found)
    model.first = 3
    wanted = model(x, y)
    patches.apply()
    torch.testing.assert_close(model(x, y), wanted, rtol=0, atol=0)
    patches.revert()
