"""Bulk tables: numpy columns of equal length with interned names, one row an event, a module call or a block.

Made by ``capture`` and ``trace``, consumed by ``attribute``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:  # numpy takes a third of a second, and the command line reads its options with these types
    import numpy as np
    import numpy.typing as npt

BEFORE_THE_TRACE = -2  # in KernelTable.row: launched before the trace began

IntColumn: TypeAlias = "npt.NDArray[np.int64]"
Int32Column: TypeAlias = "npt.NDArray[np.int32]"
Int8Column: TypeAlias = "npt.NDArray[np.int8]"


class RowKind(IntEnum):
    """What a trace row is, decided once from its name."""

    OP = 0  # an aten op, a custom Function, anything not listed below
    ADD = 1  # aten::add or aten::add_: a gradient sum where it stands directly in a NODE
    NODE = 2  # autograd::engine::evaluate_function of a node made by forward
    ACCUMULATE = 3  # autograd::engine::evaluate_function of an AccumulateGrad
    OPTIMIZER = 4  # Optimizer.step and Optimizer.zero_grad
    COMMUNICATION = 5  # a collective
    ANNOTATION = 6  # the user's own record_function: transparent
    CALL = 7  # markers of gradscope from here on
    BACKWARD = 8
    STEP = 9
    LINE = 10
    FLOP = 11
    PARAMETER = 12
    RECOMPUTE = 13
    SEEN = 14
    OWN = 15
    HOOK = 16
    SHARDING = 17  # what FSDP does, and says so
    GRAPH = 18  # a graph that Inductor compiled, whose nodes are known


@dataclass(frozen=True, slots=True)
class EventTable:
    """CPU events of a trace in order of (thread, start, longest first); one row an event.

    ``name`` indexes ``names``. ``parent`` is the row of the innermost enclosing event of the same thread, -1 for none;
    a parent always comes before its children.
    """

    names: tuple[str, ...]  # markers carry no number here: all calls share one name
    name: Int32Column
    kind: Int8Column  # RowKind
    argument: IntColumn  # a marker's number; -1 for other rows
    start_ns: IntColumn  # of the profiler's clock
    end_ns: IntColumn
    thread: Int32Column  # the profiler's own small thread numbers
    sequence: IntColumn  # sequence number drawn by forward, or carried by a backward node; -1 for none
    forward_thread: Int32Column  # for backward nodes, the thread whose counter drew ``sequence``; else 0
    parent: Int32Column
    depth: Int32Column  # 0 for rows without a parent
    kernels: KernelTable | None = None  # CUDA
    shapes: tuple[str, ...] | None = None  # one text a row, only from a pass that recorded shapes
    allocations: AllocationTable | None = None  # only from a pass that recorded memory

    def __len__(self) -> int:
        return len(self.name)


@dataclass(frozen=True, slots=True)
class AllocationTable:
    """What an allocator gave and took back, one row an event, in order of time."""

    row: Int32Column  # row of the innermost trace row around it; -1 for none
    time_ns: IntColumn
    pointer: IntColumn
    bytes: IntColumn  # negative where memory was given back
    device: tuple[str, ...]  # names of devices, "cpu" or "cuda:0"
    device_of: Int8Column  # index into ``device``
    reserved: IntColumn  # what the allocator held of the device then; 0 on the CPU

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, slots=True)
class KernelTable:
    """Device activities, one row a kernel or copy, in order of start."""

    names: tuple[str, ...]
    name: IntColumn
    start_ns: IntColumn
    end_ns: IntColumn
    device: IntColumn
    stream: IntColumn
    row: IntColumn  # row of the EventTable that launched it; -1 where that is not known; BEFORE_THE_TRACE


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """What is known of one module without running it."""

    path: str
    class_name: str
    parent: str | None
    parameters: int
    source: str | None
    tied: tuple[str, ...] = ()


# An instruction of a container: what it calls stands on the line that called the container.
OF_TORCHS_LAYER = 1 << 62


@dataclass(frozen=True, slots=True)
class SpanTable:
    """Stretches of forward code in order of entry; row k is the span that the trace's marker number k names.

    Two uses: module calls (``label`` indexes the modules) and torch functions called from a source line (``label``
    indexes the lines). ``[low, high)`` are the sequence numbers that the span's thread drew while it ran.
    """

    label: IntColumn  # -1: something that gradscope has no name for
    low: IntColumn
    high: IntColumn  # equals the last number seen where the span never returned
    # Where noting the span was timed: what it took of the time between the reads of the clock that are nearest to the
    # span, what it took before and behind these, and how far these are apart.
    inside_ns: IntColumn | None = None
    around_ns: IntColumn | None = None
    open_ns: IntColumn | None = None
    # Number of the instruction that called, the same in all traces of a run, OF_TORCHS_LAYER added where it is one of
    # torch's own layers; -1: not known. Module calls have it.
    caller: IntColumn | None = None

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True, slots=True)
class LineInfo:
    """One source line of user code."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """One parameter and the modules that hold it directly; several where it is tied."""

    name: str
    owners: tuple[int, ...]  # indices into the modules, in the order of the model


@dataclass(frozen=True, slots=True)
class ReducerInfo:
    """A DistributedDataParallel model, and which gradients it reduces together.

    Attributes:
        path: of the module.
        cap_bytes: from which on a bucket is full.
        hooked: a communication hook sends its buckets.
        finds_unused: it looks for parameters without a gradient, and then keeps buckets in the order of registration.
        buckets: in the order in which they are sent, of each its parameters in their order in it: index of the layer,
            -1 for none, and bytes.
    """

    path: str
    cap_bytes: int
    finds_unused: bool
    buckets: tuple[tuple[tuple[int, int], ...], ...]
    hooked: bool = False


@dataclass(frozen=True, slots=True)
class CalledFrom:
    """A module in whose call a node of a compiled graph was made."""

    module: int  # its id; -1 where torch does not tell
    path: str  # as in the source: "L['self'].blocks.0"
    class_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledNode:
    """What one node of a compiled graph computes.

    Attributes:
        forward: it is of forward; in a graph of backward it is computed again.
        is_view: it computes nothing.
        is_sum: of gradients, which the engine adds up.
        bytes: of what it makes.
        inputs: names of the nodes that it reads.
        flops: by torch's own formulas.
        op: the operation's name without overload, ``mm``; empty for an input.
        sequence: number of the autograd node that it is of, in the order of forward; -1 for none.
    """

    forward: bool
    is_view: bool
    bytes: int
    inputs: tuple[str, ...]
    flops: int = 0
    op: str = ""
    sequence: int = -1
    is_sum: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeNote(CompiledNode):
    """One node of a graph that Inductor compiled, and where it is from.

    Attributes:
        modules: around it, outermost first; in backward those around the forward node that it is of.
        frames: of Python, (file, line, function), innermost last; those of the forward node, too.
    """

    modules: tuple[CalledFrom, ...]
    frames: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True)
class GraphNote:
    """A graph that Inductor compiled.

    Attributes:
        kernels: in the order of the generated code, of each its name and those of the nodes that it computes.
        nodes: by name.
        inputs: names of the nodes that stand for what it is run with, in order.
        is_optimizer: it is an optimizer's step.
        is_pass: it is a backward pass, or a part of one, of compiled autograd's.
        is_checkpointed: the program checkpoints something in it.
        sizes: of what is not fixed, those that it was compiled with, in the order of the inputs.
        budget: the share of what is saved for backward that it may save.
        flops_at: of nodes, for ``sizes`` that it runs with, or None where these do not tell; None: all are fixed.
    """

    kernels: tuple[tuple[str, tuple[str, ...]], ...]
    nodes: Mapping[str, NodeNote]
    inputs: tuple[str, ...] = ()
    is_optimizer: bool = False
    is_checkpointed: bool = False
    sizes: tuple[int, ...] = ()
    budget: float = 1.0
    is_pass: bool = False
    flops_at: Callable[[Sequence[int]], Mapping[str, int] | None] | None = None

    def recomputed_bytes(self) -> int:
        """Bytes of what is of forward, computed again here, and read by nodes of backward: what is not saved for it."""
        source: dict[str, str] = {}  # of each node, views looked through
        read: set[str] = set()
        for name, node in self.nodes.items():  # each behind its inputs
            inputs = [source.get(each, each) for each in node.inputs]
            source[name] = inputs[0] if node.is_view and inputs else name
            if node.op and not node.forward and not node.is_view:
                read.update(inputs)
        return sum(node.bytes for name, node in self.nodes.items() if node.forward and name in read)


@dataclass(frozen=True, slots=True)
class GraphRun:
    """What a compiled graph was run with: its number, numbers of parameters, and sizes that are not fixed.

    Attributes:
        zeros: names of those inputs that were gradients without a number but zero.
        called_from: the frame that called it, where some of its nodes are from no line: their modules, and what calls
            these, are torch's own.
    """

    graph: int
    parameters: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    called_from: tuple[str, int, str] | None = None
    zeros: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedNode(CompiledNode):
    """A node of a compiled graph, in the terms of the report.

    Attributes:
        layer: index of the innermost layer around it; -1 where none is.
        line: index of its source line; -1.
    """

    layer: int
    line: int

    @classmethod
    def of(cls, node: CompiledNode, layer: int, line: int) -> FusedNode:
        """``node`` there."""
        shared = {each.name: getattr(node, each.name) for each in fields(CompiledNode)}
        return cls(layer=layer, line=line, **shared)


TANGENTS = "tangents_"  # what AOTAutograd calls the gradients of what a graph has returned


@dataclass(frozen=True, slots=True)
class CompiledGraph:
    """A :class:`GraphNote` in the terms of the report.

    Attributes:
        sized: the sizes that it ran with tell how many floating-point operations its nodes take.
        compiled: which of the graphs that were compiled it is, with whatever sizes; None: its nodes tell.
        moved: layers whose parameters it was compiled with, each with that whose it was run with in their place.
        line: index of the line that called it, where some of its nodes may have none; -1.
    """

    kernels: tuple[tuple[str, tuple[str, ...]], ...]
    nodes: Mapping[str, FusedNode]
    inputs: tuple[str, ...] = ()
    is_optimizer: bool = False
    sized: bool = True
    is_pass: bool = False
    zeros: tuple[str, ...] = ()
    compiled: int | None = None
    moved: tuple[tuple[int, int], ...] = ()
    line: int = -1

    def with_line(self, line: int) -> CompiledGraph:
        """The graph with that line for nodes that have none; of a graph in which others do for those of a layer."""
        without = not any(node.line >= 0 for node in self.nodes.values())
        nodes = {
            name: replace(node, line=line) if node.line < 0 and (without or node.layer >= 0) else node
            for name, node in self.nodes.items()
        }
        return replace(self, nodes=nodes)

    @property
    def is_backward(self) -> bool:
        """Whether it is run with gradients of what another graph has returned."""
        return any(name.startswith(TANGENTS) for name in self.inputs)


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node of the autograd graph as the engine is about to run it."""

    sequence: int  # -1 for AccumulateGrad
    parameter: int  # index of the parameter of an AccumulateGrad; else -1
    edges: tuple[tuple[int, int], ...]  # (node, input number) in the order of the node's outputs; -1 for no node


@dataclass(frozen=True, slots=True)
class PassGraph:
    """The graph of one kind of backward pass; ``sequence`` of its nodes counts back from the pass's base."""

    nodes: tuple[GraphNode, ...]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PassNote:
    """One backward pass of a timed step."""

    graph: int  # index of the PassGraph; -1 where it was not noted
    base: int  # the number that the sequences of the graph count back from
    nested: bool = False  # ran inside of another
    own: bool = False  # the graph is its own, not that of a pass like it


class Role(IntEnum):
    """What a tensor was seen to be while memory was measured."""

    PARAMETER = 0
    BUFFER = 1
    GRADIENT = 2
    OPTIMIZER = 3
    INPUT = 4
    OTHER = 5


@dataclass(frozen=True, slots=True)
class Sighting:
    """A storage that was seen alive at one moment."""

    mark: int  # number of the SEEN marker in the trace
    pointer: int
    bytes: int
    role: Role
    layer: int  # index of the module it belongs to; -1 for none


CHECKPOINT = "checkpoint"  # stands for a node where a checkpoint keeps what it was given


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor that a node of the graph held when its backward pass began."""

    mark: int  # number of the SEEN marker in the trace
    sequence: int  # of the node
    node: str  # "SoftmaxBackward0"
    what: str  # "output"
    pointer: int  # of the storage
    bytes: int  # of the storage
    shape: str
    dtype: str
    reader: tuple[int, int] = (-1, -1)  # of compiled code: number of the run that reads it, and as which of its inputs


@dataclass(frozen=True, slots=True)
class BlockTable:
    """Blocks of memory that were alive at some moment of the measured step, one row each, in order of birth.

    ``born`` and ``died`` count the allocator's events of the step: a block is alive from event ``born`` up to, but not
    with, event ``died``. ``born`` is -1 for what was there before, ``died`` is ``events`` for what survived.
    """

    events: int
    bytes: IntColumn
    born: IntColumn
    died: IntColumn
    category: tuple[str, ...]  # MemoryCategory of each block
    layer: IntColumn  # -1: outside every module
    line: IntColumn  # index of the source line; -1
    op: tuple[str, ...]  # outermost op or node that allocated it; "" where it was there before
    leaf: tuple[str, ...]  # innermost op that allocated it
