"""Attention's Triton kernels against float64: every pair of options, shapes, layouts and dtypes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradscope.kernels.attention import triton_blocks, triton_launch
from gradscope.kernels.attention.options import AttentionOptions
from gradscope.kernels.attention.triton_blocks import Tiling

from .attention_triton import check, problem


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in each direction at small lengths, and other ones in each kernel."""
    monkeypatch.setattr(triton_blocks, "forward_blocks", lambda *_: Tiling(32, 16, 4, 1))
    monkeypatch.setattr(triton_blocks, "keys_blocks", lambda *_: Tiling(16, 32, 4, 1))
    monkeypatch.setattr(triton_blocks, "queries_blocks", lambda *_: Tiling(32, 16, 4, 1))
    monkeypatch.setattr(triton_blocks, "one_pass_blocks", lambda *_: Tiling(32, 16, 4, 1))


_CHOICES: dict[str, tuple[Any, ...]] = {
    "is_causal": (False, True),
    "window": (None, (5, 20), (None, 3), (17, None)),
    "softcap": (None, 2.5),
    "alibi": (None, "head", "batch"),
    "bias": (None, "full", "head", "row", "column", "one", "mask"),
    "dropout_p": (0.0, 0.25),
    "kv_heads": (2, 1),
    "lengths": ((33, 33), (17, 33), (33, 17)),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
}


def _pairwise() -> Iterator[dict[str, Any]]:
    """Few combinations that hold every pair of choices: each takes greedily what meets most pairs not met yet."""
    names = list(_CHOICES)
    left = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(_CHOICES[a]))
        for j in range(len(_CHOICES[b]))
    }
    while left:
        taken = dict(min(left))
        for name in names:
            if name not in taken:
                taken[name] = max(
                    range(len(_CHOICES[name])), key=lambda i, name=name: (_met({**taken, name: i}, left), -i)
                )
        left = {pair for pair in left if not all(taken[name] == index for name, index in pair)}
        yield {name: _CHOICES[name][index] for name, index in taken.items()}


def _met(taken: dict[str, int], left: set[tuple[tuple[str, int], tuple[str, int]]]) -> int:
    return sum(all(taken.get(name) == index for name, index in pair) for pair in left)


_COMBINATIONS = list(_pairwise())


def _name(chosen: dict[str, Any]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in chosen.values())


def test_every_pair_of_options_is_among_the_combinations() -> None:
    for a, b in itertools.combinations(_CHOICES, 2):
        found = {(chosen[a], chosen[b]) for chosen in _COMBINATIONS}
        assert found == set(itertools.product(_CHOICES[a], _CHOICES[b]))


@pytest.mark.parametrize("chosen", _COMBINATIONS, ids=_name)
@pytest.mark.usefixtures("small_blocks")
def test_combination(triton_device: torch.device, chosen: dict[str, Any]) -> None:
    chosen = dict(chosen)
    queries, keys = chosen.pop("lengths")
    shapes: dict[str, Sequence[int]] = {
        "full": (2, 2, queries, keys),
        "head": (1, 2, queries, keys),
        "row": (2, 1, 1, keys),
        "column": (2, queries, 1),
        "one": (1, 1, 1, 1),
        "mask": (queries, keys),
    }
    kind = chosen.pop("bias")
    bias = None if kind is None else torch.randn(*shapes[kind], device=triton_device)
    slopes = {None: None, "head": torch.rand(2), "batch": torch.rand(2, 2)}[chosen.pop("alibi")]
    alibi = None if slopes is None else slopes.to(triton_device)
    check(
        problem(
            triton_device,
            queries,
            keys,
            8,
            batch=2,
            bias=bias > 0 if kind == "mask" and bias is not None else bias,
            alibi=alibi,
            **chosen,
        )
    )


@pytest.mark.parametrize("length", [1, 97, 200])
def test_edge_15_any_length(triton_device: torch.device, length: int) -> None:
    """Edge case 15: any length; here with the blocks that a user gets."""
    check(problem(triton_device, length, length, 16, heads=1, is_causal=True))


def test_edge_15_a_length_of_1025(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edge case 15: T = 1025 leaves one row in the last block."""
    for name in ("forward_blocks", "keys_blocks", "queries_blocks", "one_pass_blocks"):
        monkeypatch.setattr(triton_blocks, name, lambda *_: Tiling(128, 128, 8, 1))
    check(problem(triton_device, 1025, 1025, 8, heads=1, is_causal=True))


@pytest.mark.parametrize(
    ("size", "value_size"), [(1, 1), (8, 8), (24, 40), (64, 64), (80, 80), (128, 128), (256, 256), (33, 200)]
)
def test_edge_15_any_head_size(triton_device: torch.device, size: int, value_size: int) -> None:
    """Edge case 15: head sizes from 1 to 256, powers of two or not; v's may be another."""
    check(problem(triton_device, 40, 35, size, value_size=value_size, heads=1))


@pytest.mark.usefixtures("small_blocks", "triton_device")
@settings(deadline=None, derandomize=True, max_examples=10, database=None)
@given(st.data())
def test_any_shape_and_layout(data: st.DataObject) -> None:
    length = st.integers(1, 36)
    heads = data.draw(st.sampled_from([(1, 1), (3, 3), (4, 2), (3, 1)]))
    p = problem(
        torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        data.draw(length),
        data.draw(length),
        data.draw(st.integers(1, 24)),
        batch=data.draw(st.integers(1, 2)),
        heads=heads[0],
        kv_heads=heads[1],
        value_size=data.draw(st.integers(1, 24)),
        dtype=data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16])),
        is_causal=data.draw(st.booleans()),
        window=data.draw(st.sampled_from([None, (3, 3), (0, 0), (1000, 1000)])),
        scale=data.draw(st.sampled_from([1.0, 0.3, -0.3, 0.0])),
    )
    for name in ("q", "k", "v", "grad_out"):
        setattr(p, name, _laid_out(getattr(p, name), data.draw(st.sampled_from(_LAYOUTS), label=name)))
    check(p)


_LAYOUTS = ("packed", "transposed", "stepped", "offset", "contiguous")


def _laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values otherwise in memory."""
    if layout == "packed":  # a third of a projection
        wide = tensor.new_full((tensor.shape[0], tensor.shape[2], 3, tensor.shape[1], tensor.shape[3]), torch.nan)
        wide[:, :, 1] = tensor.transpose(1, 2)
        return wide[:, :, 1].transpose(1, 2)
    if layout == "transposed":
        return tensor.mT.contiguous().mT
    if layout == "stepped":
        wide = tensor.new_full((*tensor.shape[:2], 2 * tensor.shape[2], 3 * tensor.shape[3]), torch.nan)
        wide[..., ::2, ::3] = tensor
        return wide[..., ::2, ::3]
    if layout == "offset":  # not aligned to 16 bytes
        flat = tensor.new_full((tensor.numel() + 1,), torch.nan)
        flat[1:] = tensor.flatten()
        return flat[1:].view(tensor.shape)
    return tensor


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_blocks_of_this_device(triton_device: torch.device, size: int, dtype: torch.dtype) -> None:
    """The block sizes that the device gets fit into it; two tensors, so that no score is computed twice alike."""
    for options in ({}, {"is_causal": True, "dropout_p": 0.1}, {"softcap": 20.0, "window": (300, 0)}):
        check(problem(triton_device, 1025, 1025, size, heads=4, kv_heads=2, dtype=dtype, **options))
    bias = torch.randn(1, 4, 513, 1025, device=triton_device)
    check(problem(triton_device, 513, 1025, size, batch=2, heads=4, dtype=dtype, bias=bias, dropout_p=0.1))
    like = torch.empty(1, 1, 1, size, device=triton_device, dtype=dtype)
    assert triton_launch.why_not(like, like, like, None, AttentionOptions(scale=1.0, kv_heads=1)) is None
