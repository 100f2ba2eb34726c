"""What a session does while the program compiles: it notes the graphs, and keeps what is its own out of the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from gradscope.capture.aside import FOLLOWING
from gradscope.capture.phases import Run
from gradscope.capture.survey import user_frame
from gradscope.compat import (
    around_tracing,
    following_dynamo,
    keep_eager,
    noting_calls_by_hand,
    watching_dynamo,
    watching_graphs,
)

COMPILED_GRAPHS = "reading compiled graphs"  # under which the guard notes an error
_BY_HAND = "noting forward methods that compiled code calls by hand"


class CompilerWatch:
    """Follows Dynamo and Inductor from :meth:`begin` on.

    Attributes:
        closed: the session is. What other threads still have on of it goes when they leave what is compiled.
    """

    def __init__(self, run: Run, busy: Callable[[str], None]) -> None:
        """``busy`` is told what takes long: "compiling", or nothing any more."""
        self.closed = False
        self._run = run
        self._busy = busy
        self._exits = ExitStack()
        self._watch_again: Callable[[], None] = lambda: None

    def begin(self, stack: ExitStack) -> None:
        """Watch until ``stack`` is left, or :meth:`stop`."""
        run, exits = self._run, self._exits
        stack.callback(self.stop)
        self._watch_again = exits.enter_context(watching_dynamo(self._compiling, self._note_no_graphs))
        ahead = partial(run.guard.around, FOLLOWING, run.aside.inside)
        stack.enter_context(around_tracing(self._captures))
        exits.enter_context(following_dynamo(self._follow, ahead, self._captures, self._note_not_followed))
        graphs, registry = run.capture.compiled, run.capture.registry
        graphs.owners_of, graphs.label_of, graphs.frame = registry.owners_of, registry.label_of, user_frame
        exits.enter_context(watching_graphs(graphs, self._note_no_graphs))
        exits.enter_context(noting_calls_by_hand(partial(run.guard.note, _BY_HAND)))

    def stop(self) -> None:
        """Leave Dynamo and Inductor alone, unless a thread still has something of ours on: see :meth:`_follow`."""
        with self._run.guard.over(FOLLOWING):
            if not self._run.aside.close():
                return
        self._run.guard.close(COMPILED_GRAPHS, self._exits)

    def end_step(self, steps: int) -> None:
        """So many steps have ended."""
        with self._run.guard.over(FOLLOWING):
            self._run.compile_log.end_step(steps)
            self._run.hooks_aside.step()

    def _compiling(self, begins: bool) -> None:
        run = self._run
        run.has_compiled |= begins
        run.compilations += begins
        with run.guard.over(FOLLOWING):
            run.aside.compiling(begins)
            (run.compile_log.begin if begins else run.compile_log.collect)()
            if run.compile_log.tells_of_hooks():
                run.hooks_aside.are_read()
            run.hooks_aside.compiling(begins)
        if not self.closed:
            self._busy("compiling" if begins else "")

    def _follow(self, entered: bool, thread: int) -> None:
        run = self._run
        try:
            if entered:
                self._watch_again()
            run.aside.follow(entered, thread)
            run.hooks_aside.follow(entered, thread)
            if self.closed and run.aside.close():
                self._exits.close()  # another thread has closed the session
        except Exception as error:
            self._note_not_followed(error)

    @contextmanager
    def _captures(self) -> Iterator[None]:
        """While Dynamo captures a module whole, for export say: it looks at hooks, modes and classes."""
        with self._run.hooks_aside.away(), self._run.guard.around(FOLLOWING, self._run.aside.inside):
            yield

    def _note_not_followed(self, error: Exception) -> None:
        self._run.follows_dynamo = False
        self._run.aside.close()
        self._run.guard.note(FOLLOWING, error)
        if self.closed:  # nothing else would close it
            self._run.guard.close(COMPILED_GRAPHS, self._exits)

    def _note_no_graphs(self, error: Exception) -> None:
        self._run.guard.note(COMPILED_GRAPHS, error)


keep_eager(CompilerWatch._follow)  # where the run began inside of a compiled function
