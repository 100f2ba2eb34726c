"""A tile of scores, the columns and rows of a band, and what dropout keeps.

Scores of half precision are in units of log 2, for exp2 is one instruction of a GPU and exp is two. In float32 the
factor waits until the highest score or the logsumexp is subtracted, which loses nothing: rounding what is large twice
is seen with ALiBi. Where nothing is added to the products (``FORM.late``) so does their own factor: a product less the
highest product is exact near it. A compiler that joins a multiplication and the subtraction behind it, as it may, makes
weights that differ by the rounding of the highest score, and not everywhere where a weight is used. Tiles may lie
either way round: ``rows`` and ``columns`` are [M, 1] and [1, N], or [1, M] and [N, 1]. The tuples are those of
triton_arguments.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gradscope.kernels.attention import triton_arguments
from gradscope.kernels.logarithm.triton_kernels import log

LOG2E = tl.constexpr(triton_arguments.LOG2E)
LN2 = tl.constexpr(1 / triton_arguments.LOG2E)
NO_BIAS = tl.constexpr(triton_arguments.NO_BIAS)
ADDED = tl.constexpr(triton_arguments.ADDED)

# Philox 4x32 passes BigCrush from 7 rounds on (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
_ROUNDS = tl.constexpr(7)


@triton.jit
def tanh(x):
    # Through exp, for the interpreter has no other: of -|x|, so that it cannot overflow. Near 0 that cancels, so there
    # a series, whose next term is under 1e-8 of the first.
    e = tl.exp2(tl.abs(x) * -2.0 * LOG2E)
    far = (1.0 - e) / (1.0 + e)
    y = x * x
    near = x * (1.0 + y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * (62.0 / 2835.0)))))
    return tl.where(y < 0.0625, near, tl.where(x < 0, -far, far))


@triton.jit
def kept(seed, head, row_start, column_start, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """What dropout keeps of a tile, [BLOCK_M, BLOCK_N]: a function of seed, batch and head, row and column alone.

    Args:
        seed: pointer to one int64.
        head: batch * heads + head.
        threshold: the probability to drop, times 2^24.
    """
    # One draw gives the numbers of four neighbours in a row: a draw is some 70 instructions.
    row = (row_start + tl.arange(0, BLOCK_M))[:, None]
    four = (column_start // 4 + tl.arange(0, BLOCK_N // 4))[None, :]
    zero = row * 0 + four * 0
    a, b, c, d = tl.philox(tl.load(seed), zero + four, zero + row, zero + head.to(tl.int32), zero, _ROUNDS)
    numbers = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BLOCK_M, BLOCK_N])
    return (numbers >> 8).to(tl.int32) >= threshold


@triton.jit
def at_head(heads, b, h):
    """Pointer to one head of a tensor."""
    # In 64 bits: a tensor may have more than 2^31 elements.
    return heads.pointer + b.to(tl.int64) * heads.batch + h.to(tl.int64) * heads.head


@triton.jit
def positions(start, BLOCK: tl.constexpr, FORM: tl.constexpr):
    """``start`` and the next, [BLOCK]: in 64 bits where a product with a stride may need them.

    Elsewhere those would only take registers, twice as many for each address.
    """
    found = start + tl.arange(0, BLOCK)
    if FORM.wide:
        found = found.to(tl.int64)
    return found


@triton.jit
def offsets_of(heads, index, BLOCK: tl.constexpr):
    """Of rows from the pointer to their head, [rows, BLOCK]; as wide as ``index``."""
    column = tl.arange(0, BLOCK).to(index.dtype)
    return index[:, None] * heads.row + column[None, :] * heads.column


@triton.jit
def load_rows(pointer, heads, index, length, SIZE: tl.constexpr, BLOCK: tl.constexpr, CHECKED: tl.constexpr = True):
    """Rows of the head at ``pointer``, [rows, BLOCK]: zeros beyond SIZE, and beyond ``length`` where CHECKED."""
    column = tl.arange(0, BLOCK)
    at = pointer + offsets_of(heads, index, BLOCK)
    if CHECKED and SIZE != BLOCK:
        tile = tl.load(at, mask=(index[:, None] < length) & (column[None, :] < SIZE), other=0.0)
    elif CHECKED:
        tile = tl.load(at, mask=index[:, None] < length, other=0.0)
    elif SIZE != BLOCK:
        tile = tl.load(at, mask=column[None, :] < SIZE, other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def store_rows(pointer, heads, tile, index, length, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The counterpart of :func:`load_rows`."""
    column = tl.arange(0, BLOCK)
    at = pointer + offsets_of(heads, index, BLOCK)
    tl.store(at, tile.to(pointer.dtype.element_ty), mask=(index[:, None] < length) & (column[None, :] < SIZE))


@triton.jit
def add_rows(pointer, heads, tile, index, length, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """As :func:`store_rows`, but adds to what is there: atomically, in no order that is promised."""
    column = tl.arange(0, BLOCK)
    at = pointer + offsets_of(heads, index, BLOCK)
    # Relaxed: nobody reads the sum before the kernel has ended.
    tl.atomic_add(at, tile, mask=(index[:, None] < length) & (column[None, :] < SIZE), sem="relaxed")


@triton.jit
def slope_of(alibi, b, h, FORM: tl.constexpr):
    """ALiBi's slope in the units of the scores."""
    slope = 0.0
    if FORM.alibi:
        slope = in_units(tl.load(at_head(alibi, b, h)), FORM)
    return slope


@triton.jit
def scores(raw, rows, columns, b, h, bias, slope, terms, FORM: tl.constexpr, MASKED: tl.constexpr):
    """Scores of a tile, for the two functions of weights, and what the soft-cap multiplies their gradient by.

    Args:
        raw: the product, one side of it times ``terms.factor``.
        b, h: batch and query head.
        bias: as Heads.
        MASKED: whether the tile may reach over an end of the band or of the tensors.
    """
    bend = 1.0
    if FORM.softcap:
        t = tanh(raw * terms.unit / terms.cap)
        bend = 1.0 - t * t
        s = t if FORM.late else t * terms.cap
    else:
        s = raw if FORM.late else raw * terms.unit
    if FORM.bias != NO_BIAS:
        at = at_head(bias, b, h) + (rows * bias.row + columns * bias.column)
        found = tl.load(at, mask=(rows < terms.queries) & (columns < terms.keys), other=0)
        if FORM.bias == ADDED:
            s += in_units(found.to(tl.float32), FORM)
        else:
            s = tl.where(found != 0, s, -float("inf"))
    if FORM.alibi:
        s -= slope * tl.abs(rows - columns).to(tl.float32)
    if MASKED:
        inside = (columns < terms.keys) & (rows < terms.queries)
        if FORM.left:
            inside = inside & (columns >= rows - terms.left)
        if FORM.right:
            inside = inside & (columns <= rows + terms.right)
        s = tl.where(inside, s, -float("inf"))
    return s, bend


@triton.jit
def band(start, left, right, length, LEFT: tl.constexpr, RIGHT: tl.constexpr, OWN: tl.constexpr, OTHER: tl.constexpr):
    """Which columns are seen by the OWN rows from ``start`` on, in three parts for :func:`part_of`.

    Column j is seen by row i where i - left <= j <= i + right. Where left and right change places, so do rows and
    columns. The ends of the parts, but for the last, are multiples of OTHER; in the second part all see all.
    """
    first = 0
    full = 0
    rest = length // OTHER * OTHER
    end = length
    if LEFT:
        first = tl.maximum(start - left, 0) // OTHER * OTHER
        full = tl.cdiv(tl.maximum(start + OWN - 1 - left, 0), OTHER) * OTHER
    if RIGHT:
        rest = tl.minimum(rest, tl.maximum(start + right + 1, 0) // OTHER * OTHER)
        end = tl.minimum(end, start + OWN + right)
    return first, full, tl.maximum(full, rest), end


@triton.jit
def part_of(part: tl.constexpr, first, full, rest, end):
    """(low, high): 0 is the band's left edge, 1 what it leaves whole, 2 its right edge and the last columns."""
    low = first
    high = tl.minimum(full, end)
    if part == 1:
        low = full
        high = tl.minimum(rest, end)
    if part == 2:
        low = rest
        high = end
    return low, high


@triton.jit
def in_units(x, FORM: tl.constexpr):
    """A score in the units of the scores."""
    if FORM.base_2:
        x = x * LOG2E
    return x


@triton.jit
def weights_below(s, highest, terms, FORM: tl.constexpr):
    """exp of scores less what is at least as high: 1 at most, and 1 where they are alike."""
    x = s - highest
    if FORM.late:
        x = x * terms.rest_2
    elif not FORM.base_2:
        x = x * LOG2E
    return tl.exp2(x)


@triton.jit
def weights(s, lse, terms, FORM: tl.constexpr):
    """exp of scores less their :func:`load_logsumexp`."""
    if FORM.base_2:
        x = s * terms.rest_2 - lse if FORM.late else s - lse
    else:
        x = (s * terms.rest - lse if FORM.late else s - lse) * LOG2E
    return tl.exp2(x)


@triton.jit
def logsumexp_of(highest, total, terms, FORM: tl.constexpr):
    """Of a row whose weights below ``highest`` add up to ``total``, in natural units."""
    if FORM.late:
        return highest * terms.rest + log(total)
    if FORM.base_2:
        return highest * LN2 + log(total)
    return highest + log(total)


@triton.jit
def load_logsumexp(at, there, FORM: tl.constexpr):
    """In units of log 2 where scores of this dtype are, else in natural ones; 0 for a row that saw no key.

    Such a row has -inf everywhere: less anything finite that stays so, and its probabilities are 0.
    """
    found = tl.load(at, mask=there, other=0.0)
    return in_units(tl.where(found == -float("inf"), 0.0, found), FORM)


@triton.jit
def keep(seed, into, queries, keys, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Writes what dropout keeps, [batch * heads, queries, keys] bytes: for tests, and for people who ask."""
    head = tl.program_id(2)
    row_start = tl.program_id(0) * BLOCK_M
    column_start = tl.program_id(1) * BLOCK_N
    rows = (row_start + tl.arange(0, BLOCK_M))[:, None]
    columns = (column_start + tl.arange(0, BLOCK_N))[None, :]
    mask = kept(seed, head, row_start, column_start, threshold, BLOCK_M, BLOCK_N)
    at = into + head.to(tl.int64) * queries * keys + rows.to(tl.int64) * keys + columns
    tl.store(at, mask.to(tl.int8), mask=(rows < queries) & (columns < keys))
