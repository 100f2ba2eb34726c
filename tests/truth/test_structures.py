"""Truth: the layers of every structure, in the user's own loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.structures.every import EVERY
from tests.structures.kit import Structure

from .burning import Meter
from .proof import Expected, in_a_loop, prove, prove_each_place


@pytest.mark.parametrize("structure", EVERY, ids=lambda structure: structure.name)
def test_time(meter: Meter, structure: Structure, note_repeat: Callable[[], None]) -> None:
    expected = Expected({}, skip=structure.skip, unknown=structure.unknown, checkpoints=structure.checkpoints)

    def attempt() -> None:
        with structure.around():
            built = structure.build(meter)

            def step() -> None:
                meter.begin_step()
                built.step()

            prove(meter, in_a_loop(built.model, step), lambda meter, steps: expected)

    prove_each_place(meter, attempt, note_repeat)
    assert {kind for kind, _ in meter.counts()} >= {"forward", "backward"}
