"""``gradscope merge``: the ranks of one program side by side."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from gradscope.cli.failure import say
from gradscope.cli.options import Color, ColorOption, ForceOption
from gradscope.cli.streams import reader_may_leave, write_json
from gradscope.safe_text import local_path, shown_path

_RANKS_HEAD = re.compile(r'\s*\{\s*"kind":\s*"ranks",\s*"schema_version":\s*\d+')


def merge(
    files: Annotated[
        list[Path], typer.Argument(metavar="RUN.rankN.json...", help="Files that the ranks of one program wrote.")
    ],
    json_path: Annotated[
        str | None, typer.Option("--json", metavar="PATH", help="Write what is found to PATH, or to stdout with -.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Layers a table.")] = 12,
    force: ForceOption = False,
    color: ColorOption = Color.auto,
) -> None:
    """Compare the ranks of one program: which works longest, who waits for it, and in which layer.

    torchrun --nproc-per-node N -m gradscope profile train.py writes
    gradscope-train.rankN.json for each rank.
    """
    from gradscope.ranks import merge as merged_of
    from gradscope.ranks import ranks_document

    merged = merged_of([Path(local_path(path)) for path in files])
    text = json.dumps(merged.to_record(), indent=1) + "\n"
    with reader_may_leave(sys.stdout):
        if json_path == "-":
            write_json(sys.stdout, text)
            return
        from gradscope.document.terminal import make_console, print_document

        print_document(ranks_document(merged, top), make_console(sys.stdout, color.wanted))
    if json_path is not None:
        from gradscope.report.outfile import write_text

        path = Path(local_path(Path(json_path)))
        write_text(path, text, _RANKS_HEAD, force=force)
        say(f"wrote {shown_path(path)}")
