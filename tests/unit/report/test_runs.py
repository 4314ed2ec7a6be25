"""``report.html`` and ``report.json``: their figures, and what may be compared."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hotrec.report.runs import make_report
from hotrec.report.units import NOT_RECORDED
from tests.unit.report.pages import check_html, visible_text
from tests.unit.report.runs import (
    CACHE,
    COMPARED,
    PROFILE,
    SPLIT,
    SUMMARY,
    TORCHREC,
    eval_line,
    metrics_line,
    write_artifact,
    write_run,
    write_whole_run,
)

MADE_AT = datetime(2030, 1, 2, 3, 4, tzinfo=UTC)
# Lines of the page, as they are titled, with the cells of the two runs.
SHOWN = {
    "Dataset": ("events", "events"),
    "Ranks": ("2", "2"),
    "AUC": ("0.7812 +0.0001", "0.7812"),
    "Step time, median": ("124 ms", "248 ms"),  # without a ratio
    "Samples, all ranks": ("33,000 /s", "33,000 /s"),
    "Step time, predicted": ("100 ms", NOT_RECORDED),
    "dense, predicted": ("80.0 ms", NOT_RECORDED),
    "dense, measured": ("95.0 ms", NOT_RECORDED),
    "dense, on its slowest rank": ("97.0 ms", NOT_RECORDED),
    "Error of the step time": ("-20.0%", NOT_RECORDED),
    "Bytes sent": ("4.50 MB 0.30x", "15.0 MB"),
    "Hot rows": ("62,840", "0"),
    "Hit rate, of distinct rows": ("87.5%", NOT_RECORDED),
    "Read over the bus": ("320 kB", NOT_RECORDED),
}


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    ours = {**SUMMARY, **COMPARED, "name": "<ours> & 'odd'", "cache": CACHE}
    return [write_whole_run(tmp_path / "a", ours), write_whole_run(tmp_path / "b", TORCHREC)]


@pytest.fixture
def artifacts(tmp_path: Path) -> dict[str, Path]:
    profile, partition = tmp_path / "profile", tmp_path / "partition"
    made_from = {"profile": write_artifact(profile, "profile", PROFILE, {"dataset": "d"})}
    write_artifact(partition, "partition", SPLIT, made_from)
    return {"profile": profile, "partition": partition}


def write_report(runs: list[Path], output: Path, **settings: Any) -> dict[str, Any]:
    report = make_report(runs, **settings)
    report.write(output)
    return report.document


def page_text(output: Path) -> str:
    return visible_text((output / "report.html").read_text())


@pytest.mark.slow
def test_page_and_document_hold_the_figures(
    runs: list[Path], artifacts: dict[str, Path], tmp_path: Path
) -> None:
    made = [make_report(runs, title="T", made_at=MADE_AT, **artifacts) for _ in range(2)]
    for number, report in enumerate(made):
        report.write(tmp_path / f"{number}")
    files = [{file.name: file.read_bytes() for file in (tmp_path / n).iterdir()} for n in "01"]
    assert files[0] == files[1]
    assert files[0].keys() == {"report.html", "report.json"}
    text, html = made[0].text(), files[0]["report.html"].decode()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    found = {line[0]: tuple(line[1:]) for line in lines if len(line) == 3}
    assert SHOWN.items() <= found.items()
    assert ["user", "80", "8", "10.0%", "2.08 kB", "81.2%", "70.0%", "260 B"] in lines
    check_html(html, text)
    assert html.count("<svg") == 4
    document = json.loads(files[0]["report.json"])
    ours, theirs = document["runs"]
    for run, summary in ((ours, {**SUMMARY, **COMPARED}), (theirs, TORCHREC)):
        assert {k: v for k, v in summary.items() if k in run and k != "name"}.items() <= run.items()
    assert (document["baseline"], ours["name"]) == ("planner", "<ours> & 'odd'")
    assert ours["relative_to_baseline"] == {"sent_bytes_total": pytest.approx(0.3)}
    assert ours["sent_over_bound"] == pytest.approx(4.5 / 4)
    assert [pair[0] for pair in ours["auc_by_split"]["valid"]] == [150, 300]


def test_what_was_not_recorded_or_sent_is_said(tmp_path: Path) -> None:
    nan, nothing = float("nan"), {"sent_bytes": {"a2a": 0}, "sent_bytes_total": 0, "bound_bytes": 0}
    days = {"2024-05-01": 0.70, "2024-05-02": 0.72}
    evals = [
        {**eval_line(step, auc, "next_day"), "day": day}
        for step, (day, auc) in enumerate(days.items())
    ]
    lines = [metrics_line(1, loss=nan)]
    odd = write_run(tmp_path / "a", {**SUMMARY, **nothing, "auc": nan}, lines, evals)
    document = write_report([odd, write_run(tmp_path / "b", {}, evals=evals[1:])], tmp_path / "out")
    run, _ = document["runs"]
    assert (run["auc"], run["loss"], run["sent_over_bound"]) == (None, [[1, None]], None)
    text = page_text(tmp_path / "out")
    assert re.search(r"\bAUC nan\b", text)
    # Days that were evaluated ahead are side by side.
    assert f"AUC of 2024-05-01 0.7000 {NOT_RECORDED} AUC of 2024-05-02 0.7200 0.7200" in text


def test_errors_leave_nothing_behind(
    runs: list[Path], artifacts: dict[str, Path], tmp_path: Path
) -> None:
    write_artifact(tmp_path / "other", "profile", PROFILE, {"dataset": "e"})
    errors: list[tuple[str, dict[str, Any]]] = [
        ("profile", {"partition": artifacts["partition"]}),
        ("gone: expected", {"runs": [*runs, tmp_path / "gone"]}),
        ("kind 'profile'", {"profile": artifacts["partition"]}),
        ("made from the profile", artifacts | {"profile": tmp_path / "other"}),
    ]
    for words, given in errors:
        with pytest.raises(ValueError, match=words):
            write_report(**{"runs": runs, "output": tmp_path / "out", **given})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("step_s", [0.150, 0.120, 0.030])
def test_two_runs_never_give_a_claim_of_speed(tmp_path: Path, step_s: float) -> None:
    """However far apart their lines are: they saw another machine each."""
    paths = [
        write_run(path, {**summary, "step_p50_s": s}, [metrics_line(20, step_p50_s=s)])
        for path, summary, s in (
            (tmp_path / "a", {**SUMMARY, **COMPARED}, step_s),
            (tmp_path / "b", TORCHREC, 0.1205),
        )
    ]
    document = write_report(paths, tmp_path / "out")
    first, second = document["verdict"]
    assert "speed is not comparable" in first
    assert f"({0.1 / step_s - 1:+.1%})" in first  # the error of the prediction beside it
    assert "120 ms" in second
    text = " ".join([page_text(tmp_path / "out"), first, second])
    assert re.findall(r"faster|slower|as fast as", text) == []
    assert "step_p50_s" not in document["runs"][0]["relative_to_baseline"]


OTHER = {"dataset": "fedcba9876543210"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({**OTHER, "generation": 1}, "events fedcba98 (generation 1)"),
        ({"eval_split": "valid"}, "split test vs. valid"),
        ({"num_eval_samples": 4999}, "5,000 vs. 4,999"),
        ({"label_weights": {"click": 1.0, "buy": 2.0}}, "click (weight 1), buy (weight 2)"),
        ({"eval_split": None}, "split"),
        ({}, None),
    ],
)
def test_what_was_not_evaluated_alike_is_not_compared(
    tmp_path: Path, changes: dict[str, Any], said: str | None
) -> None:
    theirs = {**TORCHREC, **changes}
    paths = [write_run(tmp_path / "a", SUMMARY), write_run(tmp_path / "b", theirs)]
    document = write_report(paths, tmp_path / "out")
    differs = document["runs"][0]["differs_from_baseline"]
    assert len(differs) == (said is not None)
    assert said is None or said in differs[0]
    quality = re.search(r"[+-]0\.\d{4}\b", page_text(tmp_path / "out"))  # a difference of quality
    assert (quality is None) == (said is not None)
    assert any("not comparable" in one and (said or "?") in one for one in document["verdict"]) == (
        said is not None
    )
    is_of_data = bool({"dataset"} & changes.keys())
    assert (document["runs"][0]["relative_to_baseline"] == {}) == is_of_data
