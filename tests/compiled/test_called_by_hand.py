"""Compiled modules whose ``forward`` the program calls itself, and models all of whose code is torch's own."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import gradscope
from gradscope.capture.naming import ModuleNames
from gradscope.compat import GraphWatch
from gradscope.graphs import compiled_graphs
from gradscope.tables import CalledFrom, GraphNote, GraphRun, LineInfo, ModuleInfo, NodeNote, RunData

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(11, 33), nn.Linear(33, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self._bent(self.up(x)))  # type: ignore[no-any-return]

    def _bent(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner.forward(x)


@pytest.fixture
def inductor() -> Iterator[None]:
    """Inductor in this process alone, and its paths as before."""
    from torch._inductor import config

    paths = list(sys.path)
    torch._dynamo.reset()
    with config.patch(compile_threads=1):
        yield
    torch._dynamo.reset()
    sys.path[:] = paths


def measured(model: nn.Module, *, compiled: bool) -> RunData:
    torch.manual_seed(0)
    run = torch.compile(model) if compiled else model
    with gradscope.profiling(model, steps=2, warmup=3) as prof:
        for _ in range(60):
            if prof.step():
                break
            run(torch.randn(7, 11)).square().sum().backward()  # the line of the call
            model.zero_grad()
    return prof.report.data


def test_what_a_module_computes_that_is_called_by_hand_is_its_own(inductor: None) -> None:
    eager, found = ({row.path: row for row in measured(Block(), compiled=each).layers} for each in (False, True))
    assert {path: row.saved_bytes for path, row in found.items()} == {
        path: row.saved_bytes for path, row in eager.items()
    }
    assert found["inner"].backward_self_ns > 0 and found["inner"].forward_self_ns > 0
    for path in ("inner.up", "inner.down"):
        assert (found[path].forward_flops, found[path].backward_flops) == (
            eager[path].forward_flops,
            eager[path].backward_flops,
        )


def test_where_all_modules_are_torchs_own_the_line_is_that_of_the_call(inductor: None) -> None:
    data = measured(nn.Sequential(nn.Linear(11, 33), nn.ReLU(), nn.Linear(33, 11)), compiled=True)
    (line,) = [row for row in data.lines if "the line of the call" in row.text]
    layers = sum(row.backward_self_ns for row in data.layers if row.path)
    assert line.backward_ns >= layers > 0 and line.forward_ns > 0
    assert (
        data.memory is not None
        and line.saved_bytes
        and not any(row.line is None and row.layer for row in data.memory.saved)
    )


def names_of(model: nn.Module) -> ModuleNames:
    infos, modules = [], []
    for path, module in model.named_modules():
        parent = None if not path else path.rpartition(".")[0]
        infos.append(ModuleInfo(path, type(module).__name__, parent, 0, None))
        modules.append(module)
    return ModuleNames(tuple(infos), {id(each): row for row, each in enumerate(modules)}, (model,), tuple(modules))


def layer_of(
    names: ModuleNames, called: list[str], *frames: tuple[type, str], others: Sequence[str] = ()
) -> str | None:
    """Whose an operation is below modules that torch tells of, on the first line of these functions of classes.

    Args:
        others: modules around another operation of the graph.
    """
    rows = {info.path: row for row, info in enumerate(names.infos)}
    around, beside = (
        tuple(CalledFrom(rows[path], path, names.infos[rows[path]].class_name) for path in paths)
        for paths in (called, others)
    )
    lines = []
    for kind, name in frames:
        code = getattr(kind, name).__code__
        lines.append((code.co_filename, code.co_firstlineno + 1, code.co_name))
    node = NodeNote(
        modules=around, frames=tuple(lines), inputs=(), op="mul", forward=True, bytes=4, flops=0, is_view=False
    )
    note = GraphNote((), {"p": node, "q": replace(node, modules=beside, frames=())})
    known = {row: row for row in range(len(names.infos))}
    (graph,) = compiled_graphs([note], [GraphRun(0, ())], {}, {}, names, [], lambda _: (), [known]).values()
    layer = graph.nodes["p"].layer
    return None if layer < 0 else names.infos[layer].path


class Tree(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.left = Tree(depth - 1) if depth else None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.left is None else self.left(x)  # type: ignore[no-any-return]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Inner(), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.one.forward(self.other.forward(x))


def test_a_line_is_of_the_module_below_the_last_that_torch_tells_of() -> None:
    block = names_of(nn.Sequential(Block(), Block()))
    called = ["", "1"]
    assert layer_of(block, called, (Block, "forward"), (Inner, "forward")) == "1.inner"
    assert layer_of(block, called, (Block, "forward"), (Inner, "forward"), (Inner, "_bent")) == "1.inner"
    assert layer_of(block, called, (Block, "forward")) == "1"
    assert layer_of(block, [*called, "1.inner"], (Block, "forward"), (Inner, "forward")) == "1.inner"
    assert layer_of(block, [*called, "1.inner", "1.inner.up"], (Block, "forward"), (Inner, "forward")) == "1.inner.up"


def test_a_module_that_holds_one_of_its_class_is_not_taken_for_that() -> None:
    tree = names_of(Tree(2))
    assert layer_of(tree, [""], (Tree, "forward")) == ""
    assert layer_of(tree, ["", "left"], (Tree, "forward"), (Tree, "forward")) == "left"
    assert layer_of(tree, [""], (Tree, "forward"), (Tree, "forward"), (Tree, "forward")) == ""  # one of two
    assert layer_of(names_of(Tree(1)), [""], (Tree, "forward"), (Tree, "forward")) == "left"


def test_of_several_modules_of_one_class_none_is_told() -> None:
    assert layer_of(names_of(Twice()), [""], (Twice, "forward"), (Inner, "forward")) == ""


class Further(Inner):
    """It holds one of the class that it is derived from, and calls that class's ``forward`` for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.average = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Inherits(Block):
    """Its own ``forward`` is its base's."""


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.others = Inner(), nn.ModuleList([Inner(), Inner()])

    def forward(self, x: Tensor) -> Tensor:
        return self.others[0].forward(self.first(x))


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.box = Inner(), nn.Sequential(Inner())

    def forward(self, x: Tensor) -> Tensor:
        return self.box[0].forward(self.first(x))


def test_a_module_that_torch_tells_of_is_not_called_by_hand() -> None:
    """Nor is one of several below, at whatever depth."""
    frames = (Listed, "forward"), (Inner, "forward")
    assert layer_of(names_of(Listed()), [""], *frames) == ""
    assert layer_of(names_of(Listed()), [""], *frames, others=["", "first"]) == ""
    frames = (Boxed, "forward"), (Inner, "forward")
    assert layer_of(names_of(Boxed()), [""], *frames) == ""
    assert layer_of(names_of(Boxed()), [""], *frames, others=["", "first"]) == "box.0"


def test_what_super_computes_is_no_childs() -> None:
    assert layer_of(names_of(Further()), [""], (Further, "forward"), (Inner, "forward")) == ""
    assert layer_of(names_of(Inherits()), [""], (Block, "forward"), (Inner, "forward")) == "inner"


def test_a_call_is_noted_of_graphs_whose_nodes_are_from_no_line() -> None:
    watch = GraphWatch()
    node = NodeNote(modules=(), frames=(), inputs=(), op="mul", forward=True, bytes=4, flops=0, is_view=False)
    line = ("train.py", 7, "step")
    numbers = [
        watch.add(GraphNote((), {"p": each})) for each in (node, NodeNote(**{**vars_of(node), "frames": (line,)}))
    ]
    calls = iter([("train.py", 12, "main"), ("eval.py", 3, "main")])
    watch.frame = lambda: next(calls)
    runs = [watch.run(numbers[0], []), watch.run(numbers[1], []), watch.run(numbers[0], [])]
    assert runs == [0, 1, 2]
    assert [ran.called_from for ran in watch.runs] == [("train.py", 12, "main"), None, ("eval.py", 3, "main")]
    lines: list[LineInfo] = []
    names = ModuleNames((), {}, (), ())
    found = compiled_graphs(watch.graphs, watch.runs, {}, {}, names, lines, lambda _: (), [{}, {}])
    assert [lines[found[run].line].line if found[run].line >= 0 else None for run in runs] == [12, None, 3]
    assert [each.line for each in found[0].with_line(5).nodes.values()] == [5]
    (known,) = found[1].nodes.values()
    nodes = {"p": known, "q": replace(known, line=-1), "r": replace(known, line=-1, layer=0)}
    mixed = replace(found[1], nodes=nodes).with_line(5)
    assert [each.line for each in mixed.nodes.values()] == [known.line, -1, 5]
    assert [lines[each.line].line for each in found[1].with_line(5).nodes.values()] == [7]


def vars_of(node: NodeNote) -> dict[str, object]:
    return {name: getattr(node, name) for name in NodeNote.__dataclass_fields__}
