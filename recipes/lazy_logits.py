"""A head's logits that are computed only when somebody reads them; a loss takes what they would be computed from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from gradscope.recipes.lazy_calls import taken, with_bias
from gradscope.recipes.lazy_dispatch import computed, hidden_from_the_compiler, looked, name_of
from gradscope.recipes.lazy_tensor import LazyTensor, of_layer


class LazyLogits(LazyTensor):
    """Logits, or views, casts and the logarithmic softmax of them; a tensor like any other to all who read it."""


def lazy_logits(input: Tensor, weight: Tensor, bias: Tensor | None) -> LazyLogits:
    """``linear(input, weight, bias)``, computed when it is read."""
    hidden_from_the_compiler(LazyLogits)
    return of_layer(LazyLogits, input, weight, bias)


def _handled(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of torch's with lazy logits among its arguments."""
    name = name_of(func)
    for answer in looked(func, name, args, kwargs):
        return answer
    if args and isinstance(args[0], LazyLogits):
        made = taken(args[0], func, name, args[1:], kwargs)
        if made is not None:
            return made
    if name == "add" and len(args) == 2 and not kwargs:
        made = with_bias(args[0], args[1])
        if made is not None:
            return made
    return computed(func, name, args, kwargs)


LazyLogits.handle = staticmethod(_handled)
