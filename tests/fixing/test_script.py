"""``gradscope fix`` of a training script: its models are met at their first forward, and its losses compared."""

from __future__ import annotations

import functools
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradscope import recipes
from gradscope.cli import fix_job
from gradscope.fixing import load_fix
from gradscope.fixing import script as scripts
from gradscope.fixing.curves import compare_curves, difference
from gradscope.fixing.roots import Roots
from gradscope.patching.patches import Patches
from gradscope.workload import Workload
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)
from tests.fixing.fix_fixtures import FAST, SCRIPT, folder_fixture, gains_fixture  # noqa: F401
from tests.made_times import Saves

Gains = Callable[[Saves], None]

CURVE = (*FAST, "--curve-steps", "3")


@pytest.fixture(name="here")
def here_fixture(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs of the script happen in this process; their tasks."""
    tasks: list[str] = []

    real: Callable[..., Any] = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        if command[1:3] != ["-m", "gradscope.cli.fix_job"]:
            return real(command, **options)
        tasks.append(scripts.Job.load(command[3]).task)
        return subprocess.CompletedProcess(command, fix_job.main(command[3]))

    monkeypatch.setattr(scripts.subprocess, "run", run)
    return tasks


def test_a_script_is_fixed(folder: Path, gains: Gains, here: list[str], run: Runner) -> None:
    ran = run("fix", "train.py", "--write", *CURVE)
    assert ran.code == 0, ran.err
    assert here == ["profile", "prove", "profile", "curve", "curve"]
    found = load_fix("gradscope-train-fix.json")
    assert [(site.path, site.status) for site in found.sites] == [("layers.0", "kept"), ("layers.1", "kept")]
    curves = found.curves
    assert curves is not None and curves.same and len(curves.before) == len(curves.after) >= 3
    assert 0 <= curves.largest_difference < 1e-5
    assert found.workload.mode == "script" and found.after is not None and found.after.wall_ns == 1_000_000
    assert "from gradscope.recipes import attention" in Path("train.py").read_text()
    assert Path("train.py.bak").read_text() == SCRIPT
    assert "The loss  over " in ran.out and "The curves are the same" in ran.out


def test_what_finding_computes_is_no_loss_of_the_script(
    folder: Path, gains: Gains, here: list[str], run: Runner
) -> None:
    """Some patterns are told by comparing gradients, which are taken in the middle of the patched run."""
    shutil.copy(Path(__file__).parents[2] / "examples" / "names.py", "names.py")
    ran = run("fix", "names.py", *CURVE, "--", "--n-embd", "16", "--n-layer", "1", "--batch-size", "8")
    assert ran.code == 0, ran.err
    found = load_fix("gradscope-names-fix.json")
    assert [site.recipe for site in found.kept] == ["packed_attention"]
    curves = found.curves
    assert curves is not None and curves.same and len(curves.before) == len(curves.after)
    assert curves.largest_difference < 1e-5


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_passes_of_a_proof_are_no_steps_of_the_script(
    folder: Path, gains: Gains, here: list[str], run: Runner, monkeypatch: pytest.MonkeyPatch, by_hand: bool
) -> None:
    """Those of many places, before the script's optimizer steps, or of any where it has none."""
    monkeypatch.setattr("gradscope.capture.training._PATIENCE", 3)
    if by_hand:
        text = Path("train.py").read_text().replace("optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n", "")
        text = text.replace("optimizer.zero_grad()", "model.zero_grad()")
        step = "[p.data.sub_(0.01 * p.grad) for p in model.parameters() if p.grad is not None]"
        Path("train.py").write_text(text.replace("optimizer.step()", step))
    ran = run("fix", "train.py", *CURVE)
    assert ran.code == 0, ran.err
    found = load_fix("gradscope-train-fix.json")
    assert [(site.path, site.status) for site in found.sites] == [("layers.0", "kept"), ("layers.1", "kept")]
    assert found.curves is not None and found.curves.same and len(found.curves.before) >= 3


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_curve_of_checkpointed_layers(
    folder: Path, gains: Gains, here: list[str], run: Runner, reentrant: bool
) -> None:
    """What runs again in backward drops as little as it did at first."""
    text = Path("train.py").read_text().replace("layer(x)", f"checkpoint(layer, x, use_reentrant={reentrant})")
    text = text.replace("import math", "import math\nfrom torch.utils.checkpoint import checkpoint", 1)
    text = text.replace("x = torch.randn(2, 12, 32)", "x = torch.randn(2, 12, 32, requires_grad=True)")
    Path("train.py").write_text(text)
    ran = run("fix", "train.py", *CURVE)
    assert ran.code == 0, ran.err
    found = load_fix("gradscope-train-fix.json")
    assert [(site.path, site.status) for site in found.sites] == [("layers.0", "kept"), ("layers.1", "kept")]
    assert found.curves is not None and found.curves.same and found.curves.largest_difference < 1e-5


def test_dry_run_in_a_process_of_its_own(folder: Path, run: Runner) -> None:
    ran = run("fix", "train.py", "--dry-run", "-q")
    assert ran.code == 0 and "2 of 2 call sites can be replaced." in ran.out
    assert "gradscope fix train.py  verify and measure them" in ran.out
    assert {path.name for path in Path().iterdir()} == {"model.py", "train.py"}


@pytest.mark.parametrize("options", [("--dry-run",), CURVE])
def test_a_script_that_does_not_train_has_no_answer(
    folder: Path, here: list[str], run: Runner, options: tuple[str, ...]
) -> None:
    """Resumed when its last epoch was over, say: not "no recipe matches", with or without a dry run."""
    Path("train.py").write_text("import torch\nfrom torch import nn\nprint(nn.Linear(2, 2)(torch.ones(1, 2)).shape)\n")
    ran = run("fix", "train.py", "-q", *options)
    assert ran.code == 3 and "No recipe" not in ran.out
    assert "train.py ran to its end without a backward pass: " in ran.err


def test_a_recipe_that_is_wrong_in_training_alone(
    folder: Path, gains: Gains, here: list[str], run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passes the proof, being right there, and is wrong where the losses are compared."""
    right = recipes.attention

    @functools.wraps(right)
    def wrong_later(*args: Any, **kwargs: Any) -> Any:
        return right(*args, **kwargs) * (1.2 if here[-1] == "curve" else 1.0)

    monkeypatch.setattr(recipes, "attention", wrong_later)
    ran = run("fix", "train.py", "--write", *CURVE)
    assert ran.code == 5
    assert here == ["profile", "prove", "profile", "curve", "curve", "curve"]
    assert "The curves part by " in ran.out and Path("train.py").read_text() == SCRIPT
    assert load_fix("gradscope-train-fix.json").failed


TWO = """import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from model import Attention

class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return x + self.attention(x)

class Second(First):
    def __init__(self):
        super().__init__()
        self.attention.drop = KEPT

torch.manual_seed(3)
models = First(), Second()
optimizer = torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.01)
for step in range(40):
    loss = sum(model(torch.randn(2, 12, 32)).square().mean() for model in models)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("second", "kept", "files"),
    [
        ("nn.Dropout(0.1)", ["First.attention", "Second.attention"], ["model.py"]),
        ("nn.Sequential(nn.Dropout(0.1), nn.Softmax(-1))", ["First.attention"], []),  # its line does something else
    ],
)
def test_two_models_of_one_class(
    folder: Path, gains: Gains, here: list[str], run: Runner, second: str, kept: list[str], files: list[str]
) -> None:
    Path("train.py").write_text(TWO.replace("KEPT", second))
    ran = run("fix", "train.py", "--write", *CURVE)
    assert ran.code == 0, ran.err
    found = load_fix("gradscope-train-fix.json")
    assert [site.path for site in found.kept] == kept
    assert list(found.written) == files
    assert ("model.py is not in the diff: several models run it" in " ".join(ran.out.split())) == (not files)


THREE = """import copy
import torch
from torch import nn
from model import Attention

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return x + self.attention(x)

torch.manual_seed(3)
teacher, student, other, last = Net(), Net(), Net(), Net()
student.attention.drop = nn.Sequential(nn.Dropout(0.1), nn.Softmax(-1))
nets = student, other, last
optimizer = torch.optim.SGD([parameter for net in nets for parameter in net.parameters()], lr=0.01)
for step in range(40):
    x = torch.randn(2, 12, 32)
    with torch.no_grad():
        wanted = teacher(x)
    loss = sum((net(x) - wanted).square().mean() for net in nets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_models_have_the_names_that_a_profile_gives_them(
    folder: Path, gains: Gains, here: list[str], run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is kept goes into each, whatever others of its class there are."""
    put: list[list[str]] = []
    real = Patches.apply

    def apply(patches: Patches) -> Any:
        put.append([site.path for site in patches.kept])
        return real(patches)

    monkeypatch.setattr(Patches, "apply", apply)
    Path("train.py").write_text(THREE)
    ran = run("fix", "train.py", *CURVE)
    assert ran.code == 0, ran.err
    found = load_fix("gradscope-train-fix.json")
    assert [site.path for site in found.kept] == ["other.attention", "last.attention"]
    assert put == [[], ["attention"], ["attention"]] * 2, "in the profile, and where the losses are compared"
    assert "no time ratio" in " ".join(ran.out.split())
    assert "peak memory was not measured" in " ".join(ran.out.split())  # FAST asks for none


@pytest.mark.parametrize("own", [False, True])
def test_a_model_without_a_loss_of_its_own(folder: Path, gains: Gains, here: list[str], run: Runner, own: bool) -> None:
    if own:
        text = Path("train.py").read_text().replace("        return x\n", "        return x.square().mean()\n")
        Path("train.py").write_text(text.replace("model(x).square().mean()", "model(x)"))
    ran = run("fix", "train.py", *CURVE)
    assert ran.code == 0, ran.err
    said = " ".join(ran.out.split())
    assert ("forward and backward of one batch, with its own loss" in said) == own
    assert ("from the mean of its outputs, because it returns no loss" in said) == (not own)


def test_interrupted_while_torch_is_loaded(tmp_path: Path) -> None:
    """Of which each process of a fix takes seconds: no traceback; who waits says that it was interrupted."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    command = [sys.executable, "-m", "gradscope.cli.fix_job", "job.json"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (130, "")


def test_the_scripts_own_exit_code(folder: Path, here: list[str], run: Runner) -> None:
    Path("train.py").write_text("import sys\nsys.exit(7)\n")
    assert run("fix", "train.py", *CURVE).code == 7
    assert here == ["profile"]


def test_the_scripts_own_error(folder: Path, here: list[str], run: Runner) -> None:
    Path("train.py").write_text("raise ValueError('no data')\n")
    ran = run("fix", "train.py", *CURVE)
    assert ran.code == 1 and ran.err.endswith("ValueError: no data\n")


def test_a_script_without_backward(folder: Path, here: list[str], run: Runner) -> None:
    Path("train.py").write_text("print('training')\n")
    ran = run("fix", "train.py", *CURVE)
    assert ran.code == 3
    assert "train.py ran to its end without a backward pass: there is nothing to measure." in ran.err


# --------------------------------------------------------------------------------------------------------------------
# The models of a script
# --------------------------------------------------------------------------------------------------------------------


class Given(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0, **others: Any) -> torch.Tensor:
        out: torch.Tensor = self.linear(x) * scale
        return out


def test_each_model_is_met_once_before_its_first_forward() -> None:
    met: list[tuple[str, Workload]] = []

    def note(name: str, workload: Workload) -> bool:
        met.append((name, workload))
        return False

    first, second, loss = Given(), nn.Linear(3, 1), nn.MSELoss()
    call = nn.Module.__call__
    with Roots(note).watching():
        with torch.no_grad():
            first(torch.ones(2, 3))
        assert met == []
        hidden = first(torch.ones(2, 3), scale=2.0, more=1)
        loss(second(hidden), torch.zeros(2, 1)).backward()
        first(torch.ones(2, 3))
    assert nn.Module.__call__ is call
    assert [(name, workload.model) for name, workload in met] == [("", first), ("Linear", second)]
    assert met[0][1].batch.keys() == {"x", "scale", "more"}
    (batch,) = met[1][1].batch
    assert batch.is_leaf and batch.requires_grad and torch.equal(batch, hidden)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_runs_again_is_no_model(reentrant: bool) -> None:
    met: list[tuple[str, Workload]] = []

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Given(), nn.Sequential(Given())])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    def note(name: str, workload: Workload) -> bool:
        met.append((name, workload))
        return False

    model = Checkpointed()
    with Roots(note).watching():
        for _ in range(2):
            model(torch.ones(2, 3, requires_grad=True)).sum().backward()
        model.blocks[1](torch.ones(2, 3))
    assert [(name, workload.model) for name, workload in met] == [("", model)]


def test_what_a_script_compiles_while_it_is_watched_is_compiled_as_alone() -> None:
    """A compiled module keeps the call that modules had as it was made."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, given: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    def met(name: str, workload: Workload) -> bool:
        workload.model(*workload.batch)  # with the modules' own call, as what is recorded and proved
        return name != ""

    torch.compiler.reset()
    with Roots(met).watching():
        model = nn.Sequential(torch.compile(Given(), backend=backend, fullgraph=True), nn.Linear(3, 3))
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
    model(torch.ones(2, 3)).sum().backward()
    assert len(graphs) == 1


def test_nothing_is_watched_once_all_were_met() -> None:
    call = nn.Module.__call__
    with Roots(lambda name, workload: True).watching():
        assert nn.Module.__call__ is not call
        Given()(torch.ones(2, 3))
        assert nn.Module.__call__ is call


def test_an_error_while_looking_leaves_modules_as_they_were() -> None:
    call = nn.Module.__call__

    def fails(name: str, workload: Workload) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Roots(fails).watching():
        Given()(torch.ones(2, 3))
    assert nn.Module.__call__ is call


# --------------------------------------------------------------------------------------------------------------------
# Curves
# --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "again", "same", "verdict"),
    [
        (
            [2.0, 1.001],
            None,
            True,
            "The curves are the same: they differ by less than 1 % of the loss, as rounding does.",
        ),
        (
            [2.0, 1.1],
            [2.0, 1.0],
            False,
            "The curves part by 1.0e-01 of the loss, where two runs as it is differ by 0.0e+00.",
        ),
        (
            [2.0, 1.1],
            [2.0, 0.9],
            True,
            "The curves part, but the script does not repeat itself: two runs as it is differ by 1.0e-01.",
        ),
        ([2.0], None, False, "The runs differ: backward was called 2 times before, 1 after."),
    ],
)
def test_verdicts(after: list[float], again: list[float] | None, same: bool, verdict: str) -> None:
    curves = compare_curves([2.0, 1.0], after, again)
    assert (curves.same, curves.verdict) == (same, verdict)


def test_losses_that_are_not_finite() -> None:
    assert difference([math.nan, math.inf], [math.nan, math.inf]) == 0
    assert difference([1.0], [math.nan]) == math.inf
    assert not compare_curves([1.0], [math.nan], [1.0]).same
    assert compare_curves([], []).verdict == "There is no curve: the script called backward in none of its steps."


def test_a_script_whose_loss_is_lost_has_a_report(folder: Path, gains: Gains, here: list[str], run: Runner) -> None:
    """JSON has no number for what is none."""
    text = Path("train.py").read_text()
    Path("train.py").write_text(text.replace(".backward()", ".div(0.0).backward()"))
    assert Path("train.py").read_text() != text
    ran = run("fix", "train.py", *CURVE)
    assert "the last is not finite before, not finite after" in " ".join(ran.out.split()), ran.err
    curves = load_fix("gradscope-train-fix.json").curves
    assert curves is not None and set(curves.before) == set(curves.after) == {None}


def test_the_process_that_runs_the_script_ends_with_the_command(folder: Path) -> None:
    Path("endless.py").write_text(
        "import os, time\nopen('pid.part', 'w').write(str(os.getpid()))\nos.rename('pid.part', 'pid')\n"
        "while True: time.sleep(0.05)\n"
    )
    command = [sys.executable, "-m", "gradscope", "fix", "endless.py"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        ends = time.monotonic() + 60
        while not Path("pid").exists():
            assert process.poll() is None and time.monotonic() < ends
            time.sleep(0.05)
        process.terminate()
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143 and err.endswith("gradscope: terminated; nothing was written\n"), err
    with pytest.raises(ProcessLookupError):
        os.kill(int(Path("pid").read_text()), 0)
