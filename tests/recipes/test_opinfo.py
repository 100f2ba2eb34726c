"""The recipes on PyTorch's own samples: values and gradients as exact as torch's, and errors where torch has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradscope.recipes import (
    attention,
    chunk,
    cross_entropy,
    dropout,
    embedding,
    gelu,
    layer_norm,
    linear_cross_entropy,
    rms_norm,
    split,
    swiglu,
)

from .accuracy import assert_as_accurate
from .opinfo import error_inputs, samples


class Pair(NamedTuple):
    """A recipe and what it stands for, both called as OpInfo calls its operation; and samples that it is not for."""

    recipe: Callable[..., Any]
    torchs: Callable[..., Any]
    without: Callable[[Any], bool] = lambda sample: False


def _random(sample: Any) -> bool:
    """Check that dropout draws numbers: others than torch's then, and so another result."""
    return sample.kwargs.get("training", True) and 0 < sample.kwargs.get("p", 0.5) < 1


PAIRS = {
    "chunk": Pair(chunk, torch.chunk),
    "dropout": Pair(dropout, functional.dropout, _random),
    "embedding": Pair(
        lambda weight, ids, **options: embedding(ids, weight, **options),
        lambda weight, ids, **options: functional.embedding(ids, weight, **options),
    ),
    "gelu": Pair(gelu, functional.gelu),
    "layer_norm": Pair(layer_norm, functional.layer_norm),
    "linear_cross_entropy": Pair(
        lambda *tensors, options=None, **settings: linear_cross_entropy(*tensors, **settings),
        lambda *tensors, options=None, **settings: functional.linear_cross_entropy(*tensors, **settings),
    ),
    "nll_loss": Pair(
        cross_entropy,
        lambda x, *arguments, **options: functional.nll_loss(
            functional.log_softmax(x, min(1, x.dim() - 1)), *arguments, **options
        ),
    ),
    "rms_norm": Pair(rms_norm, functional.rms_norm),
    "silu": Pair(
        lambda x, inplace=False: swiglu(x, torch.ones_like(x)),
        lambda x, inplace=False: functional.silu(x),
        lambda sample: not sample.input.dim(),
    ),
    "split": Pair(split, torch.split),
}


def _tensors(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _run(function: Callable[..., Any], sample: Any, dtype: torch.dtype) -> list[Tensor]:
    """Results of a sample with its floating tensors of ``dtype``, then its leaves' gradients."""

    def copied(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().to(dtype).requires_grad_(value.requires_grad)

    arguments = [copied(value) for value in (sample.input, *sample.args)]
    options = {name: copied(value) for name, value in sample.kwargs.items()}
    results = _tensors(function(*arguments, **options))
    leaves = [x for x in (*arguments, *options.values()) if isinstance(x, Tensor) and x.requires_grad]
    torch.manual_seed(1)
    upstream = [torch.randn(x.shape, dtype=torch.float64).to(x.dtype) for x in results]
    return [*(x.detach() for x in results), *torch.autograd.grad(results, leaves, upstream)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    if not hasattr(functional, name) and not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    recipe, torchs, without = PAIRS[name]
    compared = 0
    for sample in samples(name, dtype):
        if without(sample):
            continue
        ours, theirs, truth = (
            _run(recipe, sample, dtype),
            _run(torchs, sample, dtype),
            _run(torchs, sample, torch.float64),
        )
        for place, (mine, other, true) in enumerate(zip(ours, theirs, truth, strict=True)):
            what = f"{place} of {tuple(sample.input.shape)}, {sample.args}, {sample.kwargs}"
            if dtype == torch.float64:
                torch.testing.assert_close(mine, other, equal_nan=True, msg=lambda text, w=what: f"{w}: {text}")
            else:
                assert torch.equal(mine.isnan(), true.isnan()), what
                assert_as_accurate(*(x.nan_to_num(0.0) for x in (mine, other, true)), what)
        compared += 1
    assert compared


@pytest.mark.parametrize("name", ["embedding", "gelu", "linear_cross_entropy", "rms_norm"])
def test_errors(name: str) -> None:
    """What torch's own tests want refused is refused, by an error of torch's type that names the argument."""
    if not hasattr(functional, name):
        pytest.skip(f"this torch has no {name}")
    refused = error_inputs(name)
    assert refused
    for case in refused:
        sample = case.sample_input
        with pytest.raises(case.error_type, match=rf"^{name}: \w+ is .*; expected ") as caught:
            PAIRS[name].recipe(sample.input, *sample.args, **sample.kwargs)
        assert isinstance(caught.value, ValueError)


X, T = torch.ones(3, 5), torch.zeros(3, dtype=torch.int64)
Q = torch.ones(2, 3, 4, 8)
WRONG: list[tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (cross_entropy, functional.cross_entropy, (X, T[:2]), {}),
    (cross_entropy, functional.cross_entropy, (X, T + 5), {}),
    (cross_entropy, functional.cross_entropy, (X, T - 1), {}),
    (cross_entropy, functional.cross_entropy, (X, T.int()), {}),
    (cross_entropy, functional.cross_entropy, (X, torch.ones(3, 4)), {}),
    (cross_entropy, functional.cross_entropy, (X, T, torch.ones(4)), {}),
    (cross_entropy, functional.cross_entropy, (X, T), {"reduction": "average"}),
    (cross_entropy, functional.cross_entropy, (X, T), {"label_smoothing": 1.5}),
    (linear_cross_entropy, getattr(functional, "linear_cross_entropy", None), (X, torch.ones(4, 5), T + 4), {}),
    (embedding, functional.embedding, (T + 3, X), {}),
    (embedding, functional.embedding, (X, X), {}),
    (embedding, functional.embedding, (T, X[0]), {}),
    (layer_norm, functional.layer_norm, (X, (3,)), {}),
    (layer_norm, functional.layer_norm, (X, (5,), torch.ones(3)), {}),
    (layer_norm, functional.layer_norm, (X, (5,), torch.ones(5), torch.ones(3)), {}),
    (gelu, functional.gelu, (X,), {"approximate": "sigmoid"}),
    (gelu, functional.gelu, (T,), {}),
    (dropout, functional.dropout, (X, 1.5), {}),
    (attention, functional.scaled_dot_product_attention, (Q, Q[..., :7], Q), {}),
    (attention, functional.scaled_dot_product_attention, (Q, Q.double(), Q), {}),
    (attention, functional.scaled_dot_product_attention, (Q, Q, Q, torch.ones(5, 5)), {}),
    (attention, functional.scaled_dot_product_attention, (Q[0, 0, 0], Q[0, 0, 0], Q[0, 0, 0]), {}),
    (chunk, torch.chunk, (X, 0), {}),
    (chunk, torch.chunk, (X, 2, 2), {}),
    (split, torch.split, (X, -1), {}),
    (split, torch.split, (X, [1, 1]), {}),
    (split, torch.split, (X, 2, -3), {}),
]


@pytest.mark.parametrize(("recipe", "torchs", "arguments", "options"), WRONG)
def test_errors_are_caught_by_who_expects_torchs(
    recipe: Callable[..., Any], torchs: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """``except IndexError`` around torch's function still catches after the recipe stands in its place."""
    if torchs is None:
        pytest.skip("this torch has no linear_cross_entropy")
    with pytest.raises(Exception) as theirs:
        torchs(*arguments, **options)
    with pytest.raises(ValueError) as ours:
        recipe(*arguments, **options)
    kinds = [kind for kind in (IndexError, RuntimeError, ValueError) if isinstance(theirs.value, kind)]
    assert kinds and all(isinstance(ours.value, kind) for kind in kinds), (theirs.value, ours.value)
