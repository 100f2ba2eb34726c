"""A name that is Python's own, or a module's, in most files is the user's in this one, and another number later."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan
from tests.patching.test_bindings import net
from tests.patching.test_places_later import ERF, HEAD, same


def again_of_math() -> str:
    """The file has ``pi`` from ``math``, and binds it again."""
    head = HEAD.replace("import math\n", "import math\nfrom math import pi\n").replace(
        "\n\nclass", "\n\npi = 2.0\n\n\nclass"
    )
    return head + textwrap.indent(ERF.format("pi"), " " * 8)


def holding() -> str:
    """A model with something of its own that holds the number."""
    head = HEAD.replace("self.low, ", "self.own = Own()\n        self.low, ")
    return head.replace("\n\nclass", "\n\nclass Own:\n    pi = 2.0\n\n\nclass", 1)


def of_something_held() -> str:
    """A local name is that of a module which the file has."""
    return holding() + textwrap.indent("math = self.own\n" + ERF.format("math.pi"), " " * 8)


def bound_to_a_constant_first() -> str:
    return holding() + textwrap.indent("two = 2.0\ntwo = self.own.pi\n" + ERF.format("two"), " " * 8)


def bound_to_a_constant_last() -> str:
    """What it is bound to under a condition counts in another step."""
    return holding() + textwrap.indent(
        "two = self.own.pi\nif two == 2.0:\n    two = 2.0\n" + ERF.format("two"), " " * 8
    )


def of_an_enclosing_function() -> str:
    """``float`` is an argument of the function that makes the class."""
    head, body = HEAD.split("class Net(")
    body = textwrap.indent(f"class Net({body}" + textwrap.indent(ERF.format("float(2)"), " " * 8), " " * 4)
    return f"{head}pi = 2.0\n\n\ndef made(float):\n{body}\n    return Net\n\n\nNet = made(lambda number: pi)\n"


@pytest.mark.parametrize(
    "made",
    [again_of_math, of_something_held, of_an_enclosing_function, bound_to_a_constant_first, bound_to_a_constant_last],
)
@pytest.mark.usefixtures("nothing_is_idle")
def test_a_name_is_another_number_later(tmp_path: Path, made: Callable[[], str]) -> None:
    model = net(tmp_path, made())
    original = copy.deepcopy(model)
    patches = Patches(plan(model, torch.randn(2, 6, 8, dtype=torch.float64)))
    patches.apply()
    assert [site.recipe for site in patches.sites] == ["gelu"]
    for number in (2.0, 3.0):
        type(model).forward.__globals__["pi"] = number  # type: ignore[attr-defined]
        for each in (original, model):
            each.own = SimpleNamespace(pi=number)  # type: ignore[assignment]
        same(original, model)
