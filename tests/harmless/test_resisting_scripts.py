"""Scripts that are hard to stop, that end in other ways, or that train in other places than a plain loop."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import gradscope
from gradscope.compat import dispatch_modes, function_modes
from gradscope.errors import UsageError, WorkloadError

_SETUP = """
import os, sys, threading, time
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    optimizer.zero_grad()
    loss = model(torch.ones(4, 8)).mean()
    loss.backward()
    optimizer.step()
    return loss.item()
"""

_RETRIES = """
done = 0
while done < 60:
    try:
        step()
    except:
        pass
    done += 1
print("trained", done)
"""
_IN_A_THREAD = """
losses = []
thread = threading.Thread(target=lambda: losses.extend(step() for _ in range(60)))
thread.start()
thread.join()
print("trained", len(losses))
"""
_WAITS = """
steps = 0
while True:
    step()
    steps += 1
    if steps == 30:
        print("ready", flush=True)
    if steps > 30:
        time.sleep(0.05)
"""
_FORKS = """
losses = [step() for _ in range(6)]
child = os.fork()
losses += [step() for _ in range(60)]
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
    print("parent trained", len(losses))
else:
    print("child trained", len(losses), flush=True)
    os._exit(5)
"""
_FORKS_TO_AN_END = """
import ctypes
step()
time.sleep(0.5)  # kineto's thread waits by now
if os.fork() == 0:
    step()
    ctypes.CDLL(None).printf(b"C wrote this\\n")
    sys.exit(5)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 5
for _ in range(60):
    step()
"""
_REMOVES_ITS_FOLDER = """
import tempfile
folder = tempfile.mkdtemp()
os.chdir(folder)
os.rmdir(folder)
for _ in range(60):
    step()
"""
_IN_BACKWARD = """
optimizers = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()

for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(update)
losses = []
for _ in range(60):
    loss = model(torch.ones(4, 8)).square().mean()
    loss.backward()
    losses.append(loss.item())
print("trained", losses)
"""
_ONLY_WRITES = """
class Copied:
    def __init__(self, stream):
        self._stream = stream
    def write(self, text):
        return self._stream.write(text)

sys.stdout, sys.stderr = Copied(sys.stdout), Copied(sys.stderr)
"""
_CLEANS_UP = """
try:
    for _ in range(60):
        step()
    result = 1
finally:
    print(result)
"""
_EXITS = """
try:
    for _ in range(60):
        step()
except BaseException:
    sys.exit(7)
"""


def _start(folder: Path, text: str, *options: str) -> subprocess.Popen[str]:
    path = folder / "train.py"
    path.write_text(_SETUP + text)
    command = [sys.executable, "-m", "gradscope", "profile", str(path), "--no-html", "--steps", "2", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder)


def _profiled(folder: Path, text: str, *options: str) -> tuple[int, str, str]:
    process = _start(folder, text, *options)
    out, err = process.communicate(timeout=600)  # a hang is a failure, slowness is none
    return process.returncode, out, err


def _run(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "gradscope-train.json").read_text())
    return found


def test_a_script_that_catches_everything_is_stopped_once_and_then_left_alone(tmp_path: Path) -> None:
    code, out, err = _profiled(tmp_path, _RETRIES)
    assert code == 0 and "trained 60" in out
    assert err.count("the script caught the stop signal, so it runs to its end") == 1
    assert not _run(tmp_path)["partial"]


def test_a_script_that_trains_in_a_thread_runs_to_its_end(tmp_path: Path) -> None:
    code, out, err = _profiled(tmp_path, _IN_A_THREAD)
    assert code == 0 and "trained 60" in out
    assert "The script trains in a thread, which cannot be stopped, so it runs to its end" in err
    assert "Traceback" not in err
    assert not _run(tmp_path)["partial"]


@pytest.mark.parametrize("text", [_CLEANS_UP, _EXITS], ids=["a finally that fails", "an exit of its own"])
def test_what_a_script_does_while_it_is_stopped_is_no_failure(text: str, tmp_path: Path) -> None:
    code, _, err = _profiled(tmp_path, text)
    assert code == 0 and "Traceback" not in err
    assert "the script raised" in err
    assert not _run(tmp_path)["partial"]


def test_sigterm_ends_the_script_and_writes_what_was_measured(tmp_path: Path) -> None:
    process = _start(tmp_path, _WAITS, "--run-to-end")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 143, err
    assert "gradscope: terminated" in err and "Traceback" not in err
    run = _run(tmp_path)
    assert run["layers"] and run["workload"]["steps"] == 2


@pytest.mark.parametrize("last", ["sys.exit('enough')", "1 / 0", "sys.exit(0)"])
def test_streams_of_the_users_that_can_only_be_written_to(last: str, tmp_path: Path) -> None:
    text = _ONLY_WRITES + f"for _ in range(60):\n    step()\n{last}\n"
    code, out, err = _profiled(tmp_path, text, "--run-to-end")
    alone = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, check=False)
    assert code == alone.returncode  # 120, with which Python says that it cannot flush
    assert "gradscope: wrote gradscope-train.json" in err and not _run(tmp_path)["partial"]
    assert "\nBackward  " in out
    assert ("enough" in err) == ("enough" in last) and ("ZeroDivisionError" in err) == ("1 / 0" in last)


def test_a_fork_trains_on_as_it_would_alone(tmp_path: Path) -> None:
    code, out, err = _profiled(tmp_path, _FORKS, "--run-to-end")
    assert code == 0 and "Traceback" not in err, err
    assert out.count("child trained 66") == out.count("parent trained 66") == 1
    assert not _run(tmp_path)["partial"]


def test_a_fork_ends_as_it_would_alone(tmp_path: Path) -> None:
    code, out, err = _profiled(tmp_path, _FORKS_TO_AN_END, "--run-to-end")
    assert code == 0 and "Traceback" not in err, err
    assert out.count("C wrote this") == 1


def test_a_script_may_work_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    code, _, err = _profiled(tmp_path, _REMOVES_ITS_FOLDER)
    assert code == 0 and "Traceback" not in err, err
    run = _run(tmp_path)
    assert [layer["path"] for layer in run["layers"]] == ["", "0", "1", "2"]
    assert not [note for note in run["notes"] if "Error: " in note]


def test_optimizers_inside_backward(tmp_path: Path) -> None:
    code, out, err = _profiled(tmp_path, _IN_BACKWARD, "--run-to-end")
    assert code == 0 and "Traceback" not in err, err
    alone = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert alone.stdout and alone.stdout in out  # the same losses, to the last digit
    run = _run(tmp_path)
    assert not run["partial"]
    assert not [note for note in run["notes"] if "Error: " in note]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


class _Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_modes_of_the_users_around_each_step_are_left_as_they_were_entered() -> None:
    model, x = _model(), torch.ones(4, 8)
    before = (function_modes(), dispatch_modes())
    with gradscope.profiling(model, steps=2, warmup=1) as prof:
        done = False
        while not done:
            with _Function() as function, _Dispatch() as dispatch:
                assert function_modes().count(function) == dispatch_modes().count(dispatch) == 1
                model(x).mean().backward()
                done = prof.step()  # a phase begins and ends inside of the modes
            assert function not in function_modes() and dispatch not in dispatch_modes()
    assert (function_modes(), dispatch_modes()) == before
    assert prof.report.data.lines


def test_profiling_measures_one_loop() -> None:
    model, x = _model(), torch.ones(4, 8)
    prof = gradscope.profiling(model, steps=1, warmup=0)
    with prof:
        while not prof.step():
            model(x).mean().backward()
    with pytest.raises(UsageError) as caught, prof:
        pass
    assert str(caught.value) == (
        "this gradscope.profiling has been used: it measures one loop.\n"
        "Make another one for the next: with gradscope.profiling(model) as prof:"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 1.5}, "steps is 1.5; it must be a whole number of at least 1."),
        ({"steps": 0}, "steps is 0; it must be a whole number of at least 1."),
        ({"steps": True}, "steps is True; it must be a whole number of at least 1."),
        ({"warmup": -1}, "warmup is -1; it must be a whole number of at least 0."),
        ({"memory": "no"}, "memory is 'no'; it must be True or False."),
        ({"lines": 1}, "lines is 1; it must be True or False."),
    ],
)
@pytest.mark.parametrize("how", ["profile", "profiling"])
def test_arguments_are_checked_as_the_commands_are(how: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        if how == "profile":
            gradscope.profile(_model(), torch.ones(4, 8), **options)
        else:
            gradscope.profiling(_model(), **options)
    assert str(caught.value) == message


def test_a_loss_of_one_argument() -> None:
    def error(output: torch.Tensor) -> torch.Tensor:
        return output.mean()

    with pytest.raises(WorkloadError) as caught:
        gradscope.profile(_model(), torch.ones(4, 8), error)
    first, second = str(caught.value).splitlines()
    assert first.startswith("loss is error(output") and first.endswith(": too many positional arguments.")
    assert second == "Give a function of both, as lambda output, batch: mean_error(output, batch[1])."


def test_a_global_whose_class_raises(tmp_path: Path) -> None:
    text = """
class Hides:
    @property
    def __class__(self):
        raise RuntimeError("no class")

    def __getattr__(self, name):
        raise RuntimeError(name)

hidden = Hides()
for _ in range(60):
    step()
"""
    code, _, err = _profiled(tmp_path, text)
    assert code == 0, err
    assert not _run(tmp_path)["partial"]


_HOLDS = {
    "threading.Thread(target=told.wait, name='writer').start()": "the thread writer, of the program's own",
    "thread = threading.Thread(target=told.wait, name='writer'); thread.start(); atexit.register(thread.join)": (
        "the thread writer, of the program's own"
    ),
    "atexit.register(told.wait)": "a function that the program has registered for its end",
    "mp = multiprocessing.get_context('fork'); mp.Process(target=sleep, name='worker').start()": (
        "the process worker, of the program's own"
    ),
}


@pytest.mark.parametrize("holds", _HOLDS)
def test_what_waits_for_the_rest_of_the_program_does_not_hold_the_process(holds: str, tmp_path: Path) -> None:
    """The program is ended before it tells its thread, exit function or child to end, for which Python would wait."""
    (tmp_path / "train.py").write_text(
        _SETUP
        + f"""
import atexit, multiprocessing
told = threading.Event()

def sleep():
    time.sleep(20)  # for the test, which leaves no process behind for longer
    os._exit(0)

{holds}
atexit.register(lambda: print("cleaned up", flush=True))
for _ in range(10_000):
    step()
told.set()
"""
    )
    ended = _ended(tmp_path, "process._TOLD_S, process._THREADS_S, process._EXITING_S = 0.2, 0.6, 1.5")
    assert ended.returncode == 0, ended.stderr
    assert f"waiting for {_HOLDS[holds]}" in ended.stderr and f"{_HOLDS[holds]} did not end" in ended.stderr
    assert ended.stdout.endswith("cleaned up\n") and "\nNext" in ended.stdout
    assert list(tmp_path.glob("*.json"))


def _ended(folder: Path, patience: str) -> subprocess.CompletedProcess[str]:
    program = (
        f"from gradscope import process; {patience}; from gradscope.cli import main;"
        " main(['profile', 'train.py', '--no-html', '--steps', '1', '--warmup', '1'])"
    )
    return subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("steps", [10_000, 5])
def test_a_thread_that_ends_by_itself_is_waited_for(steps: int, tmp_path: Path) -> None:
    """Where the program was ended early, and where it was not, for as long as it likes: it writes a checkpoint, say."""
    (tmp_path / "train.py").write_text(
        _SETUP
        + f"""
def save():
    time.sleep(8)
    print("saved", flush=True)

threading.Thread(target=save, name="writer").start()
for _ in range({steps}):
    step()
"""
    )
    patience = "process._THREADS_S = 30.0" if steps > 5 else "process._THREADS_S = process._EXITING_S = 0.1"
    ended = _ended(tmp_path, patience)
    assert ended.returncode == 0 and "did not end" not in ended.stderr, ended.stderr
    assert "saved\n" in ended.stdout  # the last line, but where a busy machine takes longer for the report


def test_who_calls_the_command_line_and_goes_on_is_not_ended(tmp_path: Path) -> None:
    """A program of its own, a test say, that takes SystemExit for an answer."""
    (tmp_path / "train.py").write_text(_SETUP + "\nfor _ in range(10_000):\n    step()\n")
    program = """
import threading, time
from gradscope import process
process._TOLD_S, process._THREADS_S, process._EXITING_S = 0.1, 0.2, 0.3
from gradscope.cli import main
for _ in range(2):
    try:
        main(['profile', 'train.py', '--no-html', '--force', '--steps', '1', '--warmup', '1'])
    except SystemExit as ended:
        print("ended", ended.code)
time.sleep(2)
print("went on", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("went on\n") and ended.stdout.count("ended 0") == 2
    assert "did not end" not in ended.stderr
