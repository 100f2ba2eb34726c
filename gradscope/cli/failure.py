"""How errors reach the user: ours as one message, theirs as Python itself would show them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from gradscope.errors import Terminated
from gradscope.safe_text import visible

INTERRUPTED = 130  # as a shell reports a program that Ctrl-C ended
TERMINATED = 143  # and one that SIGTERM did


def say(message: str) -> None:
    """Write a line on stderr, if there is still anybody to read it."""
    with contextlib.suppress(Exception):  # the user's code may have put a stream of its own there, of any kind
        print(f"gradscope: {message}", file=sys.stderr, flush=True)


def say_error(message: str) -> None:
    """Write one of our own error messages on stderr."""
    # What a message quotes may have come from anywhere.
    say("error: " + "\n".join(visible(line) for line in message.split("\n")))


_KEPT: list[str] = []  # what this command has left behind so far


def begin() -> None:
    """Forget what an earlier command of this process has written."""
    _KEPT.clear()


def note_kept(what: str) -> None:
    """Note a file that the command has written, or another trace of it, for who interrupts it later."""
    _KEPT.append(what)


def say_ended(word: str) -> None:
    """Say in one line that the command was ended, and what of it is kept."""
    say(f"{word}; kept: {', '.join(_KEPT)}" if _KEPT else f"{word}; nothing was written")


def say_loading(target: str, *, quiet: bool) -> None:
    """Say that torch is being loaded, before anything imports it: that alone takes seconds."""
    if not quiet and "torch" not in sys.modules:
        say(f"loading torch and {visible(target)}")


def show_user_error(error: BaseException) -> int:
    """Show what the user's code raised and return the exit code that Python would have ended with.

    The traceback goes through ``sys.excepthook``, which the user's code may have replaced, without gradscope's frames.
    """
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    if isinstance(error, SystemExit):
        return _system_exit_code(error)
    if isinstance(error, KeyboardInterrupt):
        say_ended("interrupted")
        return INTERRUPTED
    if isinstance(error, Terminated):
        say_ended("terminated")
        return TERMINATED
    # Not above: torch, which this loads, cannot be loaded again where it was interrupted, or has raised, meanwhile.
    with contextlib.suppress(Exception):
        from gradscope.workload import cut_own_frames

        cut_own_frames(error)
    sys.excepthook(type(error), error, error.__traceback__)
    if _is_out_of_memory(error):
        say("out of memory: use a smaller batch; 'gradscope fit TARGET' predicts which batch sizes fit")
    elif missing := _missing_for_compile(error):
        say(missing)
    return 1


# What torch.compile raises where something of the machine is missing, and what to do, which is lost in its tracebacks.
_MISSING = {
    "No working C++ compiler found": "torch.compile found no C++ compiler: install one (apt install g++, dnf install "
    "gcc-c++, xcode-select --install), or name yours in CXX",
    "Failed to find C compiler": "Triton found no C compiler: install one (apt install gcc, dnf install gcc), or name "
    "yours in CC",
    "Python.h: No such file": "the compiler of torch.compile found no headers of Python: install them (apt install "
    "python3-dev, dnf install python3-devel)",
}


def _missing_for_compile(error: BaseException) -> str:
    if "torch._dynamo" not in sys.modules:
        return ""
    with contextlib.suppress(Exception):  # what the user's classes say of themselves
        text = str(error)
        return next((advice for words, advice in _MISSING.items() if words in text), "")
    return ""


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
    with contextlib.suppress(Exception):
        print(error.code, file=sys.stderr, flush=True)
    return 1


PATIENCE_S = 20.0  # an operation of torch's may take some; torchrun kills what has not ended 30 s after SIGTERM
_told: set[int] = set()  # files that Python is to tell of signals, while it does


def _forget_in_child() -> None:
    """A forked process has its parent's file: what it is told to do is not the parent's."""
    if _told:
        _told.clear()
        with contextlib.suppress(ValueError):
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_in_child)


@contextlib.contextmanager
def _ended_all_the_same(handled: threading.Event) -> Iterator[None]:
    """End the process on SIGTERM where no handler of Python's runs: it waits in C, for another rank say.

    Python tells of every signal through a file (``signal.set_wakeup_fd``), which a thread reads. Not where the program
    has such a file, as an event loop's.
    """
    here = os.getpid()
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
    _told.add(writes)

    def watch() -> None:
        while (told := os.read(reads, 1)) and told != b"\0":
            waits_in_c = told[0] == signal.SIGTERM and not handled.wait(PATIENCE_S)
            if waits_in_c and os.getpid() == here:
                say_ended("terminated while it waited; nothing was kept")
                os._exit(TERMINATED)

    watcher = threading.Thread(target=watch, daemon=True, name="gradscope-terminate")
    watcher.start()
    try:
        yield
    finally:
        _told.discard(writes)
        if os.getpid() == here:
            if before == -1 and (now := signal.set_wakeup_fd(-1)) not in (writes, -1):
                signal.set_wakeup_fd(now)  # the program's own by now
            os.write(writes, b"\0")
            watcher.join()
            os.close(reads)
            os.close(writes)


@contextlib.contextmanager
def raising_on_terminate() -> Iterator[None]:
    """Let SIGTERM raise :class:`Terminated` inside the block, once: what was measured until then is written.

    Only where nobody handles it otherwise. In processes that the block forks it ends them, as it would without.
    """
    here = os.getpid()
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    handled = threading.Event()

    def terminate(number: int, _frame: Any) -> None:
        handled.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if os.getpid() != here:
            os.kill(os.getpid(), number)
            return
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        with _ended_all_the_same(handled):
            yield
    finally:
        if signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
