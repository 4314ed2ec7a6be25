"""The faults, by the part of the program that they are in."""

from __future__ import annotations

from tests.mutants.mutant import Mutant
from tests.mutants.table import artifacts, data, embedding, planning, program, serving, training


def all_mutants() -> list[Mutant]:
    parts = (embedding, training, data, planning, artifacts, serving, program)
    return [one for part in parts for one in part.MUTANTS]
