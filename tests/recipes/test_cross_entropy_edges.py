"""Edge cases of cross_entropy, by their number in the list that every recipe passes, and what torch.compile does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradscope.recipes.cross_entropy import CrossEntropyLoss, cross_entropy
from gradscope.recipes.linear_cross_entropy import linear_cross_entropy

from .accuracy import assert_as_accurate, dirty_memory
from .test_cross_entropy import gradient

EVERYTHING: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0}


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(6, 9, requires_grad=True)


@pytest.fixture
def target() -> Tensor:
    return torch.tensor([3, -100, 0, 8, -100, 5])


def test_an_upstream_gradient_that_differs_by_row(logits: Tensor, target: Tensor) -> None:
    """Case 1."""
    upstream = torch.tensor([1.0, 5.0, -2.0, 0.0, 3.0, 0.5])
    ours = torch.autograd.grad(cross_entropy(logits, target, reduction="none"), logits, upstream)
    torchs = torch.autograd.grad(functional.cross_entropy(logits, target, reduction="none"), logits, upstream)
    torch.testing.assert_close(ours, torchs)


def test_neither_logits_nor_upstream_are_written(logits: Tensor, target: Tensor) -> None:
    """Cases 2 and 4: the logits are another node's saved output, and the upstream gradient is used twice."""
    saved = logits.exp()  # saves its output
    upstream = torch.tensor(3.0)
    before = saved.detach().clone()
    cross_entropy(saved, target).backward(upstream)
    assert torch.equal(saved, before) and saved._version == 0
    assert upstream == 3.0 and upstream._version == 0
    other = logits.detach().requires_grad_()
    functional.cross_entropy(other.exp(), target).backward(torch.tensor(3.0))
    torch.testing.assert_close(logits.grad, other.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_backward_as_often_as_the_graph_is_retained(logits: Tensor, target: Tensor, reduction: str) -> None:
    """Case 3."""
    loss = cross_entropy(logits, target, reduction=reduction)
    upstream = torch.full_like(loss, 2.0)
    first = torch.autograd.grad(loss, logits, upstream, retain_graph=True)
    second = torch.autograd.grad(loss, logits, upstream, retain_graph=True)
    third = torch.autograd.grad(loss, logits, upstream)
    assert torch.equal(first[0], second[0]) and torch.equal(first[0], third[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, logits, upstream)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(4, 5), (0, 5), (0, 5, 3), (4, 5, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_counts(reduction: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Case 6: all ignored, and empty; a mean is NaN with gradients of zero, as torch's."""
    target = torch.full((shape[0], *shape[2:]), -100)
    logits = torch.randn(shape).to(dtype)
    with dirty_memory():
        ours = gradient(lambda x: cross_entropy(x, target, reduction=reduction), logits)
    torchs = gradient(lambda x: functional.cross_entropy(x, target, reduction=reduction), logits)
    torch.testing.assert_close(ours[0], torchs[0], equal_nan=True)
    assert torch.equal(ours[1], torch.zeros_like(logits))


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1}, {"z_loss": 0.1}], ids=str)
@pytest.mark.parametrize("shape", [(4, 5), (2, 5, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_counts_weighs_nothing(shape: tuple[int, ...], dtype: torch.dtype, settings: dict[str, Any]) -> None:
    """Case 6: a mean of 0 / 0, with gradients of NaN for the rows that count and of zero for the others."""
    target = torch.tensor([0, 1, -100, 0]).reshape(shape[0], *shape[2:])
    logits, weight = torch.randn(shape).to(dtype), torch.tensor([0.0, 0.0, 1.0, 2.0, 0.5]).to(dtype)
    ours = gradient(lambda x: cross_entropy(x, target, weight, **settings), logits)
    smoothing = settings.get("label_smoothing", 0.0)
    torchs = gradient(lambda x: functional.cross_entropy(x, target, weight, label_smoothing=smoothing), logits)
    assert ours[0].isnan()
    torch.testing.assert_close(ours, torchs, equal_nan=True)


def test_a_mean_of_weighted_rows_and_of_the_normaliser() -> None:
    """The first is divided by the weights, the second by the rows."""
    logits, weight = torch.randn(6, 5, dtype=torch.float64), torch.rand(5, dtype=torch.float64) + 0.1
    target, settings = torch.tensor([3, -100, 0, 4, -100, 1]), {"label_smoothing": 0.1, "z_loss": 0.3}
    ours = gradient(lambda x: cross_entropy(x, target, weight, **settings), logits)
    x = logits.clone().requires_grad_()
    loss = functional.cross_entropy(x, target, weight, label_smoothing=0.1)
    loss = loss + 0.3 * x.logsumexp(1).square()[target >= 0].mean()
    torch.testing.assert_close(ours, (loss.detach(), *torch.autograd.grad(loss, x)))


@pytest.mark.parametrize("hidden", [0, 4])
def test_a_class_that_no_row_may_take(hidden: int) -> None:
    """The normaliser is that of the others."""
    logits, target = torch.randn(3, 5, dtype=torch.float64), torch.tensor([1, 2, 3])
    logits[:, hidden] = -torch.inf
    loss, slope = gradient(lambda x: cross_entropy(x, target, z_loss=0.3), logits)
    others = [each for each in range(5) if each != hidden]
    fewer = gradient(lambda x: cross_entropy(x, target - int(hidden == 0), z_loss=0.3), logits[:, others])
    torch.testing.assert_close((loss, slope[:, others]), fewer)
    assert not slope[:, hidden].any()


def test_rows_that_are_ignored_may_hold_anything() -> None:
    """Case 6: NaN and infinities there reach neither the loss nor the gradient."""
    logits = torch.randn(3, 5)
    logits[1] = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, 1.0])
    loss, slope = gradient(lambda x: cross_entropy(x, torch.tensor([1, -100, 2]), **EVERYTHING), logits)
    assert loss.isfinite() and slope.isfinite().all()
    assert torch.equal(slope[1], torch.zeros(5))


@pytest.mark.parametrize("wrong", [-1, 9, 2**40])
def test_a_target_that_is_no_class(logits: Tensor, wrong: int) -> None:
    """Case 6."""
    with pytest.raises(ValueError, match=f"target contains {wrong}; expected a class in"):
        cross_entropy(logits, torch.tensor([0, 1, wrong, 2, 3, 4]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    """Case 8: torch's dtypes, and at least its accuracy."""
    logits, target = torch.randn(8, 300).to(dtype), torch.randint(0, 300, (8,))
    with torch.autocast("cpu", dtype=dtype):
        ours = gradient(lambda x: cross_entropy(x, target), logits)
        torchs = gradient(lambda x: functional.cross_entropy(x, target), logits)
    truth = gradient(lambda x: functional.cross_entropy(x, target), logits.double())
    for what, *three in zip(("loss", "gradient"), ours, torchs, truth, strict=True):
        assert_as_accurate(*three, what)


@pytest.mark.parametrize("retain", [False, True])
def test_a_loss_scale_that_float16_cannot_hold(retain: bool) -> None:
    """Case 8: the scale of a gradient scaler meets the gradient before float16 does."""
    logits, target = torch.randn(2, 5).half().requires_grad_(), torch.tensor([1, 4])
    with torch.autocast("cpu", dtype=torch.float16):
        loss = cross_entropy(logits, target) * 1e-3
    (ours,) = torch.autograd.grad(loss, logits, torch.tensor(2.0**20), retain_graph=retain)
    wide = logits.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(functional.cross_entropy(wide, target) * 1e-3, wide, torch.tensor(2.0**20).double())
    torch.testing.assert_close(ours.double(), truth, rtol=2e-3, atol=1.0)  # a unit in float16's last place: 2**-10


# Dynamo makes an instance of the Function for its own use, of which torch warns.
INSTANCE = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@INSTANCE
@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, EVERYTHING], ids=str)
def test_compiled_without_a_graph_break(logits: Tensor, target: Tensor, options: dict[str, Any]) -> None:
    """Case 9."""
    torch.compiler.reset()
    compiled = torch.compile(lambda x: cross_entropy(x * 2, target, **options), fullgraph=True, backend="aot_eager")
    eager = gradient(lambda x: cross_entropy(x * 2, target, **options), logits)
    for ours, expected in zip(gradient(compiled, logits), eager, strict=True):
        torch.testing.assert_close(ours, expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(logits).reshape(eager[0].shape), eager[0])


@INSTANCE
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # Inductor imports a user of it
def test_compiled_by_inductor(logits: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 9."""
    monkeypatch.setattr(sys, "path", list(sys.path))  # importing Inductor appends to it
    torch.compiler.reset()
    compiled = torch.compile(lambda x: cross_entropy(x * 2, target), fullgraph=True)
    eager = gradient(lambda x: cross_entropy(x * 2, target), logits)
    for ours, expected in zip(gradient(compiled, logits), eager, strict=True):
        torch.testing.assert_close(ours, expected)


def test_the_operator_keeps_its_promises(logits: Tensor, target: Tensor) -> None:
    """Case 9: what torch.compile believes of the operator is so."""
    import gradscope.kernels.cross_entropy.launch  # noqa: F401  registers it

    args = (target[:, None], None, None, -100, 0.1, 0.0, None)
    for layout in (logits.detach()[:, :, None], torch.randn(9, 6).t()[:, :, None]):
        for wanted in (False, True):
            torch.library.opcheck(torch.ops.gradscope.cross_entropy.default, (layout, *args, wanted, "cpu"))


def test_labels_that_are_misaligned_and_gradients_that_are_expanded() -> None:
    """Case 11: labels[1:] of a longer sequence, logits[:-1], and the stride 0 of a sum's gradient."""
    tokens = torch.randint(0, 9, (7,))
    sequence = torch.randn(7, 9)

    def shifted(loss: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda x: loss(x[:-1], tokens[1:], reduction="none").sum()

    for mine, other in zip(
        gradient(shifted(cross_entropy), sequence),
        gradient(shifted(functional.cross_entropy), sequence),
        strict=True,
    ):
        torch.testing.assert_close(mine, other)


def test_evaluation_does_no_gradient_work(logits: Tensor, target: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 17."""
    module = sys.modules["gradscope.recipes.cross_entropy"]
    wanted = []
    inner = module.losses_and_gradient
    monkeypatch.setattr(module, "losses_and_gradient", lambda *args: wanted.append(args[8]) or inner(*args))
    with torch.no_grad():
        quiet = cross_entropy(logits, target)
    assert not quiet.requires_grad
    assert torch.equal(cross_entropy(logits.detach(), target), quiet)
    assert torch.equal(cross_entropy(logits, target).detach(), quiet)
    assert wanted == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_sure_of_itself(dtype: torch.dtype) -> None:
    """Case 18: softmax - 1 must not cancel."""
    logits = torch.zeros(3, 8).index_put_((torch.arange(3), torch.arange(3)), torch.tensor([8.0, 10.0, 90.0])).to(dtype)
    target = torch.arange(3)
    _, ours = gradient(lambda x: cross_entropy(x, target, reduction="sum"), logits)
    _, truth = gradient(lambda x: functional.cross_entropy(x, target, reduction="sum"), logits.double())
    _, torchs = gradient(lambda x: functional.cross_entropy(x, target, reduction="sum"), logits)
    # The sum of exp and its log round to one part in 2^24 each, 2e-4 of the 7 exp(-10) that lie beside the target.
    allowed = 5e-4 + torch.finfo(dtype).eps
    assert (ours[:2] / truth[:2] - 1).abs().max() < allowed
    assert ours[2].abs().max() < 1e-30 and ours.isfinite().all()
    assert dtype == torch.float32 or (torchs.diagonal()[:2] / truth.diagonal()[:2] - 1).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_settings_together(dtype: torch.dtype) -> None:
    """Case 18: smoothing, class weights, ignored rows, z-loss and soft-cap."""
    logits, target, weight = (5 * torch.randn(12, 50)).to(dtype), torch.randint(0, 50, (12,)), torch.rand(50)
    target[::3] = 7
    options: dict[str, Any] = {"ignore_index": 7, **EVERYTHING}

    def plain(x: Tensor, w: Tensor) -> Tensor:
        capped = 5.0 * torch.tanh(x / 5.0)
        z = 0.01 * capped.logsumexp(1)[target != 7].square().mean()
        return functional.cross_entropy(capped, target, w, ignore_index=7, label_smoothing=0.1) + z

    ours = gradient(lambda x: cross_entropy(x, target, weight.to(dtype), **options), logits)
    torchs = gradient(lambda x: plain(x, weight.to(dtype)), logits)
    truth = gradient(lambda x: plain(x, weight.to(dtype).double()), logits.double())
    for what, *three in zip(("loss", "gradient"), ours, torchs, truth, strict=True):
        assert_as_accurate(*three, what)


def test_targets_may_be_bytes(logits: Tensor) -> None:
    """As torch's; 255 fits into one and is a common index to ignore."""
    target = torch.tensor([0, 255, 2, 3, 1, 0])[: len(logits)].to(torch.uint8)
    ours = gradient(lambda x: cross_entropy(x, target, ignore_index=255), logits)
    theirs = gradient(lambda x: functional.cross_entropy(x, target, ignore_index=255), logits)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)
    weight = torch.randn(logits.shape[1], 8)
    x = torch.randn(len(logits), 8)
    torch.testing.assert_close(
        linear_cross_entropy(x, weight, target, ignore_index=255),
        functional.cross_entropy(x @ weight.T, target, ignore_index=255),
    )


@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"weight": torch.linspace(0.5, 2, 9)}], ids=["plain", "smooth", "weights"]
)
@pytest.mark.parametrize("shape", [(6, 9), (2, 9, 3), (2, 9, 3, 2)], ids=str)
@pytest.mark.parametrize("ignored", [2, 256 + 4, -100])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_bytes_with_every_option(backend: str, ignored: int, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """Torch's own takes them of rows alone, without weights and smoothing, and an index by its last eight bits."""
    logits, target = torch.randn(shape), torch.randint(0, 9, (shape[0], *shape[2:]), dtype=torch.uint8)
    options = {"ignore_index": ignored, **options}
    ours = gradient(lambda x: cross_entropy(x, target, backend=backend, **options), logits)
    exact = gradient(lambda x: functional.cross_entropy(x, target.long(), **options), logits)
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one, other)


def test_smoothing_over_many_weighted_classes_is_as_exact_as_torchs() -> None:
    """Case 7: a sum over the classes is part of each row's loss."""
    logits, target, weight = torch.randn(64, 32_000), torch.randint(0, 32_000, (64,)), torch.rand(32_000)
    options: dict[str, Any] = {"label_smoothing": 0.5, "reduction": "none"}
    ours = cross_entropy(logits, target, weight, backend="cpu", **options)
    torchs = functional.cross_entropy(logits, target, weight, **options)
    truth = functional.cross_entropy(logits.double(), target, weight.double(), **options)
    assert_as_accurate(ours, torchs, truth, "loss")


@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.float64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_class_weights_of_any_dtype(backend: str, autocast: bool, dtype: torch.dtype, kind: torch.dtype) -> None:
    """Whichever backend the number of logits chooses."""
    logits, target, weight = torch.randn(6, 9).to(dtype), torch.arange(6), torch.arange(1, 10).to(kind)
    with torch.autocast("cpu", enabled=autocast):
        found = cross_entropy(logits, target, weight, backend=backend)
    exact = functional.cross_entropy(logits.double(), target, weight.double())
    # The loss is rounded to bfloat16, by torch's own also on the way.
    exactness = 2**-6 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), exact, rtol=exactness, atol=exactness)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_byte_that_is_no_class(backend: str) -> None:
    with pytest.raises(ValueError, match="target contains 244; expected a class in"):
        cross_entropy(torch.randn(1, 9), torch.tensor([244], dtype=torch.uint8), ignore_index=500, backend=backend)


@pytest.mark.parametrize("size_average", [None, True, False])
@pytest.mark.parametrize("reduce", [None, True, False])
def test_arguments_stand_where_torch_has_them(size_average: bool | None, reduce: bool | None) -> None:
    """By position and with the old names."""
    logits, target, weight = torch.randn(6, 4), torch.tensor([0, 1, 2, 3, 1, 0]), torch.rand(4)
    arguments = (weight, size_average, 1, reduce, "sum", 0.1)
    if size_average is None and reduce is None:
        expected = functional.cross_entropy(logits, target, *arguments)
    else:
        with pytest.warns(UserWarning, match="size_average and reduce args will be deprecated"):
            expected = functional.cross_entropy(logits, target, *arguments)
    torch.testing.assert_close(cross_entropy(logits, target, *arguments), expected)
    torch.testing.assert_close(CrossEntropyLoss(*arguments)(logits, target), expected)


def test_deterministic_mode_and_second_derivatives(logits: Tensor, target: Tensor) -> None:
    """Case 19."""
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (gradient(lambda x: cross_entropy(x, target), logits)[1] for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(first, second)
    (slope,) = torch.autograd.grad(cross_entropy(logits, target), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives are not supported"):
        slope.sum().backward()


def test_under_checkpoint(logits: Tensor, target: Tensor) -> None:
    """Gradients that forward left behind are made again, and used once."""
    ours = gradient(lambda x: checkpoint(cross_entropy, x * 1.0, target, use_reentrant=False), logits)
    expected = gradient(lambda x: functional.cross_entropy(x, target), logits)
    for mine, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, other)


def test_one_copy_of_the_logits() -> None:
    """The most that is held is one tensor of their size and what the cache holds, where torch holds three."""
    from gradscope.kernels.cross_entropy.cpu import CHUNK_BYTES

    logits, target = torch.randn(600, 20_000, requires_grad=True), torch.randint(0, 20_000, (600,))

    def most(loss: Callable[..., Tensor]) -> int:
        with torch.profiler.profile(
            profile_memory=True, acc_events=True, activities=[torch.profiler.ProfilerActivity.CPU]
        ) as profiler:
            loss(logits, target).backward()
        logits.grad = None
        events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        now = top = 0
        for _, change in sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"):
            now += change
            top = max(top, now)
        return top

    size = logits.numel() * 4
    assert size < most(cross_entropy) < size + CHUNK_BYTES + (1 << 20)
    assert most(functional.cross_entropy) > 2.9 * size
