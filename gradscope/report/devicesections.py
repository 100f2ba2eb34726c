"""What the device did: its kernels and copies, by what launched them."""

from __future__ import annotations

from collections.abc import Iterator

from gradscope import units
from gradscope.document.parts import Bar, Cell, Column, Row, Section, Table, Words, plain, strong
from gradscope.report.view import LEDGER_WORDS
from gradscope.tables import DeviceLedger

# Beside the parts of the backward pass, which have the names of its own breakdown.
_WORDS = {
    "forward_ns": ("forward", "launched by forward"),
    "layers_ns": ("layers' backward", "launched by the layers' own backward nodes"),
    "optimizer_ns": ("optimizer", "launched by Optimizer.step and zero_grad"),
    "other_ns": ("other", "launched between the phases"),
    "elsewhere_ns": ("other steps", "launched in steps that do not count"),
    "before_ns": ("before the trace", "launched before the trace began: of layers that it does not show"),
    "unknown_ns": ("unknown", "the trace does not say what launched them"),
}


def device_parts(device: DeviceLedger) -> Iterator[tuple[str, str, int, str, str]]:
    """(field, name, ns, percent, meaning) of each part that there is."""
    values = [getattr(device, name) for name in DeviceLedger.PARTS]
    percents = units.percents_of(values, device.kernel_ns)
    for name, ns, percent in zip(DeviceLedger.PARTS, values, percents, strict=True):
        if ns:
            words, meaning = _WORDS.get(name) or LEDGER_WORDS[name]
            yield name, words, ns, percent, meaning


def _collectives(device: DeviceLedger) -> str:
    if not device.collectives_ns:
        return ""
    exposed = units.ns(device.exposed_ns)
    return f"collectives between ranks {units.ns(device.collectives_ns)}, of which {exposed} overlap nothing else"


def _idle(device: DeviceLedger, step_ns: int) -> str:
    if device.idle_ns is None or step_ns <= 0:
        return ""
    return f"idle for {units.ns(device.idle_ns)} of the step ({units.percent(device.idle_ns / step_ns, 0)})"


def device_facts(device: DeviceLedger, step_ns: int) -> list[str]:
    """What is to be said beside the parts: how long it idled, and what collectives took."""
    return [words for words in (_idle(device, step_ns), _collectives(device)) if words]


def device_in_short(device: DeviceLedger | None, step_ns: int = 0) -> Section | None:
    """The device's time in a sentence; None where none was recorded."""
    if device is None or not device.kernel_ns:
        return None
    parts = " + ".join(f"{words} {units.ns(ns)} ({percent})" for _, words, ns, percent, _ in device_parts(device))
    about = f"{units.ns(device.kernel_ns)} of kernels and copies, each in full = {parts}"
    told = filter(None, [_idle(device, step_ns), about, _collectives(device)])
    return Section("device", "Device", "; ".join(told))


def device_section(device: DeviceLedger | None, step_ns: int = 0) -> Section | None:
    """The device's time as a table; None where none was recorded."""
    if device is None or not device.kernel_ns:
        return None
    columns = (
        Column("row", "launched by", align="left"),
        Column("ns", "device"),
        Column("share", "share"),
        Column("bar", "", align="left", drop=2, least=10, most=20),
        Column("meaning", "", align="left", drop=1, least=45),
    )
    rows = []
    for _, words, ns, percent, meaning in device_parts(device):
        share = ns / device.kernel_ns
        rows.append(Row((*plain([words, units.ns(ns), percent]), Bar(share, share), Cell(meaning, "dim"))))
    rows.append(Row(strong(["all kernels and copies", units.ns(device.kernel_ns), "100.0 %"]), "whole"))
    blocks: tuple[Table | Words, ...] = (Table(columns, tuple(rows)),)
    if words := "; ".join(device_facts(device, step_ns)):
        blocks = (*blocks, Words(words))
    return Section("device", "Device breakdown", "each kernel in full, so overlaps count twice", blocks)
