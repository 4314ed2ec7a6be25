"""Which cases of a long table run: a sample, always the same; all from ``--cases 250`` on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

Case = TypeVar("Case")


WHOLE = 250
_given: list[int] = []


def draw(num_cases: int) -> None:
    """Have tables draw about so many cases from here on."""
    _given[:] = [num_cases]


def num_cases() -> int:
    """What ``--cases`` says; 0 without."""
    return max(_given, default=0)


def is_whole() -> bool:
    """Whether whole tables run."""
    return num_cases() >= WHOLE


def sample(cases: Sequence[Case], first: int, every: int) -> list[Case]:
    """Every so many-th of the cases, from one of them on."""
    return list(cases if is_whole() else cases[first::every])


def only_whole(*cases: Case) -> tuple[Case, ...]:
    """These cases where whole tables run, else none."""
    return cases if is_whole() else ()
