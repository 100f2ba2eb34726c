"""What Dynamo has compiled, how long that took and why again, and at which lines graphs break."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from typing import Any, NamedTuple

from gradscope.compat.dynamo import DYNAMO

# What Dynamo calls the rest of a function behind a break.
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")
# Other frames are left as they are for what they do: a break in a loop, more versions than are allowed.
_FAILED = ("BackendCompilerFailed", "InternalTorchDynamoError", "InductorError", "TorchRuntimeError")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# But for an example of torch's.
_NAMED = re.compile(r"^\s*Explanation: (?:(?!\be\.g\.)[^`\n])*`([^`\n]+)`", re.MULTILINE)


class Compilation(NamedTuple):
    """Of one frame by Dynamo: the function, where it stands, and what made it necessary if it was compiled before."""

    function: str
    file: str
    line: int
    seconds: float
    again: bool
    reason: str  # the guard that failed; empty where torch does not tell
    frame: str = ""  # torch's number of it, as in the name of its regions: "3" of "3/1"
    behind: int | None = None  # the line of a break, where the frame is the rest of a function behind it
    step: int = 0  # that ran, of the program's


class GraphBreak(NamedTuple):
    """Where the code of a frame could not be traced, and why."""

    frames: tuple[tuple[str, int], ...]  # file and line, innermost last
    reason: str
    # The function, its file and line, of which nothing is compiled for it, but what it calls: so it breaks in a loop.
    skipped: tuple[str, str, int] | None = None


class Failure(NamedTuple):
    """A function that could not be compiled, while the program goes on with it as it is."""

    function: str
    file: str
    line: int
    reason: str


class CompileLog:
    """What Dynamo notes of its compilations, from the moment that this is made."""

    def __init__(self) -> None:
        self._step = 0  # the program's, that runs
        self._began = time.time()
        self._broken = len(_noted_breaks())
        # By id, theirs for as long as they are held here; the step; and whether errors were suppressed then.
        self._records: dict[int, tuple[Any, int, bool]] = {}
        self._suppressed = False  # when the last compilation began

    def begin(self) -> None:
        """A compilation begins: of those before it torch tells by now, and of the settings that it is made with."""
        self.collect()
        self._suppressed = _suppresses()

    def collect(self) -> None:
        """Take what there is: torch itself keeps the latest 64 alone."""
        utils = sys.modules.get(f"{DYNAMO}.utils")
        for each in () if utils is None else utils.get_compilation_metrics():
            if (each.start_time or 0.0) >= self._began:
                self._records.setdefault(id(each), (each, self._step, self._suppressed))

    def end_step(self, number: int) -> None:
        """Behind this the program's step ``number`` begins. Of the last compilation torch tells once it is over."""
        self.collect()
        self._step = number

    def compilations(self) -> list[Compilation]:
        """Each frame that was compiled, with its backward pass, which is compiled when that runs first."""
        backward = Counter[str]()
        for each, *_ in self._metrics():
            if not each.co_filename:
                backward[str(each.compile_id)] += getattr(each, "backward_cumulative_compile_time_us", None) or 0
        return [
            Compilation(
                users_name(each.co_name or ""),
                each.co_filename,
                each.co_firstlineno or 0,
                (each.entire_frame_compile_time_s or 0.0) + backward[str(each.compile_id)] / 1e6,
                str(each.compile_id).rpartition("/")[2] not in {"", "0"},
                _first_line(getattr(each, "recompile_reason", None) or ""),
                str(each.compile_id).rpartition("/")[0],
                int(resumed[2]) if (resumed := _RESUMED.fullmatch(each.co_name or "")) else None,
                step,
            )
            for each, step, _ in self._metrics()
            if each.co_filename
        ]

    def _metrics(self) -> list[tuple[Any, int, bool]]:
        self.collect()
        return list(self._records.values())

    def has_compiled(self) -> bool:
        """Check that a graph was compiled, or that torch does not tell: of a frame that it leaves as it is none was."""
        metrics = [each for each, *_ in self._metrics() if each.co_filename]
        return not metrics or any(each.graph_op_count and not each.fail_type for each in metrics)

    def tells_of_hooks(self) -> bool:
        """Check that something was compiled again for hooks on all modules: Dynamo has guarded which there are."""
        return any("_global_forward" in (each.recompile_reason or "") for each, *_ in tuple(self._records.values()))

    def failures(self) -> list[Failure]:
        """Each frame that a backend, or Dynamo itself, raised for, and that the program was not told of."""
        return [
            Failure(
                users_name(each.co_name or ""),
                each.co_filename,
                each.co_firstlineno or 0,
                " ".join(_ADDRESS.sub("", str(each.fail_reason)).split()),
            )
            for each, _, suppressed in self._metrics()
            if each.co_filename and each.fail_type in _FAILED and suppressed
        ]

    def breaks(self) -> list[GraphBreak]:
        """Each break of a graph, and each function that is not compiled for one, in a loop say."""
        noted = _noted_breaks()
        new = noted[self._broken :] if len(noted) >= self._broken else noted  # else torch._dynamo.reset() was called
        found = [
            GraphBreak(tuple((frame.filename, frame.lineno or 0) for frame in each.user_stack), _reason(each.reason))
            for each in new
        ]
        return found + [
            GraphBreak(
                ((each.fail_user_frame_filename, each.fail_user_frame_lineno or 0),),
                _reason(each.fail_reason),
                skipped=(users_name(each.co_name or ""), each.co_filename, each.co_firstlineno or 0),
            )
            for each, *_ in self._metrics()
            if each.fail_type and each.fail_type not in _FAILED and each.fail_user_frame_filename
        ]


def users_name(function: str) -> str:
    """The function's name in the user's code."""
    return _RESUMED.sub(r"\1", function)


def _reason(text: Any) -> str:
    """Torch's first line, with what its explanation names in backticks: of what builtin operator it speaks, say.

    Addresses are left out: the same line breaks for the same reason in another run.
    """
    text = _ADDRESS.sub("", str(text))
    first, named = _first_line(text), _NAMED.search(text)
    return first if named is None or named[1] in first else f"{first} `{named[1]}`"


def _first_line(text: Any) -> str:
    return str(text).strip().partition("\n")[0]


def _suppresses() -> bool:
    """Whether a function is run as it was written where compiling it fails; else the program is told of the error."""
    config = sys.modules.get(f"{DYNAMO}.config")
    return bool(getattr(config, "suppress_errors", False))


def _noted_breaks() -> list[Any]:
    utils = sys.modules.get(f"{DYNAMO}.utils")
    return [] if utils is None else utils.graph_break_reasons
