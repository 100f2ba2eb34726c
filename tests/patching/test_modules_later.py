"""A module whose call the new code took the place of may be another one later, or have another setting, or a hook."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan
from tests.patching.called_model import WIDTH, WORDS, Called, OwnGelu
from tests.patching.exactness import TOLERANCE, difference, results

RECIPES = {"packed_attention", "rms_norm", "swiglu", "linear_cross_entropy", "embedding"}


def loss(output: Tensor, _: object) -> Tensor:
    return output


def put(name: str, made: Callable[[], nn.Module]) -> Callable[[Called], None]:
    return lambda model: setattr(model, name, made())


def setting(name: str, of: str, value: object) -> Callable[[Called], None]:
    return lambda model: setattr(getattr(model, name), of, value)


def hooked(name: str) -> Callable[[Called], None]:
    return lambda model: getattr(model, name).register_forward_hook(lambda module, given, output: 1.5 * output) and None


def running(path: str, forward: Callable[[Tensor], Tensor]) -> Callable[[Called], None]:
    """One module alone gets another forward, as libraries give it that offload or quantize."""
    return lambda model: setattr(model.get_submodule(path), "forward", forward)


class Louder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * x


CHANGES = {
    "no dropout any more": put("drop", nn.Identity),
    "something else for dropout": put("drop", Louder),
    "dropout, hooked": hooked("drop"),
    "another softmax": put("soft", lambda: nn.Softmax(dim=-2)),
    "the softmax's dimension": setting("soft", "dim", -2),
    "the softmax, hooked": hooked("soft"),
    "another norm": put("norm", lambda: nn.LayerNorm(WIDTH)),
    "the norm's eps": setting("norm", "eps", 0.3),
    "the norm, hooked": hooked("norm"),
    "another activation": put("act", nn.GELU),
    "the activation, hooked": hooked("act"),
    "another activation of the user's own": put("own", OwnGelu),
    "torch's for the user's own": put("own", nn.Tanh),
    "the user's own activation, hooked": hooked("own"),
    "another activation in its place": lambda model: model.act.__setitem__(0, nn.GELU()),
    "one more after the activation": lambda model: model.act.append(nn.Tanh()) and None,
    "another forward of dropout's": running("drop", lambda x: 1.5 * x),
    "another forward of the softmax's": running("soft", torch.sigmoid),
    "another forward of the activation's": running("act.0", F.gelu),
    "another forward of the user's own": running("own", F.gelu),
    "another loss": put("criterion", nn.MultiMarginLoss),
    "the loss's sum": setting("criterion", "reduction", "sum"),
    "smoothed labels": setting("criterion", "label_smoothing", 0.2),
    "the loss, hooked": hooked("criterion"),
    "a word that pads": setting("table", "padding_idx", 3),
    "rows by frequency": setting("table", "scale_grad_by_freq", True),
    "rows of a largest norm": setting("table", "max_norm", 0.5),
    "another head": put("head", lambda: nn.Linear(WIDTH, WORDS)),
}


@pytest.mark.usefixtures("nothing_is_idle")
@pytest.mark.parametrize("of_a_copy", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_model_does_as_the_original(change: Callable[[Called], None], of_a_copy: bool) -> None:
    model, words = Called().double(), torch.randint(WORDS, (2, 9))
    original = copy.deepcopy(model)
    patches = Patches(plan(model, words, loss))
    patches.apply()
    assert {site.recipe for site in patches.kept} >= RECIPES, patches.table.reasons.tolist()
    assert sum(site.recipe == "swiglu" for site in patches.kept) == 2
    changed = copy.deepcopy(model) if of_a_copy else model
    for each in (original, changed):
        torch.manual_seed(5)
        change(each)
        each.double()
    for train in (True, False):
        given = results(original.train(train), words, loss), results(changed.train(train), words, loss)
        assert difference(*given) <= TOLERANCE
