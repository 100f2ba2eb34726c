"""Exported traces of known costs, made by hand: the events that torch.profiler writes, in microseconds."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

MAIN, ENGINE = 10, 20  # threads of the process
PROCESS = 7
STEP_US = 1000.0


class Made:
    """An exported trace; every method adds an event.

    Args:
        python: with the rows of module calls and of ``run_backward``.
        arrows: with the arrows from operations to their backward nodes.
        correlated: kernels name the call of the runtime that launched them; else the operation alone.
    """

    def __init__(self, *, python: bool = True, arrows: bool = True, correlated: bool = True) -> None:
        self.python, self.arrows, self.correlated = python, arrows, correlated
        self.events: list[dict[str, Any]] = []
        self.about: dict[str, Any] = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "Made GPU"}, {"id": 1, "name": "Other GPU"}],
            "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
        }
        self.numbers = 100  # of launches
        self.operations = 1000

    def add(self, category: str, name: str, start: float, end: float, tid: int, **arguments: Any) -> None:
        event = {"ph": "X", "cat": category, "name": name, "pid": PROCESS, "tid": tid, "ts": start, "dur": end - start}
        self.events.append({**event, "args": arguments})

    def call(self, name: str, start: float, end: float, tid: int = MAIN) -> None:
        if self.python:
            self.add("python_function", f"nn.Module: {name}", start, end, tid, **{"Python id": len(self.events)})

    def op(self, name: str, start: float, end: float, number: int = -1, tid: int = MAIN, dims: Any = None) -> int:
        self.operations += 1
        arguments: dict[str, Any] = {"External id": self.operations}
        if number >= 0:
            arguments |= {"Sequence number": number, "Fwd thread id": 0}
        if dims is not None:
            arguments["Input Dims"] = dims
        self.add("cpu_op", name, start, end, tid, **arguments)
        return self.operations

    def node(
        self, name: str, start: float, end: float, number: int, made: tuple[int, float] = (MAIN, 0), tid: int = ENGINE
    ) -> int:
        """The engine's row of a node, and that of its function inside of it; ``made``: where forward did."""
        logical = {MAIN: 1, MAIN + 1: 5}.get(made[0], 2)
        arguments = {"Sequence number": number, "Fwd thread id": logical}
        self.add("cpu_op", f"autograd::engine::evaluate_function: {name}", start, end, tid, **arguments)
        self.operations += 1
        arguments["External id"] = self.operations
        self.add("cpu_op", name, start + 0.5, end - 0.5, tid, **arguments)
        if self.arrows:
            ends = (("s", made[0], made[1]), ("f", tid, start + 0.5))
            for phase, thread, time in ends:
                self.events.append(
                    {"ph": phase, "id": number, "pid": PROCESS, "tid": thread, "ts": time, "cat": "fwdbwd"}
                    | {"name": "fwdbwd"}
                )
        return self.operations

    def accumulate(self, start: float, end: float, tid: int = ENGINE) -> None:
        """A gradient is added to a parameter's."""
        name = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
        self.add("cpu_op", name, start, end, tid)

    def launch(
        self,
        operation: int,
        at: float,
        start: float,
        end: float,
        tid: int = MAIN,
        name: str = "gemm",
        stream: int = 7,
        device: int = 0,
        call: str = "cudaLaunchKernel",
    ) -> None:
        """A call of the runtime of one microsecond, and what it launched."""
        self.numbers += 1
        arguments: dict[str, Any] = {"External id": operation}
        if self.correlated:
            arguments["correlation"] = self.numbers
        self.add("cuda_runtime", call, at, at + 1, tid, **arguments)
        category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        self.add(category, name, start, end, stream, device=device, stream=stream, **arguments)

    def kernel(self, start: float, end: float, correlation: int, name: str = "gemm") -> None:
        """A kernel whose launch is not in the trace."""
        self.add("kernel", name, start, end, 7, device=0, stream=7, correlation=correlation)

    def pass_(self, start: float, end: float, tid: int = MAIN) -> None:
        if self.python:
            self.add("python_function", "torch/_tensor.py(570): backward", start - 2, end + 2, tid)
            name = "<built-in method run_backward of torch._C._EngineBase object at 0x7f00>"
            self.add("python_function", name, start, end, tid)

    def annotation(self, name: str, start: float, end: float, tid: int = MAIN) -> None:
        self.add("user_annotation", name, start, end, tid, **{"External id": 0})

    def save(self, path: Path) -> Path:
        text = json.dumps({**self.about, "traceEvents": self.events})
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text, encoding="utf-8")
        return path


def two_layers(steps: int = 2, *, marked: bool = True, **how: bool) -> Made:
    """Steps of a net of two Linear layers and a loss of a function, data parallel. In microseconds of each step:

    The device works 100-160 (forward: 40 of Linear_0, 20 of Linear_1), 230-240 (the loss), 400-470 (Linear_1
    backward), 470-550 (Linear_0 backward), 560-570 (gradients added to ``.grad``), 460-600 (the collective: 500 alone
    from 550 to 560 and from 570 to 600) and 790-800 (optimizer).
    """
    made = Made(**how)
    for step in range(steps):
        at, number = step * STEP_US, 10 * step + 5
        if marked:
            made.annotation(f"ProfilerStep#{4 + step}", at, at + STEP_US)
        made.call("Net_0", at + 10, at + 200)
        made.call("Linear_0", at + 20, at + 80)
        op = made.op("aten::linear", at + 30, at + 70, number, dims=[[8, 64], [64, 64]])
        made.launch(op, at + 40, at + 100, at + 140)
        made.call("Linear_1", at + 90, at + 150)
        op = made.op("aten::linear", at + 100, at + 130, number + 1, dims=[[8, 64], [64, 64]])
        made.launch(op, at + 110, at + 140, at + 160)
        op = made.op("aten::mse_loss", at + 210, at + 230, number + 2)
        made.launch(op, at + 220, at + 230, at + 240)
        made.pass_(at + 300, at + 700)
        made.node("MseLossBackward0", at + 310, at + 330, number + 2, (MAIN, at + 210))
        op = made.node("AddmmBackward0", at + 340, at + 400, number + 1, (MAIN, at + 100))
        made.launch(op, at + 350, at + 400, at + 470, ENGINE)
        op = made.node("AddmmBackward0", at + 410, at + 450, number, (MAIN, at + 30))
        made.launch(op, at + 420, at + 470, at + 550, ENGINE)
        accumulate = "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"
        made.add("cpu_op", accumulate, at + 451, at + 461, ENGINE)
        op = made.op("aten::add_", at + 452, at + 455, tid=ENGINE)
        made.launch(op, at + 453, at + 560, at + 570, ENGINE, name="add")
        made.annotation("nccl:all_reduce", at + 456, at + 460, ENGINE)
        made.launch(0, at + 457, at + 460, at + 600, ENGINE, name="ncclDevKernel_AllReduce", stream=9)
        made.annotation("Optimizer.step#SGD.step", at + 750, at + 800)
        op = made.op("aten::_foreach_add_", at + 760, at + 780)
        made.launch(op, at + 770, at + 790, at + 800, name="add")
    return made
