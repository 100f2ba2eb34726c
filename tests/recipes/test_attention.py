"""The CPU path of attention: its derivative, its values beside torch's, at every option and shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from gradscope.kernels.attention import cpu_blocks
from gradscope.kernels.attention.dropout import draw_seed, keep_mask
from gradscope.recipes.attention import attention

from .accuracy import dirty_memory
from .attention_cases import NAMES, assert_all_as_accurate, by_reference, moved_by_scores, ours, qkv, run
from .opinfo import samples

OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"softcap": 1.5},
    {"window": (2, 1)},
    {"window": (None, 2)},
    {"window": (3, None), "is_causal": True},
    {"alibi_slopes": torch.tensor([0.5, 0.25])},
    {"scale": 0.7, "softcap": 2.0, "is_causal": True, "alibi_slopes": torch.tensor([0.5, 0.25])},
]


def as_options(given: dict[str, Any]) -> dict[str, Any]:
    """The reference's names of the recipe's arguments."""
    return {{"alibi_slopes": "alibi"}.get(name, name): value for name, value in given.items()}


@pytest.fixture(params=["one block", "many blocks"])
def cut(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that hold everything, and blocks far smaller than the tensors."""
    if request.param == "many blocks":
        monkeypatch.setattr(cpu_blocks, "ROWS", 4)
        monkeypatch.setattr(cpu_blocks, "KEYS", 3)
        monkeypatch.setattr(cpu_blocks, "SCORES", 24)


@pytest.mark.parametrize("given", OPTIONS, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_the_derivative_is_right(given: dict[str, Any], dropout_p: float, cut: None) -> None:
    tensors = [x.requires_grad_() for x in (*qkv(1, 2, 1, 5, 4, 2), torch.randn(2, 5, 1, dtype=torch.float64))]

    def function(*args: Tensor) -> Tensor:
        torch.manual_seed(3)  # the same dropout at each evaluation
        return ours(*args, dropout_p=dropout_p, **given)

    assert torch.autograd.gradcheck(function, tensors, fast_mode=False)


@pytest.mark.parametrize("given", OPTIONS, ids=str)
@pytest.mark.parametrize("dropout_p", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("lengths", [(1, 1), (9, 14), (14, 9)])
def test_values_are_the_references(
    given: dict[str, Any], dropout_p: float, lengths: tuple[int, int], cut: None
) -> None:
    tensors = qkv(3, 2, 1, *lengths, 8, 5)
    torch.manual_seed(1)
    seed = draw_seed(torch.device("cpu"))
    keep = keep_mask(seed, (3, 2, *lengths), dropout_p)
    torch.manual_seed(1)
    with dirty_memory():
        mine = run(lambda *x: ours(*x, dropout_p=dropout_p, **given), tensors)
    truth = run(lambda *x: by_reference(*x, keep=keep, dropout_p=dropout_p, **as_options(given)), tensors)
    for name, one, other in zip(NAMES, mine, truth, strict=False):
        # float64, sums in another order
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("shape", [(2, 4, 6, 9), (1, 4, 6, 9), (2, 1, 1, 9), (6, 9), (4, 6, 1), (1, 9), (1, 1)])
def test_a_bias_that_broadcasts_gets_its_gradient(shape: tuple[int, ...], cut: None) -> None:
    tensors = (*qkv(2, 4, 2, 6, 9, 4), torch.randn(shape, dtype=torch.float64))
    mine = run(lambda *x: ours(*x, is_causal=True, softcap=2.0), tensors)
    truth = run(lambda *x: by_reference(*x, is_causal=True, softcap=2.0), tensors)
    for name, one, other in zip(NAMES, mine, truth, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}")


def torchs_fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: Any) -> Tensor:
    """SDPA by its fused kernel: with three dimensions or a mask's gradient it falls to another.

    Every fused backward takes delta from the rounded output, so what it gets wrong is more than what autograd does.
    """
    shape = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    q, k, v = (x.expand(*shape, *x.shape[-2:]).reshape(-1, shape[-1], *x.shape[-2:]) for x in (q, k, v))
    mask = None if mask is None else mask.detach()
    assert torch._fused_sdp_choice(q, k, v, mask, **{"dropout_p": 0.0, "is_causal": False, **given}) == 1
    return functional.scaled_dot_product_attention(q, k, v, mask, **given).reshape(*shape, q.shape[-2], v.shape[-1])


@pytest.mark.parametrize("backend", ["auto", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_pytorchs_own_samples(backend: str, dtype: torch.dtype) -> None:
    taken = samples("scaled_dot_product_attention", dtype)
    assert len(taken) >= 20
    compared = 0
    for sample in taken:
        options = dict(sample.kwargs)
        mask = options.pop("attn_mask", None)
        if options.get("dropout_p", 0.0) > 0:
            continue  # other random numbers: test_attention_dropout.py
        tensors = (sample.input, *sample.args)
        backend_of_it = {"backend": backend, **options}
        mine = run(lambda *x, o=backend_of_it, m=mask: attention(*x, m, **o), tensors)
        torchs = run(lambda *x, o=options, m=mask: torchs_fused(*x, m, **o), tensors)
        wide = mask.double() if mask is not None and mask.is_floating_point() else mask
        truth = run(
            lambda *x, o=options, m=wide: functional.scaled_dot_product_attention(*x, m, **o),
            tuple(x.double() for x in tensors),
        )
        compared += 1
        if dtype != torch.float64:
            by_scores = moved_by_scores(tensors, wide, options["is_causal"])  # of inputs up to 9, scores reach 85
            assert_all_as_accurate(mine, torchs, truth, tensors, by_scores)
            continue
        for name, one, other in zip(NAMES, mine, truth, strict=False):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")
    assert compared >= 12


@settings(deadline=None, derandomize=True, max_examples=40, database=None)
@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (4, 2), (6, 1)]),
    st.integers(1, 70),
    st.integers(1, 70),
    st.integers(1, 20),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.booleans(),
    st.sampled_from([None, (0, 0), (5, 3), (None, 4)]),
    st.sampled_from([None, 3.0]),
)
def test_any_shape_stride_and_dtype(
    batch: int,
    heads: tuple[int, int],
    queries: int,
    keys: int,
    size: int,
    dtype: torch.dtype,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
) -> None:
    torch.manual_seed(0)  # inside: the same example gives the same numbers whatever ran before
    tensors = qkv(batch, *heads, queries, keys, size, dtype=dtype)
    given = {"is_causal": causal, "window": window, "softcap": softcap}
    mine = run(lambda *x: ours(*x, **given), tensors)
    torchs = run(lambda *x: by_reference(*x, **given), tensors)
    truth = run(lambda *x: by_reference(*x, **given), tuple(x.double() for x in tensors))
    assert_all_as_accurate(mine, torchs, truth, tensors)


@pytest.mark.parametrize("lead", [(), (5,), (2, 3, 4)])
def test_any_number_of_leading_dimensions(lead: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(*lead, 6, 8) for _ in range(3))
    mask = torch.randn(*lead[:-1], 1, 6, 6) if lead else torch.randn(6, 6)
    for given_mask in (None, mask):
        mine = run(lambda *x, m=given_mask: attention(*x, m, backend="cpu"), (q, k, v))
        torchs = run(lambda *x, m=given_mask: functional.scaled_dot_product_attention(*x, m), (q, k, v))
        wide = None if given_mask is None else given_mask.double()
        truth = run(
            lambda *x, m=wide: functional.scaled_dot_product_attention(*x, m), (q.double(), k.double(), v.double())
        )
        assert_all_as_accurate(mine, torchs, truth, tuple(x if x.dim() > 2 else x[None] for x in (q, k, v)))
