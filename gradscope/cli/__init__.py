"""The command line: one command a file. The only part of gradscope that prints.

Nothing imported here loads torch, pandas or numpy, so that ``gradscope --help`` answers at once; each command imports
what it needs when it runs.
"""

from gradscope.cli.app import main

__all__ = ["main"]
