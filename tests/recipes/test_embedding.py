"""The embedding whose gradient is handed over by rows, and stays dense."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from gradscope.recipes.embedding import Embedding, embedding

from .accuracy import assert_as_accurate, dirty_memory
from .opinfo import samples

TOKENS, FEATURES = 11, 4


def a_weight(dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(TOKENS, FEATURES, dtype=dtype))


def same(weight: nn.Parameter) -> nn.Parameter:
    """Another parameter of equal values."""
    return nn.Parameter(weight.detach().clone())


def tied(look_up: Callable[..., Tensor], ids: Tensor, weight: Tensor) -> Tensor:
    """A loss through an embedding and a head of one weight."""
    return functional.linear(look_up(ids, weight), weight).square().sum()


IDS = torch.tensor([[1, 2, 1], [0, 10, 2]])


def assert_no_hooks(weight: Tensor) -> None:
    """Neither on the tensor nor on its accumulating node, where a hook would change what this pass gives."""
    assert not weight._backward_hooks
    before = weight.grad
    weight.grad = None
    (2.0 * weight).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, torch.full_like(weight, 2.0))
    weight.grad = before


def test_passes_torchs_own_samples() -> None:
    """By backward(), which adds rows; test_opinfo.py asks for the gradient itself."""
    taken = samples("embedding", torch.float64)
    assert taken
    for sample in taken:
        weight, (ids,) = sample.input, sample.args  # in this order there
        ours, torchs = (nn.Parameter(weight.detach().clone()) for _ in range(2))
        found = embedding(ids, ours, **sample.kwargs)
        expected = functional.embedding(ids, torchs, **sample.kwargs)
        upstream = torch.randn_like(expected)
        found.backward(upstream)
        expected.backward(upstream)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ours.grad, torchs.grad)


def test_gradcheck_of_both_derivatives() -> None:
    """Edge case 1, and 19 turned round: the second derivative is there."""
    weight = a_weight()
    assert embedding.explain(IDS, weight).backend == "rows"
    assert torch.autograd.gradcheck(lambda w: embedding(IDS, w), weight)
    assert torch.autograd.gradgradcheck(lambda w: embedding(IDS, w).pow(3), weight)


@pytest.mark.parametrize("padding", [None, 2, -1])
@pytest.mark.parametrize("use", ["alone", "tied", "twice", "head first"])
@pytest.mark.parametrize("existing", [False, True])
def test_backward_gives_torchs_dense_gradient(use: str, existing: bool, padding: int | None) -> None:
    """Edge case 16: both gradients arrive in one parameter, whichever is first."""
    ours, upstream = a_weight(), torch.randn(2, 3, FEATURES, dtype=torch.float64)
    torchs = same(ours)

    def loss(look_up: Callable[..., Tensor], weight: Tensor) -> Tensor:
        if use == "alone":
            return (look_up(IDS, weight, padding) * upstream).sum()
        if use == "tied":
            return tied(lambda ids, w: look_up(ids, w, padding), IDS, weight)
        if use == "twice":
            return (look_up(IDS, weight, padding) * look_up(IDS + 0, weight, padding) * upstream).sum()
        head = functional.linear(upstream, weight).square().sum()  # its backward runs after the embedding's
        return head + (look_up(IDS, weight, padding) * upstream).sum()

    for weight, look_up in ((ours, embedding), (torchs, functional.embedding)):
        if existing:
            weight.grad = torch.ones_like(weight)
        loss(look_up, weight).backward()
    assert ours.grad is not None and ours.grad.layout == torch.strided
    assert ours.grad.stride() == torchs.grad.stride()  # type: ignore[union-attr]
    torch.testing.assert_close(ours.grad, torchs.grad)
    assert_no_hooks(ours)


@settings(deadline=None, derandomize=True, max_examples=30, database=None)
@given(
    shape=st.lists(st.integers(0, 4), max_size=3),
    kind=st.sampled_from([torch.int32, torch.int64]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    layout=st.sampled_from(["contiguous", "transposed", "expanded"]),
    transposed_weight=st.booleans(),
)
def test_any_shape_stride_and_dtype(
    shape: list[int], kind: torch.dtype, dtype: torch.dtype, layout: str, transposed_weight: bool
) -> None:
    """Edge cases 6 and 11: no tokens at all; strided tokens, weights and upstream gradients."""
    ids = torch.randint(0, TOKENS, shape, dtype=kind)
    ids = ids.permute(tuple(reversed(range(ids.dim())))) if layout == "transposed" else ids
    values = (
        torch.randn(FEATURES, TOKENS).to(dtype).t() if transposed_weight else torch.randn(TOKENS, FEATURES).to(dtype)
    )
    ours = nn.Parameter(values)
    torchs = nn.Parameter(values.detach().clone(memory_format=torch.preserve_format))
    upstream = torch.randn(()).to(dtype).expand(*ids.shape, FEATURES)
    if layout != "expanded":
        upstream = torch.randn(FEATURES, *ids.shape).movedim(0, -1).to(dtype)
    embedding(ids, ours).backward(upstream)
    functional.embedding(ids, torchs).backward(upstream)
    assert ours.grad is not None
    # Rows of one token are added in the order of the tokens by either.
    torch.testing.assert_close(ours.grad, torchs.grad)


def test_float32_is_as_exact_as_torch() -> None:
    """Many tokens of few kinds: long sums."""
    ids, upstream = torch.randint(0, 3, (3000,)), torch.randn(3000, FEATURES)
    truth = torch.zeros(TOKENS, FEATURES, dtype=torch.float64).index_add_(0, ids, upstream.double())
    gradients = []
    for look_up in (embedding, functional.embedding):
        weight = a_weight(torch.float32)
        look_up(ids, weight).backward(upstream)
        assert weight.grad is not None
        gradients.append(weight.grad)
    assert_as_accurate(*gradients, truth, "gradient")


def test_compiles_in_one_graph() -> None:
    """Edge case 9: there torch's own is taken."""
    weight = a_weight()
    compiled = torch.compile(lambda ids, w: tied(embedding, ids, w), fullgraph=True, backend="aot_eager")
    compiled(IDS, weight).backward()
    (expected,) = torch.autograd.grad(tied(functional.embedding, IDS, weight), weight)
    torch.testing.assert_close(weight.grad, expected)


def test_under_torch_func() -> None:
    weight = torch.randn(TOKENS, FEATURES)
    found = torch.func.grad(lambda w: tied(embedding, IDS, w))(weight)
    torch.testing.assert_close(found, torch.func.grad(lambda w: tied(functional.embedding, IDS, w))(weight))


def test_nothing_is_kept_without_gradients() -> None:
    """Edge case 17."""
    weight = a_weight()
    with torch.no_grad():
        assert embedding(IDS, weight).grad_fn is None
    assert not embedding(IDS, weight.detach()).requires_grad


@pytest.mark.parametrize("features", [0, FEATURES])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (3,)])
def test_nothing_to_add(shape: tuple[int, ...], features: int) -> None:
    """Edge case 6, also into a gradient that is there."""
    weight = torch.randn(TOKENS, features, requires_grad=True)
    ids = torch.zeros(shape, dtype=torch.int64)
    for times in (1, 2):
        embedding(ids, weight, 2).sum().backward()
        assert weight.grad.shape == weight.shape and weight.grad.sum() == times * ids.numel() * features


def test_no_memory_is_left_unwritten() -> None:
    """Edge case 19: deterministic mode, which also fills new memory with NaN."""
    weight = a_weight()
    with dirty_memory():
        embedding(IDS, weight, 2).sum().backward()
    counts = torch.tensor([1, 2, 0, 0, 0, 0, 0, 0, 0, 0, 1], dtype=torch.float64)
    assert torch.equal(weight.grad, counts[:, None].expand(-1, FEATURES))


def test_the_module_is_a_drop_in() -> None:
    torchs = nn.Embedding(TOKENS, FEATURES, padding_idx=2)
    module = Embedding(TOKENS, FEATURES, padding_idx=2)
    module.load_state_dict(torchs.state_dict())
    assert repr(module) == repr(torchs)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(IDS), torchs(IDS))
    assert torch.equal(Embedding.from_pretrained(torchs.weight.detach())(IDS), torchs(IDS))


def test_explain_says_why() -> None:
    weight = a_weight()
    assert str(embedding.explain(IDS, weight)) == (
        "rows: only the rows of the batch's tokens are added to the dense gradient"
    )
    assert embedding.explain(IDS, weight * 1).refused["rows"].startswith("the weight is computed from other tensors")
    assert embedding.explain(IDS, weight.bfloat16()).backend == "torch"
    assert embedding.explain(IDS, weight, max_norm=1.0).backend == "torch"


WEIGHT = torch.randn(TOKENS, FEATURES)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: embedding(IDS.float(), WEIGHT), "embedding: input is of dtype float32; expected int64 or int32"),
        (lambda: embedding(IDS, WEIGHT[0]), "weight is of shape (4,); expected (tokens, features)"),
        (lambda: embedding(IDS, WEIGHT.long()), "weight is of dtype int64; expected float32"),
        (lambda: embedding(IDS, WEIGHT.to("meta")), "weight is on meta; expected cpu, where input is"),
        (lambda: embedding(IDS, WEIGHT, 11), "padding_idx is 11; expected a token in [-11, 11)"),
        (lambda: embedding(IDS + 1, WEIGHT), "input is holding 11; expected tokens in [0, 11)"),
        (lambda: embedding(-IDS, a_weight()), "input is holding -1; expected tokens in [0, 11)"),
        (lambda: embedding(IDS, WEIGHT, backend="fast"), "backend is 'fast'; expected 'auto' or 'rows' or 'torch'"),
        (
            lambda: embedding(IDS, WEIGHT, sparse=True, backend="rows"),
            "backend='rows' cannot run here: it does not support",
        ),
    ],
)
def test_bad_input_is_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        call()
    assert message in str(raised.value)
