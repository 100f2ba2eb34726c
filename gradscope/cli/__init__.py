"""The command line: one command a file. The only part of gradscope that prints.

Nothing imported here loads torch, pandas or numpy, so that ``gradscope --help`` answers at once; each command imports
what it needs when it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``gradscope ARGUMENTS`` as the program of this process, and leave with its exit code.

    Args:
        arguments: without the program's name; None takes ``sys.argv[1:]``.
    """
    try:
        # Not at the top: whoever presses Ctrl-C while this loads gets no traceback either.
        from gradscope.cli.app import run

        code = run(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt:
        from gradscope.cli.failure import INTERRUPTED, say_ended

        say_ended("interrupted")
        code = INTERRUPTED
    from gradscope.cli.failure import say
    from gradscope.process import leave_all_the_same

    leave_all_the_same(code, say)
    sys.exit(code)
