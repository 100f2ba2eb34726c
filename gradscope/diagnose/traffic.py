"""Bytes that a recorded call must move in forward, and its node in backward: an estimate, less rather than more.

* forward: it reads its inputs and writes its outputs once. A view moves nothing; what picks rows reads as much as it
  makes; a dimension that is only expanded is read once.
* backward: it reads the gradients of its outputs and what it kept, and writes the gradients of the inputs that want
  one. Where the gradient is handed on as it is (an addition, a copy, a view), nothing is moved.

A call that does many passes inside (softmax, a loss) counts as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from gradscope.ops import CASTS, CONVOLUTIONS, VIEWS, names
from gradscope.recording.graph import Node, Value

# Calls that may return their argument's memory as it is: then they move nothing.
_VIEWS = (
    VIEWS
    | CASTS
    | names(
        "broadcast_tensors contiguous detach alias cpu cuda real imag view_as_real view_as_complex",
        "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout",
    )
)
# They read as much of their source as they make.
_PICKS = names("embedding index_select gather getitem take take_along_dim masked_select")
# What they hand back is a view of the gradient, whatever the forms are.
_SPLITS_GRADIENT = names("cat stack hstack vstack sum reshape flatten contiguous clone")
# The gradient goes on as it is to an input of the same form and dtype.
_HANDS_ON = names("add sub to float double half bfloat16 type type_as")
# Backward needs no floating numbers of forward.
_KEEPS_NO_NUMBERS = names(
    "neg mean masked_fill where tril triu embedding index_select gather getitem take take_along_dim masked_select",
    "cumsum pad roll flip repeat repeat_interleave tile scatter_add index_add rsub dropout avg_pool1d avg_pool2d",
    "adaptive_avg_pool1d adaptive_avg_pool2d interpolate pixel_shuffle",
)
# The gradient of each of the first two inputs needs the other.
_PAIRS = CONVOLUTIONS | names("matmul rmatmul linear bmm mm mv dot mul div rdiv outer inner tensordot")


def call_bytes(call: Node) -> tuple[int, int]:
    """What a call must move in forward, and its node in backward; an estimate, see the top."""
    inputs, outputs = _different(call.inputs), _different(call.outputs)
    shared = {each.storage for each in inputs}
    if not outputs or (call.op in _VIEWS and all(each.storage in shared for each in outputs)):
        return 0, 0
    made = _bytes(outputs)
    if call.op == "setitem":
        return 2 * _bytes(inputs[1:]), 0
    read = _bytes(inputs)
    if call.op in _PICKS:
        source = [each for each in inputs if has_numbers(each)]
        read = min(_bytes(source), made) + _bytes(each for each in inputs if not has_numbers(each))
    return read + made, _backward_bytes(call, inputs, outputs)


def _backward_bytes(call: Node, inputs: Sequence[Value], outputs: Sequence[Value]) -> int:
    wanting = [each for each in inputs if each.requires_grad and has_numbers(each)]
    given = [each for each in outputs if each.requires_grad and has_numbers(each)]
    if not call.grad or not wanting or not given or call.op in _SPLITS_GRADIENT:
        return 0
    if call.op in _HANDS_ON:
        one = given[0]
        wanting = [each for each in wanting if (each.shape, each.dtype) != (one.shape, one.dtype)]
        return _bytes(given) + _bytes(wanting) if wanting else 0
    return _bytes(given) + _kept_bytes(call, inputs) + _bytes(wanting)


def _kept_bytes(call: Node, inputs: Sequence[Value]) -> int:
    """What backward reads of what forward kept."""
    if call.op in _KEEPS_NO_NUMBERS:
        return _bytes(each for each in inputs if not has_numbers(each))
    if call.op in _PAIRS:
        if len(inputs) < 2:  # by a number, or with itself
            return _bytes(inputs) if len(call.inputs) > 1 else 0
        one, other = inputs[:2]
        return (_bytes([other]) if one.requires_grad else 0) + (_bytes([one]) if other.requires_grad else 0)
    return _bytes(inputs)


def _different(tensors: Iterable[Value]) -> list[Value]:
    """Each once."""
    return list({(each.storage, each.shape, each.strides, each.dtype): each for each in tensors}.values())


def _bytes(tensors: Iterable[Value]) -> int:
    return sum(map(memory_bytes, tensors))


def memory_bytes(tensor: Value) -> int:
    """Of the memory behind it: an expanded dimension is there once."""
    return _form_bytes(tensor.shape, tensor.strides, tensor.dtype)


@lru_cache(4096)
def _form_bytes(shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype) -> int:
    count = 1
    for index, size in enumerate(shape):
        expanded = strides is not None and size > 0 and strides[index] == 0
        count *= 1 if expanded else size
    return count * dtype.itemsize


def has_numbers(tensor: Value) -> bool:
    """Check that the tensor's numbers can have a gradient: they are floating or complex."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
