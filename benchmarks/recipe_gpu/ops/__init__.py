"""One file an op: ``problems(model)`` gives what is compared at one model's shapes. In the order of the targets."""

from __future__ import annotations

from collections.abc import Callable

from recipe_gpu.ops import (
    attention,
    cross_entropy,
    dropout,
    embedding,
    gelu,
    heads,
    linear_cross_entropy,
    norm,
    packed_attention,
    rope,
    swiglu,
)
from recipe_gpu.problem import Problem
from recipe_gpu.shapes import MODELS, Model

OPS: dict[str, Callable[[Model], list[Problem]]] = {
    "cross_entropy": cross_entropy.problems,
    "linear_cross_entropy": linear_cross_entropy.problems,
    "attention": attention.problems,
    "packed_attention": packed_attention.problems,
    "gelu": gelu.problems,
    "swiglu": swiglu.problems,
    "norm": norm.problems,
    "dropout": dropout.problems,
    "rope": rope.problems,
    "embedding": embedding.problems,
    "heads": heads.problems,
}


def all_problems(only: str | None = None) -> list[Problem]:
    """The problems of every op, or of ``only``, at every model's shapes."""
    return [
        problem for name, make in OPS.items() if only in (None, name) for model in MODELS for problem in make(model)
    ]
