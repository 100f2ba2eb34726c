"""Launches the Triton kernels of attention.

Importing this loads no triton: the first call does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from gradscope.kernels.attention import triton_blocks, triton_tuning
from gradscope.kernels.attention.layout import empty_as
from gradscope.kernels.attention.options import AttentionOptions
from gradscope.kernels.attention.triton_arguments import Form, Heads, form_of, heads_of, is_wide, terms_of
from gradscope.kernels.attention.triton_blocks import BackwardBlocks, Tiling, padded
from gradscope.kernels.check import dtype_text
from gradscope.kernels.on_device import on_device
from gradscope.kernels.support import interpreting, why_no_triton

C = TypeVar("C")
LARGEST_SIZE = 256
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Padded head size, dtype, compute capability, and whether scores have a bias or dropout.
_Kind: TypeAlias = tuple[int, torch.dtype, tuple[int, int] | None, bool]


def why_not(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: AttentionOptions) -> str | None:
    """Why the kernels cannot take these arguments, in words; ``None`` where they can."""
    if q.dtype not in _DTYPES:
        return f"the kernels compute in float32, and {dtype_text(q.dtype)} needs higher precision"
    if not q.dtype == k.dtype == v.dtype:
        return "q, k and v differ in dtype"
    if bias is not None and bias.dtype not in (torch.bool, *_DTYPES):
        return f"the bias is {dtype_text(bias.dtype)}, and the kernels take float32, float16 or bfloat16"
    largest = max(q.shape[-1], v.shape[-1])
    if largest > LARGEST_SIZE:
        return f"the head size is {largest}, and the kernels' maximum is {LARGEST_SIZE}"
    if max(q.shape[0] * q.shape[1], q.shape[2], k.shape[2]) >= 1 << 30:
        return "a length or batch · heads is 2^30 or more"
    return why_no_triton(q.device)


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: AttentionOptions, seed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp; see options.py for what they are.

    Args:
        q: [batch, heads, queries, size], any strides.
        k, v: [batch, kv heads, keys, size]; the size of v may be another.
        bias: boolean or floating, broadcastable to [batch, heads, queries, keys].
        seed: one int64 on the device, where there is dropout.

    Returns:
        [batch, heads, queries, v's size], laid out as q (:func:`empty_as`), and [batch, heads, queries] in float32.
    """
    out = empty_as(q, q.shape[1], q.shape[2], v.shape[3])
    logsumexp = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    if not out.numel() or not k.shape[2]:
        return out.zero_(), logsumexp.fill_(-torch.inf)
    from gradscope.kernels.attention.triton_forward.triton_kernels import forward as kernel

    inputs, form = _inputs(q, k, v, bias, options, seed), _form(q, k, v, bias, options, out)

    def run(cut: Tiling) -> None:
        with on_device(q):
            kernel[(q.shape[0] * q.shape[1] * _count(q.shape[2], cut.m),)](
                *inputs, heads_of(out), logsumexp, **_settings(q, k, options, form, cut)
            )

    run(_taken("forward", triton_blocks.forward_candidates(*_kind(q, v, bias, options)), form, q, k, run))
    return out, logsumexp


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    logsumexp: Tensor,
    options: AttentionOptions,
    seed: Tensor | None,
    wants_bias_grad: bool,
    *,
    into: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and, where wanted, of the bias.

    dq is a sum by atomics in float32, whose last bits differ from run to run, where there is more than one block of
    keys; not under ``torch.use_deterministic_algorithms``. All others are the same at each run.

    Args:
        grad_out: as ``out``, any strides.
        out, logsumexp: what :func:`forward` returned for the same arguments.
        into: where to write the gradients of q, k and v, of their shapes and dtype, any strides: views of one buffer,
            say. None allocates.

    Returns:
        dq, dk and dv, laid out as q, k and v; dbias in the bias's shape and dtype, summed in float32.
    """
    dq, dk, dv = into or _like(q, k, v)
    wanted = bias is not None and bias.dtype != torch.bool and wants_bias_grad
    if not out.numel() or not k.shape[2]:
        return dq.zero_(), dk.zero_(), dv.zero_(), torch.zeros_like(bias) if wanted and bias is not None else None
    from gradscope.kernels.attention.triton_backward.triton_kernels import deltas

    delta = torch.empty_like(logsumexp)
    form = _form(q, k, v, bias, options, grad_out, out, dq, dk, dv)
    inputs = (*_inputs(q, k, v, bias, options, seed), heads_of(grad_out), logsumexp, delta)
    kind = _kind(q, v, bias, options)
    with on_device(q):
        deltas[(q.shape[0] * q.shape[1] * _count(q.shape[2], 64),)](
            heads_of(out),
            heads_of(grad_out),
            delta,
            q.shape[1],
            q.shape[2],
            SIZE=v.shape[3],
            BLOCK_M=64,
            BLOCK_V=padded(v.shape[3]),
        )

    def run(cut: BackwardBlocks, slopes: tuple[Tensor, Tensor, Tensor]) -> None:
        one_pass = cut.one_pass
        if one_pass is not None and (k.shape[2] <= one_pass.n or not repeatable()):
            _in_one_pass(inputs, form, one_pass, q, k, options, *slopes)
        else:
            _in_two_kernels(inputs, form, cut, q, k, options, *slopes)

    # Timed in memory of its own where that of the caller is to be written: that may be some input's.
    mine = functools.partial(run, slopes=(dq, dk, dv)) if into is None else lambda cut: run(cut, _like(q, k, v))
    cut = _taken("backward", triton_blocks.backward_candidates(*kind), form, q, k, mine)
    run(cut, (dq, dk, dv))
    if not wanted or bias is None:
        return dq, dk, dv, None
    return dq, dk, dv, _of_bias(inputs, form, cut.queries, q, k, bias, options)


def _like(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for gradients of three tensors, laid out as these."""
    dq, dk, dv = (empty_as(x, *x.shape[1:]) for x in tensors)
    return dq, dk, dv


def _taken(name: str, candidates: Sequence[C], form: Form, q: Tensor, k: Tensor, run: Callable[[C], object]) -> C:
    """The candidate to launch with."""
    batches, heads, queries, size = q.shape
    if not triton_tuning.times(q, 4 * batches * heads * queries * k.shape[2] * size):
        return candidates[0]
    lengths = (batches * heads).bit_length(), queries.bit_length(), k.shape[2].bit_length()
    key = (name, form, q.dtype, q.device, q.shape[1] // k.shape[1], *lengths)
    with on_device(q):
        return triton_tuning.fastest(key, candidates, run, triton_tuning.device_ms)


def repeatable() -> bool:
    """Check that the user asks torch for the same bits in every run."""
    return torch.are_deterministic_algorithms_enabled()


def _in_one_pass(
    inputs: tuple[Heads | Tensor, ...],
    form: Form,
    cut: Tiling,
    q: Tensor,
    k: Tensor,
    options: AttentionOptions,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    from gradscope.kernels.attention.triton_one_pass.triton_kernels import all_gradients

    whole = k.shape[2] <= cut.n
    # Atomics add in float32: to dq itself, or to a sum of its shape that is rounded once.
    summed = dq if whole or dq.dtype == torch.float32 else torch.empty_like(dq, dtype=torch.float32)
    if not whole or form.left or form.right:
        summed.zero_()
    with on_device(q):
        all_gradients[(k.shape[0] * k.shape[1] * _count(k.shape[2], cut.n),)](
            *inputs, heads_of(dk), heads_of(dv), heads_of(summed), WHOLE=whole, **_settings(q, k, options, form, cut)
        )
    if summed is not dq:
        dq.copy_(summed)


def _in_two_kernels(
    inputs: tuple[Heads | Tensor, ...],
    form: Form,
    cut: BackwardBlocks,
    q: Tensor,
    k: Tensor,
    options: AttentionOptions,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    from gradscope.kernels.attention.triton_backward.triton_kernels import keys_and_values, queries_alone

    with on_device(q):
        keys_and_values[(k.shape[0] * k.shape[1] * _count(k.shape[2], cut.keys.n),)](
            *inputs, heads_of(dk), heads_of(dv), **_settings(q, k, options, form, cut.keys)
        )
        queries_alone[(q.shape[0] * q.shape[1] * _count(q.shape[2], cut.queries.m),)](
            *inputs, heads_of(dq), **_settings(q, k, options, form, cut.queries)
        )


def _of_bias(
    inputs: tuple[Heads | Tensor, ...],
    form: Form,
    cut: Tiling,
    q: Tensor,
    k: Tensor,
    bias: Tensor,
    options: AttentionOptions,
) -> Tensor:
    from gradscope.kernels.attention.triton_bias.triton_kernels import bias_gradient

    own, parts = _bias_buffer(bias, q, k, cut)
    with on_device(q):
        bias_gradient[(own.shape[0] * own.shape[1] * _count(q.shape[2], cut.m) * _count(k.shape[2], cut.n),)](
            *inputs,
            heads_of(parts),
            own.shape[1],
            q.shape[0] // own.shape[0],
            q.shape[1] // own.shape[1],
            ONE_ROW=own.shape[2] == 1,
            ONE_COLUMN=own.shape[3] == 1,
            **_settings(q, k, options, form, cut),
        )
    return parts.sum_to_size(own.shape).to(bias.dtype).reshape(bias.shape)


def kept(q: Tensor, k: Tensor, options: AttentionOptions, seed: Tensor) -> Tensor:
    """The weights that dropout keeps: [batch, heads, queries, keys], boolean, by seed and position alone."""
    from gradscope.kernels.attention.triton_scores.triton_kernels import keep

    shape = (*q.shape[:3], k.shape[2])
    found = torch.empty(shape, dtype=torch.uint8, device=q.device)
    grid = (_count(shape[2], 32), _count(shape[3], 32), shape[0] * shape[1])
    if found.numel():
        with on_device(q):
            keep[grid](seed, found, *shape[2:], terms_of(q, k, options).threshold, BLOCK_M=32, BLOCK_N=32)
    return found.bool()


def _inputs(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: AttentionOptions, seed: Tensor | None
) -> tuple[Heads | Tensor, ...]:
    """The first arguments of every kernel. One that is not used must be a pointer all the same."""
    spread = q if bias is None else bias.expand(*q.shape[:3], k.shape[2])
    alibi = q
    if options.alibi is not None:
        alibi = options.alibi.float().expand(q.shape[:2])[..., None, None]
    return (heads_of(q), heads_of(k), heads_of(v), heads_of(spread), heads_of(alibi), q if seed is None else seed)


def _form(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, options: AttentionOptions, *others: Tensor) -> Form:
    """The form that a call's kernels are compiled for; ``others`` are its tensors [batch, heads, rows, columns]."""
    spread = () if bias is None else (bias.expand(*q.shape[:3], k.shape[2]),)
    return form_of(q, v, bias, options, is_wide(q, k, v, *spread, *others))


def _settings(q: Tensor, k: Tensor, options: AttentionOptions, form: Form, cut: Tiling) -> dict[str, Any]:
    """The last arguments of every kernel."""
    import triton.language as tl

    # The interpreter multiplies no bfloat16.
    wide = interpreting() and q.dtype == torch.bfloat16
    names = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return {
        "terms": terms_of(q, k, options),
        "FORM": form,
        "PRECISION": "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee",
        "OPERAND": tl.float32 if wide else names[q.dtype],
        "BLOCK_M": cut.m,
        "BLOCK_N": cut.n,
        "BLOCK_D": padded(form.size),
        "BLOCK_V": padded(form.value_size),
        "num_warps": cut.warps,
        "num_stages": cut.stages,
    }


def _bias_buffer(bias: Tensor, q: Tensor, k: Tensor, cut: Tiling) -> tuple[Tensor, Tensor]:
    """The bias as 4-D, and room for its gradient: for each block a part, where it broadcasts over queries or keys."""
    own = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
    rows = _count(q.shape[2], cut.m) if own.shape[2] == 1 else own.shape[2]
    columns = _count(k.shape[2], cut.n) if own.shape[3] == 1 else own.shape[3]
    return own, torch.empty((*own.shape[:2], rows, columns), dtype=torch.float32, device=q.device)


def _kind(q: Tensor, v: Tensor, bias: Tensor | None, options: AttentionOptions) -> _Kind:
    """The kind of call that the block sizes depend on."""
    capability = torch.cuda.get_device_capability(q.device) if q.device.type == "cuda" else None
    return padded(max(q.shape[3], v.shape[3])), q.dtype, capability, bias is not None or options.dropout_p > 0


def _count(length: int, block: int) -> int:
    return (length + block - 1) // block
