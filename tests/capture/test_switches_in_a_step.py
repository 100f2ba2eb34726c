"""Torch's switches at every look inside of a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradscope.capture.environment import SwitchWatch
from gradscope.capture.guard import Guard
from gradscope.capture.hooks_aside import HooksAside

OFF = {"anomaly": False, "anomaly_nan": False, "deterministic": False, "validate_args": False}


@pytest.mark.parametrize("name", ["anomaly", "deterministic", "validate_args"])
@pytest.mark.parametrize("outside", [True, False])
def test_what_one_look_saw_was_on(name: str, outside: bool) -> None:
    watch = SwitchWatch()
    watch._seen = [OFF, {**OFF, name: True}, OFF]
    found = watch.with_seen({**OFF, name: outside, "other": 3})
    assert found[name] is True and found["other"] == 3
    assert found.get("inside_step") == (None if outside else [name])


@pytest.mark.parametrize("looks", [[True, False], [False, True], [False, False]])
def test_one_check_for_nan_is_a_check_for_nan(looks: list[bool]) -> None:
    watch: Any = SwitchWatch()
    watch._seen = [{**OFF, "anomaly": True, "anomaly_nan": nan} for nan in looks]
    assert watch.with_seen(OFF)["anomaly_nan"] is any(looks)


def test_modules_are_looked_at_once() -> None:
    """A look takes longer than a small module."""
    watch, model = SwitchWatch(), nn.Sequential(nn.Identity(), nn.Identity())
    with watch.watching(Guard(), HooksAside()):
        model(torch.ones(1))
        model(torch.ones(1))
    model(torch.ones(1))
    assert len(watch._seen) == 1
