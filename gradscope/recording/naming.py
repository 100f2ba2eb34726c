"""What stays of a recorded call when its frames and modules are gone: its layer, its line, its parameters' paths."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from gradscope.recording.graph import Node, Recording


def name_calls(
    recording: Recording,
    layer_of: Callable[[nn.Module], str | None],
    names: Mapping[int, str],
    shown: Callable[[str], str],
) -> None:
    """Write down where each call stands, and which of its tensors have a name.

    Args:
        layer_of: the path of a module, "" for the root; None where it has none.
        names: of parameters and buffers, by id.
        shown: how a file is shown, as in the table of lines.
    """
    for value in recording.values:
        tensor = value.tensor()
        value.parameter = None if tensor is None else names.get(id(tensor))
    for node in recording.nodes:
        _name(node, layer_of, shown)


def _name(node: Node, layer_of: Callable[[nn.Module], str | None], shown: Callable[[str], str]) -> None:
    caller = node.caller
    owner = caller
    if owner is None:
        owner = next((p.frame.owner for p in node.places if isinstance(p.frame.owner, nn.Module)), None)
    node.layer = layer_of(owner) if isinstance(owner, nn.Module) else None
    node.module = None if caller is None else type(caller).__name__
    place = next((place for place in node.places if place.span is not None), node.outside)
    if place is not None and place.span is not None:
        node.source = f"{shown(place.frame.code.co_filename)}:{place.span.line}"
        node.function_name = place.frame.code.co_name
