"""What is kept of a graph that Inductor has just compiled: its kernels, and where each of its nodes is from.

Source: torch/_inductor/debug.py (``set_kernel_post_grad_provenance_tracing``), as of torch 2.11 to 2.14.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradscope.compat.compiled_autograd import compiles_pass, from_there
from gradscope.compat.dynamo.log import users_name
from gradscope.compat.inductor import DEBUG, FUNCTORCH_CONFIG
from gradscope.compat.inductor.origins import told_of
from gradscope.compat.inductor.sums import with_owners
from gradscope.compat.inductor.work import bytes_of, flops, flops_at, has_state, operation, seen, work_of
from gradscope.tables import CalledFrom, GraphNote, NodeNote

_HANDLE = re.compile(r"(?P<kernel>.*):(?P<order>\d+)")
_FRAME = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>.+)')

_OPTIMIZERS = os.path.join("torch", "optim", "")  # in the path of a file
_FORWARD = ("is_forward", "must_be_in_forward")


def last_handle() -> int:
    """The number of the last kernel that was generated: they are counted over graphs that are compiled together."""
    return int(sys.modules[DEBUG]._inductor_kernel_provenance_debug_handle)


def noted(graph: Any, before: int, earlier: Mapping[str, NodeNote]) -> GraphNote:
    """What is known of a graph that has just been compiled, to kernels behind number ``before``.

    Args:
        earlier: its nodes as they were before Inductor's passes, which put others in the place of some.
    """
    debug: Any = sys.modules[DEBUG]
    made_of: Mapping[str, Sequence[str]] = debug._inductor_triton_kernel_to_post_grad_node_info
    found = [(match, names) for text, names in made_of.items() if (match := _HANDLE.fullmatch(text))]
    called = {node.name: _kernel_of(operation(node)) for node in graph.graph.nodes if has_state(node)}
    kernels = sorted(
        (int(match["order"]), _named(match["kernel"], names, called), tuple(names)) for match, names in found
    )
    left = {node.name for node in graph.graph.nodes}
    nodes = {node.name: _with_origin(node, node_note(node), earlier, left) for node in graph.graph.nodes}
    nodes |= _in_branches(graph)
    if compiles_pass():
        nodes = {name: from_there(node, earlier[name]) if name in earlier else node for name, node in nodes.items()}
    return GraphNote(
        kernels=tuple((name, names) for order, name, names in kernels if order > before),  # as in the generated code
        nodes=with_owners(nodes),
        inputs=tuple(node.name for node in graph.graph.nodes if node.op == "placeholder"),
        is_optimizer=_is_optimizer(nodes.values()),
        sizes=tuple(
            seen(node.meta.get("val"))
            for node in graph.graph.nodes
            if node.op == "placeholder" and isinstance(node.meta.get("val"), (int, torch.SymInt))
        ),
        is_checkpointed=any("ac_graph_id" in node.meta for node in graph.graph.nodes),
        budget=_memory_budget(),
        is_pass=compiles_pass(),
        flops_at=flops_at(graph),
    )


def _named(kernel: str, names: Sequence[str], called: Mapping[str, str]) -> str:
    """A kernel's name; of an operation with the state of its random numbers around the operation's, as its row bears.

    Args:
        called: the operations of such nodes, by the nodes' names.
    """
    if not kernel.startswith("torch.ops.higher_order."):
        return kernel
    return next((called[name] for name in names if name in called), kernel)


def _kernel_of(target: Any) -> str:
    """How Inductor names the call of an operation of torch's: ``torch.ops.aten.mm.default``."""
    return f"torch.ops.{target}"


def _memory_budget() -> float:
    """The share of what is saved for backward that compiled graphs may save; 1.0: all that the partitioner wants."""
    config = sys.modules.get(FUNCTORCH_CONFIG)
    return float(getattr(config, "activation_memory_budget", 1.0))


def _in_branches(graph: Any) -> dict[str, NodeNote]:
    """Operations of branches, loops and regions (``torch.cond``, ``while_loop``, ``nested_compile_region``).

    Nobody knows how often a run makes them. A region that several blocks share is told as that of one of them: its
    operations are each one's.
    """
    calls: dict[str, list[tuple[CalledFrom, ...]]] = {}  # of each part the modules around what calls it
    for node in graph.graph.nodes:
        for each in node.all_input_nodes if node.op == "call_function" else ():
            if each.op == "get_attr":
                calls.setdefault(str(each.target), []).append(node_note(node).modules)
    return {
        f"{path}.{node.name}.{number}": replace(node_note(node), inputs=(), bytes=0, flops=-1, modules=modules)
        for path, part in graph.named_modules()
        if path and isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
        if work_of(node) is not None
        for number, modules in enumerate(_each_callers(node_note(node).modules, calls.get(path, ())))
    }


def _each_callers(
    modules: tuple[CalledFrom, ...], calls: Sequence[tuple[CalledFrom, ...]]
) -> list[tuple[CalledFrom, ...]]:
    """Modules around an operation, and those at its place below the others that call the part that it is in."""
    paths = [each[-1].path for each in calls if each]
    own = next((path for path in paths if any(each.path == path for each in modules)), None)
    found = [modules]
    for path in paths if own is not None else ():
        if path != own:
            below = [each for each in modules if each.path == own or each.path.startswith(f"{own}.")]
            found.append(tuple(CalledFrom(-1, path + each.path[len(str(own)) :], each.class_name) for each in below))
    return found


def _is_optimizer(nodes: Iterable[NodeNote]) -> bool:
    """Check that a graph is the step of one of torch's optimizers: all that is from a line is from one of its."""
    frames = [node.frames for node in nodes if node.frames]
    return bool(frames) and all(any(_OPTIMIZERS in file for file, _, _ in each) for each in frames)


def node_note(node: Any) -> NodeNote:
    meta, target = told_of(node), operation(node)
    if has_state(node) and not meta.get("stack_trace"):
        # Torch copies nothing to it of the operation that was there. What takes its results apart has it still.
        taken = next((told for user in node.users if (told := told_of(user)).get("stack_trace")), {})
        meta = {**taken, "val": meta.get("val")}
    held = meta.get("fwd_nn_module_stack") or meta.get("nn_module_stack") or {}
    return NodeNote(
        modules=tuple(_called_from(key, *value) for key, value in held.items()),
        frames=tuple(
            (match["file"], int(match["line"]), users_name(match["function"].strip()))
            for match in _FRAME.finditer(meta.get("stack_trace") or "")
        ),
        # What has no tag is backward: parts of a custom Function's, and of what a pass has put there.
        forward=node.op == "call_function" and (meta.get("partitioner_tag") in _FORWARD or has_state(node)),
        is_view=node.op == "call_function" and is_view(target),
        bytes=bytes_of(meta.get("val")),
        flops=flops(node),
        op=getattr(getattr(target, "overloadpacket", target), "__name__", ""),
        inputs=tuple(each.name for each in node.all_input_nodes),
        sequence=meta.get("seq_nr", -1),
        is_sum=bool(meta.get("is_gradient_acc")),
    )


def _with_origin(node: Any, note: NodeNote, earlier: Mapping[str, NodeNote], left: Collection[str]) -> NodeNote:
    """``note`` of where the matmul is from where a pass has joined one with an addition, whose origin torch keeps.

    It multiplies what that matmul did, which may be there still, for others that read it.

    Args:
        left: names of the nodes that there are now: of two matmuls that were added the one that was not joined.
    """
    if node.name in earlier or not note.flops:
        return note
    replaced = [each.name for each in node.meta.get("from_node", ())]
    joined = dict.fromkeys(name for each in replaced if each in earlier for name in (each, *earlier[each].inputs))
    alike = [(name, earlier[name]) for name in joined if name in earlier and earlier[name].flops == note.flops]
    origins = [each for _, each in alike if each.inputs == note.inputs[1:]]  # behind what is added
    if len(origins) != 1:
        origins = [each for name, each in alike if name not in left]
    if len(origins) != 1:
        return note
    (origin,) = origins
    return replace(note, modules=origin.modules, frames=origin.frames, forward=origin.forward)


def _called_from(key: str, path: str, kind: Any) -> CalledFrom:
    number = key.partition("@")[0]  # of a module that is called several times: @1
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    return CalledFrom(int(number) if number.isdigit() else -1, path, name.rpartition(".")[2])


def is_view(target: Any) -> bool:
    """Check that an operation computes nothing: its result is a part of its input."""
    if getattr(target, "__name__", "") == "getitem":
        return True
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    return any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
