"""A patched attention is given another kind of mask than the one that it was planned with."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.patching.patches import Patches

TOKENS = 6


class Hidden(nn.Module):
    """A key is hidden where the mask is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)) * 0.35
        scores = scores.masked_fill(mask == 0, float("-inf"))
        return (scores.softmax(-1) @ v).squeeze(1)


class Filled(Hidden):
    """A key is hidden where the mask is true."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)) * 0.35
        scores = scores.masked_fill(mask, float("-inf"))
        return (scores.softmax(-1) @ v).squeeze(1)


class Added(Hidden):
    """The mask's numbers are added, also a boolean one's."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)) * 0.35
        scores = scores + mask
        return (scores.softmax(-1) @ v).squeeze(1)


LOWER = torch.ones(TOKENS, TOKENS).tril()
ROW = torch.tensor([1.0, 1, 0, 1, 0, 1])
MASKS = {
    "boolean": LOWER.bool(),
    "float": LOWER,
    "integer": LOWER.long(),
    "bytes": LOWER.byte(),
    "four dimensions": LOWER.int()[None, None],
    "half": LOWER.half(),
    "a row of booleans": ROW.bool(),
    "a row of integers": ROW.long(),
    "a row": ROW,
    "one number": torch.ones(1),
    "no dimension": torch.tensor(1.0),
    "numbers": torch.linspace(-3, 3, TOKENS**2).view(TOKENS, TOKENS),
}


@pytest.mark.parametrize(
    ("kind", "planned"), [(Hidden, "float"), (Hidden, "boolean"), (Filled, "boolean"), (Added, "numbers")]
)
@pytest.mark.parametrize("later", MASKS)
def test_it_does_as_the_original(kind: type[Hidden], planned: str, later: str) -> None:
    model = kind()
    original, x = copy.deepcopy(model), torch.randn(2, TOKENS, 8)
    masks = {name: ~mask if kind is Filled and mask.dtype is torch.bool else mask for name, mask in MASKS.items()}
    patches = Patches(gradscope.plan(model, {"x": x, "mask": masks[planned]}, recipes=["attention"]))
    patches.apply()
    assert patches.kept, patches.table.reasons.tolist()
    try:
        expected = original(x, masks[later])
    except RuntimeError as error:
        assert "masked_fill_ only supports boolean masks" in str(error)
        return
    found = model(x, masks[later])
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected)


class Asking(Hidden):
    """What is added is of the scores' dtype, and as low as that goes; queries stay float32 under autocast."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        q = torch.nn.functional.normalize(q.to(x.dtype), dim=-1)
        k = torch.nn.functional.normalize(k.to(x.dtype), dim=-1)
        scores = (q @ k.transpose(-2, -1)) * 0.35
        scores = scores + (
            (1.0 - mask.to(scores.dtype))  # on two lines
            * torch.finfo(scores.dtype).min
        )
        return (scores.softmax(-1) @ v).squeeze(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_mask_of_the_scores_dtype_asks_the_query(dtype: torch.dtype) -> None:
    model = Asking().to(torch.promote_types(dtype, torch.float32))
    original, x = copy.deepcopy(model), torch.randn(2, TOKENS, 8, dtype=model.qkv.weight.dtype)
    patches = Patches(gradscope.plan(model, {"x": x, "mask": LOWER}, recipes=["attention"]))
    patches.apply()
    assert "mask_ = ((1.0 - mask.to(q.dtype))" in patches.diff and "* torch.finfo(q.dtype).min)" in patches.diff
    for mask in (LOWER, torch.stack([LOWER, torch.zeros_like(LOWER)])[:, None]):  # and rows that see nothing
        with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
            found, expected = model(x, mask), original(x, mask)
        # Weights and products are rounded to 8 bits at other places than by hand: a few units of 2^-8.
        torch.testing.assert_close(found, expected, **({} if dtype is torch.float64 else {"rtol": 0.02, "atol": 0.02}))


class Cast(Hidden):
    """Masks are cast to what the scores are."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)) * 0.35
        hidden = 1.0 - mask.to(scores)
        scores = scores + hidden * -10000.0 + (1.0 - mask.type_as(scores)) * -10000.0
        return (scores.softmax(-1) @ v).squeeze(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_mask_that_is_cast_to_the_scores_is_cast_to_the_query(dtype: torch.dtype) -> None:
    model, mask = Cast().to(dtype), LOWER.bool()
    original, x = copy.deepcopy(model), torch.randn(2, TOKENS, 8, dtype=dtype)
    patches = Patches(gradscope.plan(model, {"x": x, "mask": mask}, recipes=["attention"]))
    patches.apply()
    assert "1.0 - mask.to(q)" in patches.diff and "1.0 - mask.type_as(q)" in patches.diff
    torch.testing.assert_close(model(x, mask.mT), original(x, mask.mT))


class Packed(nn.Module):
    """A causal buffer and a finite number: in another buffer a row may see no key."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.register_buffer("mask", LOWER.clone()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).split(width, dim=2)
        q = q.view(batch, tokens, 2, width // 2).transpose(1, 2)
        k = k.view(batch, tokens, 2, width // 2).transpose(1, 2)
        v = v.view(batch, tokens, 2, width // 2).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * 0.7
        scores = scores.masked_fill(self.mask[:, :, :tokens, :tokens] == 0, -1e9)
        y = scores.softmax(-1) @ v
        return y.transpose(1, 2).contiguous().view(batch, tokens, width)


@pytest.mark.parametrize("change", ["in place", "another"])
def test_a_row_of_a_packed_attention_that_sees_no_key_later(change: str) -> None:
    """It weighs all keys equally, and gives queries and keys no gradient, as the original's."""
    model = Packed().double()
    original = copy.deepcopy(model)
    x = torch.randn(2, TOKENS, 8, dtype=torch.float64)
    patches = Patches(gradscope.plan(model, x))
    patches.apply()
    assert patches.table.recipe.tolist() == ["packed_attention"]
    assert_same(original, model, x)
    for each in (model, original):
        mask = each.get_buffer("mask")
        changed = mask if change == "in place" else mask.clone()
        changed[0, 0, 3] = 0.0
        changed[0, 0, 1, 4] = 1.0
        each.mask = changed
    assert_same(original, model, x)
    patches.revert()


def assert_same(original: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Outputs and all gradients."""
    upstream = torch.randn(x.shape, dtype=x.dtype)
    outputs = [each(x) for each in (original, model)]
    torch.testing.assert_close(outputs[1], outputs[0])
    wanted, made = (
        torch.autograd.grad(output, list(each.parameters()), upstream)
        for output, each in zip(outputs, (original, model), strict=True)
    )
    for one, other in zip(made, wanted, strict=True):
        torch.testing.assert_close(one, other)


class Optional(nn.Module):
    """What torch's functions are given may be None."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.scale, self.weight = nn.Linear(8, 24), None, None

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return nn.functional.rms_norm(y.transpose(1, 2).flatten(2), (8,), self.weight, 1e-5)


class Told(Optional):
    """Its mask goes, and the scale beside it is torch's own at first."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        seen = torch.ones(x.size(1), x.size(1), dtype=torch.bool).tril()
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
        return nn.functional.rms_norm(y, (8,), self.weight, 1e-5)


@pytest.mark.parametrize("later", ["mask", "scale", "weight"])
@pytest.mark.parametrize("kind", [Optional, Told])
def test_what_was_none_may_be_given_later(kind: type[Optional], later: str) -> None:
    model = kind().double()
    original, x = copy.deepcopy(model), torch.randn(2, TOKENS, 8).double()
    patches = Patches(gradscope.plan(model, x))
    patches.apply()
    assert len(patches.kept) == (2 if kind is Told else 1), patches.table.reasons.tolist()
    values = {"scale": 0.1, "weight": nn.Parameter(torch.rand(8).double())}
    mask = LOWER.bool() if later == "mask" else None
    for each in (model, original) if later in values else ():
        delattr(each, later)
        setattr(each, later, values[later])
    torch.testing.assert_close(model(x, mask), original(x, mask))
