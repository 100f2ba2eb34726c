# ruff: noqa: N806 -- the sizes have the names that people give them
"""Helpers that do one of two things, and modules that do nothing: what they do is asked at each call."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan
from gradscope.workload import Workload
from tests.patching.corpus import attention_vision as vision
from tests.patching.exactness import TOLERANCE, difference, patched, reasons, results

TOKENS = 12


def x() -> torch.Tensor:
    return torch.randn(2, TOKENS, 48)


@pytest.fixture(autouse=True)
def _at_every_size(own_code_at_every_size: None) -> None:
    """Small models are patched as well."""


class Given(nn.Module):
    """A mask that may be given."""

    def __init__(self, attention: nn.Module, mask: torch.Tensor | None) -> None:
        super().__init__()
        self.attn, self.mask = attention, mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x, attn_mask=self.mask)


MASK = torch.zeros(TOKENS, TOKENS).index_fill(1, torch.tensor([3]), float("-inf"))


@pytest.mark.parametrize("kind", [vision.TimmNormed, vision.TimmByIf])
@pytest.mark.parametrize(
    ("before", "after"), [(None, MASK), (MASK, None), (MASK, 0.0)], ids=["given", "gone", "a number"]
)
def test_a_mask_that_is_there_or_not_next_time(kind, before, after):
    model = Given(kind(), before)
    model.attn.attn_drop.p = 0.0
    original = copy.deepcopy(model)
    patches = patched(model, x())
    assert "attention(" in patches.diff
    later = x()
    for mask in (before, after):
        model.mask = original.mask = mask
        assert difference(results(original, later), results(model, later)) <= TOLERANCE
    patches.revert()


class Unnormed(vision.TimmAttention):
    """Its class makes nothing but an identity."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm = nn.Identity()
        self.attn_drop.p = 0.0


@pytest.mark.parametrize("name", ["q_norm", "k_norm"])
def test_an_identity_that_is_another_module_next_time(name):
    model = Unnormed()
    original = copy.deepcopy(model)
    patches = Patches(plan(Workload(model, x()), recipes=["packed_attention"]))
    assert "packed_attention(" in patches.diff
    assert "type(self.q_norm) is nn.Identity" in patches.diff
    assert max(map(len, patches.diff.splitlines())) <= 121
    patches.apply()
    other = nn.LayerNorm(model.head_dim)
    with torch.no_grad():
        other.weight.uniform_(0.5, 3.0)
    for each in (model, original):
        setattr(each, name, copy.deepcopy(other))
    later = x()
    assert difference(results(original, later), results(model, later)) <= TOLERANCE
    patches.revert()


def doubled(x):
    return 2 * x


GOT = {
    "a hook": lambda module: module.register_forward_hook(lambda _, given, output: doubled(output)),
    "a hook before": lambda module: module.register_forward_pre_hook(lambda _, given: doubled(given[0])),
    "a forward": lambda module: setattr(module, "forward", doubled),
}


@pytest.mark.parametrize("got", GOT.values(), ids=GOT)
def test_an_identity_that_does_something_later(got):
    """As the other modules inside the pattern: the patched module runs its own code then."""
    model = Unnormed()
    original = copy.deepcopy(model)
    patches = Patches(plan(Workload(model, x()), recipes=["packed_attention"]))
    assert "packed_attention(" in patches.diff
    patches.apply()
    for each in (model, original):
        got(each.q_norm)
    later = x()
    assert difference(results(original, later), results(model, later)) <= TOLERANCE
    patches.revert()


class InHelper(vision.TimmAttention):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__(attn_drop=0.0)
        self.score_norm = norm

    def scores(self, q, k):
        return self.score_norm(q) @ k.transpose(-2, -1)

    def forward(self, x):
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        attn = self.scores(q, k).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, self.attn_dim))


def test_an_identity_in_a_helper():
    """The helper asks for nothing: it is left."""
    found = reasons(InHelper(nn.Identity()), x())
    assert any("self.score_norm may contain different modules in another call" in each for each in found), found


counted: list[int] = []


def add_and_count(scores, bias):
    return scores if counted.append(1) is bias else scores + bias


def add_and_keep(scores, bias):
    if bias is not None:
        counted.append(1)
        scores = scores + bias
    return scores


def add_by_two(scores, bias, more=None):
    return scores if bias is more else scores + bias


def add_starred(*given):
    return given[0] if given[1] is None else given[0] + given[1]


class Masker:
    """No module: its method has an argument more than a call names."""

    def add(self, mask, scores):
        return scores if mask is None else scores + mask


class ByMethod(vision.TimmAttention):
    def __init__(self) -> None:
        super().__init__(attn_drop=0.0)
        self.masker = Masker()

    def added(self, mask, scores):
        return scores if mask is None else scores + mask

    def forward(self, x, attn_mask=None):
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = self.added(attn_mask, attn)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, self.attn_dim))


class ByObject(ByMethod):
    def forward(self, x, attn_mask=None):
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = self.masker.add(attn_mask, attn)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, self.attn_dim))


@pytest.mark.parametrize("kind", [ByMethod, ByObject])
@pytest.mark.parametrize("before", [None, MASK], ids=["no mask", "mask"])
def test_methods_that_do_one_of_two_things_are_left(kind, before):
    found = reasons(Given(kind(), before), x())
    assert found
    assert any("may behave differently in another call" in each or "on another path" in each for each in found), found


def add_any(scores, bias):
    return scores.neg().neg() if bias is None else scores


def wrapped(function):
    def run(*given):
        return function(*given)

    run.__name__ = function.__name__
    return run


@wrapped
def add_wrapped(scores, bias):
    return scores if bias is None else scores + bias


def add_set(scores, bias):
    return scores if bias is None else scores + bias


def set_another():
    global add_set
    add_set = add_any


class ByHelper(vision.TimmAttention):
    """Each has a helper that is not understood."""

    def __init__(self) -> None:
        super().__init__(attn_drop=0.0)

    def parts(self, x):
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        return q * self.scale, k, v

    def joined(self, attn, v):
        x = attn.softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).flatten(2))


class Counts(ByHelper):
    def forward(self, x, attn_mask=None):
        q, k, v = self.parts(x)
        attn = q @ k.transpose(-2, -1)
        attn = add_and_count(attn, attn_mask)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class Keeps(ByHelper):
    def forward(self, x, attn_mask=None):
        q, k, v = self.parts(x)
        attn = q @ k.transpose(-2, -1)
        attn = add_and_keep(attn, attn_mask)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class ByTwo(ByHelper):
    def forward(self, x, attn_mask=None):
        q, k, v = self.parts(x)
        attn = q @ k.transpose(-2, -1)
        attn = add_by_two(attn, attn_mask)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class Starred(ByHelper):
    def forward(self, x, attn_mask=None):
        q, k, v = self.parts(x)
        attn = q @ k.transpose(-2, -1)
        attn = add_starred(attn, attn_mask)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class Wrapped(ByHelper):
    def forward(self, x, attn_mask=None):
        q, k, v = self.parts(x)
        attn = q @ k.transpose(-2, -1)
        attn = add_wrapped(attn, attn_mask)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class SetLater(ByHelper):
    def forward(self, x, attn_mask=None):
        q, k, v = self.parts(x)
        attn = q @ k.transpose(-2, -1)
        attn = add_set(attn, attn_mask)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


class OwnHelper(ByHelper):
    """A local name, that may be any function."""

    def forward(self, x, attn_mask=None, add=add_set):
        q, k, v = self.parts(x)
        attn = q @ k.transpose(-2, -1)
        attn = add(attn, attn_mask)
        attn = attn.softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("kind", [Counts, Keeps, ByTwo, Starred, Wrapped, SetLater, OwnHelper])
def test_helpers_that_are_not_understood(kind):
    found = reasons(kind(), x())
    assert any("uses attn on another path" in each for each in found), found


@pytest.mark.parametrize("kind", [Wrapped, Keeps, ByTwo, SetLater])
def test_helpers_that_are_not_understood_with_a_mask(kind):
    """The same with what they do recorded."""
    found = reasons(Given(kind(), MASK), x())
    assert found
    assert not any("attention(" in each for each in found)
