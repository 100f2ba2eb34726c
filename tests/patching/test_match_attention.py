"""Attention in the corpus: found at its places, exact once patched, gone once reverted; look-alikes left alone."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import pytest
import torch
from torch import nn

import tests.patching.corpus as corpus
from gradscope.kernels import pays
from gradscope.patching.patches import Patches
from gradscope.patching.plan import plan
from gradscope.workload import Workload, scalar_loss
from tests.patching.corpus import attention_base, attention_caps
from tests.patching.corpus.entry import Entry
from tests.patching.exactness import TOLERANCE, call, difference

_FOUND = ("attention_", "transformers_")
_LIKE = ("lookalikes_attention", "lookalikes_source")


def _entries(prefixes: tuple[str, ...]) -> list[Entry]:
    names = sorted(module.name for module in pkgutil.iter_modules(corpus.__path__) if module.name.startswith(prefixes))
    return [
        entry
        for name in names
        for entry in getattr(importlib.import_module(f"{corpus.__name__}.{name}"), "ENTRIES", [])
    ]


def _built(entry: Entry, *, train: bool) -> tuple[nn.Module, Any]:
    """The model without dropout: what is drawn for it differs."""
    torch.manual_seed(0)
    model, batch = entry.build()
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)
    return model.train(train), batch


@pytest.fixture(autouse=True)
def _torchs_random_numbers(own_code_at_every_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What always drops can be compared where torch draws: own code draws other numbers from the same seed."""
    monkeypatch.setitem(pays.FEWEST, "attention with dropout", {"scores": (pays.NEVER, pays.NEVER)})


def _results(model: nn.Module, batch: Any, entry: Entry) -> dict[str, Any]:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    output = call(model, batch)
    loss = scalar_loss(output, batch, entry.loss)
    value = loss[0] if isinstance(loss, tuple) else loss
    value.backward()
    grads = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    given = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, tuple) else (batch,)
    for index, each in enumerate(given):
        if isinstance(each, torch.Tensor) and each.grad is not None:
            grads[f"input {index}"], each.grad = each.grad.clone(), None
    first = output[0] if isinstance(output, (tuple, list)) else output
    return {"loss": value.detach(), "output": first.detach().clone(), **grads}


def _check_exact(model: nn.Module, batch: Any, entry: Entry, patches: Patches) -> None:
    held = [(module, dict(vars(module))) for module in model.modules()]
    state = {name: each.clone() for name, each in model.state_dict().items()}

    def again() -> None:
        model.load_state_dict(state)
        for module, before in held:
            for name, value in before.items():
                if isinstance(value, (int, float)):
                    setattr(module, name, value)

    old = _results(model, batch, entry)
    again()
    patches.apply()
    new = _results(model, batch, entry)
    patches.revert()
    assert difference(old, new) <= TOLERANCE
    assert all(vars(module).get("forward") is before.get("forward") for module, before in held)
    again()
    assert all(torch.equal(each, old[name]) for name, each in _results(model, batch, entry).items())


def _planned(entry: Entry, *, train: bool) -> tuple[nn.Module, Any, Patches]:
    model, batch = _built(entry, train=train)
    return model, batch, Patches(plan(Workload(model, batch, loss=entry.loss), recipes=["attention"], device="cpu"))


@pytest.mark.parametrize("entry", _entries(_FOUND), ids=lambda entry: entry.name)
def test_found_at_its_places_and_exact(entry: Entry):
    model, batch, patches = _planned(entry, train=entry.train)
    found = {site.path for site in patches.kept}
    wanted = {path for path, recipe in entry.sites if recipe == "attention"}
    packed = {path for path, recipe in entry.sites if recipe == "packed_attention"}
    assert wanted <= found <= wanted | packed, [site.reasons for site in patches.sites]
    if entry.refused:
        assert any(entry.refused in reason for site in patches.sites for reason in site.reasons)
    if found:
        _check_exact(model, batch, entry, patches)


@pytest.mark.parametrize("entry", _entries(("attention_",)), ids=lambda entry: entry.name)
def test_found_in_evaluation_too(entry: Entry):
    model, batch, patches = _planned(entry, train=False)
    found = {site.path for site in patches.kept}
    assert {path for path, recipe in entry.sites if recipe == "attention"} <= found
    if found:
        _check_exact(model, batch, entry, patches)


@pytest.mark.parametrize("entry", _entries(_LIKE), ids=lambda entry: entry.name)
def test_what_looks_like_it_is_left_alone_or_exact(entry: Entry):
    model, batch, patches = _planned(entry, train=entry.train)
    found = {site.path for site in patches.kept}
    assert found <= {path for path, recipe in entry.sites if recipe == "attention"} or "decorated" in entry.name
    if found:
        _check_exact(model, batch, entry, patches)


def _added(name: str) -> list[str]:
    (entry,) = (entry for entry in _entries(_FOUND) if entry.name == name)
    lines = _planned(entry, train=True)[2].diff.splitlines()
    return [line for line in lines if line.startswith(("+", "-")) and not line.startswith(("+++", "---"))]


def test_the_text_for_a_buffer():
    assert _added("masked_fill of a bool triu buffer") == [
        "+from gradscope.recipes import attention, attention_mask as gradscope_attention_mask",
        "-        att = (q @ k.transpose(-2, -1)) / math.sqrt(self.head_dim)",
        '-        att = att.masked_fill(self.causal_mask[:T, :T], float("-inf"))',
        "-        y = F.softmax(att, dim=-1) @ v",
        "+        y = attention(",
        "+            q,",
        "+            k,",
        "+            v,",
        "+            scale=1.0 / math.sqrt(self.head_dim),",
        '+            **gradscope_attention_mask(self.causal_mask[:T, :T], hides="nonzero"),',
        "+        )",
    ]


def test_the_text_for_heads_in_the_batch():
    folded = "(0, (batch_size, self.num_heads))"
    before = f'{{"mask": alibi.unflatten{folded}, "hides": "added"}}'
    settings = f'hides="nonzero", finite=True, after={before}, query=query_layer.unflatten{folded}'
    added = _added("bloom")
    assert "+        if isinstance(self.beta, float) and self.beta == 1.0:" in added
    begin = added.index("+            context_layer = gradscope_attention(")
    assert added[begin : begin + 7] == [
        "+            context_layer = gradscope_attention(",
        f"+                key=key_layer.transpose(-2, -1).unflatten{folded},",
        f"+                value=value_layer.unflatten{folded},",
        "+                dropout_p=self.attention_dropout.p if self.attention_dropout.training else 0.0,",
        "+                scale=self.inv_norm_factor,",
        f"+                **gradscope_attention_mask(attention_mask, {settings}),",
        "+            ).flatten(0, 1)",
    ]


def test_the_text_for_two_masks():
    before = '{"mask": self.bias[:, :, :T, :T], "hides": "zero"}'
    assert _added("causal and padding masks")[-7:] == [
        "+        y = attention(",
        "+            q,",
        "+            k,",
        "+            v,",
        "+            scale=1.0 / math.sqrt(k.size(-1)),",
        "+            **gradscope_attention_mask("
        f'key_padding_mask[:, None, None, :], hides="nonzero", after={before}),',
        "+        )",
    ]


class PackedCap(attention_base.Packed):
    """A soft-cap behind one projection."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.c_attn(x).view(batch, length, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
        weights = (5.0 * torch.tanh(q @ k.mT * 0.25 / 5.0)).softmax(-1)
        return torch.as_tensor((weights @ v).transpose(1, 2).reshape(batch, length, -1))


@pytest.mark.parametrize("model", [attention_caps.OneLine, PackedCap])
def test_few_capped_scores_are_left_to_the_code_that_stands_there(
    model: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = attention_base.BATCH * attention_base.HEADS * attention_base.TOKENS**2
    for fewest, idle in ((scores, ""), (scores + 1, "fewer than 2,401 scores: torch's own is faster")):
        monkeypatch.setitem(pays.FEWEST, "attention with a soft-cap", {"scores": (fewest, fewest)})
        found = plan(Workload(model(), attention_base.tokens()), recipes=["packed_attention", "attention"])
        assert [(site.supported, site.idle) for site in found.sites] == [(True, idle)]
