"""The sentences of a fix's report, with sites of repeated blocks as one row."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gradscope import units
from gradscope.document.parts import Command
from gradscope.fixing.result import FixData, FixSite, StepSide
from gradscope.patching.advice import what_to_do
from gradscope.report.header import MEAN_OF_OUTPUTS, NOT_ITS_LOSS, device_text

# Distance of the quartiles of the step's times over their median, from which on a ratio of two is called rough.
UNSTEADY = 0.20


@dataclass(frozen=True, slots=True)
class SiteRow:
    """Sites with the same verdict; savings are sums, and errors the largest."""

    address: str
    sites: tuple[FixSite, ...]
    predicted_saving_ns: int | None
    predicted_saving_bytes: int | None
    measured_saving_ns: int | None
    measured_saving_bytes: int | None
    worst: FixSite  # the one whose error is largest beside the original's

    @property
    def told(self) -> bool:
        """Return whether a step takes less time, or more, with these places, beyond noise and by what is shown."""
        words = {site.time for site in self.sites}
        if words == {None}:  # of a file that does not say it
            return True
        saved = self.measured_saving_ns or 0
        return ("less" if saved > 0 else "more") in words

    @property
    def first(self) -> FixSite:
        """The site whose recipe, source, status and reason are everyone's."""
        return self.sites[0]


def fold_sites(sites: Sequence[FixSite]) -> list[SiteRow]:
    """The rows, in the order of their first sites."""
    groups: dict[tuple[object, ...], list[FixSite]] = {}
    for site in sites:
        pattern, _ = _split(site.path)
        key = (pattern, site.source, site.recipe, site.status, _rows_verdict(site.reason))
        groups.setdefault(key, []).append(site)
    return [_row(members, sites) for members in groups.values()]


def _row(members: list[FixSite], sites: Sequence[FixSite]) -> SiteRow:
    return SiteRow(
        address=_address(members, sites),
        sites=tuple(members),
        predicted_saving_ns=_sum(site.predicted_saving_ns for site in members),
        predicted_saving_bytes=_sum(site.predicted_saving_bytes for site in members),
        measured_saving_ns=_sum(site.measured_saving_ns for site in members),
        measured_saving_bytes=_sum(site.measured_saving_bytes for site in members),
        worst=max(members, key=lambda site: (site.max_grad_error or 0.0) - 2 * (site.original_grad_error or 0.0)),
    )


def _address(members: list[FixSite], sites: Sequence[FixSite]) -> str:
    """The path, with a star for a number that is all there are, or the numbers."""
    pattern, _ = _split(members[0].path)
    numbers = [_split(site.path)[1] for site in members]
    alike = [_split(site.path) for site in sites if site.source == members[0].source]
    every = [found for other, found in alike if other == pattern]
    parts = iter(range(len(numbers[0])))
    words = []
    for word in pattern.split("."):
        if word != "*":
            words.append(word)
            continue
        at = next(parts)
        own = sorted({found[at] for found in numbers})
        whole = own == sorted({found[at] for found in every})
        words.append(str(own[0]) if len(own) == 1 else "*" if whole else ",".join(map(str, own)))
    return ".".join(words)


def _split(path: str) -> tuple[str, tuple[int, ...]]:
    """``h.3.attn`` as ``h.*.attn`` and 3."""
    words = path.split(".")
    numbers = [word for word in words if word.isdecimal() and len(word) < 10]  # int() takes no text of thousands
    return ".".join("*" if word in numbers else word for word in words), tuple(map(int, numbers))


def _rows_verdict(reason: str) -> str:
    """A reason without its figures, which differ from block to block."""
    return "is off by" if " is off by " in reason else reason


def _sum(values: object) -> int | None:
    known = [value for value in values if value is not None]  # type: ignore[attr-defined]
    return sum(known) if known else None


def header_rows(data: FixData) -> list[tuple[str, str]]:
    """(name, text) of each row above the tables."""
    work = data.workload
    model = work.model or "?"
    if work.parameters:
        model += f", {units.count(work.parameters)} parameters"
    if work.batch:
        model += f" · batch {work.batch}"
    target = f"{work.target} (script)" if work.mode == "script" else work.target
    rows = [("target", target or "a model in Python")]
    if work.model:
        rows.append(("model", model))
    if work.loss == MEAN_OF_OUTPUTS and work.mode != "script":  # whose own loss is compared below
        rows.append(("loss", NOT_ITS_LOSS))
    rows.append(("device", device_text(data.environment)))
    if data.dry_run:
        rows.append(("plan", "dry run: nothing is verified, measured or written; savings are estimates"))
    return rows


def verdict(data: FixData) -> str:
    """The whole in one sentence."""
    count, kept = len(data.sites), len(data.kept)
    if not count:
        met = IN_A_FUNCTION not in data.notes
        return "No recipe matches this model." if met else "No model was met, so no recipe was looked for."
    sites = _call_sites(count)
    if data.dry_run:
        found = sum(site.status == "found" for site in data.sites)
        return f"{found} of {sites} can be replaced."
    wrong = _wrong(data)
    if not kept:
        lead = f"None of {sites} was replaced" if count > 1 else "The only call site was not replaced"
        return f"{lead}: {wrong}." if wrong else f"{lead}; the model is unchanged."
    lead = f"{kept} of {sites} replaced"
    end = f"; {wrong}" if wrong else ""
    before, after = data.before, data.after
    if before is None or after is None:
        return f"{lead}{end}."
    return f"{lead}: {_change(data, before, after)}{end}."


def _change(data: FixData, before: StepSide, after: StepSide) -> str:
    ratio = units.ratio(before.wall_ns / max(after.wall_ns, 1)).removeprefix("×")
    step = "the model's part of a step" if model_alone(data) else "a step"
    need = _need(data, before.peak_bytes, after.peak_bytes)
    if data.change == "unknown":
        gained = "each makes its own model faster or smaller; whole steps were not compared"
        return f"{gained}; a step {need}" if need else gained
    if data.change == "less":
        time = f"{step} is {ratio} times as fast"
    elif data.change == "more":
        time = f"{step} is slower, {ratio} times as fast{',' if need else ''}"
    else:
        time = f"{step} takes as long as before, within noise{',' if need else ''}"
    return f"{time} and {need}" if need else time


def _need(data: FixData, before: int | None, after: int | None) -> str:
    if before is None or after is None or after <= 0:
        return ""
    if data.memory == "less":
        return f"needs {units.ratio(before / after).removeprefix('×')} times less memory"
    if data.memory == "more":
        return f"needs {units.ratio(after / before).removeprefix('×')} times as much memory"
    return "needs as much memory"


def model_alone(data: FixData) -> bool:
    """Check that the script's model was measured, forward and backward, without what the script does outside of it."""
    return data.workload.mode == "script" and data.before is not None and data.before.measured == "alternating"


def _wrong(data: FixData) -> str:
    wrong = [site for site in data.sites if site.status == "undone" and site.max_grad_error is None]
    if not data.failed or not wrong:
        return ""
    return f"{len(wrong)} failed verification and {'was' if len(wrong) == 1 else 'were'} undone"


def _call_sites(count: int) -> str:
    return f"{count} call site{'' if count == 1 else 's'}"


def reason_of(site: FixSite) -> str:
    """The site's status and reason, and what can be done about it."""
    advice = what_to_do(site.reason)
    return f"{site.status}: {site.reason}{f'; {advice}' if advice else ''}" if site.reason else site.status


def notes_of(data: FixData) -> Iterator[str]:
    """What is an estimate, and what was not measured."""
    if data.dry_run and any(
        row.predicted_saving_ns is not None or row.predicted_saving_bytes for row in fold_sites(data.sites)
    ):
        yield "predicted savings are estimates: the matched operations and the recipe, each run alone at these shapes"
    if any(site.measured_saving_ns is not None for site in data.sites):
        yield _savings(data)
    if not data.dry_run:
        yield from _measuring(data)
    yield from data.notes


def _savings(data: FixData) -> str:
    if data.workload.mode == "script" and not model_alone(data):  # of several, which verify measures one by one
        return (
            "savings are of each call site's own model, measured alone with one change added at a time: they do not "
            "add up to the whole step's"
        )
    step = "the model's part of a step" if model_alone(data) else "the whole step"
    return f"savings are measured on {step}, adding one change at a time: those that are kept add up to the step's"


def _measuring(data: FixData) -> Iterator[str]:
    before, after = data.before, data.after
    if after is not None:
        yield (
            "time and memory before and after: one process, alternating, same batch"
            if after.measured == "alternating"
            else "time and memory before and after: two profiles in separate processes; no time ratio is given, "
            "because the load of the machine may have changed more than the code"
        )
    elif before is not None and before.measured == "profile":
        yield f"time{' and memory' if before.peak_bytes is not None else ''} of the step: one profile"
    elif before is not None:
        yield "time and memory: repeated steps on the same batch"
    spread = max(_spread(side) for side in (before, after))
    if spread > UNSTEADY:
        rough = "its time may be another" if after is None else "the ratio is a rough one"
        yield f"the step's times spread by ±{units.percent(spread)}: {rough}; run this again while the machine is idle"
    if model_alone(data):
        ours = data.workload.loss == MEAN_OF_OUTPUTS
        loss = "from the mean of its outputs, because it returns no loss" if ours else "with its own loss"
        yield (
            f"the model's part of a step is forward and backward of one batch, {loss}: gradient accumulation over "
            "further batches, a loss outside the model, data loading and the optimizer come on top"
        )
    if any(side is not None and side.peak_bytes is None for side in (before, after)):
        yield "peak memory was not measured: the profile has none"
    if data.loss_difference is not None:
        yield "the losses are of one batch with dropout off, before any optimizer step"


def _spread(side: StepSide | None) -> float:
    return 0.0 if side is None or not side.wall_ns else side.spread["wall_ns"] / side.wall_ns


def left_out(count: int) -> tuple[str, ...]:
    """Say how many kept places the diff does not hold, and why."""
    if not count:
        return ()
    sites = "1 call site is" if count == 1 else f"{count} call sites are"
    return (
        f"{sites} not in the diff: other modules run the same lines and stay unpatched, so the source must stay; "
        "gradscope.patch replaces them on their modules only",
    )


IN_A_FUNCTION = (
    "no model was met: the script compiles a function around it, in which no call of a module is seen; compile the "
    "model instead, by torch.compile(model)"
)


def under_compile(compiled: bool) -> tuple[str, ...]:
    """Say what is done without torch.compile where call sites run under it."""
    if not compiled:
        return ()
    return (
        "the model runs under torch.compile: call sites are found and verified, and losses compared, as it runs "
        "without; its step is measured compiled, before and after",
    )


def next_steps(data: FixData, diff: str | None) -> list[Command]:
    """Commands to copy."""
    if data.dry_run:
        found = any(site.status == "found" for site in data.sites)
        return [Command(_command("fix", data), "verify and measure them")] if found else _other(data)
    if data.written:
        return [Command(_command("profile", data), "profile the result")]
    if not data.diff:
        return _other(data)
    command = None if diff is None else _patch_command(data, diff)
    steps = [] if command is None else [Command(command, "apply the diff")]
    if not data.failed:
        steps.append(Command(_command("fix", data, "--write"), "apply it, keeping a backup"))
    return steps


def _command(name: str, data: FixData, *options: str) -> str:
    """``gradscope NAME`` for the same target."""
    work = data.workload
    module = ["-m"] if work.mode == "script" and not work.target.endswith(".py") else []
    after = ["--", *data.args] if data.args else []
    return shlex.join(["gradscope", name, *module, work.target, *options, *after])


def _patch_command(data: FixData, diff: str) -> str | None:
    """``patch`` in the folder that the diff's names are seen from: the working folder, or the file's own.

    None where they are seen from several folders, for each of which it would have to be split.
    """
    sources = [site.source for site in data.kept]
    folders = {os.path.dirname(source) if os.path.isabs(source) else "" for source in sources}
    if len(folders) > 1:
        return None
    folder = "".join(f"-d {shlex.quote(each)} " for each in folders if each)
    return f"patch -p1 {folder}< {shlex.quote(diff)}"


def _other(data: FixData) -> list[Command]:
    profile = [Command(_command("profile", data), "why it is slow, by layer and line")] if data.workload.target else []
    return [*profile, Command("gradscope recipes", "recipes to use in your own code")]
