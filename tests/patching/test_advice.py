"""What a user can do where nothing is replaced: each reason has its answer, and the answer holds."""

from __future__ import annotations

import ast
import importlib
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradscope
import gradscope.patching
from gradscope.patching.advice import answer_of, what_to_do
from gradscope.patching.prove import choice

FILES = sorted(Path(gradscope.patching.__file__).parent.rglob("*.py"))


def template(node: ast.AST) -> str:
    """A text with ``x`` in each place that is filled later."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def texts_of(tree: ast.AST) -> list[str]:
    """Every reason that a file gives: what it refuses with, appends to reasons, or returns and lists as one."""
    found = []
    for node in ast.walk(tree):
        named = isinstance(node, ast.Call) and (node.func.attr if isinstance(node.func, ast.Attribute) else "")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Refusal":
            found += map(template, node.args)
        elif isinstance(node, ast.Call) and named == "_refuse":
            found += map(template, node.args[1:2])
        elif isinstance(node, ast.Call) and named == "append":
            found += [text for text in map(template, node.args) if len(text.split()) > 3]
        elif isinstance(node, ast.List):
            found += [text for text in map(template, node.elts) if len(text.split()) > 3]
        elif isinstance(node, ast.Return) and node.value is not None:
            found += [text for text in [template(node.value)] if len(text.split()) > 4]
    return [text for text in found if text]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}.{file.stem}")
def test_every_reason_has_an_answer(file: Path) -> None:
    if file.stem in {"switch", "advice"}:
        return
    missing = [text for text in texts_of(ast.parse(file.read_text())) if answer_of(text) is None]
    assert not missing


@pytest.mark.parametrize("reason", [choice.SLOWER, choice.HUNGRIER, choice.NO_GAIN, choice.NOT_TOGETHER])
def test_what_the_whole_step_says_has_an_answer(reason: str) -> None:
    assert answer_of(reason) is not None


def test_the_reasons_are_found() -> None:
    assert sum(len(texts_of(ast.parse(file.read_text()))) for file in FILES) > 120


@pytest.mark.parametrize(
    ("reason", "begins"),
    [
        ("score is returned on line 43", "do not return or store that value"),
        ("line 7: the value of self.k may change between calls", "write the number as a literal"),
        ("line 7 also calls print", "move that call before or after"),
        ("a mask is added before the scores are scaled; the softmax is computed in float64", "scale the scores first"),
        ("with fewer than 3,000,000 logits, computing them at once is faster on the CPU", ""),
        ("x is returned on line 2; load the model with attn_implementation='sdpa'", ""),
        ("words that nobody wrote", ""),
    ],
)
def test_the_answer_is_that_to_the_first_reason(reason: str, begins: str) -> None:
    assert what_to_do(reason).startswith(begins) and bool(what_to_do(reason)) is bool(begins)


# ----------------------------------------------------------------------------------------------------------------------
# A library with a switch
# ----------------------------------------------------------------------------------------------------------------------

LIBRARY = """
import types

import torch
from torch import nn


def eager_attention_forward(module, query, key, value, scaling, softcap=None):
    scores = query @ key.transpose(-2, -1) * scaling
    weights = scores.softmax(-1)
    return weights @ value, scores


def sdpa(module, query, key, value, scaling, softcap=None):
    return nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling), None


ALL_ATTENTION_FUNCTIONS = {"eager": eager_attention_forward, "sdpa": sdpa}


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.qkv, self.config = nn.Linear(8, 24), config

    def forward(self, x):
        attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        y, self.held = attend(self, q, k, v, 0.5, softcap=self.config.softcap)
        return y.squeeze(1)


class Fixed(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        y, self.held = eager_attention_forward(self, q, k, v, 0.5, softcap=self.config.softcap)
        return y.squeeze(1)


class Named(Attention):
    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        attend = sdpa if self.config._attn_implementation == "sdpa" else eager_attention_forward
        y, self.held = attend(self, q, k, v, 0.5)
        return y.squeeze(1)


class PreTrainedModel(nn.Module):
    _supports_sdpa = False

    def __init__(self, config, kind=Attention):
        super().__init__()
        self.config, self.attention = config, kind(config)

    def forward(self, x):
        return self.attention(x)


class Able(PreTrainedModel):
    _supports_sdpa = True


class Unable(PreTrainedModel):
    pass


class AbleHead(Able):
    def __init__(self, config):
        super().__init__(config)
        self.attention = Unable(config)


def config(**given):
    usual = {"_attn_implementation": "eager", "softcap": None, "output_attentions": False}
    return types.SimpleNamespace(**usual | given)
"""
SWITCH = "load the model with attn_implementation='sdpa'"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package of that name whose code stands for the library's."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    folder = tmp_path / "transformers"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "modeling.py").write_text(textwrap.dedent(LIBRARY))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("transformers.modeling")
    for name in ("transformers", "transformers.modeling"):
        sys.modules.pop(name, None)


def reason_for(model: nn.Module) -> str:
    """Without the first part, why it is left alone, of all recipes for it."""
    sites = gradscope.plan(model, torch.randn(2, 5, 8), recipes=["packed_attention", "attention"]).sites
    assert not any(site.supported for site in sites)
    (reason,) = {"; ".join(site.reasons).partition("; ")[2] for site in sites}
    return f"; {reason}"


def test_the_switch_is_named_where_the_class_has_it_and_works_there(library: Any) -> None:
    config = library.config()
    model = library.Able(config)
    assert reason_for(model).endswith(f"; {SWITCH}")
    x = torch.randn(2, 5, 8)
    before = model(x)
    config._attn_implementation = "sdpa"
    torch.testing.assert_close(model(x), before)
    assert reason_for(library.Able(library.config(), library.Named)).endswith(f"; {SWITCH}")


def test_weights_that_are_asked_for_are_given_up_first(library: Any) -> None:
    reason = reason_for(library.Able(library.config(output_attentions=True)))
    assert reason.endswith(f"; set output_attentions=False and {SWITCH}")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda given: given.Unable(given.config()),
            "this version of transformers has no other attention for Unable",
        ),
        (
            lambda given: given.AbleHead(given.config()),
            "this version of transformers has no other attention for Unable",
        ),
        (
            lambda given: given.Able(given.config(), given.Fixed),
            "this version of transformers has no other attention for Fixed",
        ),
        (
            lambda given: given.Able(given.config(softcap=30.0)),
            "it soft-caps the scores, which torch's scaled_dot_product_attention cannot do",
        ),
        (
            lambda given: given.Attention(given.config()),
            "it is not part of a PreTrainedModel, which could be switched to another attention",
        ),
    ],
)
def test_no_switch_is_named_where_there_is_none(library: Any, make: Any, why: str) -> None:
    reason = reason_for(make(library))
    assert reason.endswith(f"; nothing to do: {why}") and "attn_implementation" not in reason


@pytest.mark.parametrize("taken", ["sdpa", "flex_attention"])
def test_a_module_that_does_not_follow_the_switch(library: Any, taken: str) -> None:
    library.ALL_ATTENTION_FUNCTIONS[taken] = library.eager_attention_forward
    reason = reason_for(library.Able(library.config(_attn_implementation=taken)))
    assert reason.endswith("; nothing to do: Attention uses this attention with every implementation")
