"""Hostile files: seeded mutations of what gradscope writes, texts that attack what shows them, and every renderer."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from gradscope.compare import Diff
from gradscope.compare.budgets import Budgets, LayerLimit, check, percentage
from gradscope.compare.build import compare
from gradscope.compare.checkdocument import check_document
from gradscope.compare.checkdocument import to_json as check_json
from gradscope.compare.page import comparison_html
from gradscope.document.terminal import to_text
from gradscope.errors import UsageError
from gradscope.fixing import FixData, FixReport
from gradscope.fixing.document import fix_document
from gradscope.report import Report
from gradscope.report.csvfile import TABLE_NAMES
from gradscope.report.page import to_html
from gradscope.report.runfile import to_json
from gradscope.tables import RunData

Mutation = Callable[[random.Random, Any], None]

# What a field may be given instead of its value. The long ones stand for numbers that JSON can hold and nobody else.
BIG = 10**400
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        0.5,
        -0.0,
        1e300,
        -1e300,
        5e-324,
        2**31,
        2**53,
        2**63 - 1,
        2**63,
        -(2**63),
        2**64,
    ),
    *(BIG, -BIG, float("inf"), float("-inf"), float("nan"), "", " ", "\0", "0", "x" * 5_000, "9" * 5_000, "h." * 2_000),
    *([], {}, [[]], [None], {"": None}, [1, "2", 3.0], {"a": {"b": []}}),
)
# Texts that do something where they are shown: in a spreadsheet, a terminal, a page, Markdown or plotly.
TEXTS = (
    *("=1+1", "+1+1", "-1+1", "@SUM(A1)", "\t=1", "\r=1", '=HYPERLINK("http://x")', "\uff1d1+1", " =1"),
    *("\x1b[31mred\x1b[0m", "\x1b]8;;http://x\x07y", "\x9b31m", "a\bb", "a\0b", "\x7f", "[bold]x[/bold]", ":smile:"),
    *("<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "<!--", "]]>", "&lt;b&gt;", "{{script}}"),
    *("a|b", "a\\|b", "`", "``` \n```", "# x", "- x", "1. x", "a\nb", "a\r\nb", "[x](http://x)", "**x**", "$x^2$"),
    *("\u202egpj.exe", "a\u2066b\u2069", "\u200f", "\ufeff", "a\u2028b\u2029c", "e\u0301", "\U0001f600", "\ue000"),
    *(
        "\ud800",
        "\udcff.py",
        "a\udfffb",
        "é",
        "漢字",
        "%s%n",
        "%(x)s",
        "{x}",
        "../../etc/passwd",
        "C:\\x",
        "²",
        "x.²",
        "h.07",
    ),
)


def places(record: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value inside ``record``."""
    items = record.items() if isinstance(record, dict) else enumerate(record) if isinstance(record, list) else ()
    for key, value in items:
        yield (*at, key)
        yield from places(value, (*at, key))


def _parent(record: Any, place: tuple[Any, ...]) -> Any:
    for key in place[:-1]:
        record = record[key]
    return record


def _pick(rng: random.Random, record: Any) -> tuple[Any, Any]:
    """A container inside ``record`` and one of its keys; every depth is as likely as any other."""
    found = list(places(record))
    depth = rng.choice(sorted({len(place) for place in found}))
    place = rng.choice([one for one in found if len(one) == depth])
    return _parent(record, place), place[-1]


def _replace(rng: random.Random, record: Any) -> None:
    parent, key = _pick(rng, record)
    parent[key] = copy.deepcopy(rng.choice((*VALUES, *TEXTS)))


def _remove(rng: random.Random, record: Any) -> None:
    parent, key = _pick(rng, record)
    del parent[key]


def _repeat(rng: random.Random, record: Any) -> None:
    """One row, or one value, twice: a duplicate of a layer, or a key with another one's value."""
    parent, key = _pick(rng, record)
    if isinstance(parent, list):
        parent.insert(rng.randrange(len(parent) + 1), copy.deepcopy(parent[key]))
    else:
        parent[rng.choice(list(parent))] = copy.deepcopy(parent[key])


def _move(rng: random.Random, record: Any) -> None:
    """A part of the file stands where another one was."""
    parent, key = _pick(rng, record)
    value = copy.deepcopy(parent[key])
    parent, key = _pick(rng, record)
    parent[key] = value


def _nest(rng: random.Random, record: Any) -> None:
    parent, key = _pick(rng, record)
    for _ in range(rng.choice((1, 3, 80, 400))):
        parent[key] = [parent[key]] if rng.random() < 0.5 else {"a": parent[key]}


def _number(rng: random.Random, record: Any) -> None:
    """A number a little or far off, of its own type: sums may hold or not."""
    found = [place for place in places(record) if type(_parent(record, place)[place[-1]]) in (int, float)]
    if found:
        place = rng.choice(found)
        parent = _parent(record, place)
        parent[place[-1]] = rng.choice((0, 1, -1, 2**53, 2**62, parent[place[-1]] * 1000, -parent[place[-1]]))


def _scale(rng: random.Random, record: Any) -> None:
    """All whole numbers times one factor: every sum still holds."""
    factor = rng.choice((0, 1000, 10**6, 10**12, -1))
    for place in list(places(record)):
        parent = _parent(record, place)
        if type(parent[place[-1]]) is int and "line" not in place[-1:] and place != ("schema_version",):
            parent[place[-1]] *= factor


def _texts(rng: random.Random, record: Any) -> None:
    """Some of the texts, wherever the same one stands: layers keep their rows."""
    share = rng.choice((0.02, 0.2, 1.0))
    found = {place: _parent(record, place)[place[-1]] for place in places(record)}
    texts = sorted({text for text in found.values() if isinstance(text, str) and text})
    other = {text: rng.choice(TEXTS) + rng.choice(("", text)) for text in texts if rng.random() < share}
    for place, text in found.items():
        if isinstance(text, str) and text in other:
            _parent(record, place)[place[-1]] = other[text]


def _layers(record: Any) -> list[dict[str, Any]]:
    """The rows of layers that other mutations left as rows."""
    rows = record.get("layers")
    return (
        [row for row in rows if isinstance(row, dict) and isinstance(row.get("path"), str)]
        if isinstance(rows, list)
        else []
    )


def _parents(rng: random.Random, record: Any) -> None:
    """Layers in another tree: cycles, lost parents, a chain as deep as there are rows."""
    rows = _layers(record)
    if not rows:
        return
    paths = [row["path"] for row in rows]
    for row in rng.sample(rows, rng.randint(1, len(rows))):
        row["parent"] = rng.choice((*paths, "gone", "gone.h.1", None, row["path"]))


def _chain(rng: random.Random, record: Any) -> None:
    """Layers without a cost of their own, each inside the one before, hung below one that there is."""
    rows = _layers(record)
    if not rows:
        return
    above = rows[rng.randrange(len(rows))]["path"]
    numbers = {key: 0 for key, value in rows[0].items() if type(value) in (int, float)}
    for _ in range(rng.choice((1, 30, 120, 1_500))):
        path = f"{above}.0" if above else "0"
        record["layers"].append({"path": path, "class": "Sequential", "parent": above, **numbers})
        above = path


def _lengths(rng: random.Random, record: Any) -> None:
    """A list longer or shorter than those it belongs with."""
    found = [place for place in places(record) if isinstance(_parent(record, place)[place[-1]], list)]
    if found:
        place = rng.choice(found)
        values = _parent(record, place)[place[-1]]
        _parent(record, place)[place[-1]] = rng.choice((values[:-1], values[1:], values[::-1], values * 2, []))


def _names(rng: random.Random, record: Any) -> None:
    """A key by another name, hostile or one that there is."""
    parent, key = _pick(rng, record)
    if isinstance(parent, dict):
        parent[rng.choice((*TEXTS, *parent))] = parent.pop(key)


MUTATIONS: tuple[Mutation, ...] = (
    *(_replace, _replace, _remove, _repeat, _move, _nest, _number, _scale, _texts, _texts, _parents, _chain),
    *(_lengths, _names),
)


def hostile_texts(rng: random.Random, record: Any) -> Any:
    """``record`` with a hostile text for each text that the schema does not choose, the same one for the same text."""
    record = copy.deepcopy(record)
    texts: dict[str, str] = {}
    for place in list(places(record)):
        parent = _parent(record, place)
        text = parent[place[-1]]
        if isinstance(text, str) and place[-1] not in _CHOSEN:
            parent[place[-1]] = texts.setdefault(text, rng.choice(TEXTS) + rng.choice(("", text)))
    return record


# Keys whose texts the schema or the phases of a step choose.
_CHOSEN = (
    "mode",
    "loss",
    "severity",
    "phase",
    "path",
    "parent",
    "layer",
    "owner",
    "category",
    "peak_phase",
    "status",
    "measured",
    "kind",
)


def damage_text(rng: random.Random, text: str) -> bytes:
    """The text cut off, with bytes that are wrong, doubled, missing or no UTF-8."""
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    at, to = sorted(rng.randrange(len(data)) for _ in range(2))
    kind = rng.randrange(5)
    if kind == 0:
        return bytes(data[:at])
    if kind == 1:
        return bytes(data[:at] + data[to:])
    if kind == 2:
        return bytes(data[:to] + data[at:])
    for _ in range(rng.choice((1, 1, 5))):
        data[rng.randrange(len(data))] = rng.randrange(256) if kind == 3 else rng.choice(b'0123456789-.eE[]{}",:tfn')
    return bytes(data)


def mutant(rng: random.Random, record: Any) -> bytes:
    """One hostile file, made of ``record``."""
    record = copy.deepcopy(record)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(MUTATIONS)(rng, record)
        if not isinstance(record, dict) or not record:
            break
    text = json.dumps(record, ensure_ascii=rng.random() < 0.5)
    return damage_text(rng, text) if rng.random() < 0.15 else text.encode("utf-8", "backslashreplace")


# --------------------------------------------------------------------------------------------------------------------
# Renderers
# --------------------------------------------------------------------------------------------------------------------


def render_run(run: RunData) -> dict[str, str]:
    """``run`` as every format that a report has; a figure that has nothing to show is left out."""
    report = Report(run, "run.json")
    found = {"terminal": str(report), "repr": repr(report), "notebook": report._repr_html_()}
    for options in ({"sort": "memory", "top": 2}, {"sort": "ratio", "depth": 1, "min_percent": 0}):
        found[f"narrow {options}"] = to_text(report.document(**options), width=40, encoding="ascii")
    found |= {"markdown": report.to_markdown(), "speedscope": report.to_speedscope(), "json": to_json(run)}
    found |= {f"csv {name}": report.to_csv(name) for name in TABLE_NAMES}
    found["page"] = to_html([run])
    for name in (*TABLE_NAMES, "step"):
        found[f"frame {name}"] = repr(getattr(report, name).shape)
    for metric in ("backward", "forward", "both", "saved"):
        found |= _figure(metric, lambda metric=metric: report.flamegraph(metric, merge=metric == "both"))  # type: ignore[misc]
    return found | _figure("memory", report.memory_timeline)


def render_diff(before: RunData, after: RunData) -> dict[str, str]:
    """The comparison as every format that it has."""
    found = Diff(compare(before, after, ("before.json", "after.json")))
    texts = {"terminal": str(found), "repr": repr(found), "notebook": found._repr_html_(), "json": found.to_json()}
    texts |= {"markdown": found.to_markdown(), "narrow": _diff_text(found), "page": comparison_html(found.data)}
    for name in ("totals", "layers", "changed", "new", "removed"):
        texts[f"frame {name}"] = repr(getattr(found, name).shape)
    for metric in ("backward", "both", "saved"):
        texts |= _figure(metric, lambda metric=metric: found.flamegraph(metric))  # type: ignore[misc]
    return texts


def _diff_text(found: Diff) -> str:
    return to_text(found.document(sort="ratio", within_noise=True), width=40, encoding="ascii")


def render_check(run: RunData, baseline: RunData) -> dict[str, str]:
    """The outcome of a check of all kinds of limits; what it cannot check is an error of its own."""
    five = percentage("5%", "x")
    texts = {}
    for number, budgets in enumerate(
        (Budgets(five, (LayerLimit("**", five),), five, 10**9, 10**9), Budgets(five), Budgets(peak_bytes=1))
    ):
        try:
            checked = check(run, baseline, budgets, ("run.json", "baseline.json"))
        except UsageError as error:
            texts[f"error {number}"] = str(error)
            continue
        texts[f"check {number}"] = to_text(check_document(checked), 80)
        texts[f"check json {number}"] = check_json(checked)
    return texts


def render_fix(fix: FixData) -> dict[str, str]:
    """The fix as every format that it has."""
    report = FixReport(fix, None, None, ())
    narrow = to_text(fix_document(fix, "run.diff"), 40, "ascii")
    return {"terminal": str(report), "narrow": narrow, "json": report.to_json(), "repr": repr(report)}


def _figure(name: str, make: Callable[[], Any]) -> dict[str, str]:
    try:
        return {f"figure {name}": make().to_json()}
    except UsageError as error:  # nothing of it was measured
        return {f"figure {name}": str(error)}


class NoPlotly:
    """Stands for ``plotly.graph_objects``, which takes most of a figure's time: takes every call and draws nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    data = ()

    def to_json(self) -> str:
        """Nothing."""
        return ""
