"""Lazy logits: whatever is done with them is what is done with a linear layer's output."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradscope.recipes import lazy_linear
from gradscope.recipes.lazy_tensor import LazyTensor, is_computed

BATCH, TOKENS, WIDTH, CLASSES = 2, 5, 4, 7
TARGET = torch.tensor([[0, 6, 3, -100, 1], [5, 5, 2, 0, 4]])
WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
# Sums of a few terms of size 1, taken in another order, in float64.
EXACT = 1e-14

Loss = Callable[[Tensor], Tensor]


def layer(bias: bool = True, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, CLASSES, bias=bias, dtype=dtype)


def hidden(dtype: torch.dtype = torch.float64) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(BATCH, TOKENS, WIDTH, dtype=dtype, requires_grad=True)


def result(head: nn.Linear, x: Tensor, call: Callable[[nn.Linear, Tensor], Tensor], loss: Loss) -> list[Tensor]:
    """Loss and gradients."""
    logits = call(head, x)
    value = loss(logits)
    wanted = [x, *head.parameters()]
    return [value.detach(), *torch.autograd.grad(value, wanted, torch.full_like(value, 0.7))]


def compare(loss: Loss, bias: bool = True) -> bool:
    """Tell whether the logits were computed; loss and gradients must be the layer's."""
    head, x = layer(bias), hidden()
    made: list[Tensor] = []

    def lazily(head: nn.Linear, x: Tensor) -> Tensor:
        made.append(lazy_linear(head, x))
        assert isinstance(made[0], LazyTensor)
        return made[0]

    ours = result(head, x, lazily, loss)
    theirs = result(head, x, lambda head, x: head(x), loss)
    computed = is_computed(made[0])
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT, equal_nan=True)
    return computed


LOSSES: dict[str, Loss] = {
    "view": lambda z: F.cross_entropy(z.view(-1, CLASSES), TARGET.view(-1)),
    "reshape": lambda z: F.cross_entropy(z.reshape(BATCH * TOKENS, -1), TARGET.reshape(-1)),
    "flatten": lambda z: F.cross_entropy(z.flatten(0, 1), TARGET.flatten()),
    "flatten by name": lambda z: F.cross_entropy(torch.flatten(z, end_dim=-2), TARGET.flatten()),
    "transpose": lambda z: F.cross_entropy(z.transpose(1, 2), TARGET),
    "permute": lambda z: F.cross_entropy(z.permute(0, 2, 1), TARGET),
    "movedim": lambda z: F.cross_entropy(torch.movedim(z, -1, 1).contiguous(), TARGET),
    "mT": lambda z: F.cross_entropy(z.mT, TARGET),
    "shifted": lambda z: F.cross_entropy(z[..., :-1, :].contiguous().view(-1, CLASSES), TARGET[..., 1:].reshape(-1)),
    "shifted, two indices": lambda z: F.cross_entropy(z[:, :-1].reshape(-1, z.size(-1)), TARGET[:, 1:].reshape(-1)),
    "all classes by number": lambda z: F.cross_entropy(z[:, 1:, :CLASSES].flatten(0, 1), TARGET[:, 1:].flatten()),
    "one row": lambda z: F.cross_entropy(z[1, 2], TARGET[1, 2]),
    "last row": lambda z: F.cross_entropy(z[:, -1], TARGET[:, -1]),
    "every other": lambda z: F.cross_entropy(z[:, ::2].flatten(0, 1), TARGET[:, ::2].flatten()),
    "new dimension": lambda z: F.cross_entropy(z[0][None].squeeze(0), TARGET[0]),
    "unsqueeze": lambda z: F.cross_entropy(z.unsqueeze(1).view(-1, CLASSES), TARGET.view(-1)),
    "unflatten": lambda z: F.cross_entropy(z.unflatten(1, (1, TOKENS)).flatten(0, 2), TARGET.view(-1)),
    "to": lambda z: F.cross_entropy(z.to(torch.float64).to("cpu").view(-1, CLASSES), TARGET.view(-1)),
    "module": lambda z: nn.CrossEntropyLoss(ignore_index=5)(z.view(-1, CLASSES), TARGET.view(-1).clamp(min=0)),
    "sum": lambda z: F.cross_entropy(z.view(-1, CLASSES), TARGET.view(-1), reduction="sum"),
    "none": lambda z: F.cross_entropy(z.transpose(1, 2), TARGET, reduction="none"),
    "none, each its own": lambda z: (
        F.cross_entropy(z.transpose(1, 2), TARGET, reduction="none") * torch.arange(10.0).view(2, 5)
    ),
    "all settings": lambda z: F.cross_entropy(
        z.view(-1, CLASSES), TARGET.view(-1).clamp(min=0), weight=WEIGHTS, ignore_index=5, label_smoothing=0.2
    ),
    "nll": lambda z: F.nll_loss(F.log_softmax(z, dim=-1).view(-1, CLASSES), TARGET.view(-1)),
    "nll, method, class dimension": lambda z: F.nll_loss(z.transpose(1, 2).log_softmax(1), TARGET, WEIGHTS),
    "nll, modules": lambda z: nn.NLLLoss(reduction="sum")(
        nn.LogSoftmax(2)(z).flatten(0, 1), TARGET.flatten()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_loss_computes_no_logits(name: str, bias: bool) -> None:
    assert compare(LOSSES[name], bias) is False


def changed(z: Tensor) -> Tensor:
    z[..., 3] = -2.0
    return F.cross_entropy(z.view(-1, CLASSES), TARGET.view(-1))


def changed_by_view(z: Tensor) -> Tensor:
    rows, before = z.view(-1, CLASSES), z.log_softmax(-1)
    rows[:, 3] = -2.0
    return F.cross_entropy(z.transpose(1, 2), TARGET) + before[0, 0, 3]


def hooked(z: Tensor) -> Tensor:
    z.register_hook(lambda gradient: gradient * 3)
    return F.cross_entropy(z.view(-1, CLASSES), TARGET.view(-1)) + Cubed.apply(z).sum()


class Cubed(torch.autograd.Function):
    """Somebody else's, which reads its input below Python and above."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.detach() ** 3

    @staticmethod
    def backward(ctx, upstream):
        return 3 * ctx.saved_tensors[0] ** 2 * upstream


def changed_for_function(z: Tensor) -> Tensor:
    z[..., 3] = z[..., 4] * 2
    return Cubed.apply(z).sum()


def second(z: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(z.softmax(-1)[..., 0].sum(), z, create_graph=True)
    return gradient.pow(2).sum()


READS: dict[str, Loss] = {
    "argmax beside": lambda z: (z.argmax(-1) == TARGET).double().mean() + z.logsumexp(-1).sum(),
    "softmax": lambda z: z.softmax(-1)[..., 0].sum(),
    "mask": lambda z: F.cross_entropy(z[TARGET >= 0], TARGET[TARGET >= 0]),
    "list": lambda z: F.cross_entropy(z[:, [1, 3]].flatten(0, 1), TARGET[:, [1, 2]].flatten()),
    "part of the classes": lambda z: z[..., :3].sum(),
    "over tokens": lambda z: F.cross_entropy(z, torch.tensor([[0, 4, 2, 1, 1, 0, 3]] * 2)),
    "log_softmax over tokens": lambda z: F.nll_loss(F.log_softmax(z, 1).view(-1, CLASSES), TARGET.view(-1)),
    "nll of logits": lambda z: F.nll_loss(z.view(-1, CLASSES), TARGET.view(-1)),
    "cross-entropy twice": lambda z: F.cross_entropy(F.log_softmax(z, -1).view(-1, CLASSES), TARGET.view(-1)),
    "probabilities": lambda z: F.cross_entropy(z.flatten(0, 1), z.detach().flatten(0, 1).softmax(-1)),
    "mixed rows and classes": lambda z: z.reshape(BATCH * CLASSES, TOKENS).logsumexp(-1).sum(),
    "temperature": lambda z: F.cross_entropy((z / 0.7).view(-1, CLASSES), TARGET.view(-1)),
    "clone": lambda z: F.cross_entropy(z.clone().view(-1, CLASSES), TARGET.view(-1)),
    "stack": lambda z: torch.stack([z, z * 2]).logsumexp(-1).sum(),
    "changed": changed,
    "changed by view": changed_by_view,
    "hooked": hooked,
    "function": lambda z: Cubed.apply(z).sum(),
    "function of view": lambda z: Cubed.apply(z[:, 1:].transpose(1, 2).log_softmax(1)).sum(),
    "changed for function": changed_for_function,
    "second derivative": second,
    "deprecated": lambda z: F.cross_entropy(z.flatten(0, 1), TARGET.flatten(), reduction="none").sum() + z.sum(),
}


@pytest.mark.parametrize("name", READS)
def test_whoever_reads_them_gets_the_layers_output(name: str) -> None:
    compare(READS[name])


def test_gradients_of_the_loss_and_of_the_logits_add_up() -> None:
    assert compare(lambda z: F.cross_entropy(z.view(-1, CLASSES), TARGET.view(-1)) + z.logsumexp(-1).pow(2).mean())
    assert compare(lambda z: z.logsumexp(-1).pow(2).mean() + F.cross_entropy(z.view(-1, CLASSES), TARGET.view(-1)))


_STEPS = [
    lambda z: z.transpose(0, 1),
    lambda z: z.transpose(-2, -1),
    lambda z: z.permute(*reversed(range(z.dim()))),
    lambda z: z[1:],
    lambda z: z[..., -1:, :],
    lambda z: z[:, 0],
    lambda z: z[None],
    lambda z: z.squeeze(0),
    lambda z: z.flatten(0, 1),
    lambda z: z.flatten(1),
    lambda z: z.contiguous(),
    lambda z: z.reshape(-1, z.shape[-1]),
    lambda z: z.reshape(z.shape[0], -1),
    lambda z: z.float(),
    lambda z: z.log_softmax(-1),
    lambda z: z.log_softmax(0),
]


@settings(max_examples=120, deadline=None)
@given(st.lists(st.sampled_from(_STEPS), max_size=5), st.booleans(), st.integers(0, 2**31))
def test_chains_of_calls(steps: list[Loss], by_nll: bool, seed: int) -> None:
    def loss(z: Tensor) -> Tensor:
        for step in steps:
            z = step(z)
        torch.manual_seed(seed)
        classes = z.shape[min(1, z.dim() - 1)]
        target = torch.randint(classes, z.shape[:1] + z.shape[2:] if z.dim() > 1 else ())
        return (F.nll_loss if by_nll else F.cross_entropy)(z, target)

    try:
        expected = loss(layer()(hidden()))
        expected.backward()  # torch's nll_loss has layouts that it cannot differentiate
    except (RuntimeError, IndexError):
        return
    if expected.dtype == torch.float64:
        compare(loss)
    else:  # float32 in between: its rounding, of losses of a few units
        torch.testing.assert_close(loss(lazy_linear(layer(), hidden())), expected, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_form_and_graph_are_known_without_computing() -> None:
    logits = lazy_linear(layer(), hidden())
    turned = logits.transpose(1, 2)
    assert isinstance(logits, Tensor)
    assert (logits.shape, logits.dtype, logits.device) == ((2, 5, 7), torch.float64, torch.device("cpu"))
    assert (turned.size(1), turned.dim(), turned.stride(), turned.numel(), len(turned)) == (7, 3, (35, 1, 7), 70, 2)
    assert logits.requires_grad and logits.grad_fn is not None and not logits.is_leaf
    assert not turned.is_contiguous() and turned.grad_fn is not None
    assert hash(logits) == id(logits)
    with torch.no_grad():
        view = logits.flatten(0, 1)
    assert not view.requires_grad
    assert not any(is_computed(each) for each in (logits, turned, view))


def test_what_leaves_torch_is_the_layers_output() -> None:
    head, x = layer(), hidden()
    with torch.no_grad():
        expected = head(x)
        logits = lazy_linear(head, x)
        assert repr(logits) == repr(expected)
        for read in (lambda z: z.numpy(), lambda z: z.tolist(), lambda z: z[0, 0, 0].item(), lambda z: [*z]):
            assert str(read(lazy_linear(head, x))) == str(read(expected))
        file = io.BytesIO()
        torch.save(lazy_linear(head, x), file)
        file.seek(0)
        copies = [copy.deepcopy(lazy_linear(head, x)), pickle.loads(pickle.dumps(lazy_linear(head, x)))]
        for copied in (*copies, torch.load(file)):
            assert type(copied) is Tensor
            assert torch.equal(copied, expected)
    with pytest.raises(RuntimeError, match="deepcopy protocol"):
        copy.deepcopy(lazy_linear(head, x))  # as of any tensor that has a graph


def test_are_computed_once() -> None:
    logits = lazy_linear(layer(), hidden())
    view = logits.view(-1, CLASSES)
    first = view.exp()
    assert is_computed(logits)
    assert view[0].data_ptr() == logits.data_ptr()
    assert torch.equal(first.view_as(logits), logits.exp())
