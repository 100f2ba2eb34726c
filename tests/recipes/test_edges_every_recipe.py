"""Edge cases that ask the same of every recipe: 6, 8, 17, 19, 20 and 21; beside each recipe's own tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gradscope import recipes

from .test_once import CASES, Case, result

BY_BACKEND = [
    pytest.param(case, backend, id=f"{case.name} {backend}".strip())
    for case in CASES
    for backend in [name for name in case.backends if name != "triton"] or [""]
]


def inputs_of(case: Case, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in case.shapes]


@pytest.fixture
def packed() -> Iterator[list[torch.Size]]:
    """The shapes of what is saved for backward."""
    found: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


@pytest.mark.parametrize(("case", "backend"), BY_BACKEND)
def test_nothing_is_done_for_a_gradient_that_nobody_wants(case: Case, backend: str, packed: list[torch.Size]) -> None:
    """Case 17: under no_grad, and of tensors that require none."""
    with torch.no_grad():
        without = result(case, backend, inputs_of(case))
    constant = result(case, backend, [tensor.detach() for tensor in inputs_of(case)])
    assert not packed
    assert all(out.grad_fn is None for out in (*without, *constant))
    for out, expected in zip(without, result(case, backend, inputs_of(case)), strict=True):
        # A loss that leaves its gradient behind may add up in another order than one that does not.
        torch.testing.assert_close(out, expected.detach())


@pytest.mark.parametrize(("case", "backend"), BY_BACKEND)
def test_deterministic_algorithms(case: Case, backend: str) -> None:
    """Case 19: the same bits at each run, nothing refused, no memory read that nobody wrote."""

    def run() -> list[Tensor]:
        inputs = inputs_of(case)
        out = result(case, backend, inputs)
        return [*out, *torch.autograd.grad(out, inputs, [torch.ones_like(y) for y in out])]

    plain = run()
    torch.use_deterministic_algorithms(True)
    try:
        once, twice = run(), run()
    finally:
        torch.use_deterministic_algorithms(False)
    for first, *others in zip(plain, once, twice, strict=True):
        assert all(torch.equal(first, other) for other in others)


def settings() -> dict[str, Any]:
    backends: Any = torch.backends
    return {
        "matmul": backends.cuda.matmul.fp32_precision,
        "cudnn": backends.cudnn.conv.fp32_precision,
        "cpu": backends.mkldnn.matmul.fp32_precision,
        "reduced": backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "flash": backends.cuda.flash_sdp_enabled(),
        "efficient": backends.cuda.mem_efficient_sdp_enabled(),
        "math": backends.cuda.math_sdp_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


@pytest.mark.parametrize(("case", "backend"), BY_BACKEND)
def test_the_users_settings_stay(case: Case, backend: str) -> None:
    """Case 21: whether products are in TF32 is the user's, before, during and after."""
    before, seen = settings(), []
    inputs = inputs_of(case)
    watched = [tensor * 1.0 for tensor in inputs]
    for tensor in watched:
        tensor.register_hook(lambda _: seen.append(settings()))
    out = result(case, backend, watched)
    torch.autograd.grad(out, inputs, [torch.ones_like(y) for y in out])
    assert settings() == before and seen == [before] * len(inputs)


KEEPING = ["dropout", "embedding", "swiglu", "rope", "split", "chunk", "split_qkv", "split_heads", "merge_heads"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", KEEPING)
def test_autocast_leaves_dtypes_alone(name: str, dtype: torch.dtype) -> None:
    """Case 8: of what is on none of autocast's lists, as torch's operations are."""
    case = next(case for case in CASES if case.name == name)
    inputs = inputs_of(case, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = result(case, "", inputs)
    gradients = torch.autograd.grad(out, inputs, [torch.ones_like(y) for y in out])
    assert {tensor.dtype for tensor in (*out, *gradients)} == {dtype}


@pytest.mark.parametrize(
    "run",
    [
        lambda x: recipes.split(x, 3, -1),
        lambda x: recipes.chunk(x, 2, 0),
        lambda x: recipes.split_qkv(x, 2),
        lambda x: recipes.split_heads(x, 2),
        lambda x: recipes.merge_heads(x[:, None]),
    ],
    ids=["split", "chunk", "split_qkv", "split_heads", "merge_heads"],
)
@pytest.mark.parametrize("shape", [(0, 5, 6), (2, 0, 6)], ids=["no batch", "no tokens"])
def test_heads_of_nothing(shape: tuple[int, ...], run: Callable[[Tensor], Any]) -> None:
    """Case 6."""
    x = torch.zeros(shape, requires_grad=True)
    found = run(x)
    out = found if isinstance(found, tuple) else (found,)
    (gradient,) = torch.autograd.grad(out, x, [torch.ones_like(y) for y in out])
    assert gradient.shape == x.shape and all(y.numel() == 0 for y in out)


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "add_layer_norm"])
def test_squares_beyond_float16(name: str) -> None:
    """Case 20: 300 squared is beyond float16; so is the sum of a row."""
    x, weight = (300 * torch.randn(4, 64)).half().requires_grad_(), torch.ones(64, dtype=torch.float16)
    nothing, upstream = torch.zeros(4, 64, dtype=torch.float16), torch.randn(4, 64).half()
    if name == "rms_norm":
        out = recipes.rms_norm(x, (64,), weight, 1e-5, backend="cpu")
    else:
        out = getattr(recipes, name)(x, nothing, weight, eps=1e-5, backend="cpu")[0]
    (slope,) = torch.autograd.grad(out, x, upstream)
    true = x.detach().double().requires_grad_()
    normal = functional.layer_norm(true, (64,), eps=1e-5)
    if "rms" in name:
        normal = functional.rms_norm(true, (64,), eps=1e-5)
    (expected,) = torch.autograd.grad(normal, true, upstream.double())
    # Two roundings to float16, of 11 bits; its smallest step, 6e-8, shows in the gradient.
    torch.testing.assert_close(out.double(), normal.detach(), rtol=2**-10, atol=2**-10)
    torch.testing.assert_close(slope.double(), expected, rtol=2**-9, atol=2**-23)


def test_gates_beyond_float16() -> None:
    """Case 20: exp of a large gate would overflow; silu does not."""
    gate = torch.tensor([-60000.0, -100.0, 0.0, 100.0, 60000.0]).half().requires_grad_()
    up = torch.full((5,), 0.5).half().requires_grad_()
    out = recipes.swiglu(gate, up, backend="cpu")
    slopes = torch.autograd.grad(out, (gate, up), torch.ones_like(out))
    assert out.tolist() == [0.0, 0.0, 0.0, 50.0, 30000.0]
    assert slopes[0].tolist() == [0.0, 0.0, 0.25, 0.5, 0.5]
    # float16 holds 100 · exp(-100) as 0, and 60000 as 60000.
    assert slopes[1].tolist() == [0.0, 0.0, 0.0, 100.0, 60000.0]


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gates_of_gelu_beyond_float16(approximate: str) -> None:
    """Case 20: the cube of a large gate would overflow."""
    gate = torch.tensor([-60000.0, -100.0, 0.0, 100.0, 60000.0]).half().requires_grad_()
    up = torch.full((5,), 0.5).half().requires_grad_()
    out = recipes.geglu(gate, up, approximate, backend="cpu")
    slopes = torch.autograd.grad(out, (gate, up), torch.ones_like(out))
    assert out.tolist() == [0.0, 0.0, 0.0, 50.0, 30000.0]
    assert slopes[1].tolist() == [0.0, 0.0, 0.0, 100.0, 60000.0]
    assert slopes[0].tolist() == [0.0, 0.0, 0.25, 0.5, 0.5]


def test_rotations_beyond_float16() -> None:
    """Case 20: the sum of two products is in float32, for one of them alone may be beyond float16."""
    x = torch.full((1, 1, 1, 2), 60000.0).half()
    angle = torch.tensor([[0.1]])
    found = recipes.rope(x, angle.cos(), angle.sin())
    true = 60000 * (angle.cos() - angle.sin()).item()
    assert found[0, 0, 0, 0].item() == pytest.approx(true, rel=2**-11)
