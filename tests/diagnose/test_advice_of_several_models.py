"""Lines of advice name the model that they mean, where a program has several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from gradscope.pipeline import profile_script
from gradscope.tables import Finding, Options
from gradscope.workload.script import Script

PROGRAM = """
import torch
from torch import nn

class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.old = nn.Linear(16, 16), nn.Linear(16, 16)
    def forward(self, x):
        return self.used(x)

class Pair(Part):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(16, 16)

generator, critic = {generator}, {critic}
optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (generator, critic)]
for _ in range(40):
    critic(generator(torch.ones(4, 16))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
"""


def run(folder: Path, **models: str) -> tuple[list[Finding], dict[str, Any]]:
    """The findings about unused parameters, and the program's variables."""
    path = folder / "pair.py"
    path.write_text(PROGRAM.format(**models))
    script = Script(path, None, (), str(path))
    outcome = profile_script(script, Options(steps=2, warmup=1, memory=False))
    assert outcome.error is None and outcome.report is not None
    found = [each for each in outcome.report.data.findings if each.rule == "unused-gradients"]
    return found, script.namespace


@pytest.mark.parametrize(
    ("models", "code"),
    [
        ({"generator": "Part()", "critic": "nn.Linear(16, 1)"}, "generator.get_submodule('old').requires_grad_(False)"),
        (
            {"generator": "Part()", "critic": "Part()"},
            "for part in [critic.get_submodule('old'), generator.get_submodule('old')]: part.requires_grad_(False)",
        ),
        (
            {"generator": "Pair()", "critic": "nn.Linear(16, 1)"},
            "for name in ['old', 'other']: generator.get_submodule(name).requires_grad_(False)",
        ),
    ],
)
def test_the_code_freezes_what_is_unused(tmp_path: Path, models: dict[str, str], code: str) -> None:
    (finding,), variables = run(tmp_path, **models)
    assert finding.code == code
    exec(finding.code, variables)
    frozen = {
        f"{model}.{name}"
        for model in ("generator", "critic")
        for name, each in variables[model].named_parameters()
        if not each.requires_grad
    }
    unused = {
        f"{model}.{name}"
        for model in ("generator", "critic")
        if isinstance(variables[model], nn.Module)
        for name, each in variables[model].named_parameters()
        if each.grad is None
    }
    assert frozen == unused != set()
