"""Inductor told of as it compiles graphs and as they run.

Source: torch/_inductor/compile_fx.py, output_code.py (the row that a graph writes into a profiler's trace), as of torch
2.11 to 2.14.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import torch

from gradscope.compat.compiled_autograd import CopiedNodes, compiles_pass, watching_copies
from gradscope.compat.imports import once_imported
from gradscope.compat.inductor import COMPILE_FX, DEBUG, PATTERNS
from gradscope.compat.inductor.graphs import GraphWatch
from gradscope.compat.inductor.notes import last_handle, node_note, noted
from gradscope.compat.inductor.origins import watching_replacements
from gradscope.compat.inductor.rows import KernelRows
from gradscope.compat.inductor.settings import INSIDE, KERNEL_PROFILE, SETTINGS, Settings
from gradscope.compat.private import replaced
from gradscope.tables import NodeNote

_OUTPUT = "torch._inductor.output_code"
_READ = {
    COMPILE_FX: ("_InProcessFxCompile.codegen_and_compile", *INSIDE),
    _OUTPUT: ("CompiledFxGraph.__call__",),
    PATTERNS: ("ReplacementPatternEntry.replace_with_graph",),
    DEBUG: ("_inductor_kernel_provenance_debug_handle", "_inductor_triton_kernel_to_post_grad_node_info"),
}


def probe_graphs() -> None:
    """Look for everything that is read of Inductor here, which is imported for that.

    Raises:
        AttributeError, ImportError: this torch lacks something; compiled code is then one row.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own code
        modules = {name: importlib.import_module(name) for name in _READ}
    for module, names in _READ.items():
        for name in names:
            attrgetter(name)(modules[module])
    for module, name, _ in (*SETTINGS, KERNEL_PROFILE):
        attrgetter(name)(importlib.import_module(module))


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

        with once_imported(COMPILE_FX, begin), watching_copies(copies, node_note, failed):
            yield


@contextmanager
def _watching(watch: GraphWatch, copies: CopiedNodes, failed: Callable[[Exception], None]) -> Iterator[None]:
    compiles: Any = sys.modules[COMPILE_FX]._InProcessFxCompile
    runs: Any = sys.modules[_OUTPUT].CompiledFxGraph
    numbers: dict[int, int] = {}  # of a graph that lives, by the id of what runs it

    def note(graph: Any, made: Any, before: int, earlier: Mapping[str, NodeNote]) -> None:
        if isinstance(made, runs):  # else nobody runs it under a row: it is written to a file
            numbers[id(made)] = watch.add(noted(graph, before, earlier))
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
            before, earlier = last_handle(), {node.name: node_note(node) for node in graph.graph.nodes}
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
        stack.enter_context(watching_replacements(settings.hold, failed))
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
