"""GELU by torch, and bias_gelu on the CPU."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from gradscope.kernels.gelu.reference import gelu_reference
from gradscope.recipes.gelu import GELU, BiasGELU, bias_gelu, gelu

from .accuracy import assert_as_accurate, dirty_memory
from .opinfo import samples

# Dynamo makes an instance of every Function that it traces, of which torch itself warns.
COMPILES = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
APPROXIMATE = pytest.mark.parametrize("approximate", ["none", "tanh"])


def gradients(function: object, upstream: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The result, and the gradient of each input."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves)  # type: ignore[operator]
    return (output.detach(), *torch.autograd.grad(output, leaves, upstream))


def assert_close(dtype: torch.dtype, approximate: str, upstream: Tensor, x: Tensor, bias: Tensor) -> None:
    ours = gradients(partial(bias_gelu, approximate=approximate), upstream, x, bias)
    eager = gradients(lambda a, b: functional.gelu(a + b, approximate=approximate), upstream, x, bias)
    truth = gradients(lambda a, b: gelu_reference(a + b, approximate), upstream.double(), x.double(), bias.double())
    for name, mine, torchs, true in zip(("output", "input", "bias"), ours, eager, truth, strict=True):
        assert_as_accurate(mine, torchs, true, name)


@APPROXIMATE
def test_bias_gelu_passes_torchs_own_samples(approximate: str) -> None:
    """With a bias of zero it is gelu."""
    for sample in samples("gelu", torch.float32):
        if sample.input.dim():
            ours = bias_gelu(sample.input, torch.zeros(sample.input.shape[-1]), approximate)
            assert torch.equal(ours, functional.gelu(sample.input, approximate=approximate))


@APPROXIMATE
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_gradcheck(approximate: str, shape: tuple[int, ...]) -> None:
    """Edge case 1: gradcheck's upstream gradients are not uniform."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert bias_gelu.explain(x, bias).backend == "cpu"
    assert torch.autograd.gradcheck(partial(bias_gelu, approximate=approximate), (x, bias))
    assert torch.autograd.gradcheck(partial(gelu, approximate=approximate), x)


@settings(deadline=None, derandomize=True, max_examples=30, database=None)
@given(
    shape=st.lists(st.integers(0, 5), min_size=0, max_size=2),
    features=st.integers(0, 33),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    approximate=st.sampled_from(["none", "tanh"]),
    layout=st.sampled_from(["contiguous", "transposed", "sliced", "expanded"]),
)
def test_any_shape_stride_and_dtype(
    shape: list[int], features: int, dtype: torch.dtype, approximate: str, layout: str
) -> None:
    """Edge case 11: transposed, sliced and expanded inputs and gradients."""
    size = (*shape, features)
    if layout == "transposed":
        x, upstream = (torch.randn(size[::-1]).permute(*range(len(size))[::-1]).to(dtype) for _ in range(2))
    elif layout == "sliced":
        x, upstream = (torch.randn(*shape, 2 * features)[..., ::2].to(dtype) for _ in range(2))
    elif layout == "expanded":
        x, upstream = (torch.randn(()).to(dtype).expand(size) for _ in range(2))
    else:
        x, upstream = (torch.randn(size).to(dtype) for _ in range(2))
    assert_close(dtype, approximate, upstream, x, torch.randn(features).to(dtype))


@APPROXIMATE
def test_a_sum_as_loss_gives_an_expanded_gradient(approximate: str) -> None:
    """Edge case 11: ``y.sum().backward()`` hands over a gradient of stride 0."""
    x, bias = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    bias_gelu(x, bias, approximate).sum().backward()
    expected = gradients(lambda a, b: functional.gelu(a + b, approximate=approximate), torch.ones(4, 6), x, bias)
    torch.testing.assert_close((x.grad, bias.grad), expected[1:])


def test_nobodys_tensor_is_overwritten() -> None:
    """Edge cases 2 and 4: neither input nor the upstream gradient changes, also with a residual fork."""
    x, bias = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    before, upstream = x.detach().clone(), torch.randn(4, 6)
    given_before = upstream.clone()
    (bias_gelu(x, bias) + x).backward(upstream)
    assert torch.equal(x.detach(), before)
    assert torch.equal(upstream, given_before)
    (expected,) = torch.autograd.grad(functional.gelu(x + bias) + x, x, upstream)
    torch.testing.assert_close(x.grad, expected)


def test_the_gradient_lies_where_the_saved_sum_was() -> None:
    x, bias = torch.randn(4, 6, requires_grad=True), torch.randn(6)
    output = bias_gelu(x, bias)
    (saved,) = output.grad_fn.saved_tensors  # type: ignore[union-attr]
    (found,) = torch.autograd.grad(output, x, torch.ones(4, 6))
    assert found.data_ptr() == saved.data_ptr()


def test_a_retained_graph_gives_the_same_twice() -> None:
    """Edge case 3: a second backward, allowed or not."""
    x, bias = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    output, upstream = bias_gelu(x, bias), torch.randn(4, 6)
    first = torch.autograd.grad(output, (x, bias), upstream, retain_graph=True)
    first = tuple(gradient.clone() for gradient in first)
    assert all(map(torch.equal, first, torch.autograd.grad(output, (x, bias), upstream)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output, (x, bias), upstream)


@pytest.mark.parametrize("shape", [(0, 6), (3, 0), (0,)])
def test_an_empty_batch(shape: tuple[int, ...]) -> None:
    """Edge case 6: no rows, or no features, as torch has it."""
    x, bias = torch.randn(shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    bias_gelu(x, bias).sum().backward()
    assert x.grad is not None and x.grad.shape == shape
    assert bias.grad is not None and torch.equal(bias.grad, torch.zeros(shape[-1]))


@APPROXIMATE
def test_a_float32_bias_under_autocast(approximate: str) -> None:
    """Edge case 8: a bfloat16 activation meets a float32 parameter."""
    layer, bias = nn.Linear(8, 6, bias=False), torch.randn(6, requires_grad=True)
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        output = bias_gelu(layer(x), bias, approximate)
        assert output.dtype == torch.bfloat16
        functional.gelu(functional.linear(x, layer.weight, bias), approximate=approximate)
    output.float().sum().backward()
    assert bias.grad is not None and bias.grad.dtype == torch.float32
    pre = (x @ layer.weight.detach().t() + bias.detach()).requires_grad_()
    functional.gelu(pre, approximate=approximate).sum().backward()
    assert pre.grad is not None
    # Four rows of slopes below 1.13, each of a sum rounded to bfloat16's 8 bits.
    torch.testing.assert_close(bias.grad, pre.grad.sum(0), atol=4 * 1.13 * 2**-7, rtol=0)


@APPROXIMATE
@pytest.mark.parametrize("dynamic", [False, True])
@COMPILES
def test_compiles_in_one_graph(approximate: str, dynamic: bool) -> None:
    """Edge case 9."""
    x, bias = torch.randn(4, 6, requires_grad=True), torch.randn(6, requires_grad=True)
    compiled = torch.compile(
        lambda a, b: gelu(bias_gelu(a, b, approximate), approximate),
        fullgraph=True,
        backend="aot_eager",
        dynamic=dynamic,
    )
    ours = torch.autograd.grad(compiled(x, bias).square().sum(), (x, bias))
    eager = functional.gelu(functional.gelu(x + bias, approximate=approximate), approximate=approximate)
    torch.testing.assert_close(ours, torch.autograd.grad(eager.square().sum(), (x, bias)))


def test_nothing_is_kept_without_gradients() -> None:
    """Edge case 17."""
    x, bias = torch.randn(4, 6), torch.randn(6, requires_grad=True)
    with torch.no_grad():
        assert bias_gelu(x, bias).grad_fn is None
    assert not bias_gelu(x, bias.detach()).requires_grad
    with torch.inference_mode():
        assert torch.equal(bias_gelu(x, bias), functional.gelu(x + bias))


@pytest.mark.parametrize("input_dtype", [torch.int64, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.float32, torch.float64])
def test_promotes_as_torch_does(input_dtype: torch.dtype, bias_dtype: torch.dtype) -> None:
    x, bias = (4 * torch.randn(3, 5)).to(input_dtype), torch.randn(5).to(bias_dtype)
    torch.testing.assert_close(bias_gelu(x, bias, promote=True), functional.gelu(x + bias))
    if input_dtype != bias_dtype:
        assert bias_gelu.explain(x, bias, promote=True).backend == "torch"


def test_only_what_is_asked_for_is_computed() -> None:
    x, bias = torch.randn(4, 6), torch.randn(6, requires_grad=True)
    (found,) = torch.autograd.grad(bias_gelu(x, bias).sum(), bias)
    (expected,) = torch.autograd.grad(functional.gelu(x + bias).sum(), bias)
    torch.testing.assert_close(found, expected)


def test_a_second_derivative_is_refused_by_bias_gelu_and_given_by_gelu() -> None:
    """Edge case 19."""
    x, bias = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.randn(6, dtype=torch.float64)
    (first,) = torch.autograd.grad(bias_gelu(x, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    assert torch.autograd.gradgradcheck(gelu, x)
    assert torch.autograd.gradgradcheck(partial(bias_gelu, backend="torch"), (x, bias))


def test_no_memory_is_left_unwritten() -> None:
    """Edge case 19: deterministic mode, which also fills new memory with NaN."""
    x, bias, upstream = torch.randn(7, 33), torch.randn(33), torch.randn(7, 33)
    with dirty_memory():
        found = gradients(bias_gelu, upstream, x, bias)
    torch.testing.assert_close(found, gradients(lambda a, b: functional.gelu(a + b), upstream, x, bias))


def test_modules_are_drop_ins() -> None:
    x = torch.randn(4, 6)
    assert torch.equal(GELU("tanh")(x), nn.GELU("tanh")(x))
    assert repr(GELU("tanh")) == "GELU(approximate='tanh')"
    module = BiasGELU(6, "tanh")
    assert repr(module) == "BiasGELU(6, approximate='tanh')"
    nn.init.normal_(module.bias)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    assert list(twin.state_dict()) == ["bias"]
    assert torch.equal(twin(x), functional.gelu(x + module.bias, approximate="tanh"))


def test_explain_says_why() -> None:
    x, bias = torch.randn(4, 6), torch.randn(6)
    assert str(gelu.explain(x)).startswith("torch: torch.nn.functional.gelu reads and writes once")
    assert str(bias_gelu.explain(x, bias)).splitlines() == [
        "cpu: torch's own operations, with the gradient written over the saved sum",
        "not triton: Triton has no cpu backend",
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gelu(torch.ones(3, dtype=torch.int64)), "gelu: input is of dtype int64; expected float32 or float64"),
        (lambda: gelu(torch.ones(3), "erf"), "gelu: approximate is 'erf'; expected 'none' or 'tanh'"),
        (lambda: gelu(torch.ones(3), backend="cpu"), "gelu: backend is 'cpu'; expected 'auto' or 'torch'"),
        (lambda: bias_gelu(torch.tensor(1.0), torch.ones(1)), "input is a scalar; expected [..., features]"),
        (lambda: bias_gelu(torch.ones(2, 3), torch.ones(4)), "bias is of shape (4,); expected (3,) for input of shape"),
        (
            lambda: bias_gelu(torch.ones(2, 3), torch.ones(3, dtype=torch.float16)),
            "bias is of dtype float16; expected float32, as input, or float32",
        ),
        (
            lambda: bias_gelu(torch.ones(2, 3, dtype=torch.float64), torch.ones(3)),
            "bias is of dtype float32; expected float64",
        ),
        (
            lambda: bias_gelu(torch.ones(2, 3), torch.ones(3, device="meta")),
            "bias is on meta; expected cpu, where input is",
        ),
        (
            lambda: bias_gelu(torch.ones(2, 3), torch.ones(3), backend="triton"),
            "backend='triton' cannot run here: Triton has no cpu backend",
        ),
    ],
)
def test_bad_input_is_named(call: object, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()  # type: ignore[operator]
    assert message in str(raised.value)
