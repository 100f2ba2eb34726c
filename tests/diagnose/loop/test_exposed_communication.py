"""Communication during which a rank does nothing else, on runs made by hand; tests/truth has those of real ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gradscope.diagnose.case import Case
from gradscope.diagnose.rules import RULES
from gradscope.tables import BucketRow, DeviceLedger, Finding, KernelRow, OpRow
from tests.diagnose.timing_cases import MS, check_words, made_case, op, row

RULE = RULES["exposed-communication"]
WAIT = "(waits for other ranks)"


def found(case: Case) -> list[Finding]:
    return list(RULE.find(case))


def on_host(spent: int | None, *ops: OpRow, ddp: bool = False, mesh: str = "", **more: Any) -> Case:
    layers = [
        row("a", 10 * MS, 10 * MS, communication_ns=8 * MS, forward_communication_ns=4 * MS),
        row("b", 10 * MS, 10 * MS, communication_ns=20 * MS),
        row("c", 10 * MS, 10 * MS, communication_ns=1 * MS),
    ]
    case = made_case(layers, ops, **more)
    environment = {**case.run.environment, "mesh": mesh} if mesh else case.run.environment
    step = replace(case.run.step, communication_ns=spent)
    root = replace(case.run.layers[0], class_name="DistributedDataParallel" if ddp else "Model")
    run = replace(case.run, step=step, environment=environment, layers=(root, *case.run.layers[1:]))
    return Case(run, case.facts)


REDUCED = "Backward waits until gradients are reduced between the ranks"
FORWARD = "Layers wait until their parameters are gathered"
BACKWARD = "Backward waits until parameters are gathered a second time"
SPLIT = "Layers that are split over the ranks wait for each other's results"
BUFFERS = "Forward waits until the first rank has sent its buffers"


OWN = "The step waits for collectives that the program begins itself"
STAGES = "Stages of a pipeline wait for each other"
DDP: dict[str, Any] = {"ddp": True}
TENSOR_PARALLEL: dict[str, Any] = {"mesh": "2 dp x 2 tp"}
SCATTERED = "FSDP::post_backward_reduce: c10d::wait for "
HOOK = "FullyShardedDataParallel._post_backward_hook: c10d::wait for "
WRAPPED = "FullyShardedDataParallel."
FSDP_AHEAD = op("a", "forward", "FSDP::forward_prefetch", 1)
FSDP_ROW = op(None, "forward", "FSDP::pre_forward", 1)
SPLIT_ROW = op("a", "forward", "_c10d_functional::all_reduce", MS)


@pytest.mark.parametrize(
    ("how", "ops", "message", "code", "layers"),
    [
        (DDP, [op(None, "communication", WAIT, 30 * MS)], REDUCED, "model.no_sync()", []),
        (DDP, [op(None, "communication", "c10d::allreduce_", 30 * MS)], REDUCED, "model.no_sync()", []),
        # A loss that is averaged for the log splits no layer.
        (DDP, [op(None, "communication", WAIT, 30 * MS), SPLIT_ROW], REDUCED, "model.no_sync()", []),
        (DDP, [op(None, "forward", "(waits for gloo:broadcast)", 30 * MS)], BUFFERS, "broadcast_buffers=False", []),
        ({}, [op("a", "forward", "FSDP::all_gather", 30 * MS)], FORWARD, "set_modules_to_forward_prefetch", ["a"]),
        (
            {},
            [FSDP_ROW, op(None, "communication", "c10d::_allgather_base_", 30 * MS)],
            BACKWARD,
            "reshard_after_forward=False",
            ["b", "a"],
        ),
        (
            {},
            [op(None, "communication", "FSDP::post_backward_reduce", 20 * MS), op(None, "communication", WAIT, 9 * MS)],
            REDUCED,
            "set_requires_gradient_sync(is_last_batch)",
            ["b", "a"],
        ),
        (
            {},
            [FSDP_ROW, op(None, "communication", "c10d::wait for a collective", 30 * MS)],
            REDUCED,
            "set_requires_gradient_sync(is_last_batch)",
            ["b", "a"],
        ),
        # The older FSDP, which wraps modules; in a trace waits have no rows of their own.
        ({}, [op("a", "forward", WRAPPED + "_pre_forward", 30 * MS)], FORWARD, "forward_prefetch=True", ["a"]),
        (
            {},
            [op(None, "communication", WRAPPED + "_pre_backward_hook", 30 * MS)],
            BACKWARD,
            "ShardingStrategy.SHARD_GRAD_OP",
            ["b", "a"],
        ),
        ({}, [op(None, "communication", WRAPPED + "_post_backward_prefetch", 30 * MS)], BACKWARD, "SHARD", ["b", "a"]),
        ({}, [op(None, "communication", WRAPPED + "_post_backward_hook", 30 * MS)], REDUCED, "no_sync()", ["b", "a"]),
        # What a collective is a part of tells more than its own name: replicas of shards, gathering ahead of forward.
        ({}, [op(None, "communication", SCATTERED + "all_reduce", 30 * MS)], REDUCED, "gradient_sync", ["b", "a"]),
        ({}, [op(None, "communication", HOOK + "all_reduce", 30 * MS)], REDUCED, "model.no_sync()", ["b", "a"]),
        ({}, [op(None, "other", "FSDP::all_gather: c10d::wait", 30 * MS)], FORWARD, "prefetch", ["a"]),
        ({}, [op("a", "forward", WRAPPED + "_pre_forward_prefetch: c10d::wait", 30 * MS)], FORWARD, "SHARD", ["a"]),
        ({}, [FSDP_AHEAD, op("a", "forward", "FSDP::all_gather", 30 * MS)], FORWARD, "layers[:2]", ["a"]),
        # Of one dimension, with FSDP: it is FSDP's.
        (
            {"mesh": "2"},
            [FSDP_ROW, SPLIT_ROW, op(None, "communication", "c10d::_reduce_scatter_base_", 30 * MS)],
            REDUCED,
            "set_requires_gradient_sync(is_last_batch)",
            ["b", "a"],
        ),
        (
            TENSOR_PARALLEL,
            [op("a", "communication", "_c10d_functional::wait_tensor", 30 * MS)],
            SPLIT,
            "init_device_mesh",
            ["b", "a"],
        ),
        (
            TENSOR_PARALLEL,
            [op("a", "forward", "c10d::allreduce_", 30 * MS), SPLIT_ROW],
            SPLIT,
            "init_device_mesh",
            ["b", "a"],
        ),
        # Sequence parallel gathers and scatters what layers made, no parameters.
        (
            TENSOR_PARALLEL,
            [SPLIT_ROW, op("a", "forward", "c10d::_allgather_base_", 30 * MS)],
            SPLIT,
            "init_device_mesh",
            ["b", "a"],
        ),
        # A result that is waited for where it is read, behind the model; not where the program begins one there.
        (
            TENSOR_PARALLEL,
            [SPLIT_ROW, op(None, "other", "_c10d_functional::wait_tensor", 30 * MS)],
            SPLIT,
            "init_device_mesh",
            ["b", "a"],
        ),
        (
            TENSOR_PARALLEL,
            [
                SPLIT_ROW,
                op(None, "other", "_c10d_functional::all_reduce", MS),
                op(None, "other", "_c10d_functional::wait_tensor", 30 * MS),
            ],
            OWN,
            "async_op=True",
            ["b", "a"],
        ),
        # Beside FSDP, too.
        (
            TENSOR_PARALLEL,
            [FSDP_ROW, SPLIT_ROW, op("a", "communication", "_c10d_functional::reduce_scatter_tensor", 30 * MS)],
            SPLIT,
            "init_device_mesh",
            ["b", "a"],
        ),
        ({}, [op(None, "other", "c10d::wait for recv", 30 * MS)], STAGES, "n_microbatches", []),
        # What waits elsewhere than behind the last node is not DDP: experts, a norm of all ranks, own sending.
        (DDP, [op(None, "communication", "c10d::wait for all_to_all", 30 * MS)], OWN, "async_op=True", ["b", "a"]),
        (DDP, [op(None, "communication", "c10d::wait for all_reduce", 30 * MS)], OWN, "async_op=True", ["b", "a"]),
        (DDP, [op("a", "forward", "c10d::wait for broadcast", 30 * MS)], OWN, "async_op=True", ["b", "a"]),
        ({}, [op(None, "communication", "(waits for gloo:all_reduce)", 30 * MS)], OWN, "async_op=True", ["b", "a"]),
        (DDP, [op(None, "optimizer", "c10d::broadcast_", 30 * MS)], OWN, "async_op=True", ["b", "a"]),
        ({}, [op(None, "other", "c10d::allreduce_", 30 * MS)], OWN, "async_op=True", ["b", "a"]),
        ({}, [FSDP_ROW, op(None, "other", "c10d::_allgather_base_", 30 * MS)], OWN, "async_op=True", ["b", "a"]),
    ],
)
def test_what_takes_most_decides(
    how: dict[str, Any], ops: list[OpRow], message: str, code: str, layers: list[str]
) -> None:
    (finding,) = found(on_host(40 * MS, *ops, **how))
    check_words(finding)
    assert finding.message == message and code in finding.code
    assert finding.predicted_high_ns is None and finding.cost_ns == 40 * MS
    assert list(finding.layers) == layers


def test_the_evidence_names_each_part() -> None:
    parts = (
        op("a", "forward", "FSDP::all_gather", 6 * MS),
        op("b", "forward", "FSDP::all_gather", 4 * MS),
        op(None, "communication", "FSDP::all_gather", 7 * MS),
        op(None, "communication", "FSDP::post_backward_reduce", 20 * MS),
        op(None, "communication", WAIT, 1 * MS),
        op(None, "communication", "aten::copy_", 2 * MS),
        op(None, "other", "c10d::allreduce_", 3 * MS),  # of the user's loop
        op("a", "forward", "aten::broadcast_tensors", 90 * MS),
    )
    (finding,) = found(on_host(40 * MS, *parts))
    assert finding.evidence == (
        "40.0 ms per step (40.0 %) in which this rank does nothing else, of it 21.0 ms to reduce sharded gradients, "
        "10.0 ms to gather parameters for forward, 7.00 ms to gather parameters for backward, "
        "3.00 ms to wait for collectives of the program's own"
    )


@pytest.mark.parametrize(
    "case",
    [
        on_host(None),
        on_host(40 * MS),
        on_host(9 * MS, op(None, "communication", WAIT, 9 * MS)),
        on_host(900_000, op(None, "communication", WAIT, 900_000), wall=5 * MS),
        made_case(device="cuda"),
    ],
    ids=["one rank", "of nothing known", "a small part", "below a millisecond", "nothing known"],
)
def test_what_is_left_alone(case: Case) -> None:
    assert found(case) == []


def on_device(exposed: int, *kernels: KernelRow) -> Case:
    rows = (op(None, "communication", WAIT, 90 * MS), op("a", "forward", "FSDP::all_gather", 1))
    case = on_host(90 * MS, *rows)  # the host waits anyway: it runs ahead
    parts = dict.fromkeys(DeviceLedger.PARTS, 0) | {"communication_ns": 60 * MS}
    ledger = DeviceLedger(kernel_ns=60 * MS, **parts, collectives_ns=60 * MS, exposed_ns=exposed)
    return Case(replace(case.run, device=ledger, kernels=kernels), case.facts)


def kernel(phase: str, name: str, busy: int | None) -> KernelRow:
    return KernelRow(None, phase, name, 4, 60 * MS, busy_ns=busy)


def test_on_a_device_only_what_is_exposed() -> None:
    gather, reduce = "ncclDevKernel_AllGather_RING_LL(x)", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)"
    other = "void at::native::broadcast_kernel(x)"  # of torch's own
    hidden = on_device(2 * MS, kernel("communication", reduce, 2 * MS))
    assert found(hidden) == []
    case = on_device(
        40 * MS,
        kernel("forward", gather, 10 * MS),
        kernel("communication", reduce, 30 * MS),
        kernel("x", other, 80 * MS),
    )
    (finding,) = found(case)
    assert finding.evidence.endswith("30.0 ms to reduce sharded gradients, 10.0 ms to gather parameters for forward")
    assert found(on_device(40 * MS, kernel("communication", reduce, None))) == []


def test_a_kernel_of_any_collective_is_told_by_its_operation() -> None:
    generic = kernel("communication", "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", 30 * MS)
    (finding,) = found(on_device(40 * MS, replace(generic, op="nccl:_reduce_scatter_base")))
    assert finding.message == REDUCED
    (finding,) = found(on_device(40 * MS, replace(generic, op=None, phase="other")))
    assert finding.message == OWN


def test_an_exchange_with_all_is_no_pipeline() -> None:
    """nccl has one kernel for both, and for gather and scatter."""
    exchange = kernel("forward", "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", 30 * MS)
    for name, message in (("nccl:all_to_all", OWN), ("nccl:gather", OWN), ("nccl:send 0->1", STAGES)):
        (finding,) = found(on_device(40 * MS, replace(exchange, op=name)))
        assert finding.message == (message if name != "nccl:all_to_all" else OWN), name


def test_it_explains_itself() -> None:
    assert all(part in RULE.about for part in ("Example::", "Pattern:", "Evidence:", "Estimate:", "Source:"))


def test_a_late_bucket_does_not_hide_other_communication() -> None:
    """It explains why gradients are waited for, not why buffers are."""
    late = BucketRow("", 0, 4, 80 << 20, ("a",), 2 * MS, 30 * MS, 60 * MS, 60 * MS, "a", 60 * MS, 15 * MS)
    for buffers, message in ((25, BUFFERS), (5, None)):
        ops = [op(None, "communication", WAIT, 15 * MS), op(None, "forward", "c10d::broadcast_", buffers * MS)]
        case = on_host((15 + buffers) * MS, *ops, ddp=True)
        case = Case(replace(case.run, buckets=(late,)), case.facts)
        assert list(RULES["late-bucket"].find(case))
        assert [finding.message for finding in found(case)] == ([message] if message else [])


@pytest.mark.parametrize(
    ("how", "ops", "message"),
    [
        # DDP sends buffers in forward alone.
        (DDP, [op(None, "communication", "c10d::broadcast_", 30 * MS)], OWN),
        # Beside FSDP's own mesh there is another one, or one of two dimensions: layers are split over it.
        ({"mesh": "2 dp, 2 tp"}, [FSDP_ROW, op("a", "forward", SPLIT_ROW.name, 30 * MS)], SPLIT),
        ({"mesh": "2 dp x 2 tp"}, [FSDP_ROW, op("a", "forward", SPLIT_ROW.name, 30 * MS)], SPLIT),
        ({"mesh": "2"}, [FSDP_ROW, op("a", "forward", SPLIT_ROW.name, 30 * MS)], OWN),
    ],
)
def test_what_a_collective_is_not_for(how: dict[str, Any], ops: list[OpRow], message: str) -> None:
    (finding,) = found(on_host(40 * MS, *ops, **how))
    assert finding.message == message


@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP"])
@pytest.mark.parametrize("phase", ["forward", "communication"])
def test_what_split_layers_reduce_is_no_gradient(sharded: bool, phase: str) -> None:
    """DTensor's own all-reduce, whoever reduces gradients beside it."""
    more = [FSDP_ROW] if sharded else []
    case = on_host(40 * MS, SPLIT_ROW, *more, op("a", phase, "_c10d_functional::all_reduce", 30 * MS), ddp=not sharded)
    environment = {**case.run.environment, **TENSOR_PARALLEL}
    (finding,) = found(Case(replace(case.run, environment=environment), case.facts))
    assert finding.message == SPLIT


@pytest.mark.parametrize("kind", ["all_reduce", "all_to_all", "broadcast", "barrier"])
@pytest.mark.parametrize("ddp", [False, True])
def test_what_python_waits_for_by_name_is_the_programs_own(kind: str, ddp: bool) -> None:
    """FSDP waits for a collective of which gloo does not say what it is."""
    rows = [op(None, "communication", f"c10d::wait for {kind}", 30 * MS), *([] if ddp else [FSDP_ROW])]
    (finding,) = found(on_host(40 * MS, *rows, ddp=ddp))
    assert finding.message == OWN


def test_nothing_is_said_of_what_takes_no_time() -> None:
    rows = [FSDP_ROW, op(None, "communication", WAIT, 30 * MS)]
    rows += [op("a", "forward", name, 0) for name in ("FSDP::all_gather", "c10d::send", "c10d::broadcast_")]
    rows += [op(None, "other", "c10d::barrier", 0)]
    (finding,) = found(on_host(40 * MS, *(replace(row, self_ns=row.self_ns // MS * MS) for row in rows), ddp=True))
    assert finding.evidence.endswith("of it 30.0 ms to reduce sharded gradients")
