"""Attention beside its weights, which are computed only when somebody reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from gradscope.kernels.attention.dropout import draw_seed
from gradscope.kernels.plain import why_torch
from gradscope.kernels.support import autocasts
from gradscope.recipes.attention import positive_scale
from gradscope.recipes.attention_arguments import Arguments, arguments
from gradscope.recipes.attention_backends import against, by_torch, taken
from gradscope.recipes.attention_by_hand import attention_weights, weighed
from gradscope.recipes.attention_function import AttentionFunction, AttentionSettings
from gradscope.recipes.lazy_dispatch import computed, hidden_from_the_compiler, looked, name_of
from gradscope.recipes.lazy_graph import When
from gradscope.recipes.lazy_source import Source, is_learnt
from gradscope.recipes.lazy_tensor import Lazy, LazyTensor, stand_in

_COLUMNS = 64  # of the weights that are read at once: a head size that every backend takes


class LazyWeights(LazyTensor):
    """Attention weights; a tensor like any other to all who read it."""


def _handled(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of torch's with lazy weights among its arguments."""
    name = name_of(func)
    for answer in looked(func, name, args, kwargs):
        return answer
    return computed(func, name, args, kwargs)


LazyWeights.handle = staticmethod(_handled)


@dataclass(eq=False, kw_only=True)
class _Source(Source):
    """What attention weights are computed from."""

    query: Tensor
    key: Tensor
    bias: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None
    seed: Tensor | None  # of the dropout, where they are asked for after it
    samples: tuple[Tensor, ...] = ()  # of parameters: writing through .data counts no version

    def watch(self) -> None:
        super().watch()
        self.samples = self.sampled()

    def sampled(self) -> tuple[Tensor, ...]:
        """One number of each row of the parameters among the operands; sinks have one a row."""
        sinks = None if self.sinks is None else self.sinks[:, None]
        learnt = [each.detach() for each in (self.query, self.key, self.bias, sinks) if is_learnt(each)]  # type: ignore[union-attr]
        return tuple(each[..., each.shape[-1] // 2].clone() for each in learnt if each.numel())

    def _holds_the_same(self) -> bool:
        if self.query.is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        pairs = zip(self.samples, self.sampled(), strict=True)
        return all(bool(((now == then) | now.isnan()).all()) for then, now in pairs)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.query, self.key, self.bias, self.slopes, self.sinks, self.seed

    def changed(self) -> str:
        return (
            "attention_with_weights: the weights are computed at their first read, but the queries, "
            "keys or mask were modified in place before it. Read them earlier, for example with "
            "weights = weights.detach()"
        )

    def partial(self, name: str) -> str:
        if not any(each is not None and each.requires_grad for each in self.tensors()):
            return ""  # no graph: a leaf by now, which the output never had a part in
        return (
            f"attention_with_weights: {name} needs the gradient of the weights, but the output was "
            "computed without them. Compute both unfused: weights = scores.softmax(-1), output = "
            "weights @ value"
        )


def attention_with_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    window: tuple[int | None, int | None] | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
    after_dropout: bool = True,
    weights_dtype: torch.dtype | Literal["result"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`attention`, and its weights where somebody reads them.

    For code that returns both, while those who call it use the first alone. The weights have the shape, dtype, device
    and graph of what plain operations give; whatever reads more of them computes them once, from queries and keys, and
    goes on with them: gradients of both ways add up.

    They are computed at once, by plain operations that hold all scores, under ``torch.no_grad()`` and inference mode,
    under ``torch.compile``, ``torch.func`` transforms, tracing and forward-mode derivatives, and where ``attention``
    itself would take plain operations.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: as :func:`attention` has them.
        softcap, alibi_slopes, window, sinks, backend: as there; the weights are those of the keys, without the sinks'.
        after_dropout: the weights as they are multiplied with the values, zeros where they are dropped, which most
            models return; else the softmax.
        weights_dtype: of the weights; "result" is the result's. None is what softmax gives, which is the same, but
            under autocast on a GPU float32.

    Returns:
        [..., heads, queries, value size] as of :func:`attention`, and [..., heads, queries, keys].

    Raises:
        ValueError: a shape, dtype, device or setting does not fit, or ``backend`` cannot run here.
        RuntimeError: later, where the weights are read for the first time after queries, keys or the mask were changed
            in place, or where their own gradient is asked for (``retain_grad``, ``register_hook``,
            ``autograd.grad(loss, weights)``): the output is computed without them.
    """
    query, scale = positive_scale(query, scale)
    given = arguments(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, softcap, alibi_slopes, window, sinks
    )
    chosen = _chosen(given, backend)
    dtype = given.q.dtype if weights_dtype == "result" else weights_dtype or _dtype_of_softmax(given.q)
    shape = (*given.shape[:-1], given.k.shape[2])
    waits = _can_wait(query, key, value, attn_mask, sinks)
    # Without gradients too, dropout drops what this seed says.
    if chosen == "math" or not (waits or (given.dropout_p > 0 and _is_ordinary(query, key, value, attn_mask, sinks))):
        softmax = attention_weights(given)
        out, dropped = weighed(given, softmax)
        return out.reshape(given.shape), (dropped if after_dropout else softmax).to(dtype).reshape(shape)
    seed = draw_seed(query.device) if given.dropout_p > 0 else None
    out = _attended(given, given.v, seed, chosen)
    if not waits:
        weighted = _dropped(given, seed, chosen) if after_dropout and seed is not None else attention_weights(given)
        return out.reshape(given.shape), weighted.to(dtype).reshape(shape)
    weights = _lazy(given, seed if after_dropout else None, chosen, dtype, shape)
    return out if out.shape == given.shape else out.reshape(given.shape), weights


def _dtype_of_softmax(query: Tensor) -> torch.dtype:
    """As autocast has it: in float32 on a GPU, on the CPU as the scores are."""
    mixed = query.device.type != "cpu" and autocasts(query.device.type) and query.dtype != torch.float64
    return torch.float32 if mixed else query.dtype


def _chosen(given: Arguments, backend: str) -> str:
    """The backend; of those with dropout only ours can do it twice alike."""
    chosen = taken(given, backend)
    if given.dropout_p > 0 and chosen not in ("cpu", "triton", "math"):
        return "triton" if against(given, "triton")["triton"] is None else "math"
    return chosen


def _can_wait(*tensors: Tensor | None) -> bool:
    """Check that the weights can be computed later, from tensors that are what they are now."""
    if not _is_ordinary(*tensors) or torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        return False
    return not any(each is not None and each.is_inference() for each in tensors)


def _is_ordinary(*tensors: Tensor | None) -> bool:
    """Check that own code can run: no compiler, no transform, no tensors of another kind."""
    return not torch.compiler.is_compiling() and why_torch(tensors) is None


def _attended(given: Arguments, value: Tensor, seed: Tensor | None, backend: str) -> Tensor:
    """Attention [batch, heads, queries, value size] to ``value``, dropped by ``seed``."""
    if backend not in ("cpu", "triton"):
        return by_torch(given._replace(v=value), backend)
    dropout_p = 0.0 if seed is None else given.dropout_p
    settings = AttentionSettings(
        given.scale, given.is_causal, dropout_p, given.softcap, given.left, given.right, backend
    )
    made: Tensor = AttentionFunction.apply(  # type: ignore[no-untyped-call]
        given.q, given.k, value, given.bias, given.alibi, seed, given.sinks, settings
    )
    return made


def _lazy(
    given: Arguments, seed: Tensor | None, backend: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> LazyWeights:
    form = torch.empty(0)  # the tensors are the source's to hold
    fixed = given._replace(q=form, k=form, v=form, bias=None, alibi=None, sinks=None)

    def compute(
        query: Tensor,
        key: Tensor,
        bias: Tensor | None,
        slopes: Tensor | None,
        sinks: Tensor | None,
        seed: Tensor | None,
    ) -> Tensor:
        now = fixed._replace(q=query, k=key, v=key, bias=bias, alibi=slopes, sinks=sinks)
        weights = attention_weights(now) if seed is None else _dropped(now, seed, backend)
        return weights.to(dtype).reshape(shape)

    hidden_from_the_compiler(LazyWeights)
    when = dataclasses.replace(When.now(given.q.device.type), autocast=False)  # the operands are cast already
    source = _Source(
        when,
        dtype,
        compute,
        query=given.q,
        key=given.k,
        bias=given.bias,
        slopes=given.alibi,
        sinks=given.sinks,
        seed=seed,
    )
    source.watch()
    like = torch.empty(shape, dtype=dtype, device="meta")
    return stand_in(LazyWeights, Lazy(source, (), None), like)


def _dropped(given: Arguments, seed: Tensor, backend: str) -> Tensor:
    """The weights after dropout: attention to the columns of an identity, by the seed of the first time."""
    keys = given.k.shape[2]
    columns = torch.eye(keys, dtype=given.q.dtype, device=given.q.device).split(_COLUMNS, dim=1)
    values = (each.expand(*given.k.shape[:2], keys, each.shape[1]).contiguous() for each in columns)
    return torch.cat([_attended(given, value, seed, backend) for value in values], dim=-1)
