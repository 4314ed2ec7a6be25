"""Jobs of a sweep: their names, their table, and the page at the sweep's end."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from hotrec.cli.report import make_report_of, run
from hotrec.cli.sweep import Sweep
from hotrec.config.roots import ReportConfig
from hotrec.report.read import read_runs
from hotrec.report.render import Page, render_text
from hotrec.report.runs import SWEEP_SECTION, make_report, report_page
from hotrec.report.sweep import choosing_quality
from tests.unit.report.golden import check_golden, check_html
from tests.unit.report.runs import SUMMARY, TORCHREC, metrics_line, write_run
from tests.unit.report.test_runs import MADE_AT

PLACEMENTS = {"coverage": SUMMARY, "torchrec": {**TORCHREC, "name": "torchrec"}}


def write_job(sweep: Path, number: int, overrides: dict[str, Any], **files: Any) -> Path:
    job = write_run(sweep / str(number), **files)
    (job / "point.json").write_text(json.dumps({"overrides": overrides}))
    return job


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two placements with two learning rates, numbered 8 to 11; the last one failed."""
    monkeypatch.chdir(tmp_path)
    folder, number = Path("sweep"), 8
    for placement, summary in PLACEMENTS.items():
        for rate in ("0.01", "0.1"):
            auc = 0.75 + float(rate) / 10
            # The validation split prefers another job than the test split.
            quality = {
                "valid": {"auc": 1.5 - auc, "log_loss": 0.4, "num_samples": 900},
                "test": {"auc": auc, "log_loss": 0.4571, "num_samples": 5000},
            }
            made = {**summary, "auc": auc, "quality": quality}
            lines = [metrics_line(step, step_p50_s=summary["step_p50_s"]) for step in range(1, 9)]
            files = {} if number == 11 else {"summary": made, "metrics": lines}
            overrides = {"experiment": "e", "placement": placement, "optimizer.learning_rate": rate}
            write_job(folder, number, overrides, **files)
            number += 1
    return folder


def report_config(sweep: Path, **settings: Any) -> ReportConfig:
    return ReportConfig(runs=[str(sweep)], **settings)


def test_golden_table(sweep: Path) -> None:
    jobs = [sweep / str(number) for number in (8, 9, 10, 11)]
    report = make_report(jobs, title="T", made_at=MADE_AT)
    check_golden("sweep.md", report.text(SWEEP_SECTION))
    report.write(sweep)
    check_html((sweep / "report.html").read_text(), report.text())
    with (sweep / "sweep.csv").open(newline="") as stream:
        records = list(csv.DictReader(stream))
    assert [record["job"] for record in records] == ["8", "9", "10", "11"]
    assert records[1]["optimizer.learning_rate"] == "0.1"
    assert float(records[1]["auc"]) == pytest.approx(0.76)
    assert (records[3]["placement"], records[3]["auc"]) == ("torchrec", "")
    assert [record["finished"] for record in records] == ["True", "True", "True", "False"]


def test_columns_are_named_by_what_differs(sweep: Path) -> None:
    document = make_report_of(report_config(sweep)).document
    assert [run["name"] for run in document["runs"]] == [
        "placement=coverage, learning_rate=0.01",
        "placement=coverage, learning_rate=0.1",
        "placement=torchrec, learning_rate=0.01",
    ]
    assert document["baseline"] == "placement=torchrec, learning_rate=0.01"


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ([{"a.x": "1", "b.x": "1"}, {"a.x": "2", "b.x": "2"}], ["a.x=1, b.x=1", "a.x=2, b.x=2"]),
        ([{"a.x": "1"}, {}], ["hot_cold (1)", "hot_cold (2)"]),  # one is of no sweep
        ([{"a.x": "1"}, {"a.x": "1"}], ["hot_cold (1)", "hot_cold (2)"]),
        ([{"a.x": "1"}, {"a.x": "1", "y": "2"}], ["hot_cold", "y=2"]),
    ],
)
def test_names(overrides: list[dict[str, str]], names: list[str], tmp_path: Path) -> None:
    jobs = [write_job(tmp_path, n, found, summary=SUMMARY) for n, found in enumerate(overrides)]
    assert [run.name for run in read_runs(jobs)] == names


def sweep_of(folder: Path, *summaries: dict[str, Any]) -> Page:
    """The page of jobs with these summaries."""
    jobs = [write_job(folder, n, {"a": n}, summary=of) for n, of in enumerate(summaries)]
    runs = read_runs(jobs)
    return report_page(runs, None, None, None, title="T", made_at=MADE_AT)


def evaluated(valid: float | None, test: float | None, **changes: Any) -> dict[str, Any]:
    """A summary with the AUC on these splits."""
    aucs = {split: auc for split, auc in (("valid", valid), ("test", test)) if auc is not None}
    quality = {split: {"auc": auc, "log_loss": 1 - auc} for split, auc in aucs.items()}
    last = list(aucs)[-1]
    return {**SUMMARY, "auc": aucs[last], "quality": quality, "eval_split": last, **changes}


def notes(page: Page) -> str:
    return " ".join(block for block in page.sections[SWEEP_SECTION] if isinstance(block, str))


def test_the_validation_split_chooses_and_the_test_split_reports(tmp_path: Path) -> None:
    page = sweep_of(tmp_path, evaluated(0.70, 0.80), evaluated(0.72, 0.75))
    best = page.tiles[0]
    assert best == ("0.7200", "highest AUC on valid", "with a=1: 0.7500 on test")
    assert "Chosen on the validation split; AUC and log loss are those of the test split." in notes(
        page
    )


@pytest.mark.parametrize(
    ("summaries", "said"),
    [
        # By the test split alone: no job is the best, and it is said why.
        ([evaluated(None, 0.8), evaluated(None, 0.7)], "A choice on the test split"),
        ([evaluated(0.8, 0.8), evaluated(None, 0.7)], "A choice on the test split"),
        # By an older program, which recorded the last split alone.
        ([SUMMARY, {**SUMMARY, "auc": 0.7}], "A choice on the test split biases"),
    ],
)
def test_what_is_chosen_by_the_test_split_is_no_result(
    tmp_path: Path, summaries: list[dict[str, Any]], said: str
) -> None:
    page = sweep_of(tmp_path, *summaries)
    assert said in notes(page)
    assert [tile for tile in page.tiles if "AUC" in tile.text] == []


def test_the_validation_split_alone_is_no_result_either(tmp_path: Path) -> None:
    page = sweep_of(tmp_path, evaluated(0.8, None), evaluated(0.7, None))
    assert "no other was evaluated" in notes(page)
    assert page.tiles[0] == ("0.8000", "highest AUC on valid", "with a=0")


def test_jobs_on_different_data_have_no_best(tmp_path: Path) -> None:
    other = {"dataset": "f" * 16, "dataset_name": "other"}
    page = sweep_of(tmp_path, evaluated(0.7, 0.8), evaluated(0.72, 0.75, **other))
    assert page.tiles == []
    assert "a=1 and a=0 are not comparable" in page.lead[0]


def test_steps_of_jobs_are_no_claim(tmp_path: Path) -> None:
    page = sweep_of(tmp_path, {**SUMMARY, "step_p50_s": 0.1}, {**TORCHREC, "step_p50_s": 0.3})
    assert "their step times are not comparable" in notes(page)
    text = render_text(page)
    assert "faster" not in text
    assert "shortest" not in text


def test_optuna_maximizes_what_chooses() -> None:
    assert choosing_quality(evaluated(0.7, 0.8))[1]["auc"] == 0.7
    split, quality = choosing_quality(evaluated(None, 0.8))
    assert (split, quality["auc"]) == ("test", 0.8)


def test_a_job_with_a_broken_point_is_named(tmp_path: Path) -> None:
    job = write_job(tmp_path, 0, {}, summary=SUMMARY)
    (job / "point.json").write_text('{"overrides": 1}')
    with pytest.raises(ValueError, match=r"0/point.json overrides: expected values by key, got 1"):
        read_runs([job])


def test_a_sweep_without_figures_is_refused(tmp_path: Path) -> None:
    write_job(tmp_path, 0, {"a": "1"})
    with pytest.raises(ValueError, match=r"expected a job with summary.json .*, got 1 that ended"):
        make_report_of(report_config(tmp_path))


def test_report_prints_the_page_as_text(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = run(report_config(sweep, output="out", text=True), Path("unused"))
    text = capsys.readouterr().err
    assert figures["page"] == Path("out/report.html")
    assert "## Side by side" in text
    assert "Grey is the rest" not in text  # the caption of a picture


@pytest.mark.parametrize(
    ("process", "mode", "is_swept"),
    [("train", "MULTIRUN", True), ("prepare", "MULTIRUN", False), ("train", "RUN", False)],
)
def test_the_page_is_written_at_the_end_of_a_sweep(
    process: str,
    mode: str,
    is_swept: bool,
    sweep: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = sweep / "8"
    (job / "point.json").unlink()
    config = OmegaConf.create(
        {
            "hydra": {
                "mode": RunMode[mode],
                "overrides": {"task": ["+placement=all_cold"]},
                "sweep": {"dir": str(sweep)},
                "runtime": {"output_dir": str(job)},
            },
        }
    )
    callback = Sweep(process)
    callback.on_job_start(config=config, task_function=lambda _: None)
    callback.on_multirun_end(config=config, config_name="config")
    written = {path.name for path in sweep.iterdir() if path.is_file()}
    assert written == ({"report.html", "report.json", "sweep.csv"} if is_swept else set())
    if is_swept:
        assert "| 8   |  all_cold |" in capsys.readouterr().err
    else:
        assert not (job / "point.json").exists()


@pytest.mark.parametrize("compare", [False, True])
def test_jobs_of_run_are_compared_by_what_they_trained(
    compare: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = Sweep("run")
    for number in (9, 10):  # in this order, though not as texts
        hydra = {
            "mode": RunMode.MULTIRUN,
            "overrides": {"task": ["data=events", f"model={number}"]},
            "sweep": {"dir": str(tmp_path)},
            "runtime": {"output_dir": str(tmp_path / str(number))},
        }
        config = OmegaConf.create({"hydra": hydra, "run": {"compare": compare}})
        trained = {"train": SUMMARY, "torchrec": TORCHREC, "counterpart": SUMMARY}
        for name, summary in [*trained.items()][: 3 if compare else 1]:
            write_run(tmp_path / str(number) / name, summary=summary)
        callback.on_job_start(config=config, task_function=lambda _: None)
    callback.on_multirun_end(config=config, config_name="config")
    with (tmp_path / "sweep.csv").open(newline="") as stream:
        records = list(csv.DictReader(stream))
    names = ["train", "torchrec", "counterpart"] if compare else ["train"]
    expected = [(f"{number}/{name}", f"{number}") for number in (9, 10) for name in names]
    assert [(record["job"], record["model"]) for record in records] == expected
    assert all(record["auc"] for record in records)
    assert [record.get("placement") for record in records][: len(names)] == (
        ["", "torchrec", "counterpart"] if compare else [None]
    )
    assert "10/train" in capsys.readouterr().err


def test_nothing_is_written_where_every_job_failed(tmp_path: Path) -> None:
    write_job(tmp_path, 0, {"a": "1"})
    hydra = {"mode": RunMode.MULTIRUN, "sweep": {"dir": str(tmp_path)}}
    Sweep("train").on_multirun_end(config=OmegaConf.create({"hydra": hydra}), config_name="config")
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
