"""What benchmarks/estimates.py compares a promise with where the good one of a pair of tests/diagnose is not the cure.

A twin need not be: it is another model that the rule must be silent on, a smaller one for instance. Here each is the
bad model with the finding's advice followed, and nothing else changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from gradscope import recipes
from tests.diagnose import twins_loops as loops
from tests.diagnose import twins_memory as memory
from tests.diagnose import twins_recipes as given
from tests.diagnose import twins_timing as timing

Made = dict[str, Any]


class RmsByRecipe(given.Unit):
    def forward(self, x: Tensor) -> Tensor:
        return recipes.rms_norm(self.layer(x), self.weight.shape, self.weight, 1e-6)


class LayerNormByRecipe(given.Unit):
    def forward(self, x: Tensor) -> Tensor:
        return recipes.layer_norm(self.layer(x), self.weight.shape, self.weight, self.bias, exact=True)


class GeluByRecipe(given.Unit):
    def forward(self, x: Tensor) -> Tensor:
        return recipes.gelu(self.layer(x), approximate="tanh")


class CausalByRecipe(given.Attention):
    def forward(self, x: Tensor) -> Tensor:
        y = recipes.attention(*self.qkv(x), dropout_p=self.dropout, is_causal=True)
        return y.transpose(1, 2).flatten(2)


class LearntBiasByRecipe(given.LearntBias):
    def forward(self, x: Tensor) -> Tensor:
        return recipes.attention(*self.qkv(x), attn_mask=self.bias).transpose(1, 2).flatten(2)


class AccuracyByRecipe(given.LanguageWithAccuracy):
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.hidden(tokens)).flatten(0, 1)
        return recipes.cross_entropy(logits, tokens.flatten()), logits.argmax(1)


class TiedByRecipe(given.Language):
    """The table by the recipe, the head and the loss as they were."""

    def __init__(self, words: int) -> None:
        super().__init__(words, tied=True)

    def hidden(self, tokens: Tensor) -> Tensor:
        return torch.tanh(self.layer(recipes.embedding(tokens, self.embedding.weight)))


def _run(make: Callable[[], nn.Module], *shape: int) -> Callable[[], Made]:
    return lambda: {"model": make(), "batch": torch.randn(*shape)}


def _words(make: Callable[[], nn.Module], words: int) -> Callable[[], Made]:
    return lambda: {"model": make(), "batch": torch.randint(words, (8, 128))}


def _frozen() -> Made:
    model = timing.Two(both=True)
    model.old.requires_grad_(False)
    held = [each for each in model.parameters() if each.requires_grad]
    return {"model": model, "batch": torch.randn(512, 64), "optimizer": torch.optim.SGD(held, lr=0.1)}


def _selective() -> nn.Module:
    keep = [torch.ops.aten.addmm.default]
    return memory.Checkpointed(True, context_fn=functools.partial(create_selective_checkpoint_contexts, keep))


def _workers() -> Made:
    loader = DataLoader(loops.Samples(0.005), batch_size=4, num_workers=2, multiprocessing_context="fork")
    return loops.Training(iter(loader)).given(memory=False, steps=3, warmup=3)


# Name of a pair -> the cure.
CURES: dict[str, Callable[[], Made]] = {
    "a slow dataset without workers": _workers,
    "checkpointed blocks": _run(_selective, 8, 128, 4 * memory.WIDTH),
    "attention by hand": _run(CausalByRecipe, 2, 512, 64),
    "two layers of attention by hand": _run(lambda: nn.Sequential(CausalByRecipe(), CausalByRecipe()), 1, 512, 64),
    "causal mask as a tensor": _run(CausalByRecipe, 1, 1024, 64),
    "causal mask beside a window": _run(CausalByRecipe, 2, 768, 64),
    "dropout in torch's attention on a CPU": _run(lambda: CausalByRecipe(dropout=0.1), 2, 512, 64),
    "dropout of many scores and of few": _run(lambda: CausalByRecipe(dropout=0.2), 2, 512, 64),
    "learnt bias in torch's attention": _run(lambda: LearntBiasByRecipe(512), 8, 512, 64),
    "logits of a large vocabulary": _words(lambda: given.LanguageByRecipe(20_000), 20_000),
    "logits that are read too": _words(lambda: AccuracyByRecipe(20_000), 20_000),
    "RMS norm by hand": _run(RmsByRecipe, 4096, 16),
    "torch's RMS norm on a CPU": _run(RmsByRecipe, 4096, 16),
    "layer norm by hand": _run(LayerNormByRecipe, 4096, 16),
    "GELU by hand": _run(GeluByRecipe, 4096, 16),
    "tied embedding": _words(lambda: TiedByRecipe(30_000), 30_000),
    "tied embedding of many words": _words(lambda: TiedByRecipe(25_024), 25_024),
    "head that is not trained": _frozen,
}
