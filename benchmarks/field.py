"""Is gradscope harmless, and right, on public programs that nobody here wrote?

    python benchmarks/field.py FOLDER [--only NAME ...] [--get] [--again] [--publish]

Runs every program of ``field_programs`` twice from a clone in FOLDER/sources: alone, and under
``gradscope profile --run-to-end``. What both print and the files they write must be alike, but for times. Prints a
table, and exits 1 when a goal is missed: exit codes and losses alike, at most 0.5 % of backward unattributed, at most
2 % without a source line where the program's own code made it.

Results are kept in FOLDER/results.jsonl, one line a program: a run that was interrupted goes on where it was. What each
program said, and its report, lie in FOLDER/runs/NAME.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from _common import ROOT, environment
from _field_run import run_program
from _field_sources import Missing, clone
from _field_table import markdown, missed
from field_programs import PROGRAMS, Program

GITHUB = "https://github.com/{repo}"
PAGE = ROOT / "docs" / "field.md"
MARK = "<!-- what follows is written by benchmarks/field.py --publish -->\n"


def digest(program: Program) -> str:
    return hashlib.sha256(json.dumps(program.signature(), sort_keys=True).encode()).hexdigest()[:16]


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """The last record of each program."""
    if not path.exists():
        return {}
    records = (json.loads(line) for line in path.read_text().splitlines() if line)
    return {record["name"]: record for record in records}


def chosen(programs: tuple[Program, ...], only: list[str] | None) -> list[Program]:
    """The programs asked for; an unknown name ends the command with the names there are."""
    known = {program.name: program for program in programs}
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise SystemExit(f"field.py: no program is called {', '.join(unknown)}. There are:\n  {' '.join(known)}")
    return [known[name] for name in only] if only else list(programs)


def publish(page: Path, table: str) -> None:
    """Replace what an earlier run wrote to the page."""
    head = page.read_text().partition(MARK)[0] if page.exists() else "# Field\n\n"
    page.write_text(head + MARK + "\n" + table)


def run_all(programs: list[Program], arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Run what has no result yet; the records in the list's order, and what could not be run."""
    results = arguments.folder / "results.jsonl"
    known, lacking = read_results(results), []
    for number, program in enumerate(programs, 1):
        record = known.get(program.name)
        if arguments.no_run or (record and record["digest"] == digest(program) and not arguments.again):
            continue
        print(f"[{number}/{len(programs)}] {program.name} …", file=sys.stderr, flush=True)
        try:
            if arguments.get:
                clone(program, arguments.folder / "sources", arguments.origin)
            record = run_program(program, arguments.folder)
        except Missing as missing:
            lacking.append(str(missing))
            print(missing, file=sys.stderr, flush=True)
            continue
        record = {"digest": digest(program), **environment("cpu"), **record}
        print(f"    {'; '.join(missed(record)) or 'ok'}", file=sys.stderr, flush=True)
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        known[program.name] = record
    done = [known[program.name] for program in programs if program.name in known]
    current = {program.name: digest(program) for program in programs}
    return [record for record in done if record["digest"] == current[record["name"]]], lacking


def main(argv: list[str] | None = None, programs: tuple[Program, ...] = PROGRAMS) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "folder", type=Path, metavar="FOLDER", help="where clones and results are kept, beside the project"
    )
    made.add_argument("--only", nargs="+", metavar="NAME", help="run these programs alone")
    made.add_argument("--list", action="store_true", help="print the programs, and run nothing")
    made.add_argument("--get", action="store_true", help="clone repositories that are missing, with git")
    made.add_argument("--origin", default=GITHUB, help="where --get clones from; {repo} or {checkout} is filled in")
    made.add_argument("--no-run", action="store_true", help="run nothing: print the results there are")
    made.add_argument("--again", action="store_true", help="run also what has a result")
    made.add_argument("--publish", action="store_true", help="write the table to docs/field.md")
    arguments = made.parse_args(argv)
    arguments.folder = arguments.folder.resolve()
    wanted = chosen(programs, arguments.only)
    if arguments.list:
        print(
            "\n".join(
                f"{program.name:<28} {program.repo} {program.commit[:12]} {program.folder}: {program.command}"
                for program in wanted
            )
        )
        return 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    records, lacking = run_all(wanted, arguments)
    if records:
        table = markdown(records, environment("cpu"))
        print(table)
        if arguments.publish:
            publish(PAGE, table)
    if lacking:
        print(f"{len(lacking)} of {len(wanted)} programs were not run: what they lack is said above.", file=sys.stderr)
    return int(bool(lacking) or any(missed(record) for record in records))


if __name__ == "__main__":
    sys.exit(main())
