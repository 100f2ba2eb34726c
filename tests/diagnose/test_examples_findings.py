"""The examples: each problem that was planted is found, is told of in the docstring, and nothing else is of weight."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from gradscope.pipeline import profile_script, profile_workload
from gradscope.tables import Finding, Options, RunData
from gradscope.workload import Script, Workload, load_target

FOLDER = Path(__file__).parents[2] / "examples"

OPTIMIZER = "an optimizer takes a good part of so small a step, and its loop over the parameters is no mistake"
# Found on any of them, by what else the process has in its heap.
ANYWHERE = {"page-faults": "measured of the system; small tensors of a small process stay in its heap"}
LOOP = "a loop over the steps of a sequence is the point of the example, and is of many small calls"


@dataclass(frozen=True)
class Planted:
    """A problem of an example.

    Args:
        rule: that finds it.
        text: of the source line that the finding names; "" where any will do.
        told: words of the example's docstring.
        evidence: words of the finding's.
    """

    rule: str
    text: str
    told: str
    evidence: str = ""


@dataclass(frozen=True)
class Example:
    """A target, and what is to be found in it.

    Args:
        also: rules that may find something of weight too -> why that is right.
        args: of a script.
        made: another workload of the loaded one's module.
    """

    target: str
    planted: tuple[Planted, ...] = ()
    also: dict[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    made: Callable[[Workload], Workload] | None = None

    @property
    def file(self) -> str:
        return self.target.partition(":")[0]


def _large_vocabulary(loaded: Workload) -> Workload:
    """What ``gpt.py:full`` has beside the smaller size, in a size for a test."""
    gpt = sys.modules[type(loaded.model).__module__]
    sizes = gpt.Config(vocab_size=50257, n_layer=1, n_head=2, n_embd=64, block_size=128, batch_size=8)
    model, batch = gpt.make(sizes)
    return replace(loaded, model=model, batch=batch)


_SCORES = Planted("attention-by-hand", "F.softmax(scores, dim=-1)", "unfused attention in both")
EXAMPLES = {
    "attention.py": Example(
        "attention.py",
        (
            _SCORES,
            Planted(
                "attention-by-hand",
                "F.softmax(scores, dim=-1)",
                "Backward of each of the three slices fills a whole qkv of zeros",
                evidence="one tensor is indexed 3 times on 3 lines",
            ),
        ),
    ),
    "attention.py:non_copying": Example("attention.py:non_copying", (_SCORES,)),
    "checkpoint.py": Example(
        "checkpoint.py", (Planted("checkpoint-share", "", "``recompute`` row is the price of it"),)
    ),
    "checkpoint.py:reentrant": Example(
        "checkpoint.py:reentrant",
        (Planted("checkpoint-share", "checkpoint(block, x,", "a nested backward runs it all"),),
    ),
    "checkpoint.py:plain": Example("checkpoint.py:plain"),
    "convnet.py": Example("convnet.py", also={"optimizer-unfused": OPTIMIZER}),
    "gpt.py": Example(
        "gpt.py",
        (Planted("attention-by-hand", "weights = F.softmax(scores, dim=-1)", "between the scores and the product"),),
    ),
    "gpt.py, large vocabulary": Example(
        "gpt.py",
        (
            Planted("logits-materialised", "logits = self.lm_head(", "the head's gradient over the vocabulary"),
            Planted("vocabulary-multiple", "logits = self.lm_head(", "over the vocabulary, no multiple of 64"),
            Planted("tied-embedding", 'self.transformer["wte"](idx)', "the embedding tied to it"),
            Planted("attention-by-hand", "weights = F.softmax(scores, dim=-1)", "attention written by hand"),
        ),
        made=_large_vocabulary,
    ),
    "names.py": Example(
        "names.py",
        (Planted("attention-by-hand", "F.softmax(att, dim=-1) @ v", "Attention is written out"),),
        also={"optimizer-unfused": OPTIMIZER},
        args=("--steps", "40", "--batch-size", "32"),
    ),
    "recurrent.py": Example(
        "recurrent.py",
        (Planted("slices-zero-filled", "self.cell(x[:, step], state)", "fills a whole x of zeros"),),
        also={"tiny-layers": LOOP},
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for a busy machine would make any layer look slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def forget_imports() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == FOLDER:
            del sys.modules[name]


def profiled(example: Example) -> RunData:
    """Two steps of it, as ``gradscope profile`` would measure them."""
    loaded = load_target(str(FOLDER / example.target), example.args, device="cpu", seed=0)
    options = Options(steps=2, warmup=1)
    if isinstance(loaded, Script):
        outcome = profile_script(loaded, options)
    else:
        outcome = profile_workload(example.made(loaded) if example.made is not None else loaded, options)
    assert outcome.error is None and outcome.report is not None, outcome.error
    return outcome.report.data


def text_at(run: RunData, finding: Finding) -> str:
    return next((row.text for row in run.lines if f"{row.file}:{row.line}" == finding.line), "")


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_planted_is_found_and_nothing_else_of_weight(name: str) -> None:
    example = EXAMPLES[name]
    run = profiled(example)
    assert not [note for note in run.notes if "rule" in note]
    for planted in example.planted:
        found = [each for each in run.findings if each.rule == planted.rule]
        assert len(found) == 1, f"{planted.rule}: {found}"
        assert planted.text in text_at(run, found[0]), found[0].line
        assert planted.evidence in found[0].evidence
    expected = {each.rule for each in example.planted} | set(example.also) | set(ANYWHERE)
    others = [each for each in run.findings if each.severity != "info" and each.rule not in expected]
    assert not others, others


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstring_tells_what_is_planted(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((FOLDER / EXAMPLES[name].file).read_text())) or ""
    words = " ".join(docstring.split())
    for planted in EXAMPLES[name].planted:
        assert planted.told in words, planted.rule
    if not EXAMPLES[name].planted and ":" not in EXAMPLES[name].target:
        assert "Nothing is planted here" in words


def test_every_example_is_looked_at() -> None:
    assert {example.file for example in EXAMPLES.values()} == {path.name for path in FOLDER.glob("*.py")}
