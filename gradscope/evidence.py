"""What the rules look at, brought together from all that a run left: parameters, optimizers, the recorded step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from gradscope.capture.naming import ModuleNames
from gradscope.capture.registry import local_path
from gradscope.capture.result import Capture
from gradscope.diagnose.case import StepFacts
from gradscope.recording.graph import Recording
from gradscope.recording.naming import name_calls
from gradscope.tables import ParameterFact

if TYPE_CHECKING:
    from gradscope.patching.places import Found


def known_facts(capture: Capture, names: ModuleNames) -> StepFacts:
    """Return the facts that are known without a recorded step."""
    reached = set(capture.with_state)
    if capture.timed is not None:
        reached |= {id(leaf) for leaf in capture.timed.passes.leaves}
    parameters = tuple(
        ParameterFact(
            path=path,
            layer=path.rpartition(".")[0],
            shape=tuple(each.shape),
            dtype=str(each.dtype).removeprefix("torch."),
            device=each.device.type,
            requires_grad=each.requires_grad,
            has_grad=id(each) in capture.with_gradient,
            optimized=id(each) in capture.optimized if capture.optimized else None,
            reached=id(each) in reached,
        )
        for path, each in _named_parameters(names)
    )
    return StepFacts(
        parameters=parameters,
        optimizers=tuple(capture.optimizers),
        settings=_with_paths(capture.settings, names),
        graphs=_graphs_left(capture),
    )


def _with_paths(settings: Mapping[str, Any], names: ModuleNames) -> dict[str, Any]:
    """``settings`` with the paths of modules that torch.compile leaves alone, in place of their labels."""
    compiled = dict(settings.get("compiled", {}))
    rows = (names.rows[label] for label in compiled.get("left_alone", ()))
    compiled["left_alone"] = [names.infos[row].path for row in rows if row >= 0]
    return {**settings, "compiled": compiled}


def _graphs_left(capture: Capture) -> int:
    """Return how many more tensors with a graph each step left, at least."""
    alive = [each.graphs for each in capture.memory.census] if capture.memory is not None else []
    return max(0, min((later - earlier for earlier, later in pairwise(alive)), default=0))


def with_recording(facts: StepFacts, names: ModuleNames, recording: Recording, step_ns: int, found: Found) -> StepFacts:
    """Return the facts with the calls of the recorded step, and where recipes could be put in.

    Rules read the recording itself, which must be kept until they have.

    Args:
        found: takes the sites of these places.
    """
    from gradscope.patching.match.masks import note_masks  # here, as in the pipeline: not before the first step
    from gradscope.patching.places import find_places

    paths = {id(module): names.infos[names.index[id(module)]].path for module in names.modules}
    tensors = {id(each): path for path, each in _named_parameters(names)}
    for module in names.modules:
        for name, buffer in module._buffers.items():
            if buffer is not None:
                tensors[id(buffer)] = ".".join(filter(None, (paths[id(module)], name)))
    name_calls(recording, lambda module: paths.get(id(module)), tensors, local_path)
    note_masks(recording)
    # Around a model that torch.compile was given there is a module of its own, also where it compiles nothing.
    tops = {paths[id(model)]: model for model in names.models}
    places = find_places(recording, tops, step_ns, local_path, found)
    return replace(facts, calls=recording.nodes, places=places, recorded=True)


def _named_parameters(names: ModuleNames) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each parameter once, under its first name."""
    seen: set[int] = set()
    for module in names.modules:
        path = names.infos[names.index[id(module)]].path
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield ".".join(filter(None, (path, name))), parameter
