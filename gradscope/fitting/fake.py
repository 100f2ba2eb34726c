"""What a step keeps at batch sizes that are not run: the model on tensors without data, against the forecast.

Fake tensors go through the user's own forward and loss and have shapes but no memory, so a model that takes another
path from some batch size on is seen to do so. Temporaries inside an operation are not seen, and nothing that depends on
values can be computed.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from gradscope.capture.state import preserved
from gradscope.compat import is_compiled_module
from gradscope.errors import WorkloadError
from gradscope.fitting.batches import leaves, mapped
from gradscope.fitting.predict import through
from gradscope.tree import modules_of, named_buffers_of, named_parameters_of
from gradscope.workload import Workload, call_model, import_path, scalar_loss


class UnknownShapeError(Exception):
    """The batch of some size cannot be made from its shapes; the message says why, without a full stop."""


class BatchShapes:
    """What batches of all sizes look like. Nothing of a batch but its shapes is kept.

    Args:
        target: for messages.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._seen: dict[int, dict[str, Any]] = {}  # batch size -> leaf's name -> a tensor without data, or a value
        self._devices: dict[str, torch.device] = {}
        self._structure: Any = None

    def note(self, size: int, batch: Any) -> None:
        """Read the batch of ``size`` samples; two or more sizes make a law."""
        self._structure = mapped(batch, lambda _, leaf: _without_data(leaf))
        self._seen[size] = dict(leaves(self._structure))
        self._devices = {name: leaf.device for name, leaf in leaves(batch) if isinstance(leaf, torch.Tensor)}

    def require_growth(self) -> None:
        """Raise :class:`WorkloadError` if the batches of all sizes are of the same shapes."""
        first, last = min(self._seen), max(self._seen)
        if _lengths(self._seen[first]) == _lengths(self._seen[last]):
            raise WorkloadError(
                f"{self._target}: the batches for batch_size={first} and batch_size={last} have the same "
                "shapes.\nCreate a batch with batch_size samples."
            )

    def empty(self, size: int) -> Any:
        """The batch of ``size`` samples from ``torch.empty``; inside a ``FakeTensorMode`` it takes no memory.

        Raises:
            UnknownShapeError: shapes do not grow evenly, or something beside the tensors changes with the size.
        """
        return mapped(self._structure, lambda name, leaf: self._leaf(name, leaf, size))

    def _leaf(self, name: str, leaf: Any, size: int) -> Any:
        found = [seen.get(name) for seen in self._seen.values()]
        if not isinstance(leaf, torch.Tensor):
            if all(type(other) is type(leaf) and other == leaf for other in found):
                return leaf
            raise UnknownShapeError(f"{name} changes with the batch size")
        rows = [(*other.shape, *other.stride()) for other in found if isinstance(other, torch.Tensor)]
        if {len(row) for row in rows} != {2 * leaf.dim()} or len(rows) < len(found):
            raise UnknownShapeError(f"the number of dimensions of {name} changes with the batch size")
        numbers = [self._grown(name, values, size) for values in zip(*rows, strict=True)]
        shape, strides = numbers[: leaf.dim()], numbers[leaf.dim() :]
        made = torch.empty_strided(shape, strides, dtype=leaf.dtype, device=self._devices[name])
        return made.requires_grad_(leaf.requires_grad)

    def _grown(self, name: str, values: tuple[int, ...], size: int) -> int:
        """The number that was ``values`` at the sizes seen, at ``size``, if it grows evenly."""
        sizes = list(self._seen)
        slope = Fraction(values[-1] - values[0], sizes[-1] - sizes[0])
        if any(values[0] + slope * (known - sizes[0]) != value for known, value in zip(sizes, values, strict=True)):
            raise UnknownShapeError(f"the shape of {name} does not grow linearly with the batch size")
        return round(values[0] + slope * (size - sizes[0]))


def _without_data(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return made.requires_grad_(leaf.requires_grad)


def _lengths(found: dict[str, Any]) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in found.values() if isinstance(leaf, torch.Tensor)]


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
    if any(map(is_compiled_module, modules_of(workload.model))):
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


_REASONS = {
    "DataDependentOutputException": "the model reads a tensor value (.item(), bool() or a comparison) for control flow",
    "DynamicOutputShapeException": "the shape of a result depends on values (nonzero, a mask as an index, unique)",
}


def _reason(error: Exception) -> str:
    known = _REASONS.get(type(error).__name__)
    if known is not None:
        return known
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}".rstrip(".") if lines else type(error).__name__


# Differences below this share of what a forward keeps are its loss and other small things, and corrected silently.
TOLERANCE = 0.01


class FakeCheck:
    """What forward keeps at any batch size against what the measured sizes lead to expect.

    Fake tensors are compared with fake tensors: where their operations differ a little from the real ones (another
    attention kernel), they do at every size.

    Args:
        workload: its batch is not looked at.
        shapes: of the batches of all sizes.
        measured: batch sizes that the forecast is made from.
        device: where the model is moved to.

    Attributes:
        unchecked: why nothing can be compared; None where it can.
    """

    def __init__(
        self, workload: Workload, shapes: BatchShapes, measured: Sequence[int], device: torch.device | None = None
    ) -> None:
        self._workload, self._shapes, self._device = workload, shapes, device
        self._held: dict[int, int | UncheckedError] = {}
        self.unchecked: str | None = None
        points = []
        for size in sorted(measured):
            held = self._at(size)
            if isinstance(held, UncheckedError):
                self.unchecked = str(held)
                return
            points.append((size, held))
        self._expected = through(points)

    def difference(self, size: int) -> int:
        """Bytes that forward keeps at ``size`` beyond what was expected; negative where it keeps less.

        Raises:
            UncheckedError: see :func:`~gradscope.fitting.fake.held_by_forward`.
        """
        if self.unchecked is not None:
            raise UncheckedError(self.unchecked)
        held = self._at(size)
        if isinstance(held, UncheckedError):
            raise held
        return held - self._expected.at(size)

    def agrees(self, size: int) -> bool:
        """Check that :meth:`difference` is too small to speak of."""
        return abs(self.difference(size)) <= TOLERANCE * self._expected.at(size)

    def _at(self, size: int) -> int | UncheckedError:
        found = self._held.get(size)
        if found is None:
            try:
                found = held_by_forward(self._workload, self._shapes, size, self._device)
            except UncheckedError as reason:
                found = reason
            self._held[size] = found
        return found
