"""Runs one program of the field list alone and profiled, and says what differs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from _field_compare import Same, compare_files, compare_text, file_sums, new_lines, split_report
from _field_sources import check_ready, export
from field_programs.program import INSTALLED, Program

START = Path(__file__).with_name("_field_start.py")
QUIET = {
    "PYTHONHASHSEED": "0",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MPLBACKEND": "Agg",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TQDM_MININTERVAL": "0",
    "TQDM_MINITERS": "1",
    "COLUMNS": "100",
}


# How often a program that prints something else is run alone again: rounding may depend on where memory lies.
RUNS_ALONE = 5
# The folder that importing torch._dynamo makes: torch does so at the first use of most optimizers.
TORCH_CACHE = "torchinductor_"


@dataclass(frozen=True)
class Ran:
    """One process: how it ended, what it said, what it left, and what it took."""

    exit: int
    timed_out: bool
    stdout: str
    stderr: str
    files: dict[str, str]
    temporary: tuple[str, ...]
    wall_s: float
    processor_s: float
    peak_bytes: int
    load: float


def command_alone(program: Program) -> list[str]:
    if program.seed is None:
        return [sys.executable, *program.arguments]
    return [sys.executable, str(START), str(program.seed), *program.arguments]


def command_profiled(program: Program, output: Path, extra: Sequence[str] = ()) -> list[str]:
    module = ["-m"] if program.arguments[0] == "-m" else []
    target, *arguments = program.arguments[len(module) :]
    seed = [] if program.seed is None else ["--seed", str(program.seed)]
    counts = ["--steps", str(program.steps), "--warmup", str(program.warmup)]
    to_end = [] if program.endless else ["--run-to-end"]
    options = [*to_end, "--force", "-o", str(output), *counts, *seed, *extra]
    return [sys.executable, "-m", "gradscope", "profile", *options, *module, target, "--", *arguments]


def run_process(
    program: Program, command: Sequence[str], place: Path, folder: Path, limit_s: float, enough: int | None = None
) -> Ran:
    """Run ``command`` in ``place`` with its own temporary folder; a group of processes that ends with it.

    With ``enough`` it is ended once it has printed so many bytes.
    """
    temporary = folder.parent / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    environment = {**os.environ, **QUIET, **threads, "TMPDIR": str(temporary), **program.environment}
    load = os.getloadavg()[0]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.monotonic()
    out, err = folder.parent / "stdout", folder.parent / "stderr"
    with out.open("wb") as to_out, err.open("wb") as to_err:
        process = subprocess.Popen(
            command,
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=to_out,
            stderr=to_err,
            start_new_session=True,
        )
        late = threading.Event()
        timer = threading.Timer(
            limit_s * max(1.0, load / (os.cpu_count() or 1)), lambda: (late.set(), _end(process.pid))
        )
        timer.start()
        if enough is not None:
            _end_after(process, out, enough)
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
    _end(process.pid)
    wall = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Ran(
        exit=process.returncode,
        timed_out=late.is_set(),
        stdout=out.read_text(errors="replace"),
        stderr=err.read_text(errors="replace"),
        files=file_sums(folder),
        temporary=tuple(sorted(path.name for path in temporary.iterdir())),
        wall_s=wall,
        processor_s=(after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime),
        peak_bytes=usage.ru_maxrss * 1024,
        load=load,
    )


def _end_after(process: subprocess.Popen[bytes], out: Path, enough: int) -> None:
    """End the process when it has printed ``enough`` bytes; it may also end by itself."""
    while (
        out.stat().st_size < enough and os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    ):
        time.sleep(0.1)
    _end(process.pid)


def _end(group: int) -> None:
    """End what a program started and left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def run_program(program: Program, folder: Path) -> dict[str, Any]:
    """Run it alone and profiled from the same place, and return the record that is kept and shown."""
    source = check_ready(program, folder / "sources")
    work, kept = folder / "work" / program.name / "tree", folder / "runs" / program.name
    kept.mkdir(parents=True, exist_ok=True)

    def fresh_run(command: Sequence[str], limit_s: float, enough: int | None = None) -> tuple[dict[str, str], Ran]:
        place = export(program, source, work)
        return file_sums(work), run_process(program, command, place, work, limit_s, enough)

    if program.endless:
        before, profiled = fresh_run(command_profiled(program, kept / "run"), 3 * program.limit_s + 60)
        printed, report = split_report(profiled.stdout)
        _, alone = fresh_run(command_alone(program), program.limit_s, enough(printed))
        alone = cut_to(alone, printed)
    else:
        before, alone = fresh_run(command_alone(program), program.limit_s)
        _, profiled = fresh_run(command_profiled(program, kept / "run"), 3 * program.limit_s + 60)
        printed, report = split_report(profiled.stdout)
    texts = {
        "alone.out": alone.stdout,
        "alone.err": alone.stderr,
        "profiled.out": printed,
        "profiled.err": profiled.stderr,
    }
    for name, text in {**texts, "report.txt": report}.items():
        (kept / name).write_text(text)
    prints = compare_text(alone.stdout, printed, program.varies)
    varying = ("*",) if program.endless else program.files_vary
    files = compare_files(before, alone.files, profiled.files, varying, program.varies)
    record = _record(program, alone, profiled, prints, files)
    if not (prints.alike and files.alike) and alone.exit == profiled.exit:
        record["varies_alone"] = False
        for _ in range(RUNS_ALONE):
            _, again = fresh_run(command_alone(program), program.limit_s, enough(printed) if program.endless else None)
            again = cut_to(again, printed) if program.endless else again
            steady = compare_text(alone.stdout, again.stdout, program.varies).alike
            if not (steady and compare_files(before, alone.files, again.files, varying, program.varies).alike):
                record["varies_alone"] = True
                break
    record.update(_measured(kept / "run.json"))
    shutil.rmtree(work.parent, ignore_errors=True)
    (kept / "record.json").write_text(json.dumps(record, indent=1))
    return record


def enough(printed: str) -> int:
    """Bytes after which an endless program has surely printed these lines again, even with shorter times."""
    return 5 * len(printed.encode()) // 4 + 1000


def cut_to(alone: Ran, printed: str) -> Ran:
    """The run of an endless program as if it had stopped after as many lines as the profiled one printed."""
    lines = alone.stdout.splitlines(keepends=True)[: len(printed.splitlines())]
    return replace(alone, stdout="".join(lines), exit=0 if alone.exit == -signal.SIGKILL else alone.exit)


def left_behind(alone: Sequence[str], profiled: Sequence[str]) -> list[str]:
    """Temporary files that only the profiled run leaves; names that tempfile draws count by what is before them."""
    counts = [
        Counter(re.sub(r"[a-z0-9_]{8}$", "#", name) for name in names if not name.startswith(TORCH_CACHE))
        for names in (alone, profiled)
    ]
    return sorted(counts[1] - counts[0])


def _record(program: Program, alone: Ran, profiled: Ran, prints: Same, files: Same) -> dict[str, Any]:
    left = left_behind(alone.temporary, profiled.temporary)
    return {
        "name": program.name,
        "repo": program.repo,
        "commit": importlib.metadata.version(program.commit) if program.repo == INSTALLED else program.commit,
        "command": program.command,
        "folder": program.folder,
        "library": program.library,
        "endless": program.endless,
        "exit_expected": program.exits,
        "exit_alone": "time limit" if alone.timed_out else alone.exit,
        "exit_profiled": "time limit" if profiled.timed_out else profiled.exit,
        "numbers": prints.said,
        "files": files.said,
        "prints_alike": prints.alike,
        "files_alike": files.alike,
        "difference": "\n".join(part for part in (prints.difference, files.difference) if part),
        "left_behind": left,
        "stderr_added": new_lines(alone.stderr, profiled.stderr, program.varies)[:20],
        "wall_alone_s": round(alone.wall_s, 2),
        "wall_profiled_s": round(profiled.wall_s, 2),
        "processor_alone_s": round(alone.processor_s, 2),
        "processor_profiled_s": round(profiled.processor_s, 2),
        "peak_alone_bytes": alone.peak_bytes,
        "peak_profiled_bytes": profiled.peak_bytes,
        "load": round(max(alone.load, profiled.load), 1),
        "cpus": os.cpu_count(),
    }


def _measured(path: Path) -> dict[str, Any]:
    """What the report's file says, read as plain JSON; nothing where none was written."""
    if not path.exists():
        return {"measured": False}
    run = json.loads(path.read_text())
    ledger, backward = run["ledger"], run["ledger"]["backward_ns"]
    # AccumulateGrad belongs to a tensor, not to a line: of the layers' parameters it is a part of its own.
    loose = sum(op["self_ns"] for op in run["ops"] if op["phase"] == "accumulate" and not op.get("layer"))
    nodes = ledger["layers_ns"] + ledger["outside_modules_ns"] - loose
    lined = sum(row.get("backward_ns") or 0 for row in run["lines"])
    return {
        "measured": True,
        "partial": run["partial"],
        "steps": run["workload"]["steps"],
        "model": run["workload"].get("model", ""),
        "batch": run["workload"].get("batch", ""),
        "backward_ns": backward,
        "wall_ns": run["step"]["wall_ns"],
        "layers": len(run["layers"]),
        "unattributed": ledger["unattributed_ns"] / backward if backward else None,
        "no_line": max(0, nodes - lined) / backward if backward else None,
        "outside": ledger["outside_modules_ns"] / backward if backward else None,
        "recompute": ledger["recompute_ns"] / backward if backward else None,
        "overhead": run["step"].get("overhead"),
        "notes": run["notes"],
        "findings": [f"{finding['severity']} {finding['rule']}" for finding in run["findings"]],
        "memory": run.get("memory") is not None,
    }
