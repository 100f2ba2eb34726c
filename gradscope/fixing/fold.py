"""Sites of repeated blocks as one row: ``transformer.h.*.attn`` for those of the same line, recipe and verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradscope.fixing.result import FixSite


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
        key = (pattern, site.source, site.recipe, site.status, _verdict(site.reason))
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


def _verdict(reason: str) -> str:
    """A reason without its figures, which differ from block to block."""
    return "is off by" if " is off by " in reason else reason


def _sum(values: object) -> int | None:
    known = [value for value in values if value is not None]  # type: ignore[attr-defined]
    return sum(known) if known else None
