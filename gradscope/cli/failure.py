"""How errors reach the user: ours as one message, theirs as Python itself would show them."""

from __future__ import annotations

import contextlib
import sys

INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended


def say(message: str) -> None:
    """Write a line on stderr, if there is still anybody to read it."""
    with contextlib.suppress(OSError, ValueError):
        print(f"gradscope: {message}", file=sys.stderr, flush=True)


def say_error(message: str) -> None:
    """Write one of our own error messages on stderr."""
    say(f"error: {message}")


def show_user_error(error: BaseException) -> int:
    """Show what the user's code raised and return the exit code that Python would have ended with.

    The traceback goes through ``sys.excepthook``, which the user's code may have replaced, without gradscope's frames.
    """
    from gradscope.workload import cut_own_frames

    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    if isinstance(error, SystemExit):
        return _system_exit_code(error)
    if isinstance(error, KeyboardInterrupt):
        say("interrupted")
        return INTERRUPTED
    cut_own_frames(error)
    sys.excepthook(type(error), error, error.__traceback__)
    if _is_out_of_memory(error):
        say("out of memory: profile it with a smaller batch, and ask 'gradscope fit TARGET' which batch sizes fit")
    return 1


def _is_out_of_memory(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    # The CPU's allocator has no exception of its own.
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def _system_exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr, flush=True)
    return 1
