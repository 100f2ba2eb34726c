"""Where nodes are from that a pass of Inductor's puts in the place of others."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from gradscope.compat.inductor import PATTERNS, origins, work
from gradscope.compat.inductor.notes import node_note
from gradscope.compat.inductor.origins import _FROM, _give, told_of, watching_replacements

aten = torch.ops.aten
HEAD, SOFTMAX = "net.attention", "net.attention.softmax"


def told(path: str, line: int, tag: str = "is_forward", **more: Any) -> dict[str, Any]:
    """What torch keeps of a node that is in the module at ``path``, and in all around it."""
    parts = path.split(".")
    paths = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    stack = {each: (each, torch.nn.Module) for each in paths}
    name = "nn_module_stack" if tag == "is_forward" else "fwd_nn_module_stack"
    trace = f'File "net.py", line {line}, in forward\n    x'
    return {name: stack, "stack_trace": trace, "seq_nr": line, "partitioner_tag": tag, **more}


def made(*nodes: tuple[Callable[..., Any], Mapping[str, Any]]) -> list[fx.Node]:
    graph = fx.Graph()
    x, heads = graph.placeholder("x"), graph.placeholder("heads")
    x.meta["val"] = torch.empty(2, 4, 4, device="meta")
    heads.meta["val"] = torch.empty(2, 4, 4, 4, device="meta")
    found = []
    for target, meta in nodes:
        node = graph.call_function(target, (heads if "attention" in str(target) else x,) * 3)
        node.meta.update(meta)
        found.append(node)
    return found


def test_matmuls_and_the_rest_are_of_what_computed_the_same() -> None:
    old = [
        (aten.bmm.default, told(HEAD, 1)),
        (aten.exp.default, told(SOFTMAX, 2)),
        (aten.bmm.default, told(HEAD, 3)),
        (aten.bmm.default, told(HEAD, 3, "is_backward")),
    ]
    tag, back = {"partitioner_tag": "is_forward"}, {"partitioner_tag": "is_backward"}
    new = made(
        (aten.baddbmm.default, tag),
        (aten.exp.default, tag),
        (aten.eq.Scalar, tag),
        (aten.baddbmm.default, tag),
        (aten.baddbmm.default, back),
    )
    _give(old, new)
    notes = [node_note(node) for node in new]
    assert [note.modules[-1].path for note in notes] == [HEAD, SOFTMAX, HEAD, HEAD, HEAD]
    assert [note.frames[0][1] for note in notes] == [1, 2, 1, 3, 3]  # of what is new the line of the first matmul
    assert [note.sequence for note in notes] == [1, 2, 1, 3, 3]
    assert [note.forward for note in notes] == [True] * 4 + [False]


def test_what_is_one_now_is_of_the_module_around_all() -> None:
    old = [
        (aten.exp.default, told(SOFTMAX, 2)),
        (aten.bmm.default, told(HEAD, 1)),
        (aten.bmm.default, told("net.attention.out", 3)),
    ]
    (one,) = made((aten._scaled_dot_product_flash_attention.default, {"partitioner_tag": "is_forward"}))
    _give(old, [one])
    note = node_note(one)
    assert note.modules[-1].path == HEAD and note.frames[0][1] == 1


def test_what_torch_tells_stands() -> None:
    (known, empty) = made((aten.baddbmm.default, told("net.other", 7)), (aten.baddbmm.default, {"nn_module_stack": {}}))
    _give([(aten.baddbmm.default, told(HEAD, 1)), (aten.baddbmm.default, told(HEAD, 2))], [known, empty])
    assert node_note(known).modules[-1].path == "net.other"
    assert node_note(empty).modules[-1].path == HEAD


def test_what_replaces_a_replacement_is_from_where_that_is() -> None:
    (first,) = made((aten.rand.default, {}))
    _give([(aten.bernoulli.default, told(SOFTMAX, 2))], [first])
    (second,) = made((aten.randn.default, {}))
    _give([(aten.rand.default, told_of(first))], [second])
    assert node_note(second).modules[-1].path == SOFTMAX


def test_of_what_nobody_knows_nothing_is_told() -> None:
    (node,) = made((aten.rand.default, {}))
    _give([(aten.bernoulli.default, {"seq_nr": 1})], [node])
    assert not node_note(node).modules and "gradscope_from" not in node.meta


def _replaces(match: Any, graph: fx.Graph, target: Any, args: Any) -> list[fx.Node]:
    """As a pass does: a node in the place of the last of a pattern, in front of it."""
    (*_, last) = match.nodes
    with graph.inserting_before(last):
        node = graph.call_function(target, args)
    last.replace_all_uses_with(node)
    return [node]


def _replaces_silently(match: Any, graph: fx.Graph, target: Any, args: Any) -> None:
    _replaces(match, graph, target, args)


@pytest.mark.parametrize("replaces", [_replaces, _replaces_silently])
@pytest.mark.parametrize("wanted", [True, False])
def test_what_a_pass_puts_in_is_told_whether_or_not_it_returns_it(
    replaces: Callable[..., Any], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Entry:
        replace_with_graph = staticmethod(replaces)

    monkeypatch.setitem(sys.modules, PATTERNS, SimpleNamespace(ReplacementPatternEntry=Entry))  # type: ignore[arg-type]
    first, last = made((aten.exp.default, told(SOFTMAX, 2)), (aten.tanh.default, told(SOFTMAX, 3)))
    graph, failed = first.graph, list[Exception]()
    known = set(graph.nodes)
    original = vars(Entry)["replace_with_graph"]
    with watching_replacements(lambda: wanted, failed.append):
        Entry.replace_with_graph(SimpleNamespace(nodes=[first, last]), graph, aten.sinh.default, first.args)
    assert vars(Entry)["replace_with_graph"] is original and not failed
    (new,) = [node for node in graph.nodes if node not in known]
    assert [each.path for each in node_note(new).modules[-1:]] == [SOFTMAX] * wanted
    assert (not node_note(new).frames) is not wanted


def test_an_error_of_the_noting_does_not_end_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    class Entry:
        replace_with_graph = staticmethod(_replaces)

    monkeypatch.setitem(sys.modules, PATTERNS, SimpleNamespace(ReplacementPatternEntry=Entry))  # type: ignore[arg-type]
    monkeypatch.setattr(origins, "told_of", None)
    first, last = made((aten.exp.default, told(SOFTMAX, 2)), (aten.tanh.default, told(SOFTMAX, 3)))
    failed = list[Exception]()
    with watching_replacements(lambda: True, failed.append):
        (new,) = Entry.replace_with_graph(
            SimpleNamespace(nodes=[first, last]), first.graph, aten.sinh.default, first.args
        )
    assert new.target is aten.sinh.default and len(failed) == 1


def test_one_of_two_matmuls_is_of_neither_but_of_what_is_around() -> None:
    old = [(aten.bmm.default, told("net.attention.q", 1)), (aten.bmm.default, told("net.attention.out", 3))]
    (one,) = made((aten.baddbmm.default, {"partitioner_tag": "is_forward"}))
    _give(old, [one])
    assert node_note(one).modules[-1].path == HEAD


def test_what_torch_tells_later_stands_beside_what_it_does_not() -> None:
    meta = {"nn_module_stack": {"1": ("mine", "Mine")}, _FROM: {"nn_module_stack": {"2": ("old", "Old")}, "seq_nr": 4}}
    found = told_of(SimpleNamespace(meta=meta))
    assert (found["nn_module_stack"], found["seq_nr"]) == (meta["nn_module_stack"], 4)


def test_a_graph_that_is_given_a_number_that_is_fixed_too_has_operations_for_other_sizes() -> None:
    traced = make_fx(lambda x, weight: x @ weight, tracing_mode="symbolic")(torch.ones(6, 2), torch.ones(2, 4))
    (product,) = (node for node in traced.graph.nodes if node.target is torch.ops.aten.mm.default)
    sizes = list({str(size): size for each in product.args for size in each.meta["val"].shape}.values())
    whole = torch.fx.Graph()
    for name, size in (("fixed", 3), *((str(size), size) for size in sizes)):
        whole.placeholder(name).meta["val"] = size
    args = [whole.placeholder(name) for name in ("x", "weight")]
    for mine, theirs in zip(args, product.args, strict=True):
        mine.meta["val"] = theirs.meta["val"]
    whole.call_function(torch.ops.aten.mm.default, tuple(args)).meta["val"] = product.meta["val"]
    count = work.flops_at(SimpleNamespace(graph=whole))
    hints = [int(size.node.hint) for size in sizes]
    assert count is not None and list((count([3, *hints]) or {}).values()) == [2 * 6 * 2 * 4]
