"""The sites of a plan and their verdicts, as rows of FIX.json."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gradscope.capture.paths import local_path
from gradscope.fixing.result import FixSite, StepSide
from gradscope.patching.patches import row_of
from gradscope.patching.prove.choice import Side
from gradscope.patching.prove.predict import Saving
from gradscope.patching.prove.verify import Verified
from gradscope.patching.sites import Site


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
    return replace(row, predicted_saving_ns=saving.ns, predicted_saving_bytes=saving.bytes)


def _source(site: Site) -> str:
    return f"{local_path(site.file)}:{site.line}"


def side_of(side: Side) -> StepSide:
    """A step that was measured in turns with another."""
    return StepSide(side.wall_ns, {"wall_ns": side.spread_ns}, "in turns", peak_bytes=side.peak_bytes)


def key_of(site: Site) -> tuple[str, str, str]:
    """The key that tells a site from the others in every run of the same program."""
    return site.path, site.source, site.recipe
