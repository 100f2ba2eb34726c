"""The autograd graph of tensors that are computed later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class When:
    """The modes under which a call was made."""

    device: str
    grad: bool
    autocast: bool
    dtype: torch.dtype  # autocast's

    @classmethod
    def now(cls, device: str) -> When:
        """The modes of this moment."""
        return cls(device, torch.is_grad_enabled(), torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run a block under them; in inference mode nothing is made to wait."""
        with torch.inference_mode(False), torch.set_grad_enabled(self.grad), self.autocasting():
            yield

    def autocasting(self) -> torch.autocast:
        """Autocast as it was."""
        return torch.autocast(self.device, dtype=self.dtype, enabled=self.autocast)


class Deferred(torch.autograd.Function):
    """``make()``, as a tensor whose gradient is that of ``compute(*sources)``.

    Autograd sees a node like any other, so that what runs below Python, as other Functions' ``apply``, finds its way.
    """

    @staticmethod
    def forward(
        ctx: Any, make: Callable[[], Tensor], compute: Callable[..., Tensor], *sources: Tensor | None
    ) -> Tensor:
        ctx.compute = compute
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*sources)
        return make()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        if upstream is None:
            return None, None, *(None for _ in needed)
        keep = torch.is_grad_enabled()
        with torch.enable_grad():
            # Aliases: a tied weight is also behind the input, and that way is not gone here.
            sources = [None if source is None else source.view_as(source) for source in ctx.saved_tensors]
            wanted = [source for source, need in zip(sources, needed, strict=True) if source is not None and need]
            found = iter(torch.autograd.grad(ctx.compute(*sources), wanted, upstream, create_graph=keep))
        return None, None, *(next(found) if need else None for need in needed)


class Rebased(torch.autograd.Function):
    """Makes the gradient of ``held`` that of ``computed`` from now on."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, computed: Tensor) -> Tensor:
        ctx.mark_dirty(held)
        return held

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[None, Tensor]:
        return None, upstream


class Released(torch.autograd.Function):
    """``content``, as the value of ``held``."""

    @staticmethod
    def forward(ctx: Any, held: Tensor, content: Tensor) -> Tensor:
        return content.view_as(content)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return upstream, None
