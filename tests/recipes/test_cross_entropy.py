"""The CPU path of cross_entropy: its derivative, its values beside torch's, its messages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from gradscope.kernels.cross_entropy import cpu
from gradscope.kernels.cross_entropy.reference import cross_entropy_reference
from gradscope.kernels.cross_entropy.terms import Terms
from gradscope.recipes.cross_entropy import ABOUT, CrossEntropyLoss, cross_entropy

from .accuracy import assert_as_accurate, dirty_memory
from .opinfo import samples

TOGETHER = {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 3.0}


def gradient(loss: Callable[[Tensor], Tensor], logits: Tensor, upstream: float = 1.0) -> tuple[Tensor, Tensor]:
    """Loss, and the gradient of the logits for an upstream gradient that differs by row."""
    leaf = logits.detach().requires_grad_()
    found = loss(leaf)
    weights = upstream * torch.linspace(0.5, 2.0, found.numel()).reshape(found.shape) if found.dim() else None
    found.backward(None if weights is None else weights.to(found))
    assert leaf.grad is not None
    return found.detach(), leaf.grad


def assert_matches(ours: Tensor, torchs: Tensor, truth: Tensor, what: str) -> None:
    """As accurate as torch; in float64, where torch is the truth, equal but for a few roundings of sums and exp."""
    if ours.dtype == torch.float64:
        torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-15, msg=lambda text: f"{what}: {text}")
    else:
        assert_as_accurate(ours, torchs, truth, what)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("extras", [{}, {"label_smoothing": 0.2}, {"z_loss": 0.1}, {"softcap": 3.0}, TOGETHER])
@pytest.mark.parametrize("shape", [(7, 5), (2, 5, 3), (5,)])
def test_the_derivative_is_right(reduction: str, weighted: bool, extras: dict[str, float], shape: tuple[int]) -> None:
    logits = (3 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    target = torch.randint(0, 5, shape[:1] + shape[2:] if len(shape) > 1 else ())
    if target.dim():
        target.view(-1)[1] = -100
    weight = torch.rand(5, dtype=torch.float64) if weighted else None
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy(x, target, weight, reduction=reduction, **extras), (logits,), fast_mode=False
    )


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("shape", [(11, 6), (11, 6, 1), (5, 6, 4), (2, 6, 7), (1, 6, 9)])
@pytest.mark.parametrize("order", ["classes inside", "positions inside"])
def test_any_cut_gives_the_reference(
    chunk_rows: int, shape: tuple[int, ...], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "CHUNK_BYTES", chunk_rows * 6 * 8)
    logits = torch.randn(shape, dtype=torch.float64)
    if order == "classes inside":
        logits = logits.movedim(1, -1).contiguous().movedim(-1, 1)
    target = torch.randint(0, 6, (shape[0], *shape[2:]))
    target.view(-1)[::4] = -100
    weight = torch.rand(6, dtype=torch.float64)

    def expected(x: Tensor) -> Tensor:
        rows = x.movedim(1, -1).reshape(-1, 6)
        terms = Terms(weight, -100, 0.2, 0.1, 3.0)
        return cross_entropy_reference(rows, target.reshape(-1), terms, "none").reshape(target.shape)

    with dirty_memory():
        ours = gradient(lambda x: cross_entropy(x, target, weight, reduction="none", **TOGETHER), logits)
    for mine, other in zip(ours, gradient(expected, logits), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)  # float64, sums in another order


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_pytorchs_own_samples(dtype: torch.dtype) -> None:
    taken = samples("cross_entropy", dtype)
    assert len(taken) == 21
    backends = set()
    for sample in taken:
        args, options = sample.args, sample.kwargs
        backends.add(cross_entropy.explain(sample.input, *args, **options).backend)
        wide = {name: value.double() if isinstance(value, Tensor) else value for name, value in options.items()}
        target = args[0].double() if args[0].is_floating_point() else args[0]
        ours = gradient(lambda x, o=options, a=args: cross_entropy(x, *a, **o), sample.input)
        torchs = gradient(lambda x, o=options, a=args: functional.cross_entropy(x, *a, **o), sample.input)
        truth = gradient(lambda x, o=wide, t=target: functional.cross_entropy(x, t, **o), sample.input.double())
        for what, *three in zip(("loss", "gradient"), ours, torchs, truth, strict=True):
            assert_matches(*three, f"{what} of {tuple(sample.input.shape)} {options}")
    assert backends == {"cpu", "torch"}  # the samples with probabilities are torch's


@settings(deadline=None, derandomize=True, max_examples=40, database=None)
@given(
    batch=st.integers(0, 9),
    classes=st.integers(1, 40),
    positions=st.sampled_from([(), (1,), (3,), (2, 3), (0,)]),
    layout=st.sampled_from(["contiguous", "sliced", "expanded", "classes inside", "reversed"]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    weighted=st.booleans(),
    ignored=st.sampled_from([-100, 0]),
)
def test_any_shape_stride_and_dtype(
    batch: int,
    classes: int,
    positions: tuple[int, ...],
    layout: str,
    dtype: torch.dtype,
    reduction: str,
    smoothing: float,
    weighted: bool,
    ignored: int,
) -> None:
    torch.manual_seed(batch * 1000 + classes)
    logits = (4 * torch.randn(batch, classes, *positions)).to(dtype)
    if layout == "sliced":
        logits = torch.stack([logits, logits], -1)[..., 0]
    elif layout == "expanded":
        logits = logits[:1].expand(batch, *logits.shape[1:]) if batch else logits
    elif layout == "classes inside":
        logits = logits.movedim(1, -1).contiguous().movedim(-1, 1)
    elif layout == "reversed":
        logits = logits.permute(*reversed(range(logits.dim()))).contiguous().permute(*reversed(range(logits.dim())))
    target = torch.randint(0, classes, (batch, *positions))
    weight = torch.rand(classes).to(dtype) + 0.1 if weighted else None
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
    ours = gradient(lambda x: cross_entropy(x, target, weight, **options), logits)
    torchs = gradient(lambda x: functional.cross_entropy(x, target, weight, **options), logits)
    wide = None if weight is None else weight.double()
    truth = gradient(lambda x: functional.cross_entropy(x, target, wide, **options), logits.double())
    for what, mine, other, true in zip(("loss", "gradient"), ours, torchs, truth, strict=True):
        if true.isnan().any():
            assert torch.equal(mine.isnan(), true.isnan()), what
        else:
            assert_matches(mine, other, true, what)


LOGITS = torch.zeros(4, 5)
TARGET = torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": LOGITS.long()}, r"input is of dtype int64; expected float32 or float64 or float16 or bfloat16"),
        ({"input": torch.zeros(())}, r"input is a scalar; expected \[classes\], \[batch, classes\] or"),
        ({"input": torch.zeros(4, 0)}, r"input is of shape \(4, 0\); expected at least one class"),
        ({"target": TARGET.int()}, r"target is of dtype int32; expected int64 or uint8, or probabilities"),
        ({"target": TARGET[1:]}, r"target is of shape \(3,\); expected \(4,\) for input of shape \(4, 5\)"),
        ({"target": torch.zeros(4, 6)}, r"target is of shape \(4, 6\); expected \(4, 5\)"),
        ({"target": TARGET.to("meta")}, r"target is on meta; expected cpu, where input is"),
        ({"target": TARGET + 5}, r"target contains 5; expected a class in \[0, 5\) or ignore_index=-100"),
        ({"target": TARGET - 1}, r"target contains -1; expected a class in \[0, 5\) or ignore_index=-100"),
        ({"weight": torch.ones(4)}, r"weight is of shape \(4,\); expected \(5,\)"),
        ({"weight": torch.ones(5, requires_grad=True)}, r"weight is a tensor that requires a gradient; expected one"),
        ({"reduction": "average"}, r"reduction is 'average'; expected 'mean' or 'sum' or 'none'"),
        ({"label_smoothing": 1.5}, r"label_smoothing is 1\.5; expected a number in \[0, 1\]"),
        ({"label_smoothing": float("nan")}, r"label_smoothing is nan; expected a number in \[0, 1\]"),
        ({"z_loss": -1.0}, r"z_loss is -1\.0; expected a number in \[0, inf\)"),
        ({"softcap": 0.0}, r"softcap is 0\.0; expected a number in \(0, inf\)"),
        ({"backend": "cuda"}, r"backend is 'cuda'; expected 'auto' or 'triton' or 'cpu' or 'torch'"),
        (
            {"backend": "torch", "z_loss": 0.1},
            r"backend='torch' cannot run here: it does not support z_loss and softcap",
        ),
        (
            {"target": torch.zeros(4, 5), "softcap": 3.0},
            r"nothing can run here: triton: the target contains probabilities",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^cross_entropy: {message}"):
        cross_entropy(**{"input": LOGITS, "target": TARGET, **change})


def test_explain_tells_why() -> None:
    assert str(cross_entropy.explain(LOGITS, TARGET)) == (
        "cpu: processes a few rows at a time, so that they stay in the cache\nnot triton: Triton has no cpu backend"
    )
    assert cross_entropy.explain(LOGITS, torch.zeros(4, 5)).backend == "torch"


def test_the_module_is_torchs() -> None:
    weight = torch.rand(5)
    ours = CrossEntropyLoss(weight, ignore_index=2, reduction="sum", label_smoothing=0.1)
    torchs = torch.nn.CrossEntropyLoss(weight, ignore_index=2, reduction="sum", label_smoothing=0.1)
    assert ours.state_dict().keys() == torchs.state_dict().keys() == {"weight"}
    logits, target = torch.randn(4, 5), torch.tensor([0, 2, 4, 1])
    torch.testing.assert_close(ours(logits, target), torchs(logits, target))
    assert repr(ours) == "CrossEntropyLoss(ignore_index=2, reduction='sum', label_smoothing=0.1)"
    assert repr(CrossEntropyLoss(softcap=30.0)) == "CrossEntropyLoss(softcap=30.0)"


def test_what_it_says_of_itself_is_there() -> None:
    module = sys.modules["gradscope.recipes.cross_entropy"]
    assert all(hasattr(module, name) for name in (*ABOUT.functions, *ABOUT.modules))
    assert ABOUT.name == "cross_entropy"


@pytest.mark.parametrize(
    ("backend", "probabilities"), [("auto", False), ("cpu", False), ("torch", False), ("auto", True)]
)
def test_smoothing_below_0_is_none_as_torch_has_it(backend: str, probabilities: bool) -> None:
    """A schedule may end there."""
    logits = torch.randn(6, 5, requires_grad=True)
    target = torch.randn(6, 5).softmax(-1) if probabilities else torch.arange(6) % 5
    made = cross_entropy(logits, target, label_smoothing=-0.1, backend=backend)
    wanted = functional.cross_entropy(logits, target, label_smoothing=-0.1)
    torch.testing.assert_close(made, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(each, logits)[0] for each in (made, wanted)))
