"""The rotation by plain operations, for where torch must see each of them."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``x`` [batch, heads, tokens, size] turned by the tables [batch or 1, 1, tokens, pairs], in their precision."""
    pairs = cos.shape[-1]
    wide = x[..., : 2 * pairs].to(cos.dtype)
    if interleaved:
        a, b = wide.unflatten(-1, (pairs, 2)).unbind(-1)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = wide.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * pairs :]), -1)


def rotated_each(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The same by tables [batch or 1, 1, tokens, 2 * pairs] that name an angle for each feature of a pair."""
    width = cos.shape[-1]
    wide = x[..., :width].to(cos.dtype)
    if interleaved:
        a, b = wide.unflatten(-1, (width // 2, 2)).unbind(-1)
        other = torch.stack((-b, a), -1).flatten(-2)
    else:
        a, b = wide.chunk(2, -1)
        other = torch.cat((-b, a), -1)
    return torch.cat(((wide * cos + other * sin).to(x.dtype), x[..., width:]), -1)
