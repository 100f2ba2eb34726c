"""Registers, spills and shared memory of the Triton kernels for an H100, from compiling them; needs no GPU.

    python benchmarks/registers.py [--only REGEX] [--target 90] [--json] [--write benchmarks/results/registers.md]

A kernel is compiled as its launcher would launch it, for causal attention and the widths of common models. Spills slow
a loop down, and more than 255 registers a thread there are not. Exit code 1 where one spills that is not in SPILLS.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # before triton is imported

import triton
from _register_cases import SPILLS, KernelCase, all_cases
from _resources import Resources, resources

_COLUMNS = ("kernel", "for", "tile", "warps", "stages", "registers", "spilled bytes", "shared bytes")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print, and say by the exit code whether a kernel spills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="REGEX", help='of "kernel, for"')
    parser.add_argument("--target", type=int, default=90, help="compute capability, times ten")
    parser.add_argument("--json", action="store_true", help="a JSON object a kernel, and no table")
    parser.add_argument("--write", type=Path, metavar="FILE", help="the table, as markdown")
    options = parser.parse_args(arguments)
    cases = [case for case in all_cases(options.target) if re.search(options.only, f"{case.kernel}, {case.of}")]
    if not cases:
        print(f"no kernel has a name like {options.only!r}", file=sys.stderr)
        return 2
    found: list[tuple[KernelCase, Resources]] = []
    for case in cases:
        found.append((case, resources(case.function, case.given, case.warps, case.stages, options.target)))
        if options.json:
            named = {"kernel": case.kernel, "for": case.of, "warps": case.warps, "stages": case.stages}
            print(json.dumps({**named, "tile": case.tile, **asdict(found[-1][1])}), flush=True)
        else:
            print("  ".join(_cells(*found[-1])), flush=True)
    if options.write is not None:
        options.write.write_text("\n".join(_page(found, options.target)) + "\n")
    return int(any(each.spilled_bytes for case, each in found if (case.kernel, case.of) not in SPILLS))


def _cells(case: KernelCase, found: Resources) -> tuple[str, ...]:
    numbers = (case.warps, case.stages, found.registers, found.spilled_bytes, found.shared_bytes)
    return (case.kernel, case.of, case.tile, *(f"{number:,}" for number in numbers))


def _page(found: Sequence[tuple[KernelCase, Resources]], target: int) -> Iterator[str]:
    yield "# Registers, spills and shared memory of the Triton kernels"
    yield ""
    yield f"Compiled for sm_{target} by triton {triton.__version__} (`python benchmarks/registers.py --write FILE`);"
    yield "no GPU took part. Registers are a thread's, of which there are 255, and so are spilled bytes,"
    yield "written and read in all of the program's text. Shared bytes are a program's, of 232,448. A tile is queries x"
    yield "keys of attention, rows x features elsewhere."
    yield ""
    yield f"| {' | '.join(_COLUMNS)} |"
    yield "|" + "---|" * 3 + "---:|" * 5
    for each in found:
        yield f"| {' | '.join(_cells(*each))} |"


if __name__ == "__main__":
    sys.exit(main())
