"""The table of figures: what may be recorded, how ranks are reduced, and its page."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from hotrec.runtime.figures import FIGURES, Reduce, check_declared, of_sum, over_ranks
from tests.policy.source import REPOSITORY

DOCS = REPOSITORY / "docs"


@pytest.mark.parametrize(
    ("record", "name"),
    [
        ({"auc": 0.5, "rows_per_s": 3.0}, "rows_per_s"),
        ({"cache": {"num_rows": 1, "num_guesses": 2}}, "cache.num_guesses"),
        ({"num_moved": 3}, "num_moved"),  # a part alone
    ],
)
def test_others_cannot_be_recorded(record: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^figure {name}:"):
        check_declared(record)


def test_ranks_are_reduced_as_declared() -> None:
    first = {"samples_per_s": 3.0, "stage_s": {"a": 1.0, "b": 5.0}, "peak_resident_bytes": 7}
    other = {"samples_per_s": 9.0, "stage_s": {"a": 2.0, "b": 0.0}, "peak_resident_bytes": 8}
    assert over_ranks([first, other]) == {
        "samples_per_s": 3.0,
        "stage_s": {"a": 1.5, "b": 2.5},
        "peak_resident_bytes": 8,
    }
    slowest = [{"slowest_rank_stage_s": of["stage_s"]} for of in (first, other)]
    assert over_ranks(slowest) == {"slowest_rank_stage_s": {"a": 2.0, "b": 5.0}}
    assert over_ranks([first, {**other, "stage_s": None}])["stage_s"] is None
    assert (of_sum("data_wait_s", 6.0, 4), of_sum("cache.num_rows", 6.0, 4)) == (1.5, 6.0)
    assert FIGURES["peak_resident_bytes"].over_ranks is Reduce.max
    with pytest.raises(AssertionError, match="peak_resident_bytes"):
        of_sum("peak_resident_bytes", 6.0, 4)
    with pytest.raises(AssertionError, match="ratio"):
        over_ranks([{"hot_lookup_frac": 0.5}])


def test_every_figure_is_on_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS / "_ext")
    source = [(DOCS / "figures.md").read_text()]
    importlib.import_module("figures_reference").fill(SimpleNamespace(), "figures", source)
    assert "<!--" not in source[0]
    rows = [line.strip("| ").split(" | ") for line in source[0].splitlines() if line[:3] == "| `"]
    assert [row[0].strip("`") for row in rows] == list(FIGURES)
    assert all(row[1].strip() and "{" not in row[1] for row in rows)
