"""Compiled modules whose ``forward`` the program calls itself, and models all of whose code is torch's own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.inductor import inductor as inductor_backend
from torch._dynamo.symbolic_convert import InliningInstructionTranslator
from torch._functorch import config as functorch_config
from torch._inductor import config

import gradscope
from gradscope.capture.naming import ModuleNames
from gradscope.compat import GraphWatch, noting_calls_by_hand
from gradscope.compat.dynamo.by_hand import _is_read_by_the_program
from gradscope.graphs import compiled_graphs
from gradscope.tables import GraphNote, LineInfo, NodeNote, RunData

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


def owners(run: Callable[[Tensor], Tensor], model: nn.Module, name: str = "inductor") -> dict[str, list[str]]:
    """Of each operation, by name, the paths of the modules around it, as Dynamo tells of it; nothing is generated.

    Args:
        name: of the backend.
    """
    paths = {str(id(module)): path for path, module in model.named_modules()}
    found: dict[str, list[str]] = {}

    def look(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        for node in graph.graph.nodes:
            if node.op == "call_function":
                keys = [key.partition("@")[0] for key in node.meta.get("nn_module_stack", {})]
                found.setdefault(node.target.__name__, []).append("/".join(paths[key] for key in keys))
        return graph.forward

    look.__name__ = name

    def failed(error: Exception) -> None:
        raise error

    torch._dynamo.reset()
    before = vars(InliningInstructionTranslator)["inline_call"]
    with noting_calls_by_hand(failed):
        torch.compile(run, backend=look)(torch.ones(3, 11))
    assert vars(InliningInstructionTranslator)["inline_call"] is before
    torch._dynamo.reset()
    return found


class Tree(nn.Module):
    """One of its own kind below it, which it calls by hand."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.left = Tree(depth - 1) if depth else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) if self.left is None else torch.sin(self.left.forward(x))


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Inner(), Inner()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.one.forward(self.other.forward(x)))


class Further(Inner):
    """It calls the ``forward`` of its base for itself, and holds one of that class beside."""

    def __init__(self) -> None:
        super().__init__()
        self.average = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Inherits(Block):
    """Its own ``forward`` is its base's."""


class Plus(nn.Module):
    """Blocks of a class and of one below it, all called by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Inner(), Further(), Further()])

    def forward(self, x: Tensor) -> Tensor:
        for each in self.parts:
            x = each.forward(x)
        return x


class Borrows(nn.Module):
    """It has another class's ``forward`` run on itself, and holds one of that class."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.kid = nn.Linear(11, 33), nn.Linear(33, 11), Inner()

    def _bent(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        return Inner.forward(self, x)  # type: ignore[arg-type]


class ByClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.plain = Inner(), nn.Tanhshrink()

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(Inner.forward(self.inner, x=x))


class ByBase(nn.Module):
    """A base's ``forward`` in the place of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Further()

    def forward(self, x: Tensor) -> Tensor:
        return Inner.forward(self.inner, x)


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return Inner.forward(x=x, self=self.inner)


class Decorated(Inner):
    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)

    @torch.autocast("cpu", enabled=False)  # type: ignore[untyped-decorator]
    def helps(self, x: Tensor) -> Tensor:
        return torch.sin(x)


class CallsDecorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Decorated()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.helps(self.inner.forward(x))  # type: ignore[no-any-return]


class Patched(nn.Module):
    """As libraries that move weights about do it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.inner.forward = MethodType(lambda inner, x: torch.sin(Inner.forward(inner, x)), self.inner)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cos(self.inner.forward(x))


class Shared(nn.Module):
    """A module that is called, and by hand as well, from a sibling too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.by = Inner(), nn.ModuleList([Block()])
        self.by[0].inner = self.inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.forward(self.by[0](self.inner(x)))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Block, {"tanh": ["inner"], "add": [""]}),
        (lambda: Tree(2), {"tanh": ["left/left.left"], "sin": ["left", ""]}),
        (Twice, {"tanh": ["other", "one"], "sin": [""]}),
        (Further, {"tanh": [""]}),
        (Inherits, {"tanh": ["inner"], "add": [""]}),
        (Plus, {"tanh": ["parts.0", "parts.1", "parts.2"]}),
        (Borrows, {"tanh": [""]}),
        (ByClass, {"tanh": ["inner"], "sin": [""]}),
        (CallsDecorated, {"tanh": ["inner"], "sin": [""]}),
        (Patched, {"tanh": ["inner"], "sin": [""], "cos": [""]}),  # the function that is put there is nobody's
        (ByBase, {"tanh": ["inner"]}),
        (ByName, {"tanh": ["inner"]}),
        (Shared, {"tanh": ["inner", "by.0/inner", "inner"], "add": ["by.0"]}),
    ],
)
def test_modules_are_told_whose_forward_is_called_by_hand(
    kind: Callable[[], nn.Module], expected: dict[str, list[str]]
) -> None:
    """Of the module that is compiled itself torch tells nothing, however it is called."""
    model = kind()
    found = owners(model, model)
    assert {name: found[name] for name in expected} == expected
    # Called by a function instead the model is around all of it.
    found = owners(lambda x: model.forward(x), model)
    below = {name: [f"/{each}" if each else "" for each in paths] for name, paths in expected.items()}
    assert {name: found[name] for name in expected} == below


def _step(self: nn.Module, x: Tensor) -> Tensor:
    return torch.cos(self.forward(x))  # type: ignore[no-any-return]


def test_what_the_program_may_read_is_as_torch_has_it() -> None:
    model = Block()
    assert owners(model, model)["tanh"] == ["inner"]
    assert owners(model, model, "programs")["tanh"] == [""]
    for changed in (
        config.patch(joint_custom_post_pass=print),
        config.patch(custom_partitioner_fn=print),
        config.patch(reorder_for_compute_comm_overlap_passes=["sink_waits", print]),
        functorch_config.patch(joint_custom_pass=print),
    ):
        with changed:
            assert owners(model, model)["tanh"] == [""]
    assert owners(model, model)["tanh"] == ["inner"]


class _Own(torch._TorchCompileInductorWrapper):
    """A program's, that looks at the graph first."""


def _named(*_: object) -> None:
    """A program's, called as torch's is."""


_named.__name__ = "inductor"


@pytest.mark.parametrize(
    ("backend", "reads"),
    [
        (torch._TorchCompileInductorWrapper(None, None, None), False),
        (torch._TorchCompileInductorWrapper(None, {"post_grad_custom_pre_pass": print}, None), True),
        (inductor_backend, False),
        (_Own(None, None, None), True),
        (_named, True),
    ],
    ids=["torch's", "with a pass", "by torch's function", "the program's class", "the program's function"],
)
def test_whose_a_backend_is(backend: Any, reads: bool) -> None:
    wrapped = SimpleNamespace(__name__="inductor", _torchdynamo_orig_backend=backend)
    output = SimpleNamespace(compiler_fn=wrapped)
    assert _is_read_by_the_program(SimpleNamespace(output=output, export=False)) is reads
    assert _is_read_by_the_program(SimpleNamespace(output=output, export=True))


def test_a_function_that_is_compiled_is_no_module_whatever_it_calls_its_argument() -> None:
    """The module is noted around what it computes there; of one that is compiled itself it is not."""
    model = Block()
    assert owners(MethodType(_step, model), model)["tanh"] == ["/inner"]
    assert owners(model.forward, model)["tanh"] == ["inner"]


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


def _deep(x: Tensor, depth: int) -> Tensor:
    return x + 1 if depth == 0 else _deep(x, depth - 1)


def _compiles(depth: int) -> bool:
    torch._dynamo.reset()
    try:
        torch.compile(lambda x: _deep(x, depth), backend="eager", fullgraph=True)(torch.ones(2))
    except Exception:
        return False
    return True


def test_functions_are_inlined_as_deep_as_alone(inductor: None) -> None:
    """The frame that is added at each is room that Dynamo lacks."""
    deepest, before = 40, sys.getrecursionlimit()
    while _compiles(deepest + 4):
        deepest += 4
    errors: list[Exception] = []
    with noting_calls_by_hand(errors.append):
        assert _compiles(deepest)
        assert not _compiles(100_000)
    assert not errors and sys.getrecursionlimit() == before
