"""What a forward keeps at a batch size that is not run: the model on tensors without data.

Fake tensors go through the user's own forward and loss and have shapes but no memory, so a model that takes another
path from some batch size on is seen to do so. Temporaries inside an operation are not seen, and nothing that depends on
values can be computed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gradscope.capture.state import preserved
from gradscope.fitting.shapes import BatchShapes, UnknownShapeError
from gradscope.tree import modules_of, named_buffers_of, named_parameters_of
from gradscope.workload import Workload, call_model, import_path, scalar_loss


class UncheckedError(Exception):
    """The model cannot run on fake tensors; the message is a reason, without a full stop."""


def held_by_forward(workload: Workload, shapes: BatchShapes, size: int, device: torch.device | None = None) -> int:
    """Bytes that forward and loss leave alive for backward at a batch size of ``size``, without running it.

    Storages made in the forward that are alive when it ends, each counted once: what nodes of the graph saved, what
    checkpoints and the model itself keep, and the output. Parameters, buffers and the batch are not among them. The
    model, its buffers, its attributes and the random state are as before.

    Args:
        workload: its batch is not looked at.
        shapes: of the batches of all sizes.
        size: the batch size.
        device: where the model is during the run; None leaves it.

    Raises:
        UncheckedError: the model needs values, compiled code, or operations that fake tensors do not have.
    """
    if _is_compiled(workload.model):
        raise UncheckedError("torch.compile does not run on fake tensors")
    with preserved(workload.model, device=device), import_path(workload.folder), _without_collector():
        try:
            return _held(workload, shapes, size)
        except UnknownShapeError as reason:
            raise UncheckedError(str(reason)) from None
        except Exception as error:  # whatever the model says about tensors without data is the reason
            raise UncheckedError(_reason(error)) from None


def _held(workload: Workload, shapes: BatchShapes, size: int) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode  # not public: a torch without it cannot check, no more

    # Tensors that the model or its loss hold beside parameters and buffers become fake where they are used.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    state: dict[str, torch.Tensor] = {name: mode.from_tensor(tensor) for name, tensor in _state(workload.model)}
    watch = _StorageWatch()

    def call(*args: Any, **kwargs: Any) -> Any:
        return functional_call(workload.model, state, args, kwargs)

    with mode:
        batch = shapes.empty(size)
        with watch:
            output = call_model(call, batch)
            loss, _ = scalar_loss(output, batch, workload.loss, workload.model)
    held = watch.alive_bytes()
    del output, loss
    return held


def _state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from named_parameters_of(model)
    yield from named_buffers_of(model)


class _StorageWatch(TorchDispatchMode):
    """Notes every storage that an operation makes, and keeps none of them alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_key(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and (key := _key(tensor)) not in given:
                storage = tensor.untyped_storage()
                self._seen[key] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive_bytes(self) -> int:
        return sum(size for reference, size in self._seen.values() if not reference.expired())


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Nothing is collected by chance inside: reference cycles live as long at every batch size."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_compiled(model: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None or hasattr(module, "_orig_mod") for module in modules_of(model))


_REASONS = {
    "DataDependentOutputException": "the model reads a value (.item(), bool() or a comparison) to decide what it does",
    "DynamicOutputShapeException": "the shape of a result depends on values (nonzero, a mask as an index, unique)",
}


def _reason(error: Exception) -> str:
    known = _REASONS.get(type(error).__name__)
    if known is not None:
        return known
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}".rstrip(".") if lines else type(error).__name__
