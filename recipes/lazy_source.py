"""What lazy logits would be computed from, and the calls that were made on them since."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradscope.recipes.lazy_graph import When
from gradscope.recipes.linear_cross_entropy_arguments import logits_dtype


@dataclass(eq=False)
class Source:
    """A linear layer's operands, and what became of its logits."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    when: When
    dtype: torch.dtype  # of the logits
    versions: tuple[int, ...]
    samples: tuple[Tensor, ...]  # writing through .data counts no version
    kept: tuple[Tensor, Tensor, Tensor | None] | None = None  # the operands' content before an optimizer's step
    fused: bool = False  # a loss was computed without the logits
    family: list[weakref.ref[Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, bias: Tensor | None) -> Source:
        made = cls(input, weight, bias, When.now(input.device.type), logits_dtype(input), (), ())
        made.versions, made.samples = made.counts(), made.sampled()
        _watch_steps(made)
        return made

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.input, self.weight, self.bias

    def held(self) -> tuple[Tensor | None, ...]:
        """Weight and bias, and what they are views of: a parameter's transpose is made for this call alone."""
        views = (each for each in (self.weight, self.bias) if each is not None)
        return self.weight, self.bias, *(each._base for each in views)

    def counts(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in self.tensors() if tensor is not None)

    def sampled(self) -> tuple[Tensor, ...]:
        """One number of each row of the operands."""
        rows = torch.arange(self.weight.shape[0], device=self.weight.device)
        weight = self.weight.detach()[rows, rows % self.weight.shape[1]]
        found = [weight, self.input.detach()[..., self.input.shape[-1] // 2].clone()]
        return (*found, self.bias.detach().clone()) if self.bias is not None else tuple(found)

    def check(self, *, content: bool) -> None:
        """The operands are what they were. On a GPU the ``content`` is a wait for it.

        Raises:
            RuntimeError: they were changed, so that the logits can no longer be computed.
        """
        if not self._is_same(content=content):
            raise RuntimeError(
                "lazy_linear: the logits are read after the head's weight or input was changed in place; they are "
                "computed when they are first read, so read them before, as in logits = logits.detach()"
            )

    def _is_same(self, *, content: bool) -> bool:
        if self.kept is not None:
            return True
        if self.counts() != self.versions or self.weight.untyped_storage().size() == 0:  # a sharded one is freed
            return False
        if not content or (self.weight.is_cuda and torch.cuda.is_current_stream_capturing()):
            return True
        pairs = zip(self.samples, self.sampled(), strict=True)
        return all(bool(((now == then) | now.isnan()).all()) for then, now in pairs)

    def keep(self) -> None:
        """Keep the weight as it is now, for somebody who reads the logits later; nothing where nobody can."""
        held = any(member is not None and member._lazy.plain is None for member in (each() for each in self.family))  # type: ignore[attr-defined]
        if self.kept is None and held and self._is_same(content=False):
            bias = None if self.bias is None else self.bias.detach().clone()
            self.kept = self.input.detach(), self.weight.detach().clone(), bias


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
            if any(id(each) in changed for each in source.held()):
                source.keep()


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
