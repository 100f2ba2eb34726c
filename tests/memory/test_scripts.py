"""Truth in script mode: saved tensors, the peak and its owners in an unedited training script."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gradscope.pipeline import profile_script
from gradscope.tables import Options, RunData
from gradscope.workload import Script, load_target

from .measuring import F32, Kept, assert_saved, at_peak, bytes_of_all_tensors, check_sums, memory_of, place
from .test_independent import total_allocated

ROWS, IN, HIDDEN, OUT = 64, 32, 128, 8
SCRIPT = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 8))
optimizer = torch.optim.Adam(model.parameters())
for step in range({steps}):
    x = torch.randn(64, 32)
    optimizer.zero_grad()
    loss = model(x).square().mean()  # line 10
    loss.backward()
    optimizer.step()
"""

STEM, TAIL = (IN * HIDDEN + HIDDEN) * F32, (HIDDEN * OUT + OUT) * F32
INPUT, WIDE, OUTPUT = ROWS * IN * F32, ROWS * HIDDEN * F32, ROWS * OUT * F32


def run(folder: Path, *, memory: bool = True) -> tuple[RunData, int]:
    """The report, and how many steps the script had made when it was stopped."""
    path = folder / "train.py"
    path.write_text(SCRIPT.format(steps=100))
    script = load_target(str(path))
    assert isinstance(script, Script)
    outcome = profile_script(script, Options(steps=1, warmup=1, memory=memory))
    assert outcome.error is None and outcome.report is not None
    data = outcome.report.data
    assert not data.partial
    return data, script.namespace["step"] + 1


def test_what_the_layers_of_a_script_save(tmp_path: Path) -> None:
    data, _ = run(tmp_path)
    check_sums(data)
    assert_saved(
        data,
        Kept("0", "AddmmBackward0", "mat1", "64x32", "float32", INPUT),
        Kept("1", "ReluBackward0", "output", "64x128", "float32", WIDE),
        Kept(None, "PowBackward0", "self", "64x8", "float32", OUTPUT),
    )
    assert {place(row.line) for row in memory_of(data).saved} == {"train.py:10"}


def test_the_peak_of_a_script(tmp_path: Path) -> None:
    """In ReLU's node. The output died with the node of the square; a script's batch is what its model is given."""
    data, _ = run(tmp_path)
    assert at_peak(data) == {
        ("0", "parameters"): STEM,
        ("2", "parameters"): TAIL,
        ("0", "optimizer state"): 2 * STEM + 2 * F32,
        ("2", "optimizer state"): 2 * TAIL + 2 * F32,
        ("2", "gradients"): TAIL,
        (None, "inputs"): INPUT,
        ("1", "saved activations"): WIDE,
        ("2", "activation gradients"): WIDE,
        ("1", "activation gradients"): WIDE,
        (None, "other activations"): F32 + F32,  # the loss, and the 1 that backward starts from
    }
    memory = memory_of(data)
    assert (memory.peak_phase, memory.peak_layer, memory.peak_op) == ("backward", "1", "ReluBackward0")
    # The optimizer comes first with what is left of its step where the last one ended, and with zero_grad.
    phases = [span.phase for span in memory.phases if span.phase != "other"]
    assert phases == ["optimizer", "forward", "backward", "optimizer"]


def test_the_peak_of_a_script_agrees_with_torchs_profiler(tmp_path: Path) -> None:
    """Run as often, from its first line on: no step needs more than the last."""
    foreign = bytes_of_all_tensors()
    data, steps = run(tmp_path)

    def plain() -> Callable[[], object]:
        code = compile(SCRIPT.format(steps=steps), "train.py", "exec")
        return lambda: exec(code, {"__name__": "__main__"})

    assert memory_of(data).peak_bytes - foreign == total_allocated(plain, 1)


def test_without_memory_a_script_is_stopped_two_steps_earlier(tmp_path: Path) -> None:
    data, steps = run(tmp_path)
    without, fewer = run(tmp_path, memory=False)
    assert data.memory is not None and without.memory is None
    assert steps - fewer == 2
    assert all(row.saved_bytes is None and row.allocations is None for row in without.layers)
