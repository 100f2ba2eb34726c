"""Where the nodes of a backward pass are from of which compiled autograd makes one graph.

It copies the graphs that AOTAutograd has made for backward into its own, which is then traced anew: no node of what
Inductor gets tells of a layer or a line any more. But they come in the same order.

Source: torch/_dynamo/compiled_autograd.py (``extract_bw_module``, ``AutogradCompilerInstance``), as of torch 2.11 to
2.14; the common subsequence: H. Hyyrö, Bit-parallel LCS-length computation revisited (AWOCA 2004).
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from gradscope.compat.dynamo import DYNAMO
from gradscope.compat.imports import once_imported
from gradscope.compat.private import replaced
from gradscope.tables import NodeNote

_MOST = 0.9  # of what was copied and computes something: the rest Inductor's first passes have made something else of
_MODULE = f"{DYNAMO}.compiled_autograd"
_SAME = {"reshape": "view", "_unsafe_view": "view"}  # of a graph that is copied every view is a reshape


class CopiedNodes:
    """The nodes of graphs that were copied into one of compiled autograd's which is not compiled yet, in order."""

    def __init__(self) -> None:
        self._nodes: list[tuple[int, NodeNote]] = []  # with AOTAutograd's number of the graph
        self._times = Counter[int]()

    def begin(self) -> None:
        """A graph of another pass begins."""
        self._nodes, self._times = [], Counter()

    def copied(self, number: int, nodes: Iterable[NodeNote]) -> None:
        """A graph was copied."""
        self._times[number] += 1
        self._nodes += [(number, node) for node in nodes if node.op]

    def with_origins(self, nodes: Mapping[str, NodeNote]) -> dict[str, NodeNote]:
        """``nodes`` of a graph that Inductor compiles, where they are from; what is left is of the pass's next graph.

        Of blocks that share one graph nobody tells which it is each time: then no module is told.
        """
        found = dict(nodes)
        names = [name for name, node in nodes.items() if node.op]
        theirs = [nodes[name] for name in names]
        pairs = self._pairs(theirs, sized=True) or self._pairs(theirs, sized=False)
        for mine, place in pairs:
            number, origin = self._nodes[mine]
            origin = origin if self._times[number] == 1 else replace(origin, modules=())
            found[names[place]] = from_there(theirs[place], origin)
        self._nodes = self._nodes[pairs[-1][0] + 1 if pairs else 0 :]
        return found

    def _pairs(self, theirs: Sequence[NodeNote], *, sized: bool) -> list[tuple[int, int]]:
        """The nodes that are found again; none where so much is missing that others may have been taken for them.

        Of a pass for a few parameters alone, most of what was copied is not run.

        Args:
            sized: nodes of other sizes are others; of sizes that are not fixed torch may have seen different ones.
        """
        mine = [node for _, node in self._nodes]
        pairs = in_both([_kind(node, sized) for node in mine], [_kind(node, sized) for node in theirs])
        until = pairs[-1][0] + 1 if pairs else 0
        computing = sum(not node.is_view for node in mine[:until])
        again = sum(not mine[place].is_view for place, _ in pairs)
        return pairs if again >= _MOST * computing else []


def from_there(node: NodeNote, origin: NodeNote) -> NodeNote:
    """``node`` with what is known of where another is from."""
    return replace(
        node,
        modules=origin.modules,
        frames=origin.frames,
        forward=origin.forward,
        sequence=origin.sequence,
        is_sum=origin.is_sum,
    )


def _kind(node: NodeNote, sized: bool) -> Hashable:
    return _SAME.get(node.op, node.op), node.bytes if sized else None


def compiles_pass() -> bool:
    """Check that what is compiled now is of compiled autograd's graph of a backward pass."""
    return bool(getattr(sys.modules.get(_MODULE), "in_compiled_autograd_region", False))


@contextmanager
def watching_copies(
    copies: CopiedNodes, note: Callable[[Any], NodeNote], failed: Callable[[Exception], None]
) -> Iterator[None]:
    """Tell ``copies`` of each graph of AOTAutograd's that compiled autograd copies, until the block is left.

    Args:
        note: what is known of a node.
        failed: called with an error, where this torch does not have what is used; the program goes on.
    """
    with ExitStack() as stack:

        def begin() -> None:
            try:
                _watch(stack, sys.modules[_MODULE], copies, note, failed)
            except Exception as error:
                failed(error)

        with once_imported(_MODULE, begin):
            yield


def _watch(
    stack: ExitStack,
    module: Any,
    copies: CopiedNodes,
    note: Callable[[Any], NodeNote],
    failed: Callable[[Exception], None],
) -> None:
    extract, capture = module.extract_bw_module, module.AutogradCompilerInstance.begin_capture

    @functools.wraps(extract)
    def extract_bw_module(function: Any) -> Any:
        graph = extract(function)
        try:
            copies.copied(function._aot_id, [note(node) for node in graph.graph.nodes])
        except Exception as error:
            failed(error)
        return graph

    @functools.wraps(capture)
    def begin_capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        copies.begin()
        return capture(self, *args, **kwargs)

    stack.enter_context(replaced(module, "extract_bw_module", extract_bw_module))
    stack.enter_context(replaced(module.AutogradCompilerInstance, "begin_capture", begin_capture))


def in_both(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[tuple[int, int]]:
    """The places in both of a longest common subsequence."""
    places: dict[Hashable, int] = {}  # of each kind where it is in the first, a bit each
    for place, kind in enumerate(first):
        places[kind] = places.get(kind, 0) | 1 << place
    whole = (1 << len(first)) - 1
    rows = [whole]  # the zeros below a bit count what is common up to there
    for kind in second:
        row = rows[-1]
        taken = row & places.get(kind, 0)
        rows.append((row + taken | row - taken) & whole)
    found = []
    i, j = len(first), len(second)
    while i and j:
        if first[i - 1] == second[j - 1]:
            found.append((i - 1, j - 1))
            i, j = i - 1, j - 1
        elif rows[j] >> i - 1 & 1:  # what is common without the first's last is as long
            i -= 1
        else:
            j -= 1
    return found[::-1]
