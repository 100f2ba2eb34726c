"""The memory pass: two steps in which the allocators report, and the tensors that matter are noted by address.

Nothing is kept but numbers: an address, a size, what the tensor is. ``attribute.memory`` joins them to the blocks that
the allocators reported. The first of the two steps makes everything that lives from one step into the next known to the
profiler, which reports nothing about blocks that it did not see allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradscope import markers
from gradscope.capture.modules import CallRecorder
from gradscope.capture.registry import NOBODYS, Seen
from gradscope.capture.storages import (
    Census,
    GraphReader,
    KeptStorage,
    StorageNote,
    StorageReader,
    census_of,
    every_storage,
    is_tensor,
    sizes_of,
    sizes_text,
    states_of,
    tensors_in,
)
from gradscope.capture.survey import GraphTracer, LineTracer
from gradscope.compat import TraceMarker, current_node_number, live_device_blocks
from gradscope.tables import EventTable, GraphNode, LineInfo, Role, SavedTensor, Sighting, SpanTable
from gradscope.tree import modules_of

STEPS = 2  # one that settles, one that counts


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """What CUDA says of a device when the pass ends, in bytes."""

    total: int
    used: int  # by everybody, this process's context and libraries included
    reserved: int  # by torch's caching allocator


@dataclass
class MemoryPass:
    """What the memory pass left behind."""

    profiler: Any  # None once its rows are in ``table``
    recorder: CallRecorder
    line_spans: SpanTable
    lines: list[LineInfo]
    graphs: list[tuple[GraphNode, ...]]
    parameters: Seen[torch.Tensor]
    owners: Sequence[tuple[int, ...]]  # of each of them the labels of the modules that held it
    device: str  # the one that is measured
    sightings: list[Sighting]  # ``layer`` indexes ``modules``
    modules: Seen[nn.Module]
    places: Mapping[int, int]  # of those that were called, or lay in one that was: label in the registry
    saved: list[SavedTensor]
    figures: DeviceFigures | None
    notes: list[str]  # on what could not be measured
    census: list[Census]  # after each of the latest steps
    table: EventTable | None = None


class Surroundings:
    """What a session knows of the user's objects beyond the modules that were called.

    Attributes:
        models: those known by name or seen called.
        batch: of the step that runs, where gradscope runs it.
        optimizers: those given, and those seen stepping.
        ignored: copies that gradscope itself keeps.
    """

    def __init__(self, models: Callable[[], Iterable[nn.Module]] = tuple, optimizers: Iterable[Optimizer] = ()) -> None:
        self.models = models
        self.batch: Any = None
        self.optimizers: Seen[Optimizer] = Seen(optimizers)
        self.ignored: Sequence[torch.Tensor] = ()

    def forget(self) -> None:
        """Let go of everything of the user's."""
        self.models, self.batch, self.ignored = tuple, None, ()
        self.optimizers.clear()

    def note_optimizer(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """An optimizer has stepped: a hook for :func:`torch.optim.optimizer.register_optimizer_step_post_hook`."""
        self.optimizers.number(optimizer)


class MemoryTracer:
    """Notes tensors at the moments that matter: when a backward pass begins and ends, and between steps."""

    def __init__(self, recorder: CallRecorder, around: Surroundings) -> None:
        self.sightings: list[Sighting] = []
        self.saved: list[SavedTensor] = []
        self.census: list[Census] = []  # after each step
        self.modules: Seen[nn.Module] = Seen()  # their numbers are the labels of sightings
        self.places: dict[int, int] = {}  # of a module's number its label in the registry, which outlives it
        self.graph = GraphTracer(recorder.registry)
        self._recorder = recorder
        self._around = around
        self._marks = 0
        self.batches: dict[int, list[str]] = {}  # label of a root -> what it was called with in the last step
        self._unread: dict[tuple[int, int], list[int]] = {}  # (node's number, address) -> indices of ``saved``
        self._inputs: set[int] = set()  # addresses of what models were called with in this step
        self._graphs = GraphReader()
        self._reader = StorageReader()
        self.device = self._main_device()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Watch module calls until the block is left."""
        self._recorder.on_root_call = self._note_inputs
        try:
            yield
        finally:
            self._recorder.on_root_call = None

    @contextmanager
    def around_backward(self, roots: Any) -> Iterator[None]:
        """Note what the graph below ``roots`` holds, and the gradients once it has run."""
        with self.graph.tracing(roots, self._begin_backward):
            yield
        with self._marking() as mark:
            self._see(mark, self._gradients())

    def note_reads(self, run: int, inputs: Sequence[Any]) -> None:
        """A compiled graph runs with these; what the node that runs it has kept it reads."""
        number = current_node_number()
        if number < 0 or not self._unread:
            return
        for place, value in enumerate(inputs):
            for note in self._reader.storages(value) if is_tensor(value) else ():
                for index in self._unread.pop((number, note.pointer), ()):
                    self.saved[index] = replace(self.saved[index], reader=(run, place))

    def see_all(self) -> None:
        """Note every tensor of the process: what it is where that is known, that it is there otherwise."""
        self._inputs.clear()
        self._unread.clear()  # not behind each pass: one may go through a part of the graph alone
        with self._marking() as mark:
            first = len(self.sightings)
            seen = self._see(mark, self._known())
            ignored = {note.pointer for note in self._notes(self._around.ignored)}
            everything, with_graph = every_storage(self._reader, self._graphs)
            states = states_of(self._around.optimizers, self._reader)
            self.census.append(census_of(everything, with_graph, states))
            others = (note for note in everything if note.owned and note.pointer not in ignored)
            seen = self._see(mark, ((Role.OTHER, -1, note) for note in others), seen)
            where = torch.device(self.device)
            if where.type == "cuda":
                blocks = dict(live_device_blocks(where))
                # As large as the allocator's blocks, which it rounds up, so that the sum is the allocator's own.
                self.sightings[first:] = [
                    replace(sighting, bytes=blocks.get(sighting.pointer, sighting.bytes))
                    for sighting in self.sightings[first:]
                ]
                self.sightings += [
                    Sighting(mark, pointer, size, Role.OTHER, -1)
                    for pointer, size in blocks.items()
                    if pointer not in seen and pointer not in ignored
                ]

    def notes(self) -> list[str]:
        """What could not be measured, and why."""
        return self._reader.notes()

    def figures(self) -> DeviceFigures | None:
        """CUDA's own figures; None on a CPU."""
        if not self.device.startswith("cuda"):
            return None
        where = torch.device(self.device)
        free, total = torch.cuda.mem_get_info(where)
        return DeviceFigures(total, total - free, torch.cuda.memory_reserved(where))

    # -- moments -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _marking(self) -> Iterator[int]:
        """A moment in the trace, and its number. Inside, torch's accessors reach neither modes nor subclasses."""
        mark = self._marks
        self._marks += 1
        with TraceMarker(markers.SEEN + str(mark)):
            pass
        with torch._C.DisableTorchFunction():
            yield mark

    def _note_inputs(self, args: Any) -> None:
        with self._marking() as mark:
            text = sizes_text(tensors_in(args)) or sizes_text(tensors_in(self._around.batch))
            self.batches.setdefault(self._recorder.root, []).append(text)
            given = ((Role.INPUT, -1, note) for note in self._notes(tensors_in((args, self._around.batch))))
            self._inputs |= self._see(mark, given)

    def _begin_backward(self, nodes: list[Any]) -> None:
        with self._marking() as mark:
            leaves = [node.variable for node in nodes if not node.next_functions and hasattr(node, "variable")]
            batch = {note.pointer for note in self._notes(tensors_in(self._around.batch))}
            # A leaf that a model was called with is data, also where it collects a gradient; any other is a parameter.
            constant = {note.pointer for note in self._notes(leaves)} - batch - self._inputs
            # Modules of the step may be gone when it has ended.
            held = [each for each in self._known() if each[0] in _CONSTANT]
            constant |= self._see(mark, held)
            for kept in self._graphs.kept_by(nodes):
                for note in self._reader.storages(kept.tensor):
                    if note.device == self.device and note.pointer not in constant:
                        self._note_saved(mark, kept, note)

    def _note_saved(self, mark: int, kept: KeptStorage, note: StorageNote) -> None:
        shape, dtype = sizes_of(kept.tensor)
        self._unread.setdefault((kept.sequence, note.pointer), []).append(len(self.saved))
        self.saved.append(
            SavedTensor(mark, kept.sequence, kept.node, kept.what, note.pointer, note.bytes, shape, dtype)
        )

    # -- what is known -----------------------------------------------------------------------------------------------

    def _see(self, mark: int, found: Iterable[tuple[Role, int, StorageNote]], seen: set[int] | None = None) -> set[int]:
        """Note each storage of the device once, under the first role it is found in; returns all addresses."""
        seen = set() if seen is None else set(seen)
        for role, layer, note in found:
            if note.pointer not in seen and note.device == self.device:
                seen.add(note.pointer)
                self.sightings.append(Sighting(mark, note.pointer, note.bytes, role, layer))
        return seen

    def _known(self) -> Iterator[tuple[Role, int, StorageNote]]:
        """Storages whose role is known; parameters first, so that a tensor in two roles is what it is in the model."""
        modules = self._every_module()
        for name, role in (("_parameters", Role.PARAMETER), ("_buffers", Role.BUFFER)):
            for module in modules:
                for tensor in getattr(module, name).values():
                    if tensor is not None:
                        yield from ((role, self._number(module), note) for note in self._reader.storages(tensor))
        owners = self._owners()
        for parameter in self._tensors_of_optimizers():
            yield from (
                (Role.PARAMETER, owners.get(id(parameter), -1), note) for note in self._reader.storages(parameter)
            )
        yield from self._gradients()
        for parameter, note in states_of(self._around.optimizers, self._reader):
            yield Role.OPTIMIZER, owners.get(id(parameter), -1), note
        yield from ((Role.INPUT, -1, note) for note in self._notes(tensors_in(self._around.batch)))

    def _gradients(self) -> Iterator[tuple[Role, int, StorageNote]]:
        owners = self._owners()
        tensors: dict[int, torch.Tensor] = {
            id(parameter): parameter
            for module in self._every_module()
            for parameter in module._parameters.values()
            if parameter is not None
        }
        tensors |= {id(tensor): tensor for tensor in (*self._tensors_of_optimizers(), *self.graph.parameters)}
        for number, tensor in tensors.items():
            if tensor.is_leaf and tensor.grad is not None:
                yield from (
                    (Role.GRADIENT, owners.get(number, -1), note) for note in self._reader.storages(tensor.grad)
                )

    def _owners(self) -> dict[int, int]:
        """id of each parameter -> label of the first module that holds it."""
        owners: dict[int, int] = {}
        for module in self._every_module():
            for parameter in module._parameters.values():
                if parameter is not None:
                    owners.setdefault(id(parameter), self._number(module))
        return owners

    def _number(self, module: nn.Module) -> int:
        """Its number, under which its place is noted once it has one."""
        number = self.modules.number(module)
        label = self._recorder.registry.get(module)
        if label is not None and label != NOBODYS:
            self.places[number] = label
        return number

    def _tensors_of_optimizers(self) -> Iterator[torch.Tensor]:
        for optimizer in self._around.optimizers:
            for group in optimizer.param_groups:
                yield from (tensor for tensor in group["params"] if is_tensor(tensor))

    def _notes(self, tensors: Iterable[torch.Tensor]) -> Iterator[StorageNote]:
        for tensor in tensors:
            yield from self._reader.storages(tensor)

    def _main_device(self) -> str:
        """The device that holds most bytes of the models; of the batch where they hold none."""
        held = [
            tensor for module in self._every_module() for tensor in module._parameters.values() if tensor is not None
        ]
        for tensors in ((*held, *self._tensors_of_optimizers()), tensors_in(self._around.batch)):
            amounts: Counter[str] = Counter()
            for note in self._notes(tensors):
                amounts[note.device] += note.bytes
            if amounts:
                return amounts.most_common(1)[0][0]
        return "cpu"

    def _every_module(self) -> list[nn.Module]:
        """Models with all that lies in them, and modules that were called outside of any."""
        found: dict[int, nn.Module] = {}
        for model in (*self._around.models(), *self._recorder.modules):
            if id(model) not in found:
                found |= {id(module): module for module in modules_of(model)}
        return list(found.values())


_CONSTANT = frozenset({Role.PARAMETER, Role.BUFFER})


def finished_pass(profiler: Any, recorder: CallRecorder, tracer: MemoryTracer, lines: LineTracer) -> MemoryPass:
    """What is kept of the pass once it has ended; all of it numbers and names."""
    return MemoryPass(
        profiler=profiler,
        recorder=recorder,
        line_spans=lines.spans.table(),
        lines=lines.lines,
        graphs=tracer.graph.graphs,
        parameters=tracer.graph.parameters,
        owners=tracer.graph.owners,
        device=tracer.device,
        sightings=tracer.sightings,
        modules=tracer.modules,
        places=tracer.places,
        saved=tracer.saved,
        figures=tracer.figures(),
        notes=tracer.notes(),
        census=tracer.census,
    )
