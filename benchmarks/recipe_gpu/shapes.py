"""The shapes that recipes are measured at."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    """What the ops of one training step are given."""

    name: str
    batch: int
    tokens: int  # of a sample
    width: int
    heads: int
    kv_heads: int
    hidden: int  # features between the two products of the feed-forward block
    vocabulary: int

    @property
    def rows(self) -> int:
        return self.batch * self.tokens

    @property
    def size(self) -> int:
        """The size of a head."""
        return self.width // self.heads

    @property
    def packed(self) -> int:
        """Features of one projection to queries, keys and values."""
        return (self.heads + 2 * self.kv_heads) * self.size


GPT_2 = Model("GPT-2", 8, 1024, 768, 12, 12, 3072, 50257)
LLAMA = Model("Llama-8B", 1, 4096, 4096, 32, 8, 14336, 128256)
MODELS = (GPT_2, LLAMA)
