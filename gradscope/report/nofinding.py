"""What a report says where no rule found anything: who looked, where the time is, and how near the limit that is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gradscope import units
from gradscope.report.header import phases_of
from gradscope.tables import LayerRow, RunData, is_starved, is_unreliable

# Kinds of layers that are named, and the part of backward below which one is not.
_KINDS, _LEAST = 2, 0.10

_OUTSIDE = {
    "outside_modules_ns": "operations outside every module",
    "recompute_ns": "computing forward again",
    "gradient_sum_ns": "gradient accumulation at fan-out",
    "accumulate_ns": "writing parameters' gradients",
    "hook_ns": "your backward hooks",
    "communication_ns": "communication",
    "engine_ns": "autograd overhead",
}


@dataclass(frozen=True, slots=True)
class _LayerClass:
    """Layers of one class."""

    name: str
    layers: int
    ns: int  # backward, self
    limit_ns: int | None  # the same at this machine's ceilings; None: not known of all


def nothing_found(run: RunData) -> tuple[str, ...]:
    """Two to four sentences for a run without a finding worth showing; none where no rule looked."""
    if run.rules is None:
        return ()
    whole = run.ledger.backward_ns
    looked = f"No finding: {units.count(run.rules)} rule{'s' * (run.rules != 1)} looked at"
    memory = [] if run.memory is None else ["memory"]
    head = f"{looked} {_and(['time', *memory, 'settings'])}."
    if run.workload.mode == "trace":
        head = (
            "No finding from times alone: most rules look at settings, memory or the tensors of calls, which a trace "
            "does not hold. Profile the program itself for those."
        )
    elif is_unreliable(run.step):
        why = "the steps waited too long for a core" if is_starved(run.step) else "the steps vary too much"
        rest = _and([*memory, "settings"])
        head = f"{looked} {rest}. Time was not judged, for {why}: profile again while the machine is idle."
    if whole <= 0 or run.step.wall_ns <= 0:
        return (head,)
    kinds = _kinds(run.layers)
    shown = [kind for kind in kinds[:_KINDS] if kind.ns >= _LEAST * whole] or kinds[:1]
    of_this_machine = run.workload.mode != "trace"
    limits = _limits(run.layers) if of_this_machine and not is_unreliable(run.step) else ""
    return tuple(filter(None, (head, _where(run, shown), _phases(run), limits)))


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _where(run: RunData, kinds: Sequence[_LayerClass]) -> str:
    """Where the backward pass spends its time: the costliest kinds of layers, and what is more than these."""
    whole = run.ledger.backward_ns
    parts = [(kind.ns, _layers_text(kind)) for kind in kinds if kind.ns > 0]
    parts += [(getattr(run.ledger, name), text) for name, text in _OUTSIDE.items()]
    parts = [(ns, text) for ns, text in parts if ns >= _LEAST * whole] or parts[:1]
    texts = [f"{units.percent(ns / whole, 0)} in {text}" for ns, text in sorted(parts, reverse=True)]
    return f"Of backward, {', '.join(texts)}." if texts else ""


def _layers_text(kind: _LayerClass) -> str:
    words = f"{units.count(kind.layers)} {kind.name} layer{'s' * (kind.layers > 1)}"
    if not kind.limit_ns or kind.ns <= 0:
        return words
    return f"{words} at {units.percent(min(kind.limit_ns / kind.ns, 1.0), 0)} of this machine's limit"


def _phases(run: RunData) -> str:
    """As the head says it, and how much of what is between the phases is gradscope's."""
    step = run.step
    own = f" ({units.percent(run.own_ns / step.wall_ns, 0)} gradscope itself)" if run.own_ns > 0 else ""
    parts = [
        f"{share} between the phases{own}" if name == "other" else f"{share} {name}"
        for name, (_, share) in phases_of(step).items()
    ]
    return f"A step of {units.ns(step.wall_ns)} is {', '.join(parts)}."


def _limits(rows: Sequence[LayerRow]) -> str:
    if any(row.backward_limit_ns or row.forward_limit_ns for row in rows):
        return ""  # where those shown have none, none is known of their kind
    return (
        "How near that is to this machine's limit is not known: run gradscope doctor --calibrate, then profile again."
    )


def _kinds(rows: Sequence[LayerRow]) -> list[_LayerClass]:
    """Layers that spend time by themselves, by class, the costliest first."""
    found: defaultdict[str, list[LayerRow]] = defaultdict(list)
    for row in rows:
        if row.backward_self_ns > 0:
            found[row.class_name].append(row)
    kinds = []
    for name, members in found.items():
        limits = [row.backward_limit_ns for row in members]
        known = [limit for limit in limits if limit is not None]
        limit = sum(known) if len(known) == len(members) else None
        kinds.append(_LayerClass(name, len(members), sum(row.backward_self_ns for row in members), limit))
    return sorted(kinds, key=lambda kind: -kind.ns)
