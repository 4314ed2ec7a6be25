"""What-if sweeps: what is read, which machine is cheapest, what the page says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hotrec.report.what_if import find_cheapest, read_predictions, write_what_if
from tests.unit.report.predictions import prediction

Document = dict[str, Any]


def write_job(folder: Path, made: Document | None, point: Document | None = None) -> None:
    folder.mkdir(parents=True)
    for file, content in (("prediction.json", made), ("point.json", point)):
        if content is not None:
            (folder / file).write_text(json.dumps(content))


def point_of(ranks: int, rate: float = 4e5) -> Document:
    overrides = {"plan.world_size": str(ranks), "placement.hot_budget_mib": "64"}
    hosts = {"num_ranks": ranks, "ranks_per_host": 8 if ranks > 8 else None, "batch_size": 2048}
    return {"overrides": overrides, **hosts, "min_samples_per_s": rate}


def test_points_are_read_and_shown(tmp_path: Path) -> None:
    """2 ranks do not fit, the last job failed, and the numbers of jobs are no texts."""
    for number, ranks in enumerate((2, 8, 16, 16), start=8):
        made: Document | None = prediction(num_ranks=ranks, ranks_per_host=min(8, ranks))
        made = {"infeasible": "hot rows need 64 MiB."} if ranks == 2 else made
        write_job(tmp_path / f"{number}", made if number < 11 else None, point_of(ranks))
    points = read_predictions(tmp_path)
    keys = ("name", "fits", "num_ranks", "num_hosts", "samples_per_s")
    assert [tuple(point.get(key) for key in keys) for point in points] == [
        ("8", False, 2, 1, None),
        *((name, True, n, n // 8, pytest.approx(2048 * n / 0.0455, rel=1e-3))
          for name, n in (("9", 8), ("10", 16))),
        ("11", False, 16, 2, None),
    ]  # fmt: skip
    text = write_what_if(points, tmp_path, 350_000)
    figures = ("job 9", "45.5 ms", "65.0 ms", "0.70x", "4.00 MB", "3.30 GB", "64 MiB")
    assert [figure for figure in figures if figure not in text] == []
    assert json.loads((tmp_path / "what_if.json").read_text())["cheapest"] == "9"
    # The fastest of them is too slow.
    assert "720," in write_what_if(points, tmp_path, 1e6)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        ({"plans": None}, "NoneType"),
        ({"chosen": "gone"}, "'gone'"),
        ({"plans": {"a": {}}}, "step_s"),
    ],
)
def test_a_broken_document_is_refused(tmp_path: Path, change: Document, got: str) -> None:
    write_job(tmp_path / "1", prediction() | {"chosen": "a"} | change, point_of(4))
    with pytest.raises(ValueError, match=f"1/prediction.json: expected .* got .*{got}"):
        read_predictions(tmp_path)


# Name, ranks, hosts and rate of points that fit.
MACHINES = [
    ("fast", 8, 1, 900.0),
    ("spread", 4, 2, 500.0),
    ("dense", 4, 1, 400.0),
    ("denser batch", 4, 1, 450.0),
    ("small", 2, 1, 100.0),
]


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        (None, "small"),  # whatever fits, so the fewest ranks
        (100.0, "small"),  # just enough is enough
        (100.1, "denser batch"),  # fewer hosts before more samples, of equals the fastest
        (460.0, "spread"),  # fewer ranks before fewer hosts
        (501.0, "fast"),
        (901.0, None),
    ],
)
def test_the_cheapest_machine(wanted: float | None, name: str | None) -> None:
    keys = ("name", "num_ranks", "num_hosts", "samples_per_s")
    points = [dict(zip(keys, values, strict=True), fits=True) for values in MACHINES]
    points.append({"name": "broken", "fits": False, "num_ranks": 1})
    for order in (points, points[::-1]):
        cheapest = find_cheapest(order, wanted)
        assert (None if cheapest is None else cheapest["name"]) == name
