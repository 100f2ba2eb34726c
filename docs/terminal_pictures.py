"""The report of the terminal as README.md and docs/findings.md have it, from a real run.

python docs/terminal_pictures.py gradscope-gpt.json

writes docs/images/terminal.svg, the excerpt between ``<!-- report -->`` in README.md, and the finding between
``<!-- finding -->`` in docs/findings.md. Profile examples/gpt.py on an idle machine for it: a run of unsteady steps
promises no savings.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from gradscope.report import Report, load

REPOSITORY = Path(__file__).parents[1]
WIDTH = 100
# As rich's own frame, but without its fonts: they would be fetched from another site.
FRAME = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, "DejaVu Sans Mono", monospace; font-size: {char_height}px;
  line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: arial, sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def picture(report: Report) -> str:
    """Return the short report as an SVG that asks for nothing from elsewhere."""
    console = Console(
        file=io.StringIO(),
        width=WIDTH,
        force_terminal=True,
        color_system="truecolor",
        record=True,
        highlight=False,
        legacy_windows=False,
    )
    report.print(console)
    command = f"gradscope profile {report.data.workload.target}"
    return console.export_svg(title=command, theme=MONOKAI, code_format=FRAME, unique_id="report")


def excerpt(report: Report) -> str:
    """Return the step, the memory and the first finding, with ``[...]`` where something was left out."""
    head, findings = str(report).split("\n\n")[:2]
    step, memory = (re.search(rf"^{name} .*$", head, re.MULTILINE) for name in ("step", "memory"))
    assert step is not None and memory is not None
    return "\n".join((step[0], memory[0], "[...]", _first(findings, heading=True), "[...]"))


def finding(report: Report) -> str:
    """Return the first finding alone."""
    return _first(str(report).split("\n\n")[1], heading=False)


def _first(section: str, *, heading: bool) -> str:
    title, *lines = section.splitlines()
    rest = (i for i, line in enumerate(lines) if line.startswith(("2. ", "  gradscope show")))
    return "\n".join(([title] if heading else []) + lines[: next(rest, len(lines))])


def put(path: Path, name: str, text: str) -> None:
    """Replace what stands between the marks ``name`` in the file at ``path``."""
    old = path.read_text(encoding="utf-8")
    mark = re.compile(rf"(<!-- {name} -->\n```\n).*?(```\n<!-- /{name} -->)", re.DOTALL)
    new, count = mark.subn(lambda found: f"{found[1]}{text}\n{found[2]}", old)
    if count != 1:
        sys.exit(f"{path}: {count} places between <!-- {name} --> and <!-- /{name} -->")
    path.write_text(new, encoding="utf-8")


def main(run: str) -> None:
    """Write the picture and both excerpts."""
    report = load(run)
    report.path = Path(Path(run).name)  # as it is printed in the folder where it was profiled
    (REPOSITORY / "docs" / "images" / "terminal.svg").write_text(picture(report), encoding="utf-8")
    put(REPOSITORY / "README.md", "report", excerpt(report))
    put(REPOSITORY / "docs" / "findings.md", "finding", finding(report))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/terminal_pictures.py RUN.json")
    main(sys.argv[1])
