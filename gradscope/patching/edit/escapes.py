"""What the recorded run says about a match: whether somebody else sees what it makes, or changes what it reads."""

from __future__ import annotations

import ast

from torch import nn

from gradscope.patching.edit.call_sites import Texts
from gradscope.patching.edit.reading import INLINE, is_fixed
from gradscope.patching.edit.refusal import Refusal
from gradscope.patching.edit.shape_queries import is_asked_for_form
from gradscope.patching.edit.source import FunctionSource, SourceFile
from gradscope.patching.edit.syntax import is_straight
from gradscope.patching.graph import CASTS
from gradscope.patching.match import Match, Scalar
from gradscope.recording.graph import Frame, Node, Recording, Value
from gradscope.recording.operations import LIKE


def check_run(match: Match, recording: Recording, frame: Frame, source: FunctionSource) -> None:
    """Raises Refusal where the run shows that the calls of ``match`` cannot be replaced in ``frame``."""
    _check_inner(match)
    _check_changes(match, recording.nodes)
    if len({node.grad for node in match.nodes if node.inputs}) > 1:
        raise Refusal("gradients are switched off for a part of the pattern")
    files = {source.file.name: source.file}
    _check_helpers(match, frame, files)
    for scalar in match.fixed:
        _check_fixed(scalar, recording, files)


def _check_inner(match: Match) -> None:
    """What the pattern makes on the way is seen by nobody else."""
    known = {value.content for node in match.nodes for value in node.inputs if value.producer not in match.nodes}
    known.add(match.output.content)
    for value in match.inner:
        others = [user for user in value.users if user not in match.nodes and not is_asked_for_form(user, value)]
        if others and others[0].op in LIKE:
            raise Refusal(f"{others[0].op} asks for the form of what {_maker(value.producer)} makes, which goes")
        if others and not is_no_cast(value):
            raise Refusal(f"the result of {_maker(value.producer)} is also read by {others[0].op}")
        if value.alive and value.content not in known:
            raise Refusal(f"the result of {_maker(value.producer)} is kept after the run: it is returned or stored")


def _check_changes(match: Match, nodes: list[Node]) -> None:
    """What the pattern reads stays as it is until the result is made, and the pattern changes only its own."""
    inner = {*match.inner, match.output}
    outside = {value.storage for node in match.nodes for value in node.inputs if value not in inner}
    changing = [node for node in nodes[: match.last.index + 1] if node.changed]
    for node in match.nodes:
        if node.changed & outside:
            raise Refusal(f"{node.op} changes a tensor in place that was there before")
        for value in node.inputs:
            for other in changing:
                late = other.index > node.index and value.storage in other.changed
                if late and other not in match.nodes:
                    raise Refusal(f"{other.op} changes in place what {node.op} read")


def _check_helpers(match: Match, frame: Frame, files: dict[str, SourceFile]) -> None:
    """Functions that are called on the way do the same every time, and nothing besides."""
    checked = set()
    for node in match.nodes:
        if is_hooked(node.caller):
            raise Refusal(f"the {type(node.caller).__name__} has hooks, which would no longer be called")
        for place in node.places:
            code = place.frame.code
            if place.frame is frame:
                break
            if is_hooked(place.frame.owner):
                raise Refusal(f"the {type(place.frame.owner).__name__} has hooks, which would no longer be called")
            if code in checked or code.co_name in INLINE:
                continue
            checked.add(code)
            definition = FunctionSource.of(code, files).definition
            if any(not isinstance(each, ast.Name) or each.id != "staticmethod" for each in definition.decorator_list):
                raise Refusal(f"{code.co_name}, which makes a part of the pattern, is decorated")
            for statement in definition.body:
                if not is_straight(statement):
                    raise Refusal(f"{code.co_name} may do something else another time, on line {statement.lineno}")


def _check_fixed(scalar: Scalar, recording: Recording, files: dict[str, SourceFile]) -> None:
    """A number that was relied on is written down as such."""
    if scalar.node.caller is not None:  # a setting of a module of torch's
        return
    frame = scalar.node.places[0].frame
    source = FunctionSource.of(frame.code, files)
    found = Texts(source, frame, recording.executed_in(frame), scalar.node).scalar(scalar)
    if not isinstance(found, str) and not is_fixed(found):
        raise Refusal(f"line {found.lineno}: {source.file.of(found)} may be another number next time")


def is_no_cast(value: Value) -> bool:
    """Whether it is what a cast to the dtype that a tensor has already returned: that tensor, to all others."""
    node = value.producer
    return node is not None and node.op in CASTS and value.content == node.inputs[0].content


def is_hooked(module: object) -> bool:
    """Whether somebody watches the calls of a module."""
    return isinstance(module, nn.Module) and bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _maker(node: Node | None) -> str:
    return "an input" if node is None else node.op
