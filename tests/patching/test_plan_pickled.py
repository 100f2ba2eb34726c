"""A plan says that it cannot be pickled, and what can be."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gradscope


@pytest.mark.parametrize("write", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_plan_cannot_be_pickled_and_says_so(write: Callable[[Any], Any]) -> None:
    plan = gradscope.plan(nn.Linear(4, 4), torch.randn(2, 4))
    with pytest.raises(TypeError) as raised:
        write(plan)
    assert str(raised.value) == (
        "a plan cannot be pickled or copied: it holds the model itself and a recorded step.\n"
        "Pickle plan.table, or make the plan again where it is needed: gradscope.plan(model, batch)."
    )
    assert pickle.loads(pickle.dumps(plan.table)).equals(plan.table)
