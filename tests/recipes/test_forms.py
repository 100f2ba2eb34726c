"""What goes to torch goes there again without being looked at, and nothing else does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import gradscope.recipes as recipes
from gradscope.kernels import choice, pays
from gradscope.kernels.forms import form_of

pytestmark = pytest.mark.measured_sizes

LOGITS, TARGET = torch.randn(6, 5), torch.tensor([0, 4, -100, 2, 1, 3])
FEW: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "cross_entropy": ((LOGITS, TARGET), {"label_smoothing": 0.1}),
    "linear_cross_entropy": ((torch.randn(6, 8), torch.randn(5, 8), TARGET), {"reduction": "sum"}),
    "linear_cross_entropy_and_logits": ((torch.randn(2, 3, 8), torch.randn(5, 8), TARGET.view(2, 3)), {}),
    "rms_norm": ((torch.randn(6, 8), [8], torch.randn(8)), {}),
    "layer_norm": ((torch.randn(6, 8), (8,), torch.randn(8), torch.randn(8)), {}),
    "add_layer_norm": ((torch.randn(6, 8), torch.randn(6, 8), torch.randn(8)), {}),
    "add_rms_norm": ((torch.randn(6, 8), torch.randn(6, 8), torch.randn(8)), {"eps": 1e-6}),
    "dropout": ((torch.randn(6, 8), 0.5, False), {}),
    "swiglu": ((torch.randn(6, 8),), {}),
    "geglu": ((torch.randn(6, 8), torch.randn(6, 8), "tanh"), {}),
    "bias_gelu": ((torch.randn(6, 8), torch.randn(8)), {"approximate": "tanh"}),
    "gelu": ((torch.randn(6, 8),), {}),
}


@contextmanager
def looks(function: Any) -> Iterator[list[int]]:
    """How often the function itself was asked."""
    asked, own = [], function._function

    def watched(*args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        return own(*args, **kwargs)

    function._function = watched
    try:
        yield asked
    finally:
        function._function = own


def gradients(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Results, and the gradients of all that is floating."""
    given = [
        each.detach().clone().requires_grad_() if isinstance(each, Tensor) and each.is_floating_point() else each
        for each in args
    ]
    found = call(*given, **kwargs)
    results = list(found) if isinstance(found, tuple) else [found]
    torch.autograd.backward([each.square().sum() for each in results if each.requires_grad])
    return [each.detach() for each in results] + [
        each.grad for each in given if isinstance(each, Tensor) and each.grad is not None
    ]


@pytest.mark.parametrize("name", FEW)
def test_what_goes_to_torch_is_looked_at_once(name: str) -> None:
    function: Any = getattr(recipes, name)
    args, kwargs = FEW[name]
    with looks(function) as asked:
        first = gradients(function, args, kwargs)
        assert len(asked) == 1
        again = gradients(function, tuple(-each if each is args[0] else each for each in args), kwargs)
        same = gradients(function, args, kwargs)
        assert len(asked) == 1
    torch.testing.assert_close(same, first, rtol=0, atol=0)
    assert not torch.equal(again[0], first[0])
    choice.forget()
    torch.testing.assert_close(gradients(function, args, kwargs), first, rtol=0, atol=0)


OTHERS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "another shape": ((LOGITS[:5], TARGET[:5]), {}),
    "another dtype": ((LOGITS.double(), TARGET), {}),
    "a setting": ((LOGITS, TARGET), {"label_smoothing": 0.2}),
    "a setting of another name": ((LOGITS, TARGET), {"z_loss": 0.1}),
    "weights": ((LOGITS, TARGET, torch.rand(5)), {}),
    "a gradient": ((LOGITS.clone().requires_grad_(), TARGET), {}),
    "a backend": ((LOGITS, TARGET), {"backend": "cpu"}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_form_is_looked_at(name: str) -> None:
    args, kwargs = OTHERS[name]
    with looks(recipes.cross_entropy) as asked:
        recipes.cross_entropy(LOGITS, TARGET)
        recipes.cross_entropy(*args, **kwargs)
    assert len(asked) == 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_threads_and_autocast_are_of_the_form(device: str) -> None:
    forms = [form_of((LOGITS,), {})]
    torch.set_autocast_enabled(device, True)  # a context for a device that is not there leaves it off
    try:
        forms.append(form_of((LOGITS,), {}))
    finally:
        torch.set_autocast_enabled(device, False)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        forms.append(form_of((LOGITS,), {}))
    finally:
        torch.set_num_threads(threads)
    assert len(set(forms)) == 3
    assert form_of((LOGITS,), {"a": 1}) != form_of((LOGITS,), {"b": 1})
    assert form_of((LOGITS,), {}) == form_of((LOGITS + 1,), {}) == forms[0]


def test_shape_device_and_nesting_are_of_the_form() -> None:
    forms = [form_of((each,), {}) for each in (LOGITS, LOGITS.T, LOGITS.to("meta"), (LOGITS,))]
    assert len(set(forms)) == 4


class _Sub(Tensor):
    pass


def test_what_is_no_plain_value_has_no_form() -> None:
    assert form_of((LOGITS.as_subclass(_Sub),), {}) is None
    assert form_of((LOGITS,), {"other": object()}) is None
    assert form_of(([LOGITS.as_subclass(_Sub)],), {}) is None
    assert form_of(((LOGITS, (1, LOGITS)),), {}) is not None


def test_what_has_no_form_is_looked_at_each_time() -> None:
    function: Any = recipes.cross_entropy
    with looks(function) as asked:
        for count in (1, 2):
            function(LOGITS, TARGET, label_smoothing=numpy.float64(0.1))
            assert len(asked) == count and not function._torchs


def test_a_class_that_does_not_exist_is_named_the_second_time_too() -> None:
    recipes.cross_entropy(LOGITS, TARGET)
    wrong = TARGET.clone().fill_(7)
    for _ in range(2):
        with pytest.raises(ValueError, match="cross_entropy: target"):
            recipes.cross_entropy(LOGITS, wrong)
    with pytest.raises(ValueError, match="linear_cross_entropy: target"):
        recipes.linear_cross_entropy(LOGITS, LOGITS[:5].clone(), wrong)


def test_an_error_of_the_users_is_not_lost() -> None:
    """Torch is not run a second time, in which a hook may let pass what it refused."""
    logits, packed = LOGITS.clone().requires_grad_(), []

    def full(tensor: Tensor) -> Tensor:
        packed.append(1)
        if len(packed) == 1:
            raise RuntimeError("the disk is full")
        return tensor

    recipes.cross_entropy(logits, TARGET)
    with (
        torch.autograd.graph.saved_tensors_hooks(full, lambda tensor: tensor),
        pytest.raises(RuntimeError, match="the disk is full"),
    ):
        recipes.cross_entropy(logits, TARGET)
    assert len(packed) == 1


def test_what_never_goes_to_torch_has_no_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making one takes a sixth of the time of a small attention."""

    def unwanted(*_: Any) -> None:
        raise AssertionError("a form was made")

    monkeypatch.setattr(choice, "form_of", unwanted)
    heads = torch.randn(1, 2, 4, 8)
    recipes.attention(heads, heads, heads)
    recipes.packed_attention(torch.randn(1, 4, 24), 2)
    recipes.embedding(torch.tensor([0, 2]), torch.randn(5, 4))


def test_forms_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_MOST", 3)
    function: Any = recipes.swiglu
    for length in range(1, 9):
        function(torch.randn(length, 2))
        assert len(function._torchs) <= 3


def test_forms_that_threads_added_past_the_bound_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_MOST", 3)
    function: Any = recipes.swiglu
    function._torchs.update(("another thread's", number) for number in range(4))
    function(torch.randn(2, 2))
    assert len(function._torchs) == 1


@pytest.mark.parametrize("known", [False, True], ids=["new", "known"])
@pytest.mark.parametrize("name", FEW)
def test_what_goes_to_torch_is_one_compiled_graph(name: str, known: bool) -> None:
    """Nothing looks at values there, as the message for a target that is no class does."""
    function: Any = getattr(recipes, name)
    args, kwargs = FEW[name]
    expected = function(*args, **kwargs)
    if not known:
        choice.forget()
    torch.compiler.reset()
    found = torch.compile(lambda *given: function(*given, **kwargs), fullgraph=True, backend="aot_eager")(*args)
    torch.testing.assert_close(found, expected)


def test_own_code_is_chosen_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pays, "FEWEST", {})
    function: Any = recipes.cross_entropy
    function(LOGITS, TARGET)
    assert not function._torchs


def test_a_transform_of_a_known_form_is_torchs() -> None:
    many = torch.randn(3, 6, 5)
    expected = functional.cross_entropy(LOGITS, TARGET)
    torch.testing.assert_close(recipes.cross_entropy(LOGITS, TARGET), expected)
    given = torch.func.vmap(lambda each: recipes.cross_entropy(each, TARGET))(many)
    torch.testing.assert_close(given, torch.stack([functional.cross_entropy(each, TARGET) for each in many]))
    torch.testing.assert_close(
        torch.func.grad(lambda each: recipes.cross_entropy(each, TARGET))(LOGITS),
        torch.func.grad(lambda each: functional.cross_entropy(each, TARGET))(LOGITS),
    )


@pytest.mark.parametrize("name", FEW)
def test_the_signature_promises_a_result(name: str) -> None:
    assert "None" not in str(inspect.signature(getattr(recipes, name)).return_annotation)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_have_no_form() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(1, 4)])
    assert form_of((nested,), {}) is None
    for _ in range(2):
        found = recipes.swiglu(nested, nested)
        assert torch.equal(found[0], functional.silu(torch.ones(2, 4)))
