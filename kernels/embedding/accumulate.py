"""Adding an embedding's gradient, row by row, to the dense gradient that its weight gets anyhow.

Autograd runs a parameter's AccumulateGrad node once all uses of the parameter have handed over their gradients. So an
embedding may hand over nothing, and add its rows just before that node runs: to ``.grad`` where there is one, else to
the gradient that the other uses handed over, such as a tied head's. Only where there is neither must zeros be made.

That is right where the pass ends in ``.grad`` and nobody looks at the gradient in between. Everywhere else
(``torch.autograd.grad``, hooks on the tensor, a graph of the gradient) torch's dense gradient has to be handed over;
:func:`accumulator` tells which it is.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

EXACT = (torch.float32, torch.float64)  # added row by row, in a narrower type every addition would round

_memory_uses: Any = getattr(torch._C, "_storage_Use_Count", None)
_references = sys.getrefcount  # by Python
_uses: Any = getattr(torch.Tensor, "_use_count", None)  # by C++, of which the Python object is one
_will_execute: Any = getattr(torch._C, "_will_engine_execute_node", None)


def accumulator(node: Any) -> Any | None:
    """The AccumulateGrad node before which rows may be added in the backward pass that runs; None where they may not.

    Args:
        node: the next function of an autograd Function, for its weight; called from that Function's backward.
    """
    weight = getattr(node, "variable", None)
    if weight is None or _will_execute is None or torch.compiler.is_compiling():
        return None
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None  # those would miss the rows, and these would not run for rows alone
    if weight.grad is not None and weight.grad.layout != torch.strided:
        return None
    if torch.is_grad_enabled():
        return None  # create_graph=True
    # What torch's register_multi_grad_hook asks: true where this pass ends in .grad, false where it leaves this
    # parameter out, and an error where torch.autograd.grad captures what would have gone there.
    try:
        return node if _will_execute(node) else None
    except RuntimeError:
        return None


def add_rows_before(node: Any, upstream: Tensor, ids: Tensor, padding: int) -> None:
    """Once, just before the AccumulateGrad ``node`` runs, add the rows of an embedding's gradient.

    Args:
        node: from :func:`accumulator`.
        upstream: [*ids, features].
        ids: any shape, int32 or int64.
        padding: the token that gets no gradient; -1 for none.
    """
    weight = node.variable
    flat = ids.reshape(-1)
    rows = upstream.reshape(-1, upstream.shape[-1])
    if padding >= 0:  # zeroed, not taken out: how many are left is known on the device only
        rows = rows.masked_fill((flat == padding)[:, None], 0)

    running = torch._C._current_graph_task_id()

    def add(arrived: tuple[Tensor | None, ...]) -> tuple[Tensor] | None:
        handle.remove()
        if torch._C._current_graph_task_id() != running:
            return None  # left over from a pass that failed before it came here
        with torch.no_grad():
            if weight.grad is None and _is_dense(arrived):
                if not _is_ours(arrived):
                    return (arrived[0].index_add(0, flat, rows),)  # type: ignore[union-attr]
                arrived[0].index_add_(0, flat, rows)  # type: ignore[union-attr]
                return None
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            weight.grad.index_add_(0, flat, rows)
        return None

    handle = node.register_prehook(add)


def _is_dense(arrived: tuple[Tensor | None, ...]) -> bool:
    gradient = arrived[0]
    return gradient is not None and gradient.layout == torch.strided


def _is_ours(arrived: tuple[Tensor | None, ...]) -> bool:
    """Whether nobody but the engine and this tuple refers to the tensor in it, or to the memory below it.

    Who calls this must have no other name for the tensor. Other nodes may be handed the same tensor, hooks may have
    kept it. The references are compared with those of tensors just made, for what is counted differs between versions
    of Python and torch: the base of a view, which its view refers to as the engine refers to the gradient.
    """
    (gradient,) = arrived
    if gradient is None or _memory_uses is None or _uses is None:
        return False
    view = torch.empty(1).view(1)
    alike = (view._base,)
    (fresh,) = alike
    if _references(gradient) > _references(fresh) or _uses(gradient) > _uses(fresh):
        return False
    made = torch.empty(1).view(1) if gradient._is_view() else torch.empty(1)
    memory, fresh_memory = gradient.untyped_storage(), made.untyped_storage()
    if _references(memory) > _references(fresh_memory) or _memory_uses(memory._cdata) > _memory_uses(
        fresh_memory._cdata
    ):
        return False
    base, fresh_base = gradient._base, made._base
    return base is None or (_references(base) <= _references(fresh_base) and _uses(base) <= _uses(fresh_base))
