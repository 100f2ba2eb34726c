"""Scripts with several optimizers at unequal rates: what is measured is whole cycles, whatever --steps is. No clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradscope.pipeline import profile_script
from gradscope.tables import Options, RunData
from gradscope.workload import Script

GAN = """
import torch
from torch import nn

critic, generator = nn.Sequential(nn.Linear(4, 1)), nn.Sequential(nn.Linear(2, 4))
of_critic = torch.optim.SGD(critic.parameters(), lr=0.1)
of_generator = torch.optim.SGD(generator.parameters(), lr=0.1)
for number in range(200):
    of_critic.zero_grad()
    (critic(torch.ones(3, 4)).mean() - critic(generator(torch.ones(3, 2)).detach()).mean()).backward()
    of_critic.step()
    if {when}:
        of_generator.zero_grad()
        (-critic(generator(torch.ones(3, 2))).mean()).backward()
        of_generator.step()
"""


def run(tmp_path: Path, text: str, steps: int) -> RunData:
    file = tmp_path / "train.py"
    file.write_text(text)
    outcome = profile_script(Script(file, None, (), str(file)), Options(steps=steps, warmup=1, memory=False))
    assert outcome.error is None and outcome.report is not None
    return outcome.report.data


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize(
    ("when", "rate"),
    [("number % 3 == 2", 3), ("number % 4 == 0", 4), ("number > 7 and number % 2", 2)],
    ids=["three to one", "four to one, generator first", "pretrained"],
)
def test_calls_do_not_depend_on_the_number_of_steps(tmp_path: Path, when: str, rate: int, steps: int) -> None:
    data = run(tmp_path, GAN.replace("{when}", when), steps)
    calls = {row.path: row.calls for row in data.layers}
    assert calls["critic.0"] == 2 * rate + 1 and calls["generator.0"] == rate + 1
    assert data.workload.optimizer_steps == {"critic": rate, "generator": 1}
    assert any(f"a step holds {rate + 1} optimizer steps: {rate} of critic, 1 of generator" in n for n in data.notes)
