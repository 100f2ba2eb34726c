"""The host's events of an exported trace as arrays, and which thread ran the forward of each backward node."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np

from gradscope.chrome.reading import HOST, Exported, ns
from gradscope.tables import Int32Column, IntColumn
from gradscope.trace.names import EVALUATE

UNSEEN = 1_000_000  # added to the profiler's number of a thread that the trace does not show


class Host:
    """The host's events as arrays, threads of forward told from the profiler's numbers."""

    def __init__(self, found: Exported) -> None:
        host, base = found.host, found.base()
        self.found = found
        self.base = base
        self.names = list(found.names)
        self.kind = np.frombuffer(host.kind, np.int8)
        self.name = np.frombuffer(host.name, np.int32)
        self.thread: Int32Column = np.frombuffer(host.thread, np.int32)
        self.start = ns(host.start, base)
        self.end = self.start + ns(host.duration, 0.0)
        self.sequence: IntColumn = np.frombuffer(host.sequence, np.int64)
        self.logical: IntColumn = np.frombuffer(host.forward_thread, np.int64)
        self.external: IntColumn = np.frombuffer(host.external, np.int64)
        self.correlation: IntColumn = np.frombuffer(host.correlation, np.int64)
        evaluates = np.array([text.startswith(EVALUATE) for text in self.names], bool)
        is_host = self.kind == HOST
        self.nodes = np.flatnonzero(is_host & evaluates[self.name]) if self.names else np.empty(0, np.int64)
        self.drew = np.flatnonzero(is_host & (self.sequence >= 0) & (self.logical == 0))
        self._drawn: np.ndarray[tuple[int, int], np.dtype[np.int64]] | None = None
        self.forward_thread = self._forward_threads()

    def _forward_threads(self) -> Int32Column:
        """The thread whose counter drew the number of each backward row; 0 for others."""
        thread_of = _by_arrows(self)
        for number in np.unique(self.logical[self.logical > 0]).tolist():
            if number not in thread_of:
                thread_of[number] = _by_numbers(self, number, set(thread_of.values()))
        found = np.zeros(len(self.kind), np.int32)
        for number, thread in thread_of.items():
            found[self.logical == number] = thread
        return found

    def drawn_by(self, numbers: IntColumn) -> dict[int, int]:
        """Thread -> how many of these numbers, each once, its operations drew."""
        if self._drawn is None:
            pairs = np.unique(np.stack([self.sequence[self.drew], self.thread[self.drew]]), axis=1)
            self._drawn = pairs  # in order of the numbers
        sequence, thread = self._drawn
        low, high = (np.searchsorted(sequence, numbers, side=side) for side in ("left", "right"))
        counts: Counter[int] = Counter()
        for first, last in zip(low.tolist(), high.tolist(), strict=True):
            counts.update(thread[first:last].tolist())
        return counts

    def named(self, kind: int, beginning: str) -> IntColumn:
        """Rows of a kind whose name begins so, in order of start."""
        if not self.names:
            return np.empty(0, np.int64)
        fits = np.array([text.startswith(beginning) for text in self.names], bool)
        rows = np.flatnonzero((self.kind == kind) & fits[self.name])
        return rows[np.argsort(self.start[rows], kind="stable")]


def _by_arrows(host: Host) -> dict[int, int]:
    """The profiler's number of a thread -> the thread that most arrows to its nodes come from."""
    rows = np.flatnonzero(host.logical > 0)
    starts = np.frombuffer(host.found.host.start, np.float64)
    number_at = {
        (thread, start): number
        for thread, start, number in zip(
            host.thread[rows].tolist(), starts[rows].tolist(), host.logical[rows].tolist(), strict=True
        )
    }
    votes: dict[int, Counter[int]] = defaultdict(Counter)
    for source, target in host.found.arrows.values():
        if source is not None and target is not None and target in number_at:
            votes[number_at[target]][source[0]] += 1
    return {number: counts.most_common(1)[0][0] for number, counts in votes.items()}


def _by_numbers(host: Host, number: int, known: set[int]) -> int:
    """The thread whose operations drew most of the numbers of these nodes, of several rather one that is not ``known``.

    One that is not there where none did, or several did alike: each thread counts from 0, and then nothing tells them.
    """
    wanted = np.unique(host.sequence[(host.logical == number) & (host.sequence >= 0)])
    counts = host.drawn_by(wanted)
    most = max(counts.values(), default=0)
    best = [thread for thread, count in counts.items() if count == most]
    best = [thread for thread in best if thread not in known] or best
    return best[0] if len(best) == 1 else UNSEEN + number
