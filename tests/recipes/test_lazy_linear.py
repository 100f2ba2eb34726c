"""Which layers, and under which modes, lazy_linear calls as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradscope.recipes import lazy_linear
from gradscope.recipes.lazy_tensor import LazyTensor, is_computed

from .lazy_models import CLASSES, WIDTH, assert_same_gradients, models, pair


def hooked() -> nn.Linear:
    head = nn.Linear(WIDTH, CLASSES)
    head.register_forward_hook(lambda module, args, output: output.clamp(-0.1, 0.1))
    return head


class Scaled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def replaced() -> nn.Linear:
    head = nn.Linear(WIDTH, CLASSES)
    head.forward = lambda x: x.new_zeros(3, CLASSES)
    return head


def compiled() -> nn.Linear:
    head = nn.Linear(WIDTH, CLASSES)
    head._compiled_call_impl = lambda x: x.new_zeros(3, CLASSES)  # as Module.compile sets it
    return head


def watched() -> nn.Linear:
    head = nn.Linear(WIDTH, CLASSES)
    head.register_full_backward_pre_hook(lambda module, gradients: None)
    return head


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, CLASSES))


@pytest.mark.parametrize(
    "make",
    [hooked, replaced, compiled, watched, normed, lambda: Scaled(WIDTH, CLASSES), lambda: nn.Sequential(hooked())],
)
def test_other_layers_are_called(make: Callable[[], nn.Module]) -> None:
    head, x = make(), torch.randn(3, WIDTH)
    logits = lazy_linear(head, x)
    assert type(logits) is Tensor
    assert torch.equal(logits, head(x))


def test_a_subclass_with_the_same_forward_waits() -> None:
    class Head(nn.Linear):
        pass

    assert isinstance(lazy_linear(Head(WIDTH, CLASSES), torch.randn(3, WIDTH)), LazyTensor)


def test_whatever_is_called_like_a_layer_is_called() -> None:
    assert torch.equal(lazy_linear(torch.neg, torch.ones(3)), -torch.ones(3))


class Lazily(nn.Module):
    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def forward(self, x):
        return lazy_linear(self.head, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
def test_modes_in_which_the_layer_is_called() -> None:
    head, x = nn.Linear(WIDTH, CLASSES), torch.randn(3, WIDTH)
    with torch.inference_mode():
        assert type(lazy_linear(head, x)) is Tensor
    batched = torch.func.vmap(lambda row: lazy_linear(head, row))(x)
    torch.testing.assert_close(batched, head(x))
    traced = torch.jit.trace(Lazily(head), x)
    assert torch.equal(traced(x), head(x))
    compiled = torch.compile(lambda x: lazy_linear(head, x), backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), head(x))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        lazy_linear(head, torch.randn(3, WIDTH + 1))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler reads it
def test_given_to_a_compiled_loss() -> None:
    ours, theirs = models()
    loss = torch.compile(lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets), backend="eager")
    for model in (ours, theirs):
        loss(model(pair()[0])[0], pair()[1].flatten()).backward()
    assert_same_gradients(ours, theirs)


def test_sequential() -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES), nn.LogSoftmax(-1))
    x, target = torch.randn(2, 3, WIDTH), torch.randint(CLASSES, (6,))
    logits = lazy_linear(head, x)
    torch.testing.assert_close(F.nll_loss(logits.flatten(0, 1), target), F.nll_loss(head(x).flatten(0, 1), target))
    assert isinstance(logits, LazyTensor)
    assert not is_computed(logits)
    assert torch.equal(logits, head(x))


@pytest.mark.parametrize(
    ("form", "lazy"),
    [((CLASSES,), True), ((1, CLASSES), True), ((4, CLASSES), False), ((1, 1), False), ((1, 1, CLASSES), False)],
)
def test_weights_and_an_added_bias(form: tuple[int, ...], lazy: bool) -> None:
    """A bias is a row of the classes; what differs from row to row, or adds a dimension, is none."""
    torch.manual_seed(0)
    weight, bias, x = (torch.randn(shape, requires_grad=True) for shape in ((WIDTH, CLASSES), form, (4, WIDTH)))
    target = torch.randint(CLASSES, (4,))
    logits = lazy_linear(weight.T, x) + bias
    loss = F.cross_entropy(logits.view(-1, CLASSES), target)
    assert isinstance(logits, LazyTensor) == lazy
    assert not lazy or not is_computed(logits)
    expected = F.cross_entropy((x @ weight + bias).view(-1, CLASSES), target)
    torch.testing.assert_close(loss, expected)
    tensors = (weight, bias, x)
    for one, other in zip(torch.autograd.grad(loss, tensors), torch.autograd.grad(expected, tensors), strict=True):
        torch.testing.assert_close(one, other)


def test_a_gradient_of_the_logits_before_a_bias_is_refused() -> None:
    weight, x = torch.randn(CLASSES, WIDTH, requires_grad=True), torch.randn(3, WIDTH)
    logits = lazy_linear(weight, x)
    F.cross_entropy(logits + torch.zeros(CLASSES), torch.zeros(3, dtype=torch.long))
    with pytest.raises(RuntimeError, match="retain_grad needs the gradient of the logits, but the loss"):
        logits.retain_grad()


def test_log_softmax_into_a_tensor_that_is_there() -> None:
    with torch.no_grad():
        head, x, out = nn.Linear(WIDTH, CLASSES), torch.randn(3, WIDTH), torch.empty(3, CLASSES)
        torch.log_softmax(lazy_linear(head, x), 1, out=out)
        assert torch.equal(out, head(x).log_softmax(1))
