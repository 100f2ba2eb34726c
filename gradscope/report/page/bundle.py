"""The modules below ``web/src`` -> one script, joined when a page is written.

There is no build step and no built file that could be out of date: the modules are ES modules that import each other
by name, so that their order follows from the imports, and taking ``import`` and ``export`` away leaves one script,
without the annotations of types.
This needs two things of them, and both are checked: imports have the form ``import { a, b } from "./x.js"``, and no
two modules declare the same name at their top level.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from importlib import resources

ENTRY = "main.js"

_IMPORT = re.compile(r'^import \{(?P<names>[^}]*)\} from "\./(?P<file>[\w-]+\.js)";\n', re.MULTILINE)
# What is for those who read the modules, a quarter of their size; and casts inside a line.
_ANNOTATION = re.compile(r"^ *(?:/\*\*(?:[^*]|\*(?!/))*\*/|// [^\n]*)\n", re.MULTILINE)
_CAST = re.compile(r"/\*\* @type \{(?:[^*\n]|\*(?!/))*\} \*/ ")
# Indents and empty lines. What is indented in a text of several lines stands in HTML, where it is one space.
_INDENTED = re.compile(r"^ +|^\n", re.MULTILINE)
# The end of a line in the middle of a list, on a line without a comment.
_WRAPPED = re.compile(r"^((?:(?!//).)*[(\[{,])\n", re.MULTILINE)
_BROKEN = re.compile(r"(?<=[{;,])\n")
_REMARK = re.compile(r"/\*.*?\*/", re.DOTALL)
_SPACED = re.compile(r"(?<=[\w-]): ")
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", re.MULTILINE)
_DECLARED = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class)\*? (\w+)", re.MULTILINE)
# Names that are taken apart would not be seen by the line above.
_TAKEN_APART = re.compile(r"^(?:export )?(?:const|let) [\[{].*", re.MULTILINE)


class BundleError(AssertionError):
    """The modules of the page cannot be joined: a defect of gradscope."""


def web_file(name: str) -> str:
    """A file of ``web/src`` as text."""
    return resources.files("gradscope.report.page").joinpath("web", "src", name).read_text(encoding="utf-8")


@functools.cache
def style() -> str:
    """The page's style sheet."""
    return _SPACED.sub(":", _BROKEN.sub("", _INDENTED.sub("", _REMARK.sub("", web_file("style.css")))))


@functools.cache
def script() -> str:
    """The page's script."""
    return join(dict(_reachable(ENTRY, {})))


def join(modules: Mapping[str, str]) -> str:
    """One script of ``modules``, given by file name in the order in which they are to run."""
    owners: dict[str, str] = {}
    parts = []
    for name, text in modules.items():
        for declared in _DECLARED.findall(text):
            if owners.setdefault(declared, name) != name:
                raise BundleError(f"{name} and {owners[declared]} both declare {declared}: rename one of them.")
        if apart := _TAKEN_APART.search(text):
            raise BundleError(f"{name} declares several names at once at its top level: {apart[0]}")
        body = _EXPORT.sub("", _IMPORT.sub("", _CAST.sub("", _ANNOTATION.sub("", text))))
        if left := re.search(r"^(?:import|export)\b.*", body, re.MULTILINE):
            raise BundleError(f"{name} cannot be joined with the others: {left[0]}")
        body = _WRAPPED.sub(r"\1", _INDENTED.sub("", body))
        parts.append(f"// {name}\n{body}")
    return '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"


def _reachable(name: str, seen: dict[str, bool]) -> Iterator[tuple[str, str]]:
    """``name`` and all it imports, imports first; ``seen`` says of each whether it was given."""
    if name in seen:
        if not seen[name]:
            raise BundleError(f"{name} imports itself by way of others.")
        return
    seen[name] = False
    text = web_file(name)
    for match in _IMPORT.finditer(text):
        if " as " in match["names"]:
            raise BundleError(f"{name} renames what it imports from {match['file']}.")
        yield from _reachable(match["file"], seen)
    seen[name] = True
    yield name, text
