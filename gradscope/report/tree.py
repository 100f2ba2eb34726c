"""Which nodes of the layer tree are shown, in which order, and what became of the others.

Whatever is not shown is counted in a :class:`HiddenRow`, so that own amounts of shown and hidden rows add up to the
whole. The choice is the reader's (:class:`ViewOptions`); the numbers are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from gradscope import units
from gradscope.errors import UsageError
from gradscope.report.fold import FoldedNode
from gradscope.report.layer_cost import Amounts, add_up

Sort = Literal["backward", "forward", "ratio", "memory"]
SAVED_MEMORY = "saved memory"

# What --show can ask for, in the order of reading.
SECTIONS = (
    *("findings", "layers", "lines", "ops", "kernels", "ledger", "device", "buckets"),
    *("memory", "saved", "retained", "held", "copies"),
)
# What fits a screen.
SHORT_LAYERS, SHORT_LINES, FULL_LINES = 12, 8, 10
LEAST_PERCENT = 1.0


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """What the reader wants to see.

    ``full``: every section, findings in full. ``show``: these sections too, each in full: see :data:`SECTIONS`.
    ``depth``: levels of the tree below the root; ``None`` is all. ``sort``: the order among siblings, and what a
    share is a share of. ``top``: only the so many layers that cost most by themselves, with the layers above them, and
    as many rows in each table of memory. ``min_percent``: what is below this share is counted, not shown. ``lines``:
    source lines to show; by default :data:`SHORT_LINES`, in full :data:`FULL_LINES`.

    Raises :class:`UsageError` for values without a meaning.
    """

    depth: int | None = None
    sort: Sort = "backward"
    top: int | None = None
    min_percent: float = LEAST_PERCENT
    lines: int | None = None
    full: bool = False
    show: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if unknown := [name for name in self.show if name not in SECTIONS]:
            raise UsageError(f"no section {unknown[0]!r} to show; there are {', '.join(SECTIONS)}.")
        if self.sort not in get_args(Sort):
            raise UsageError(f"sort must be one of {', '.join(get_args(Sort))}; got {self.sort!r}.")
        if self.depth is not None and self.depth < 0:
            raise UsageError(f"depth must be 0 or more; got {self.depth}.")
        if self.top is not None and self.top < 1:
            raise UsageError(f"top must be 1 or more; got {self.top}.")
        if not 0 <= self.min_percent <= 100:
            raise UsageError(f"min_percent must be between 0 and 100; got {self.min_percent:g}.")
        if self.lines is not None and self.lines < 0:
            raise UsageError(f"lines must be 0 or more; got {self.lines}.")

    def whole(self, section: str) -> bool:
        """Check that a section is shown in full."""
        return self.full or section in self.show

    @property
    def most_lines(self) -> int:
        """Source lines to show."""
        if self.lines is not None:
            return self.lines
        return FULL_LINES if self.whole("lines") else SHORT_LINES

    @property
    def most_rows(self) -> int | None:
        """Layers to show; None: as many as the other options leave."""
        chosen = self.depth is not None or self.top is not None or self.min_percent != LEAST_PERCENT
        return None if chosen or self.whole("layers") else SHORT_LAYERS


@dataclass(frozen=True, slots=True)
class TreeRow:
    """One shown layer, or one shown set of repeats."""

    node: FoldedNode
    guides: tuple[bool, ...]  # for each level from the first below the roots: is this the last child there?
    share: float  # total over the whole of the metric, 0..1
    own_share: float
    outlier: str  # a sentence on the one repeat that differs, "" without one

    @property
    def level(self) -> int:
        """0 for a root."""
        return len(self.guides)


@dataclass(frozen=True, slots=True)
class HiddenRow:
    """Layers that are counted but not shown, and why."""

    reason: str  # "under 1 %"
    own: Amounts  # sum of their own amounts; ``layers`` says how many there are
    share: float

    @property
    def text(self) -> str:
        """``… 14 layers under 1 %``."""
        many = self.own.layers
        return f"… {units.count(many)} {'layer' if many == 1 else 'layers'} {self.reason}"


@dataclass(frozen=True, slots=True)
class Tree:
    """The rows to show, what they leave out, and what no layer accounts for."""

    rows: tuple[TreeRow, ...]
    hidden: tuple[HiddenRow, ...]
    rest: int  # of the metric: outside the layers
    rest_share: float
    whole: int  # of the metric: ns or bytes
    metric: str  # "backward", "forward" or SAVED_MEMORY: what shares are shares of


def select(
    roots: Sequence[FoldedNode], options: ViewOptions, backward_ns: int, forward_ns: int, saved_bytes: int | None = None
) -> Tree:
    """The tree as the reader asked for it.

    ``backward_ns``, ``forward_ns`` and ``saved_bytes`` are the wholes that shares are shares of; without
    ``saved_bytes`` it is what the layers save.
    """
    metric, value = _metric(options.sort)
    layers = sum(value(root.total) for root in roots)
    saved = layers if saved_bytes is None else saved_bytes
    whole = {"backward": backward_ns, "forward": forward_ns}.get(metric, saved)
    shares = _Shares(value, whole)
    reasons = _hide(roots, options, shares)
    rows = tuple(_shown(roots, options.sort, reasons, shares, ()))
    return Tree(
        rows=_with_outliers(rows),
        hidden=_hidden_rows(roots, reasons, shares),
        rest=whole - layers,
        rest_share=(whole - layers) / whole if whole else 0.0,
        whole=whole,
        metric=metric,
    )


@dataclass(frozen=True, slots=True)
class _Shares:
    value: Callable[[Amounts], int]
    whole: int

    def of(self, amounts: Amounts) -> float:
        return self.value(amounts) / self.whole if self.whole else 0.0


def _metric(sort: Sort) -> tuple[str, Callable[[Amounts], int]]:
    if sort == "forward":
        return "forward", lambda amounts: amounts.forward_ns
    if sort == "memory":
        return SAVED_MEMORY, lambda amounts: amounts.saved_bytes or 0
    return "backward", lambda amounts: amounts.backward_ns


def _rank(sort: Sort) -> Callable[[Amounts], float]:
    """The costliest first."""
    value = _metric(sort)[1]
    return lambda amounts: -(amounts.ratio or 0.0) if sort == "ratio" else -value(amounts)


def _hide(roots: Sequence[FoldedNode], options: ViewOptions, shares: _Shares) -> dict[int, str]:
    """The reason why a node is not shown, by ``id(node)``."""
    reasons: dict[int, str] = {}
    candidates: list[tuple[FoldedNode, tuple[FoldedNode, ...]]] = []

    def visit(node: FoldedNode, above: tuple[FoldedNode, ...]) -> None:
        if options.depth is not None and len(above) > options.depth:
            reason = f"deeper than level {options.depth}"
        elif above and shares.of(node.total) * 100 < options.min_percent:
            reason = f"under {units.threshold(options.min_percent)}"
        else:
            candidates.append((node, above))
            for child in node.children:
                visit(child, (*above, node))
            return
        reasons.update((id(below), reason) for below in node.walk())

    for root in roots:
        visit(root, ())
    if options.top is not None:
        _hide_below_top(candidates, options, reasons)
    most = options.most_rows
    if most is not None and len(candidates) > most:
        # What is below a node costs no more than it: nothing is kept without what is above it.
        by_total = sorted(candidates, key=lambda candidate: -shares.of(candidate[0].total))
        reasons.update((id(node), f"below the {most} costliest") for node, _ in by_total[most:])
    return reasons


def _hide_below_top(
    candidates: list[tuple[FoldedNode, tuple[FoldedNode, ...]]], options: ViewOptions, reasons: dict[int, str]
) -> None:
    rank, kept = _rank(options.sort), set[int]()
    for node, above in sorted(candidates, key=lambda candidate: rank(candidate[0].own))[: options.top]:
        kept.update(id(one) for one in (node, *above))
    for node, _ in candidates:
        if id(node) not in kept:
            reasons[id(node)] = f"below the top {options.top}"


def _shown(
    nodes: Sequence[FoldedNode], sort: Sort, reasons: dict[int, str], shares: _Shares, guides: tuple[bool, ...]
) -> Iterator[TreeRow]:
    """Rows of ``nodes``, each followed by what is below it; ``guides`` are those of the level above."""
    rank = _rank(sort)
    ordered = sorted(nodes, key=lambda node: rank(node.total))  # equal ones as the model has them
    shown = [node for node in ordered if id(node) not in reasons]
    for node in shown:
        own_guides = (*guides, node is shown[-1])
        yield TreeRow(node, own_guides[1:], shares.of(node.total), shares.of(node.own), "")
        yield from _shown(node.children, sort, reasons, shares, own_guides)


def _with_outliers(rows: tuple[TreeRow, ...]) -> tuple[TreeRow, ...]:
    """Call out an odd repeat where it is narrowed down most: not again on every layer above."""
    explained: set[str] = set()
    result: list[TreeRow] = []
    for row in reversed(rows):
        odd = row.node.outlier
        if odd and not any(path.startswith(f"{odd.path}.") for path in explained):
            explained.add(odd.path)
            apart = f"{odd.path} takes {units.ratio(odd.ratio)} the backward time of its siblings"
            row = replace(row, outlier=apart)
        result.append(row)
    return tuple(reversed(result))


def _hidden_rows(roots: Sequence[FoldedNode], reasons: dict[int, str], shares: _Shares) -> tuple[HiddenRow, ...]:
    by_reason: dict[str, list[Amounts]] = {}
    for root in roots:
        for node in root.walk():
            if reason := reasons.get(id(node)):
                by_reason.setdefault(reason, []).append(node.own)
    sums = {reason: add_up(parts) for reason, parts in by_reason.items()}
    return tuple(HiddenRow(reason, own, shares.of(own)) for reason, own in sums.items())
