"""Where recipes could be put into a recorded step, and what they would save: for the rules of a profile."""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from gradscope.errors import GradscopeError
from gradscope.ops import MATMULS
from gradscope.patching.edit.source import SourceFile
from gradscope.patching.match.match import Called, Layer
from gradscope.patching.match.matchers import MATCHERS
from gradscope.patching.prove.predict import CACHE_BYTES, FEWEST_ROUNDS, Saving, predict
from gradscope.patching.sites import Site, find_sites
from gradscope.recording.graph import Node, Recording
from gradscope.tables import PlaceFact
from gradscope.tree import modules_of

# Micro-runs of what recipes would save: together about this long, those that tell most for their time first.
PREDICTION_NS = 600_000_000

# Runs of a piece of work for its memory, and what a micro-run takes beside all runs: a profiler.
_OTHER_RUNS, _FIXED_NS = 4, 40_000_000

# Runs of a micro-run of one round, the forward passes that check it among them.
_SINGLE_RUNS = 3

# Of reading memory.
_NS_A_BYTE = 0.1

# A short piece of work is run more often, as long as its micro-run stays below this: another process may disturb it.
_STEADY_NS, _MORE_ROUNDS = 120_000_000, 12

# A matmul's multiplications that take as long as one number that is read or written, and what a call takes beside.
_MULTIPLICATIONS, _CALL = 20, 5_000

# What these save shows only beside the rest of the step.
_NOT_ALONE = frozenset({"embedding"})

# Run alone also where the recipe cannot be put in: the user can do the same by hand.
_ALSO_BY_HAND = frozenset({"attention"})


@dataclass(eq=False)
class Found:
    """What recipes match in a recorded step, and what they would save, until it is dropped.

    Who makes it drops it: the recording holds the models.
    """

    recording: Recording | None = None
    sites: list[tuple[weakref.ref[nn.Module], list[Site]]] = field(default_factory=list)  # of each model
    savings: dict[Site, Saving] = field(default_factory=dict)
    files: dict[str, SourceFile] = field(default_factory=dict)

    def drop(self) -> None:
        """Let go of all of it."""
        if self.recording is not None:
            self.recording.drop()
        self.recording, self.sites, self.savings, self.files = None, [], {}, {}


def find_places(
    recording: Recording, tops: Mapping[str, nn.Module], step_ns: int, shown: Callable[[str], str], into: Found
) -> tuple[PlaceFact, ...]:
    """Return what recipes match in a recorded step, in the order of the run, and what the dearest of them would save.

    Args:
        tops: path -> model.
        step_ns: of the whole step; a piece that is likely to be long is not run again.
        shown: how a file is shown, as in the table of lines.
        into: takes the sites and their savings.
    """
    found: list[PlaceFact] = []
    for name, top in tops.items():
        try:
            sites = find_sites(top, recording, MATCHERS, into.files)
        except GradscopeError:
            continue
        into.sites.append((weakref.ref(top), sites))
        savings = _savings(recording, sites, step_ns)
        into.savings |= savings
        found += [_place(site, name, savings.get(site), shown) for site in sites if site.module is not None]
    return tuple(found)


def _savings(recording: Recording, sites: Sequence[Site], step_ns: int) -> dict[Site, Saving]:
    """Measure the saving of as many sites as the time allows; the same work on the same shapes is run once, for all."""
    groups: defaultdict[object, list[Site]] = defaultdict(list)
    for site in sites:
        wanted = site.supported or (site.recipe in _ALSO_BY_HAND and site.module is not None)
        if wanted and not site.idle and site.recipe not in _NOT_ALONE and _runs_torch_alone(site):
            groups[_same(site)].append(site)
    made = sum(map(_made_bytes, recording.nodes))
    whole = max(sum(map(_work, recording.nodes)), 1.0)
    left = max(PREDICTION_NS, min(3.0 * step_ns, 2.0 * PREDICTION_NS))
    found: dict[Site, Saving] = {}
    tries = []
    for group in groups.values():
        nodes = group[0].matches[0].nodes
        one = step_ns * sum(map(_work, nodes)) / whole
        covered = one * sum(len(site.matches) for site in group)
        one += 2 * min(made, CACHE_BYTES) * _NS_A_BYTE
        share = any(site.supported for site in group), covered / (one + _FIXED_NS)
        tries.append((share, one, max(made - sum(map(_made_bytes, nodes)), 0), group))
    for _, one, elsewhere, group in sorted(tries, key=lambda each: each[0], reverse=True):
        rounds = _rounds(one, left)
        if rounds:
            start = time.perf_counter_ns()
            found |= predict(group, rounds, elsewhere)
            left -= time.perf_counter_ns() - start
    return found


def _place(site: Site, top: str, saving: Saving | None, shown: Callable[[str], str]) -> PlaceFact:
    path = ".".join(part for part in (top, site.path) if part)
    return PlaceFact(
        recipe=site.recipe,
        function=site.function,
        layer=path,
        source=f"{shown(site.file)}:{site.line}",
        supported=site.supported,
        reasons=tuple(site.reasons),
        idle=site.idle,
        calls=tuple(sorted({node.index for match in site.matches for node in match.nodes})),
        new_text=_new_text(site) if site.supported else "",
        predicted_saving_ns=None if saving is None else saving.ns,
        predicted_saving_bytes=None if saving is None else saving.bytes,
        predicted_old_ns=None if saving is None else saving.old_ns,
        predicted_kept_bytes=None if saving is None else saving.kept_bytes,
    )


def _rounds(one_ns: float, left_ns: float) -> int:
    """Return the rounds of a micro-run: a few, more of short work, one where it takes long; 0: no time is left."""
    few = one_ns * (2 * FEWEST_ROUNDS + _OTHER_RUNS) + _FIXED_NS
    if few <= left_ns:
        return FEWEST_ROUNDS + min(int(max(_STEADY_NS - few, 0.0) / max(2 * one_ns, 1.0)), _MORE_ROUNDS)
    return int(one_ns * _SINGLE_RUNS <= left_ns)


def _runs_torch_alone(site: Site) -> bool:
    """Return whether a micro-run calls no code of the user's: its modules are torch's own, without hooks."""
    pieces = [piece for argument in site.matches[0].arguments for piece in argument.pieces]
    callers = [piece.node.caller for piece in pieces if isinstance(piece, (Called, Layer))]
    modules = [module for caller in callers if caller is not None for module in modules_of(caller)]
    return all(type(module).__module__.startswith("torch.") and not _hooks_of(module) for module in modules)


def _hooks_of(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def _same(site: Site) -> object:
    """Return a key that is equal for the same calls on the same shapes."""
    match = site.matches[0]
    nodes = sorted(match.nodes, key=lambda node: node.index)
    return match.recipe, match.function, tuple((node.op, tuple(value.shape for value in node.inputs)) for node in nodes)


def _calls(site: Site) -> int:
    """Count how often the site's module ran in the step."""
    frames = {
        place.frame.index for match in site.matches for place in match.last.places if place.frame.owner is site.module
    }
    return max(len(frames), 1)


def _work(node: Node) -> float:
    """Estimate a call's part of the step: numbers read and written, and multiplications of matmuls."""
    if not node.places:
        return 0.0
    made = sum(value.elements for value in node.outputs)
    work = float(_CALL + made)
    if node.op in MATMULS and node.inputs and node.inputs[0].shape:
        work += made * node.inputs[0].shape[-1] / _MULTIPLICATIONS
    return work


def _made_bytes(node: Node) -> int:
    """Return the bytes of what a call makes; a view makes nothing."""
    given = {value.storage for value in node.inputs}
    return sum(value.bytes for value in node.outputs if value.storage not in given)


def _new_text(site: Site) -> str:
    """Return the statements that would be new there, each on one line."""
    edit = site.edit
    if edit is None:
        return ""
    text = edit.source.file.text
    changes = sorted(edit.replacements, key=lambda each: each.start)
    found: list[str] = []
    done = 0
    for change in changes:
        if not change.text.strip() or change.start < done:
            continue
        start, done = text.rfind(b"\n", 0, change.start) + 1, text.find(b"\n", change.end) % (len(text) + 1)
        made, at = "", start
        for each in changes:
            if start <= each.start and each.end <= done:
                made += text[at : each.start].decode() + each.text
                at = each.end
        made += text[at:done].decode()
        one_line = " ".join(line.strip() for line in _first_branch(made).splitlines())
        found.append(one_line.replace("( ", "(").replace(", )", ")").strip())
    return "\n".join(found)


def _first_branch(text: str) -> str:
    """Return what is new of a condition whose other branch holds the old code."""
    lines = text.splitlines()
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())] if lines else ""
    end = lines.index(f"{indent}else:") if f"{indent}else:" in lines else len(lines)
    return "\n".join(lines[:end])
