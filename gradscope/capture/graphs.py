"""Walks autograd graphs from Python, as far as that cannot harm the program.

A node that Python has looked at is freed by Python, from within the node before it: some 210 bytes of the thread's
stack each (torch 2.13). A chain of 40,000 of them ends the process with a segmentation fault when the program lets go
of its loss. Torch frees nodes that were not looked at one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch

# 25,000 of the 40,000 that the usual stack of 8 MiB has room for: another walk may begin elsewhere.
_BYTES_A_NODE = 335
_USUAL_STACK = 8 * 1024**2


def most_nodes() -> int:
    """How many nodes of one graph may be looked at on this thread."""
    return _stack_bytes() // _BYTES_A_NODE


def walked(starts: Iterable[Any], most: int | None = None) -> tuple[list[Any], bool]:
    """The nodes that can be reached from ``starts``, each once, depth first; and whether these are all of them.

    Args:
        most: how many are looked at; None: :func:`most_nodes`.
    """
    most = most_nodes() if most is None else most
    found: dict[Any, None] = {}
    stack = list(starts)[::-1]
    while stack and len(found) < most:
        node = stack.pop()
        if node not in found:
            found[node] = None
            stack.extend(below for below, _ in node.next_functions if below is not None)
    return list(found), all(node in found for node in stack)


def node_of(root: Any) -> Any:
    """The node behind what a backward pass starts from; None where there is none."""
    if isinstance(root, torch.Tensor):
        return root.grad_fn
    return getattr(root, "node", None)  # a torch.autograd.graph.GradientEdge


def starts_of(roots: Any) -> list[Any]:
    """The nodes behind what a backward pass starts from."""
    tensors = (roots,) if isinstance(roots, torch.Tensor) else tuple(roots)
    return [node for node in map(node_of, tensors) if node is not None]


def _stack_bytes() -> int:
    """Of this thread, where somebody has set it; else the usual one, or less where the system's limit is lower."""
    if threading.current_thread() is not threading.main_thread() and threading.stack_size():
        return threading.stack_size()
    try:
        import resource
    except ImportError:  # Windows gives 1 MiB
        return _USUAL_STACK // 8
    limit = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return _USUAL_STACK if limit == resource.RLIM_INFINITY else min(limit, _USUAL_STACK)
