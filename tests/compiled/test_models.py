"""Compiled models: what runs in Inductor's kernels by layer, beside what the same model does without torch.compile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from torch.torch_version import __version__ as torch_version

from gradscope.ops import ATEN_MATMULS, ZEROS_OF_UNUSED
from gradscope.report.runfile import load_run
from gradscope.report.view import build_view
from gradscope.tables import RunData

from .models import ATTENDING, BESIDE, CASES, HELD, SUMS

SCRIPT = Path(__file__).with_name("models.py")
OWN = {
    "eager",
    "autograd",
    "custom",
    "untold",
    "begun",
    "evaluated",
    "more",
    "scored",
    *SUMS,
    *HELD,
    *ATTENDING,
    *BESIDE,
}  # which have tests of their own
COMPILED = [case for case in CASES if case not in OWN]


def environment() -> dict[str, str]:
    """No pool of processes that compile: there is one kernel at a time, and nothing is left behind."""
    return {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunData]:
    folder = tmp_path_factory.mktemp("compiled")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.compiled.models", folder, *CASES],
        env=environment(),
        cwd=SCRIPT.parents[2],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    return {case: load_run(folder / f"{case}.json") for case in CASES}


def backward(run: RunData) -> dict[str, int]:
    return {row.path: row.backward_self_ns + row.recompute_ns for row in run.layers}


@pytest.mark.parametrize("case", COMPILED)
def test_every_layer_that_computes_has_time(case: str, runs: dict[str, RunData]) -> None:
    """And what no layer has is what Python does around the kernels: of such small ones 10 % at most.

    A function that is compiled runs in no module's call: its own Python is no layer's.
    """
    run = runs[case]
    found = backward(run)
    for path in ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head", "embed", "blocks.0.norm"):
        assert found.get(path), (path, found)
    assert not any("other kernels than they were compiled to" in note for note in run.notes)
    outside = run.ledger.outside_modules_ns + run.ledger.unattributed_ns
    assert case in {"function", "unnamed"} or outside <= 0.1 * run.ledger.backward_ns


@pytest.mark.parametrize("case", COMPILED)
def test_floating_point_operations_are_those_of_the_layers_that_are_not_compiled(
    case: str, runs: dict[str, RunData]
) -> None:
    """They do not depend on who computes them; but for what runs between the graphs of one function."""
    flops, found = (
        {row.path: (row.forward_flops, row.backward_flops) for row in runs[name].layers} for name in ("eager", case)
    )
    if case == "broken":  # in a loop: torch compiles the blocks alone, and runs the model's own forward as it is
        assert found["head"] == (None, None)
        del flops["head"], found["head"]
        assert any("what runs between the graphs has no source lines and no FLOPs" in note for note in runs[case].notes)
    else:
        assert not any("FLOPs" in note for note in runs[case].notes)
    assert found == flops


@pytest.mark.parametrize("case", COMPILED)
def test_what_is_fused_is_an_estimate_and_no_more_than_the_layer(case: str, runs: dict[str, RunData]) -> None:
    rows = {row.path: row for row in runs[case].layers}
    assert rows["blocks.0.norm"].estimated_ns or rows["blocks.0.norm"].forward_estimated_ns
    for row in rows.values():
        assert (row.estimated_ns or 0) <= row.backward_self_ns + row.recompute_ns + row.gradient_sum_ns
        assert (row.forward_estimated_ns or 0) <= row.forward_self_ns


@pytest.mark.parametrize("case", ["whole", "dynamic", "function", "unnamed", "optimizer", "regional"])
def test_lines_are_those_of_the_graphs(case: str, runs: dict[str, RunData]) -> None:
    """Of the backward pass at least 98 % has one, but for what Python does around kernels: the graph's own rows."""
    run = runs[case]
    with_line = sum(row.backward_ns for row in run.lines)
    python = ("(python)", "(engine)", "CompiledFunctionBackward")
    phases = ("backward", "recompute", "engine", "accumulate")
    around = sum(op.self_ns for op in run.ops if op.phase in phases and (op.name in python or op.phase == "accumulate"))
    assert with_line >= 0.98 * (run.ledger.backward_ns - around)
    texts = "\n".join(row.text for row in run.lines)
    assert "self.down(F.gelu(self.up(self.norm(x))))" in texts and "self.embed(tokens)" in texts
    assert "def forward" not in texts  # where Python calls a graph


@pytest.mark.parametrize("case", ["regional", "broken"])
def test_blocks_that_were_compiled_apart_have_what_they_compute(case: str, runs: dict[str, RunData]) -> None:
    """What the second block computes is not the first one's, which would leave nothing of it."""
    found, eager = ({row.path: row for row in runs[name].layers} for name in (case, "eager"))
    for path in ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"):
        one, other = found[path], eager[path]
        assert one.backward_self_ns > 0, path  # by how much they differ other processes on the machine decide
        assert (one.flops, one.saved_bytes) == (other.flops, other.saved_bytes), path


@pytest.mark.parametrize(
    "case", [case for case in CASES if case not in {"more", "scored", "evaluated", *SUMS, *HELD, *ATTENDING, *BESIDE}]
)
def test_modules_that_run_outside_of_graphs_are_called_as_ever(case: str, runs: dict[str, RunData]) -> None:
    """Below torch.compile Dynamo looks at every frame, gradscope's hooks among them."""
    calls = {row.path: row.calls for row in runs[case].layers if row.calls}
    every = {"": 1, "embed": 1, "blocks.0": 1, "blocks.1": 1, "head": 1}
    inside = {f"blocks.{block}.{name}": 1 for block in (0, 1) for name in ("norm", "up", "down")}
    assert (
        calls
        == {
            "eager": every | inside,
            "whole": {"": 1},
            "elsewhere": {"": 1},
            "dynamic": {"": 1},
            "function": {},
            "unnamed": {},
            "autograd": {},
            "untold": {"": 1},
            "begun": {"": 1},
            "optimizer": {"": 1},
            "custom": {"": 1},
            "regional": every,
            "broken": every,
        }[case]
    )


def test_a_compiled_step_of_an_optimizer_is_the_optimizers(runs: dict[str, RunData]) -> None:
    kernels = [op for op in runs["optimizer"].ops if op.name.startswith("cpp_") and op.layer is None]
    assert kernels and {op.phase for op in kernels} == {"optimizer"}


def test_the_backward_of_a_custom_function_is_no_recompute_and_its_modules(runs: dict[str, RunData]) -> None:
    rows = {row.path: row for row in runs["custom"].layers}
    for block in (0, 1):
        assert rows[f"blocks.{block}.norm"].backward_self_ns > 0


def test_zeros_for_the_gradient_of_an_unused_output_are_of_what_returns_it(runs: dict[str, RunData]) -> None:
    run = runs["scored"]
    zeros = [row for row in run.ops if row.name == ZEROS_OF_UNUSED]
    # The mean is computed in the model itself.
    assert {(row.layer, row.phase) for row in zeros} == {("head", "backward"), ("", "backward")}
    assert all(row.self_ns for row in zeros)
    assert not any(row.name == "aten::zeros" and row.phase == "backward" for row in run.ops)
    assert all(row.name != ZEROS_OF_UNUSED for row in runs["whole"].ops)


def test_compiled_autograd_has_the_layers_of_the_graphs_that_it_copies(runs: dict[str, RunData]) -> None:
    """Torch tells nothing of them: they are found by their order."""
    run, whole = runs["autograd"], runs["whole"]
    assert any(note.startswith("compiled autograd makes one graph of each backward pass") for note in run.notes)
    found, without = backward(run), backward(whole)
    assert {path for path, ns in found.items() if ns} == {path for path, ns in without.items() if ns}
    products = matmuls(run), matmuls(whole)
    assert products[0] == products[1]
    # What a pass recomputes is what the same graph recomputes without: nothing is taken for it.
    assert {row.path for row in run.layers if row.recompute_ns} <= {
        row.path for row in whole.layers if row.recompute_ns
    }
    forward = {row.path: row.forward_self_ns for row in run.layers}
    assert forward["blocks.0.up"] and forward["head"]


def matmuls(run: RunData) -> Counter[str | None]:
    """How many matmuls of backward each layer has per step."""
    found = Counter[str | None]()
    for row in run.ops:
        if row.phase == "backward" and row.name in ATEN_MATMULS:
            found[row.layer] += round(row.calls)
    return found


def test_memory_inside_graphs_is_of_the_layers_that_save_and_allocate_it(runs: dict[str, RunData]) -> None:
    """A Linear saves its input, and GELU its own, as without torch.compile: to the byte."""
    eager, compiled = ({row.path: row for row in runs[case].layers} for case in ("eager", "whole"))
    for block in (0, 1):
        for name in ("up", "down"):
            path = f"blocks.{block}.{name}"
            assert compiled[path].saved_bytes == eager[path].saved_bytes, path
            assert compiled[path].allocated_bytes, path
    memory = runs["whole"].memory
    assert memory is not None
    assert sum(row.saved_bytes or 0 for row in runs["whole"].layers) == memory.saved_bytes
    assert sum(entry.bytes for entry in memory.saved if entry.line and "models.py" in entry.line) >= (
        0.9 * memory.saved_bytes
    )


def test_where_torch_does_not_tell_what_a_graph_is_made_of_it_is_the_models_and_the_report_says_so(
    runs: dict[str, RunData],
) -> None:
    run = runs["untold"]
    assert any("reading compiled graphs" in note and "this torch has no such name" in note for note in run.notes)
    rows = {row.path: row for row in run.layers}
    assert rows[""].backward_self_ns >= 0.5 * run.ledger.backward_ns
    assert not rows["blocks.0.up"].backward_self_ns and rows[""].estimated_ns is None


def test_of_a_forward_pass_that_was_compiled_before_flops_are_not_known(runs: dict[str, RunData]) -> None:
    """Those of backward, which is compiled while it is measured, are."""
    eager, found = ({row.path: row for row in runs[case].layers} for case in ("eager", "begun"))
    for path in ("blocks.0.up", "blocks.1.down", "head"):
        assert (found[path].forward_flops, found[path].backward_flops) == (None, eager[path].backward_flops), path
    assert any("compiled before the measurement began" in note for note in runs["begun"].notes)
    assert not any("compiled before the measurement began" in note for note in runs["whole"].notes)


def test_of_a_layer_that_runs_uncompiled_too_where_nobody_counts_flops_are_not_known(runs: dict[str, RunData]) -> None:
    """Nor of what holds it, in the tables; and a note says so."""
    run = runs["evaluated"]
    rows = {row.path: row for row in run.layers}
    assert [rows[path].flops for path in ("blocks.0.up", "blocks.1.down", "head")] == [None] * 3
    assert any(note.startswith("FLOPs of 5 layers are not told") for note in run.notes)
    assert not any("FLOPs" in note for note in runs["whole"].notes)
    tree = build_view(run).tree
    assert [row.node.total.flops for row in tree.rows if row.node.paths[0] in {"", "blocks.0"}] == [None] * 2


def test_a_break_of_the_graph_is_told_with_its_line(runs: dict[str, RunData]) -> None:
    (finding,) = (each for each in runs["broken"].findings if each.rule == "graph-break")
    file, _, line = (finding.line or "").rpartition(":")
    assert Path(file).name == SCRIPT.name
    assert "graph_break()" in SCRIPT.read_text().splitlines()[int(line) - 1]
    assert finding.evidence.endswith("each by itself, but for torch's own")  # it is in a loop
    assert not any(each.rule in {"graph-break", "recompiles"} for each in runs["whole"].findings)


def test_what_computes_with_parameters_of_others_is_its_own(runs: dict[str, RunData]) -> None:
    eager, found = ({row.path: row for row in runs[name].layers} for name in ("eager held", "held"))
    for path in ("", "first", "normed"):
        one, other = eager[path], found[path]
        assert one.backward_flops and other.backward_self_ns > 0, path
        assert (other.forward_flops, other.backward_flops) == (one.forward_flops, one.backward_flops), path
    assert found["first"].saved_bytes == eager["first"].saved_bytes > 0
    assert not any(found[path].flops or found[path].saved_bytes for path in ("list", "never"))


def test_checkpointed_attention_is_the_blocks_that_it_is_in(runs: dict[str, RunData]) -> None:
    """Torch puts an operation with the state of its random numbers around it, of which it tells nothing."""
    eager, found = ({row.path: row for row in runs[name].layers} for name in ("eager attention", "attention"))
    for path in ("blocks.0", "blocks.1"):
        one, other = eager[path], found[path]
        assert one.forward_flops and one.backward_flops, path
        assert (other.forward_flops, other.backward_flops) == (one.forward_flops, one.backward_flops), path
    attention = [row for row in runs["attention"].ops if row.name.endswith("flash_attention_for_cpu")]
    phases = [("blocks.0", "forward"), ("blocks.0", "recompute"), ("blocks.1", "forward"), ("blocks.1", "recompute")]
    assert sorted((row.layer, row.phase) for row in attention) == phases
    assert all(row.self_ns and row.calls == 1 for row in attention)
    lines = {row.text for row in runs["attention"].lines if row.forward_ns}
    assert any("scaled_dot_product_attention" in text for text in lines)


def test_what_inductor_computes_another_way_is_where_it_was_written(runs: dict[str, RunData]) -> None:
    """Of attention by hand, which it knows, torch tells nothing of what it puts in its place."""
    eager, found = ({row.path: row for row in runs[name].layers} for name in ("eager attention", "attention"))
    one, other = eager["hand"], found["hand"]
    assert one.forward_flops and one.backward_flops
    assert (other.forward_flops, other.backward_flops) == (one.forward_flops, one.backward_flops)
    products = {row.layer for row in runs["attention"].ops if row.name == "aten::bmm"}
    assert products == {"hand"}
    for path in ("hand.softmax", "hand.drop"):
        assert found[path].forward_self_ns and found[path].backward_self_ns, path
    lines = {row.text for row in runs["attention"].lines if row.backward_ns}
    assert any("matmul(weights, v)" in text for text in lines) and any("k.transpose(-1, -2)" in text for text in lines)


@pytest.mark.parametrize("case", ["beside", "nothing"])
def test_what_runs_beside_a_graph_has_its_lines_and_operations(case: str, runs: dict[str, RunData]) -> None:
    """Torch's own modules, also where Dynamo leaves them alone, as it does a checkpoint in every program."""
    eager, run = runs["eager beside"], runs[case]
    if any("saw Inductor compile nothing" in note for note in run.notes):
        pytest.skip("this torch tries to compile a layer of its own, and gradscope cannot tell that it did not")
    expected_flops, found_flops = (
        {row.path: (row.forward_flops, row.backward_flops) for row in each.layers} for each in (eager, run)
    )
    if case == "nothing":  # before torch 2.14 it is entered as a compiled one
        assert found_flops["again.0"] == ((None, None) if torch_version < (2, 14) else expected_flops["again.0"])
        del expected_flops["again.0"], found_flops["again.0"]
    assert found_flops == expected_flops
    expected, found = ({row.text for row in each.lines if row.backward_ns} for each in (eager, run))
    assert {"x = self.rest(self.product(x))", "x = checkpoint(self.again, x, use_reentrant=False)"} <= expected
    assert {text for text in expected if "Block" not in text} <= found
    untold = case == "nothing" and torch_version < (2, 14)
    said = ["inside of layers of torch's own of whic", "FLOPs of 1 layer are not told, nor of w"]
    assert [note[:39] for note in run.notes if "FLOPs" in note] == said * untold


@pytest.mark.parametrize("case", ["sum", "sharing", "replaced"])
def test_matmuls_that_are_joined_shared_or_replaced_are_their_modules(case: str, runs: dict[str, RunData]) -> None:
    """FLOPs and saved bytes are those of the eager run, layer by layer."""
    eager, found = ({row.path: row for row in runs[name].layers} for name in ("eager sum", case))
    paths = [path for path, row in eager.items() if row.flops]
    assert {"query", "key", "blocks.0.own", "blocks.0.shared", "blocks.2.own", "head"} <= set(paths)
    if case == "sharing":  # the blocks alone are compiled
        paths = [path for path in paths if path.startswith("blocks")]
    for path in paths:
        one, other = eager[path], found[path]
        assert (other.forward_flops, other.backward_flops) == (one.forward_flops, one.backward_flops), path
        if path.endswith("own"):
            assert other.saved_bytes == one.saved_bytes, path


def test_of_other_sizes_than_those_of_the_first_call_flops_are_those_of_the_run(runs: dict[str, RunData]) -> None:
    flops = [
        {row.path: (row.forward_flops, row.backward_flops) for row in runs[case].layers} for case in ("more", "eager")
    ]
    assert flops[0] == flops[1] and any(forward for forward, _ in flops[0].values())
    assert not any("FLOPs" in note for note in runs["more"].notes)
    assert all(backward(runs["more"])[path] for path in ("blocks.0.up", "blocks.1.down", "head"))


def test_what_a_layer_saves_and_allocates_is_counted_once(runs: dict[str, RunData]) -> None:
    """Of what several read, the first in forward; of allocations, the kernel that follows."""
    eager, whole = ({row.path: row for row in runs[case].layers} for case in ("eager", "whole"))
    assert whole["embed"].saved_bytes == eager["embed"].saved_bytes
    tokens, width = 8 * 32, 32
    for block in (0, 1):
        expected = 4 * (tokens * 4 * width + tokens * width + 4 * width * width)
        assert whole[f"blocks.{block}.up"].allocated_bytes == expected


# A function that no graph may be broken in, called by the loop of a model that is not compiled; and an optimizer of the
# user's whose step is compiled so.
PROGRAM = """
import torch
from torch import nn

class Lion(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, dict(lr=1e-3))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for each in group["params"]:
                each.add_(torch.sign(each.grad), alpha=-group["lr"])

@torch.compile(fullgraph=True)
@torch.no_grad()
def average(averages, parameters):
    torch._foreach_lerp_(averages, parameters, 0.01)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
averages = [each.detach().clone() for each in model.parameters()]
optimizer = Lion(model.parameters())
step = torch.compile(lambda: optimizer.step(), fullgraph=True)
for number in range(26):
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    step()
    average(averages, [each.detach() for each in model.parameters()])
    optimizer.zero_grad()
    print("loss", number, loss.item())
print("graphs broken:", len(torch._dynamo.graph_break_reasons))
"""


def test_graphs_that_may_not_be_broken_are_not(tmp_path: Path) -> None:
    """The steps are found though the optimizer's hooks run in no graph; and it prints what it prints alone."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)

    def run(*command: str) -> str:
        ran = subprocess.run(
            [sys.executable, *command, str(script)],
            env=environment(),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert ran.returncode == 0, ran.stderr[-4000:]
        return ran.stdout

    def printed(text: str) -> list[str]:
        return [line for line in text.splitlines() if line.startswith(("loss", "graphs broken"))]

    found = run("-m", "gradscope", "profile", "--run-to-end", "--json", "run.json")
    assert printed(found) == printed(run())
    profiled = load_run(tmp_path / "run.json")
    work = profiled.workload
    assert work.steps + work.steps_left_out >= 5  # other processes may have interrupted some
    assert {row.path for row in profiled.layers if row.backward_self_ns} == {"0", "1", "2"}
