"""Records a run of a model, or a step inside somebody else's mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

from gradscope.patching.recording import Recording
from gradscope.patching.tape import Reads, Tape


def record(run: Callable[[], Any]) -> tuple[Recording, Any]:
    """Call ``run`` once; return what it did, and what it returned."""
    tape = Tape()
    with tape:
        result = tape.run(run)
    tape.forget()
    return Recording(tape.nodes, tape.values), result


class Recorder:
    """Writes down the torch calls that somebody else's mode hands to :meth:`call`, while :meth:`watching`.

    Attributes:
        recording: what was written; None before, and where there were more than MOST_CALLS.
        overflowed: whether there were.
    """

    MOST_CALLS = 100_000  # each takes a kilobyte or two

    def __init__(self) -> None:
        self.recording: Recording | None = None
        self.overflowed = False
        self._tape: Tape | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Until the block is left."""
        tape = self._tape = Tape()
        try:
            with tape.hooked(), tape.inside_modules():
                yield
        finally:
            self._tape = None
            tape.forget()
            self.recording = Recording(tape.nodes, tape.values)
            if self.overflowed:
                self.forget()
        for value in tape.values:
            value.settle()

    def call(self, function: Callable[..., Any], frame: FrameType, args: Any, kwargs: Any) -> Any:
        """``function(*args, **kwargs)``, called from ``frame``."""
        if self._tape is None:
            return function(*args, **kwargs)
        if len(self._tape.nodes) >= self.MOST_CALLS:
            self.overflowed = True
            return function(*args, **kwargs)
        return self._tape.call(function, frame, args, kwargs)

    def inside_backward(self) -> AbstractContextManager[None]:
        """Inside the block, which is on the engine's way, calls that read a tensor's content are written down too.

        ``backward`` is itself a torch function, so that the other mode is off there.
        """
        return nullcontext() if self._tape is None else Reads(self._tape, self.MOST_CALLS)

    def forget(self) -> None:
        """Let go of the modules and functions that were seen."""
        if self.recording is not None:
            for node in self.recording.nodes:
                for place in node.places:
                    place.frame.owner, place.frame.globals = None, {}
                    place.frame.settings.clear()
                    place.names.clear()
                node.args, node.kwargs, node.inputs, node.outputs, node.places, node.caller = (), {}, (), (), (), None
            for value in self.recording.values:
                value.producer = None
                value.users.clear()
            self.recording = None
