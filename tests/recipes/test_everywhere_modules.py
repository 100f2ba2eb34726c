"""Every recipe's module called with other parameters, stacked and copied; functions and results copied."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import gradscope.recipes
from gradscope import recipes

from .everywhere import CASES, FORMS, Case, Form, flat
from .everywhere_checks import (
    EACH,
    EACH_FORM,
    FUNCTIONS,
    TORCHS_WARNINGS,
    close,
    total,
)

pytestmark = TORCHS_WARNINGS


@EACH_FORM
def test_functional_call(form: Form) -> None:
    module, inputs = form.module(), form.inputs()
    parameters = {name: (2 * each).detach() for name, each in module.named_parameters()}

    def of_module(given: dict[str, Tensor]) -> Tensor:
        return total(torch.func.functional_call(module, given, inputs))

    with sdpa_kernel(SDPBackend.MATH):
        expected = form.plain(parameters, *inputs)
    close(torch.func.functional_call(module, parameters, inputs), expected)
    if parameters:
        found = torch.func.grad(of_module)(parameters)
        expected = torch.func.grad(lambda given: total(form.plain(given, *inputs)))(parameters)
        close(tuple(found.values()), tuple(expected.values()))


@EACH_FORM
def test_an_ensemble_of_modules(form: Form) -> None:
    modules, inputs = [form.module() for _ in range(3)], form.inputs()
    parameters, buffers = torch.func.stack_module_state(modules)
    if not parameters:
        return

    def of_one(given: Any, held: Any) -> Any:
        return torch.func.functional_call(modules[0], (given, held), inputs)

    found = torch.func.vmap(of_one, randomness="different")(parameters, buffers)
    close(tuple(each[1] for each in flat(found)), form.plain(dict(modules[1].named_parameters()), *inputs))


def stored(module: nn.Module) -> nn.Module:
    kept = io.BytesIO()
    torch.save(module, kept)
    kept.seek(0)
    loaded: nn.Module = torch.load(kept, weights_only=False)
    return loaded


@EACH_FORM
@pytest.mark.parametrize(
    "again", [copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each)), stored],
    ids=["deepcopy", "copy", "pickle", "torch.save"],
)  # fmt: skip
def test_copies(form: Form, again: Callable[[nn.Module], nn.Module]) -> None:
    """Before and after the module ran, also as a part of another one."""
    for ran in (False, True):
        holder = nn.Sequential(form.module())
        if ran:
            total(holder[0](*form.inputs())).requires_grad_().sum()
        made = again(holder)[0]
        assert type(made) is type(holder[0])
        close(made(*form.inputs()), form.plain(dict(made.named_parameters()), *form.inputs()))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_copied_by_their_name(name: str) -> None:
    """As a module's attribute that is pickled with it."""
    function = getattr(recipes, name)
    assert pickle.loads(pickle.dumps(function)) is function and copy.deepcopy(function) is function


@EACH
@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["deep", "pickle"]
)
def test_results_are_copied(case: Case, again: Callable[[Any], Any]) -> None:
    if case.random:
        return
    tensors = case.tensors()
    close(tuple(map(again, flat(case.run(*tensors)))), case.plain(*tensors))
    result = flat(case.run(*(each.requires_grad_() for each in tensors[:1]), *tensors[1:]))[0]
    close(pickle.loads(pickle.dumps(result)).detach(), flat(case.plain(*tensors))[0].detach())


def test_every_recipe_is_in_the_table() -> None:
    assert {case.name.partition(",")[0] for case in CASES} == set(FUNCTIONS)
    assert {form.name for form in FORMS} == set(gradscope.recipes.__all__) - set(FUNCTIONS)
