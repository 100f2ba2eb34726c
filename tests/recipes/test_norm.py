"""Normalisation after dropout and the addition to a residual, on the CPU; modules and bad input of both kinds."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradscope.recipes.norm import AddLayerNorm, AddRMSNorm, add_layer_norm, add_rms_norm, layer_norm, rms_norm

from .accuracy import assert_as_accurate, dirty_memory

EPS = 1e-5
# Dynamo makes an instance of every Function that it traces, of which torch itself warns.
COMPILES = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
CENTRED = pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])


def ours(centred: bool, backend: str = "auto", p: float = 0.0) -> Callable[..., tuple[Tensor, Tensor]]:
    """Of input, residual, weight and, if centred, bias."""

    def run(x: Tensor, residual: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        function: Any = add_layer_norm if centred else add_rms_norm
        return function(x, residual, *parameters, eps=EPS, dropout_p=p, backend=backend)

    return run


def eager(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As models write it; with a bias, layer normalisation."""
    stream = residual + x
    if bias is None:
        return functional.rms_norm(stream, stream.shape[-1:], weight, EPS), stream
    return functional.layer_norm(stream, stream.shape[-1:], weight, bias, EPS), stream


def operands(centred: bool, shape: tuple[int, ...], dtype: torch.dtype, device: Any = "cpu") -> list[Tensor]:
    """Input, residual and parameters."""
    vectors = [torch.randn(shape[-1], device=device).to(dtype) for _ in range(2 if centred else 1)]
    return [*(torch.randn(shape, device=device).to(dtype) for _ in range(2)), *vectors]


def gradients(
    function: Callable[..., tuple[Tensor, Tensor]], upstream: tuple[Tensor, Tensor], inputs: list[Tensor]
) -> list[Tensor]:
    """Both results, and the gradient of each input."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    outputs = function(*leaves)
    found = torch.autograd.grad(outputs, leaves, upstream)
    return [*(output.detach() for output in outputs), *found]


NAMES = ("output", "stream", "input", "residual", "weight", "bias")


def assert_accurate(
    function: Callable[..., tuple[Tensor, Tensor]], upstream: tuple[Tensor, Tensor], inputs: list[Tensor]
) -> None:
    mine, torchs = gradients(function, upstream, inputs), gradients(eager, upstream, inputs)
    doubled = (upstream[0].double(), upstream[1].double())
    truth = gradients(eager, doubled, [tensor.double() for tensor in inputs])
    for name, found, other, true in zip(NAMES, mine, torchs, truth, strict=False):
        assert_as_accurate(found, other, true, name)


@CENTRED
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("parameters", [False, True])
def test_gradcheck_added(centred: bool, p: float, parameters: bool) -> None:
    """Edge cases 1, 4 and 14: both results used, the same mask in backward."""
    inputs = [tensor.requires_grad_() for tensor in operands(centred, (3, 5), torch.float64)]
    function = ours(centred, p=p)

    def seeded(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        return function(*tensors)

    assert torch.autograd.gradcheck(seeded, tuple(inputs if parameters else inputs[:2]))


@CENTRED
@pytest.mark.parametrize("used", [0, 1])
def test_one_result_used(centred: bool, used: int) -> None:
    inputs = [tensor.requires_grad_() for tensor in operands(centred, (3, 5), torch.float64)]
    upstream = torch.randn(3, 5, dtype=torch.float64)
    found = torch.autograd.grad(ours(centred)(*inputs)[used], inputs[:2], upstream)
    torch.testing.assert_close(found, torch.autograd.grad(eager(*inputs)[used], inputs[:2], upstream))


@CENTRED
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("learns", [0, 1, 2])
def test_the_sum_wants_a_gradient_where_a_summand_does(centred: bool, p: float, learns: int) -> None:
    inputs = operands(centred, (3, 5), torch.float32)
    inputs[learns].requires_grad_()
    output, stream = ours(centred, "cpu", p)(*inputs)
    assert (output.requires_grad, stream.requires_grad) == (True, learns < 2)
    assert torch.autograd.grad(output.square().sum(), inputs[learns])[0].abs().sum() > 0


@settings(deadline=None, derandomize=True, max_examples=40, database=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=2),
    features=st.integers(3, 40),  # of fewer the gradient is 0, but for eps, and its error all of it
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    layout=st.sampled_from(["contiguous", "transposed", "sliced"]),
    centred=st.booleans(),
)
def test_any_shape_stride_and_dtype(
    shape: list[int], features: int, dtype: torch.dtype, layout: str, centred: bool
) -> None:
    """Edge cases 6 and 11."""
    size = (*shape, features)

    def tensor() -> Tensor:
        if layout == "transposed":
            return torch.randn(size[::-1]).permute(tuple(reversed(range(len(size))))).to(dtype)
        if layout == "sliced":
            return torch.randn(*shape, 2 * features).to(dtype)[..., ::2]
        return torch.randn(size).to(dtype)

    inputs = operands(centred, size, dtype)
    inputs[:2] = [tensor(), tensor()]
    assert_accurate(ours(centred), (tensor(), tensor()), inputs)


@CENTRED
def test_a_retained_graph_and_inputs_stay(centred: bool) -> None:
    """Edge cases 2, 3 and 4: with the input forked."""
    inputs = [tensor.requires_grad_() for tensor in operands(centred, (4, 6), torch.float32)]
    before = [tensor.detach().clone() for tensor in inputs]
    upstream = [torch.randn(4, 6) for _ in range(3)]
    given_before = [tensor.clone() for tensor in upstream]
    outputs = (*ours(centred)(*inputs), inputs[0] * 2)
    first = torch.autograd.grad(outputs, inputs, upstream, retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(outputs, inputs, upstream)))
    expected = torch.autograd.grad((*eager(*inputs), inputs[0] * 2), inputs, given_before)
    torch.testing.assert_close(first, expected)
    assert all(map(torch.equal, before, inputs)) and all(map(torch.equal, upstream, given_before))


@CENTRED
def test_the_gradients_of_input_and_residual_can_be_accumulated_apart(centred: bool) -> None:
    """Edge case 4: without dropout they are one tensor, which nobody may write to."""
    inputs = [tensor.requires_grad_() for tensor in operands(centred, (4, 6), torch.float32)]
    expected = [2 * gradient for gradient in torch.autograd.grad(sum(t.sum() for t in eager(*inputs)), inputs)]
    for _ in range(2):
        sum(tensor.sum() for tensor in ours(centred)(*inputs)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close([tensor.grad for tensor in inputs], expected)


@CENTRED
@pytest.mark.parametrize("reentrant", [False, True])
def test_dropout_and_recompute(centred: bool, reentrant: bool) -> None:
    """Edge case 14: the share, the same mask in backward and when computed again; nothing dropped in eval."""
    inputs = operands(centred, (50, 40), torch.float32)
    x, residual = torch.ones(50, 40, requires_grad=True), torch.zeros(50, 40, requires_grad=True)
    _, stream = checkpoint(ours(centred, p=0.25), x, residual, *inputs[2:], use_reentrant=reentrant)
    stream.sum().backward()
    assert torch.equal(x.grad, stream.detach()) and torch.equal(residual.grad, torch.ones(50, 40))
    assert set(stream.detach().unique().tolist()) == {0.0, (torch.ones(()) * (1 / 0.75)).item()}
    assert 0.65 < (stream != 0).float().mean() < 0.85  # 0.75, with 10 standard deviations
    function: Any = add_layer_norm if centred else add_rms_norm
    assert torch.equal(function(x, residual, dropout_p=0.25, training=False)[1], x)


@CENTRED
def test_kept_are_the_stream_and_a_number_or_two_a_row(centred: bool) -> None:
    inputs = [tensor.requires_grad_() for tensor in operands(centred, (4, 6), torch.float32)]
    output, stream = ours(centred, p=0.1)(*inputs)
    kept = output.grad_fn.saved_tensors  # type: ignore[union-attr]
    sizes = sorted(tensor.numel() for tensor in kept if tensor is not None)
    assert sizes == sorted([24, 4, 6, 1, *([4, 6] if centred else [])])
    assert stream.data_ptr() in [tensor.data_ptr() for tensor in kept if tensor is not None]


@CENTRED
def test_a_float32_weight_with_bfloat16_and_autocast(centred: bool) -> None:
    """Edge case 8."""
    inputs = operands(centred, (4, 6), torch.bfloat16)
    inputs[2:] = [tensor.float().requires_grad_() for tensor in inputs[2:]]
    output, stream = ours(centred)(*inputs)
    assert output.dtype == stream.dtype == torch.bfloat16
    output.float().sum().backward()
    assert inputs[2].grad is not None and inputs[2].grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        again, _ = ours(centred)(*inputs)
        assert again.dtype == torch.bfloat16
        x = torch.randn(4, 6)
        assert rms_norm(x, (6,)).dtype == functional.rms_norm(x, (6,)).dtype
    torch.testing.assert_close(again, output)


@CENTRED
def test_a_second_derivative_is_refused(centred: bool) -> None:
    """Edge case 19."""
    inputs = [tensor.requires_grad_() for tensor in operands(centred, (4, 6), torch.float64)]
    (first,) = torch.autograd.grad(ours(centred)(*inputs)[0].square().sum(), inputs[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    assert torch.autograd.gradgradcheck(ours(centred, "torch"), tuple(inputs))


@CENTRED
def test_no_memory_is_left_unwritten(centred: bool) -> None:
    """Edge case 19: deterministic mode, which also fills new memory with NaN."""
    inputs, upstream = operands(centred, (7, 10), torch.float32), (torch.randn(7, 10), torch.randn(7, 10))
    with dirty_memory():
        found = gradients(ours(centred), upstream, inputs)
    torch.testing.assert_close(found, gradients(eager, upstream, inputs))


@COMPILES
@CENTRED
def test_compiles_in_one_graph(centred: bool) -> None:
    """Edge case 9: on a CPU torch's own operations are what the compiler fuses."""
    inputs = [tensor.requires_grad_() for tensor in operands(centred, (4, 6), torch.float32)]

    def run(*tensors: Tensor) -> Tensor:
        output, stream = ours(centred)(*tensors)
        alone = layer_norm(output, (6,)) if centred else rms_norm(output, (6,), eps=EPS)
        return alone.square().sum() + stream.sum()

    found = torch.autograd.grad(torch.compile(run, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    torch.testing.assert_close(found, torch.autograd.grad(run(*inputs), inputs))


def test_nothing_is_kept_without_gradients() -> None:
    """Edge case 17."""
    x, weight = torch.randn(4, 6), torch.randn(6, requires_grad=True)
    with torch.no_grad():
        assert rms_norm(x, (6,), weight).grad_fn is None
        assert add_rms_norm(x, x, weight)[0].grad_fn is None


def test_modules() -> None:
    x, residual = torch.randn(4, 6), torch.randn(4, 6)
    rms, layer = AddRMSNorm(6, dropout_p=0.1), AddLayerNorm(6)
    assert repr(rms) == "AddRMSNorm(6, eps=None, dropout_p=0.1)"
    twin = pickle.loads(pickle.dumps(copy.deepcopy(rms))).eval()
    torch.testing.assert_close(twin(x, residual)[0], functional.rms_norm(x + residual, (6,)))
    assert list(layer.state_dict()) == ["weight", "bias"]
    torch.testing.assert_close(layer(x, residual)[0], functional.layer_norm(x + residual, (6,)))


def test_explain_says_why() -> None:
    x = torch.randn(3, 4)
    assert str(layer_norm.explain(x, (4,))) == (
        "torch: torch.nn.functional.layer_norm reads and writes once\nnot cpu: there is no long float32 sum"
    )
    assert str(rms_norm.explain(x, (4,))) == ("cpu: a few rows at a time in the cache; torch runs it unfused on a CPU")
    assert add_rms_norm.explain(x, x).refused == {"triton": "Triton has no cpu backend"}


X = torch.randn(3, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: rms_norm(X, (3,)),
            "rms_norm: normalized_shape is (3,); expected the last dimensions of input of shape",
        ),
        (lambda: rms_norm(X, ()), "rms_norm: normalized_shape is (); expected the last dimensions"),
        (lambda: rms_norm(X, (4,), X[0, :3]), "rms_norm: weight is of shape (3,); expected (4,)"),
        (lambda: rms_norm(X, (4,), X[0].half()), "weight is of dtype float16; expected float32"),
        (lambda: rms_norm(X.long(), (4,)), "input is of dtype int64; expected float32"),
        (lambda: layer_norm(X, (4,), bias=X), "layer_norm: bias is of shape (3, 4); expected (4,)"),
        (lambda: add_rms_norm(X, X[:2]), "add_rms_norm: residual is of shape (2, 4); expected (3, 4), as input"),
        (lambda: add_rms_norm(X, X.int()), "residual is of dtype int32; expected float32 or float64"),
        (lambda: add_rms_norm(X, X.to("meta")), "residual is on meta; expected cpu, where input is"),
        (lambda: add_layer_norm(X, X, dropout_p=1.5), "dropout_p is 1.5; expected a number in [0, 1]"),
        (lambda: add_layer_norm(X, X, dropout_p=math.nan), "dropout_p is nan"),
        (lambda: add_layer_norm(X[0, 0], X[0, 0]), "input is a scalar; expected [..., features]"),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert message in str(raised.value)


@pytest.mark.parametrize("function", [add_layer_norm, add_rms_norm])
@pytest.mark.parametrize("rows", [3, 4000])
def test_all_may_be_dropped(function: Any, rows: int) -> None:
    """As torch's dropout takes a share of 1: the residual is left."""
    x, residual = (torch.randn(rows, 64, requires_grad=True) for _ in range(2))
    normal, stream = function(x, residual, dropout_p=1.0)
    assert torch.equal(stream, residual)
    torch.testing.assert_close(normal, function(torch.zeros_like(x), residual)[0])
    of_x, of_residual = torch.autograd.grad(normal.square().sum() + stream.sum(), (x, residual))
    assert not of_x.any() and of_residual.any()
    assert not torch.equal(function(x, residual, dropout_p=1.0, training=False)[1], residual)
