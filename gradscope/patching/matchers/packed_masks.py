"""Which masks of an attention the packed recipe can be given."""

from __future__ import annotations

import math

from torch import Tensor

from gradscope.patching.graph import made_from
from gradscope.patching.match import Match, Of, Piece
from gradscope.patching.matchers.masks import Mask
from gradscope.recording.graph import Value

# How attention_mask is handed the queries, which it changes where a row is hidden altogether by a finite number.
QUERY = ", query="


def is_carried(match: Match) -> bool:
    """Return whether the attention's mask is right for the packed recipe too, whatever it holds in another step.

    A row that is hidden altogether by finite numbers weighs all keys and gives queries no gradient: then the packed
    recipe takes the queries apart. So finite numbers are taken of causal constants only, which may change all the same.
    """
    if any(each.name in {"softcap", "sinks"} for each in match.arguments):
        return False
    pieces = next((each.pieces for each in match.arguments if each.name == "**"), ())
    masks = [piece for piece in pieces if isinstance(piece, Of) and piece.role == "mask"]
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    if text.count("zero") == len(masks) and "finite" not in text:  # "nonzero" too
        return True
    if len(masks) != 1 or "after" in text or not _is_constant(masks[0].value, match):
        return False
    kind = next((kind for kind in ("zero", "nonzero") if f'hides="{kind}"' in text), "")
    shape = masks[0].value.shape[-2:]
    return len(shape) == 2 and Mask(masks[0].value, kind, -math.inf, rank=4).is_causal_now((shape[0], shape[1]))


def without_query(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """The call of attention_mask for a packed tensor, which has no queries apart."""
    return (*pieces[: pieces.index(QUERY)], ", packed=True)") if QUERY in pieces else pieces


def _is_constant(mask: Value, match: Match) -> bool:
    """Return whether it comes from tensors that the modules around hold, and that are no parameters."""
    owners = [place.frame.owner for place in match.last.places]
    held: list[object] = [each for owner in owners if owner is not None for each in vars(owner).values()]
    held += [each for owner in owners for each in getattr(owner, "_buffers", {}).values()]
    tensors = {id(each) for each in held if isinstance(each, Tensor) and not each.requires_grad}
    leaves = made_from(mask)
    return bool(leaves) and all(leaf.alive and id(leaf.tensor()) in tensors for leaf in leaves)
