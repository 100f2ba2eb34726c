"""Every error gradscope raises on purpose, and the exit code each one gives the command line.

A message is one to three lines: what is wrong, where, and what to do next.

GradscopeError                  2
├── UsageError                  2   the command line or the Python call is wrong
├── TargetError                 2   the target cannot be found, read or parsed
├── WorkloadError               2   the workload cannot be run as a training step
├── OutputError                 2   an output path cannot be written
├── RunFileError                2   a RUN.json cannot be read
├── TraceFileError              2   an exported trace cannot be read, or does not hold what was asked for
├── UnsupportedTorchError       2   this torch does not answer as gradscope needs
├── NothingMeasuredError        3   the run ended before one step was measured
├── BudgetExceededError         4   ``gradscope check`` found a regression
└── VerificationError           5   a recipe changed the gradients
"""

from __future__ import annotations


class GradscopeError(Exception):
    """Base of all errors that are meant for the user; never raised itself."""

    exit_code = 2


class UsageError(GradscopeError, ValueError):
    """An option or argument has a value that cannot be used."""


class TargetError(GradscopeError):
    """The target names no file, module or function that can be loaded."""


class WorkloadError(GradscopeError, ValueError):
    """The target loaded, but does not describe a training step."""


class OutputError(GradscopeError, OSError):
    """An output path cannot be written, or holds a file gradscope did not write."""

    # OSError defines __str__ over (errno, strerror); ours is a plain message.
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class RunFileError(GradscopeError, ValueError):
    """A file is not a RUN.json of a schema that this version reads."""


class TraceFileError(GradscopeError, ValueError):
    """A file is no trace that torch.profiler exported, or holds no training step."""


class UnsupportedTorchError(GradscopeError, RuntimeError):
    """A private interface of torch is missing or answers differently."""


class NothingMeasuredError(GradscopeError, RuntimeError):
    """No step with a backward pass was measured."""

    exit_code = 3


class Terminated(BaseException):
    """The system asks the process to end (SIGTERM): what was measured is written first."""


class BudgetExceededError(GradscopeError):
    """A layer or the step is over the budget given to ``gradscope check``."""

    exit_code = 4


class VerificationError(GradscopeError):
    """A recipe's gradients differ from the original's by more than allowed."""

    exit_code = 5
