"""What Inductor knows of the kernels that it generates: of which nodes each is made, and where these are from.

Source: torch/_inductor/debug.py (``set_kernel_post_grad_provenance_tracing``), compile_fx.py, output_code.py (the row
that a graph writes into a profiler's trace), as of torch 2.11 to 2.14.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
import re
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from gradscope import markers
from gradscope.compat.compiled_autograd import CopiedNodes, compiles_pass, from_there, watching_copies
from gradscope.compat.dynamo.log import users_name
from gradscope.compat.flops import flop_formulas
from gradscope.compat.imports import once_imported
from gradscope.compat.inductor_rows import KernelRows
from gradscope.compat.inductor_settings import COMPILE_FX, INSIDE, KERNEL_PROFILE, SETTINGS, Settings
from gradscope.compat.private import dispatch_depth, replaced
from gradscope.compat.profilers import without_rows
from gradscope.tables import TANGENTS, CalledFrom, GraphNote, GraphRun, NodeNote

_DEBUG, _OUTPUT = "torch._inductor.debug", "torch._inductor.output_code"
_READ = {
    COMPILE_FX: ("_InProcessFxCompile.codegen_and_compile", *INSIDE),
    _OUTPUT: ("CompiledFxGraph.__call__",),
    _DEBUG: ("_inductor_kernel_provenance_debug_handle", "_inductor_triton_kernel_to_post_grad_node_info"),
}
_T = TypeVar("_T")
_HANDLE = re.compile(r"(?P<kernel>.*):(?P<order>\d+)")
_FRAME = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>.+)')

_OPTIMIZERS = os.path.join("torch", "optim", "")  # in the path of a file
_FORWARD = ("is_forward", "must_be_in_forward")


def probe_graphs() -> None:
    """Look for everything that is read of Inductor here, which is imported for that.

    Raises:
        AttributeError, ImportError: this torch lacks something; compiled code is then one row.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own code
        modules = {name: importlib.import_module(name) for name in (COMPILE_FX, _DEBUG, _OUTPUT)}
    for module, names in _READ.items():
        for name in names:
            attrgetter(name)(modules[module])
    for module, name, _ in (*SETTINGS, KERNEL_PROFILE):
        attrgetter(name)(importlib.import_module(module))


_LOOKS = 4  # at gradients that were zero; more would cost each step


class GraphWatch:
    """The graphs that Inductor compiles, and what they are run with while a profiler runs.

    A run writes the row ``## Call CompiledFxGraph <marker><number> ##`` into the trace: its place in :attr:`runs`.
    """

    def __init__(self) -> None:
        self.graphs: list[GraphNote] = []
        self.runs: list[GraphRun] = []  # each once
        self.first: dict[int, tuple[int, ...]] = {}  # of each graph the parameters of its first run, by number
        self.parameters: list[weakref.ref[torch.Tensor]] = []  # that graphs were run with, by number
        # Of what was together when a graph was run with it first, what ``owners_of`` has answered of each then.
        self.owners: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {}
        self.labels: dict[int, int] = {}  # of a module that a graph is of, by its id, what ``label_of`` has answered
        self.owners_of: Callable[[torch.Tensor], tuple[int, ...]] = lambda _: ()  # labels of modules that hold it now
        self.label_of: Callable[[int], int | None] = lambda _: None  # of the living module with that id
        self.has_run = False  # a graph has, also one that was compiled before
        self.unknown_has_run = False  # such a graph has run while a profiler did
        self.told: Callable[[Sequence[torch.Tensor]], Any] | None = None  # of the parameters of a run that is new
        self.around: Callable[[], AbstractContextManager[None]] | None = None  # each run, in place of a bare one
        self.reads: Callable[[int, Sequence[Any]], None] | None = None  # told of each run what it is run with
        self._known: dict[GraphRun, int] = {}
        self._numbers: dict[int, int] = {}  # of a parameter that lives, by its id
        self._labelled: set[int] = set()  # graphs
        self._looks: Counter[int] = Counter()  # of each run beyond the first

    def name(self, number: int, inputs: Sequence[Any], *, profiled: bool) -> str:
        """What the row is to be called of this run of a graph; empty where a profiler writes none."""
        if number not in self.first:  # it has just been compiled, for these
            parameters = [each for each in inputs if isinstance(each, torch.nn.Parameter)]
            self.first[number] = tuple(map(self._number, parameters))
            self._note_owners(self.first[number], parameters)
        return f"{markers.GRAPH}{self.run(number, inputs)}" if profiled else ""

    def run(self, number: int, inputs: Sequence[Any]) -> int:
        """The number of a run of that graph."""
        parameters = [each for each in inputs if isinstance(each, torch.nn.Parameter)]
        sizes = tuple(each for each in inputs if type(each) is int)
        ran = GraphRun(number, tuple(map(self._number, parameters)), sizes)
        if ran not in self._known:
            self._known[ran] = len(self.runs)
            self.runs.append(replace(ran, zeros=_zeros(self.graphs[number].inputs, inputs) or ()))
            if self.told is not None and parameters:
                self.told(parameters)
            self._note_owners(ran.parameters, parameters)
            self._look_for_modules(number)
        else:
            self._look_again(self._known[ran], inputs)
        if self.reads is not None:
            self.reads(self._known[ran], inputs)
        return self._known[ran]

    def _number(self, parameter: torch.Tensor) -> int:
        """Not its id, which the next may have once it is gone, nor its address: an update by hand may change that."""
        number = self._numbers.get(id(parameter), -1)
        if number < 0 or self.parameters[number]() is not parameter:
            number = self._numbers[id(parameter)] = len(self.parameters)
            self.parameters.append(weakref.ref(parameter))
        return number

    def _note_owners(self, numbers: tuple[int, ...], parameters: Sequence[torch.Tensor]) -> None:
        """Note what holds these now: later it may be gone, or hold others."""
        if not all(self.owners.get(numbers, ((),))):
            self.owners[numbers] = tuple(map(self.owners_of, parameters))

    def _look_for_modules(self, number: int) -> None:
        """Note which modules a graph is of, while they live: the run may end behind a function whose they are."""
        if number in self._labelled:
            return
        self._labelled.add(number)
        for node in self.graphs[number].nodes.values():
            for each in node.modules:
                if each.module not in self.labels and (label := self.label_of(each.module)) is not None:
                    self.labels[each.module] = label

    def layers(self, numbers: tuple[int, ...], by_parameter: Mapping[int, int], rows: Sequence[int]) -> tuple[int, ...]:
        """Of parameters, by number, the row of the layer that held each when a graph was run with them; -1 for none.

        Args:
            by_parameter: the rows of those that modules hold now, by id.
            rows: of each label, -1 for one without.
        """
        found = []
        for number, labels in zip(numbers, self.owners.get(numbers, ((),) * len(numbers)), strict=True):
            held = [rows[label] for label in labels if label < len(rows) and rows[label] >= 0]
            parameter = self.parameters[number]()
            now = -1 if parameter is None else by_parameter.get(id(parameter), -1)
            found.append(min(held, default=now))  # of several the first
        return tuple(found)

    def _look_again(self, place: int, inputs: Sequence[Any]) -> None:
        """A value that another pass uses, or another step, is not unused."""
        ran = self.runs[place]
        if ran.zeros and self._looks[place] < _LOOKS:
            still = _zeros(self.graphs[ran.graph].inputs, inputs)
            if still is not None:
                self._looks[place] += 1
                self.runs[place] = replace(ran, zeros=tuple(name for name in ran.zeros if name in still))


def _zeros(names: Sequence[str], inputs: Sequence[Any]) -> tuple[str, ...] | None:
    """Gradients that are all zero, of what a graph is run with: of values that it returned and nobody used.

    None where they cannot be looked at now, below a mode of the program's say.

    Of plain tensors: another kind's answer might have to come from other ranks. No mode of the program's sees this.
    """
    if dispatch_depth():
        return None
    with suppress(Exception), torch.no_grad(), torch._C.DisableTorchFunction(), without_rows():
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return tuple(
                name
                for name, value in zip(names, inputs, strict=False)
                if name.startswith(TANGENTS) and type(value) is torch.Tensor and not value.any()
            )
    return None  # a device records, or a value has no storage


@contextmanager
def watching_graphs(watch: GraphWatch, failed: Callable[[Exception], None]) -> Iterator[None]:
    """Tell of each graph that Inductor compiles, until the block is left. Its settings differ while it compiles alone.

    Inductor is not imported for this: it takes a second. Where the program does that, it is watched from then on.

    Args:
        failed: called with an error of the noting, where this torch does not have what is read; the program goes on.
    """
    copies = CopiedNodes()
    with ExitStack() as stack:

        def begin() -> None:
            try:
                stack.enter_context(_watching(watch, copies, failed))
            except Exception as error:
                failed(error)

        with once_imported(COMPILE_FX, begin), watching_copies(copies, _node, failed):
            yield


@contextmanager
def _watching(watch: GraphWatch, copies: CopiedNodes, failed: Callable[[Exception], None]) -> Iterator[None]:
    compiles: Any = sys.modules[COMPILE_FX]._InProcessFxCompile
    runs: Any = sys.modules[_OUTPUT].CompiledFxGraph
    numbers: dict[int, int] = {}  # of a graph that lives, by the id of what runs it

    def note(graph: Any, made: Any, before: int, earlier: Mapping[str, NodeNote]) -> None:
        if isinstance(made, runs):  # else nobody runs it under a row: it is written to a file
            watch.graphs.append(_noted(graph, before, earlier))
            numbers[id(made)] = len(watch.graphs) - 1
            weakref.finalize(made, numbers.pop, id(made), None)
            if not settings.kernels_write_rows():
                rows.put_in(made.current_callable)

    settings, rows = Settings(), KernelRows()
    original = compiles.codegen_and_compile

    @functools.wraps(original)
    def codegen_and_compile(self: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
        if not settings.hold():
            return original(self, graph, *args, **kwargs)
        before, earlier = 0, {}
        try:
            before, earlier = _last_handle(), {node.name: _node(node) for node in graph.graph.nodes}
            if compiles_pass():
                earlier = copies.with_origins(earlier)
        except Exception as error:
            failed(error)
        made = original(self, graph, *args, **kwargs)
        try:
            note(graph, made, before, earlier)
        except Exception as error:
            failed(error)
        return made

    with ExitStack() as stack:
        stack.callback(rows.take_out)
        stack.enter_context(settings.installed())
        stack.enter_context(replaced(compiles, "codegen_and_compile", codegen_and_compile))
        named: dict[int, tuple[weakref.ref[Any], Any]] = {}
        stack.callback(_rename, named)
        stack.enter_context(replaced(runs, "__call__", _running(runs.__call__, watch, numbers, named, failed)))
        yield


def _rename(named: dict[int, tuple[weakref.ref[Any], Any]]) -> None:
    """Give graphs the names back that their rows had."""
    for reference, name in named.values():
        graph = reference()
        if graph is not None:
            graph._fx_graph_cache_key = name


def _running(
    call: Callable[..., Any],
    watch: GraphWatch,
    numbers: Mapping[int, int],
    named: dict[int, tuple[weakref.ref[Any], Any]],
    failed: Callable[[Exception], None],
) -> Callable[..., Any]:
    """What runs a graph, and tells of it.

    Args:
        numbers: of each that was noted, by its id.
        named: gets what each was called before, in the rows that it writes.
    """

    @functools.wraps(call)
    def run(self: Any, inputs: Any) -> Any:
        watch.has_run = True
        number = numbers.get(id(self), -1)
        profiled = torch.autograd.profiler._is_profiler_enabled
        watch.unknown_has_run |= profiled and number < 0
        if number >= 0:
            try:
                if name := watch.name(number, inputs, profiled=profiled):
                    if id(self) not in named or named[id(self)][0]() is not self:
                        named[id(self)] = weakref.ref(self), getattr(self, "_fx_graph_cache_key", None)
                    self._fx_graph_cache_key = name
            except Exception as error:
                failed(error)
        if watch.around is None:
            return call(self, inputs)
        with watch.around():
            return call(self, inputs)

    return run


def _last_handle() -> int:
    """The number of the last kernel that was generated: they are counted over graphs that are compiled together."""
    return int(sys.modules[_DEBUG]._inductor_kernel_provenance_debug_handle)


def _noted(graph: Any, before: int, earlier: Mapping[str, NodeNote]) -> GraphNote:
    """What is known of a graph that has just been compiled, to kernels behind number ``before``.

    Args:
        earlier: its nodes as they were before Inductor's passes, which put others in the place of some.
    """
    debug: Any = sys.modules[_DEBUG]
    made_of: Mapping[str, Sequence[str]] = debug._inductor_triton_kernel_to_post_grad_node_info
    found = [(match, names) for text, names in made_of.items() if (match := _HANDLE.fullmatch(text))]
    kernels = sorted((int(match["order"]), match["kernel"], tuple(names)) for match, names in found)
    left = {node.name for node in graph.graph.nodes}
    nodes = {node.name: _with_origin(node, _node(node), earlier, left) for node in graph.graph.nodes}
    nodes |= _in_branches(graph)
    if compiles_pass():
        nodes = {name: from_there(node, earlier[name]) if name in earlier else node for name, node in nodes.items()}
    return GraphNote(
        kernels=tuple((name, names) for order, name, names in kernels if order > before),  # as in the generated code
        nodes=_with_owners(nodes),
        inputs=tuple(node.name for node in graph.graph.nodes if node.op == "placeholder"),
        is_optimizer=_is_optimizer(nodes.values()),
        sizes=tuple(
            _seen(node.meta.get("val"))
            for node in graph.graph.nodes
            if node.op == "placeholder" and isinstance(node.meta.get("val"), (int, torch.SymInt))
        ),
        is_checkpointed=any("ac_graph_id" in node.meta for node in graph.graph.nodes),
        budget=_memory_budget(),
        is_pass=compiles_pass(),
        flops_at=_flops_at(graph),
    )


def _memory_budget() -> float:
    """The share of what is saved for backward that compiled graphs may save; 1.0: all that the partitioner wants."""
    config = sys.modules.get("torch._functorch.config")
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
                calls.setdefault(str(each.target), []).append(_node(node).modules)
    return {
        f"{path}.{node.name}.{number}": replace(_node(node), inputs=(), bytes=0, flops=-1, modules=modules)
        for path, part in graph.named_modules()
        if path and isinstance(part, torch.fx.GraphModule)
        for node in part.graph.nodes
        if _work(node) is not None
        for number, modules in enumerate(_each_callers(_node(node).modules, calls.get(path, ())))
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


def _node(node: Any) -> NodeNote:
    meta = node.meta
    held = meta.get("fwd_nn_module_stack") or meta.get("nn_module_stack") or {}
    return NodeNote(
        modules=tuple(_called_from(key, *value) for key, value in held.items()),
        frames=tuple(
            (match["file"], int(match["line"]), users_name(match["function"].strip()))
            for match in _FRAME.finditer(meta.get("stack_trace") or "")
        ),
        # What has no tag is backward: parts of a custom Function's, and of what a pass has put there.
        forward=meta.get("partitioner_tag") in _FORWARD and node.op == "call_function",
        is_view=node.op == "call_function" and _is_view(node.target),
        bytes=_bytes(meta.get("val")),
        flops=_flops(node),
        op=getattr(getattr(node.target, "overloadpacket", node.target), "__name__", ""),
        inputs=tuple(each.name for each in node.all_input_nodes),
        sequence=meta.get("seq_nr", -1),
        is_sum=bool(meta.get("is_gradient_acc")),
    )


def _with_owners(nodes: Mapping[str, NodeNote]) -> dict[str, NodeNote]:
    """``nodes`` with sums of gradients where the node that waits for the sum is from, as in eager.

    The engine makes them in no module, and torch leaves them the line of whatever ran before. A node that computes
    something reads the sum. That of an addition does not: it hands the sum on to both sides, where one may be added up
    in turn. So it lies in what is around all that reads the sum, or is added to it then. Where nothing reads it, a
    parameter's gradient say, it is of what is around that which is added up.
    """
    readers: dict[str, list[str]] = {}
    for name, node in nodes.items():
        for each in node.inputs:
            readers.setdefault(each, []).append(name)
    found = dict(nodes)
    for name in reversed(tuple(nodes)):  # what reads a node comes behind it
        node = nodes[name]
        if not node.is_sum:
            continue
        read_by = [each for each in readers.get(name, ()) if nodes[each].op and not nodes[each].forward]
        reading = [nodes[each] for each in read_by]
        if reading and all(each.is_sum for each in reading):  # a part of a larger sum
            whole = found[read_by[0]]
            found[name] = replace(node, modules=whole.modules, frames=whole.frames)
            continue
        beside = [
            nodes[each]
            for reader in reading
            if reader.is_sum
            for each in reader.inputs
            if each != name and each in nodes
        ]
        around = [each for each in (*reading, *beside) if not each.is_sum]
        if not around:
            around = [nodes[each] for each in node.inputs if each in nodes and not nodes[each].is_sum]
        frames = _shared([each.frames for each in around])
        found[name] = replace(
            node,
            modules=_shared([each.modules for each in around]),
            # In the function that all of these are called in, the line of the first.
            frames=around[0].frames[: len(frames) + 1] if around else (),
        )
    return found


def _shared(stacks: Sequence[tuple[_T, ...]]) -> tuple[_T, ...]:
    """What all of these begin with."""
    same = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*stacks, strict=False))
    return tuple(level[0] for level in same)


def _with_origin(node: Any, note: NodeNote, earlier: Mapping[str, NodeNote], left: Collection[str]) -> NodeNote:
    """``note`` of where the matmul is from where a pass has joined one with an addition, whose origin torch keeps.

    Args:
        left: names of the nodes that there are now: of two matmuls that were added the one that was not joined.
    """
    if node.name in earlier or not note.flops:
        return note
    replaced = [each.name for each in node.meta.get("from_node", ())]
    joined = [name for each in replaced if each in earlier for name in (each, *earlier[each].inputs)]
    origins = {
        name: found
        for name in joined
        if name not in left and (found := earlier.get(name)) is not None and found.flops == note.flops
    }
    if len(origins) != 1:
        return note
    (origin,) = origins.values()
    return replace(note, modules=origin.modules, frames=origin.frames, forward=origin.forward)


def _called_from(key: str, path: str, kind: Any) -> CalledFrom:
    number = key.partition("@")[0]  # of a module that is called several times: @1
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    return CalledFrom(int(number) if number.isdigit() else -1, path, name.rpartition(".")[2])


def _is_view(target: Any) -> bool:
    """Check that an operation computes nothing: its result is a part of its input."""
    if getattr(target, "__name__", "") == "getitem":
        return True
    schema = getattr(target, "_schema", None)
    if schema is None:
        return False
    return any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)


def _bytes(value: Any) -> int:
    """Bytes of what a node makes; of sizes that are not fixed as far as torch has seen them."""
    if isinstance(value, (tuple, list)):
        return sum(map(_bytes, value))
    if not hasattr(value, "element_size"):
        return 0
    return math.prod(map(_seen, value.shape)) * int(value.element_size())


def _seen(size: Any) -> int:
    """A number that may not be fixed, as far as torch has seen it; 0 where it has not."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 0


def _flops(node: Any) -> int:
    """Floating-point operations by torch's own formulas; 0 for what these do not know, -1 where a size is not known."""
    work = _work(node)
    if work is None:
        return 0
    try:
        return work({})
    except _UnknownSizeError:
        return -1


class _UnknownSizeError(Exception):
    """Torch finds a size out while the graph runs: how many elements are not zero, say."""


def _work(node: Any) -> Callable[[Mapping[Any, int]], int] | None:
    """Floating-point operations of a node by the sizes that are not fixed; None for what torch has no formula for.

    Of a size that is not given it counts what torch has seen.
    """
    formula = flop_formulas().get(getattr(node.target, "overloadpacket", None))
    if formula is None:
        return None

    def shapes(value: Any) -> Any:
        return _Shape(tuple(value.shape))

    def made(node: Any) -> Any:
        return tree_map_only(torch.Tensor, shapes, node.meta.get("val"))

    (args, kwargs), made_by = map_arg((node.args, dict(node.kwargs)), made), made(node)

    def count(sizes: Mapping[Any, int]) -> int:
        def sized(shape: _Shape) -> torch.Tensor:
            return torch.empty([_size(each, sizes) for each in shape.sizes], device="meta")

        mine = tree_map_only(_Shape, sized, (args, kwargs, made_by))
        return int(formula(*mine[0], **mine[1], out_val=mine[2]))

    return count


class _Shape:
    """Of a tensor."""

    def __init__(self, sizes: tuple[Any, ...]) -> None:
        self.sizes = sizes


def _size(size: Any, sizes: Mapping[Any, int]) -> int:
    """A size where those that are not fixed are these."""
    if isinstance(size, int):
        return size
    if sizes:
        try:
            return int(size.node.expr.xreplace(sizes))
        except (TypeError, ValueError):  # sympy's, of what is no number: a size that is of none of these
            raise _UnknownSizeError from None
    if not size.node.has_hint():
        raise _UnknownSizeError
    return _seen(size)


def _flops_at(graph: Any) -> Callable[[Sequence[int]], Mapping[str, int] | None] | None:
    """The floating-point operations of a graph's nodes for its runs with these sizes; None: all are fixed."""
    inputs = [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"]
    wanted = [each for each in inputs if isinstance(each, (int, torch.SymInt))]
    if not any(isinstance(each, torch.SymInt) for each in wanted):
        return None
    symbols = [each.node.expr if isinstance(each, torch.SymInt) else None for each in wanted]
    works = {node.name: work for node in graph.graph.nodes if (work := _work(node)) is not None}

    def count(sizes: Sequence[int]) -> Mapping[str, int] | None:
        given = {symbol: size for symbol, size in zip(symbols, sizes, strict=True) if symbol is not None}
        try:
            return {name: work(given) for name, work in works.items()}
        except _UnknownSizeError:
            return None

    return count
