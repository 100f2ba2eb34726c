"""Operations that torch calls with the state of their random numbers around, where a checkpoint runs them again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from gradscope.compat.inductor.notes import node_note
from gradscope.compat.inductor.work import has_state, work_of

ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
SHAPE = (2, 4, 8, 16)  # batch, heads, tokens, of a head
FLOPS = 2 * (2 * 2 * 4 * 8 * 8 * 16)  # two matmuls of tokens x tokens x of a head
META = {
    "nn_module_stack": {"1": ("L['self'].attn", torch.nn.Linear)},
    "stack_trace": 'File "model.py", line 7, in forward\n    x = attend(x)',
    "partitioner_tag": "is_forward",
}


def wrapped(name: str) -> fx.Node:
    """A call of attention in ``name``, as torch makes it: what takes the results apart knows where it is from."""
    graph = fx.Graph()
    q, k, v, state = (graph.placeholder(each) for each in ("q", "k", "v", "state"))
    for each in (q, k, v):
        each.meta["val"] = torch.empty(SHAPE, device="meta")
    target: Any = getattr(torch.ops.higher_order, name)
    made = torch.empty(SHAPE, device="meta"), torch.empty(SHAPE[:3], device="meta")
    if name == "run_and_save_rng_state":
        node = graph.call_function(target, (ATTENTION, q, k, v))
        node.meta["val"] = (torch.empty(16, device="meta"), made)
        graph.call_function(lambda results: results[0], (node,))  # the state, of which nothing is told
    elif name == "run_with_rng_state":
        node = graph.call_function(target, (state, ATTENTION, q, k, v))
        node.meta["val"] = made
    else:
        node = graph.call_function(target, (ATTENTION, q, k, v), {"rng_state": state})
        node.meta["val"] = made
    graph.call_function(lambda results: results[1], (node,)).meta.update(META)
    return node


@pytest.mark.parametrize("name", ["run_and_save_rng_state", "run_with_rng_state", "graphsafe_run_with_rng_state"])
def test_it_is_noted_as_the_operation_that_is_called(name: str) -> None:
    if not hasattr(torch.ops.higher_order, name):
        pytest.skip(f"this torch has no {name}")
    node = wrapped(name)
    note = node_note(node)
    assert has_state(node)
    assert note.op == "_scaled_dot_product_flash_attention_for_cpu" and note.flops == FLOPS
    assert [each.path for each in note.modules] == ["L['self'].attn"]
    assert note.frames == (("model.py", 7, "forward"),) and note.forward
    work = work_of(node)
    assert work is not None and work({}) == FLOPS


def test_it_is_forward_whatever_the_tag_of_what_takes_its_results() -> None:
    node = wrapped("run_with_rng_state")
    for each in node.users:
        each.meta["partitioner_tag"] = "must_be_in_backward"
    assert node_note(node).forward
