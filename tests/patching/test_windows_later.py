"""A patched attention in windows is given other windows, samples, masks, lengths and dtypes than those planned with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.patching.patches import Patches
from tests.patching.corpus import attention_vision, attention_windows
from tests.patching.corpus.attention_windows import HEADS, TOKENS, WIDTH, WINDOWS, window_mask
from tests.patching.exactness import call, squares


def planned(model: nn.Module, batch: Any) -> nn.Module:
    """A copy of ``model`` that is patched for ``batch``, both in float64."""
    made = copy.deepcopy(model)
    patches = Patches(gradscope.plan(made, batch, squares, recipes=["attention"]))
    patches.apply()
    assert patches.kept, patches.table.reasons.tolist()
    return made


def assert_same(model: nn.Module, patched: nn.Module, *batch: Tensor) -> None:
    """Outputs and all gradients, those of the inputs too."""
    found = []
    for each in (model, patched):
        given = [x.detach().clone().requires_grad_() for x in batch]
        torch.manual_seed(1)
        out = call(each, tuple(given))
        upstream = torch.linspace(-1.0, 2.0, out.numel(), dtype=out.dtype).view_as(out)
        leaves = [*each.parameters(), *given]
        found.append((out, *torch.autograd.grad(out, leaves, upstream, allow_unused=True)))
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            # float64, sums in another order
            torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)


def windows(samples: int, count: int = WINDOWS, tokens: int = TOKENS, dtype: torch.dtype = torch.float64) -> Tensor:
    """[samples * windows, tokens, width]."""
    return torch.randn(samples * count, tokens, WIDTH, dtype=dtype)


KINDS = ["Timm", "Indexed", "Unflattened", "Sized", "Boolean"]


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module]:
    """A model without dropout, and one like it that is patched."""
    torch.manual_seed(0)
    model = getattr(attention_windows, request.param)(drop=0.0).double()
    return model, planned(model, windows(2))


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_other_batches(pair: tuple[nn.Module, nn.Module], samples: int) -> None:
    assert_same(*pair, windows(samples))


@pytest.mark.parametrize("count", [1, 2, 6])
def test_another_number_of_windows(pair: tuple[nn.Module, nn.Module], count: int) -> None:
    for each in pair:
        each.attn_mask = window_mask(count).double()
    assert_same(*pair, windows(3, count))


def test_another_mask(pair: tuple[nn.Module, nn.Module]) -> None:
    for each in pair:
        each.get_buffer("attn_mask").copy_(window_mask().flip(0, 1))
    assert_same(*pair, windows(2))


def test_another_length(pair: tuple[nn.Module, nn.Module]) -> None:
    for each in pair:
        each.attn_mask = window_mask(tokens=4).double()
        if isinstance(each, attention_windows.Biased):
            each.bias = nn.Parameter(each.bias.detach()[:, :4, :4].clone())
    assert_same(*pair, windows(2, tokens=4))


def test_another_dtype(pair: tuple[nn.Module, nn.Module]) -> None:
    model, patched = (each.float() for each in pair)
    x = windows(2, dtype=torch.float32)
    torch.testing.assert_close(patched(x), model(x))


def test_samples_that_are_no_multiple_of_the_windows_raise(pair: tuple[nn.Module, nn.Module]) -> None:
    for each in pair:
        with pytest.raises((RuntimeError, ValueError)):
            each(windows(1, count=WINDOWS - 1))


@pytest.mark.parametrize("train", [True, False])
def test_dropout_of_the_moment(train: bool) -> None:
    """With all weights dropped the result is the bias of the projection; in evaluation nothing is dropped."""
    model = attention_windows.Timm(drop=0.5).double()
    patched = planned(model, windows(2))
    for each in (model, patched):
        each.train(train).attn_drop.p = 1.0
    x = windows(2)
    torch.testing.assert_close(patched(x), model(x))
    assert torch.equal(patched(x), model.proj.bias.expand_as(x)) is train


@pytest.mark.parametrize(
    "shape", [(1, HEADS, TOKENS, TOKENS), (8, 1, TOKENS, TOKENS), (8, HEADS, 1, TOKENS), (HEADS, TOKENS, TOKENS), (9,)]
)
@pytest.mark.parametrize("first", [(1, HEADS, TOKENS, TOKENS), (8, 1, TOKENS, TOKENS)])
def test_a_bias_of_another_form(first: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """One for all windows may be one for each next time."""
    torch.manual_seed(0)
    model = attention_windows.EachItsOwn(drop=0.0).double()
    patched = planned(model, (windows(2), torch.randn(first).double()))
    assert_same(model, patched, windows(2), torch.randn(shape).double())
    assert_same(model, patched, windows(2), torch.randn(first).double())


class Around(nn.Module):
    """Gives the bias of all windows the form of one of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = attention_windows.EachItsOwn(drop=0.0)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        return torch.as_tensor(self.inner(x, own.unsqueeze(0) if own.dim() == 3 else own))


def test_a_bias_whose_form_is_another_functions() -> None:
    torch.manual_seed(0)
    model = Around().double()
    patched = planned(model, (windows(2), torch.randn(HEADS, TOKENS, TOKENS).double()))
    assert_same(model, patched, windows(2), torch.randn(8, 1, TOKENS, TOKENS).double())
    assert_same(model, patched, windows(2), torch.randn(HEADS, TOKENS, TOKENS).double())


@pytest.mark.parametrize("later", ["none", "learnt", "float32"])
def test_a_mask_of_another_kind(later: str) -> None:
    """None is no mask; one that requires a gradient gets its gradient."""
    torch.manual_seed(0)
    model = attention_windows.Cosine().double()
    x, mask = windows(2), window_mask().double()
    patched = planned(model, (x, mask))
    if later == "none":
        for one in (model, patched):
            one.eval()
        torch.testing.assert_close(patched(x, None), model(x, None))
    elif later == "learnt":
        assert_same(model, patched, x, mask * 0.02)
    else:
        torch.testing.assert_close(patched(x, mask.float()), model(x, mask.float()))


@pytest.mark.parametrize(("side", "samples"), [(8, 1), (12, 2), (10, 3), (4, 2)])
def test_images_of_another_size(side: int, samples: int) -> None:
    """torchvision makes the mask of the image: other windows, and of images to be filled up."""
    torch.manual_seed(0)
    model = attention_vision.TorchvisionShifted(2).double()
    model.attention_dropout = 0.0
    patched = planned(model, torch.randn(2, 8, 8, 48).double())
    assert_same(model, patched, torch.randn(samples, side, side, 48).double())


def test_a_window_that_is_not_shifted_later() -> None:
    torch.manual_seed(0)
    model = attention_vision.TorchvisionShifted(2).double()
    model.attention_dropout = 0.0
    x = torch.randn(2, 8, 8, 48).double()
    patched = planned(model, x)
    for each in (model, patched):
        each.shift_size = [0, 0]  # type: ignore[assignment]
    assert_same(model, patched, x)
