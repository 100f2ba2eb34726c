"""Communication between ranks during which this rank does nothing else.

Example::

    for layer in model.layers:
        fully_shard(layer)  # each layer's parameters are gathered before it, again in backward, while nothing runs

Pattern: collectives, what FSDP does for them, and waits for other ranks take more than 10 % of the step and a
millisecond of one that is not profiled. With tensors on a GPU only the time of collectives' kernels counts in which no
other kernel runs; where it is not known, nothing is said. What takes most of that time decides what is advised:
gathering parameters, reducing their gradients, sharded or not, sending buffers, or exchanging results of split layers.

Evidence: that time, its share, and how much of it each of these takes. The layers are those with a tenth of it or
more. Where gradients of DDP could be sent earlier, the rule ``late-bucket`` says so instead. Estimate: none; at most
all of what takes most. One rank's report does not tell a transfer from the wait for a rank that works longer:
``gradscope merge`` does.

Source: S. Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training (VLDB 2020), section 3.2;
Y. Zhao et al., PyTorch FSDP (VLDB 2023), section 3.3; torch.distributed.fsdp.fully_shard, on ``reshard_after_forward``
and prefetching.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from gradscope import ops
from gradscope.diagnose.case import Case, Rule
from gradscope.diagnose.findings import at_most, make_finding, of_step
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
        of_layers: whose it is, is known.
    """

    does: str
    message: str
    advice: str
    code: str
    of_layers: bool = True


_GATHER_FORWARD = _Kind(
    does="gather parameters for forward",
    message="Layers wait until their parameters are gathered",
    advice="gather the next layers' parameters while a layer computes.",
    code="layer.set_modules_to_forward_prefetch([next_layer])",
)
_GATHER_BACKWARD = _Kind(
    does="gather parameters for backward",
    message="Backward waits until parameters are gathered a second time",
    advice="keep them from forward, where memory allows it.",
    code="fully_shard(layer, reshard_after_forward=False)",
)
_SCATTER = _Kind(
    does="reduce sharded gradients",
    message="Backward waits until gradients are reduced between the ranks",
    advice="reduce them once for several batches.",
    code="model.set_requires_gradient_sync(False)  # before all but the last batch of those that are accumulated",
)
_REDUCE = _Kind(
    does="reduce gradients",
    message="Backward waits until gradients are reduced between the ranks",
    advice="reduce them once for several batches, or in bfloat16.",
    code="with model.no_sync():  # for all but the last batch of those that are accumulated",
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

# In names of operations, of FSDP's rows, and of the kernels of nccl and its like.
_GATHERS = re.compile(r"all_?gather", re.IGNORECASE)
_SCATTERS = re.compile(r"reduce_?scatter|FSDP::\w*reduce", re.IGNORECASE)
_SENDS = re.compile(r"broadcast", re.IGNORECASE)
_EXCHANGES = re.compile(r"wait_tensor|all_?to_?all|send|recv", re.IGNORECASE)
_REDUCES = re.compile(r"all_?reduce|" + re.escape(ops.WAIT), re.IGNORECASE)


def find(case: Case) -> Iterator[Finding]:
    """Yield at most one finding."""
    device = case.run.device
    spent = (case.run.step.communication_ns or 0) if device is None else device.exposed_ns
    kinds = _on_host(case) if device is None else _on_device(case)
    if not any(kinds.values()) or not is_much(spent, case):
        return
    kind, most = max(kinds.items(), key=lambda item: item[1])
    if kind is _REDUCE and any(late_bucket.find(case)):
        return  # it says the same, and why
    yield make_finding(
        RULE.name,
        case,
        at_most(min(most, spent)),
        severity="warning",
        layers=_layers(case) if kind.of_layers else (),
        line=None,
        message=kind.message,
        evidence=f"{of_step(spent, case)} in which this rank does nothing else, of it {_parts(kinds)}",
        advice=COMPARE_FIRST + kind.advice,
        code=kind.code,
        cost_ns=spent,
    )


def _on_host(case: Case) -> Counter[_Kind]:
    """What each kind takes of the threads that train."""
    found: Counter[_Kind] = Counter()
    reduces = _what_is_reduced(case)
    for row in case.run.ops:
        mine = row.phase == "communication" or (
            row.phase == "forward" and row.name.startswith((*ops.COLLECTIVES, ops.SHARDING))
        )
        kind = _kind_of(row.name, row.phase, reduces) if mine else None
        if kind is not None:
            found[kind] += row.self_ns
    return found


def _on_device(case: Case) -> Counter[_Kind]:
    """What of each kind no other kernel runs beside."""
    found: Counter[_Kind] = Counter()
    reduces = _what_is_reduced(case)
    for row in case.run.kernels:
        mine = ops.COLLECTIVE_KERNEL.search(row.name) is not None
        kind = _kind_of(row.name, row.phase, reduces) if mine else None
        if kind is not None and row.busy_ns:
            found[kind] += row.busy_ns
    return found


def _what_is_reduced(case: Case) -> _Kind:
    """What an all-reduce is for, and a wait behind the last node: they look alike in all ways to train."""
    names = [row.name for row in case.run.ops]
    if any(name.startswith(ops.SPLIT_LAYERS) for name in names):
        return _RESULTS
    return _SCATTER if any(name.startswith(ops.SHARDING) for name in names) else _REDUCE


def _kind_of(name: str, phase: str, reduces: _Kind) -> _Kind | None:
    if _GATHERS.search(name):
        return _GATHER_FORWARD if phase == "forward" else _GATHER_BACKWARD
    if _SCATTERS.search(name):
        return _SCATTER
    if _SENDS.search(name):
        return _BUFFERS
    if _EXCHANGES.search(name):
        return _RESULTS
    if _REDUCES.search(name):
        return reduces
    return None


def _parts(kinds: Counter[_Kind]) -> str:
    return ", ".join(f"{time_text(ns)} to {kind.does}" for kind, ns in kinds.most_common() if ns > 0)


def _layers(case: Case) -> list[str]:
    """Paths of those that communicate most, the most first."""
    spent = {row.path: row.communication_ns + row.forward_communication_ns for row in case.run.layers}
    least = _LAYER * sum(spent.values())
    return sorted((path for path, ns in spent.items() if ns > 0 and ns >= least), key=lambda path: -spent[path])


RULE = Rule("exposed-communication", "communication between ranks while nothing else is done", find, of_times=True)
