"""Jobs of a sweep: their names, their table, and the page at the sweep's end."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from hotrec.cli.report import make_report_of
from hotrec.config.roots import ReportConfig
from hotrec.report.runs import make_report
from tests.unit.report.pages import check_html
from tests.unit.report.runs import SUMMARY, write_run


def evaluated(valid: float | None, test: float | None, **changes: Any) -> dict[str, Any]:
    """A summary with the AUC on these splits."""
    aucs = {split: auc for split, auc in (("valid", valid), ("test", test)) if auc is not None}
    quality = {split: {"auc": auc, "log_loss": 1 - auc} for split, auc in aucs.items()}
    last = list(aucs)[-1]
    return {**SUMMARY, "auc": aucs[last], "quality": quality, "eval_split": last, **changes}


def write_job(folder: Path, number: int, overrides: dict[str, Any], **files: Any) -> Path:
    job = write_run(folder / str(number), **files)
    (job / "point.json").write_text(json.dumps({"overrides": overrides}))
    return job


def read_csv(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_jobs_are_numbered_and_named_by_what_differs(tmp_path: Path) -> None:
    """The last of them failed."""
    for number, placement in enumerate(("coverage", "coverage", "torchrec", "torchrec"), start=8):
        summary = evaluated(0.7, (70 + number) / 100, placement=placement, name=placement)
        overrides = {"placement": placement, "optimizer.learning_rate": f"0.{number % 2 + 1}"}
        files = {} if number == 11 else {"summary": summary}
        write_job(tmp_path, number, {"experiment": "e", **overrides}, **files)
    report = make_report([tmp_path / f"{number}" for number in range(8, 12)])
    report.write(tmp_path)
    check_html((tmp_path / "report.html").read_text(), report.text())
    records = read_csv(tmp_path)
    assert [record["job"] for record in records] == ["8", "9", "10", "11"]
    assert [record["auc"] for record in records] == ["0.78", "0.79", "0.8", ""]
    assert [record["optimizer.learning_rate"] for record in records] == ["0.1", "0.2"] * 2
    assert [record["finished"] for record in records] == ["True"] * 3 + ["False"]
    document = make_report_of(ReportConfig(runs=[str(tmp_path)])).document
    names = [f"placement={of}" for of in ("coverage, learning_rate=0.1",
             "coverage, learning_rate=0.2", "torchrec, learning_rate=0.1")]  # fmt: skip
    assert [run["name"] for run in document["runs"]] == names
    assert document["baseline"] == names[2]


OTHER_DATA = {"dataset": "f" * 16, "dataset_name": "other"}


@pytest.mark.parametrize(
    ("summaries", "best"),
    [
        # The validation split chooses, and the test split reports.
        ([evaluated(0.70, 0.80), evaluated(0.72, 0.75)], ("0.7200", "a=1", "0.7500 on test")),
        ([evaluated(0.8, None), evaluated(0.7, None)], ("0.8000", "a=0", "")),
        # By the test split alone no job is the best, nor on other data.
        ([evaluated(0.8, 0.8), evaluated(None, 0.7)], None),
        ([evaluated(0.7, 0.8), evaluated(0.72, 0.75, **OTHER_DATA)], None),
    ],
)
def test_the_validation_split_chooses(
    tmp_path: Path, summaries: list[dict[str, Any]], best: tuple[str, ...] | None
) -> None:
    jobs = [write_job(tmp_path, n, {"a": n}, summary=of) for n, of in enumerate(summaries)]
    tiles = [tile for tile in make_report(jobs).values["tiles"] if "AUC" in tile.text]
    assert len(tiles) == (best is not None)
    assert best is None or tiles[0].figure == best[0]
    assert all(text in tiles[0].note for text in (best or ())[1:])


def test_nothing_is_said_where_every_job_failed(tmp_path: Path) -> None:
    write_job(tmp_path, 0, {"a": "1"})
    with pytest.raises(ValueError, match=r"expected .*summary\.json.*, got 1 "):
        make_report_of(ReportConfig(runs=[str(tmp_path)]))
