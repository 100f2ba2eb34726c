"""``gradscope fix`` of what runs under torch.compile: the same text as without, and how it was proved is said."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gradscope.fixing import load_fix
from tests.cli_fixtures import Runner, run_fixture  # noqa: F401 (a fixture is used by its name)
from tests.fixing.fix_fixtures import FAST, SCRIPT, folder_fixture, gains_fixture  # noqa: F401
from tests.fixing.test_script import here_fixture  # noqa: F401
from tests.made_times import BETTER, Saves

Gains = Callable[[Saves], None]

NOTE = (
    "the model runs under torch.compile: call sites are found and verified, and losses compared, as it runs without; "
    "its step is measured compiled, before and after"
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # by Dynamo, of a Function
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # Dynamo's own, of the input that it traces
]


def test_a_compiled_model(folder: Path, gains: Gains, run: Runner) -> None:
    plain = run("fix", "model.py", "-o", "plain", *FAST)
    assert plain.code == 0, plain.err
    text = Path("model.py").read_text(encoding="utf-8")
    made = text.replace("return Net(), torch.randn", 'return torch.compile(Net(), backend="eager"), torch.randn')
    assert made != text
    Path("model.py").write_text(made, encoding="utf-8")
    ran = run("fix", "model.py", "-o", "compiled", *FAST)
    assert ran.code == 0, ran.err
    before, after = load_fix("plain.json"), load_fix("compiled.json")
    assert [(site.path, site.status) for site in after.sites] == [("layers.0", "kept"), ("layers.1", "kept")]
    assert after.diff == before.diff != ""
    assert NOTE in after.notes and NOTE not in before.notes
    assert not [note for note in after.notes if "old code" in note]


@pytest.mark.usefixtures("here")
def test_a_script_that_compiles_a_function_around_its_model(folder: Path, gains: Gains, run: Runner) -> None:
    made = SCRIPT.replace(
        "optimizer = ", 'step_of = torch.compile(lambda x: model(x), backend="eager")\noptimizer = ', 1
    )
    made = made.replace("loss = model(x)", "loss = step_of(x)")
    assert made.count("step_of") == 2
    Path("train.py").write_text(made, encoding="utf-8")
    ran = run("fix", "train.py", *FAST, "--curve-steps", "3")
    assert ran.code == 0, ran.err
    assert any(note.startswith("no model was met") for note in load_fix("gradscope-train-fix.json").notes)
    assert "No model was met" in ran.out and "No recipe matches" not in ran.out


@pytest.mark.usefixtures("here")
def test_a_script_that_compiles_its_model(folder: Path, gains: Gains, run: Runner) -> None:
    gains(BETTER)
    made = SCRIPT.replace("model = Net()\n", 'model = torch.compile(Net(), backend="eager")\n')
    assert made != SCRIPT
    Path("train.py").write_text(made, encoding="utf-8")
    ran = run("fix", "train.py", *FAST, "--curve-steps", "3")
    assert ran.code == 0, ran.err
    found = load_fix("gradscope-train-fix.json")
    assert [(site.path, site.status) for site in found.sites] == [("layers.0", "kept"), ("layers.1", "kept")]
    assert found.notes.count(NOTE) == 1 and found.curves is not None and found.curves.same
