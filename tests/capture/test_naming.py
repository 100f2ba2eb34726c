"""Paths of modules: one model, several, held by a variable, shared, tied."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradscope.capture.naming import name_modules

# torch.compile loads what warns of torch.jit.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")


def _paths(roots: list[nn.Module], known: dict[str, nn.Module]) -> dict[str, str | None]:
    return {info.path: info.parent for info in name_modules(roots, known).infos}


def test_the_given_model_is_the_root() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    assert _paths([model], {"": model}) == {"": None, "0": "", "1": "", "1.0": "1"}


def test_a_loss_module_beside_the_only_model_keeps_its_class() -> None:
    model, loss = nn.Sequential(nn.Linear(1, 1)), nn.MSELoss()
    assert _paths([model, loss], {}) == {"": None, "0": "", "MSELoss": None}


def test_several_models_are_trees_under_their_variables() -> None:
    first, second = nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1)
    known: dict[str, nn.Module] = {"generator": first, "critic": second}
    assert _paths([second, first], known) == {"critic": None, "generator": None, "generator.0": "generator"}


def test_several_models_of_one_class_without_variables_are_numbered() -> None:
    assert list(_paths([nn.Linear(1, 1), nn.Linear(1, 1)], {})) == ["Linear", "Linear#2"]


def test_a_model_that_is_never_called_itself_names_what_is() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(1, 1), "decoder": nn.Linear(1, 1)})
    encoder, decoder = model["encoder"], model["decoder"]
    assert _paths([encoder, decoder], {"model": model}) == {"": None, "encoder": "", "decoder": ""}


def test_the_outermost_holder_wins_over_a_variable_for_a_part() -> None:
    part = nn.Linear(1, 1)
    model = nn.Sequential(part)
    assert _paths([part], {"head": part, "model": model}) == {"": None, "0": ""}


def test_a_shared_module_has_one_path_and_tied_weights_name_each_other() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(2, 2)})
    model["c"].weight = shared.weight
    infos = {info.path: info for info in name_modules([model], {"": model}).infos}
    assert list(infos) == ["", "a", "c"]
    assert infos["a"].tied == ("c.weight",)
    assert infos["c"].tied == ("a.weight",)


def test_parameters_name_all_their_owners() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    names = name_modules([model], {"": model})
    weight, bias, loose = names.parameters([model[0].weight, model[1].bias, nn.Parameter(model[0].bias.detach())])
    assert (weight.name, weight.owners) == ("0.weight", (1, 2))
    assert (bias.name, bias.owners) == ("1.bias", (2,))
    assert (loose.name, loose.owners) == ("", ())


class Own(nn.Module):
    def forward(self, x: object) -> object:
        return x


def test_the_source_of_a_users_class_is_its_forward() -> None:
    own, linear = name_modules([nn.Sequential(Own(), nn.Linear(1, 1))], {}).infos[1:]
    line = Own.forward.__code__.co_firstlineno
    assert own.source is not None
    assert own.source.endswith(f"test_naming.py:{line}")
    assert linear.source is None


@pytest.mark.parametrize("names", [("net", "model"), ("net", "net"), (None, "model"), ("net", None), (None, None)])
@pytest.mark.parametrize("turned", [False, True])
def test_layers_are_called_the_same_with_and_without_torch_compile(
    names: tuple[str | None, str | None], turned: bool
) -> None:
    """By the first of all variables that hold the model, or what was compiled of it; of two models each is a tree."""
    net, other = nn.Linear(4, 4), nn.Linear(4, 4)
    found = []
    for model in (net, torch.compile(net, backend="eager")):
        held: list[tuple[str | None, Any]] = list(zip(names, (net, model), strict=True))
        known = {name: each for name, each in (held[::-1] if turned else held) if name is not None}
        found.append(list(_paths([model, other], {**known, "ema": other})))
    assert found[0] == found[1] and found[0][1] == "ema"
