"""How the CPU path cuts attention into blocks, and the scores of one block.

A block is a few key heads of the batch, with the query heads that read them, times some queries, times some keys. Its
rows are [group, row]: group counts (batch, key head), a row (query head of the group, query). So grouped heads (GQA)
need no expanded k and v, and every product is one batched matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gradscope.kernels.attention.dropout import kept_bits, keys_of, threshold, zero_dropped
from gradscope.kernels.attention.options import AttentionOptions, accumulate_dtype

ROWS = 128  # of a block, over the query heads of a group
SHORT = 512  # up to so many queries a block has half the rows: a causal mask then hides more blocks
KEYS = 256
SCORES = 1 << 18  # of a block, over its groups, for each thread: a core's second-level cache


@dataclass(frozen=True, slots=True)
class Block:
    """The part of batch, key heads, queries and keys that is computed at once."""

    batch: slice
    heads: slice
    queries: slice
    keys: slice


class BlockWork:
    """One call's tensors as [batch, key head, query head of it, query, ...], and scratch memory for a block."""

    def __init__(
        self, q: Tensor, k: Tensor, bias: Tensor | None, options: AttentionOptions, seed: Tensor | None
    ) -> None:
        self.options = options
        self.dtype = accumulate_dtype(q.dtype)
        self.batch, self.kv_heads = k.shape[:2]
        self.repeats = q.shape[1] // max(1, self.kv_heads)
        self.queries, self.keys = q.shape[2], k.shape[2]
        self.bias = None if bias is None else grouped_bias(bias, self.kv_heads)
        self.slopes = None
        if options.alibi is not None:
            slopes = options.alibi.expand(self.batch, q.shape[1]).unflatten(1, (self.kv_heads, self.repeats))
            self.slopes = slopes[..., None, None].to(self.dtype)
        self.row_bits = self.key_bits = None
        if options.dropout_p > 0 and seed is not None:
            drawn, rows = int(seed), self.batch * q.shape[1] * self.queries
            bits = keys_of(drawn, 0, rows, q.device)
            self.row_bits = bits.view(self.batch, self.kv_heads, self.repeats, self.queries, 1)
            self.key_bits = keys_of(drawn, 1, self.keys, q.device)
        self._device = q.device
        self._scratch: dict[str, Tensor] = {}
        self._outside: dict[tuple[int, ...], Tensor] = {}
        rows = ROWS // 2 if options.is_causal and self.queries <= SHORT else ROWS
        self.query_step = max(1, min(self.queries, rows // max(1, self.repeats)))
        self.key_step = max(1, min(self.keys, KEYS))

    def groups(self) -> Iterator[tuple[slice, slice]]:
        """Slices of the batch and of the key heads: as many at once as keep a block small."""
        each = self.query_step * self.repeats * self.key_step
        room = max(1, SCORES * torch.get_num_threads() // each)
        heads = _even_part(self.kv_heads, room)
        samples = _even_part(self.batch, room // self.kv_heads) if heads == self.kv_heads else 1
        for b in range(0, self.batch, samples):
            for h in range(0, self.kv_heads, heads):
                yield slice(b, min(b + samples, self.batch)), slice(h, min(h + heads, self.kv_heads))

    def query_blocks(self, batch: slice, heads: slice) -> Iterator[Block]:
        """All queries of some groups."""
        for i in range(0, self.queries, self.query_step):
            yield Block(batch, heads, slice(i, min(i + self.query_step, self.queries)), slice(0, self.keys))

    def key_blocks(self, block: Block) -> Iterator[Block]:
        """The keys that any query of the block can see; none beyond the band is visited."""
        left, right = self.options.band()
        first = 0 if left is None else max(0, block.queries.start - left)
        last = self.keys if right is None else min(self.keys, block.queries.stop + right)
        for j in range(first // self.key_step * self.key_step, last, self.key_step):
            yield Block(block.batch, block.heads, block.queries, slice(max(j, first), min(j + self.key_step, last)))

    def shape(self, block: Block) -> tuple[int, int, int, int, int]:
        """[batch, key head, query head of it, query, key] of a block."""
        sides = (block.batch, block.heads, block.queries, block.keys)
        batch, heads, queries, keys = (side.stop - side.start for side in sides)
        return batch, heads, self.repeats, queries, keys

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Memory that is the same at each call: fresh pages cost as much as a pass over them."""
        count = 1
        for size in shape:
            count *= size
        held = self._scratch.get(name)
        if held is None or held.numel() < count:
            held = self._scratch[name] = torch.empty(count, dtype=dtype or self.dtype, device=self._device)
        return held[:count].view(shape)

    def scores(self, queries: Tensor, keys: Tensor, block: Block, tanh: Tensor | None = None) -> Tensor:
        """The scores of a block in scratch memory, after everything that options.py names.

        Args:
            queries: [group, row, size], scaled.
            keys: [group, key, size].
            tanh: where there is a soft-cap, overwritten by its tanh.

        Returns:
            [group, row, key]; gone at the next call.
        """
        shape = self.shape(block)
        rows = (queries.shape[0], queries.shape[1], shape[4])
        found = torch.bmm(queries, keys.transpose(1, 2), out=self.scratch("scores", rows))
        if self.options.softcap is not None:
            found.div_(self.options.softcap).tanh_()
            if tanh is not None:
                tanh.copy_(found)
            found.mul_(self.options.softcap)
        parts = found.view(shape)
        if self.bias is not None:
            part = bias_part(self.bias, block)
            if part.dtype == torch.bool:
                part = torch.zeros(part.shape, dtype=self.dtype, device=self._device).masked_fill_(~part, -torch.inf)
            parts.add_(part)
        if self.slopes is not None:
            parts.addcmul_(self.slopes[block.batch, block.heads], self._distances(block), value=-1)
        outside = self._outside_of_band(block)
        if outside is not None:
            parts.add_(outside)  # a masked_fill costs thirty times as much
        return found

    def drop(self, weights: Tensor, block: Block, name: str, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights of a block without what dropout drops, not rescaled; and the bits of what is kept.

        Args:
            weights: [group, row, key].
            name: scratch memory of the weights' size that is free.
            out: where to; None is in place.
        """
        assert self.row_bits is not None and self.key_bits is not None
        kept = self.scratch("kept", weights.shape, torch.int32)
        other = self.scratch(name, weights.shape).view(torch.int32).flatten()[: weights.numel()]
        rows = self.row_bits[block.batch, block.heads, :, block.queries]
        shape = self.shape(block)
        below = threshold(self.options.dropout_p)
        kept_bits(rows, self.key_bits[block.keys], below, kept.view(shape), other.view(shape))
        return zero_dropped(weights, kept, weights if out is None else out), kept

    def _distances(self, block: Block) -> Tensor:
        i = torch.arange(block.queries.start, block.queries.stop, dtype=self.dtype, device=self._device)
        j = torch.arange(block.keys.start, block.keys.stop, dtype=self.dtype, device=self._device)
        return (i[:, None] - j).abs_()

    def _outside_of_band(self, block: Block) -> Tensor | None:
        """-inf where a key is outside a query's band, else 0; None where none is."""
        left, right = self.options.band()
        i, j = block.queries, block.keys
        # Of the offsets key - query within the block, those beyond the band.
        above = None if right is None or j.stop - 1 <= i.start + right else i.start - j.start + right + 1
        below = None if left is None or j.start >= i.stop - 1 - left else i.start - j.start - left - 1
        if above is None and below is None:
            return None
        size = (i.stop - i.start, j.stop - j.start)
        name = (*size, size[1] if above is None else above, -size[0] if below is None else below)
        if name not in self._outside:
            full = torch.full(size, -torch.inf, dtype=self.dtype, device=self._device)
            if above is None:
                self._outside[name] = full.tril(name[3])
            else:
                self._outside[name] = full.triu(above) if below is None else full.triu(above).add_(full.tril(below))
        return self._outside[name]


def _even_part(count: int, room: int) -> int:
    """At most ``room`` of ``count`` at once, so that the last part is not a small one."""
    parts = -(-count // max(1, room))
    return -(-count // max(1, parts)) or 1


def heads_of(tensor: Tensor, batch: slice, heads: slice, dtype: torch.dtype) -> Tensor:
    """[group, position, size] of [batch, head, position, size]; a copy only where strides or dtype ask for one."""
    return tensor[batch, heads].to(dtype).flatten(0, 1)


def rows_of(tensor: Tensor, block: Block, dtype: torch.dtype) -> Tensor:
    """[group, row, ...] of [batch, key head, query head of it, query, ...]."""
    part = tensor[block.batch, block.heads, :, block.queries]
    return part.to(dtype).reshape(part.shape[0] * part.shape[1], part.shape[2] * part.shape[3], *part.shape[4:])


def grouped_bias(bias: Tensor, kv_heads: int) -> Tensor:
    """[batch, key head, query head of it, query, key]; a side of 1 broadcasts."""
    own = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    return own.unsqueeze(1) if own.shape[1] <= 1 else own.unflatten(1, (kv_heads, own.shape[1] // kv_heads))


def bias_part(bias: Tensor, block: Block) -> Tensor:
    """The part of the grouped bias that a block adds."""
    sides = (block.batch, block.heads, slice(None), block.queries, block.keys)
    return bias[tuple(slice(None) if size == 1 else side for size, side in zip(bias.shape, sides, strict=True))]
