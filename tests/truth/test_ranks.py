"""Truth over ranks: known costs, and a rank that works 40 ms longer, in several processes that talk over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradscope.diagnose.case import Case, StepFacts
from gradscope.diagnose.rules import RULES
from gradscope.ranks import Merged, merge
from gradscope.report.runfile import load_run
from gradscope.tables import RunData
from tests.ranks.costs import COSTS, IDLE, MORE, OF_BUCKETS, OF_WAITS

SCRIPT = Path(__file__).parents[1] / "ranks" / "costs.py"
ONE = ("ddp", "ddp_views", "no_sync", "fsdp", "fsdp_wrapped", "fsdp_original", "tensor_parallel")
MS = 1e6


def launch(folder: Path, ranks: int, *cases: str) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "RANK": "", "WORLD_SIZE": ""}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, folder, str(rank), str(ranks), *cases],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(said)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    launch(folder, 2, *ONE, *(case + IDLE for case in ONE))
    return folder


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    launch(folder, 4, "ddp", "fsdp", "ddp" + IDLE, "fsdp" + IDLE)
    return folder


def files(folder: Path, case: str) -> list[Path]:
    return sorted(folder.glob(f"{case}.rank*.json"))


def number_of(path: str) -> int:
    return int(path.removesuffix("._fsdp_wrapped_module").split(".")[-1])


def costs(run: RunData) -> dict[int, float]:
    """Backward time of each layer by itself, by its number; of the step in which it took least.

    It sleeps for at least what it is asked for, and longer where another process has the core when it wakes.
    """
    paths = {number_of(row.path): row for row in run.layers if row.class_name.endswith("Layer")}
    return {number: min(paths[number].backward_self_steps_ns) / MS for number in range(len(COSTS))}


def check(folder: Path, case: str) -> Merged:
    paths = files(folder, case)
    passes = 2 if case == "no_sync" else 1
    for rank, path in enumerate(paths):
        slow = MORE if rank == len(paths) - 1 else 0
        want = [passes * (ms + (slow if number == 1 else 0)) for number, ms in enumerate(COSTS)]
        found, own = costs(load_run(path)), costs(load_run(folder / path.name.replace(case, case + IDLE)))
        for number, ms in enumerate(want):
            # Its operators are a layer's too: those of DTensor take a millisecond of Python on a slow machine. 3 % and
            # 1 ms: a process that sleeps is not woken at once. (approx would take the larger of both.)
            assert abs(found[number] - own[number] - ms) <= 0.03 * ms + 1.0, (rank, number, found, own, ms)
            # They are those of a few rows of 64: a wait or a cost of another layer's is not among them.
            assert 0 < own[number] < min(COSTS), (rank, number, own)
    merged = merge(paths)
    assert merged.straggler is not None and merged.straggler.ranks == (len(paths) - 1,)
    layers = [layer for layer in merged.layers if layer.class_name.endswith("Layer")]
    (worst,) = [layer for layer in layers if number_of(layer.path) == 1]
    assert worst.slowest == len(paths) - 1
    assert worst.more_ns / MS == pytest.approx(passes * MORE, rel=0.03, abs=2.0)
    return merged


@pytest.mark.parametrize("case", ONE)
def test_two_ranks(case: str, two: Path) -> None:
    """What the first waits for the second is communication, and no layer's; the passes of no_sync wait for nobody."""
    merged = check(two, case)
    fast, slow = merged.ranks
    # The first waits for as long as the second works longer: in all of its step, for FSDP gathers in forward too.
    waits = 2 * MORE if case == "no_sync" else MORE
    # With the scheduler's part: a process that waits is not woken at once.
    assert (fast.communication_ns - slow.communication_ns) / MS == pytest.approx(waits, rel=0.1, abs=4.0)


WAITS = {
    "ddp": "model.no_sync()",
    "fsdp": "set_requires_gradient_sync(is_last_batch)",
    "fsdp_wrapped": "model.no_sync()",
    "tensor_parallel": "init_device_mesh",
}


@pytest.mark.parametrize("case", WAITS)
def test_the_rank_that_waits_is_told_for_what(case: str, two: Path) -> None:
    """The gradients of the layer that takes longer on the other rank, or that layer's result."""
    (finding,) = RULES["exposed-communication"].find(Case(load_run(files(two, case)[0]), StepFacts()))
    assert WAITS[case] in finding.code and "gradscope merge" in finding.advice
    assert finding.cost_ns is not None and finding.cost_ns / MS > 0.9 * MORE
    assert (finding.layers[0] if finding.layers else "") == {
        "ddp": "",
        "fsdp": "1",
        "fsdp_wrapped": "_fsdp_wrapped_module.1",
        "tensor_parallel": "1.up",
    }[case]


def test_the_mesh_is_told(two: Path, four: Path) -> None:
    meshes = {"ddp": None, "fsdp": "2", "tensor_parallel": "2"}
    found = {case: {load_run(path).environment.get("mesh") for path in files(two, case)} for case in meshes}
    assert found == {case: {mesh} for case, mesh in meshes.items()}
    assert {load_run(path).environment.get("mesh") for path in files(four, "fsdp")} == {"4"}


@pytest.mark.parametrize("case", ["fsdp", "fsdp_wrapped", "fsdp_original"])
def test_what_fsdp_communicates_is_the_layers(case: str, two: Path) -> None:
    """But for the callback at the end of the pass, what the loop itself exchanges, and rounding."""
    for path in files(two, case):
        run = load_run(path)
        layers = sum(row.communication_ns + row.forward_communication_ns for row in run.layers)
        loops = sum(op.self_ns for op in run.ops if op.phase == "other" and op.name.startswith("c10d::"))
        assert run.step.communication_ns is not None and layers >= 0.95 * (run.step.communication_ns - loops)


@pytest.mark.parametrize("case", ["ddp", "fsdp"])
def test_four_ranks(case: str, four: Path) -> None:
    check(four, case)


@pytest.fixture(scope="module")
def buckets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("buckets")
    launch(folder, 2, *OF_BUCKETS, "mixed_up")
    return folder


LAYERS = [f"module.layer{number}" for number in range(4)]
NETWORK_MS = 8.0  # that a layer's gradients take at least


@pytest.mark.parametrize("case", OF_BUCKETS)
def test_what_is_waited_for_a_bucket_is_its_layers(case: str, buckets: Path) -> None:
    for path in files(buckets, case):
        run = load_run(path)
        assert run.buckets is not None
        waited = sum(op.self_ns for op in run.ops if "waits for other ranks" in op.name)
        assert sum(row.exposed_ns for row in run.buckets) == pytest.approx(waited, rel=0.01)
        layers = {row.path: row.communication_ns for row in run.layers if row.communication_ns}
        assert set(layers) == set(LAYERS)
        # But for asking which parameters are used anywhere, and for rounding.
        assert sum(layers.values()) == pytest.approx(run.ledger.communication_ns, rel=0.05)
        weights = [row for row in run.buckets if row.bytes > 1e6]  # a weight of 4 MiB fills one: biases may lie apart
        assert [row.layers[0] for row in weights] == {
            "one_bucket": [weights[0].layers[0]],
            "turned": LAYERS,
        }.get(case, LAYERS[::-1])
        if case == "one_bucket":
            assert set(weights[0].layers) == set(LAYERS)
            continue
        for row in weights:
            number = LAYERS.index(row.layers[0])
            # Each but the first, whose input has no gradient, sleeps for a third of the pass: a layer's gradients are
            # there when those behind it have slept. Half of that tells them apart.
            assert row.last_at_ns / row.pass_ns == pytest.approx((3 - number) / 3, abs=1 / 6)
            begun = 0 if case == "turned" else number
            assert row.begun_at_ns / row.pass_ns == pytest.approx((3 - begun) / 3, abs=1 / 6)
            # Buckets that are sent together come one after the other; of the others all but the last are hidden.
            if case == "turned" or number == 0:
                assert row.exposed_ns / MS >= NETWORK_MS - 1.0
            assert layers[row.layers[0]] >= 0.99 * row.exposed_ns


def test_buckets_that_a_hook_mixes_up_are_not_told(buckets: Path) -> None:
    """As many collectives as buckets, but not one for each."""
    for path in files(buckets, "mixed_up"):
        run = load_run(path)
        assert run.buckets is None and run.ledger.communication_ns > 0


@pytest.mark.parametrize(
    ("case", "code"),
    [("one_bucket", "bucket_cap_mb=2"), ("turned", "find_unused_parameters=False"), ("buckets", None)],
)
def test_a_late_bucket_is_told(case: str, code: str | None, buckets: Path) -> None:
    found = list(RULES["late-bucket"].find(Case(load_run(files(buckets, case)[0]), StepFacts())))
    assert [code in finding.code for finding in found if code] == [True] * (code is not None)
    # Four layers' gradients one after the other, of which at least three could be hidden.
    for finding in found:
        assert finding.cost_ns is not None and finding.cost_ns / MS >= 4 * NETWORK_MS - 2.0


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("waits")
    launch(folder, 2, *OF_WAITS)
    return folder


@pytest.mark.parametrize("case", OF_WAITS)
def test_a_wait_without_a_row_is_nobodys_work(case: str, waits: Path) -> None:
    """Of a loop that averages by hand, of tensors that are exchanged, of buffers that the first rank sends late."""
    paths = files(waits, case)
    merged = merge(paths)
    slow = 0 if case == "buffers" else 1
    for rank, path in enumerate(paths):
        found = costs(load_run(path))
        for number, ms in enumerate(COSTS):
            want = ms + (MORE if (rank, number) == (1, 1) and case != "buffers" else 0)
            assert abs(found[number] - want) <= 0.03 * want + 1.0, (rank, number, found[number], want)
    assert merged.straggler is not None and merged.straggler.ranks == (slow,)
    # With the scheduler's part, as of two ranks above.
    assert merged.straggler.more_ns / MS == pytest.approx(MORE, rel=0.1, abs=4.0)
    fast = next(step for step in merged.ranks if step.rank != slow)
    assert fast.communication_ns / MS >= 0.9 * MORE
    differing = [layer.path for layer in merged.layers if layer.more_ns / MS > 0.5 * MORE]
    assert differing == ([] if case == "buffers" else ["inner.1"])
