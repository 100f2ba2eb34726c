"""The real program on real files: what is on stdout, what on stderr, what is written, how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gradscope.report import load
from tests.cli_fixtures import Runner, frames_of_ours, run_fixture  # noqa: F401 (a fixture is used by its name)

PROGRAM = [sys.executable, "-m", "gradscope"]
FAST = ["--steps", "2", "--warmup", "1"]
HANGS = 600  # seconds after which a program has hung: how fast it is decides nothing here

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))

def workload():
    return Net(), torch.randn(8, 16)

def ends():
    return Net(), iter([torch.randn(8, 16)] * 3)

def no_gradient():
    return Net(), torch.randn(8, 16), lambda output, batch: output.detach().sum()

def not_scalar():
    return Net(), torch.randn(8, 16), lambda output, batch: output

def out_of_memory():
    def loss(output, batch):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
    return Net(), torch.randn(8, 16), loss

def compiled():
    return torch.compile(Net()), torch.randn(8, 16)

def raises():
    net = Net()
    net.second = nn.Linear(17, 4)
    return net, torch.randn(8, 16)
"""

SCRIPT = """
import os
import re, subprocess, sys, time
import torch
from model import Net

if __name__ == "__main__":
    assert sys.argv[0] == "train.py", sys.argv
    assert sys.path[0] == os.path.dirname(os.path.abspath(__file__)), sys.path
    print("training with", *sys.argv[1:])
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(40):
        optimizer.zero_grad()
        net(torch.randn(8, 16)).sum().backward()
        optimizer.step()
        if step == 14 and "fail" in sys.argv:
            raise ValueError("boom")
        if step == 14 and "leave" in sys.argv:
            sys.exit(7)
        if step == 14 and "wait" in sys.argv:
            print("waiting", flush=True)
            time.sleep(60)
    print("trained to the end")
"""

LOUD = """
import atexit, os, subprocess, sys, threading
import torch

atexit.register(print, "from an exit handler")
print("from print")
sys.__stdout__.write("from the original stdout\\n")
os.write(1, b"from descriptor 1\\n")
subprocess.run([sys.executable, "-c", "print('from a subprocess')"], check=True)
threading.Thread(target=print, args=("from a thread",)).start()
net = torch.nn.Linear(4, 4)
for step in range(40):
    net(torch.randn(8, 4)).sum().backward()
"""
SOURCES = [
    "print", "the original stdout", "descriptor 1", "a subprocess", "a thread", "an exit handler",
]  # fmt: skip


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in a folder with a model file and two scripts."""
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("train.py").write_text(SCRIPT)
    Path("loud.py").write_text(LOUD)
    # No GPU, so that every machine gives the same answers; no colours or widths of the developer's own terminal.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    yield tmp_path
    sys.modules.pop("model", None)


def gradscope(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *arguments], capture_output=True, text=True, timeout=HANGS)


def test_model_file() -> None:
    ran = gradscope("profile", "model.py", *FAST, "--seed", "1")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("gradscope ")
    assert "model.py" in ran.stdout
    assert "\x1b" not in ran.stdout
    assert all(line.startswith("gradscope: ") for line in ran.stderr.splitlines()), ran.stderr
    assert ran.stderr.endswith("gradscope: wrote gradscope-model.json\ngradscope: wrote gradscope-model.html\n")
    run = load("gradscope-model.json").data  # checks that the numbers add up
    assert not run.partial
    assert (run.workload.mode, run.workload.steps, run.workload.loss) == ("model", 2, "mean of outputs")
    assert {"", "first", "second"} <= {row.path for row in run.layers}
    assert [path.name for path in Path.cwd().glob("*.json")] == ["gradscope-model.json"]


def test_script_is_stopped_once_measured() -> None:
    ran = gradscope("profile", "train.py", *FAST, "--quiet", "--", "--batch-size", "8")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("training with --batch-size 8\ngradscope ")
    assert "trained to the end" not in ran.stdout
    run = load("gradscope-train.json").data
    assert run.workload.mode == "script"
    # Named by the script's variable.
    assert any("net" in row.path or row.class_name == "Net" for row in run.layers)


def test_script_may_go_on() -> None:
    ran = gradscope("profile", "train.py", *FAST, "-q", "--run-to-end", "-o", "whole")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("training with\ntrained to the end\ngradscope ")
    assert not load("whole.json").data.partial


def test_out_of_memory_names_what_helps() -> None:
    ran = gradscope("profile", "model.py:out_of_memory", *FAST, "-q")
    assert ran.returncode == 1
    assert (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB.\n"
        "gradscope: out of memory: use a smaller batch; 'gradscope fit TARGET' predicts which batch sizes fit\n"
    ) in ran.stderr


@pytest.mark.parametrize("command", ["profile", "fix"])
def test_without_a_compiler_a_line_says_what_to_install(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    ran = gradscope(command, "model.py:compiled", *(FAST if command == "profile" else ()), "-q")
    assert ran.returncode == 1
    (line,) = [line for line in ran.stderr.splitlines() if line.startswith("gradscope: torch.compile found no")]
    assert "apt install g++" in line and "CXX" in line


def test_memory_can_be_left_out() -> None:
    ran = gradscope("profile", "model.py", *FAST, "-q", "--no-memory")
    assert (ran.returncode, ran.stderr) == (0, "")
    run = load("gradscope-model.json").data
    assert run.memory is None
    assert not run.partial
    assert all(row.saved_bytes is None and row.allocations is None for row in run.layers)
    assert "\nMemory  " not in ran.stdout


def test_module() -> None:
    Path("pkg").mkdir()
    Path("pkg/__init__.py").touch()
    Path("pkg/net.py").write_text("from torch.nn import Linear as Net\n")
    Path("pkg/fit.py").write_text(
        "import sys\nimport torch\nfrom .net import Net\nprint(__name__, __package__, sys.argv[1:])\n"
        "net = Net(4, 4)\nfor step in range(40):\n    net(torch.randn(8, 4)).sum().backward()\n"
    )
    ran = gradscope("profile", "-m", "pkg.fit", *FAST, "-q", "--", "-x")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("__main__ pkg ['-x']\ngradscope ")
    assert Path("gradscope-fit.json").exists()


def test_json_on_stdout_is_pure() -> None:
    ran = gradscope("profile", "loud.py", *FAST, "--json", "-")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["workload"]["target"] == "loud.py"
    for source in SOURCES:
        assert f"from {source}\n" in ran.stderr
    assert not list(Path.cwd().glob("*.json"))


def test_stdout_stays_the_scripts_own() -> None:
    ran = gradscope("profile", "loud.py", *FAST, "-q")
    assert (ran.returncode, ran.stderr) == (0, "")
    before, _, after = ran.stdout.partition("gradscope ")
    for source in SOURCES[:-1]:
        assert f"from {source}\n" in before
    assert after.endswith("from an exit handler\n")


def test_failing_script() -> None:
    alone = subprocess.run([sys.executable, "train.py", "fail"], capture_output=True, text=True)
    ran = gradscope("profile", "train.py", "--steps", "30", "--warmup", "1", "-q", "--", "fail")
    assert ran.returncode == alone.returncode == 1
    assert ran.stderr == alone.stderr  # the same traceback, to the letter
    assert load("gradscope-train.json").data.partial
    assert "gradscope " in ran.stdout


EARLY = """
import torch
class Local(torch.nn.Linear):
    pass
def main():
    model = Local(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(7):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
main()
"""


def test_a_model_that_is_gone_when_the_run_ends_early_is_named() -> None:
    Path("early.py").write_text(EARLY, encoding="utf-8")
    ran = gradscope("profile", "early.py", "--steps", "3", "--warmup", "1", "-q", "--no-html")
    assert ran.returncode == 0, ran.stderr
    data = load("gradscope-early.json").data
    assert data.partial and data.workload.model == "Local"


def test_script_that_leaves() -> None:
    ran = gradscope("profile", "train.py", "--steps", "30", "--warmup", "1", "-q", "--", "leave")
    assert (ran.returncode, ran.stderr) == (7, "")
    assert load("gradscope-train.json").data.partial


def test_interrupted() -> None:
    command = [*PROGRAM, "profile", "train.py", "--steps", "30", "--warmup", "1", "-q", "--", "wait"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        while process.stdout.readline() != "waiting\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=HANGS)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert re.fullmatch(
        r"gradscope: interrupted; kept: gradscope-train\.json \(\d+ measured steps\), gradscope-train\.html\n", err
    ), err
    assert out.startswith("gradscope ")
    assert load("gradscope-train.json").data.partial


def test_reader_that_leaves_early() -> None:
    process = subprocess.Popen(
        [*PROGRAM, "profile", "model.py", *FAST, "-q"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=HANGS), err) == (0, "")
    assert load("gradscope-model.json")


def test_script_that_never_calls_backward() -> None:
    Path("hello.py").write_text("print('hello')\n")
    ran = gradscope("profile", "hello.py")
    assert ran.returncode == 3
    assert ran.stdout == "hello\n"
    assert ran.stderr.endswith(
        "gradscope: error: hello.py ran to its end without a backward pass: there is nothing to measure.\n"
        "Profile a script that trains, or a file that defines workload() -> (model, batch).\n"
    )
    assert not Path("gradscope-hello.json").exists()


_CAPTURES = """import torch
from gradscope import devices
import gradscope.capture.backward as backward, gradscope.capture.training as training
w = torch.ones(3, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=0.1)
def step():
    (w * w).sum().backward()
    optimizer.step()
for _ in range({plain}):
    step()
backward.is_capturing = training.is_capturing = lambda: True
step()
"""


@pytest.mark.parametrize(
    ("plain", "said"),
    [
        (0, "captures.py ran no backward pass but into CUDA graphs: there is nothing to measure.\n"),
        (3, "and a whole report takes 20.\n"),
    ],
)
def test_script_that_trains_in_a_cuda_graph(plain: int, said: str) -> None:
    """As if, by a program that says so: a replay runs nothing that could be told."""
    Path("captures.py").write_text(_CAPTURES.format(plain=plain))
    ran = gradscope("profile", "captures.py")
    assert ran.returncode == 3
    assert ran.stderr.endswith(
        f"{said}The replay of a graph tells nothing of layers: profile the training step without torch.cuda.graph and "
        "make_graphed_callables.\n"
    )


def test_script_whose_every_backward_raises() -> None:
    Path("raises.py").write_text(
        "import torch\nw = torch.ones(3, requires_grad=True)\nfor _ in range(4):\n    y = w * w\n"
        "    w.detach().mul_(2)\n    try: y.sum().backward()\n    except RuntimeError: pass\n"
    )
    ran = gradscope("profile", "raises.py")
    assert ran.returncode == 3
    assert ran.stderr.endswith(
        "gradscope: error: raises.py ran to its end without a backward pass that returned (4 raised an error, which "
        "the script caught): there is nothing to measure.\n"
        "Profile a script that trains, or a file that defines workload() -> (model, batch).\n"
    )


@pytest.mark.parametrize("steps", [4, 19])
def test_steps_are_counted_as_the_script_counts_them(steps: int) -> None:
    """The step in which the optimizers' order is found out is one of those that a message speaks of."""
    Path("short.py").write_text(
        "import torch\nmodel = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"for _ in range({steps}):\n    model(torch.ones(2, 4)).sum().backward(); optimizer.step()\n"
    )
    ran = gradscope("profile", "short.py", "--steps", "5", "--no-html")
    said = " ".join((ran.stderr + ran.stdout).split())
    found = re.search(r"after (\d+) training|a whole report takes (\d+) steps; there were (\d+)", said)
    assert found, ran.stderr
    if steps == 4:
        assert found[1] == "4"
        needed = re.search(r"before step (\d+) .* a whole report takes (\d+)", ran.stderr)
        assert needed and int(needed[1]) <= int(needed[2])
    else:
        assert int(found[3]) == steps < int(found[2])


@pytest.mark.parametrize(
    "closes", ["sys.stdout.close()", "sys.stdout.close(); sys.stderr.close(); os.close(1); os.close(2)"]
)
def test_script_that_closes_its_streams(closes: str) -> None:
    Path("closes.py").write_text(
        "import os, sys, torch\nmodel = torch.nn.Linear(4, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"for _ in range(30):\n    model(torch.ones(2, 4)).sum().backward(); optimizer.step()\n{closes}\n"
    )
    ran = gradscope("profile", "closes.py", "--run-to-end", "--no-html")
    assert ran.returncode == 0, ran.stderr
    assert "\nLayers " in ran.stdout
    assert "gradscope: wrote gradscope-closes.json\n" in ran.stderr and "Traceback" not in ran.stderr


def test_script_whose_optimizer_never_steps() -> None:
    Path("manual.py").write_text(
        "import torch\nw = torch.zeros(3, requires_grad=True)\noptimizer = torch.optim.SGD([w], lr=0.1)\n"
        "for _ in range(20):\n    w.square().sum().backward()\n"
    )
    ran = gradscope("profile", "manual.py")
    assert ran.returncode == 3
    assert ran.stderr.endswith(
        "gradscope: error: manual.py ran backward 20 times, but no optimizer stepped, so gradscope cannot tell where "
        "training steps end. It created an optimizer, whose step() ends a training step.\n"
        "For another kind of loop: with gradscope.profiling() as prof, and prof.step() where a step ends.\n"
    )


def test_script_of_one_optimizer_step() -> None:
    Path("once.py").write_text(
        "import torch\nw = torch.zeros(3, requires_grad=True)\noptimizer = torch.optim.SGD([w], lr=0.1)\n"
        "w.square().sum().backward()\noptimizer.step()\n"
    )
    ran = gradscope("profile", "once.py")
    assert ran.returncode == 3
    assert ran.stderr.endswith(
        "gradscope: error: once.py ended before its optimizers had stepped twice, "
        "so a training step cannot be identified.\nLet it run longer.\n"
    )


def test_script_that_trains_in_processes_of_its_own() -> None:
    Path("launch.py").write_text(
        "import subprocess, sys\n"
        "subprocess.run([sys.executable, '-c', 'import time\\nwhile time.process_time() < 0.5: pass'], check=True)\n"
    )
    ran = gradscope("profile", "launch.py")
    assert ran.returncode == 3
    assert re.search(
        r"gradscope: error: launch\.py ran to its end without a backward pass: there is nothing to measure\.\n"
        r"Its child processes worked for 0\.\d s, but only the script's own process is measured\.\n"
        r"Train in that process, or profile a file that defines workload\(\) -> \(model, batch\)\.\n$",
        ran.stderr,
    )


def test_cuda_where_there_is_none(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran = run("profile", "model.py", "--device", "cuda")
    assert ran.code == 2
    assert ran.err == (
        f"gradscope: error: --device cuda: torch {torch.__version__} finds no CUDA device on this machine.\n"
        "Use --device cpu; 'gradscope doctor' shows what can be measured here.\n"
    )


def test_output_that_cannot_be_written_is_said_at_once(folder: Path) -> None:
    ran = gradscope("profile", "train.py", "-o", "missing/run")
    assert ran.returncode == 2
    assert ran.stdout == ""  # the script did not run
    assert ran.stderr == (
        f"gradscope: error: missing/run.json cannot be written: the folder {folder}/missing does not exist.\n"
        "Create it first.\n"
    )


# What follows needs no process of its own; the pipeline is the real one.


def test_syntax_error(run: Runner) -> None:
    Path("model.py").write_text("def workload(:\n    pass\n")
    ran = run("profile", "model.py")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == "gradscope: error: model.py:1: invalid syntax\n    def workload(:\n                 ^\n"


@pytest.mark.parametrize(
    ("factory", "expected"),
    [
        (
            "no_gradient",
            "the result of loss(output, batch) is a float32 tensor of shape () with requires_grad=False: there is no "
            "backward pass to measure.\n"
            "Look for torch.no_grad(), .detach(), .item() or parameters that are all frozen.",
        ),
        (
            "not_scalar",
            "loss(output, batch) returned a float32 tensor of shape (8, 4) with requires_grad=True: a loss is a "
            "scalar.\nEnd it with .mean() or .sum().",
        ),
    ],
)
def test_loss_that_cannot_be_used(factory: str, expected: str, run: Runner) -> None:
    ran = run("profile", f"model.py:{factory}", "-q")
    assert (ran.code, ran.out, ran.err) == (2, "", f"gradscope: error: {expected}\n")


def test_batches_that_end(run: Runner) -> None:
    ran = run("profile", "model.py:ends", *FAST, "-q")
    assert ran.code == 2
    first, second = ran.err.splitlines()
    assert first.startswith("gradscope: error: the batch iterator ended after 3 batches, but this run needs ")
    assert second == "Give a DataLoader (it restarts), one fixed batch, or fewer --steps and --warmup."


def test_model_that_raises(run: Runner) -> None:
    ran = run("profile", "model.py:raises", "-q")
    assert ran.code == 1
    lines = ran.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    # From torch's call of the model down to the line that failed, and nothing of ours.
    assert "in forward" in ran.err
    assert not frames_of_ours(ran.err)
    assert any(line.startswith("RuntimeError: ") for line in lines)
    assert lines[-1] == "gradscope: error: nothing was measured: model.py:raises ended before the measured steps."


def test_script_whose_optimizers_step_in_no_order() -> None:
    """One for each stage of training, and stages that are short."""
    Path("stages.py").write_text(
        "import torch\nweights = [torch.zeros(3, requires_grad=True) for _ in range(4)]\n"
        "optimizers = [torch.optim.SGD([w], lr=0.1) for w in weights]\n"
        "for w, optimizer in zip(weights, optimizers):\n"
        "    for _ in range(5):\n        w.square().sum().backward()\n        optimizer.step()\n"
    )
    ran = gradscope("profile", "stages.py")
    assert ran.returncode == 3
    assert ran.stderr.endswith(
        "gradscope: error: stages.py ended before its training steps could be told: 4 optimizers stepped 20 times, in "
        "an order that does not come back.\nLet it run longer, or say where a step ends: with gradscope.profiling() "
        "as prof, and prof.step().\n"
    )
