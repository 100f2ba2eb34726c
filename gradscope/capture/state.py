"""Puts the user's model, batch, optimizer and random state back as they were before the steps."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gradscope.capture.storages import tensors_in
from gradscope.tree import buffers_of, modules_of, parameters_of

Undo = Callable[[], None]


@contextmanager
def preserved(
    model: nn.Module,
    batch: Any = None,
    optimizer: torch.optim.Optimizer | None = None,
    device: torch.device | None = None,
) -> Iterator[list[torch.Tensor]]:
    """Restore everything a training step changes when the block is left, also by an exception.

    Yields the copies that are kept for that: memory that the steps themselves would not hold.

    Args:
        model: may be changed freely inside the block.
        batch: leaves in it that require a gradient get theirs back too.
        optimizer: may be stepped inside the block.
        device: where the model is inside the block; None leaves it where it is.

    Restored bit for bit: parameters (copied only when an optimizer may step), their gradients, every buffer, the
    attributes of every module with the contents of its own lists, dicts and sets, the optimizer's state, and the
    random state of Python, NumPy, torch and every CUDA device. Tensors and containers keep their identity. Parameters
    of a lazy module stay initialised.
    """
    leaves = [*parameters_of(model), *leaves_of(batch)]
    kept: list[torch.Tensor] = []
    undo: list[Undo] = [_random_state(kept), *(_gradient(leaf, kept) for leaf in leaves)]
    if optimizer is not None:
        undo.append(_optimizer_state(optimizer, kept))
        undo += [_content(parameter, kept) for parameter in _stepped(model, optimizer)]
    undo += [_content(buffer, kept) for buffer in buffers_of(model) if not is_lazy(buffer)]
    undo += [_attributes(module) for module in modules_of(model) if not isinstance(module, torch.jit.ScriptModule)]
    home = next((parameter.device for parameter in parameters_of(model)), None)
    moves = device is not None and home is not None and home.type != device.type
    if moves:
        model.to(device)
    try:
        yield kept
    finally:
        if moves:
            model.to(home)
        with torch.no_grad():
            for step in reversed(undo):  # the random state last: nothing that follows draws from it
                step()


def leaves_of(batch: Any) -> list[torch.Tensor]:
    """The tensors in a batch, at any depth of tuples, lists and mappings, that collect a gradient."""
    if isinstance(batch, torch.Tensor):
        return [batch] if batch.requires_grad and batch.is_leaf else []
    if isinstance(batch, Mapping):
        return [leaf for value in batch.values() for leaf in leaves_of(value)]
    if isinstance(batch, (tuple, list)):
        return [leaf for value in batch for leaf in leaves_of(value)]
    return []


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every parameter that a step may change: the model's, and what else the optimizer holds."""
    found = {id(parameter): parameter for parameter in parameters_of(model)}
    found |= {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in found.values() if not is_lazy(parameter)]


def _content(tensor: torch.Tensor, kept: list[torch.Tensor]) -> Undo:
    value = tensor.detach().clone()
    kept.append(value)

    def undo() -> None:
        tensor.detach().copy_(value)

    return undo


def _gradient(leaf: torch.Tensor, kept: list[torch.Tensor]) -> Undo:
    gradient = leaf.grad
    value = gradient.detach().clone() if gradient is not None else None
    if gradient is not None and value is not None:
        kept += (gradient, value)

    def undo() -> None:
        leaf.grad = gradient
        if gradient is not None and value is not None:
            gradient.detach().copy_(value)

    return undo


def _attributes(module: nn.Module) -> Undo:
    """Attributes, and what the module's own containers hold: hooks, buffers and submodules are among these."""
    if any(
        tensor is not None and is_lazy(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())
    ):
        return _nothing  # initialising removes hooks and changes the class: there is no way back
    before = dict(vars(module))
    refills = [_refill(value) for value in before.values() if type(value) in _CONTAINERS]

    def undo() -> None:
        now = vars(module)
        for name in [name for name in now if name not in before]:
            del now[name]
        now.update(before)
        for refill in refills:
            refill()

    return undo


_CONTAINERS = (list, dict, set, OrderedDict)


def _refill(container: Any) -> Undo:
    """Fill a container again with the members it has now; the members themselves are not copied."""
    content = container.copy()

    def undo() -> None:
        container.clear()
        if isinstance(container, list):
            container.extend(content)
        else:
            container.update(content)

    return undo


def _nothing() -> None:
    """Undo nothing."""


def _optimizer_state(optimizer: torch.optim.Optimizer, kept: list[torch.Tensor]) -> Undo:
    saved = copy.deepcopy(optimizer.state_dict())
    kept += tensors_in(saved["state"])

    def undo() -> None:
        # load_state_dict keeps states that the saved dict lacks.
        optimizer.state.clear()
        optimizer.load_state_dict(saved)

    return undo


def _random_state(kept: list[torch.Tensor]) -> Undo:
    python = random.getstate()
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    kept += (cpu, *(cuda or ()))
    numpy = sys.modules.get("numpy.random")
    numpy_state = numpy.get_state() if numpy is not None else None

    def undo() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        if numpy is not None:
            numpy.set_state(numpy_state)

    return undo
