"""A mask as attention's arguments: where it says "causal" and no more, attention is told so and runs its fast path."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from gradscope.kernels.check import refuse
from gradscope.kernels.plain import why_torch
from gradscope.recipes.kept import kept

NAME = "attention_mask"

# An added number that hides for certain, and still leaves a row in which all is hidden its uniform weights.
_DEEP = -1e30

# Of a row in which all is as low as this, float32 begins to lose scores.
_LOW = -100.0

# Behind a number as low as this, float64 loses every score.
_LOST = -1e17


def attention_mask(
    mask: Tensor | float,
    *,
    hides: str = "",
    finite: bool = False,
    after: dict[str, Any] | str | None = None,
    query: Tensor | None = None,
    packed: bool = False,
    sinks: bool = False,
) -> dict[str, Any]:
    """``{"is_causal": True}`` where ``mask`` hides exactly the keys behind each query; else ``{"attn_mask": ...}``.

    For ``attention(query, key, value, **attention_mask(mask))``. The content is looked at once for each tensor, version
    and view: the verdict is kept as long as the tensor lives. On a GPU a tensor is looked at from its second use on, so
    that a mask made anew in every step costs no synchronisation. Under ``torch.compile`` nothing is looked at.

    Args:
        mask: [..., queries, keys]; with fewer dimensions as it broadcasts to that. A number that is added, as the 0.0
            that stands for no mask, says nothing: all scores are higher by it. With ``sinks`` only 0.0 says nothing.
        hides: "" where the mask is as :func:`~gradscope.recipes.attention` takes it: True takes part, or numbers to be
            added; "added" where it is added whatever its dtype, True as 1; "zero" where a key is hidden that has a zero
            here; "nonzero" where one is hidden that has not.
        finite: with "zero" or "nonzero": hidden scores become a large negative number instead of minus infinity, so
            that a query that sees no key weighs all of them equally, instead of giving 0.
        query: with ``finite``: the queries. They come back as ``query``, and are zeros where no key is seen, so that no
            gradient goes to queries and keys that have no say in the weights.
        packed: with ``finite``, for :func:`~gradscope.recipes.packed_attention`: where a query may see no key,
            ``sees`` comes back in place of ``query``, and says which do.
        sinks: the attention has sinks: they weigh all of a row in which all is hidden, so that nothing is to be done
            for its other weights. Not with ``finite``.
        after: the mask that was laid over the scores before this one: "causal", or this function's arguments for it,
            as ``{"mask": bias, "hides": "zero"}``, which may have an ``after`` of their own.

    Raises:
        ValueError: ``hides`` is none of these, or ``finite`` comes without "zero" and "nonzero", or with ``sinks``; or
            with ``sinks`` another number than 0.0.
    """
    if sinks and finite:
        refuse(NAME, "finite", "True", "False where sinks is True")
    masks = [*([] if after is None else _earlier(after, sinks)), *_checked(mask, hides, finite, sinks)]
    said = _alone(*masks[0]) if len(masks) == 1 and masks[0] is not None else _combined(masks)
    bias = said.get("attn_mask")
    if bias is not None and bias.dtype is not torch.bool:
        if query is None and not packed:
            return said if sinks else said | _without_losses(bias, "is_causal" in said)
        sees = (bias > 0.5 * _DEEP).any(-1, keepdim=True)
        bias = torch.where(sees | (bias == -torch.inf), bias, 0.0)
        return said | {"attn_mask": bias} | ({"sees": sees} if query is None else {"query": query * sees})
    return said if query is None else {"query": query, **said}


def _without_losses(bias: Tensor, is_causal: bool) -> dict[str, Any]:
    """The added numbers, and what keeps a row exact in which all is hidden by a finite number.

    Backward takes the weights from the logarithm of their sum, which is lost behind a -1e9: so what is common to such a
    row is taken off it. Where even float64 would lose the scores behind it, all weigh the same, and only weights that
    are held say so: such rows are looked for on the CPU, where it needs no synchronisation. So they are where a row may
    see less than the numbers say, for it is causal too.
    """
    if is_causal and _hides_the_first(bias):
        return {"attn_mask": bias, "backend": "math"}
    top = bias.detach().amax(-1, keepdim=True)
    if _may_look(bias) and not bias.is_cuda and bool(((top > -torch.inf) & (top < _LOST)).any()):
        return {"attn_mask": bias, "backend": "math"}
    return {"attn_mask": bias - torch.where((top < _LOW) & (top >= _LOST), top, 0.0)}


def _hides_the_first(bias: Tensor) -> bool:
    """Check that a finite number hides keys of a row from the first on: under a causal mask that may be all it sees."""
    if bias.dtype is torch.bool or bias.is_cuda or not _may_look(bias):
        return False
    low = bias.detach() < _LOW
    return bool((low[..., :1] & low & (bias.detach() > -torch.inf)).any())


def _alone(mask: Tensor, hides: str, finite: bool) -> dict[str, Any]:
    if _may_look(mask) and not mask.requires_grad and _says_causal(mask, hides):
        return {"is_causal": True}
    if not hides:
        return {"attn_mask": mask}
    seen = _seen(mask, hides)
    if finite:
        return {"attn_mask": torch.zeros(seen.shape, device=mask.device).masked_fill_(~seen, _DEEP)}
    return {"attn_mask": seen}


def _checked(mask: Tensor | float, hides: str, finite: bool, sinks: bool) -> list[tuple[Tensor, str, bool]]:
    """The mask in one form; nothing of a number that is added to all scores."""
    if hides not in {"", "added", "zero", "nonzero"}:
        refuse(NAME, "hides", repr(hides), "'', 'added', 'zero' or 'nonzero'")
    if finite and hides in {"", "added"}:
        refuse(NAME, "finite", "True", f"False where hides is {hides!r}")
    if not isinstance(mask, Tensor):
        if hides != "added" or not math.isfinite(mask):
            refuse(NAME, "mask", repr(mask), "a tensor, or a finite number where hides is 'added'")
        if sinks and mask != 0:
            refuse(NAME, "mask", repr(mask), "a tensor or 0.0 where sinks is True: it is not added to these")
        return []
    if mask.dim() < 2:
        mask = mask.reshape(1, -1)
    if hides == "added":
        hides = ""
        if not mask.is_floating_point():
            mask = mask.float()
    return [(mask, hides, finite)]


def _earlier(after: dict[str, Any] | str, sinks: bool) -> list[tuple[Tensor, str, bool] | None]:
    """The masks before, the first first; None is the causal one."""
    if isinstance(after, str):
        if after != "causal":
            refuse(NAME, "after", repr(after), "'causal' or the arguments of a mask")
        return [None]
    before = [] if after.get("after") is None else _earlier(after["after"], sinks)
    return [*before, *_checked(after["mask"], after.get("hides", ""), after.get("finite", False), sinks)]


def _combined(masks: list[tuple[Tensor, str, bool] | None]) -> dict[str, Any]:
    """Combine several masks, each laid over those before it, into arguments of :func:`attention`."""
    causal: Tensor | bool = False
    bias: Tensor | None = None
    for each in masks:
        if each is None:
            causal = True
            continue
        mask, hides, finite = each
        looks = _may_look(mask) and not mask.requires_grad
        if not finite and looks and _says_causal(mask, hides, infinite=True):
            causal = _seen(mask, hides)  # minus infinity, whatever the others add
            continue
        if finite and causal is not False:  # a number may be written over what it hides
            if causal is True:
                refuse(NAME, "after", "'causal'", "a mask where finite is True")
            bias, causal = causal if bias is None else _added(bias, causal), False
        bias = _laid_over(bias, mask, hides, finite)
    if bias is not None and isinstance(causal, Tensor) and _hides_the_first(bias):
        bias, causal = torch.where(causal, bias, -torch.inf), False  # what a row sees, whoever hides the rest
    return ({} if causal is False else {"is_causal": True}) | ({} if bias is None else {"attn_mask": bias})


def _seen(mask: Tensor, hides: str) -> Tensor:
    """The places of a mask that are seen: where it hides nothing, or the number to add is 0."""
    if not hides and mask.dtype is torch.bool:
        return mask
    return mask != 0 if hides == "zero" else mask == 0


def _laid_over(bias: Tensor | None, mask: Tensor, hides: str, finite: bool) -> Tensor:
    if not hides:
        return mask if bias is None else _added(bias, mask)
    seen = _seen(mask, hides)
    if not finite and (bias is None or bias.dtype is torch.bool):
        return seen if bias is None else seen & bias
    under = torch.zeros((), device=mask.device) if bias is None else _as_numbers(bias)
    return torch.where(seen, under, _DEEP if finite else -torch.inf)


def _added(one: Tensor, other: Tensor) -> Tensor:
    if one.dtype is torch.bool and other.dtype is torch.bool:
        return one & other
    return _as_numbers(one) + _as_numbers(other)


def _as_numbers(mask: Tensor) -> Tensor:
    """A boolean mask as what is added to the scores."""
    if mask.dtype is not torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)


def _may_look(mask: Tensor) -> bool:
    """Check that the bias's numbers are there to be looked at."""
    return not torch.compiler.is_compiling() and why_torch((mask,)) is None


def _says_causal(mask: Tensor, hides: str, infinite: bool = False) -> bool:
    """Check that the mask hides exactly the keys behind each query; with ``infinite`` by adding minus infinity."""
    rows, columns = mask.shape[-2:]
    if rows != columns or rows < 2 or mask.numel() != rows * columns or mask.is_inference():
        return False
    return kept(
        mask,
        (hides, infinite),
        lambda: _is_triangle(mask.detach().reshape(rows, columns), hides, infinite),
        unseen=False,
    )


def _is_triangle(mask: Tensor, hides: str, infinite: bool) -> bool:
    """Check that the mask leaves exactly the lower triangle to be seen."""
    seen = _seen(mask, hides)
    if not hides and mask.dtype is not torch.bool:
        # A finite number hides only where no weight can be left of it.
        deep = -torch.inf if infinite else max(_DEEP, torch.finfo(mask.dtype).min)
        if not bool((seen | (mask <= deep)).all()):
            return False
    return bool(torch.equal(seen, torch.ones_like(seen).tril_()))
