"""Queries, keys and values of one tensor, which another time has another width or other rows than the code counts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradscope
from gradscope.patching.patches import Patches
from tests.patching import spelled
from tests.patching.exactness import TOLERANCE, difference, results

WIDTH = spelled.WIDTH
ATTENTION = "y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)"
MERGED = ATTENTION + ".reshape(x.size(0), x.size(1), -1)"
BY_INDEX = "q, k, v = h[0], h[1], h[2]\n" + MERGED


def heads(size: int) -> str:
    views = (f"{each} = {each}.view(x.size(0), x.size(1), 2, {size}).transpose(1, 2)\n" for each in "qkv")
    return "\n" + "".join(views) + MERGED


PARTS = {
    "slices": "q, k, v = x[..., :8], x[..., 8:16], x[..., 16:24]" + heads(4),
    "slices to the end": "q, k, v = x[..., :8], x[..., 8:16], x[..., 16:]" + heads(-1),
    "narrow": "q, k, v = x.narrow(-1, 0, 8), x.narrow(-1, 8, 8), x.narrow(-1, 16, 8)" + heads(4),
    "a last part that is smaller": "q, k, v = x.split(8, -1)" + heads(-1),
    "places to split at": "q, k, v = x.tensor_split([8, 16], -1)" + heads(-1),
    "the rest": "q, k, v = x.split([8, 8, x.size(-1) - 16], -1)" + heads(-1),
    "unflatten": "h = x.unflatten(-1, (-1, 2, 4)).permute(2, 0, 3, 1, 4)\n" + BY_INDEX,
    "parts before heads": "h = x.view(x.size(0), x.size(1), -1, 8)\nq, k, v = h[:, :, 0], h[:, :, 1], h[:, :, 2]"
    + heads(4),
    "three tokens": "h = x.view(x.size(0), 3, -1, 2, 4).permute(2, 0, 3, 1, 4)\n" + BY_INDEX,
}
ROWS = {
    "a window": "q, k, v = x.view(-1, 3, 3, 2, 4).permute(2, 0, 3, 1, 4)\n" + ATTENTION + ".flatten(2)",
    "merged by a window": "q, k, v = (t.view(x.size(0), x.size(1), 2, 4).transpose(1, 2) for t in x.chunk(3, -1))\n"
    + ATTENTION
    + ".reshape(-1, 3, 8)",
    "all written": "q, k, v = x.view(2, 3, 3, 2, 4).permute(2, 0, 3, 1, 4)\n" + ATTENTION + ".flatten(2)",
}
NUMBERS = {
    "a size of parts": ("q, k, v = x.split(self.n, -1)" + heads(-1), 8, 10),
    "sizes of parts": ("q, k, v = x.split(self.n, -1)" + heads(-1), [8, 8, 8], [10, 10, 4]),
    "tokens left to torch": (
        "q, k, v = (t.reshape(x.size(0), -1, 2, self.n).transpose(1, 2) for t in x.split(8, -1))\n"
        + ATTENTION
        + ".flatten(2)",
        4,
        2,
    ),
    "a part of one feature": ("g, v = x.split(self.n, -1)\ny = F.silu(g) * v", [12, 12], [23, 1]),
}


def difference_later(folder: Path, body: str, later: tuple[int, ...], **numbers: tuple[Any, Any]) -> float:
    """How far a patched model without layers is from the plain one on a batch of another form, with other numbers."""
    model = spelled.entry(folder, body, "packed").build()[0].double()
    model.inp, model.up, model.out, model.b = nn.Identity(), nn.Identity(), nn.Identity(), model.w
    for name, (first, _) in numbers.items():
        setattr(model, name, first)
    batch = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    patches = Patches(gradscope.plan(model, batch, recipes=["packed_attention", "swiglu"]))
    assert patches.table.supported.any(), patches.table.reasons.tolist()
    for name, (_, other) in numbers.items():
        setattr(model, name, other)
    original, batch = copy.deepcopy(model), torch.randn(later, dtype=torch.float64)
    patches.apply()
    found = difference(results(original, batch), results(model, batch))
    patches.revert()
    return found


@pytest.mark.parametrize("body", PARTS.values(), ids=PARTS)
def test_parts_of_a_tensor_of_another_width(tmp_path: Path, body: str) -> None:
    """What is behind the third part is read by nobody, or that part is larger or smaller than the others."""
    width = 18 if "split(8" in body else 2 * WIDTH
    assert difference_later(tmp_path, body, (2, 3, width)) <= TOLERANCE


@pytest.mark.parametrize("later", [(1, 6, WIDTH), (3, 2, WIDTH)], ids=str)
@pytest.mark.parametrize("body", ROWS.values(), ids=ROWS)
def test_rows_that_the_code_counts_itself(tmp_path: Path, body: str, later: tuple[int, ...]) -> None:
    assert difference_later(tmp_path, body, later) <= TOLERANCE


@pytest.mark.parametrize(("body", "first", "other"), NUMBERS.values(), ids=NUMBERS)
def test_other_parts_later(tmp_path: Path, body: str, first: Any, other: Any) -> None:
    assert difference_later(tmp_path, body, (2, 3, WIDTH), n=(first, other)) <= TOLERANCE
