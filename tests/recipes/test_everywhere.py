"""Every recipe wherever torch code runs: its own code or torch's, and the result that torch's gives there.

What torch's own code refuses in an environment, a recipe refuses too: it never gives another result instead.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import gradscope.recipes
from gradscope import recipes
from gradscope.kernels import plain
from gradscope.kernels.plain import why_torch

from ..process_group import alone
from .everywhere import CASES, FORMS, HEADS, TABLES, Case, Form, added, added_rms, flat

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # torch's, where forward mode begins
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:DTensor random operators may not:UserWarning"),
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),  # torch's, under vmap
]
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
EACH_FORM = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)


def close(found: Any, expected: Any) -> None:
    """To the rounding of float64, whatever the order of sums."""
    for one, other in zip(flat(found), flat(expected), strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def outcome(run: Callable[[], Any]) -> tuple[Any, Exception | None]:
    torch.manual_seed(1)
    try:
        return run(), None
    except Exception as error:  # whatever it is: the recipe must not do better by being wrong
        return None, error


def as_torch(
    run: Callable[[Callable[..., Any]], Any],
    case: Case,
    check: Callable[[Any, Any], None] = close,
    *,
    holding: bool = False,
) -> None:
    """``run`` gives for the recipe what it gives for torch's code, or neither runs.

    With ``holding`` torch's attention is the one that holds all scores, which has every derivative.
    """
    with sdpa_kernel(SDPBackend.MATH) if holding else contextlib.nullcontext():
        expected, refusal = outcome(lambda: run(case.plain))
    found, error = outcome(lambda: run(case.run))
    if refusal is not None:
        assert error is not None, f"torch refuses this: {refusal}"
        return
    if error is not None:
        raise error
    check(found, expected)


def total(found: Any) -> Tensor:
    """A scalar in which every element of every result has another weight."""
    parts = [each for each in flat(found) if each.is_floating_point()]
    return sum((part * (1 + torch.arange(part.numel()).view(part.shape).to(part) % 7)).sum() for part in parts)  # type: ignore[return-value]


def split_off(case: Case, tensors: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """(Those that may require gradients, the constants)."""
    return tensors[: len(case.shapes)], tensors[len(case.shapes) :]


def scalar_of(case: Case, function: Callable[..., Any]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A function of the differentiable inputs alone, and these."""
    inputs, constants = split_off(case, case.tensors())
    return lambda *given: total(function(*given, *constants)), inputs


def numbers(case: Case) -> tuple[int, ...]:
    return tuple(range(len(case.shapes)))


@EACH
def test_func_grad(case: Case) -> None:
    def run(function: Callable[..., Any]) -> Any:
        scalar, inputs = scalar_of(case, function)
        return torch.func.grad(scalar, argnums=numbers(case))(*inputs)

    as_torch(run, case, holding=True)


@EACH
def test_func_second_derivative(case: Case) -> None:
    def run(function: Callable[..., Any]) -> Any:
        scalar, inputs = scalar_of(case, function)
        slope = torch.func.grad(scalar)
        return torch.func.grad(lambda *given: (slope(*given) ** 2).sum())(*inputs)

    as_torch(run, case, holding=True)


@EACH
@pytest.mark.parametrize("randomness", ["different", "same"])
def test_func_vmap(case: Case, randomness: str) -> None:
    def run(function: Callable[..., Any]) -> Any:
        inputs, constants = split_off(case, case.tensors())
        stacked = tuple(torch.stack((each, 2 * each, -each)) for each in inputs)
        mapped = torch.func.vmap(lambda *given: function(*given, *constants), randomness=randomness)
        return mapped(*stacked)

    as_torch(run, case, holding=True)


@EACH
def test_func_gradients_of_each_sample(case: Case) -> None:
    def run(function: Callable[..., Any]) -> Any:
        scalar, inputs = scalar_of(case, function)
        stacked = tuple(torch.stack((each, 2 * each)) for each in inputs)
        return torch.func.vmap(torch.func.grad(scalar, argnums=numbers(case)), randomness="different")(*stacked)

    as_torch(run, case, holding=True)


@EACH
def test_func_jvp(case: Case) -> None:
    def run(function: Callable[..., Any]) -> Any:
        inputs, constants = split_off(case, case.tensors())
        tangents = tuple(map(torch.cos, inputs))
        return tuple(torch.func.jvp(lambda *given: total(function(*given, *constants)), inputs, tangents))

    as_torch(run, case, holding=True)


@EACH
def test_func_vjp_and_jacobians(case: Case) -> None:
    def run(function: Callable[..., Any]) -> Any:
        scalar, inputs = scalar_of(case, function)
        return torch.func.jacrev(scalar)(*inputs), torch.func.jacfwd(scalar, randomness="same")(*inputs)

    as_torch(run, case, holding=True)


@EACH
def test_forward_mode(case: Case) -> None:
    def run(function: Callable[..., Any]) -> Any:
        inputs, constants = split_off(case, case.tensors())
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(each, each.cos()) for each in inputs]
            return tuple(forward_ad.unpack_dual(total(function(*duals, *constants))))

    as_torch(run, case, holding=True)


def same_form(found: Any, expected: Any) -> None:
    for one, other in zip(flat(found), flat(expected), strict=True):
        assert (one.shape, one.dtype, one.device, type(one)) == (other.shape, other.dtype, other.device, type(other))


@EACH
@pytest.mark.parametrize("wanted", [True, False], ids=["with gradients", "without"])
def test_meta(case: Case, wanted: bool) -> None:
    def run(function: Callable[..., Any]) -> Any:
        inputs, constants = split_off(case, tuple(each.to("meta") for each in case.tensors()))
        found = function(*(each.requires_grad_(wanted) for each in inputs), *constants)
        return (*flat(found), *(torch.autograd.grad(total(found), inputs) if wanted else ()))

    as_torch(run, case, same_form)


def test_meta_beside_others_is_an_error_that_the_recipe_names() -> None:
    real, meta = torch.ones(2), torch.ones(2, device="meta")
    for given in ((meta, 1.0), (meta, (meta, None)), ((meta,), meta)):
        assert why_torch(given) == "the tensors are on the meta device"
    for given in ((meta, real), (meta, (real,)), (real, (meta,)), ((meta,), (real,))):
        assert why_torch(given) is None


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


class Seen(TorchDispatchMode):
    """Looks on, as the counters of FLOPs do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Called(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


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


class Named(Tensor):
    """A subclass that changes nothing."""


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


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


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


def of_a_mesh(mesh: Any, tensors: tuple[Tensor, ...], placement: Any) -> tuple[Tensor, ...]:
    """Constants are distributed too: torch mixes none with others."""
    return tuple(distribute_tensor(each, mesh, [placement]) for each in tensors)


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


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    with alone():
        yield init_device_mesh("cpu", (1,))


@EACH_FORM
def test_functional_call(form: Form) -> None:
    module, inputs = form.module(), form.inputs()
    parameters = {name: (2 * each).detach() for name, each in module.named_parameters()}

    def of_module(given: dict[str, Tensor]) -> Tensor:
        return total(torch.func.functional_call(module, given, inputs))

    with sdpa_kernel(SDPBackend.MATH):
        expected = form.plain(parameters, *inputs)
    close(torch.func.functional_call(module, parameters, inputs), expected)
    if parameters:
        found = torch.func.grad(of_module)(parameters)
        expected = torch.func.grad(lambda given: total(form.plain(given, *inputs)))(parameters)
        close(tuple(found.values()), tuple(expected.values()))


@EACH_FORM
def test_an_ensemble_of_modules(form: Form) -> None:
    modules, inputs = [form.module() for _ in range(3)], form.inputs()
    parameters, buffers = torch.func.stack_module_state(modules)
    if not parameters:
        return

    def of_one(given: Any, held: Any) -> Any:
        return torch.func.functional_call(modules[0], (given, held), inputs)

    found = torch.func.vmap(of_one, randomness="different")(parameters, buffers)
    close(tuple(each[1] for each in flat(found)), form.plain(dict(modules[1].named_parameters()), *inputs))


def stored(module: nn.Module) -> nn.Module:
    kept = io.BytesIO()
    torch.save(module, kept)
    kept.seek(0)
    loaded: nn.Module = torch.load(kept, weights_only=False)
    return loaded


@EACH_FORM
@pytest.mark.parametrize(
    "again", [copy.deepcopy, copy.copy, lambda each: pickle.loads(pickle.dumps(each)), stored],
    ids=["deepcopy", "copy", "pickle", "torch.save"],
)  # fmt: skip
def test_copies(form: Form, again: Callable[[nn.Module], nn.Module]) -> None:
    """Before and after the module ran, also as a part of another one."""
    for ran in (False, True):
        holder = nn.Sequential(form.module())
        if ran:
            total(holder[0](*form.inputs())).requires_grad_().sum()
        made = again(holder)[0]
        assert type(made) is type(holder[0])
        close(made(*form.inputs()), form.plain(dict(made.named_parameters()), *form.inputs()))


FUNCTIONS = [name for name in gradscope.recipes.__all__ if name[0].islower()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_copied_by_their_name(name: str) -> None:
    """As a module's attribute that is pickled with it."""
    function = getattr(recipes, name)
    assert pickle.loads(pickle.dumps(function)) is function and copy.deepcopy(function) is function


@EACH
@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["deep", "pickle"]
)
def test_results_are_copied(case: Case, again: Callable[[Any], Any]) -> None:
    if case.random:
        return
    tensors = case.tensors()
    close(tuple(map(again, flat(case.run(*tensors)))), case.plain(*tensors))
    result = flat(case.run(*(each.requires_grad_() for each in tensors[:1]), *tensors[1:]))[0]
    close(pickle.loads(pickle.dumps(result)).detach(), flat(case.plain(*tensors))[0].detach())


def test_every_recipe_is_in_the_table() -> None:
    assert {case.name.partition(",")[0] for case in CASES} == set(FUNCTIONS)
    assert {form.name for form in FORMS} == set(gradscope.recipes.__all__) - set(FUNCTIONS)


EXPLAINED = [name for name in FUNCTIONS if hasattr(getattr(recipes, name), "explain")]


def test_explain_says_why() -> None:
    x = torch.randn(4, 6)
    choice = recipes.swiglu.explain(x.to("meta"))
    assert str(choice) == (
        "torch: torch's operations, for the tensors are on the meta device\n"
        "not triton: the tensors are on the meta device\n"
        "not cpu: the tensors are on the meta device"
    )
    assert recipes.swiglu.explain(x.as_subclass(Named)).refused["cpu"] == "a tensor is a Named"
    assert recipes.swiglu.explain(x, up=x.as_subclass(Named)).refused["cpu"] == "a tensor is a Named"
    assert recipes.swiglu.explain(x.to_sparse()).refused["cpu"] == "a tensor's layout is sparse_coo"
    with FakeTensorMode():
        assert recipes.swiglu.explain(x).refused["cpu"] == "torch traces, or runs without data"
    with forward_ad.dual_level():
        assert recipes.swiglu.explain(x).refused["cpu"] == "forward-mode derivatives are taken"


def test_own_code_that_is_asked_for_cannot_run() -> None:
    with pytest.raises(ValueError) as raised:
        torch.func.vmap(lambda row: recipes.swiglu(row, backend="cpu"))(torch.randn(4, 6))
    assert str(raised.value) == "swiglu: backend='cpu' cannot run here: a torch.func transform runs"
    with pytest.raises(ValueError) as raised:
        recipes.swiglu(torch.empty(4, 6, device="meta"), backend="cqu")
    assert str(raised.value) == "swiglu: backend is 'cqu'; expected 'auto' or 'triton' or 'cpu' or 'torch'"


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


def in_place(where: str, case: Case, mesh: Any) -> None:
    """Run a case at a place of the documented table."""
    tensors = case.tensors()
    whole = lambda *given: total(case.run(*given))  # noqa: E731
    constants = tensors[len(case.shapes) :]
    if where.startswith("torch.func"):
        torch.func.grad(lambda first: whole(first, *tensors[1:]))(tensors[0])
    elif where == "forward-mode derivatives":
        with forward_ad.dual_level():
            case.run(forward_ad.make_dual(tensors[0], tensors[0]), *tensors[1:])
    elif where == "meta tensors":
        case.run(*(each.to("meta") for each in tensors))
    elif where == "fake tensors":
        with FakeTensorMode() as mode:
            case.run(*map(mode.from_tensor, tensors))
    elif where == "make_fx":
        make_fx(lambda *given: case.run(*given))(*tensors)
    elif where == "torch.export":
        torch.export.export(Function(case.run), tensors)
    elif where == "torch.jit.trace":
        torch.jit.trace(lambda *given: case.run(*given), tensors, check_trace=False)
    elif where.startswith("DTensor"):
        case.run(*of_a_mesh(mesh, tensors, Replicate()))
    elif where == "nested tensors":
        nested = tuple(torch.nested.nested_tensor([each, each], layout=torch.jagged) for each in tensors[:1])
        with contextlib.suppress(Exception):  # torch may refuse: asked is only who was called
            case.run(*nested, *tensors[1:])
    elif where == "modes of the user's":
        with Seen(), Called():
            case.run(*tensors)
    else:
        assert where == "ordinary tensors" and len(constants) == len(case.constants)
        case.run(*tensors)


def documented() -> list[list[str]]:
    page = (Path(__file__).parents[2] / "docs" / "patching.md").read_text(encoding="utf-8")
    table = page.partition("<!-- everywhere -->\n")[2].partition("<!-- /everywhere -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize(("where", "runs"), documented(), ids=lambda cell: cell)
def test_the_documented_table(where: str, runs: str, mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/patching.md: what runs for each recipe at each place."""
    said: list[bool] = []

    def watched(values: Any) -> str | None:
        why = why_torch(values)
        said.append(why is not None)
        return why

    monkeypatch.setattr("gradscope.kernels.choice.why_torch", watched)
    for case in CASES:
        if case.name.startswith("lazy_linear"):
            continue
        said.clear()
        in_place(where, case, mesh)
        assert (any(said), case.name) == (runs == "torch's operations", case.name)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_either_layout_are_torchs() -> None:
    """The strided ones are plain by their class and their layout."""
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=layout)
        assert plain.why_torch((nested,)) is not None and plain.why_torch(((nested, nested),)) is not None
    assert plain.why_torch((torch.ones(2), (torch.ones(1), None, 3))) is None
