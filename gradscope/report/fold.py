"""Layer rows -> a tree of nodes, with repeated blocks folded into one.

``transformer.h.0`` to ``transformer.h.11`` of one class become one node ``h.0-h.11`` with twelve repeats, and so do
the layers below them, each with the sum of its repeats. Only numbered siblings *that contain layers* are folded, and
only when class, parameters and everything below them are the same: ``ln_1`` and ``ln_2`` stay two rows, and so do two
stages of a ResNet of different width. Nothing is lost: the nodes' own amounts add up to the rows' amounts.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gradscope.report.layer_cost import Amounts, add_up, amounts_of
from gradscope.tables import LayerRow
from gradscope.tables.results import parent_path
from gradscope.tables.siblings import outside_ratio

# One of three or more repeats stands out when it is this much costlier or cheaper than every other one ...
OUTLIER_RATIO = 1.25
# ... and the difference is at least this share of the whole backward pass.
OUTLIER_SHARE = 0.005

# Nine digits: nobody has more blocks, and int() takes no text of thousands.
_NUMBERED = re.compile(r"^(.*?)(\d{1,9})$", re.ASCII | re.DOTALL)
# Deeper layers stand beside each other on the last level: Python's recursion ends at a thousand calls, and each level
# takes several.
MOST_LEVELS = 100


@dataclass(frozen=True, slots=True)
class Outlier:
    """The one repeat of a folded block that is not like the others."""

    path: str
    ratio: float  # its backward over the median of the other repeats


@dataclass(slots=True)
class FoldedNode:
    """One row of the folded tree: a module, or several repeats of one."""

    label: str  # last part of the path, or a range: "h.0-h.11"
    address: str  # the whole path, repeats as a star: "transformer.h.*.attn"
    class_name: str
    paths: tuple[str, ...]  # the modules merged here
    repeats: int  # among siblings; 1 unless folded
    calls: float
    own: Amounts
    total: Amounts
    children: list[FoldedNode] = field(default_factory=list)
    outlier: Outlier | None = None

    @property
    def name(self) -> str:
        """Label and number of repeats: ``h.0-h.11 ×12``."""
        return f"{self.label} ×{self.repeats}" if self.repeats > 1 else self.label

    @property
    def place(self) -> str:
        """The path, repeats as a star; the label of a root that has none."""
        return self.address or self.label

    def walk(self) -> Iterator[FoldedNode]:
        """This node and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(slots=True)
class _Raw:
    """One module before folding."""

    row: LayerRow
    name: str
    children: list[_Raw] = field(default_factory=list)
    signature: int = -1
    backward_ns: int = 0  # total
    steps_ns: list[int] = field(default_factory=list)  # own backward nodes of it and all below, by measured step


def build_tree(rows: Sequence[LayerRow], backward_ns: int, model: str = "", *, steady: bool = True) -> list[FoldedNode]:
    """The roots, children in the order of ``rows``.

    ``backward_ns`` is the whole backward pass, against which an outlier must matter; ``model`` is the label of a
    root without a class name. Times that are not ``steady`` make no outlier.
    """
    roots = _link(rows)
    signatures: dict[object, int] = {}
    for root in roots:
        _sign(root, signatures)
    least = OUTLIER_SHARE * backward_ns if steady else math.inf
    return [_root_node(root, model, least) for root in roots]


def _link(rows: Sequence[LayerRow]) -> list[_Raw]:
    """Modules by parent. A parent that has no row is skipped: the nearest one on the path that has a row counts."""
    by_path = {row.path: _Raw(row, "") for row in rows}
    levels: dict[str, int] = {}
    roots: list[_Raw] = []
    for raw in by_path.values():
        parent = _shown_parent(raw.row, by_path, levels)
        if parent is None:
            raw.name = raw.row.path
            roots.append(raw)
        else:
            raw.name = raw.row.path.removeprefix(f"{parent}.") if parent else raw.row.path
            by_path[parent].children.append(raw)
    return roots


def _shown_parent(row: LayerRow, by_path: Mapping[str, _Raw], levels: dict[str, int]) -> str | None:
    """The path of the layer that ``row`` is shown below; ``levels`` are those of the layers that were asked for."""
    above: dict[str, None] = {}  # in order
    path: str | None = row.path
    while path is not None and path not in levels and path not in above:
        above[path] = None
        path = parent_path(by_path[path].row, by_path)
    level = -1 if path is None else levels.get(path, -1)
    for path in reversed(above):
        level += 1
        levels[path] = level
    parent = parent_path(row, by_path)
    while parent is not None and levels[parent] >= MOST_LEVELS:
        parent = parent_path(by_path[parent].row, by_path)
    return parent


def _sign(raw: _Raw, signatures: dict[object, int]) -> None:
    """Number equal structures equally, bottom up, and sum the backward times on the way."""
    row = raw.row
    raw.backward_ns = amounts_of(row).backward_ns
    raw.steps_ns = list(row.backward_self_steps_ns)
    for child in raw.children:
        _sign(child, signatures)
        raw.backward_ns += child.backward_ns
        raw.steps_ns = [one + other for one, other in zip(raw.steps_ns, child.steps_ns, strict=False)]
    shape = (row.class_name, row.parameters, tuple((child.name, child.signature) for child in raw.children))
    raw.signature = signatures.setdefault(shape, len(signatures))


def _root_node(root: _Raw, model: str, least: float) -> FoldedNode:
    label = root.name or root.row.class_name or model
    node = _merge([root], label, root.name, least, repeats=1)
    if not root.name:
        node.class_name = ""  # the label already says it
    return node


def _merge(raws: list[_Raw], label: str, address: str, least: float, repeats: int) -> FoldedNode:
    """One node for ``raws``, which are of one structure."""
    siblings = [[raw.children[i] for raw in raws] for i in range(len(raws[0].children))]
    children = [_elide(node) for node in _fold(siblings, raws[0].name.rpartition(".")[2], address, least)]
    own = add_up([amounts_of(raw.row) for raw in raws])
    return FoldedNode(
        label=label,
        address=address,
        class_name=raws[0].row.class_name,
        paths=tuple(raw.row.path for raw in raws),
        repeats=repeats,
        calls=sum(raw.row.calls for raw in raws),
        own=own,
        total=add_up([own, *(child.total for child in children)]),
        children=children,
        outlier=_outlier(raws, least),
    )


def _fold(siblings: list[list[_Raw]], parent: str, above: str, least: float) -> list[FoldedNode]:
    """Nodes of the children of one node; each sibling comes as the list of its counterparts in every repeat.

    Labels and addresses begin with ``parent``, the node's own last name, and ``above``, its address.
    """
    groups: dict[object, list[list[_Raw]]] = {}
    for i, counterparts in enumerate(siblings):
        first = counterparts[0]
        match = _NUMBERED.match(first.name)
        foldable = match and first.children
        key = (match[1], first.signature) if match and foldable else i
        groups.setdefault(key, []).append(counterparts)
    numbered = [s[0].name for s in siblings if s[0].children and _NUMBERED.match(s[0].name)]
    return [_group_node(members, numbered, parent, above, least) for members in groups.values()]


def _group_node(members: list[list[_Raw]], numbered: list[str], parent: str, above: str, least: float) -> FoldedNode:
    names = [member[0].name for member in members]
    before = f"{above}." if above else ""
    # A bare number says nothing: put the parent's name before it.
    lead = f"{parent}." if parent and names[0].isdigit() else ""
    if len(members) == 1:
        return _merge(members[0], lead + names[0], before + names[0], least, repeats=1)
    match = _NUMBERED.match(names[0])
    prefix = match[1] if match else names[0]
    spans = _spans(sorted(int(name[len(prefix) :]) for name in names))
    first, last = spans[0].partition("-")[0], spans[-1].rpartition("-")[2]
    whole = len(spans) == 1
    label = f"{lead}{prefix}{first}-{lead}{prefix}{last}" if whole else f"{lead}{prefix}{_short(spans)}"
    # A star only where it means all of them.
    all_of_them = sum(name.startswith(prefix) and name[len(prefix) :].isdigit() for name in numbered) == len(names)
    address = f"{before}{prefix}{'*' if all_of_them else _short(spans)}"
    return _merge([raw for member in members for raw in member], label, address, least, repeats=len(members))


def _spans(numbers: list[int]) -> list[str]:
    """``[0, 1, 2, 5]`` as ``["0-2", "5"]``."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return [f"{span[0]}-{span[-1]}" if len(span) > 1 else f"{span[0]}" for span in spans]


def _short(spans: list[str]) -> str:
    return ",".join(spans) if len(spans) <= 3 else f"{spans[0]},{spans[1]},…,{spans[-1]}"


def _elide(node: FoldedNode) -> FoldedNode:
    """A container that is never called and holds one row says nothing: its child takes its place, with its name."""
    own = node.own
    busy = node.calls or own.backward_ns or own.forward_ns or own.saved_bytes
    if len(node.children) != 1 or node.repeats > 1 or busy:
        return node
    child = node.children[0]
    if not child.label.startswith(f"{node.label}."):
        child.label = f"{node.label}.{child.label}"
    return child


def _outlier(raws: list[_Raw], least: float) -> Outlier | None:
    """The repeat that lies outside the range of all others by :data:`OUTLIER_RATIO`, if there is one.

    By what it takes in the usual step, against the others' own scatter: neither a slow step nor repeats that differ
    anyway make one stand out.
    """
    if len(raws) < 3:
        return None
    ordered = sorted(raws, key=_usual_ns)
    for odd, others in ((ordered[-1], ordered[:-1]), (ordered[0], ordered[1:])):
        ratio = _apart(odd, others)
        usual = statistics.median(_usual_ns(raw) for raw in others)
        if ratio is not None and abs(_usual_ns(odd) - usual) >= least:
            return Outlier(odd.row.path, ratio)
    return None


def _usual_ns(raw: _Raw) -> float:
    """Backward of a usual step."""
    return statistics.median(raw.steps_ns) if raw.steps_ns else raw.backward_ns


def _apart(odd: _Raw, others: list[_Raw]) -> float | None:
    """How many times the others it usually takes; None where it is like them. Without steps, by the means."""
    steps = [raw.steps_ns or [raw.backward_ns] for raw in (odd, *others)]
    ratio = outside_ratio(steps[0], steps[1:], OUTLIER_RATIO)
    nearest = max if ratio is not None and ratio > 1 else min
    near = nearest(_usual_ns(raw) for raw in others)
    beyond = max(_usual_ns(odd), near) > OUTLIER_RATIO * min(_usual_ns(odd), near)
    return ratio if beyond else None
