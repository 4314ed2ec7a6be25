"""Whether whole numbers are ids or a quantity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotrec.data.inference.meaning import meaning_of
from tests.unit.data.inference.logs import CLICKS, ITEMS, NUM, USERS, look

RNG = np.random.default_rng(3)
AMOUNTS = (RNG.exponential(40, NUM)).astype(np.int64)
TOLD = RNG.random(NUM) < 0.1 + 0.6 * (AMOUNTS > 40)  # clicks that know an amount
EVEN = RNG.integers(0, 500, NUM)  # knows nothing, and lies everywhere alike


@pytest.mark.parametrize(
    ("name", "values", "clicks", "are_ids"),
    [
        # Names.
        ("user_id", EVEN, CLICKS, True),
        ("zip", EVEN, CLICKS, True),
        ("price", EVEN, CLICKS, False),
        ("price", ITEMS, CLICKS, False),
        ("num_views", AMOUNTS, CLICKS, False),
        # Of names that say nothing, what the click knows.
        ("C14", 15_000 + ITEMS * 7, CLICKS, True),
        ("f3", USERS, CLICKS, True),
        ("f3", 500 - USERS.astype(np.float64), CLICKS, True),
        ("f3", AMOUNTS, TOLD, False),
        ("f3", np.abs(AMOUNTS - 60), TOLD, False),  # neither rising nor falling
        # What it does not know: as many numbers as there are, or counts.
        ("f3", EVEN, CLICKS, True),
        ("f3", AMOUNTS**2, CLICKS, False),
        ("f3", AMOUNTS - 20, CLICKS, False),
        ("f3", EVEN % 40, CLICKS, True),
        ("f3", np.where(EVEN % 3, -1, 100_000 + EVEN % 70), CLICKS, True),
        # Fractions are no ids.
        ("f3", AMOUNTS / 7, CLICKS, False),
    ],
)
def test_ids_or_a_quantity(name: str, values: Any, clicks: Any, are_ids: bool) -> None:
    assert meaning_of(look(name, values), [clicks]).are_ids is are_ids


def test_several_labels_are_asked_in_turn() -> None:
    column = look("f3", AMOUNTS)
    assert not meaning_of(column, [np.zeros(NUM, bool), TOLD]).are_ids
