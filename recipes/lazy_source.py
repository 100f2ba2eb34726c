"""What lazy tensors would be computed from, and the calls that were made on them since."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradscope.recipes.lazy_graph import When
from gradscope.recipes.linear_cross_entropy_arguments import logits_dtype


@dataclass(eq=False)
class Source:
    """What a lazy tensor is computed from, and what became of it."""

    when: When
    dtype: torch.dtype  # of the result
    compute: Callable[..., Tensor]  # of the operands
    versions: tuple[int, ...] = ()
    kept: tuple[Tensor | None, ...] | None = None  # the operands' content before an optimizer's step
    fused: bool = False  # something else was computed from the operands, which gives the lazy tensor no gradient
    family: list[weakref.ref[Tensor]] = field(default_factory=list)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The operands."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the result is."""
        return next(tensor.device for tensor in self.tensors() if tensor is not None)

    def watch(self) -> None:
        """Note what the operands are now; parameters among them are kept before an optimizer's step changes them."""
        self.versions = self.counts()
        if any(is_learnt(tensor) for tensor in self.tensors()):
            _watch_steps(self)

    def counts(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in self.tensors() if tensor is not None)

    def check(self, *, content: bool) -> None:
        """The operands are what they were. On a GPU the ``content`` is a wait for it.

        Raises:
            RuntimeError: they were changed, so that the result can no longer be computed.
        """
        if not self._is_same(content=content):
            raise RuntimeError(self.changed())

    def changed(self) -> str:
        """What to say where the operands are no longer what they were."""
        raise NotImplementedError

    def partial(self, name: str) -> str:
        """What to say where the call ``name`` asks for a gradient that lacks a part; empty where it lacks none."""
        return ""

    def _is_same(self, *, content: bool) -> bool:
        if self.kept is not None:
            return True
        freed = any(each is not None and each.untyped_storage().size() == 0 < each.numel() for each in self.tensors())
        if self.counts() != self.versions or freed:  # a sharded one is freed
            return False
        return not content or self._holds_the_same()

    def _holds_the_same(self) -> bool:
        """Check what counts no version, where that can be."""
        return True

    def keep(self, changed: Set[int]) -> None:
        """Keep the operands that are ``changed`` by their ids as they are now, where somebody may read the result."""
        held = any(member is not None and member._lazy.plain is None for member in (each() for each in self.family))  # type: ignore[attr-defined]
        if self.kept is None and held and self._is_same(content=False):
            self.kept = tuple(
                None if each is None else each.detach().clone() if _is_in(changed, each) else each.detach()
                for each in self.tensors()
            )


@dataclass(eq=False, kw_only=True)
class LinearSource(Source):
    """A linear layer's operands."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    samples: tuple[Tensor, ...] = ()  # writing through .data counts no version

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, bias: Tensor | None) -> LinearSource:
        when = When.now(input.device.type)
        made = cls(when, logits_dtype(input), functional.linear, input=input, weight=weight, bias=bias)
        made.samples = made.sampled()
        made.watch()
        return made

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.input, self.weight, self.bias

    def sampled(self) -> tuple[Tensor, ...]:
        """One number of each row of the operands."""
        rows = torch.arange(self.weight.shape[0], device=self.weight.device)
        weight = self.weight.detach()[rows, rows % self.weight.shape[1]]
        found = [weight, self.input.detach()[..., self.input.shape[-1] // 2].clone()]
        return (*found, self.bias.detach().clone()) if self.bias is not None else tuple(found)

    def changed(self) -> str:
        return (
            "lazy_linear: the logits are computed at their first read, but the head's weight or "
            "input was modified in place before it. Read them earlier, for example with logits = "
            "logits.detach()"
        )

    def partial(self, name: str) -> str:
        made = (
            f"lazy_linear: {name} needs the gradient of the logits, but the loss was computed without "
            "materializing them"
        )
        return made if self.fused else ""

    def _holds_the_same(self) -> bool:
        if self.weight.is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        pairs = zip(self.samples, self.sampled(), strict=True)
        return all(bool(((now == then) | now.isnan()).all()) for then, now in pairs)


def is_learnt(tensor: Tensor | None) -> bool:
    """Check that it is a parameter, or a view of one: a parameter's transpose is made for one call alone."""
    owner = tensor if tensor is None or tensor._base is None else tensor._base
    return owner is not None and owner.is_leaf and owner.requires_grad


def _is_in(ids: Set[int], tensor: Tensor | None) -> bool:
    return tensor is not None and (id(tensor) in ids or id(tensor._base) in ids)


_alive: weakref.WeakSet[Source] = weakref.WeakSet()
_handles: list[Any] = []


def _watch_steps(source: Source) -> None:
    """Let sources keep what they need before an optimizer changes it, for as long as there are any."""
    weakref.finalize(source, _stop_watching).atexit = False  # called last: the newest reference is told first
    _alive.add(source)
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before_step))


def _stop_watching() -> None:
    if not _alive:
        while _handles:
            _handles.pop().remove()


def _before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
    sources = list(_alive)
    if sources:
        changed = {id(each) for group in optimizer.param_groups for each in group["params"]}
        for source in sources:
            if any(_is_in(changed, each) for each in source.tensors()):
                source.keep(changed)


@dataclass(frozen=True, slots=True)
class Step:
    """One call on lazy logits that left them lazy."""

    name: str
    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    when: When
    classes: int  # the dimension of the classes before
    shape: tuple[int, ...]  # of the result
