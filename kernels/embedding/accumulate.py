"""Adding an embedding's gradient, row by row, to the dense gradient that its weight gets anyhow.

Autograd runs a parameter's AccumulateGrad node once all uses of the parameter have handed over their gradients. So an
embedding may hand over nothing, and add its rows just before that node runs: to ``.grad`` where there is one, else to
the gradient that the other uses handed over, such as a tied head's. Only where there is neither must zeros be made.

That is right where the pass ends in ``.grad`` and nobody looks at the gradient in between. Everywhere else
(``torch.autograd.grad``, hooks on the tensor, a graph of the gradient) torch's dense gradient has to be handed over;
:func:`accumulator` tells which it is.

The node is shared by all passes that reach the parameter: by one that runs within another, as reentrant checkpointing
does, and by those of other threads. Rows wait for the pass that they belong to. The node itself locks ``.grad`` against
other threads, so that as soon as a second one is seen, gradients go through it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import Any

import torch
from torch import Tensor

from gradscope.kernels.embedding.rows import add_rows

EXACT = (torch.float32, torch.float64)  # added row by row, in a narrower type every addition would round

_memory_uses: Any = getattr(torch._C, "_storage_Use_Count", None)
_references = sys.getrefcount  # by Python
_uses: Any = getattr(torch.Tensor, "_use_count", None)  # by C++, of which the Python object is one
_will_execute: Any = getattr(torch._C, "_will_engine_execute_node", None)

_THREADS = "gradscope: threads whose passes add rows"  # in the node's metadata
_writing = threading.Lock()  # .grad, or the threads of a node


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
        if not _will_execute(node):
            return None
    except RuntimeError:
        return None
    with _writing:
        threads: set[int] = node.metadata.setdefault(_THREADS, set())
        threads.add(threading.get_ident())
        return node if len(threads) == 1 else None


def add_rows_before(node: Any, upstream: Tensor, ids: Tensor, padding: int) -> None:
    """Once, just before the AccumulateGrad ``node`` runs, add the rows of an embedding's gradient.

    Args:
        node: from :func:`accumulator`.
        upstream: [*ids, features].
        ids: any shape, int32 or int64.
        padding: the token that gets no gradient; -1 for none.
    """
    flat = ids.reshape(-1)
    rows = upstream.reshape(flat.numel(), upstream.shape[-1])  # -1 says nothing of rows without features
    if padding >= 0:  # zeroed, not taken out: how many are left is known on the device only
        rows = rows.masked_fill((flat == padding)[:, None], 0)

    running = torch._C._current_graph_task_id()

    def add(arrived: tuple[Tensor | None, ...]) -> tuple[Tensor] | None:
        if torch._C._current_graph_task_id() != running:
            return None  # of a pass within this one, or of another thread
        handle.remove()
        with torch.no_grad():
            return _added(node, arrived, flat, rows)

    handle = node.register_prehook(add)
    _remove_after_pass(handle)


def _added(node: Any, arrived: tuple[Tensor | None, ...], flat: Tensor, rows: Tensor) -> tuple[Tensor] | None:
    """Add the rows, in place where that is safe; else return what the node is to be given."""
    weight = node.variable
    with _writing:
        alone = len(node.metadata[_THREADS]) == 1
        if alone and (weight.grad is not None or not _is_dense(arrived)):
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            add_rows(weight.grad, flat, rows)
            return None
    if not _is_dense(arrived):
        # A hook cannot make something of nothing: a pass of its own takes the rows through the node.
        torch.autograd.backward(weight, add_rows(torch.zeros_like(weight), flat, rows))
        return None
    if not _is_ours(arrived):
        return (add_rows(arrived[0].clone(), flat, rows),)  # type: ignore[union-attr]
    add_rows(arrived[0], flat, rows)  # type: ignore[arg-type]
    return None


class _PassEnded:
    """Lives as long as the backward pass does; autograd calls it at the end of one that did not fail."""

    def __call__(self) -> None:
        """Nothing is left to do."""


def _remove_after_pass(handle: Any) -> None:
    """Take the hook off when the pass that runs is over, also where it fails before the hook has run."""
    sentinel = _PassEnded()
    weakref.finalize(sentinel, handle.remove).atexit = False
    torch.autograd.Variable._execution_engine.queue_callback(sentinel)  # type: ignore[attr-defined]


def _is_dense(arrived: tuple[Tensor | None, ...]) -> bool:
    gradient = arrived[0]
    return gradient is not None and gradient.layout == torch.strided


def _is_ours(arrived: tuple[Tensor | None, ...]) -> bool:
    """Check that nobody but the engine and this tuple refers to the gradient in it, or to the memory below that.

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
