"""Runs the worker, and another one after it where a way took it down: by a crash, a lost device or no end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE_SECONDS = 100.0  # without a line: the compiler may take long, nothing else does
SECONDS_TO_END = 20.0  # to give its memory back
MOST_RESTARTS = 8

Line = dict[str, Any]


def supervise(
    command: Callable[[Line], list[str]], order: Line, problems: int, *, patience: float = PATIENCE_SECONDS
) -> Iterator[Line]:
    """The worker's lines "limits" and "figures"; "lost" with "why" for a problem that could not be measured.

    Args:
        command: makes of an order (see worker.py) the command to run.
        order: the first.
        problems: how many there are.
        patience: seconds without a line after which a worker is ended.
    """
    order = {**order, "skip": list(order["skip"])}
    why = ""
    for _ in range(MOST_RESTARTS + 1):
        last: Line = {}
        with tempfile.TemporaryFile() as errors:
            process = subprocess.Popen(command(order), stdout=subprocess.PIPE, stderr=errors)
            try:
                for last in _lines(process, patience):
                    if "limits" in last:
                        order["limits"] = last["limits"]
                    if "index" in last:
                        order["start"] = last["index"] + 1
                    if "begin" not in last:
                        yield last
                ended = f"ended with {process.wait(SECONDS_TO_END)}"
            except (TimeoutError, subprocess.TimeoutExpired):
                ended = "did not go on"
            finally:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines()[-1:]
        if order["start"] >= problems:
            return
        why = f"its process {ended}" + "".join(f": {text}" for text in said)[:100]
        if last.get("way"):  # while this way was made ready: all others can still be measured
            order["skip"].append([last["begin"], last["way"], why])
        else:  # while they were timed in turns, or between two problems
            yield {"lost": order["start"], "why": why}
            order["start"] += 1
            if order["start"] >= problems:
                return
    for index in range(order["start"], problems):
        yield {"lost": index, "why": f"too many processes ended; of the last one, {why}"}


def _lines(process: subprocess.Popen[bytes], patience: float) -> Iterator[Line]:
    """The lines that the process writes, until it ends; ``TimeoutError`` where it says nothing for too long."""
    assert process.stdout is not None
    file, held, heard = process.stdout.fileno(), b"", time.monotonic()
    while True:
        readable, _, _ = select.select([file], [], [], min(patience, 1.0))
        if not readable:
            if process.poll() is not None:
                return  # what it started may live on, and keep the pipe open
            if time.monotonic() - heard >= patience:
                raise TimeoutError
            continue
        heard = time.monotonic()
        read = os.read(file, 1 << 16)
        if not read:
            return
        *whole, held = (held + read).split(b"\n")
        for text in whole:
            if text.startswith(b"{"):  # libraries print too
                yield json.loads(text)
