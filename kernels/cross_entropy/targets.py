"""Targets that are no class."""

from __future__ import annotations

import torch
from torch import Tensor

from gradscope.kernels.check import NoSuchIndexError


def require_classes(function: str, target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise :class:`NoSuchIndexError` unless each target is a class or ignored.

    On a GPU the device asserts it, as for torch. Compiled graphs cannot branch on values: there torch's own kernel, or
    the operator of ours, looks as it runs.
    """
    if torch.compiler.is_compiling() or not target.numel():
        return
    if target.dtype is torch.uint8:  # else ignore_index were compared by its last eight bits
        target = target.long()
    known = (target >= 0) & (target < classes) | (target == ignore_index)
    if target.device.type != "cpu":  # no wait for the device: it stops itself
        torch._assert_async(known.all())
        return
    if not known.all():
        wrong = int(target[~known][0])
        raise NoSuchIndexError(
            f"{function}: target contains {wrong}; expected a class in [0, {classes}) or ignore_index={ignore_index}"
        )
