"""The page of benchmarks/progressive.py, and how it cuts the logs."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks import progressive
from benchmarks.progressive import DRIFT, KUAIRAND_LOG, WAYS, cut_drift, cut_kuairand, write_page
from tests.policy.source import REPOSITORY


def of_way(auc: float, seconds: float) -> dict[str, dict[str, float]]:
    return {seed: {"auc": auc + int(seed) / 100, "seconds": seconds} for seed in "01"}


def test_the_page_has_means_over_seeds_and_keeps_its_conclusion(tmp_path: Path) -> None:
    measured = [
        {"day": f"2022-04-{day}", **{way: of_way(0.7, day + n) for n, way in enumerate(WAYS)}}
        for day in (26, 27, 28)
    ]
    page = tmp_path / "page.md"
    page.write_text("## Conclusion\n\nKept.\n")
    document = {"first_days": 3, "seeds": [0, 1], "num_ranks": 2, "data": {"kuairand": measured}}
    write_page(page, document)
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in page.read_text().split("\n")
    ]
    assert ["2022-04-27", *["0.7050 (0.0071)"] * 3, "27.0", "28.0", "29.0"] in rows
    assert ["after the first: mean, sum", *["0.7050"] * 3, "55.0", "57.0", "59.0"] in rows
    assert page.read_text().endswith("## Conclusion\n\nKept.\n")
    assert page.with_suffix(".png").stat().st_size > 0


def test_kuairand_is_cut_at_midnight_of_beijing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progressive, "KUAIRAND_LOG", REPOSITORY / KUAIRAND_LOG)
    days = cut_kuairand(tmp_path).days
    assert sum(len(day.path.read_bytes().splitlines()) - 1 for day in days) == 228_329
    # The bounds of conf/data/kuairand.yaml.
    assert [day.first_ms for day in days[-2:]] == [1651852800000, 1651939200000]
    assert days[-1].path.stem == "2022-05-08"


def test_the_drifting_log_has_a_file_for_each_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DRIFT, "num_train", 3_000)
    days = cut_drift(tmp_path).days
    assert [pq.read_metadata(day.path).num_rows for day in days] == [200] * 15
    assert pq.read_table(days[3].path)["time"].unique().to_pylist() == [days[3].first_ms]
