"""Layers of torch's own that compute another way, in evaluation, where a mode on torch functions is on.

``nn.MultiheadAttention`` and what is made of it ask ``torch.overrides.has_torch_function``, which any such mode makes
true, and leave their fast path then. By nested tensors that gives 0 at what is padded, where the slow one computes
something: a program's validation loss would differ in the steps whose lines are noted.

Source: torch/nn/modules/activation.py, transformer.py (``why_not_fast_path``, ``why_not_sparsity_fast_path``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from gradscope.capture.aside import Aside
from gradscope.capture.guard import Guard
from gradscope.capture.hooks_aside import HooksAside

FAST_PATHS = "leaving torch's fast paths as they are"  # under which the guard notes an error
_LAYERS = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)


class _Calls(threading.local):
    """The calls of such layers that this thread is in, by their ids."""

    def __init__(self) -> None:
        self.open: list[int] = []


@contextmanager
def leaving_fast_paths(guard: Guard, hooks: HooksAside, modes: Aside) -> Iterator[None]:
    """Keep ``modes`` off torch's stacks inside of such layers in evaluation, until the block is left."""
    calls = _Calls()

    def enter(module: nn.Module, args: Any) -> None:
        if issubclass(type(module), _LAYERS) and not vars(module).get("training", True):
            calls.open.append(id(module))
            modes.begin()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if calls.open and calls.open[-1] == id(module):
            calls.open.pop()
            modes.end()

    with hooks.holding(
        partial(register_module_forward_pre_hook, guard.hook(FAST_PATHS, enter)),
        partial(register_module_forward_hook, guard.hook(FAST_PATHS, leave), always_call=True),
    ):
        try:
            yield
        finally:
            while calls.open:  # the hooks were out when it returned
                calls.open.pop()
                modes.end()
