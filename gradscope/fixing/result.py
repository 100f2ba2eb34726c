"""What ``gradscope fix`` found, one field a key of FIX.json. docs/fix.md says what each means.

Times are integer nanoseconds, sizes bytes. ``None`` is not measured and is left out of the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gradscope.patching.prove.choice import much
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
    measured: Literal["in turns", "profile"]  # with the other side in one process, or in a run of its own
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
        if after.measured == "in turns":
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
        if after.measured != "in turns":
            return "unknown"
        noise = max(NOISE * max(before.wall_ns, after.wall_ns), before.spread["wall_ns"], after.spread["wall_ns"])
        if abs(before.wall_ns - after.wall_ns) <= noise:
            return "nothing"
        return "less" if after.wall_ns < before.wall_ns else "more"
