"""Limits that a run is held against, and the result of each: ok, over, or inconclusive where noise hides the limit."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from gradscope import units
from gradscope.compare import messages
from gradscope.compare.build import compare
from gradscope.compare.changes import Change, Comparison
from gradscope.errors import UsageError
from gradscope.safe_text import cut, visible
from gradscope.tables import RunData

Result = Literal["ok", "inconclusive", "over"]


@dataclass(frozen=True, slots=True)
class LayerLimit:
    """How much slower the backward of some layers may get, with all below them."""

    glob: str
    regression: Fraction  # 1/20 is 5 %

    def matches(self, path: str) -> bool:
        """``*`` stands for any text without a dot, ``**`` for any text, ``?`` for one character but a dot."""
        return bool(re.fullmatch("".join(_GLOB.get(part, re.escape(part)) for part in _PARTS.findall(self.glob)), path))


_PARTS = re.compile(r"\*\*|.", re.DOTALL)
_GLOB = {"**": ".*", "*": "[^.]*", "?": "[^.]"}


@dataclass(frozen=True, slots=True)
class Budgets:
    """What is asked of a run; ``None`` is no limit."""

    regression: Fraction | None = None  # of the backward pass of the step
    layers: Sequence[LayerLimit] = ()  # of several that match a layer the last one counts
    memory_regression: Fraction | None = None  # of the peak, and of what is saved for backward
    peak_bytes: int | None = None
    saved_bytes: int | None = None

    @property
    def need_baseline(self) -> bool:
        """Check that a limit asks for a run to compare with."""
        return self.regression is not None or bool(self.layers) or self.memory_regression is not None

    @property
    def empty(self) -> bool:
        """Check that no limit is set."""
        return not self.need_baseline and self.peak_bytes is None and self.saved_bytes is None


@dataclass(frozen=True, slots=True)
class Judged:
    """One value held against one limit."""

    result: Result
    layer: str | None  # path; None: the whole step
    change: Change  # ``before`` is None for a limit that has no baseline
    limit: int  # the largest value that is within it, in the change's unit
    allowed: Fraction | None  # the regression it was given as; None for an absolute limit

    @property
    def visible(self) -> float | None:
        """Return the smallest regression that these runs can show, as a share of the baseline; None: not known."""
        if not self.change.before or self.change.noise is None:
            return None
        return self.change.noise / self.change.before


@dataclass(frozen=True, slots=True)
class Checked:
    """A run held against all limits."""

    run: RunData
    names: tuple[str, str | None]  # of the run, and of the baseline
    comparison: Comparison | None  # with the baseline, where there is one
    judged: Sequence[Judged]  # what is over first
    notes: Sequence[str]

    @property
    def over(self) -> Sequence[Judged]:
        """The limits that are exceeded: what makes the check fail."""
        return [one for one in self.judged if one.result == "over"]

    @property
    def inconclusive(self) -> Sequence[Judged]:
        """The limits that noise hides: what makes a strict check fail."""
        return [one for one in self.judged if one.result == "inconclusive"]


def check(run: RunData, baseline: RunData | None, budgets: Budgets, names: tuple[str, str | None]) -> Checked:
    """Hold ``run`` against ``budgets``; ``names`` are what the reader calls the run and the baseline.

    Raises:
        UsageError: there is no limit; a limit needs a baseline, or a memory, or more steps, and there is none; a glob
            matches no layer that both runs have.
    """
    if budgets.empty:
        raise UsageError(
            "nothing to check: no limit is given.\n"
            "Give --max-regression 5%, --max-memory-regression 2%, --max-peak 6GiB or --max-saved 2GiB."
        )
    if budgets.need_baseline and baseline is None:
        raise UsageError(
            "a regression needs a run to compare with.\nGive --baseline BASELINE.json, written by gradscope profile."
        )
    comparison = None if baseline is None else compare(baseline, run, (names[1] or "baseline", names[0]))
    judged: list[Judged] = []
    notes: list[str] = []
    if comparison is not None:
        _require_steps(comparison, budgets)
        if budgets.regression is not None:
            judged.append(_judge(_total(comparison, "backward_ns"), None, budgets.regression))
        judged += _layers(comparison, budgets, notes)
        judged += _memory_regressions(comparison, budgets)
    judged += _amounts(run, names[0], budgets)
    order = {"over": 0, "inconclusive": 1, "ok": 2}
    return Checked(run, names, comparison, sorted(judged, key=lambda one: order[one.result]), notes)


def _require_steps(comparison: Comparison, budgets: Budgets) -> None:
    if budgets.regression is None and not budgets.layers:
        return
    for run, name in zip((comparison.before, comparison.after), comparison.names, strict=True):
        if run.workload.steps < 2:
            raise UsageError(
                f"{name} has one measured step, so its noise is unknown.\nProfile again with --steps 5 or more."
            )


def _layers(comparison: Comparison, budgets: Budgets, notes: list[str]) -> Iterator[Judged]:
    for limit in budgets.layers:
        _require_layer(comparison, limit)
    missing: dict[str, list[str]] = {"new": [], "removed": []}
    for layer in comparison.layers:
        limits = [limit for limit in budgets.layers if limit.matches(layer.path)]
        if limits and layer.status == "matched":
            yield _judge(layer.changes["backward_total_ns"], layer.path, limits[-1].regression)
        elif limits:
            missing[layer.status].append(layer.path)
    for status, where in (("new", "baseline"), ("removed", "run")):
        if missing[status]:
            notes.append(f"not in the {where}, so not checked: {messages.named(missing[status])}")


def _require_layer(comparison: Comparison, limit: LayerLimit) -> None:
    """Raise UsageError unless a layer of both runs is held to the limit: a renamed one would pass whatever it took."""
    found = [layer for layer in comparison.layers if limit.matches(layer.path)]
    if not found:
        raise UsageError(_no_layer(limit.glob, [layer.path for layer in comparison.layers]))
    if not any(layer.status == "matched" for layer in found):
        names = [
            name
            for name, status in zip(comparison.names, ("removed", "new"), strict=True)
            if any(layer.status == status for layer in found)
        ]
        raise UsageError(
            f"--max-regression: {_shown(limit.glob)} is no layer of both runs, only of {' and of '.join(names)}.\n"
            "Name the layer as both have it, or profile a new baseline."
        )


def _no_layer(glob: str, paths: Sequence[str]) -> str:
    named = [path for path in paths if path]
    longer = [path for path in named if LayerLimit(f"**.{glob}", Fraction(0)).matches(path)]
    close = longer[:1] or difflib.get_close_matches(glob, named, n=1) or named[:1]
    hint = (
        f"A glob is for the whole path, such as {_shown(close[0])}; * stands for one part, ** for any." if close else ""
    )
    return f"--max-regression: no layer of either run matches {_shown(glob)}.\n{hint}".rstrip()


def _memory_regressions(comparison: Comparison, budgets: Budgets) -> Iterator[Judged]:
    if budgets.memory_regression is None:
        return
    for run, name in zip((comparison.before, comparison.after), comparison.names, strict=True):
        _require_memory(run, name)
    for metric in ("peak_bytes", "saved_bytes"):
        yield _judge(_total(comparison, metric), None, budgets.memory_regression)


def _amounts(run: RunData, name: str, budgets: Budgets) -> Iterator[Judged]:
    for metric, limit in (("peak_bytes", budgets.peak_bytes), ("saved_bytes", budgets.saved_bytes)):
        if limit is not None:
            _require_memory(run, name)
            used = int(getattr(run.memory, metric))
            yield Judged("over" if used > limit else "ok", None, Change(metric, "bytes", None, used, 0), limit, None)


def _require_memory(run: RunData, name: str) -> None:
    if run.memory is None:
        raise UsageError(f"{name} has no memory to check: it was not measured.\nProfile again without --no-memory.")


def _total(comparison: Comparison, metric: str) -> Change:
    found = next((change for change in comparison.totals if change.metric == metric), None)
    return found or Change(metric, "bytes", 0, 0, 0)  # zero in both runs, which is not listed


def _judge(change: Change, layer: str | None, allowed: Fraction) -> Judged:
    """Hold a change against a regression that is allowed.

    Noise hides the limit where it is wider than what is allowed: a regression between the two cannot be told from none.
    A run so much faster that noise does not lift it over the limit is within it all the same.
    """
    assert change.before is not None and change.after is not None
    limit = int(change.before * (1 + allowed))
    noise = change.noise
    if change.after > limit and change.real:
        return Judged("over", layer, change, limit, allowed)
    hidden = noise is None or (noise > limit - change.before and change.after + noise > limit)
    return Judged("inconclusive" if hidden else "ok", layer, change, limit, allowed)


def percentage(text: object, name: str) -> Fraction:
    """``5%``, ``0.5 %`` as a share of one.

    Raises:
        UsageError: it is no percentage of at least zero; ``name`` says where it stands.
    """
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?|\.\d{1,9})\s*%\s*", str(text), re.ASCII)
    if match is None:
        raise UsageError(f"{name}: {_shown(text)} is not a percentage.\nGive one with its sign: 5%")
    return Fraction(match[1]) / 100


def regressions(values: Sequence[str], name: str) -> tuple[Fraction | None, tuple[LayerLimit, ...]]:
    """``5%`` for the step, ``GLOB=10%`` for layers; of several for the step the last one counts.

    Raises:
        UsageError: one is neither.
    """
    whole, layers = None, []
    for text in values:
        glob, equals, percents = text.rpartition("=")
        if equals and not glob.strip():
            raise UsageError(f"{name}: {_shown(text)} names no layer.\nGive 5% for the step, or GLOB=5%: h.*.attn=5%")
        if equals:
            layers.append(LayerLimit(glob.strip(), percentage(percents, name)))
        else:
            whole = percentage(text, name)
    return whole, tuple(layers)


def _shown(text: object) -> str:
    return cut(visible(str(text)), 60)


def allowed_text(judged: Judged) -> str:
    """``+5 %``, or the amount."""
    if judged.allowed is None:
        return units.size(judged.limit)
    return f"+{units.threshold(float(judged.allowed * 100))}"
