"""What ``gradscope fix`` found, one field a key of FIX.json, and that file. docs/fix.md says what each means.

Times are integer nanoseconds, sizes bytes. ``None`` is not measured and is left out of the JSON.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gradscope.capture.registry import local_path
from gradscope.errors import RunFileError
from gradscope.patching.patches import row_of
from gradscope.patching.prove.choice import Side, much
from gradscope.patching.prove.predict import Saving
from gradscope.patching.prove.verify import Verified
from gradscope.patching.sites import Site
from gradscope.report.runfile import check_version, dump_record, parse_input, read_input, to_record
from gradscope.report.schema import SchemaMismatch, read_dataclass
from gradscope.safe_text import shown_path
from gradscope.tables import WorkloadInfo

FIX_SCHEMA_VERSION = 1

# Two profiles that differ by less are alike, beside their spread; and their peaks.
NOISE = 0.02

Status = Literal["kept", "undone", "refused", "found"]


@dataclass(frozen=True, slots=True)
class StepSide:
    """One training step, without or with what was kept."""

    wall_ns: int  # median
    spread: Mapping[str, int]  # "wall_ns": between the quartiles, or in a profile the standard deviation
    measured: Literal["alternating", "profile"]  # with the other side in one process, or in a run of its own
    backward_ns: int | None = None  # of the profile
    peak_bytes: int | None = None  # in turns: above what lived when the step began; in a profile: all of it


@dataclass(frozen=True, slots=True)
class FixSite:
    """One place of the model; a negative saving is a loss."""

    path: str  # of the module; "" is the root
    source: str  # "model.py:65"
    recipe: str
    status: Status  # "found": not tried
    reason: str = ""
    predicted_saving_ns: int | None = None  # of the whole step, an estimate: by a dry run, or by the profile
    predicted_saving_bytes: int | None = None
    measured_saving_ns: int | None = None  # of the whole step; places with the same change have equal parts of it
    measured_saving_bytes: int | None = None
    max_grad_error: float | None = None  # against float64, as a share of the gradient
    original_grad_error: float | None = None
    time: Literal["less", "more", "nothing"] | None = None  # a step takes with it: what a sign test tells from noise


@dataclass(frozen=True, slots=True)
class LossCurves:
    """The losses of a training script's first steps, dropout off, without and with what was kept."""

    before: Sequence[float | None]  # None: it was no finite number
    after: Sequence[float | None]
    largest_difference: float  # of a step's losses, as a share of the loss
    same: bool
    verdict: str


@dataclass(frozen=True, slots=True)
class FixData:
    """The whole of FIX.json."""

    gradscope: str  # version that wrote it
    environment: Mapping[str, Any]
    workload: WorkloadInfo
    baseline: str  # what "before" is
    args: Sequence[str] = field(default=(), kw_only=True)  # what the target was given behind --
    sites: Sequence[FixSite]
    diff: str  # of the user's source, for patch -p1
    failed: bool  # whether a recipe computed something else than what it replaced
    before: StepSide | None = None
    after: StepSide | None = None  # None: nothing was kept
    time: Literal["less", "more", "nothing"] | None = None  # a step takes after: a sign test's word
    loss_difference: float | None = None  # of one batch, dropout off; a share of the loss
    curves: LossCurves | None = None
    dry_run: bool = False
    written: Sequence[str] = ()  # files of the user's that were changed
    notes: Sequence[str] = ()
    schema_version: int = FIX_SCHEMA_VERSION

    @property
    def kept(self) -> list[FixSite]:
        """The sites that stay replaced."""
        return [site for site in self.sites if site.status == "kept"]

    @property
    def memory(self) -> Literal["less", "more", "nothing"]:
        """Tell how a step's memory changed; in turns by the rule that keeps a place or undoes it."""
        before, after = self.before, self.after
        if before is None or after is None or before.peak_bytes is None or after.peak_bytes is None:
            return "nothing"
        saved = before.peak_bytes - after.peak_bytes
        if after.measured == "alternating":
            counts = much(abs(saved), before.peak_bytes)
        else:
            counts = abs(saved) > NOISE * min(before.peak_bytes, after.peak_bytes)
        return "nothing" if not counts else "less" if saved > 0 else "more"

    @property
    def change(self) -> Literal["less", "more", "nothing", "unknown"]:
        """Tell how a step's time changed.

        Unknown of two profiles, each in a process of its own: what else the machine did meanwhile may be more.
        """
        if self.time is not None or self.before is None or self.after is None:
            return self.time or "nothing"
        before, after = self.before, self.after
        if after.measured != "alternating":
            return "unknown"
        noise = max(NOISE * max(before.wall_ns, after.wall_ns), before.spread["wall_ns"], after.spread["wall_ns"])
        if abs(before.wall_ns - after.wall_ns) <= noise:
            return "nothing"
        return "less" if after.wall_ns < before.wall_ns else "more"


# What a FIX.json begins with: never to be taken for a RUN.json, nor the other way round.
FIX_HEAD = re.compile(r'\s*\{\s*"kind":\s*"fix",\s*"schema_version":\s*\d+')

_WRITE_ONE = "Write one with: gradscope fix TARGET"


def to_json(fix: FixData) -> str:
    """FIX.json's text; tables have one row a line.

    Raises :class:`~gradscope.errors.OutputError` for a number that JSON cannot hold, naming where it is.
    """
    return dump_record({"kind": "fix", **to_record(fix)}, "fix")


def load_fix(path: str | os.PathLike[str]) -> FixData:
    """The FIX.json at ``path``.

    Raises :class:`~gradscope.errors.RunFileError` if it cannot be read, is not a FIX.json, is of a newer schema, or
    lacks a field or has one of the wrong type.
    """
    name = shown_path(path)
    return from_json(read_input(path, name, _WRITE_ONE), name)


def from_json(text: str, name: str = "the text") -> FixData:
    """The fix in ``text``; errors as in :func:`load_fix`, with ``name`` as the place."""
    record = parse_input(text, name, _WRITE_ONE)
    if not isinstance(record, dict) or record.get("kind") != "fix" or "sites" not in record:
        raise RunFileError(f"{name} is not a FIX.json: it has no kind and sites.\n{_WRITE_ONE}")
    check_version(record, name, "FIX.json", FIX_SCHEMA_VERSION, "fix")
    try:
        fix = read_dataclass(FixData, record, "")
        _require_spreads(fix)
        return fix
    except SchemaMismatch as error:
        raise RunFileError(f"{name} is damaged: {error}.\nRun gradscope fix again to write a new one.") from error


def _require_spreads(fix: FixData) -> None:
    """Raise :class:`Mismatch` where it is not known how steady a step was."""
    for name, side in (("before", fix.before), ("after", fix.after)):
        if side is not None and "wall_ns" not in side.spread:
            raise SchemaMismatch(f"{name}.spread.wall_ns is missing")


def planned_sites(sites: Iterable[Site], savings: Mapping[Site, Saving]) -> tuple[FixSite, ...]:
    """One row a site of a plan that was not tried."""
    return tuple(_row(site, savings.get(site)) for site in sites)


def verified_sites(verified: Verified, savings: Mapping[Site, Saving] | None = None) -> tuple[FixSite, ...]:
    """One row a site, with its verdict, and with what a profile has expected of it."""
    savings = savings or {}
    return tuple(
        _expected(FixSite(**row_of(result) | {"source": _source(result.site)}), result.site, savings.get(result.site))
        for result in verified.results
    )


def _row(site: Site, saving: Saving | None) -> FixSite:
    tried = site.supported and not site.idle
    row = FixSite(
        path=site.path,
        source=_source(site),
        recipe=site.recipe,
        status="found" if tried else "refused",
        reason=site.why_not,
    )
    return _expected(row, site, saving)


def _expected(row: FixSite, site: Site, saving: Saving | None) -> FixSite:
    """The row with what is expected of its place; nothing is of one that is not tried."""
    if saving is None or not site.supported or site.idle:
        return row
    return replace(row, predicted_saving_ns=saving.ns, predicted_saving_bytes=_freed(saving))


def _freed(saving: Saving) -> int:
    """What it saves for backward less, which adds up over the sites; where there is none, the peak of it alone."""
    return saving.kept_bytes if saving.kept_bytes and saving.kept_bytes > 0 else saving.bytes


def _source(site: Site) -> str:
    return f"{local_path(site.file)}:{site.line}"


def side_of(side: Side) -> StepSide:
    """A step that was measured in turns with another."""
    return StepSide(side.wall_ns, {"wall_ns": side.spread_ns}, "alternating", peak_bytes=side.peak_bytes)


def key_of(site: Site) -> tuple[str, str, str]:
    """The key that tells a site from the others in every run of the same program."""
    return site.path, site.source, site.recipe
