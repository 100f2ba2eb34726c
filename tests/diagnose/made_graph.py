"""Calls and tensors of a recorded step, made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from gradscope.recording.graph import Node, Value
from gradscope.recording.live import LiveObjects, RecordedCall


def made_value(shape: Sequence[int], dtype: str = "float32", device: str = "cpu", **given: Any) -> Value:
    """A tensor that is gone: a leaf without a gradient, unless said otherwise."""
    settings = {"requires_grad": False, "storage": 0, **given}
    return Value(0, (0, 0), tuple(shape), getattr(torch, dtype), torch.device(device), tensor=lambda: None, **settings)


def made_call(op: str, inputs: Sequence[Value], outputs: Sequence[Value] = (), **given: Any) -> Node:
    """A call of ``forward`` that records gradients; its tensors know of it, as their maker or their user."""
    call = RecordedCall(print, given.pop("args", tuple(inputs)), given.pop("kwargs", {}))
    settings = {"index": 0, "grad": True, "function_name": "forward", **given}
    live = LiveObjects(calls={settings["index"]: call})
    node = Node(
        op=op, live=live, inputs=tuple(inputs), outputs=tuple(outputs), places=(), changed=frozenset(), **settings
    )
    for value in dict.fromkeys(inputs):
        value.users.append(node)
    for value in outputs:
        if value not in inputs:
            value.producer = node
    return node


def changed_call(call: Node, kwargs: dict[str, Any], **given: Any) -> Node:
    """``call`` with other arguments by name; its tensors know nothing of it."""
    live = LiveObjects(calls={call.index: RecordedCall(call.function, call.args, kwargs)})
    return replace(call, live=live, **given)
