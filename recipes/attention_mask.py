"""A mask as attention's arguments: where it says "causal" and no more, attention is told so and runs its fast path."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradscope.kernels.check import refuse, shape_text

NAME = "attention_mask"

# An added number that hides for certain, and still leaves a row in which all is hidden its uniform weights.
_DEEP = -1e30

# What a mask says, by where its content lies; forgotten with the tensor that holds the content.
_known: dict[int, tuple[weakref.ref[Tensor], dict[tuple[Any, ...], bool]]] = {}


def attention_mask(mask: Tensor, *, hides: str = "", finite: bool = False) -> dict[str, Any]:
    """``{"is_causal": True}`` where ``mask`` hides exactly the keys behind each query; else ``{"attn_mask": ...}``.

    For ``attention(query, key, value, **attention_mask(mask))``. The content is looked at once for each tensor, version
    and view: the verdict is kept as long as the tensor lives. On a GPU a tensor is looked at from its second use on, so
    that a mask made anew in every step costs no synchronisation. Under ``torch.compile`` nothing is looked at.

    Args:
        mask: [..., queries, keys].
        hides: "" where the mask is as :func:`~gradscope.recipes.attention` takes it: True takes part, or numbers to be
            added; "zero" where a key is hidden that has a zero here; "nonzero" where one is hidden that has not.
        finite: with ``hides``: hidden scores become a large negative number instead of minus infinity, so that a query
            that sees no key weighs all of them equally, instead of giving 0.

    Raises:
        ValueError: ``hides`` is none of these, ``finite`` comes without it, or the mask has fewer than two dimensions.
    """
    if hides not in {"", "zero", "nonzero"}:
        refuse(NAME, "hides", repr(hides), "'', 'zero' or 'nonzero'")
    if finite and not hides:
        refuse(NAME, "finite", "True", "False where hides is ''")
    if mask.dim() < 2:
        refuse(NAME, "mask", shape_text(mask), "[..., queries, keys]")
    if not torch.compiler.is_compiling() and not mask.requires_grad and _says_causal(mask, hides):
        return {"is_causal": True}
    if not hides:
        return {"attn_mask": mask}
    seen = mask != 0 if hides == "zero" else mask == 0
    if finite:
        return {"attn_mask": torch.zeros(seen.shape, device=mask.device).masked_fill_(~seen, _DEEP)}
    return {"attn_mask": seen}


def _says_causal(mask: Tensor, hides: str) -> bool:
    rows, columns = mask.shape[-2:]
    if rows != columns or rows < 2 or mask.numel() != rows * columns or mask.is_inference():
        return False
    held = mask if mask._base is None else mask._base
    known = _known.get(id(held))
    if known is None or known[0]() is not held:
        known = _known[id(held)] = (weakref.ref(held, partial(_forget, id(held))), {})
        if mask.is_cuda:
            return False
    verdicts = known[1]
    key = (held._version, mask.storage_offset(), tuple(mask.shape), mask.stride(), mask.dtype, hides)
    verdict = verdicts.get(key)
    if verdict is None:
        if mask.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        if any(each[0] != held._version for each in verdicts):
            verdicts.clear()
        verdict = verdicts[key] = _is_triangle(mask.detach().reshape(rows, columns), hides)
    return verdict


def _forget(key: int, gone: weakref.ref[Tensor]) -> None:
    if key in _known and _known[key][0] is gone:
        del _known[key]


def _is_triangle(mask: Tensor, hides: str) -> bool:
    """Whether exactly the lower triangle is seen."""
    if hides:
        seen = mask != 0 if hides == "zero" else mask == 0
    elif mask.dtype is torch.bool:
        seen = mask
    else:
        seen = mask == 0
        # A finite number hides only where no weight can be left of it.
        if not bool((seen | (mask <= max(_DEEP, torch.finfo(mask.dtype).min))).all()):
            return False
    return bool(torch.equal(seen, torch.ones_like(seen).tril_()))
