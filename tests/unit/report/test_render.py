"""The renderers, and numbers with their units."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from hotrec.report import units


@pytest.mark.parametrize(
    ("show", "shown"),
    [
        (units.show_bytes, {0: "0 B", 999: "999 B", 4_900_000: "4.90 MB", 3.2e12: "3.20 TB"}),
        (units.show_seconds, {0.124: "124 ms", 0.0012: "1.20 ms", 12.34: "12.3 s"}),
        (units.show_frac, {0.0: "0.0%", 0.9123: "91.2%", 0.00012: "0.012%", 1.0: "100.0%"}),
        (units.show_error, {0.05: "+5.0%", -0.05: "-5.0%", 0.0: "+0.0%"}),
        (units.show_count, {4950000: "4,950,000", None: "-"}),
        (units.show_quality, {0.78125: "0.7812", math.nan: "nan"}),
        (lambda pair: units.show_ratio(*pair), {(1, 3): "0.33x", (1, 0): "", (math.nan, 1): ""}),
    ],
)
def test_numbers_carry_their_unit(show: Callable[[Any], str], shown: dict[Any, str]) -> None:
    assert {value: units.show_known(show, value) for value in shown} == shown
