"""Every recipe wherever torch code runs: its own code or torch's, and the result that torch's gives there.

What torch's own code refuses in an environment, a recipe refuses too: it never gives another result instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from gradscope import recipes

from .everywhere import HEADS, TABLES, Case, added, added_rms, flat
from .everywhere_checks import (
    EACH,
    TORCHS_WARNINGS,
    Called,
    Function,
    Named,
    Seen,
    as_torch,
    of_a_mesh,
    same_form,
    split_off,
    total,
)

pytestmark = TORCHS_WARNINGS


@EACH
@pytest.mark.parametrize("wanted", [True, False], ids=["with gradients", "without"])
def test_meta(case: Case, wanted: bool) -> None:
    def run(function: Callable[..., Any]) -> Any:
        inputs, constants = split_off(case, tuple(each.to("meta") for each in case.tensors()))
        found = function(*(each.requires_grad_(wanted) for each in inputs), *constants)
        return (*flat(found), *(torch.autograd.grad(total(found), inputs) if wanted else ()))

    as_torch(run, case, same_form)


@EACH
@pytest.mark.parametrize("made", ["inside", "outside"])
def test_fake(case: Case, made: str) -> None:
    """Tensors made under the mode, or of real ones. Nothing was run before."""

    def run(function: Callable[..., Any]) -> Any:
        mode = FakeTensorMode()
        inputs, constants = split_off(case, tuple(mode.from_tensor(each) for each in case.tensors()))
        with mode:
            if made == "inside":
                inputs = tuple(torch.randn(each.shape, dtype=each.dtype) for each in inputs)
            found = function(*(each.requires_grad_() for each in inputs), *constants)
            whole = sum(each.sum() for each in flat(found))
            return (*flat(found), *torch.autograd.grad(whole, inputs))

    as_torch(run, case, same_form)


@EACH
def test_fake_mode_over_real_tensors(case: Case) -> None:
    def run(function: Callable[..., Any]) -> Any:
        tensors = case.tensors()
        with FakeTensorMode(allow_non_fake_inputs=True):
            return function(*tensors)

    as_torch(run, case, same_form)


@EACH
@pytest.mark.parametrize("mode", [Seen, Called])
def test_modes_of_the_users(case: Case, mode: type[Any]) -> None:
    def run(function: Callable[..., Any]) -> Any:
        with mode():
            inputs, constants = split_off(case, case.tensors())
            found = function(*(each.requires_grad_() for each in inputs), *constants)
            return (*flat(found), *torch.autograd.grad(total(found), inputs))

    if case.random:  # the recipe's own code runs, and drops other elements
        run(case.run)
    else:
        as_torch(run, case)


class Counted(Tensor):
    """One that is told of each of torch's functions, and knows no others."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "gradscope" not in (getattr(func, "__module__", None) or "")
        Counted.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapped(Tensor):
    """A tensor around another one, below autograd."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        bare = tree_map(lambda each: each.inner if isinstance(each, Wrapped) else each, (args, kwargs or {}))
        found = func(*bare[0], **bare[1])
        return tree_map(lambda each: Wrapped(each) if isinstance(each, Tensor) else each, found)


def bare(found: Any) -> Any:
    return tuple(each.inner if isinstance(each, Wrapped) else each.as_subclass(Tensor) for each in flat(found))


@EACH
@pytest.mark.parametrize("kind", [Named, Counted, Wrapped])
def test_subclasses(case: Case, kind: type[Any]) -> None:
    def run(function: Callable[..., Any]) -> Any:
        made = (Wrapped(each) if kind is Wrapped else each.as_subclass(kind) for each in case.tensors())
        inputs, constants = split_off(case, tuple(made))
        inputs = tuple(each.detach().requires_grad_() for each in inputs)
        found = function(*inputs, *constants)
        kinds.append([type(each) for each in flat(found)])
        gradients = torch.autograd.grad(sum(each.sum() for each in flat(found)), inputs)  # type: ignore[arg-type]
        return bare((*flat(found), *gradients))

    kinds: list[Any] = []
    as_torch(run, case)
    assert all(each == kinds[0] for each in kinds)


@EACH
@pytest.mark.parametrize("how", ["real", "fake", "symbolic"])
def test_make_fx(case: Case, how: str) -> None:
    def run(function: Callable[..., Any]) -> Any:
        tensors = case.tensors()
        graph = make_fx(lambda *given: function(*given), tracing_mode=how)(*tensors)
        assert "gradscope" not in graph.code
        torch.manual_seed(1)
        return graph(*tensors)

    as_torch(run, case)


@EACH
@pytest.mark.parametrize("strict", [False, True], ids=["", "strict"])
def test_export(case: Case, strict: bool) -> None:
    """What is exported runs without gradscope."""

    def run(function: Callable[..., Any]) -> Any:
        tensors = case.tensors()
        program = torch.export.export(Function(function), tensors, strict=strict)
        assert "gradscope" not in str(program.graph)
        torch.manual_seed(1)
        return program.module()(*tensors)

    as_torch(run, case)


@EACH
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace(case: Case) -> None:
    def run(function: Callable[..., Any]) -> Any:
        tensors = case.tensors()
        traced = torch.jit.trace(lambda *given: function(*given), tensors, check_trace=False)
        torch.manual_seed(1)
        return traced(*tensors)

    as_torch(run, case)


@EACH
def test_jagged(case: Case) -> None:
    """Of two lengths; values and gradients."""
    if case.ragged is None:
        return

    def run(function: Callable[..., Any]) -> Any:
        inputs = []
        for each, dim in zip(case.tensors(), case.ragged or (), strict=True):
            if dim < 0:
                inputs.append(each.requires_grad_())
                continue
            each = each.movedim(dim, 1)
            parts = [part[: 2 + 2 * index] for index, part in enumerate(each)]
            made = torch.nested.nested_tensor(parts, layout=torch.jagged)
            if inputs and inputs[0].is_nested:
                made = torch.nested.nested_tensor_from_jagged(made.values(), inputs[0].offsets())
            inputs.append((made if dim == 1 else made.transpose(1, dim)).detach().requires_grad_())
        found = flat(function(*inputs))
        gradients: tuple[Tensor, ...] = ()
        if all(each.is_contiguous() for each in found):  # else torch 2.13 crashes
            gradients = torch.autograd.grad(found, inputs, [torch.ones_like(each) for each in found])
        return tuple(each.values() if each.is_nested else each for each in (*found, *gradients))

    as_torch(run, case)


@EACH
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=["replicated", "sharded"])
def test_dtensor(case: Case, placement: Any, mesh: Any) -> None:
    def run(function: Callable[..., Any]) -> Any:
        inputs, constants = split_off(case, of_a_mesh(mesh, case.tensors(), placement))
        inputs = tuple(each.detach().requires_grad_() for each in inputs)
        found = flat(function(*inputs, *constants))
        assert all(isinstance(each, DTensor) for each in found)
        gradients = torch.autograd.grad(sum(each.sum() for each in found), inputs)  # type: ignore[arg-type]
        return tuple(each.full_tensor() for each in (*found, *gradients))

    as_torch(run, case, holding=True)


@pytest.mark.parametrize(("stream", "branch"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("name", ["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_stream_of_another_dtype(name: str, p: float, stream: torch.dtype, branch: torch.dtype) -> None:
    """AMP: a branch in bfloat16 is added to a stream in float32, as torch promotes."""
    x, y = torch.randn(4, 8).to(branch).requires_grad_(), torch.randn(4, 8).to(stream).requires_grad_()
    weight = torch.randn(8, requires_grad=True)
    function, plain = getattr(recipes, name), added if name == "add_layer_norm" else added_rms
    torch.manual_seed(1)
    normal, total_ = function(x, y, weight, dropout_p=p)
    torch.manual_seed(1)
    dropped = (total_ - y).detach().to(branch) / x.detach() if p else torch.ones(4, 8)
    expected = plain(x * dropped.round().to(branch), y, weight)
    upstream = torch.randn(4, 8)
    found = torch.autograd.grad((normal * upstream).sum() + total_.sum(), (x, y, weight))
    true = torch.autograd.grad((expected[0] * upstream).sum() + expected[1].sum(), (x, y, weight))
    assert (normal.dtype, total_.dtype) == (expected[0].dtype, expected[1].dtype) == (torch.float32,) * 2
    for one, other in zip((normal, total_, *found), (*expected, *true), strict=True):
        assert one.dtype == other.dtype
        # bfloat16 holds 8 bits, and torch's own branch is rounded once more where it is dropped.
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)


def test_gates_of_another_dtype() -> None:
    gate, up = torch.randn(4, 8).bfloat16().requires_grad_(), torch.randn(4, 8, requires_grad=True)
    found, expected = recipes.swiglu(gate, up), torch.nn.functional.silu(gate) * up
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_queries_and_keys_of_another_dtype() -> None:
    q, k = torch.randn(HEADS), torch.randn(HEADS).bfloat16()
    tables = tuple(each.float() for each in TABLES)
    found = recipes.rope((q, k), *tables)
    for one, alone_ in zip(found, (q, k), strict=True):
        assert one.dtype == alone_.dtype and torch.equal(one, recipes.rope(alone_, *tables))
