"""Cross-entropy over logits that are there."""

from __future__ import annotations

import torch
from torch.nn import functional

from gradscope.recipes.cross_entropy import cross_entropy
from recipe_cases.case import RecipeCase, Step


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _make(rows: int, classes: int, dtype: torch.dtype) -> tuple[Step, Step]:
    logits = torch.randn(rows, classes, device=_device()).to(dtype).requires_grad_()
    target = torch.randint(0, classes, (rows,), device=_device())

    def baseline() -> None:
        functional.cross_entropy(logits, target).backward()
        logits.grad = None

    def recipe() -> None:
        cross_entropy(logits, target).backward()
        logits.grad = None

    return baseline, recipe


CASES = [
    RecipeCase(
        "cross_entropy",
        "N2048 V50257 float32",
        "F.cross_entropy",
        lambda: _make(2048, 50257, torch.float32),
        faster=1.3,
        leaner=2.5,
    ),
    RecipeCase("cross_entropy", "N2048 V50257 bfloat16", "F.cross_entropy", lambda: _make(2048, 50257, torch.bfloat16)),
]
