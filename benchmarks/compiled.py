"""How much of a compiled backward pass has a layer and a line, and do matmuls take the shares that they take in eager?

Each TARGET is ``file.py:factory``, as for ``gradscope profile``: a function that returns a model and its batch. It is
profiled as it is and under torch.compile; where the factory compiles parts itself, these stay, and the eager run is one
with ``torch.compiler.set_stance("force_eager")``. benchmarks/compiled_models.py has some. Of a training script give its
two runs, as ``gradscope profile`` has saved them, in place of targets:

    python benchmarks/compiled.py --runs eager.json compiled.json

Figures, of the compiled backward pass without what Python and the engine do around the graphs:

- matched: of the time of graphs that ran, that of graphs whose kernels are those that they were compiled to;
- with a layer: in a module, the model's own forward among them; with a line;
- estimated: in kernels that compute several layers, split by bytes;
- matmuls off: the largest difference between a layer's share of all matmul time, compiled and eager, over the layers
  with at least 2 % of it.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from _common import ROOT, Result, finish, parser, print_table

import gradscope
from gradscope.ops import ATEN_CONVOLUTIONS, ATEN_MATMULS
from gradscope.report.runfile import load_run
from gradscope.tables import RunData
from gradscope.workload import load_target

_AROUND = ("(python)", "(engine)", "(gradscope)", "CompiledFunctionBackward", "AccumulateGrad")
_PHASES = ("backward", "recompute", "gradient_sum", "unattributed")
_LEAST = 0.02


def main() -> int:
    options = parser(__doc__)
    options.add_argument("targets", nargs="*", default=[str(ROOT / "examples" / "gpt.py")])
    options.add_argument("--steps", type=int, default=5)
    options.add_argument("--runs", nargs=2, metavar=("EAGER", "COMPILED"), help="of a script, in place of targets")
    arguments = options.parse_args()
    results: list[Result] = []
    if arguments.runs:
        eager, compiled = map(load_run, arguments.runs)
        results = compared(Path(arguments.runs[1]).stem, eager, compiled)
        print_table(arguments.runs[1], results)
        return finish("compiled", results, arguments.device, arguments.json)
    for target in arguments.targets:
        results += figures(target, arguments.steps, arguments.device)
        print_table(target, results[-6:])
    return finish("compiled", results, arguments.device, arguments.json)


def figures(target: str, steps: int, device: str) -> list[Result]:
    """The figures of one model."""
    eager = profiled(target, steps, device, compiled=False)
    torch._dynamo.reset()
    compiled = profiled(target, steps, device, compiled=True)
    name = Path(target.partition(":")[0]).stem + (f":{target.partition(':')[2]}" if ":" in target else "")
    return compared(name, eager, compiled)


def compared(name: str, eager: RunData, compiled: RunData) -> list[Result]:
    """The figures of two runs."""
    spent = sum(op.self_ns for op in compiled.ops if _counts(op))
    owned = sum(op.self_ns for op in compiled.ops if _counts(op) and op.layer is not None)
    lines = sum(row.backward_ns for row in compiled.lines)
    estimated = sum(row.estimated_ns or 0 for row in compiled.layers)
    unmatched = any("ran other kernels" in note for note in compiled.notes)
    return [
        Result(f"{name}: graphs matched", 0.0 if unmatched else 100.0, "%", goal=98.0, higher=True),
        Result(f"{name}: with a layer", 100.0 * owned / max(spent, 1), "%", goal=95.0, higher=True),
        Result(f"{name}: with a line", 100.0 * min(lines / max(spent, 1), 1.0), "%", goal=98.0, higher=True),
        Result(f"{name}: estimated", 100.0 * estimated / max(spent, 1), "%"),
        Result(f"{name}: matmuls off", 100.0 * matmul_difference(eager, compiled), "points", goal=5.0),
        Result(f"{name}: eager over compiled", eager.step.backward_ns / max(compiled.step.backward_ns, 1), "x"),
    ]


def profiled(target: str, steps: int, device: str, *, compiled: bool) -> RunData:
    """A run of the model."""
    workload: Any = load_target(target)
    model = workload.model
    parts = any(module._compiled_call_impl is not None for module in model.modules())
    stance = nullcontext() if compiled or not parts else torch.compiler.set_stance("force_eager")
    with stance:
        run = torch.compile(model) if compiled and not parts else model
        return gradscope.profile(run, workload.batch, workload.loss, steps=steps, memory=False, device=device).data


def _counts(op: Any) -> bool:
    return op.phase in _PHASES and op.name not in _AROUND


def matmul_difference(eager: RunData, compiled: RunData) -> float:
    """The largest difference of a layer's share."""
    first, second = matmul_shares(eager), matmul_shares(compiled)
    layers = [layer for layer in first if max(first[layer], second.get(layer, 0.0)) >= _LEAST]
    return max((abs(first[layer] - second.get(layer, 0.0)) for layer in layers), default=0.0)


def matmul_shares(run: RunData) -> dict[str | None, float]:
    """Of each layer what its matmuls and convolutions take of all of them, in backward; on a device their kernels."""
    names = ATEN_MATMULS | ATEN_CONVOLUTIONS | {"aten::convolution_backward", "aten::_convolution_backward"}
    spent: dict[str | None, int] = {}
    took = [(each.layer, each.phase, each.op, each.device_ns) for each in run.kernels] or [
        (each.layer, each.phase, each.name, each.self_ns) for each in run.ops
    ]
    for layer, phase, name, ns in took:
        if phase == "backward" and name in names:
            spent[layer] = spent.get(layer, 0) + ns
    whole = sum(spent.values())
    return {layer: ns / whole for layer, ns in spent.items()} if whole else {}


if __name__ == "__main__":
    sys.exit(main())
