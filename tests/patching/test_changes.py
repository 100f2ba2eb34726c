"""Models as people write them, patched, and then changed one thing at a time: each does as the one not patched.

``GRADSCOPE_GENERATED=300`` runs that many models, all changes of each; without it a few models run for a minute.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from gradscope.capture.storages import tensors_in
from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan
from tests.patching.generated import LONGEST, WIDTH, WORDS, Source, source

MODELS = int(os.environ.get("GRADSCOPE_GENERATED", "40"))

# Shares of the largest gradient, in float64. Most differ by 1e-15. Where a softmax is all but one-hot its gradient is a
# difference that cancels, of which rounding times the size of the keys is left.
TOLERANCE = 1e-8

Batch = tuple[Tensor, Tensor]
Results = dict[str, Tensor | None]


def batch(sequences: int = 2, length: int = 7) -> Batch:
    return torch.randint(WORDS, (sequences, length)), torch.randint(WORDS, (sequences, length))


def loss(output: Any, _: object) -> Tensor:
    found = [each for each in tensors_in(output) if each.is_floating_point()]
    return next((each for each in found if each.dim() == 0), None) or found[0].square().mean()


def run(model: nn.Module, given: Batch, call: Callable[[nn.Module, Batch], Any] | None = None) -> Results:
    """Outputs, and all gradients of a sum that weighs each number of theirs differently."""
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    outputs = list(tensors_in(model(*given) if call is None else call(model, given)))
    weighed = [(each * torch.linspace(-1, 1, each.numel()).view(each.shape).cos()).sum() for each in outputs]
    found: Results = {f"output {place}": each.detach().clone() for place, each in enumerate(outputs)}
    total = sum(weighed, torch.zeros(()))
    if total.requires_grad:
        total.backward()
        found |= {name: each.grad for name, each in model.named_parameters()}
    return found


def differing(expected: Results, got: Results) -> list[str]:
    """The names of what differs; of results that are not finite nothing is asked."""
    if any(each is not None and not each.isfinite().all() for each in expected.values()):
        return []
    top = max((float(each.abs().max()) for each in expected.values() if each is not None), default=0.0)
    wrong = []
    for name, one in expected.items():
        other = got[name]
        if one is None or other is None:  # a gradient of zeros may be none at all
            left = one if other is None else other
            wrong += [name] if left is not None and left.any() else []
        elif one.shape != other.shape or one.dtype != other.dtype or _apart(one, other) > TOLERANCE * (1 + top):
            wrong.append(name)
    return wrong


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest difference; infinite where ``other`` is not a number."""
    return float((one.double() - other.double()).abs().nan_to_num(nan=torch.inf).max())


# --------------------------------------------------------------------------------------------------------------------
# Changes
# --------------------------------------------------------------------------------------------------------------------


def each_weight(change: Callable[[nn.Parameter], object]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        torch.manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                change(parameter)

    return apply


def each_module(kind: Any, change: Callable[[Any], object]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        torch.manual_seed(5)
        for module in [each for each in model.modules() if isinstance(each, kind)]:
            change(module)

    return apply


def each_child(kind: Any, make: Callable[[Any], nn.Module]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        torch.manual_seed(5)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is kind:
                    setattr(module, name, make(child).double())

    return apply


def masks(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    """Of buffers that hide; a later content leaves each query a key."""

    def apply(model: nn.Module) -> None:
        for module in model.modules():
            for name, held in list(module.named_buffers(recurse=False)):
                if name.startswith(("seen", "hidden", "future", "keys")):
                    setattr(module, name, change(held))

    return apply


def seen_ahead(mask: Tensor) -> Tensor:
    if mask.dim() == 2:
        mask[2, 4] = mask[2, 1]
        mask[5, 3] = mask[3, 5]
    else:
        mask[1] = ~mask[1]
    return mask


def other_data(mask: Tensor) -> Tensor:
    mask.data = seen_ahead(mask.clone())
    return mask


def flags(model: nn.Module) -> None:
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, bool) and name.startswith(("causal", "flag", "unbiased")):
                setattr(module, name, not value)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input) + 1


class Shifted(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 0.9 * weight + 0.02  # with 1.5 and 0.1 keys of 1e5 would be multiplied with what rounding leaves


def _data(parameter: nn.Parameter) -> None:
    parameter.data = torch.randn_like(parameter) * 0.3


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "nothing": lambda model: None,
    "evaluation": lambda model: model.eval(),
    "weights": each_weight(lambda weight: weight.copy_(torch.randn_like(weight) * 0.2)),
    "data of weights": each_weight(_data),
    "half of them frozen": each_weight(lambda weight: weight.requires_grad_(bool(torch.rand(()) > 0.5))),
    "doubled gradients": each_weight(lambda weight: weight.register_hook(lambda grad: 2 * grad)),
    "no bias": each_module(nn.Linear, lambda layer: setattr(layer, "bias", None)),
    "other layers": each_child(nn.Linear, lambda layer: Doubled(layer.in_features, layer.out_features)),
    "parametrized": each_module(
        nn.Linear, lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Shifted())
    ),
    "hooks": each_module(
        (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.GELU),
        lambda layer: layer.register_forward_hook(lambda module, given, output: 1.5 * output),
    ),
    "other norms": each_child(nn.LayerNorm, lambda norm: nn.RMSNorm(WIDTH)),
    "and back": each_child(nn.RMSNorm, lambda norm: nn.LayerNorm(WIDTH)),
    "eps": each_module((nn.LayerNorm, nn.RMSNorm), lambda norm: setattr(norm, "eps", 0.3)),
    "no dropout": each_child(nn.Dropout, lambda drop: nn.Identity()),
    "all dropped": each_module(nn.Dropout, lambda drop: setattr(drop, "p", 1.0)),
    "another activation": each_child(nn.GELU, lambda act: nn.SiLU()),
    "another loss": each_child(nn.CrossEntropyLoss, lambda criterion: nn.MultiMarginLoss()),
    "the loss's sum": each_module(nn.CrossEntropyLoss, lambda criterion: setattr(criterion, "reduction", "sum")),
    "a padding word": each_module(nn.Embedding, lambda table: setattr(table, "padding_idx", 3)),
    "a largest norm": each_module(nn.Embedding, lambda table: setattr(table, "max_norm", 0.7)),
    "masks in place": masks(seen_ahead),
    "masks anew": masks(lambda mask: seen_ahead(mask.clone())),
    "data of masks": masks(other_data),
    "flags": flags,
}


def numbers(made: Source) -> Iterator[tuple[str, float]]:
    """Each number that does not stand in the pattern itself, with others in its place."""
    for name, value in made.numbers.items():
        others = [value * 1.25 + 0.125, 0.5, *([-1.5] if abs(value) > 0.2 else [])]  # a share is never below 0
        others = others if abs(value) < 1e8 else [0.5, -2.0]
        yield from ((name, other) for other in ([value + 1] if isinstance(value, int) else others))


def number(name: str, other: float) -> Callable[[nn.Module], None]:
    """Sets it in the modules, where they hold it, and evaluates: of a share that is dropped two runs differ."""

    def change(model: nn.Module) -> None:
        model.eval()
        for each in model.modules():
            held = vars(each)
            if name in held or hasattr(type(each), name):
                setattr(each, name, other)
            if f"config_{name}" in held:
                setattr(held[f"config_{name}"], name, other)
            if f"dict_{name}" in held:
                held[f"dict_{name}"][name] = other

    return change


CALLS: dict[str, Callable[[nn.Module, Batch], Any]] = {
    "reentrant checkpoint": lambda model, given: torch.utils.checkpoint.checkpoint(
        lambda _, *rest: model(*rest), torch.zeros((), requires_grad=True), *given, use_reentrant=True
    ),
    "checkpoint": lambda model, given: torch.utils.checkpoint.checkpoint(model, *given, use_reentrant=False),
    "other parameters": lambda model, given: functional_call(
        model, {name: 1.5 * each for name, each in model.named_parameters()}, given
    ),
    "shallow copy": lambda model, given: copy.copy(model)(*given),
    "twice": lambda model, given: [model(*given), model(given[0][:, :3], given[1][:, :3])],
    "by name": lambda model, given: model(targets=given[1], words=given[0]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("generated")
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    yield made
    sys.dont_write_bytecode = written


def imported(made: Source, folder: Path) -> ModuleType:
    path = folder / f"model_{made.seed}.py"
    path.write_text(made.text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _Pair:
    """The model as it is, and patched."""

    def __init__(self, original: nn.Module, model: nn.Module) -> None:
        self.original, self.model = original, model

    def copied(self) -> _Pair:
        return _Pair(copy.deepcopy(self.original), copy.deepcopy(self.model))

    def wrong(self, given: Batch, call: Callable[[nn.Module, Batch], Any] | None = None) -> list[str]:
        """What differs; nothing where the original cannot do it at all."""
        try:
            expected = run(self.original, given, call)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            return []
        return differing(expected, run(self.model, given, call))

    def changed(self, change: Callable[[nn.Module], object]) -> _Pair:
        both = self.copied()
        change(both.original)
        change(both.model)
        return both


@pytest.mark.usefixtures("nothing_is_idle")
@pytest.mark.parametrize("seed", range(MODELS))
def test_as_the_original_whatever_changes(seed: int, folder: Path) -> None:
    made = source(seed)
    module = imported(made, folder)
    torch.manual_seed(1)
    model, given = module.Model(), batch()
    original = copy.deepcopy(model)
    patches = Patches(plan(model, given, loss))
    patches.apply()
    pair = _Pair(original.double(), model.double())
    failures = {name: pair.wrong(given, call) for name, call in CALLS.items()}
    for sequences, length in ((1, 1), (2, 1), (1, 7), (3, 13), (1, LONGEST)):
        failures[f"{sequences} of {length}"] = pair.wrong(batch(sequences, length))
    for name, change in CHANGES.items():
        failures[name] = pair.changed(change).wrong(given)
    for name, other in numbers(made):
        with pytest.MonkeyPatch.context() as later:
            if hasattr(module, name):
                later.setattr(module, name, other)
            failures[f"{name} = {other}"] = pair.changed(number(name, other)).wrong(given)
    wrong = {name: found for name, found in failures.items() if found}
    assert not wrong, f"{made}: {wrong}"
