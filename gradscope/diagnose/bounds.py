"""What a layer's operations would take at this machine's ceilings, and what limits it: a roofline of one layer.

The bytes are an estimate from the recorded calls, less rather than more; FLOPs are those of the run's survey.

* forward: it reads its inputs and writes its outputs once. A view moves nothing; what picks rows reads as much as it
  makes; a dimension that is only expanded is read once.
* backward: it reads the gradients of its outputs and what it kept, and writes the gradients of the inputs that want
  one. Where the gradient is handed on as it is (an addition, a copy, a view), nothing is moved.

A call that does many passes inside (softmax, a loss) counts as one.

Source: S. Williams, A. Waterman and D. Patterson, Roofline: an insightful visual performance model for multicore
architectures, CACM 52(4), 2009.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from gradscope.diagnose.case import Case
from gradscope.ops import (
    ATEN,
    CONVOLUTIONS,
    HANDS_GRADIENT_ON,
    MAY_BE_VIEWS,
    PICKS,
    PRODUCTS,
    SAVES_EACH_OTHER,
    SAVES_NOTHING,
    SPLITS_GRADIENT,
    names,
)
from gradscope.recording.graph import Node, Value
from gradscope.tables import LayerRow, Limits, OpRow


def call_bytes(call: Node) -> tuple[int, int]:
    """Return what a call must move in forward, and its node in backward; an estimate, see the top."""
    inputs, outputs = _different(call.inputs), _different(call.outputs)
    shared = {each.storage for each in inputs}
    if not outputs or (call.op in MAY_BE_VIEWS and all(each.storage in shared for each in outputs)):
        return 0, 0
    made = _bytes(outputs)
    if call.op == "setitem":
        return 2 * _bytes(inputs[1:]), 0
    read = _bytes(inputs)
    if call.op in PICKS:
        source = [each for each in inputs if has_numbers(each)]
        read = min(_bytes(source), made) + _bytes(each for each in inputs if not has_numbers(each))
    return read + made, _backward_bytes(call, inputs, outputs)


def _backward_bytes(call: Node, inputs: Sequence[Value], outputs: Sequence[Value]) -> int:
    wanting = [each for each in inputs if each.requires_grad and has_numbers(each)]
    given = [each for each in outputs if each.requires_grad and has_numbers(each)]
    if not call.grad or not wanting or not given or call.op in SPLITS_GRADIENT:
        return 0
    if call.op in HANDS_GRADIENT_ON:
        one = given[0]
        wanting = [each for each in wanting if (each.shape, each.dtype) != (one.shape, one.dtype)]
        return _bytes(given) + _bytes(wanting) if wanting else 0
    return _bytes(given) + _kept_bytes(call, inputs) + _bytes(wanting)


def _kept_bytes(call: Node, inputs: Sequence[Value]) -> int:
    """Return what backward reads of what forward kept."""
    if call.op in SAVES_NOTHING:
        return _bytes(each for each in inputs if not has_numbers(each))
    if call.op in SAVES_EACH_OTHER:
        if len(inputs) < 2:  # by a number, or with itself
            return _bytes(inputs) if len(call.inputs) > 1 else 0
        one, other = inputs[:2]
        return (_bytes([other]) if one.requires_grad else 0) + (_bytes([one]) if other.requires_grad else 0)
    return _bytes(inputs)


def _different(tensors: Iterable[Value]) -> list[Value]:
    """Return each tensor once."""
    return list({(each.storage, each.shape, each.strides, each.dtype): each for each in tensors}.values())


def _bytes(tensors: Iterable[Value]) -> int:
    return sum(map(memory_bytes, tensors))


def memory_bytes(tensor: Value) -> int:
    """Return the bytes of the memory behind a tensor: an expanded dimension is there once."""
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


# One call does the work of a whole layer, or an amount that depends on the content: its tensors do not tell.
_UNKNOWN = names(
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell multi_head_attention_forward ctc_loss",
    "sort argsort topk unique unique_consecutive cdist svd eigh eig qr cholesky inverse solve lstsq matrix_exp",
    "backward fft ifft rfft irfft fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn stft istft",
)

# A node of somebody's own Function, or of a compiled region: the recorded calls do not hold its work.
_OWN_NODE = re.compile(r"Backward$|^GeneratedBackward|CppNode")
_KNOWN_SPACES = ("aten", "prim", "autograd", "torch", "profiler")

# The share of a time that must be explained before it has a name.
_MOST = 0.5


@dataclass(frozen=True, slots=True)
class Work:
    """What a layer's own operations do in one step.

    Attributes:
        forward_bytes, backward_bytes: moved at least.
        forward_flops, backward_flops: None: not counted.
        dtypes: of its products, as :class:`Limits` names their rates.
        calls: of torch's operations, forward and backward.
    """

    forward_bytes: int
    backward_bytes: int
    forward_flops: int | None
    backward_flops: int | None
    dtypes: tuple[str, ...] = ()
    calls: float = 0.0


def bounded(case: Case) -> tuple[LayerRow, ...]:
    """The run's layers with ``bytes`` where their calls are known, and what limits them where the machine's limits are.

    Self values. ``bound_by``, see :func:`bound_by`.
    """
    found = works(case)
    rows = []
    for row in case.run.layers:
        work = found.get(row.path)
        if work is not None:
            row = replace(row, bytes=work.forward_bytes + work.backward_bytes)
            limit = at_limit_ns(work, case.limits)
            if limit is not None and case.limits is not None:
                kind = bound_by(row, work, case.limits, on_cuda=case.on_cuda)
                row = replace(row, forward_limit_ns=limit[0], backward_limit_ns=limit[1], bound_by=kind)
        rows.append(row)
    return tuple(rows)


def at_limit_ns(work: Work, limits: Limits | None) -> tuple[int, int] | None:
    """Forward and backward of a layer where nothing but its products or its bytes takes time; None: not known."""
    rate = _rate(work, limits)
    if limits is None or rate is None or work.forward_flops is None or work.backward_flops is None:
        return None
    return (
        round(max(work.forward_flops / rate, work.forward_bytes / limits.bytes) * 1e9),
        round(max(work.backward_flops / rate, work.backward_bytes / limits.bytes) * 1e9),
    )


def bound_by(row: LayerRow, work: Work, limits: Limits, *, on_cuda: bool) -> str | None:
    """Return what limits the layer: "compute", "bandwidth", "overhead" or "waiting"; None where it is not known.

    overhead: its calls, at what the smallest costs, explain half of the measured time or more. On a GPU the device must
    have been idle for half of it, since calls are made while it works; idle without so many calls is waiting.
    Else the larger of the times that its products and its bytes take.
    """
    rate = _rate(work, limits)
    measured = row.forward_self_ns + row.backward_self_ns
    if rate is None or work.forward_flops is None or work.backward_flops is None or measured <= 0:
        return None
    overhead = work.calls * limits.call_ns >= measured * _MOST
    if on_cuda:
        if row.idle_ns is not None and row.idle_ns > row.backward_self_ns * _MOST:
            return "overhead" if overhead else "waiting"
    elif overhead:
        return "overhead"
    compute = (work.forward_flops + work.backward_flops) / rate
    bandwidth = (work.forward_bytes + work.backward_bytes) / limits.bytes
    if not compute and not bandwidth:
        return None
    return "compute" if compute >= bandwidth else "bandwidth"


def _rate(work: Work, limits: Limits | None) -> float | None:
    """Return FLOP a second of the fastest of the dtypes, so that the limit is one; None: not known."""
    if limits is None or limits.bytes <= 0:
        return None
    if not work.forward_flops and not work.backward_flops:
        return 1.0  # nothing to divide
    rates = [limits.flops.get(dtype) for dtype in work.dtypes]
    known = [rate for rate in rates if rate]
    return max(known) if known and len(known) == len(rates) else None


def works(case: Case) -> dict[str, Work]:
    """Return the work of layers, by path, for those whose work the recorded calls hold wholly."""
    if not case.facts.recorded:
        return {}
    calls = calls_of_layers(case)
    found = {}
    for path, row in case.layers.items():
        mine = calls.get(path, [])
        ops = [*case.ops.get((path, "forward"), ()), *case.ops.get((path, "backward"), ())]
        if _whole(mine, ops):
            found[path] = _work(row, mine, ops, _tf32(case))
    return found


def calls_of_layers(case: Case) -> dict[str, list[Node]]:
    """By the path of the innermost layer, also inside modules of torch's own: those of an nn.Linear in an nn.Sequential
    are recorded as the latter's."""
    found: defaultdict[str, list[Node]] = defaultdict(list)
    inside: defaultdict[str, list[Node]] = defaultdict(list)
    parents = {row.parent for row in case.run.layers}
    for call in case.facts.calls:
        if call.layer is not None:
            (inside if call.module is not None and call.layer in parents else found)[call.layer].append(call)
    below = _below(case, inside)
    for path, calls in inside.items():
        own = any(op.name.startswith(ATEN) for op in case.ops.get((path, "forward"), ()))
        for call, owner in zip(calls, _owners(calls, below[path]), strict=True):
            if owner is not None or own:  # a call that is nobody's leaves its layer without any: not known
                found[path if owner is None else owner].append(call)
    return dict(found)


def _below(case: Case, paths: Collection[str]) -> dict[str, list[LayerRow]]:
    """The layers below each of these, in the tree of paths, that were called."""
    found: dict[str, list[LayerRow]] = {path: [] for path in paths}
    for row in case.run.layers:
        above = row.parent if row.calls else None
        while above is not None:
            if above in found:
                found[above].append(row)
            above = case.layers[above].parent if above in case.layers else None
    return found


def _owners(calls: Sequence[Node], layers: Sequence[LayerRow]) -> list[str | None]:
    """Return which of these layers made each call: by its parameters, or the layers in their order by their class."""
    paths = {row.path for row in layers}
    found = [next((path for path in _parameters_of(call) if path in paths), None) for call in calls]
    by_class: defaultdict[str, list[str]] = defaultdict(list)
    for row in layers:
        by_class[row.class_name.lower()] += [row.path] * round(row.calls)
    for op in {call.op for call, owner in zip(calls, found, strict=True) if owner is None}:
        places = [index for index, call in enumerate(calls) if found[index] is None and call.op == op]
        made = by_class.get(op.replace("_", ""), [])
        if len(made) == len(places):
            for index, path in zip(places, made, strict=True):
                found[index] = path
    return found


def _parameters_of(call: Node) -> list[str]:
    """Return the layers whose parameters and buffers the call was given."""
    return [each.parameter.rpartition(".")[0] for each in call.inputs if each.parameter is not None]


def _work(row: LayerRow, calls: Sequence[Node], ops: Iterable[OpRow], tf32: Mapping[str, bool]) -> Work:
    moved = [call_bytes(call) for call in calls]
    return Work(
        forward_bytes=sum(forward for forward, _ in moved),
        backward_bytes=sum(backward for _, backward in moved),
        forward_flops=row.forward_flops,
        backward_flops=row.backward_flops,
        dtypes=_dtypes(calls, tf32),
        calls=sum(op.calls for op in ops if op.name.startswith(ATEN)),
    )


def _whole(calls: Sequence[Node], ops: Sequence[OpRow]) -> bool:
    """Check that the recorded calls hold all that the layer's rows of the trace are from."""
    if any(call.op in _UNKNOWN for call in calls):
        return False
    spaces = (op.name.partition("::")[0] for op in ops if "::" in op.name)
    if any(space not in _KNOWN_SPACES for space in spaces) or any(_OWN_NODE.search(op.name) for op in ops):
        return False
    return bool(calls) or not any(op.name.startswith(ATEN) for op in ops)


def _tf32(case: Case) -> Mapping[str, bool]:
    """Say of products and of convolutions whether those of float32 run in TF32."""
    if not case.on_cuda:
        return {}
    return {
        "conv": bool(case.facts.settings.get("cudnn_tf32")),
        "matmul": bool(case.run.environment.get("tf32")),
    }


def _dtypes(calls: Sequence[Node], tf32: Mapping[str, bool]) -> tuple[str, ...]:
    """Return the dtypes of the outputs: under autocast those that the matmul was computed in."""
    found: dict[str, None] = {}
    for call in calls:
        if call.op not in PRODUCTS:  # their FLOPs decide at which rate a layer can compute
            continue
        for made in filter(has_numbers, call.outputs[:1]):
            kind = "conv" if call.op in CONVOLUTIONS else "matmul"
            is_tf32 = made.dtype == torch.float32 and tf32.get(kind)
            found["tf32" if is_tf32 else made.dtype_name] = None
    return tuple(found)
