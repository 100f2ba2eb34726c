"""Keeps an error of gradscope's own out of the user's run: it becomes a note of the report.

Everything that gradscope runs inside the user's process, between two of the user's own lines, goes through a
:class:`Guard`: hooks, the moments around a backward pass, the beginning and end of each phase.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from gradscope.interrupts import is_interruption

# Set it to see the traceback of each error that became a note.
_DEBUG = "GRADSCOPE_DEBUG"

#: Told of every error that a guard keeps to itself; the tests fail on one that no test has planted.
listeners: list[Callable[[BaseException], None]] = []


class Guard:
    """Notes what went wrong in gradscope's own code, and where; the user's code goes on as if nothing had.

    Only ``Exception`` is kept: an interrupt by the user or by the system goes its way.

    Attributes:
        failed: the parts in which something went wrong, each with the text of its first error.
    """

    def __init__(self, failed: dict[str, str] | None = None) -> None:
        self.failed = {} if failed is None else failed

    def note(self, part: str, error: BaseException) -> None:
        """Something went wrong in ``part``.

        What has interrupted gradscope, a time limit of the user's say, is theirs: it goes its way.
        """
        if is_interruption(error, in_own_code=True):
            raise error
        for listener in listeners:
            listener(error)
        if part not in self.failed:
            self.failed[part] = text_of(error)
            if os.environ.get(_DEBUG):
                traceback.print_exception(error)

    @contextmanager
    def over(self, part: str) -> Iterator[None]:
        """Keep an error of the block, which runs no code of the user's."""
        try:
            yield
        except Exception as error:
            self.note(part, error)

    def hook(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, which returns None where it fails: what torch takes for a hook that changes nothing."""

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.note(part, error)
                return None

        return guarded

    @contextmanager
    def around(self, part: str, make: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """A context of gradscope's own around a block of the user's: only the user's errors come out of it."""
        inner = ExitStack()
        with self.over(part):
            inner.enter_context(make())
        try:
            yield
        except BaseException as error:
            self._leave(part, inner, error)
            raise
        else:
            self._leave(part, inner, None)

    def close(self, part: str, stack: ExitStack) -> None:
        """Undo everything on ``stack``; where one step of that fails the others are made all the same."""
        with self.over(part):
            stack.close()

    def _leave(self, part: str, inner: ExitStack, users: BaseException | None) -> None:
        try:
            inner.__exit__(*(type(users), users, users.__traceback__) if users is not None else (None, None, None))
        except BaseException as error:
            if error is users:
                return
            if not isinstance(error, Exception):
                raise
            self.note(part, error)


def text_of(error: BaseException) -> str:
    """Its class and the first line of what it says."""
    try:
        message = str(error)
    except Exception:  # an exception of the user's may fail to say what it is
        message = ""
    first = message.strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
