"""Freed memory of large tensors goes back to the operating system and is page-faulted in again in every step.

Example::

    0.5 * x * (1 + torch.tanh(x + 0.044715 * x**3))  # x of 32 MB: eight tensors of new memory, and more in backward

Pattern: on a CPU under Linux, 1,000 and more page faults in an unprofiled step, which take 3 % of the step and more.
The system gives out memory page by page, when it is first written, and fills it with zeros. glibc takes pieces of
32 MiB and more from the system each time, and returns what is free at the end of its heap.

Silent where the environment already names another allocator, or sets glibc's.

Evidence: minor page faults and system time of the process, in the step that had the fewest. Estimate: the system
time, of 4 µs a fault at most, over the number of threads, less a tenth: some pages are new in any case. At least 0.6 of
it, at most 1.3 times, where the threads wait for each other (measured on two cores: 1.2 times at 156,000 and at 38,000
faults a step, 0.8 at 4,500). The process keeps its largest size until it ends.

Source: PyTorch, Performance Tuning Guide, "Switch memory allocator" (jemalloc, TCMalloc); mallopt(3), M_MMAP_MAX and
M_TRIM_THRESHOLD.
"""

from __future__ import annotations

from collections.abc import Iterator

from gradscope.diagnose.case import Case, Rule, share
from gradscope.diagnose.findings import Estimate, make_finding, script_of, several
from gradscope.tables import Finding
from gradscope.units import count as counted
from gradscope.units import ns as time_text
from gradscope.units import size as size_text

_FAULTS, _SHARE = 1_000, 0.03
_FAULT_NS = 4_000  # system time beyond this is for something else, such as threads that wait
_PAGE_BYTES = 4_096
_PARTS = (0.6, 0.9, 1.3)  # of a thread's share of the system time: low, likely, high


def find(case: Case) -> Iterator[Finding]:
    """Yield at most one finding."""
    seen = case.facts.settings.get("system") or {}
    faults = round(seen.get("page_faults", 0))
    spent = min(int(seen.get("system_ns", 0)), faults * _FAULT_NS)
    threads = max(int(case.run.environment.get("threads") or 1), 1)
    share_ns = spent // threads
    low, saving, high = (min(round(share_ns * part), spent) for part in _PARTS)
    linux = str(case.run.environment.get("platform", "")).startswith("linux")
    if not linux or case.on_cuda or faults < _FAULTS or share(saving, case) < _SHARE or seen.get("kept"):
        return
    yield make_finding(
        RULE.name,
        case,
        Estimate(saving, low, high),
        layers=(),
        line=None,
        message="Freed memory goes back to the operating system and is page-faulted in again in every step",
        evidence=(
            f"{counted(faults)} page faults per unprofiled step, for "
            f"{size_text(faults * _PAGE_BYTES)} of memory; {time_text(spent)} of system time over "
            f"{several(threads, 'thread')}"
        ),
        cost_ns=spent,
        advice=(
            "Keep freed memory in the process: set these environment variables, preload jemalloc or "
            "TCMalloc, or call mallopt before the first tensor is created; then profile again: other "
            "savings will be smaller."
        ),
        code=f"MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=-1 python {script_of(case)}\n"
        "libc = ctypes.CDLL(None); libc.mallopt(-4, 0); libc.mallopt(-1, 2**31 - 1)",
    )


RULE = Rule("page-faults", "memory returned to the operating system in every step", find)
