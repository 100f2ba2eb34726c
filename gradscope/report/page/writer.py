"""The page as one HTML file: template, style, script and data, and nothing from elsewhere.

The content security policy allows the one style and the one script by their hashes and nothing else, so a name that
looks like markup cannot do anything even if it were not escaped. Data is JSON in a script element of another type.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gradscope.report.page import bundle
from gradscope.report.page.data import page_record
from gradscope.tables import RunData

# What a page begins with; enough to know our own file without reading all of it.
HTML_HEAD = re.compile(r"<!doctype html>\n<!-- gradscope report ")

_TITLE_CHARS = 200
# Inside a script element only "<" could end it; the others would matter in other places of a page,
# and what turns the direction of text would turn the file's own, where it is read as text: the script spells it out.
_UNSAFE = re.compile("[<>&\u2028\u2029\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_SLOT = re.compile(r"\{\{(\w+)\}\}")


def to_html(runs: Sequence[RunData], source: bool = True, comparison: Mapping[str, Any] | None = None) -> str:
    """The page of one run, or with ``comparison`` of the run after and the run before, in this order.

    ``source=False`` leaves the text of source lines out. ``comparison`` is what :mod:`gradscope.compare.page` makes.
    """
    run = runs[0]
    style, script = bundle.style(), bundle.script()
    slots = {
        "version": _comment(run.gradscope),
        "policy": html.escape(_policy(style, script)),
        "title": html.escape(_title(run, compared=comparison is not None)),
        "style": style,
        "data": to_script_json(page_record(runs, source, comparison)),
        "script": script,
    }
    return _SLOT.sub(lambda match: slots[match[1]], bundle.web_file("page.html"))


def to_script_json(record: Any) -> str:
    """``record`` as JSON that can stand inside a script element; raises ``ValueError`` for NaN and infinity."""
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain_number)
    return _UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _plain_number(value: Any) -> Any:
    """Numbers of numpy and torch."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{value!r} of type {type(value).__name__} has no place on the page")


def _policy(style: str, script: str) -> str:
    parts = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",  # the empty icon, without which a browser asks the server for one
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _title(run: RunData, compared: bool) -> str:
    what = "comparison · " if compared else ""
    words = f"{what}{run.workload.model or 'model'} · {run.workload.target} · gradscope"
    return "".join(char if char.isprintable() else "\ufffd" for char in words)[:_TITLE_CHARS]


def _comment(text: str) -> str:
    """``text`` as it can stand in a comment."""
    return re.sub(r"[^\w.+]", "_", text, flags=re.ASCII)
