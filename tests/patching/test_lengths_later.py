"""A causal attention gets more keys than queries, or a cap that is two numbers, after it was planned."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.patching.patches import Patches

WIDTH, TOKENS = 8, 6


class Cached(nn.Module):
    """Its mask is of the queries' length alone: one row of it is laid over all keys."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.cap, self.other = nn.Linear(WIDTH, 3 * WIDTH), 5.0, 5.0

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        if past is not None:
            k, v = torch.cat((past, k), 2), torch.cat((past, v), 2)
        scores = (q @ k.transpose(-2, -1)) * 0.35
        scores = scores.masked_fill(torch.ones(t, t).tril() == 0, float("-inf"))
        return (scores.softmax(-1) @ v).squeeze(1)


class Kept(Cached):
    """A call that does nothing at first gives the keys."""

    def cached(self, k: Tensor, past: Tensor | None) -> Tensor:
        return k if past is None else torch.cat((past, k), 2)

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        k, v = self.cached(k, past), self.cached(v, past)
        scores = (q @ k.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return (scores.softmax(-1) @ v).squeeze(1)


class Renamed(Kept):
    """The name that is read is bound to what the call gave."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        k, v = self.cached(k, past), self.cached(v, past)
        keys = k
        scores = (q @ keys.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return (scores.softmax(-1) @ v).squeeze(1)


class Sdpa(Cached):
    """torch's own is given the mask."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        if past is not None:
            k, v = torch.cat((past, k), 2), torch.cat((past, v), 2)
        mask = torch.ones(t, t, dtype=torch.bool).tril()
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).squeeze(1)


class Windowed(Cached):
    """The queries are the last of as many rows as an attribute says: first all."""

    def __init__(self) -> None:
        super().__init__()
        self.window = TOKENS

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = self.window
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        q = q[:, :, -t:]
        scores = (q @ k.transpose(-2, -1)) * 0.35
        scores = scores.masked_fill(torch.ones(t, t).tril() == 0, float("-inf"))
        return (scores.softmax(-1) @ v).squeeze(1)


class WindowedParts(Windowed):
    """Rows and columns are picked in one index."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t, qkv = self.window, self.qkv(x)
        q, k, v = qkv[:, -t:, :WIDTH], qkv[..., WIDTH : 2 * WIDTH], qkv[..., 2 * WIDTH :]
        scores = (q @ k.transpose(-2, -1)) * 0.35
        scores = scores.masked_fill(torch.ones(t, t).tril() == 0, float("-inf"))
        return scores.softmax(-1) @ v


class Tensors(Cached):
    """The call makes a tensor of what it is given, whatever it keeps."""

    def cached(self, k: Tensor, past: Tensor | None) -> Tensor:
        return k.clone() if past is None else torch.cat((past, k), 2)

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        k, v = self.cached(k, past), self.cached(v, past)
        scores = (q @ k.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return (scores.softmax(-1) @ v).squeeze(1)


class Chosen(Cached):
    """A condition inside an expression says what the keys are."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        k, v = (each * 1.0 if past is None else torch.cat((past, each), 2) for each in (k, v))
        scores = (q @ k.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return (scores.softmax(-1) @ v).squeeze(1)


class Put(Cached):
    """A list holds the keys, and what was there before."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        before = [] if past is None else [past]
        kept = {"k": torch.cat([*before, k], 2), "v": torch.cat([*before, v], 2), "q": q}
        q, k, v = kept["q"], kept["k"], kept["v"]
        scores = (q @ k.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return (scores.softmax(-1) @ v).squeeze(1)


class Aliased(Cached):
    """A list that holds the queries and the keys has two names."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        before = [] if past is None else [past]
        kept = [q, torch.cat([*before, k], 2), torch.cat([*before, v], 2)]
        parts = kept
        q, k, v = parts
        scores = (q @ k.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return (scores.softmax(-1) @ v).squeeze(1)


class Spread(Cached):
    """A table of several rows is added to one."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(TOKENS, WIDTH))

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        keys, values = k + self.places, v + self.places
        scores = (q @ keys.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return (scores.softmax(-1) @ values).squeeze(1)


class Listed(Cached):
    """A star makes a list, and its parts are put in anew."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, *rest = self.qkv(x).unsqueeze(1).chunk(3, -1)
        if past is not None:
            rest[0], rest[1] = torch.cat((past, rest[0]), 2), torch.cat((past, rest[1]), 2)
        k, v = rest
        scores = (q @ k.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return (scores.softmax(-1) @ v).squeeze(1)


class Rounds(Cached):
    """The queries are of a loop's first round, the keys of its last."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        left = [x] if past is None else [x, torch.cat((past[:, 0], x), 1)]
        turn = 0
        while turn < len(left):
            rows = self.qkv(left[turn])
            if turn == 0:
                q = rows[..., :WIDTH]
            k, v = rows[..., WIDTH : 2 * WIDTH], rows[..., 2 * WIDTH :]
            turn += 1
        scores = (q @ k.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return scores.softmax(-1) @ v


class FromTheFirst(Cached):
    """The queries stay those of a loop's first round, and are bound in each."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        left = [x] if past is None else [x, torch.cat((past[:, 0], x), 1)]
        for turn, part in enumerate(left):
            rows = self.qkv(part)
            if turn == 0:
                q = rows[..., :WIDTH]
            q = q * 1.0
            k, v = rows[..., WIDTH : 2 * WIDTH], rows[..., 2 * WIDTH :]
            scores = (q @ k.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
            y = scores.softmax(-1) @ v
        return y


class Weighed(Cached):
    """What the keys are multiplied with is a number, or of several rows."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        by = 1.0 if past is None else past
        keys, values = k * by, torch.mul(v, by)
        scores = (q @ keys.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return (scores.softmax(-1) @ values).squeeze(1)


class Multiplied(Cached):
    """A tensor of one number is the first factor of both."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        by = torch.full((), 0.35).to(x)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        before = [] if past is None else [past]
        keys, values = torch.cat([*before, k], 2), torch.cat([*before, v], 2)
        query, key = torch.mul(by, q), torch.mul(by, keys)
        scores = (query @ key.transpose(-2, -1)) + torch.full((t, t), float("-inf")).triu(1)
        return (scores.softmax(-1) @ values).squeeze(1)


class OtherForm(Cached):
    """The mask has the form of other products than the scores."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        if past is not None:
            k, v = torch.cat((past, k), 2), torch.cat((past, v), 2)
        hidden = torch.ones_like(q @ q.transpose(-2, -1)).triu(1).bool()
        scores = (q @ k.transpose(-2, -1)) * 0.35
        return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).squeeze(1)


class Capped(Cached):
    """Two numbers that are one in the beginning."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        scores = self.other * torch.tanh((q @ k.transpose(-2, -1)) / self.cap)
        return (scores.softmax(-1) @ v).squeeze(1)


def _patched(model: nn.Module) -> Patches:
    patches = Patches(gradscope.plan(model, torch.randn(2, TOKENS, WIDTH).double(), recipes=["attention"]))
    patches.apply()
    assert patches.kept, patches.table.reasons.tolist()
    return patches


KINDS = [
    *(Cached, Kept, Renamed, Sdpa, Tensors, Chosen, Put, Aliased, Spread, Listed, Rounds, FromTheFirst, Weighed),
    *(Multiplied, OtherForm),
]


@pytest.mark.parametrize("kind", KINDS)
def test_one_query_sees_all_that_is_cached(kind: type[Cached]) -> None:
    model = kind().double()
    original, x = copy.deepcopy(model), torch.randn(2, 1, WIDTH).double()
    patches = _patched(model)
    assert "is_causal=True" in patches.diff
    past = None if kind is Spread else torch.randn(2, 1, TOKENS, WIDTH).double()
    torch.testing.assert_close(model(x, past), original(x, past))


@pytest.mark.parametrize("kind", [Windowed, WindowedParts])
def test_one_query_of_many_sees_all_keys(kind: type[Windowed]) -> None:
    model = kind().double()
    original, x = copy.deepcopy(model), torch.randn(2, TOKENS, WIDTH).double()
    assert "is_causal=True" in _patched(model).diff
    model.window = original.window = 1
    torch.testing.assert_close(model(x), original(x))


def test_nothing_is_asked_where_keys_are_as_many_as_queries() -> None:
    class Plain(Cached):
        def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
            t = x.size(1)
            q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
            scores = (q @ k.transpose(-2, -1)) * 0.35
            scores = scores.masked_fill(torch.ones(t, t).tril() == 0, float("-inf"))
            return (scores.softmax(-1) @ v).squeeze(1)

    new = [line for line in _patched(Plain().double()).diff.splitlines() if line.startswith("+")]
    assert not any(" if " in line for line in new)


class Centred(nn.Module):
    """A function of the user's, of which it is not known how many rows it gives."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


class Normed(Cached):
    """The argument's name is bound anew before anything is made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Centred()

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        x = self.norm(x)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return (scores.softmax(-1) @ v).squeeze(1)


class Again(Cached):
    """Both names are bound anew to what keeps their rows."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, k, v = self.qkv(x).chunk(3, -1)
        q = q.contiguous()
        k = k.contiguous()
        scores = (q @ k.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return scores.softmax(-1) @ v


class Split(Cached):
    """Each gets its heads in a comprehension."""

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in (q, k, v))
        scores = (q @ k.transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        (Normed, "attention"),
        (Normed, "packed_attention"),
        (Again, "attention"),
        (Split, "packed_attention"),
    ],
)
def test_nothing_is_asked_where_both_are_of_one_tensor(kind: type[Cached], recipe: str) -> None:
    patches = Patches(gradscope.plan(kind().double(), torch.randn(2, TOKENS, WIDTH).double(), recipes=[recipe]))
    assert len(patches.kept) == 1, patches.table.reasons.tolist()
    assert not any(" if " in line for line in patches.diff.splitlines() if line.startswith("+"))


@pytest.mark.parametrize("name", ["cap", "other"])
def test_a_cap_of_two_names_is_one_number(name: str) -> None:
    model = Capped().double()
    original, x = copy.deepcopy(model), torch.randn(2, TOKENS, WIDTH).double() * 9
    _patched(model)
    for each in (model, original):
        setattr(each, name, 0.5)
    torch.testing.assert_close(model(x), original(x))


class InTheProduct(Kept):
    """The keys have no name: a call that is written inside the product gives them."""

    calls = 0

    def cached(self, k: Tensor, past: Tensor | None) -> Tensor:
        self.calls += 1
        return k.clone() if past is None else torch.cat((past, k), 2)

    def forward(self, x: Tensor, past: Tensor | None = None) -> Tensor:
        t = x.size(1)
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        scores = (q @ self.cached(k, past).transpose(-2, -1)) * 0.35 + torch.full((t, t), float("-inf")).triu(1)
        return (scores.softmax(-1) @ v).squeeze(1)


def test_what_gives_the_keys_is_called_once() -> None:
    model, x = InTheProduct().double(), torch.randn(2, TOKENS, WIDTH).double()
    patches = Patches(gradscope.plan(model, x, recipes=["attention"]))
    patches.apply()
    model.calls = 0
    model(x)
    assert model.calls == 1, patches.diff
