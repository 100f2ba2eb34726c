"""Records a run of a model, or a step inside somebody else's mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any, TypeVar

from gradscope.capture.guard import Guard
from gradscope.capture.hooks_aside import HooksAside
from gradscope.capture.uncompiled import uncompiled
from gradscope.interrupts import is_interruption
from gradscope.recording.graph import Recording, settle
from gradscope.recording.operations import canonical
from gradscope.recording.tape import Reads, Tape, reads_content

_T = TypeVar("_T")


def record(run: Callable[[], Any]) -> tuple[Recording, Any]:
    """Call ``run`` once, without torch.compile; return what it did, and what it returned."""
    tape = Tape()
    try:
        with uncompiled(), tape:
            result = tape.run(run)
    except BaseException:
        tape.live.drop()  # the traceback holds the tape
        raise
    tape.leave_frames()
    return Recording(tape.nodes, tape.values, tape.live), result


class Recorder:
    """Writes down the torch calls that somebody else's mode hands to :meth:`call`, while :meth:`watching`.

    Attributes:
        recording: what was written; None before, where there were more than MOST_CALLS, and where it failed.
        overflowed: whether there were.
        interrupted: whether the program interrupted the writing, by a time limit say, which then ended.
        failed: what went wrong in the writing, which then ended.
    """

    MOST_CALLS = 100_000  # each takes a kilobyte or two

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.overflowed = self.interrupted = False
        self.failed: Exception | None = None
        self._tape: Tape | None = None
        self._whole = False  # whether the forward pass and the loss were called by gradscope

    @contextmanager
    def watching(self, guard: Guard, aside: HooksAside) -> Iterator[None]:
        """Watch until the block is left; the guard notes what goes wrong in a hook, of which ``aside`` takes care."""
        tape = self._tape = Tape(guard, aside)
        try:
            with tape.hooked(), tape.inside_modules():
                yield
        finally:
            self._tape = None
            tape.leave_frames()
            self.recording = Recording(tape.nodes, tape.values, tape.live)
            if self.overflowed or self.interrupted or self.failed is not None:
                self.recording.drop()
                self.recording = None
        if self._whole:  # what made the values is over: as in a plan, of which this may become one
            settle(tape.values)
            return
        for value in tape.values:
            value.settle()

    def below(self, run: Callable[[], _T]) -> _T:
        """Call ``run``, which is a model's forward pass and its loss; while watching, all of its frames are seen."""
        if self._tape is None:
            return run()
        self._whole = True
        return self._tape.below(run)

    def call(self, function: Callable[..., Any], frame: FrameType, args: Any, kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)`` from ``frame``; only what the function raises comes out."""
        tape = self._writes()
        if tape is None:
            return function(*args, **kwargs)
        return self._kept_apart(function, args, kwargs, lambda run: tape.call(function, frame, args, kwargs, run))

    def read(self, function: Callable[..., Any], frame: FrameType, args: Any, kwargs: Any) -> Any:
        """The same for calls that read a tensor's content; others are called as they are."""
        tape = self._writes()
        if tape is None:
            return function(*args, **kwargs)

        def written(run: Callable[..., Any]) -> Any:
            op = canonical(function)
            return tape.read(function, op, frame, args, kwargs, run) if reads_content(op) else run(*args, **kwargs)

        return self._kept_apart(function, args, kwargs, written)

    def inside_backward(self) -> AbstractContextManager[None]:
        """Write down calls that read a tensor's content inside the block too, which is on the engine's way.

        ``backward`` is itself a torch function, so that the other mode is off there.
        """
        return nullcontext() if self._tape is None else Reads(self)

    def _writes(self) -> Tape | None:
        """The tape, where it is still written on."""
        tape = None if self.interrupted or self.failed is not None else self._tape
        if tape is not None and len(tape.nodes) >= self.MOST_CALLS:
            self.overflowed = True
            return None
        return tape

    def _kept_apart(
        self, function: Callable[..., Any], args: Any, kwargs: Any, written: Callable[[Callable[..., Any]], Any]
    ) -> Any:
        """Call ``written`` of the function; where writing fails it ends, and the user's call is made all the same."""
        ran: list[Any] = []
        raised: list[BaseException] = []

        def run(*given: Any, **named: Any) -> Any:
            try:
                ran.append(function(*given, **named))
            except BaseException as error:
                raised.append(error)
                raise
            return ran[0]

        try:
            return written(run)
        except Exception as error:
            if any(error is each for each in raised):
                raise
            if is_interruption(error, in_own_code=True):
                self.interrupted = True
                raise
            self.failed = error
        finally:
            raised.clear()  # its traceback holds this frame
        return ran.pop() if ran else function(*args, **kwargs)
