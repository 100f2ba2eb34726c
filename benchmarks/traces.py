"""Does ``gradscope trace`` say of an exported trace what a live profile of the same model says?

    python benchmarks/traces.py --device cuda [--model TARGET] [--keep FOLDER] [--json benchmarks/results/traces.jsonl]

One process profiles the model live; then torch.profiler records its steps, with stacks and shapes, and ``gradscope
trace`` reads the file that it exports. Backward time is compared by layer and by row of the ledger, and on a device the
time of its kernels, by what launched them: the sum of all differences over the whole. What recording Python's calls
costs the host is in the trace alone: on a CPU, and on a device that waits for its host, the two differ by that.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from _common import ROOT, Result, finish, parser, print_table, synchronize, workload_step
from torch.profiler import ProfilerActivity, profile, schedule

import gradscope
from gradscope.chrome.run import read_trace
from gradscope.tables import DeviceLedger, Ledger, RunData
from gradscope.workload import Script, Workload, load_target

# Kernels of two runs of one program on one card differ by some tenths of a percent.
GOAL = 1.0
STEPS = 5


def record(loaded: Workload, device: str, path: Path) -> None:
    """Export a trace of some steps, as docs/traces.md says to record one."""
    _, step = workload_step(loaded, device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    waits = schedule(wait=1, warmup=1, active=STEPS)
    with profile(activities=activities, schedule=waits, with_stack=True, record_shapes=True) as prof:
        for _ in range(2 + STEPS):
            step()
            synchronize(device)
            prof.step()
    prof.export_chrome_trace(str(path))


def differences(live: RunData, read: RunData) -> list[Result]:
    """What lies between the two, in percent of the live profile's whole."""
    goal = GOAL if live.environment["device"] == "cuda" else None
    backward = live.step.backward_ns
    theirs = {row.path: row for row in read.layers}
    rows = [(row.path, row.backward_self_ns, theirs[row.path].backward_self_ns) for row in live.layers]
    parts = [(part, getattr(live.ledger, part), getattr(read.ledger, part)) for part in Ledger.PARTS]
    worst = max(rows, key=lambda row: abs(row[1] - row[2]))
    results = [
        Result("backward, live", backward / 1e6, "ms"),
        Result("backward, trace", read.step.backward_ns / 1e6, "ms"),
        Result("layers' own backward time", 100 * _apart(rows) / backward, "% apart", goal),
        Result(f"worst layer: {worst[0]}", 100 * abs(worst[1] - worst[2]) / backward, "% apart"),
        Result("rows of the ledger", 100 * _apart(parts) / backward, "% apart", goal),
    ]
    if live.device is not None and read.device is not None:
        kernels = [
            (part, getattr(live.device, part), getattr(read.device, part))
            for part in DeviceLedger.PARTS
            if part != "elsewhere_ns"  # a live profile has no other steps
        ]
        results += [
            Result("kernels, live", live.device.kernel_ns / 1e6, "ms"),
            Result("kernels, trace", read.device.kernel_ns / 1e6, "ms"),
            Result("kernels by what launched them", 100 * _apart(kernels) / live.device.kernel_ns, "% apart", goal),
        ]
    return results


def _apart(rows: list[tuple[str, int, int]]) -> int:
    return sum(abs(ours - theirs) for _, ours, theirs in rows)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--model", default=str(ROOT / "examples" / "gpt.py") + ":full", metavar="TARGET")
    made.add_argument("--keep", type=Path, metavar="FOLDER", help="leave trace and reports there")
    options = made.parse_args()
    loaded = load_target(options.model, [])
    if isinstance(loaded, Script):
        sys.exit(f"{options.model} is a training script: this benchmark wants a file with workload()")
    torch.manual_seed(0)
    live = gradscope.profile(
        loaded.model, loaded.batch, loaded.loss, steps=STEPS, device=options.device, memory=False, lines=False
    )
    with tempfile.TemporaryDirectory() as folder:
        kept = options.keep or Path(folder)
        kept.mkdir(parents=True, exist_ok=True)
        path = kept / "trace.json.gz"
        record(loaded, options.device, path)
        began = time.perf_counter()
        read = read_trace(path, model=load_target(options.model, []))
        took = time.perf_counter() - began
        size = path.stat().st_size
        if options.keep is not None:
            live.save(kept / "live.json", force=True)
            read.save(kept / "read.json", force=True)
    results = differences(live.data, read.data)
    results.append(Result(f"reading {size / 1e6:.1f} MB", took, "s"))
    print_table(f"A trace beside a live profile of {options.model} on {options.device}", results)
    return finish("traces", results, options.device, options.json)


if __name__ == "__main__":
    sys.exit(main())
