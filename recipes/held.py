"""Check that a tensor that a model holds is still the number that a patch relied on."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.plain import why_torch
from gradscope.recipes.kept import kept


def is_number(held: object, number: float) -> bool:
    """Check that ``held`` is ``number``: a tensor without dimensions that holds it, without gradient, or a plain one.

    A tensor is looked at once for each content (on a GPU from its second use on), and not at all where it holds no
    numbers, is one of many, or a graph is made: then it is none.
    """
    if not isinstance(held, Tensor):
        return isinstance(held, (int, float)) and held == number
    if torch.compiler.is_compiling() or held.dim() or held.requires_grad or why_torch((held,)) is not None:
        return False

    def look() -> bool:
        return bool(held == number)

    return look() if held.is_inference() else kept(held, ("number", number), look, unseen=False)
