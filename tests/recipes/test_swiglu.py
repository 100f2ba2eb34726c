"""SwiGLU from two tensors and from a packed one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from gradscope.kernels.gated import cpu
from gradscope.recipes.swiglu import SwiGLU, swiglu

from .accuracy import assert_as_accurate, dirty_memory

# Dynamo makes an instance of every Function that it traces, of which torch itself warns.
COMPILES = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def eager(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """As models write it."""
    if up is None:
        gate, up = gate.tensor_split(2, dim=-1)
    return functional.silu(gate) * up


def gradients(function: Callable[..., Tensor], upstream: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The result, and the gradient of each input."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    return (output.detach(), *torch.autograd.grad(output, leaves, upstream))


def assert_accurate(function: Callable[..., Tensor], upstream: Tensor, *inputs: Tensor) -> None:
    ours, torchs = gradients(function, upstream, *inputs), gradients(eager, upstream, *inputs)
    truth = gradients(eager, upstream.double(), *(tensor.double() for tensor in inputs))
    for name, mine, other, true in zip(("output", "gate", "up"), ours, torchs, truth, strict=False):
        assert_as_accurate(mine, other, true, name)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)])
def test_gradcheck(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Edge case 1; in chunks of one row, too."""
    gate, up = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert swiglu.explain(gate, up).backend == "cpu"
    for chunk in (cpu.CHUNK, 4):
        monkeypatch.setattr(cpu, "CHUNK", chunk)
        assert torch.autograd.gradcheck(swiglu, (gate, up))
        assert torch.autograd.gradcheck(swiglu, gate)


@settings(deadline=None, derandomize=True, max_examples=40, database=None)
@given(
    shape=st.lists(st.integers(0, 5), max_size=2),
    features=st.integers(0, 9),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    layout=st.sampled_from(["contiguous", "transposed", "sliced", "expanded"]),
    packed=st.booleans(),
)
def test_any_shape_stride_and_dtype(
    shape: list[int], features: int, dtype: torch.dtype, layout: str, packed: bool
) -> None:
    """Edge cases 6 and 11."""

    def tensor(*size: int) -> Tensor:
        if layout == "transposed":
            return torch.randn(size[::-1]).permute(tuple(reversed(range(len(size))))).to(dtype)
        if layout == "sliced":
            return torch.randn(*size[:-1], 2 * size[-1]).to(dtype)[..., ::2]
        if layout == "expanded":
            return torch.randn(()).to(dtype).expand(size)
        return torch.randn(size).to(dtype)

    inputs = [tensor(*shape, 2 * features)] if packed else [tensor(*shape, features) for _ in range(2)]
    assert_accurate(swiglu, tensor(*shape, features), *inputs)


def test_halves_of_a_packed_tensor_are_no_copies() -> None:
    packed = torch.randn(5, 8, requires_grad=True)
    gate, up = packed.chunk(2, dim=-1)
    upstream = torch.randn(5, 4)
    expected = gradients(eager, upstream, packed)
    torch.testing.assert_close(gradients(swiglu, upstream, packed), expected)
    (found,) = torch.autograd.grad(swiglu(gate, up), packed, upstream)
    torch.testing.assert_close(found, expected[1])


def test_only_the_operands_are_kept() -> None:
    gate, up = (torch.randn(5, 4, requires_grad=True) for _ in range(2))
    out = swiglu(gate, up)
    kept = out.grad_fn.saved_tensors  # type: ignore[union-attr]
    assert [tensor.data_ptr() for tensor in kept] == [gate.data_ptr(), up.data_ptr()]


def test_only_what_is_asked_for_is_given() -> None:
    gate, up = torch.randn(5, 4), torch.randn(5, 4, requires_grad=True)
    (found,) = torch.autograd.grad(swiglu(gate, up).sum(), up)
    torch.testing.assert_close(found, functional.silu(gate))
    with torch.no_grad():  # edge case 17
        assert swiglu(gate, up).grad_fn is None


def test_a_retained_graph_gives_the_same_twice_and_inputs_stay() -> None:
    """Edge cases 2, 3 and 4: with a residual fork, and one tensor as both operands."""
    x, upstream = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4)
    before = x.detach().clone(), upstream.clone()
    found = swiglu(x, x) + x
    (first,) = torch.autograd.grad(found, x, upstream, retain_graph=True)
    assert torch.equal(first, torch.autograd.grad(found, x, upstream)[0])
    torch.testing.assert_close(first, torch.autograd.grad(eager(x, x) + x, x, upstream)[0])
    assert torch.equal(x.detach(), before[0]) and torch.equal(upstream, before[1])


def test_a_second_derivative_is_refused() -> None:
    """Edge case 19."""
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(swiglu(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    assert torch.autograd.gradgradcheck(partial(swiglu, backend="torch"), x)


def test_no_memory_is_left_unwritten() -> None:
    """Edge case 19: deterministic mode, which also fills new memory with NaN."""
    packed, upstream = torch.randn(7, 10), torch.randn(7, 5)
    with dirty_memory():
        found = gradients(swiglu, upstream, packed)
    torch.testing.assert_close(found, gradients(eager, upstream, packed))


@COMPILES
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_compiles_in_one_graph(request: pytest.FixtureRequest, packed: bool, backend: str) -> None:
    """Edge case 9."""
    device = request.getfixturevalue("triton_device") if backend == "triton" else torch.device("cpu")
    inputs = [torch.randn(5, 4, device=device, requires_grad=True) for _ in range(1 if packed else 2)]
    compiled = torch.compile(partial(swiglu, backend=backend), fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    torch.testing.assert_close(found, torch.autograd.grad(eager(*inputs).square().sum(), inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 2, 1025)])
@pytest.mark.parametrize("packed", [False, True])
def test_triton_against_float64(
    triton_device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], packed: bool
) -> None:
    sizes = [(*shape[:-1], 2 * shape[-1])] if packed else [shape, shape]
    inputs = [torch.randn(size, device=triton_device).mul(3).to(dtype) for size in sizes]
    upstream = torch.randn(shape, device=triton_device).to(dtype)
    with dirty_memory():
        assert_accurate(partial(swiglu, backend="triton"), upstream, *inputs)


@pytest.mark.parametrize("layout", ["sliced", "transposed", "expanded"])
def test_triton_with_strides(triton_device: torch.device, layout: str) -> None:
    """Edge case 11."""
    x = {
        "sliced": torch.randn(6, 9, device=triton_device)[:, 2:8],
        "transposed": torch.randn(6, 5, device=triton_device).t(),
        "expanded": torch.randn(5, 1, device=triton_device).expand(5, 6),
    }[layout]
    assert_accurate(partial(swiglu, backend="triton"), x, x, x)
    assert_accurate(partial(swiglu, backend="triton"), x[:, :3], x)


def test_triton_with_nothing(triton_device: torch.device) -> None:
    """Edge case 6."""
    x = torch.randn(0, 6, device=triton_device)
    assert gradients(partial(swiglu, backend="triton"), x[:, :3], x)[1].shape == (0, 6)


def test_the_module_fits_a_packed_linear() -> None:
    block = nn.Sequential(nn.Linear(6, 8), SwiGLU(), nn.Linear(4, 6))
    x = torch.randn(3, 6)
    twin = pickle.loads(pickle.dumps(copy.deepcopy(block)))
    torch.testing.assert_close(twin(x), block[2](eager(block[0](x))))


SHAPES = [(), (1,), (3,), (4,), (1, 3), (2, 3), (3, 3), (2, 1), (5, 1, 3), (5, 2, 1), (5, 2, 3), (0, 3)]


@pytest.mark.parametrize("up", SHAPES, ids=str)
@pytest.mark.parametrize("gate", SHAPES[1:], ids=str)
def test_what_torch_broadcasts(gate: tuple[int, ...], up: tuple[int, ...]) -> None:
    """And nothing else; both gradients too, of another dtype as well."""
    for kind in (torch.float32, torch.float64):
        operands = [torch.randn(gate, requires_grad=True), torch.randn(up, dtype=kind, requires_grad=True)]
        try:
            wanted = functional.silu(operands[0]) * operands[1]
        except RuntimeError:
            with pytest.raises(ValueError, match="or a shape that broadcasts with it"):
                swiglu(*operands)
            continue
        made = swiglu(*operands)
        assert made.dtype == wanted.dtype
        torch.testing.assert_close(made, wanted)
        gradients = [torch.autograd.grad(result.square().sum(), operands) for result in (made, wanted)]
        torch.testing.assert_close(*gradients)


def test_explain_says_why() -> None:
    x = torch.randn(3, 4)
    assert str(swiglu.explain(x)).splitlines() == [
        "cpu: a few rows at a time in the cache; silu is recomputed in backward",
        "not triton: Triton has no cpu backend",
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: swiglu(torch.tensor(1.0)), "swiglu: gate is a scalar; expected [..., features]"),
        (lambda: swiglu(torch.ones(3)), "gate is of shape (3,); expected an even last dimension"),
        (lambda: swiglu(torch.ones(4).long()), "gate is of dtype int64; expected float32"),
        (
            lambda: swiglu(torch.ones(4), torch.ones(2)),
            "up is of shape (2,); expected (4,), as gate, or a shape that broadcasts",
        ),
        (lambda: swiglu(torch.ones(4), torch.ones(4).int()), "up is of dtype int32; expected float32 or float64"),
        (lambda: swiglu(torch.ones(4), torch.ones(4, device="meta")), "up is on meta; expected cpu, where gate is"),
        (lambda: swiglu(torch.ones(4), backend="fast"), "backend is 'fast'; expected 'auto' or 'triton' or 'cpu'"),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert message in str(raised.value)
