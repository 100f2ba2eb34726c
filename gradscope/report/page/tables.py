"""Tables that the page shows as they come: of the device, and of what DDP reduces together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradscope.report.devicesections import device_facts, device_parts
from gradscope.tables import DeviceLedger, RunData


def plain_tables(run: RunData, rows: Mapping[str, int]) -> dict[str, Any]:
    """Tab -> its columns and rows, in the terms of the page's own tables; a tab without rows is left out.

    Args:
        rows: path of a layer -> its number on the page.
    """
    found = {}
    if run.device is not None and run.device.kernel_ns:
        found["device"] = _device(run.device, run.step.wall_ns)
    if run.buckets:
        found["buckets"] = _buckets(run, rows)
    return found


def _column(key: str, label: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"key": key, "label": label, "kind": kind, **more}


def _device(device: DeviceLedger, step_ns: int) -> dict[str, Any]:
    """What launched its kernels; a row leads to the part of backward that has its name."""
    columns = [
        _column("part", "Launched by", "text"),
        _column("meaning", "What it is", "text", isWide=True, rank=3),
        _column("time", "Device time", "time"),
        _column("share", "Share", "share", of="all kernels and copies"),
    ]
    parts = [
        [{"part": words, "meaning": meaning, "time": ns, "share": ns / device.kernel_ns}, key]
        for key, words, ns, _, meaning in device_parts(device)
    ]
    summary = "; ".join(["each kernel in full, so overlaps count twice", *device_facts(device, step_ns)])
    return {"columns": columns, "rows": parts, "summary": summary, "sort": "-time"}


def _buckets(run: RunData, numbers: Mapping[str, int]) -> dict[str, Any]:
    """When each bucket was there and sent; a row leads to the layer with most of it."""
    several = len({bucket.model for bucket in run.buckets or ()}) > 1
    columns = [
        _column("number", "Bucket", "text", isShort=True),
        *([_column("model", "Model", "text", isShort=True)] if several else []),
        _column("layers", "Gradients of", "text", isWide=True),
        _column("bytes", "Size", "bytes", rank=3),
        _column("last", "Last there at", "time", rank=2),
        _column("sent", "Sent at", "time"),
        _column("waited", "Waited", "time"),
    ]
    rows = []
    for bucket in run.buckets or ():
        cells = {
            "number": str(bucket.number),
            "model": bucket.model or "(the root)",
            "layers": ", ".join(bucket.layers),
            "bytes": bucket.bytes,
            "last": bucket.last_at_ns,
            "sent": bucket.begun_at_ns,
            "waited": bucket.exposed_ns,
        }
        known = [numbers[path] for path in bucket.layers if path in numbers]
        rows.append([cells, known[0] if known else -1])
    count = f"{len(rows)} bucket{'s' * (len(rows) > 1)}"
    summary = f"{count}: gradients that are reduced together; times from the beginning of backward"
    return {"columns": columns, "rows": rows, "summary": summary, "sort": "number"}
