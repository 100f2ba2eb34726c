"""Watches every entry into the autograd engine, so that a backward pass has a wall time of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from gradscope import markers
from gradscope.capture.guard import Guard
from gradscope.compat import TraceMarker, graph_task_id, swap_engine_entry, transforms_run

Around = Callable[[Any], AbstractContextManager[None]]


BACKWARD_PASSES = "looking at a backward pass"  # under which the guard notes an error
STEP_ENDS = "looking for the ends of steps"  # the same


class BackwardWatch:
    """One wrapper around the engine for the whole run; what it does changes with the phase of the run.

    With everything off it costs a function call. The callbacks see outermost passes only, but for ``nested``: those of
    reentrant checkpointing, hooks, and Functions that run the engine in their backward.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self._guard = guard or Guard()
        self.mark = False  # write a BACKWARD row around each entry
        self.around: Around | None = None  # of the roots; outside the row
        self.nested: Around | None = None  # the same, of a pass inside of a pass
        # Last of all, only when backward returned: whether it made a graph of itself, to be gone through later.
        self.ended: Callable[[bool], None] | None = None
        self.settled: Callable[[], None] | None = None  # after that, also when it raised: no graph task runs
        self.raised = 0  # outermost passes that ended in an error
        self._counter = itertools.count()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch until the block is left."""
        with swap_engine_entry(self._wrap):
            yield

    def _wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = graph_task_id() == -1
            try:
                # The call is made here in every phase: what warns of its caller's line then names the same one each
                # time, and Python shows it once.
                with self._surroundings(outermost, roots), self._row(outermost, args, kwargs):
                    result = original(roots, *args, **kwargs)
                if outermost and self.ended is not None:
                    with self._guard.over(STEP_ENDS):
                        self.ended(_creates_graph(args, kwargs) and not transforms_run())
                return result
            except BaseException:
                self.raised += outermost
                raise
            finally:
                if outermost and self.settled is not None:
                    with self._guard.over(STEP_ENDS):
                        self.settled()

        return run_backward

    def _row(self, outermost: bool, args: Any, kwargs: Any) -> AbstractContextManager[None]:
        return self._marked(outermost, args, kwargs) if self.mark else nullcontext()

    @contextmanager
    def _marked(self, outermost: bool, args: Any, kwargs: Any) -> Iterator[None]:
        if outermost:
            # What forward still has queued on the device is not backward's time.
            synchronize()
        with TraceMarker(markers.BACKWARD + str(2 * next(self._counter) + _creates_graph(args, kwargs))):
            yield
            if outermost:
                # The pass ends when the device has done it, not when its launches are queued.
                synchronize()

    def _surroundings(self, outermost: bool, roots: Any) -> AbstractContextManager[None]:
        around = self.around if outermost else self.nested
        if around is None:
            return nullcontext()
        return self._guard.around(BACKWARD_PASSES, lambda: around(roots))


def _creates_graph(args: Any, kwargs: Any) -> bool:
    """Check that the backward pass builds a graph of itself: the fourth argument, after roots, gradients and keep."""
    return bool(args[2] if len(args) > 2 else kwargs.get("create_graph", False))


def synchronize() -> None:
    """Wait for the device, where one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
