"""Tables cut to memory, and the table of costs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hotrec.calibrate.workload import cut_tables


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=30), st.integers(1, 100_000))
def test_tables_are_cut_to_one_height(rows: list[int], most: int) -> None:
    cut = cut_tables(rows, most)
    assert all(1 <= after <= before for after, before in zip(cut, rows, strict=True))
    assert sum(cut) <= max(most, len(rows))
    height = max(cut)
    assert all(after in (before, height) for after, before in zip(cut, rows, strict=True))
    if sum(rows) <= most:
        assert cut == rows
    else:
        assert sum(cut) > most - len(rows) or max(cut) == 1  # no memory is left idle
