"""Well-made programs of many kinds: every finding is declared to be true, with its reason, or it is not there."""

from __future__ import annotations

import pytest
import torch

from gradscope import pipeline
from gradscope.diagnose.case import Case
from gradscope.diagnose.worth import LEFT
from gradscope.tables import Finding
from tests.diagnose.corpus import ANYWHERE, TRIES
from tests.diagnose.programs import PROGRAMS, Made, Program
from tests.diagnose.run_case import case_of, loop_case

# What a user is told, with the floors. Every recipe that fits is taken to gain: whether a micro-run of these very
# shapes says so may change with what else the machine does, and what is found must be true either way.
pytestmark = [pytest.mark.floors]


# Times between phases are judged by a median step and by a median unprofiled one; two steps have none.
ENOUGH_STEPS = 5


def _case(made: Made) -> Case:
    made = dict(made)
    step, model = made.pop("step", None), made.pop("model")
    if step is None:
        return case_of(model, **made)
    return loop_case(step, model, **{"steps": ENOUGH_STEPS, **made})


@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_nothing_false_is_found(program: Program) -> None:
    """Profiled again where something else is found: what is false is found each time, an interruption is not."""
    for _ in range(TRIES):
        torch.manual_seed(0)
        case = _case(program.make())
        found, notes = pipeline.diagnose(case)
        assert not notes, notes
        for finding in found:
            _is_modest(finding, case)
        false = [each for each in found if each.rule not in program.true and each.rule not in ANYWHERE]
        if not false:
            return
    said = "\n".join(f"{each.rule}: {each.message} | {each.evidence} | {each.advice}" for each in false)
    raise AssertionError(f"not declared to be true of {program.name}:\n{said}")


def _is_modest(finding: Finding, case: Case) -> None:
    """No finding promises all of its cost, of the step, or of the peak; nor what nobody would notice."""
    saved, freed = finding.predicted_saving_ns, finding.predicted_saving_bytes
    most = min(each for each in (finding.cost_ns, case.step_ns) if each is not None) * (1 - LEFT)
    for ns in (saved, finding.predicted_high_ns):
        assert ns is None or ns <= most
    if saved is not None:
        assert saved >= 100_000 and saved >= 0.005 * case.step_ns
    if freed is not None and finding.rule != "leak":
        assert case.run.memory is not None and 1_000_000 <= freed < case.run.memory.peak_bytes


def test_there_are_many_kinds_and_each_declaration_has_its_reason() -> None:
    assert len(PROGRAMS) >= 20
    assert len({program.name for program in PROGRAMS}) == len(PROGRAMS)
    assert all(len(reason.split()) >= 3 for program in PROGRAMS for reason in program.true.values())
