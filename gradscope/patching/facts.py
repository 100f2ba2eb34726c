"""A recorded step as plain facts: its calls, and where recipes could be put in."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from gradscope.errors import GradscopeError
from gradscope.patching.matchers import MATCHERS
from gradscope.patching.predict import Saving, predict
from gradscope.patching.record import Node, Recording, Value
from gradscope.patching.sites import Site, find_sites
from gradscope.patching.source import SourceFile
from gradscope.tables import CallFact, PlaceFact, TensorFact

_PLAIN = (bool, int, float, str, type(None))

# Micro-runs of what recipes would save: together at most this long, the dearest last.
PREDICTION_NS = 600_000_000


class Facts:
    """Turns one recording into rows.

    Args:
        recording: of the step.
        layer_of: the path of a module, "" for the root; None where it has none.
        names: parameters and buffers by id.
        shown: how a file is shown, as in the lines' table.
    """

    def __init__(
        self,
        recording: Recording,
        layer_of: Callable[[nn.Module], str | None],
        names: Mapping[int, str],
        shown: Callable[[str], str],
    ) -> None:
        self._recording, self._layer_of, self._names, self._shown = recording, layer_of, names, shown
        self._tensors: dict[Value, TensorFact] = {}

    def calls(self) -> tuple[CallFact, ...]:
        """Every call, in order."""
        return tuple(self._call(node) for node in self._recording.nodes)

    def places(self, tops: Mapping[str, nn.Module], step_ns: int) -> tuple[PlaceFact, ...]:
        """What recipes match in the models ``tops`` (path -> model), in the order of the run.

        Args:
            step_ns: of the whole step; a piece that is likely to be long is not run again.
        """
        found: list[PlaceFact] = []
        files: dict[str, SourceFile] = {}
        for name, top in tops.items():
            try:
                sites = find_sites(top, self._recording, MATCHERS, files)
            except GradscopeError:
                continue
            savings = self._savings(sites)
            found += [self._place(site, name, savings.get(site)) for site in sites if site.module is not None]
        return tuple(found)

    def _savings(self, sites: Sequence[Site]) -> dict[Site, Saving]:
        """Of as many as the time allows, those with the smallest operands first."""
        left = PREDICTION_NS
        found: dict[Site, Saving] = {}
        known = [site for site in sites if site.supported and not site.idle]
        for site in sorted(known, key=_size):
            if left <= 0:
                break
            start = time.perf_counter_ns()
            found |= predict([site])
            left -= time.perf_counter_ns() - start
        return found

    def _place(self, site: Site, top: str, saving: Saving | None) -> PlaceFact:
        path = ".".join(part for part in (top, site.path) if part)
        return PlaceFact(
            recipe=site.recipe,
            function=site.matches[0].function if site.matches else site.recipe,
            layer=path,
            source=f"{self._shown(site.file)}:{site.line}",
            supported=site.supported,
            reasons=tuple(site.reasons),
            idle=site.idle,
            calls=tuple(sorted({node.index for match in site.matches for node in match.nodes})),
            rounds=float(len(site.matches)),
            predicted_saving_ns=None if saving is None else saving.ns,
            predicted_saving_bytes=None if saving is None else saving.bytes,
        )

    def _call(self, node: Node) -> CallFact:
        place = next((place for place in node.places if place.span is not None), None)
        owner = node.caller
        if owner is None:
            owner = next((p.frame.owner for p in node.places if isinstance(p.frame.owner, nn.Module)), None)
        source = function = None
        if place is not None and place.span is not None:
            source = f"{self._shown(place.frame.code.co_filename)}:{place.span.line}"
            function = place.frame.code.co_name
        return CallFact(
            index=node.index,
            op=node.op,
            layer=self._layer_of(owner) if isinstance(owner, nn.Module) else None,
            source=source,
            function=function,
            inputs=tuple(self._tensor(value) for value in node.inputs),
            outputs=tuple(self._tensor(value) for value in node.outputs),
            args=tuple(self._argument(argument) for argument in node.args),
            kwargs={name: self._argument(argument) for name, argument in node.kwargs.items()},
            grad=node.grad,
            autocast=node.autocast,
            module=type(node.caller).__name__ if node.caller is not None else None,
        )

    def _tensor(self, value: Value) -> TensorFact:
        known = self._tensors.get(value)
        if known is None:
            tensor = value.tensor()
            known = self._tensors[value] = TensorFact(
                shape=value.shape,
                dtype=str(value.dtype).removeprefix("torch."),
                device=value.device.type,
                requires_grad=value.requires_grad,
                strides=value.strides,
                producer=None if value.producer is None else value.producer.index,
                users=tuple(node.index for node in value.users),
                storage=value.storage,
                parameter=None if tensor is None else self._names.get(id(tensor)),
            )
        return known

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, Value):
            return self._tensor(argument)
        if isinstance(argument, (tuple, list)):
            return tuple(self._argument(part) for part in argument)
        return argument if isinstance(argument, _PLAIN) else ...


def _size(site: Site) -> int:
    """Numbers that the pattern's calls make."""
    match = site.matches[0]
    return sum(_elements(value) for node in match.nodes for value in node.outputs)


def _elements(value: Value) -> int:
    found = 1
    for size in value.shape:
        found *= size
    return found
