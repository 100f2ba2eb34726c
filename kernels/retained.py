"""Tell whether backward may use up what forward left for it."""

from __future__ import annotations

import torch


def needed_again() -> bool:
    """Check that saved tensors must outlive the backward pass that runs: ``retain_graph=True``, or it cannot be told.

    In a compiled graph too: there the compiler decides what is written in place.
    """
    if torch.compiler.is_compiling():
        return True
    # The one that AOTAutograd asks before it reuses saved tensors.
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or bool(ask())
