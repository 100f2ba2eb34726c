"""What lazy logits would be computed from, and the calls that were made on them since."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
    sample: Tensor | None  # of a weight that is trained: writing through .data counts no version
    fused: bool = False  # a loss was computed without the logits
    family: list[weakref.ref[Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, input: Tensor, weight: Tensor, bias: Tensor | None) -> Source:
        when, dtype = When.now(input.device.type), logits_dtype(input)
        sample = weight.detach().diagonal().clone() if when.grad else None
        made = cls(input, weight, bias, when, dtype, (), sample)
        made.versions = made.counts()
        return made

    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.input, self.weight, self.bias

    def counts(self) -> tuple[int, ...]:
        return tuple(tensor._version for tensor in self.tensors() if tensor is not None)

    def check(self, *, content: bool) -> None:
        """The operands are what they were. On a GPU the ``content`` is a wait for it.

        Raises:
            RuntimeError: they were changed, so that the logits can no longer be computed.
        """
        same = self.counts() == self.versions and self.weight.untyped_storage().size() > 0  # a sharded one is freed
        content = content and not (self.weight.is_cuda and torch.cuda.is_current_stream_capturing())
        if same and content and self.sample is not None:
            now = self.weight.detach().diagonal()
            same = bool(((now == self.sample) | now.isnan()).all())
        if not same:
            raise RuntimeError(
                "lazy_linear: the logits are read after the head's weight or input was changed in place; they are "
                "computed when they are first read, so read them before, as in logits = logits.detach()"
            )


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
