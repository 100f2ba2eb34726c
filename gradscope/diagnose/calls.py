"""What several rules ask of the recorded calls."""

from __future__ import annotations

from gradscope import ops
from gradscope.diagnose.case import Case
from gradscope.recording.graph import Node

# Calls whose result is the memory they were given, unchanged.
VIEWS = ops.VIEWS | {"detach", "contiguous", "to"}


def replaced_calls(case: Case) -> set[int]:
    """Indices of calls that some recipe would replace: the finding of that recipe speaks of them."""
    places = (place for place in case.facts.places if place.supported and not place.idle)
    return {index for place in places for index in place.calls}


def layers_of(case: Case, call: Node) -> list[str]:
    """Paths of the layers that may have made the call: a call of torch's own module is known by that module alone."""
    if call.layer is None:
        return []
    if call.module is None:
        return [call.layer]
    return [call.layer, *(row.path for row in case.below.get(call.layer, ()) if row.path != call.layer)]


def changed_in_place(case: Case, since: int = 0) -> set[int]:
    """Storages that some call wrote to, or may have; what an optimizer does to parameters is left out.

    Args:
        since: index of the first call that counts.
    """
    found: set[int] = set()
    for call in case.facts.calls[since:]:
        given = {tensor.storage for tensor in call.inputs}
        if call.op == "setitem" or call.op not in VIEWS:
            made = [tensor for tensor in call.outputs if call.grad or tensor.parameter is None]
            found |= {tensor.storage for tensor in made if tensor.storage in given}
    return found
