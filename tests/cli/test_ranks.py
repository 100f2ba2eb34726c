"""Several ranks of one program under ``gradscope profile``: each writes files of its own, the first reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from gradscope.process import local_ranks, rank_of_process
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (used by its name)

TRAIN = """
import torch, torch.distributed as dist
from torch import nn

dist.init_process_group("gloo", init_method="file://{store}", rank=int(os.environ["RANK"]), world_size=2)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.manual_seed(dist.get_rank())
for step in range(40):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
print("rank", dist.get_rank(), "trained", step + 1)
dist.destroy_process_group()
"""


def two_ranks(folder: Path, number: str, **environment: str) -> tuple[Sequence[str], Sequence[str]]:
    """What each printed, and what it said beside that; ``number`` is the variable that has its number."""
    command = [sys.executable, "-m", "gradscope", "profile", "train.py", "--steps", "2", "--warmup", "1", "--no-memory"]
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ranks = [
        subprocess.Popen(
            command,
            cwd=folder,
            env={**clean, "GLOO_SOCKET_IFNAME": "lo", **environment, number: str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    out, err = zip(*(rank.communicate(timeout=240) for rank in ranks), strict=True)
    assert [rank.returncode for rank in ranks] == [0, 0], err
    return out, err


def test_each_rank_writes_its_own_and_the_first_reports(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os" + TRAIN.format(store=tmp_path / "store"), encoding="utf-8")
    out, err = two_ranks(tmp_path, "RANK", WORLD_SIZE="2")
    # No rank stops by itself: the other would wait for it.
    assert all(f"rank {rank} trained 40" in text for rank, text in enumerate(out))
    assert "rank 0 of 2" in out[0] and "Layers" in out[0]
    assert "Straggler" in out[0] and "own work" in out[0]  # the first reports for all
    assert out[1].strip() == "rank 1 trained 40" and "gradscope:" not in err[1]
    assert "wrote gradscope-train.rank0.json" in err[0]
    names = {f"gradscope-train.rank{rank}.{ending}" for rank in range(2) for ending in ("json", "html")}
    assert {path.name for path in tmp_path.glob("gradscope-*")} == names
    for rank in range(2):
        record = json.loads((tmp_path / f"gradscope-train.rank{rank}.json").read_text(encoding="utf-8"))
        assert (record["environment"]["rank"], record["environment"]["world_size"]) == (rank, 2)
        assert record["workload"]["steps"] == 2


def test_ranks_cannot_share_stdout(run: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    ran = run("profile", "train.py", "--json", "-")
    assert ran.code == 2 and "4 ranks cannot all write to stdout: give -o PREFIX" in ran.err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, None),
        ({"RANK": "0"}, None),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"RANK": "x", "WORLD_SIZE": "2"}, None),
        ({"RANK": "2", "WORLD_SIZE": "2"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
    ],
)
def test_a_rank_is_what_torchrun_says(
    given: dict[str, str], expected: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert rank_of_process() == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ["-m", "torch.distributed.run", "--", "--nproc-per-node", "2", "train.py", "--lr", "1"],
            "torchrun --nproc-per-node 2 -m gradscope profile train.py -- --lr 1",
        ),
        (["-m", "torch.distributed.run", "--", "-m", "my.train"], "torchrun -m gradscope profile -m my.train"),
        (["-m", "torch.distributed.run"], "torchrun -m gradscope profile train.py"),
        (
            ["bin/accelerate", "--", "launch", "--num_processes", "2", "train.py"],
            "accelerate launch --num_processes 2 -m gradscope profile train.py",
        ),
    ],
)
def test_a_launcher_is_told_the_other_way_round(given: list[str], said: str, run: Runner) -> None:
    """It starts others, which nothing would measure."""
    ran = run("profile", *given)
    assert ran.code == 2
    assert ran.err.endswith(f"Let it start gradscope: {said}\n")


def test_the_first_rank_reports_for_all_of_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert local_ranks(0, 4) == range(4)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert local_ranks(5, 8) == range(4, 6)
    monkeypatch.setenv("LOCAL_RANK", "x")
    assert local_ranks(5, 8) == range(8)


UNEVEN = """
import os, time, torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(2 if os.environ["RANK"] == "1" else 0):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
print("end")
"""


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_rank_that_trains_little_ends_as_alone(rank: str, tmp_path: Path) -> None:
    """torchrun ends all ranks where one ends with another code than 0."""
    (tmp_path / "train.py").write_text(UNEVEN, encoding="utf-8")
    environment = {**os.environ, "RANK": rank, "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "gradscope", "profile", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, "end\n"), ran.stderr
    assert "gradscope: error: train.py" in ran.stderr


def test_ranks_of_a_group_that_torchrun_did_not_make(tmp_path: Path) -> None:
    """srun and mpirun set other variables: the process group tells, and nobody stops before the others."""
    script = "import os" + TRAIN.format(store=tmp_path / "store").replace('os.environ["RANK"]', 'os.environ["MINE"]')
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    out, _ = two_ranks(tmp_path, "MINE")
    assert all(f"rank {rank} trained 40" in text for rank, text in enumerate(out))
    assert "Layers" in out[0] and "Layers" not in out[1]
    assert {path.name for path in tmp_path.glob("gradscope-*.json")} == {
        f"gradscope-train.rank{rank}.json" for rank in range(2)
    }


WAITS = """
import ctypes, os, signal, sys, threading, time
from gradscope.cli import failure
failure.PATIENCE_S = 1.0
with failure.raising_on_terminate():
    if {forks}:
        child = os.fork()
        if child == 0:
            time.sleep(60)
        time.sleep(0.2)
        os.kill(child, 15)
        print(os.waitpid(child, 0)[1], flush=True)
        time.sleep(2)
        sys.exit(0)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    c.pthread_mutex_lock(mutex)
    c.pthread_mutex_lock(mutex)  # for ever, and no signal interrupts it
"""


def waiting(*, forks: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WAITS.format(forks=forks)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_rank_that_waits_in_c_ends_when_it_is_told_to() -> None:
    """As in a collective that another rank does not come to: no handler of Python's runs there."""
    process = waiting()
    _, err = process.communicate(timeout=20)
    assert process.returncode == 143, err
    assert "terminated while it waited" in err


def test_what_a_forked_process_is_told_is_not_its_parents() -> None:
    """A DataLoader's workers are terminated so."""
    process = waiting(forks=True)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out.strip()) == (0, "15"), err
