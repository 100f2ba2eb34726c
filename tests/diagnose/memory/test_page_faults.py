"""Memory that goes back to the system in each step: what is measured, and when that is a finding."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor, nn

from gradscope.capture import system
from gradscope.capture.system import FaultMeter
from gradscope.diagnose.case import Case, StepFacts
from gradscope.diagnose.rules.memory import page_faults
from tests.diagnose.timing_cases import MS, check_words, made_case

_HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults as Linux does")
small_pages = pytest.mark.skipif(
    _HUGE.is_file() and "[always]" in _HUGE.read_text(), reason="this system hands out pages of 2 MB"
)


class Wide(nn.Module):
    """Results of more than 32 MiB, which glibc never keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 4096)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return y * y.sigmoid() + y.relu()


def _case(
    count: float,
    system_ns: int,
    *,
    device: str = "cpu",
    platform: str = "linux-x86_64",
    threads: int = 2,
    kept: bool = False,
) -> Case:
    seen = {"system": {"page_faults": count, "system_ns": system_ns, "kept": kept}}
    case = made_case(wall=100 * MS, device=device, facts=StepFacts(settings=seen))
    environment = {**case.run.environment, "platform": platform, "threads": threads}
    return Case(replace(case.run, environment=environment), case.facts)


def test_what_is_said() -> None:
    (found,) = page_faults.find(_case(20_000, 40 * MS))
    check_words(found)
    assert "20.0 k page faults" in found.evidence
    assert "81.9 MB" in found.evidence
    assert (found.predicted_low_ns, found.predicted_saving_ns, found.predicted_high_ns) == (12 * MS, 18 * MS, 26 * MS)
    assert found.cost_ns == 40 * MS
    assert found.severity == "critical"
    (alone,) = page_faults.find(_case(20_000, 40 * MS, threads=1))
    assert (alone.predicted_saving_ns, alone.predicted_high_ns) == (36 * MS, 40 * MS)


def test_system_time_for_something_else_does_not_count() -> None:
    (found,) = page_faults.find(_case(5_000, 500 * MS))
    assert found.cost_ns == 20 * MS


@pytest.mark.parametrize(
    "case",
    [
        _case(900, 40 * MS, threads=1),  # 3.2 % of the step
        _case(20_000, 5 * MS),
        _case(20_000, 40 * MS, device="cuda"),
        _case(20_000, 40 * MS, platform="darwin-arm64"),
        made_case(wall=100 * MS),
        _case(20_000, 40 * MS, kept=True),
    ],
    ids=["few", "cheap", "on a GPU", "another system", "not measured", "another allocator"],
)
def test_where_there_is_nothing_to_say(case: Case) -> None:
    assert list(page_faults.find(case)) == []


@linux
def test_the_meter_counts_new_memory_between_its_marks() -> None:
    meter = FaultMeter()
    assert meter.facts() == {}
    meter.stop()
    assert meter.facts() == {}
    held = []
    for _ in range(2):
        new = mmap.mmap(-1, 64 << 20)
        meter.start()
        new[:] = bytes(1) * len(new)
        meter.stop()
        held.append(new)  # the bytes it was filled with are new memory too, or not: that is the allocator's choice
    facts = meter.facts()
    pages = (64 << 20) / mmap.PAGESIZE
    assert facts["page_faults"] <= 2.1 * pages + 1_000
    assert facts["page_faults"] >= (0.9 * pages if "[always]" not in _HUGE.read_text() else 1)
    assert facts["system_ns"] >= 0
    assert not facts["kept"]


def test_an_allocator_that_keeps_memory_is_known_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = FaultMeter()
    meter.start()
    meter.stop()
    for name, value in (("LD_PRELOAD", "/usr/lib/libjemalloc.so.2"), ("MALLOC_TRIM_THRESHOLD_", "-1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not meter.facts() or meter.facts()["kept"]


def test_a_step_costs_what_the_system_did_between_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step with the fewest faults is told; what happens between two steps is of none."""
    usage = iter([(100, 1.0), (900, 1.5), (2_000, 3.0), (2_300, 3.002), (9_000, 9.0), (9_900, 9.0)])
    monkeypatch.setattr(system, "_usage", lambda: next(usage))
    meter = FaultMeter()
    for _ in range(3):
        meter.start()
        meter.stop()
    facts = meter.facts()
    assert (facts["page_faults"], facts["system_ns"]) == (300, 2_000_000)


# What the system took for them is set to the whole step: on a busy machine it is a small part of it.
_LARGE = """
from dataclasses import replace
import torch
from gradscope.diagnose.rules.memory import page_faults
from tests.diagnose.run_case import case_of, timed_by_calls
from tests.diagnose.memory.test_page_faults import Wide

for rows in (2100, 2):
    case = timed_by_calls(case_of(Wide(), torch.ones(rows, 8)), 1_000_000)
    system = {**case.facts.settings["system"], "system_ns": case.step_ns}
    case = replace(case, facts=replace(case.facts, settings={**case.facts.settings, "system": system}))
    print([0 < finding.predicted_saving_ns <= case.step_ns for finding in page_faults.find(case)])
"""


@linux
@small_pages
def test_a_model_with_large_results() -> None:
    """Each is 32 MiB and a little, ten in a step. In a process of its own: this one's heap may have room for all."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", _LARGE], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-2:] == ["[True]", "[]"], done.stderr
