"""Public training programs that gradscope must leave as they are: each a repository, a commit, a command, and its data.

Nothing of theirs is kept here. ``benchmarks/field.py`` runs them from clones beside the project.
"""

from __future__ import annotations

from collections.abc import Sequence

from field_programs import (
    gans,
    graphs,
    language,
    libraries,
    lucidrains,
    models,
    pytorch_examples,
    reinforcement,
    science,
    vision,
)
from field_programs.program import Program

LISTS: Sequence[Sequence[Program]] = (
    language.PROGRAMS,
    pytorch_examples.PROGRAMS,
    lucidrains.PROGRAMS,
    models.PROGRAMS,
    gans.PROGRAMS,
    vision.PROGRAMS,
    graphs.PROGRAMS,
    science.PROGRAMS,
    reinforcement.PROGRAMS,
    libraries.PROGRAMS,
)
PROGRAMS: tuple[Program, ...] = tuple(program for programs in LISTS for program in programs)

__all__ = ["PROGRAMS", "Program"]
