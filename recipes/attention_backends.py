"""Attention's backends: what speaks against each for given arguments, and the calls of torch's own.

The limits of the CUDA kernels are those that torch's selection checks (aten/src/ATen/native/transformers/cuda/
sdp_utils.cpp), of the CPU kernel those that ``torch._fused_sdp_choice`` shows. Should torch know one more, it raises
and falls to nothing slower. What concerns CUDA was run on an H200.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import dropout, scaled_dot_product_attention

from gradscope.kernels import pays
from gradscope.kernels.attention import reference, triton_launch
from gradscope.kernels.attention.options import AttentionOptions
from gradscope.kernels.check import FLOATING, dtype_text
from gradscope.kernels.choice import choose
from gradscope.kernels.plain import derives, is_wrapped
from gradscope.kernels.support import autocasts
from gradscope.recipes.attention_arguments import NAME, Arguments
from gradscope.recipes.attention_by_hand import attention_weights, weighed
from gradscope.recipes.attention_layout import with_gradient_as_laid_out
from gradscope.recipes.attention_sizes import against_own, one_mask

REASONS = {
    "cudnn": "cuDNN's kernel is the fastest on this GPU",
    "flash": "torch's FlashAttention does not store the scores",
    "efficient": "torch's memory-efficient kernel does not store the scores",
    "cpu": "blocks of keys on the CPU: does not store the scores, with dropout and every option",
    "triton": "our Triton kernel does not store the scores, with dropout and every option",
    "math": "unfused operations store the full score matrix: slow, but nothing else can run here",
}
_FEW_SCORES_REASON = "unfused operations: for so few scores they are faster than iterating over blocks"
_ONE_MASK_REASON = (
    "torch's FlashAttention with everything combined into one mask: for so few scores, blocks would be slower"
)
_ON_THE_CPU = ("flash", "cpu", "math")  # the others are for CUDA
# Which kernel "auto" asks first where a mask or a bias is given: torch's memory-efficient one, or ours. On an H200 ours
# takes 0.53 of its time with a bias, and 0.74 with one that learns (GPT-2's attention, bfloat16, not causal; the cases
# "full" of benchmarks/recipe_gpu/ops/attention.py).
EFFICIENT_BEFORE_TRITON = False
_HALF = (torch.float16, torch.bfloat16)
_TORCHS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def against(given: Arguments, wanted: str) -> dict[str, str | None]:
    """Backend -> why it cannot run, or with ``wanted="auto"`` should not; None where it can.

    In the order of ``REASONS``, up to the first that can run, or the one wanted: what is not asked costs nothing.
    """
    found: dict[str, str | None] = {}
    for name in REASONS:
        if wanted in ("auto", name):
            found[name] = _why_not(name, given, wanted)
            if found[name] is None:
                break
    return found


def is_plain_on_the_cpu(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Check that q, k and v, without any option, are right and go to the CPU's flash kernel as they are.

    A shortcut for the commonest case, where checking and choosing takes as long as a small model's attention.
    """
    shape, dtype = query.shape if not query.is_nested else (), query.dtype
    return (
        len(shape) == 4
        and query.is_cpu
        and key.is_cpu
        and value.is_cpu
        and not (key.is_nested or value.is_nested)
        and key.shape == shape
        and value.shape == shape
        and dtype in FLOATING
        and key.dtype == dtype
        and value.dtype == dtype
        and query.stride(3) == 1
        and key.stride(3) == 1
        and value.stride(3) == 1
        and query.numel() > 0
        and not torch.is_autocast_enabled("cpu")
    )


def is_small_on_the_cpu(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Check that q, k and v, with dropout alone, are right and so few that plain operations take them as they are."""
    return (
        is_plain_on_the_cpu(query, key, value)
        and query.dtype in (torch.float32, torch.float64)
        and _against_scores(query, key) is not None
    )


def flash_on_the_cpu(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None
) -> Tensor:
    """torch's kernel, not through sdpa_kernel, which costs 10 µs a call and is one more thing for a compiler to trace.

    And by torch's own binding: that of torch.ops costs another 3 µs.
    """
    out, _ = torch._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return out


def math_on_the_cpu(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """torch's plain operations, by its own binding as :func:`flash_on_the_cpu`."""
    return torch._scaled_dot_product_attention_math(query, key, value, None, dropout_p, is_causal, scale=scale)[0]


def taken(given: Arguments, wanted: str) -> str:
    """The backend that runs, as :func:`explain` has it, without the words.

    Raises:
        ValueError: ``wanted`` is no backend, or cannot run here.
    """
    if wanted != "auto":
        return choose(NAME, wanted, REASONS, against(given, wanted)).backend
    for name in _ON_THE_CPU if given.q.device.type == "cpu" else REASONS:
        if _why_not(name, given, wanted) is None:
            return name
    raise AssertionError("the last backend can do everything")


def _why_not(name: str, given: Arguments, wanted: str) -> str | None:
    kind = given.q.device.type
    if name == "flash":
        return _against_flash_cpu(given, wanted) if kind == "cpu" else _against_flash_cuda(given)
    if name == "cudnn":
        return _against_cudnn(given, wanted)
    if name == "efficient":
        return _against_efficient(given, wanted)
    if name == "cpu":
        if kind != "cpu":
            return f"the tensors are on {given.q.device}"
        return against_own(given) if wanted == "auto" else None
    if name == "triton":
        return triton_launch.why_not(given.q, given.k, given.v, given.bias, options_of(given))
    return None


def _against_scores(query: Tensor, key: Tensor) -> str | None:
    batch, heads, queries, _ = query.shape
    return pays.against("attention with dropout", scores=batch * heads * queries * key.shape[2])


def reason_of(backend: str, given: Arguments) -> str:
    """Why "auto" takes a backend."""
    if given.q.device.type == "cpu" and backend == "math":
        return _FEW_SCORES_REASON
    if given.q.device.type == "cpu" and backend == "flash" and _against_all(given) is not None:
        return _ONE_MASK_REASON
    return REASONS[backend]


def options_of(given: Arguments) -> AttentionOptions:
    """The options as the kernels take them."""
    window = (given.left, given.right)
    return AttentionOptions(
        given.scale, given.k.shape[1], given.is_causal, given.dropout_p, given.softcap, window, given.alibi, given.sinks
    )


def by_torch(given: Arguments, backend: str) -> Tensor:
    """The result [batch, heads, queries, value size] by one of torch's backends."""
    bias, causal = given.bias, given.is_causal
    both = causal and (bias is not None or needs_plain_operations(given.q))
    if given.extras() is not None or both:
        if given.q.device.type != "cpu" or needs_plain_operations(given.q):
            return _by_plain_operations(given)
        if given.softcap is not None or given.sinks is not None:
            return weighed(given, attention_weights(given))[0]
        bias, causal = one_mask(given), False
    if backend == "flash" and given.q.device.type == "cpu":
        mask = _as_additive(bias, given.q.dtype)
        return flash_on_the_cpu(given.q, given.k, given.v, causal, mask, given.scale)
    if bias is not None and bias.dtype != torch.bool:
        bias = _cast(bias, given.q.dtype)
    # Written, for what a tracer makes of sizes that it compares is a tensor or a symbol, which torch does not take.
    grouped: dict[str, Any] = {"enable_gqa": True} if given.grouped else {}
    if backend == "math" and given.q.device.type == "cpu":  # as flash: the choice is made
        mask = _as_additive(bias, given.q.dtype)
        return torch._scaled_dot_product_attention_math(
            given.q, given.k, given.v, mask, given.dropout_p, causal, scale=given.scale, **grouped
        )[0]
    with sdpa_kernel(_TORCHS[backend]):
        out = scaled_dot_product_attention(
            given.q,
            given.k,
            given.v,
            bias,
            given.dropout_p,
            causal,
            scale=given.scale,
            **grouped,
        )
    return with_gradient_as_laid_out(out) if backend == "cudnn" else out


def by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """torch's SDPA of any kind of tensors; the mask is cast as torch wants it."""
    if mask is not None and mask.dtype not in (torch.bool, query.dtype) and not autocasts(query.device.type):
        mask = _cast(mask, query.dtype)
    # torch's kernels have neither a forward-mode derivative nor a second one nor a rule for vmap; that of the CPU has
    # none for DTensor either.
    with sdpa_kernel(SDPBackend.MATH) if derives() or needs_plain_operations(query) else contextlib.nullcontext():
        return scaled_dot_product_attention(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _cast(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a bias to ``dtype``: no number becomes minus infinity, behind which hidden rows would see nothing."""
    lowest = torch.finfo(dtype).min
    if mask.is_floating_point() and torch.finfo(mask.dtype).min < lowest:
        mask = torch.where(mask == -torch.inf, mask, mask.clamp(min=lowest))
    return mask.to(dtype)


def needs_plain_operations(query: Tensor) -> bool:
    """Check that the query is of a subclass that torch's kernel for the CPU cannot take: DTensor has no rule for it."""
    return query.is_cpu and is_wrapped(query)


def _as_additive(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The CPU's kernels add what they are given."""
    if bias is None or bias.dtype != torch.bool:
        return bias
    return torch.zeros_like(bias, dtype=dtype).masked_fill(~bias, -torch.inf)


def _by_plain_operations(given: Arguments) -> Tensor:
    keep = None
    if given.dropout_p > 0:
        ones = given.q.new_ones(*given.q.shape[:3], given.k.shape[2])
        keep = dropout(ones, given.dropout_p) != 0
    return reference.attention(given.q, given.k, given.v, given.bias, options_of(given), keep)[0].to(given.q.dtype)


def _against_all(given: Arguments) -> str | None:
    """The reason against all of torch's fused kernels; None where some may take the call."""
    extras = given.extras()
    if extras is not None:
        return f"it does not support {extras}"
    if given.bias is not None and given.is_causal:
        return "it takes a mask or is_causal, not both"
    return _against_layout(given)


def _against_layout(given: Arguments) -> str | None:
    """The reason in shapes and strides against all of torch's fused kernels; None where some may take them."""
    q, k, v = given.q, given.k, given.v
    if q.shape[3] != v.shape[3]:
        return f"the head sizes of query ({q.shape[3]}) and value ({v.shape[3]}) differ"
    if q.numel() == 0 or k.shape[2] == 0:
        return "a dimension is 0"  # torch's CPU kernel divides by it
    if (q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1) and q.shape[3] != 1:
        return "the last dimension of query, key or value is not contiguous"
    return None


def _against_flash_cpu(given: Arguments, wanted: str) -> str | None:
    if given.dropout_p > 0:
        return "on the CPU it has no dropout"
    if given.wants_bias_grad:
        return "it computes no gradient for the mask"
    why = _against_all(given)
    held = given.softcap is not None or given.sinks is not None
    if why is None or wanted != "auto" or held or _against_layout(given) is not None:
        return why
    # All that hides as one mask, as long as there are so few scores that our blocks are slower.
    return why if against_own(given) is None or needs_plain_operations(given.q) else None


def _no_cuda(given: Arguments) -> str | None:
    return None if given.q.device.type == "cuda" else f"the tensors are on {given.q.device}, and it is for CUDA"


def _not_half(given: Arguments) -> str | None:
    if given.q.dtype in _HALF:
        return None
    return f"the tensors are {dtype_text(given.q.dtype)}, and it takes only float16 and bfloat16"


def _against_cudnn(given: Arguments, wanted: str) -> str | None:
    why = _no_cuda(given) or _not_half(given)
    if why is not None:
        return why
    if given.bias is not None:
        return "with a mask its gradients can be NaN (pytorch#196678)"
    if torch.are_deterministic_algorithms_enabled():
        return "its gradients are nondeterministic, and deterministic algorithms are required"
    if not torch.backends.cudnn.is_available():
        return "cuDNN is not available"
    if wanted == "auto" and torch.cuda.get_device_capability(given.q.device) < (9, 0):
        return "below compute capability 9.0 FlashAttention is as fast"
    if given.q.shape[3] > 128 or given.q.shape[3] % 8:
        return f"the head size is {given.q.shape[3]}, and it takes multiples of 8 up to 128"
    return _not_square(given) or _against_all(given)


def _against_flash_cuda(given: Arguments) -> str | None:
    why = _no_cuda(given) or _not_half(given)
    if why is not None:
        return why
    if given.bias is not None:
        return "it takes no mask"
    if torch.cuda.get_device_capability(given.q.device) < (8, 0):
        return "it needs compute capability 8.0"
    if given.q.shape[3] > 256:
        return f"the head size is {given.q.shape[3]}, and its maximum is 256"
    return _not_square(given) or _against_all(given)


def _not_square(given: Arguments) -> str | None:
    if given.is_causal and given.q.shape[2] != given.k.shape[2]:
        return "it aligns a causal mask differently if the numbers of queries and keys differ"
    return None


def _against_efficient(given: Arguments, wanted: str) -> str | None:
    why = _no_cuda(given)
    if why is not None:
        return why
    measured = given.bias is not None and given.q.dtype in _HALF
    ours_first = not EFFICIENT_BEFORE_TRITON and wanted == "auto" and measured
    if ours_first and _why_not("triton", given, wanted) is None:
        return "with a mask our Triton kernel is faster"
    if given.q.dtype not in (torch.float32, *_HALF):
        return f"it does not support {dtype_text(given.q.dtype)}"
    if given.grouped:
        return "it does not support grouped heads: key and value would be expanded"
    if torch.are_deterministic_algorithms_enabled():
        return "its gradients are nondeterministic, and deterministic algorithms are required"
    if given.q.shape[3] % (16 // given.q.element_size()):
        return f"the head size is {given.q.shape[3]}, and it takes multiples of {16 // given.q.element_size()}"
    return _against_all(given)
