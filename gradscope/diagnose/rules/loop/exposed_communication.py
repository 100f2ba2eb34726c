"""Communication between ranks during which this rank does nothing else.

Example::

    for layer in model.layers:
        fully_shard(layer)  # each layer's parameters are gathered before it, again in backward, while nothing runs

Pattern: collectives, what FSDP does for them, and waits for other ranks take more than 10 % of the step and a
millisecond of one that is not profiled. With tensors on a GPU only the time of collectives' kernels counts in which no
other kernel runs; where it is not known, nothing is said. What takes most of that time decides what is advised:
gathering parameters, reducing their gradients, sharded or not, sending buffers, or exchanging results of split layers.
What nobody of DDP, FSDP and tensor parallel is known to have begun is the program's own.

Evidence: that time, its share, and how much of it each of these takes. The layers are those with a tenth of it or
more. Where gradients of DDP could be sent earlier, the rule ``late-bucket`` says so instead. Estimate: none.
One rank's report does not tell a transfer from the wait for a rank that works longer: ``gradscope merge`` does.

Source: S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB 2020), section 3.2;
Y. Zhao et al., PyTorch FSDP (VLDB 2023), section 3.3; torch.distributed.fsdp.fully_shard, on ``reshard_after_forward``
and prefetching.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gradscope import ops
from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.findings import make_finding, of_step
from gradscope.diagnose.rules.loop import late_bucket
from gradscope.diagnose.rules.loop.late_bucket import COMPARE_FIRST, is_much
from gradscope.tables import Finding
from gradscope.units import ns as time_text

# Of what the layers communicate: one that has less is not named.
_LAYER = 0.10


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is communicated.

    Attributes:
        does: as a part of the evidence.
        wrapped: the code for the older FSDP, which wraps modules.
        of_layers: whose it is, is known.
        phases: of a layer, in which it has it.
    """

    does: str
    message: str
    advice: str
    code: str
    wrapped: str = ""
    of_layers: bool = True
    phases: tuple[str, ...] = ("forward", "backward")


_GATHER_FORWARD = _Kind(
    does="gather parameters for forward",
    message="Layers wait until their parameters are gathered",
    advice="gather the next layers' parameters while a layer computes.",
    code="layer.set_modules_to_forward_prefetch([next_layer])",
    wrapped="FullyShardedDataParallel(model, forward_prefetch=True)",
    phases=("forward",),
)
_GATHER_BACKWARD = _Kind(
    does="gather parameters for backward",
    message="Backward waits until parameters are gathered a second time",
    advice="keep them from forward, where memory allows it.",
    code="fully_shard(layer, reshard_after_forward=False)",
    wrapped="FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)",
    phases=("backward",),
)
_SCATTER = _Kind(
    does="reduce sharded gradients",
    message="Backward waits until gradients are reduced between the ranks",
    advice="reduce them once for several batches: before the last of those that are accumulated.",
    code="model.set_requires_gradient_sync(is_last_batch)",
    wrapped="with model.no_sync():",
    phases=("backward",),
)
_REDUCE = _Kind(
    does="reduce gradients",
    message="Backward waits until gradients are reduced between the ranks",
    advice="reduce them once for several batches, but for the last of those that are accumulated, or in bfloat16.",
    code="with model.no_sync():",
    of_layers=False,
)
_BUFFERS = _Kind(
    does="send buffers",
    message="Forward waits until the first rank has sent its buffers",
    advice="let each rank keep its own, where that is good enough: running means of a norm are.",
    code="DistributedDataParallel(model, broadcast_buffers=False)",
    of_layers=False,
)
_RESULTS = _Kind(
    does="exchange results of split layers",
    message="Layers that are split over the ranks wait for each other's results",
    advice="split layers over fewer ranks, and batches over more.",
    code='init_device_mesh(device, (ranks // 2, 2), mesh_dim_names=("data", "model"))',
)

# Where the next parameters are gathered ahead, and computing a layer still takes less than that.
_GATHER_AHEAD = replace(
    _GATHER_FORWARD,
    advice="shard several layers as one, so that each gather has more to hide behind, or keep parameters gathered.",
    code="fully_shard([*layers[:2]])",
    wrapped="FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)",
)
_STAGES = _Kind(
    does="receive from another stage",
    message="Stages of a pipeline wait for each other",
    advice="give the stages equal work, or cut batches into more parts.",
    code="Schedule1F1B(stage, n_microbatches=4 * stages)",
    of_layers=False,
)
_OWN = _Kind(
    does="wait for collectives of the program's own",
    message="The step waits for collectives that the program begins itself",
    advice="do them less often, or wait for them no sooner than where the result is needed.",
    code="work = torch.distributed.all_reduce(tensor, async_op=True)",
)

# In names of operations, of FSDP's rows, and of the kernels of nccl and its like.
_GATHERS = re.compile(
    r"all_?gather|FullyShardedDataParallel\.(?:\w*(?:pre_forward|pre_backward|prefetch)|rate_limiter)", re.IGNORECASE
)
_SCATTERS = re.compile(r"reduce_?scatter|FSDP::\w*reduce", re.IGNORECASE)
_AHEAD = re.compile(r"FSDP::forward_prefetch|FullyShardedDataParallel\._pre_forward_prefetch: ")
_SENDS = re.compile(r"broadcast", re.IGNORECASE)
_STAGE = re.compile(r"(?:nccl:|c10d::|wait for |gloo:)(?:send|recv)", re.IGNORECASE)
_REDUCES = re.compile(r"all_?reduce|" + re.escape(ops.WAIT), re.IGNORECASE)


def find(case: Case) -> Iterator[Finding]:
    """Yield at most one finding."""
    device = case.run.device
    spent = (case.run.step.communication_ns or 0) if device is None else device.exposed_ns
    kinds = _on_host(case) if device is None else _on_device(case)
    if not any(kinds.values()) or not is_much(spent, case):
        return
    kind = max(kinds, key=lambda one: kinds[one])
    wrapped = any(row.name.startswith(ops.WRAPPED) for row in case.run.ops)
    if kind is _GATHER_FORWARD and any(_AHEAD.match(row.name) for row in case.run.ops):
        kind = _GATHER_AHEAD
    if kind is _REDUCE and any(late_bucket.find(case)):
        return  # it says the same, and why
    yield make_finding(
        RULE.name,
        case,
        None,
        severity="warning",
        layers=_layers(case, kind) if kind.of_layers else (),
        line=None,
        message=kind.message,
        evidence=f"{of_step(spent, case)} in which this rank does nothing else, of it {_parts(kinds)}",
        advice=COMPARE_FIRST + kind.advice,
        code=(wrapped and kind.wrapped) or kind.code,
        cost_ns=spent,
    )


def _on_host(case: Case) -> Counter[_Kind]:
    """What each kind takes of the threads that train."""
    found: Counter[_Kind] = Counter()
    kinds = _Kinds.of(case)
    for row in case.run.ops:
        if row.name.startswith((*ops.COLLECTIVES, *ops.SHARDING, ops.WAITS)):
            found[kinds.of_row(row.name, row.phase)] += row.self_ns
    return found


def _on_device(case: Case) -> Counter[_Kind]:
    """What of each kind no other kernel runs beside."""
    found: Counter[_Kind] = Counter()
    kinds = _Kinds.of(case)
    for row in case.run.kernels:
        if row.busy_ns and ops.COLLECTIVE_KERNEL.search(row.name):
            # Kernels of several collectives have one name: SendRecv is of all-to-all, of gather and of a pipeline.
            known = row.op if row.op and ops.COLLECTIVE_KERNEL.search(row.op) else row.name
            found[kinds.of_row(known, row.phase)] += row.busy_ns
    return found


@dataclass(frozen=True, slots=True)
class _Kinds:
    """What a collective is for: an all-gather looks alike in FSDP, in tensor parallel and in a program's own code.

    Attributes:
        sharded: FSDP has rows.
        replicated: DDP has.
        split: layers lie on a mesh, and DTensor's collectives run.
        result: what is waited for outside of every layer is a result of theirs: no collective begins there.
    """

    sharded: bool
    replicated: bool
    split: bool
    result: bool

    @classmethod
    def of(cls, case: Case) -> _Kinds:
        names = [row.name for row in case.run.ops]
        sharded = any(name.startswith(ops.SHARDING) for name in names)
        mesh = str(case.run.environment.get("mesh", ""))
        return cls(
            sharded=sharded,
            replicated=bool(case.run.buckets)
            or any(row.class_name == "DistributedDataParallel" for row in case.run.layers)
            or any("reducer::" in name for name in names),
            # Of FSDP alone there is one dimension, over which no layer is split. A trace does not tell the mesh.
            split=any(row.name.startswith(ops.SPLIT_LAYERS) and row.layer is not None for row in case.run.ops)
            if case.run.workload.mode == "trace"
            else bool(mesh)
            and any(name.startswith(ops.SPLIT_LAYERS) for name in names)
            and (not sharded or " x " in mesh or "," in mesh),
            result=not any(
                row.phase == "other" and row.name.startswith(ops.SPLIT_LAYERS) and not row.name.endswith("wait_tensor")
                for row in case.run.ops
            ),
        )

    def of_row(self, name: str, phase: str) -> _Kind:
        """What this operation or kernel is for."""
        if self.split and name.startswith(ops.SPLIT_LAYERS) and (phase in ("forward", "communication") or self.result):
            return _RESULTS
        if name.startswith(ops.SHARDING) or phase in ("forward", "communication"):
            if _STAGE.search(name):
                return _STAGES
            if _GATHERS.search(name) and self.sharded:
                return _GATHER_BACKWARD if phase == "communication" else _GATHER_FORWARD
            if self._reduces(name, phase):
                return _SCATTER if self.sharded else _REDUCE
            if _SENDS.search(name) and self.replicated and phase == "forward" and not name.startswith(ops.WAIT_ROW):
                return _BUFFERS  # which DDP waits for in C++
            if self.split:
                return _RESULTS
        return _STAGES if _STAGE.search(name) else _OWN

    def _reduces(self, name: str, phase: str) -> bool:
        """Check that it reduces gradients, or is a part of that: FSDP's own copies are."""
        if self.sharded and (_SCATTERS.search(name) or name.startswith(ops.SHARDING)):
            return True
        if phase != "communication" or not (self.sharded or self.replicated):
            return False
        # DDP waits behind the last node alone: what waits elsewhere is no part of it. Of a reduce-scatter gloo does not
        # say what it is.
        if name.startswith(ops.WAIT_ROW):
            return self.sharded and name.endswith(ops.UNKNOWN_WAIT)
        if self.split and name.startswith(ops.SPLIT_LAYERS):
            return False
        return _REDUCES.search(name) is not None or "reducer::" in name


def _parts(kinds: Counter[_Kind]) -> str:
    return ", ".join(f"{time_text(ns)} to {kind.does}" for kind, ns in kinds.most_common() if ns > 0)


def _layers(case: Case, kind: _Kind) -> list[str]:
    """Paths of those that communicate most in the phases of this kind, the most first."""
    spent = {
        row.path: row.communication_ns * ("backward" in kind.phases)
        + row.forward_communication_ns * ("forward" in kind.phases)
        for row in case.run.layers
    }
    least = _LAYER * sum(spent.values())
    return sorted((path for path, ns in spent.items() if ns > 0 and ns >= least), key=lambda path: -spent[path])


RULE = Rule("exposed-communication", "communication between ranks while nothing else is done", find, of_times=True)
