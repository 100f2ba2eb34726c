"""Tensors that stand for a result, or a view of it, before it is computed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gradscope.recipes.lazy_graph import Deferred, Released, When
from gradscope.recipes.lazy_source import LinearSource, Source, Step


@dataclass(eq=False)
class Lazy:
    """What a lazy tensor stands for."""

    source: Source
    steps: tuple[Step, ...]  # from the source's result
    parent: LazyTensor | None
    classes: int = -1  # logits: the dimension of the classes
    logarithmic: bool = False  # logits: log_softmax was one of the steps
    node: object = None  # its grad_fn when it was made
    plain: Tensor | None = None


class LazyTensor(Tensor):
    """A tensor without content; :mod:`gradscope.recipes.lazy_dispatch` says what calls from Python do with it.

    What comes from below Python, as from another Function, reads the content.
    """

    _lazy: Lazy
    handle: ClassVar[Callable[..., Any]]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.handle(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*mapped(args, content), **mapped(kwargs or {}, content))


_T = TypeVar("_T", bound=LazyTensor)


def stand_in(kind: type[_T], lazy: Lazy, like: Tensor) -> _T:
    """A tensor of the form of ``like``, without content, for what ``lazy`` says."""

    source = lazy.source

    def make() -> Tensor:
        wrapper = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            kind, like.shape, strides=like.stride(), dtype=like.dtype, device=source.device
        )
        wrapper._lazy = lazy
        return wrapper

    compute = functools.partial(_replayed, source.when, source.compute, lazy.steps)
    with torch.set_grad_enabled(takes_gradients(lazy) and torch.is_grad_enabled()):
        made: _T = Deferred.apply(make, compute, *source.tensors())  # type: ignore[no-untyped-call]
    lazy.node = _node(made)
    source.family.append(weakref.ref(made))
    return made


def of_layer(kind: type[_T], input: Tensor, weight: Tensor, bias: Tensor | None) -> _T:
    """``linear(input, weight, bias)``, without content."""
    source = LinearSource.of(input, weight, bias)
    like = torch.empty((*input.shape[:-1], weight.shape[0]), dtype=source.dtype, device="meta")
    return stand_in(kind, Lazy(source, (), None, input.dim() - 1), like)


def _replayed(when: When, compute: Callable[..., Tensor], steps: tuple[Step, ...], *tensors: Tensor | None) -> Tensor:
    with when.autocasting():
        result = compute(*tensors)
    for step in steps:
        with step.when.autocasting():
            result = step.function(result, *step.args, **step.kwargs)
    return result


def takes_gradients(lazy: Lazy) -> bool:
    """Check that gradients were recorded in every call that the lazy tensor comes from."""
    return lazy.source.when.grad and all(step.when.grad for step in lazy.steps)


def _node(logits: Tensor) -> object:
    with torch._C.DisableTorchFunctionSubclass():
        return logits.grad_fn if logits.grad_fn is not None else logits.requires_grad


def mapped(arguments: Any, each: Callable[[LazyTensor], Tensor]) -> Any:
    """Arguments with ``each`` in place of every lazy tensor."""
    kind = type(arguments)
    if isinstance(arguments, LazyTensor):
        return each(arguments)
    if kind is tuple:
        return tuple(mapped(part, each) for part in arguments)
    if kind is list:
        return [mapped(part, each) for part in arguments]
    if kind is dict:
        return {name: mapped(part, each) for name, part in arguments.items()}
    if isinstance(arguments, tuple):  # with names
        return tree_map(lambda part: each(part) if isinstance(part, LazyTensor) else part, arguments)
    return arguments


def looked_at(logits: LazyTensor) -> Tensor:
    """The tensor that has the logits' form and graph: themselves, or what they were computed to."""
    return logits if logits._lazy.plain is None else logits._lazy.plain


def content(logits: LazyTensor) -> Tensor:
    """The values alone, for calls from below autograd."""
    lazy = logits._lazy
    if lazy.plain is not None:
        return lazy.plain.detach()
    with torch.no_grad():
        if lazy.parent is not None and lazy.parent._lazy.plain is not None:
            step = lazy.steps[-1]
            with step.when.autocasting():
                return step.function(lazy.parent._lazy.plain.detach(), *step.args, **step.kwargs)
        lazy.source.check(content=True)
        operands = lazy.source.kept or lazy.source.tensors()
        return _replayed(lazy.source.when, lazy.source.compute, lazy.steps, *(_detached(each) for each in operands))


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def is_adopted(logits: LazyTensor) -> bool:
    """Check that somebody below Python gave the logits another graph, as reentrant checkpointing does."""
    return logits._lazy.plain is None and _node(logits) is not logits._lazy.node


def plain(logits: LazyTensor) -> Tensor:
    """The tensor itself, computed once, in the modes in which it was called for."""
    lazy = logits._lazy
    if lazy.plain is None:
        if is_adopted(logits) or lazy.source.kept is not None:
            with torch.enable_grad():
                lazy.plain = Released.apply(logits, content(logits))  # type: ignore[no-untyped-call]
        elif lazy.parent is None:
            lazy.source.check(content=True)
            with lazy.source.when.again():
                lazy.plain = lazy.source.compute(*lazy.source.tensors())
        else:
            step = lazy.steps[-1]
            parent = plain(lazy.parent)
            with step.when.again():
                lazy.plain = step.function(parent, *step.args, **step.kwargs)
            lazy.parent = None
    assert lazy.plain is not None
    return lazy.plain


def is_computed(logits: LazyTensor | None) -> bool:
    """Check that the logits, or what they are a view of, have been computed."""
    while logits is not None:
        if logits._lazy.plain is not None:
            return True
        logits = logits._lazy.parent
    return False


def family(source: Source) -> Iterator[LazyTensor]:
    """The tensors that live of those made of one source."""
    for reference in source.family:
        member = reference()
        if isinstance(member, LazyTensor):
            yield member
