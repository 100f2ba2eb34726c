"""What gradscope's own forward hooks cost a module call, beside what they themselves can time.

A hook reads the clock when it begins and ends. How torch gets to it, on the slower way that it takes as soon as any
module has a hook, is not in between: that is measured once, on an empty module.
"""

from __future__ import annotations

from time import perf_counter_ns

import numpy as np
import torch
from torch import nn

from gradscope.capture.byhand import TORCHS_CALL
from gradscope.capture.guard import Guard
from gradscope.capture.modules import CallRecorder
from gradscope.capture.registry import ModuleRegistry
from gradscope.capture.spans import CallCost
from gradscope.compat import has_global_module_hooks

CALL_COST = "measuring the cost of a module call"  # under which the guard notes an error

_CALLS = 200


class _Empty(nn.Module):
    def forward(self) -> None:
        """Do nothing."""


def measure_call_cost(guard: Guard) -> CallCost:
    """The usual cost of a call of an empty module, less what the hooks timed.

    Nothing is measured where other hooks on all modules are in place, or another function in the place of torch's
    call, for these would see the empty module. Hooks make torch take its slower way in any case; what is then not
    known is the way to one more hook.
    """
    if has_global_module_hooks() or nn.Module.__call__ is not TORCHS_CALL or torch.compiler.is_compiling():
        return CallCost()
    module, recorder = _Empty(), CallRecorder(guard, ModuleRegistry())
    plain = np.median([_timed(module) for _ in range(_CALLS)])
    with recorder.recording():
        whole = np.array([_timed(module) for _ in range(_CALLS)])
    calls = recorder.table()
    if calls.inside_ns is None or calls.around_ns is None or calls.open_ns is None or len(calls) != _CALLS:
        return CallCost()  # another thread called modules meanwhile
    inside = np.median(calls.open_ns - calls.inside_ns)
    around = np.median(whole - calls.open_ns - calls.around_ns)
    return shared_cost(int(inside), int(around), int(plain))


def shared_cost(inside_ns: int, around_ns: int, plain_ns: int) -> CallCost:
    """What a call takes more than the ``plain_ns`` that it takes without hooks, in the proportion of its two parts."""
    whole = inside_ns + around_ns
    more = max(whole - plain_ns, 0)
    inside = more * inside_ns // whole if whole > 0 else 0
    return CallCost(inside, more - inside)


def _timed(module: nn.Module) -> int:
    began = perf_counter_ns()
    module()
    return perf_counter_ns() - began
