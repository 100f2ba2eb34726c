"""Puts the user's model, optimizer and random state back as they were before the steps."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_PLAIN = (int, float, complex, bool, str, bytes, type(None))


@contextmanager
def preserved(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, device: torch.device | None = None
) -> Iterator[None]:
    """Restore everything a training step changes when the block is left, also by an exception.

    Args:
        model: may be changed freely inside the block.
        optimizer: may be stepped inside the block.
        device: where the model is inside the block; None leaves it where it is.

    Restored bit for bit: parameters (copied only when an optimizer may step), their gradients, every buffer, plain
    Python attributes of modules, train/eval flags, hooks' absence, the optimizer's state, and the random state of
    Python, NumPy, torch and every CUDA device. Tensors keep their identity.
    """
    home = next((tensor.device for tensor in model.parameters()), None)
    moves = device is not None and home is not None and home.type != device.type
    modules = list(model.modules())
    parameters = list(model.parameters())
    gradients = [_kept_gradient(parameter) for parameter in parameters]
    values = [parameter.detach().clone() for parameter in parameters] if optimizer is not None else []
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    attributes = [{name: value for name, value in vars(m).items() if isinstance(value, _PLAIN)} for m in modules]
    registered = [dict(module._buffers) for module in modules]
    optimizer_state = copy.deepcopy(optimizer.state_dict()) if optimizer is not None else None
    restore_random = _random_state()
    if moves:
        model.to(device)
    try:
        yield
    finally:
        restore_random()
        if moves:
            model.to(home)
        with torch.no_grad():
            for module, tensors, plain in zip(modules, registered, attributes, strict=True):
                module._buffers.update(tensors)
                vars(module).update(plain)
            for buffer, value in buffers:
                buffer.copy_(value)
            for parameter, value in zip(parameters, values, strict=False):
                parameter.copy_(value)
            for parameter, (gradient, content) in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
                if gradient is not None and content is not None:
                    gradient.copy_(content)
        if optimizer is not None and optimizer_state is not None:
            _restore_optimizer(optimizer, optimizer_state)


def _kept_gradient(parameter: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    gradient = parameter.grad
    return gradient, gradient.detach().clone() if gradient is not None else None


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    if not saved["state"]:
        # load_state_dict would keep the states that the steps have made.
        optimizer.state.clear()
    optimizer.load_state_dict(saved)


def _random_state() -> Any:
    """A function that puts the random state of this moment back."""
    python = random.getstate()
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    numpy = sys.modules.get("numpy.random")
    numpy_state = numpy.get_state() if numpy is not None else None

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy is not None:
            numpy.set_state(numpy_state)

    return restore
