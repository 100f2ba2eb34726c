"""Edge cases 3 and 19, of every recipe: a retained graph gives the same again, a second derivative is right or refused.

Refused also where the upstream gradient needs no gradient, which ``once_differentiable`` lets through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import gradscope.recipes
from gradscope import recipes

IDS = torch.tensor([[0, 3], [4, 3]])
TARGET = torch.tensor([0, 4, -100, 2])
WHOLE = None  # in place of what refuses: all derivatives are there
BY_TORCH = 'backend="torch" supports second derivatives'
BY_VIEWS = "torch's split, unflatten, transpose and flatten support second derivatives"
BY_LOSSES = f"{BY_TORCH}, but not z_loss and softcap"


@dataclass(frozen=True)
class Case:
    """A recipe on small inputs."""

    name: str
    shapes: tuple[tuple[int, ...], ...]  # of inputs that require gradients
    run: Callable[..., Any]  # of these, with ``backend`` by keyword where there is a choice
    refuses: tuple[str, str] | None  # who does, and what it names instead
    backends: tuple[str, ...] = ()


def attention_of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(1)
    return recipes.attention(q, k, v, dropout_p=0.25, is_causal=True, **options)


def weighted_of(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(1)
    return recipes.attention_with_weights(q, k, v, dropout_p=0.25, is_causal=True, **options)[0]


def dropout_of(x: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(1)
    return recipes.dropout(x, 0.25, **options)


def rope_of(x: Tensor, **options: Any) -> Any:
    angles = torch.linspace(0, 1, 10, device=x.device).view(5, 2)
    return recipes.rope(x, angles.cos(), angles.sin(), **options)


BOTH = ("cpu", "triton")
HEADS = (1, 2, 5, 4)
CASES = [
    Case(
        "attention",
        (HEADS, HEADS, HEADS),
        attention_of,
        ("attention", 'backend="math" supports second derivatives'),
        BOTH,
    ),
    Case(
        "attention_with_weights",
        (HEADS,) * 3,
        weighted_of,
        ("attention", 'backend="math" supports second derivatives'),
        BOTH,
    ),
    Case(
        "cross_entropy",
        ((4, 5),),
        lambda x, **o: recipes.cross_entropy(x, TARGET.to(x.device), **o),
        ("cross_entropy", BY_LOSSES),
        BOTH,
    ),
    Case("dropout", ((4, 5),), dropout_of, WHOLE, BOTH),
    Case("embedding", ((5, 3),), lambda w: recipes.embedding(IDS, w), WHOLE),
    Case("gelu", ((4, 5),), recipes.gelu, WHOLE),
    Case("bias_gelu", ((4, 5), (5,)), recipes.bias_gelu, ("bias_gelu", BY_TORCH), BOTH),
    Case(
        "linear_cross_entropy",
        ((4, 3), (5, 3)),
        lambda x, w, **o: recipes.linear_cross_entropy(x, w, TARGET.to(x.device), **o),
        ("linear_cross_entropy", BY_LOSSES),
        BOTH,
    ),
    Case(
        "linear_cross_entropy_and_logits",
        ((4, 3), (5, 3)),
        lambda x, w, **o: recipes.linear_cross_entropy_and_logits(x, w, TARGET.to(x.device), reduction="none", **o)[0],
        ("linear_cross_entropy", BY_LOSSES),
        BOTH,
    ),
    Case(
        "lazy_linear",
        ((4, 3), (5, 3)),
        lambda x, w: functional.cross_entropy(recipes.lazy_linear(w, x), TARGET),
        ("linear_cross_entropy", BY_LOSSES),
    ),
    Case("layer_norm", ((4, 5), (5,)), lambda x, w: recipes.layer_norm(x, (5,), w, exact=True), WHOLE),
    Case(
        "rms_norm",
        ((4, 5), (5,)),
        lambda x, w, **o: recipes.rms_norm(x, (5,), w, **o),
        ("rms_norm", BY_TORCH),
        ("cpu",),
    ),
    Case("add_layer_norm", ((4, 5),) * 2, recipes.add_layer_norm, ("add_layer_norm or add_rms_norm", BY_TORCH), BOTH),
    Case("add_rms_norm", ((4, 5),) * 2, recipes.add_rms_norm, ("add_layer_norm or add_rms_norm", BY_TORCH), BOTH),
    Case("swiglu", ((4, 6),), recipes.swiglu, ("swiglu or geglu", BY_TORCH), BOTH),
    Case("geglu", ((4, 6), (4, 6)), recipes.geglu, ("swiglu or geglu", BY_TORCH), BOTH),
    Case(
        "split",
        ((4, 6),),
        lambda x: recipes.split(x, 2, -1),
        ("split or chunk", "torch's versions support second derivatives"),
    ),
    Case(
        "chunk",
        ((4, 6),),
        lambda x: recipes.chunk(x, 3, -1),
        ("split or chunk", "torch's versions support second derivatives"),
    ),
    Case("split_qkv", ((1, 5, 12),), lambda x: recipes.split_qkv(x, 2), ("split_qkv", BY_VIEWS)),
    Case("split_heads", ((1, 5, 8),), lambda x: recipes.split_heads(x, 2), ("split_heads", BY_VIEWS)),
    Case(
        "packed_attention",
        ((1, 5, 24),),
        lambda x, **o: recipes.packed_attention(x, 2, **o),
        ("packed_attention", "attention(..., backend='math') supports second derivatives"),
        BOTH,
    ),
    Case("merge_heads", (HEADS,), recipes.merge_heads, ("merge_heads", BY_VIEWS)),
    Case("rope", (HEADS,), rope_of, WHOLE, BOTH),
]
NO_GRADIENTS = {"attention_mask"}  # what gives arguments, and computes nothing
BY_BACKEND = [
    pytest.param(case, backend, id=f"{case.name} {backend}".strip())
    for case in CASES
    for backend in case.backends or ("",)
]


def result(case: Case, backend: str, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    found = case.run(*inputs, **({"backend": backend} if backend else {}))
    return found if isinstance(found, tuple) else (found,)


@pytest.fixture
def inputs_of(request: pytest.FixtureRequest) -> Callable[[Case, str], list[Tensor]]:
    def drawn(case: Case, backend: str) -> list[Tensor]:
        if backend == "triton":
            device, dtype = request.getfixturevalue("triton_device"), torch.float32
        else:
            device, dtype = torch.device("cpu"), torch.float64
        return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in case.shapes]

    return drawn


InputsOf = Callable[[Case, str], list[Tensor]]
interpreted = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # numpy, of hashes that wrap


@interpreted
@pytest.mark.parametrize(("case", "backend"), BY_BACKEND)
def test_second_derivative(case: Case, backend: str, inputs_of: InputsOf) -> None:
    """Case 19, with upstream gradients that need none."""
    inputs = inputs_of(case, backend)
    if case.refuses is WHOLE:
        if backend != "triton":
            assert torch.autograd.gradgradcheck(lambda *x: [y.pow(2) for y in result(case, backend, list(x))], inputs)
        return
    # Computed from the leaves, as logits are from weights: the refusal must be met on the way to these.
    out = result(case, backend, [x * 1.0 for x in inputs])
    loss = torch.stack([y.sum() for y in out]).sum()
    for slope in torch.autograd.grad(loss, inputs, create_graph=True):
        with pytest.raises(RuntimeError) as raised:
            torch.autograd.grad(loss + slope.sum(), inputs, retain_graph=True)
        who, instead = case.refuses
        assert str(raised.value) == (
            f"{who}: second derivatives are not supported (the backward is once_differentiable); {instead}"
        )


@interpreted
@pytest.mark.parametrize(("case", "backend"), BY_BACKEND)
def test_a_graph_of_the_gradient_changes_no_value(case: Case, backend: str, inputs_of: InputsOf) -> None:
    """Also where the upstream gradient needs one; it keeps its own ``requires_grad``, and what it holds."""
    inputs = inputs_of(case, backend)
    out = result(case, backend, inputs)
    upstream = [torch.randn_like(y) for y in out]
    before = [given.clone() for given in upstream]
    plain = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    graphed = torch.autograd.grad(out, inputs, upstream, retain_graph=True, create_graph=True)
    assert not any(given.requires_grad for given in upstream)
    curved = torch.autograd.grad(out, inputs, [given.clone().requires_grad_() for given in upstream], create_graph=True)
    for value, *others in zip(plain, graphed, curved, strict=True):
        assert not value.requires_grad
        for other in others:
            assert other.requires_grad or case.refuses is WHOLE
            assert torch.equal(value, other)
    for given, then in zip(upstream, before, strict=True):
        assert torch.equal(given, then)


@interpreted
@pytest.mark.parametrize(("case", "backend"), BY_BACKEND)
def test_a_retained_graph_gives_the_same_again(case: Case, backend: str, inputs_of: InputsOf) -> None:
    """Case 3."""
    inputs = inputs_of(case, backend)
    out = result(case, backend, inputs)
    upstream = [torch.randn_like(y) for y in out]
    found = [torch.autograd.grad(out, inputs, upstream, retain_graph=keep) for keep in (True, True, False)]
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


@pytest.mark.parametrize("name", ["attention", "bias_gelu", "swiglu", "geglu"])
def test_saved_tensors_are_unpacked_once(name: str) -> None:
    """Checkpointing raises where a node unpacks them again."""
    case = next(case for case in CASES if case.name == name)
    inputs = [torch.randn(shape, requires_grad=True) for shape in case.shapes]
    out = checkpoint(lambda *x: case.run(*x, backend="cpu"), *inputs, use_reentrant=False)
    graphed = torch.autograd.grad(out, inputs, torch.ones_like(out), create_graph=True)
    plain = case.run(*inputs, backend="cpu")
    for other, expected in zip(graphed, torch.autograd.grad(plain, inputs, torch.ones_like(plain)), strict=True):
        torch.testing.assert_close(other, expected)


def test_every_recipe_is_here() -> None:
    functions = {name for name in gradscope.recipes.__all__ if name.islower()}
    assert functions - NO_GRADIENTS == {case.name for case in CASES}
