"""``report.html`` and ``report.json``: golden pages, and what they depend on."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hotrec.artifact import ArtifactError
from hotrec.report.pictures import plot_coverage
from hotrec.report.read import read_runs
from hotrec.report.runs import report_page, write_report
from hotrec.report.units import NOT_RECORDED
from hotrec.report.verdict import verdicts
from tests.unit.report.golden import check_golden, check_html, check_page, visible_text
from tests.unit.report.runs import (
    CACHE,
    COMPARED,
    MEMORY,
    SUMMARY,
    TORCHREC,
    eval_line,
    metrics_line,
    partition_content,
    profile_content,
    write_artifact,
    write_run,
    write_whole_run,
)

MADE_AT = datetime(2030, 1, 2, 3, 4, tzinfo=UTC)
DENSE = {"precision": "bf16", "compile": True, "grad_clip_norm": 0.5}
PREDICTED = {name: value for name, value in COMPARED.items() if name.startswith("predicted")}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """With everything, TorchRec's own, and too short to compare; relative paths."""
    monkeypatch.chdir(tmp_path)
    short = {**SUMMARY, **PREDICTED, "name": "<short> & 'odd'", "compared_from_step": 50}
    return [
        write_whole_run(Path("a"), {**SUMMARY, **COMPARED, **MEMORY, **DENSE, "cache": CACHE}),
        write_whole_run(Path("b"), TORCHREC),
        write_whole_run(Path("c"), short),
    ]


@pytest.fixture
def artifacts(tmp_path: Path) -> dict[str, Path]:
    profile, partition = tmp_path / "profile", tmp_path / "partition"
    profile_hash = write_artifact(profile, "profile", profile_content(), {"dataset": "d"})
    write_artifact(partition, "partition", partition_content(), {"profile": profile_hash})
    return {"profile": profile, "partition": partition}


def page_text(output: Path) -> str:
    return visible_text((output / "report.html").read_text())


@pytest.mark.slow
def test_golden_page(runs: list[Path], artifacts: dict[str, Path]) -> None:
    html = ""
    for _ in range(2):  # the second time over the first, with the same bytes
        returned = write_report(runs, Path("out"), title="T", made_at=MADE_AT, **artifacts)
        html, before = Path("out/report.html").read_text(), html
        check_golden("report.json", Path("out/report.json").read_text())
    assert html == before
    assert html.count("<svg") == 4
    assert json.loads(Path("out/report.json").read_text()) == returned
    assert sorted(path.name for path in Path("out").iterdir()) == ["report.html", "report.json"]
    read, contents = read_runs(runs), (profile_content(), partition_content())
    page = report_page(read, read[1], *contents, title="T", made_at=MADE_AT)
    check_page("report.md", page)
    check_html(html, "")
    bare = read_runs([write_run(Path("bare"), {"name": "bare"})])
    check_page("report_bare.md", report_page(bare, None, None, None, title="T", made_at=MADE_AT))


@pytest.mark.parametrize(
    ("summary", "shown"),
    [
        (
            {"sent_bytes": {"a2a": 0}, "sent_bytes_total": 0},
            "Bytes sent per step and rank: none were sent.",
        ),
        ({"cache": {**dict.fromkeys(CACHE, 0), "num_steps": 10}}, "Distinct rows 0 Misses"),
        ({**COMPARED, "predicted_stage_s": {"dense": 0.08}}, "route 0.00 ms 5.00 ms 6.00 ms -4.0%"),
    ],
)
def test_special_runs(summary: dict[str, Any], shown: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", {**SUMMARY, "bound_bytes": 0, **summary})
    document = write_report([run], tmp_path / "out")
    assert shown in page_text(tmp_path / "out")
    assert document["runs"][0]["sent_over_bound"] is None


def test_a_sampled_profile_without_partition(tmp_path: Path) -> None:
    write_artifact(tmp_path / "p", "profile", profile_content(heldout=False), {"dataset": "d"})
    write_report([write_run(tmp_path / "a", {})], tmp_path / "out", profile=tmp_path / "p")
    assert "Counted on a 5.0% sample: 1,000 samples." in page_text(tmp_path / "out")
    assert "Partition: not recorded." in page_text(tmp_path / "out")


def test_days_that_were_evaluated_ahead_are_side_by_side(tmp_path: Path) -> None:
    days = {"2024-05-01": 0.70, "2024-05-02": 0.72}
    evals = [
        {**eval_line(step, auc, "next_day"), "day": day}
        for step, (day, auc) in enumerate(days.items())
    ]
    runs = [write_run(tmp_path / n, SUMMARY, evals=evals[k:]) for k, n in enumerate("ab")]
    write_report(runs, tmp_path / "out")
    text = page_text(tmp_path / "out")
    assert f"2024-05-01 0.7000 {NOT_RECORDED} 2024-05-02 0.7200 0.7200" in text


def test_nan_is_null_in_json(tmp_path: Path) -> None:
    nan = float("nan")
    path = write_run(tmp_path / "a", {**SUMMARY, "auc": nan}, [metrics_line(1, loss=nan)])
    (run,) = write_report([path], tmp_path / "out")["runs"]
    assert (run["auc"], run["loss"]) == (None, [[1, None]])
    assert re.search(r"\bAUC nan\b", page_text(tmp_path / "out"))


def test_named_baseline(runs: list[Path], tmp_path: Path) -> None:
    document = write_report(runs, tmp_path / "out", baseline="hot_cold")
    assert document["baseline"] == "hot_cold"
    # Bytes are compared, and times are not.
    relative = document["runs"][1]["relative_to_baseline"]
    assert relative == {"sent_bytes_total": pytest.approx(15 / 4.5)}


def test_errors_leave_nothing_behind(
    runs: list[Path], artifacts: dict[str, Path], tmp_path: Path
) -> None:
    write_artifact(tmp_path / "other", "profile", profile_content(heldout=False), {"dataset": "d"})
    errors: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "expected its profile", {"partition": artifacts["partition"]}),
        (ValueError, "got no such directory", {"runs": [*runs, tmp_path / "gone"]}),
        (ValueError, "baseline: expected one of .*'hot_cold'.*, got 'x'", {"baseline": "x"}),
        (ArtifactError, "kind 'profile'", {"profile": artifacts["partition"]}),
        (ArtifactError, "made from the profile", artifacts | {"profile": tmp_path / "other"}),
    ]
    for error, words, given in errors:
        with pytest.raises(error, match=words):
            write_report(**{"runs": runs, "output": tmp_path / "out", **given})
    assert not (tmp_path / "out").exists()


def test_coverage_png(artifacts: dict[str, Path], tmp_path: Path) -> None:
    plot_coverage(artifacts["profile"], tmp_path / "deep/a.png")
    assert (tmp_path / "deep/a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ArtifactError, match="manifest of a profile"):
        plot_coverage(tmp_path / "gone", tmp_path / "c.png")


def test_report_starts_without_torch_or_pyplot() -> None:
    code = (
        "import sys, hotrec.report; "
        "print([m for m in ('torch', 'pyarrow', 'matplotlib.pyplot') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


STEPS = range(20, 200, 20)
NOISE = (1.0, 1.02, 0.99, 1.01, 1.0, 0.98, 1.03, 1.0, 0.99)


def lines(step_s: float) -> list[dict[str, object]]:
    """The first line is of a cold start, and of no account."""
    noisy = zip(STEPS, (5.0, *NOISE[1:]), strict=True)
    return [metrics_line(step, step_p50_s=step_s * factor) for step, factor in noisy]


CLAIMS = re.compile(r"faster than|slower|as fast as|% (?:faster|slower)")


@pytest.mark.parametrize("step_s", [0.150, 0.120, 0.030])
def test_two_runs_never_give_a_claim_of_speed(tmp_path: Path, step_s: float) -> None:
    """However far apart their lines are: they saw another machine each."""
    ours = {**SUMMARY, **COMPARED, "pipeline": "look_ahead", "step_p50_s": step_s}
    theirs = {**TORCHREC, "pipeline": "sparse_dist", "step_p50_s": 0.1205}
    paths = [
        write_run(tmp_path / "a", ours, lines(step_s)),
        write_run(tmp_path / "b", theirs, lines(0.1205)),
    ]
    runs = read_runs(paths)
    first, second = verdicts(runs, runs[1])
    shown = {0.150: "150 ms", 0.120: "120 ms", 0.030: "30.0 ms"}[step_s]
    ours_is = "hot_cold (hotrec, 62,840 hot rows, look_ahead)"
    assert first.startswith(f"{ours_is}: {shown} per step, predicted 100 ms (")
    theirs_is = "planner (TorchRec's planner, sparse_dist)"
    assert f"; {theirs_is} took 120 ms. Not interleaved" in first
    assert "so speed is not comparable; use hotrec compare." in first
    assert second == f"{theirs_is}: 120 ms per step."
    document = write_report(paths, tmp_path / "out")
    assert document["verdict"] == [first, second]
    text = page_text(tmp_path / "out")
    assert CLAIMS.findall(text) == []
    assert f"Step time, median {shown} 120 ms Step time" in text  # without a ratio
    assert "step_p50_s" not in document["runs"][0]["relative_to_baseline"]


def test_the_error_is_that_of_the_numbers_beside_it(tmp_path: Path) -> None:
    summary = {**SUMMARY, **COMPARED, "step_p50_s": 0.0304, "predicted_step_s": 0.0227}
    (said,) = verdicts(read_runs([write_run(tmp_path / "a", summary)]), None)
    assert (
        said == "hot_cold (hotrec, 62,840 hot rows): 30.4 ms per step, predicted 22.7 ms (-25.3%)."
    )


@pytest.mark.parametrize(
    ("ours", "shards", "said"),
    [
        ({}, "{}", "Same plan; the difference"),
        (
            {"placement": "torchrec table_wise"},
            '{"t": 1}',
            "TorchRec's own plans. Not interleaved",
        ),
        ({"placement": "hot_cold"}, '{"t": 1}', "took 248 ms. Not interleaved"),
    ],
)
def test_what_both_trained_is_said(
    tmp_path: Path, ours: dict[str, Any], shards: str, said: str
) -> None:
    paths = [
        write_run(tmp_path / "a", {**TORCHREC, "name": "cost", **ours}),
        write_run(tmp_path / "b", TORCHREC),
    ]
    for path, text in zip(paths, (shards, "{}"), strict=True):
        (path / "plan.json").write_text(text)
    runs = read_runs(paths)
    first, _ = verdicts(runs, runs[1])
    assert said in first


def test_what_run_compared_with_is_the_baseline(tmp_path: Path) -> None:
    """Even where hotrec chose a plan of TorchRec's, too."""
    table_wise = {**TORCHREC, "name": "cost", "placement": "torchrec table_wise"}
    paths = [
        write_run(tmp_path / "train", table_wise),
        write_run(tmp_path / "torchrec", {**TORCHREC, "name": "torchrec"}),
    ]
    (tmp_path / "made.json").write_text("{}")
    assert write_report(paths, tmp_path / "out")["baseline"] == "TorchRec's planner"
    named = write_report(paths, tmp_path / "out", baseline="cost")["baseline"]
    assert named == "TorchRec's table-wise plan"


GENERATION = {"dataset": "fedcba9876543210", "generation": 1}
UNLIKE: list[tuple[dict[str, Any], str]] = [
    (
        {"dataset": "fedcba9876543210", "dataset_name": "other"},
        "dataset events 01234567 vs. other fedcba98",
    ),
    (GENERATION, "dataset events 01234567 vs. events fedcba98 (generation 1)"),
    ({"eval_split": "valid"}, "split test vs. valid"),
    ({"num_eval_samples": 4999}, "number of samples evaluated 5,000 vs. 4,999"),
    (
        {"label_weights": {"click": 1.0, "buy": 2.0}},
        "labels one vs. click (weight 1), buy (weight 2)",
    ),
    ({"dataset": None}, "the dataset is not recorded for one of them"),
    ({"eval_split": None}, "the split is not recorded for one of them"),
]


@pytest.mark.parametrize(("changes", "said"), UNLIKE)
@pytest.mark.parametrize("placement", ["torchrec", "hot_cold"])
def test_what_was_not_evaluated_alike_is_not_compared(
    tmp_path: Path, changes: dict[str, Any], said: str, placement: str
) -> None:
    """With a baseline, and without one, where figures stand side by side."""
    paths = [
        write_run(tmp_path / "a", {**SUMMARY, **COMPARED}),
        write_run(tmp_path / "b", {**TORCHREC, "placement": placement, **changes}),
    ]
    document = write_report(paths, tmp_path / "out")
    (sentence,) = [one for one in document["verdict"] if "are not comparable" in one]
    ours, theirs = said.split(" vs. ") if " vs. " in said else (said, "")
    assert said in sentence or f"{theirs} vs." in sentence
    text = page_text(tmp_path / "out")
    assert sentence in text
    assert re.search(r"[+-]0\.\d{4}\b", text) is None  # no difference of quality
    if placement == "torchrec":
        assert document["runs"][0]["differs_from_baseline"] == [said]
        is_data = "dataset" in said
        assert (document["runs"][0]["relative_to_baseline"] == {}) == is_data


def test_the_same_samples_are_compared(tmp_path: Path) -> None:
    paths = [
        write_run(tmp_path / "a", SUMMARY),
        write_run(tmp_path / "b", TORCHREC),
        write_run(tmp_path / "c", {**TORCHREC, "name": "c", "auc": TORCHREC["auc"] - 1e-6}),
        write_run(tmp_path / "bare", {"name": "bare"}),  # which has nothing to compare
    ]
    document = write_report(paths, tmp_path / "out")
    assert [one for one in document["verdict"] if "are not comparable" in one] == []
    text = page_text(tmp_path / "out")
    assert "+0.0001" in text
    assert "-0.0000" not in text
    assert "+0.0000" not in text


def test_an_older_run_has_its_dataset_in_a_checkpoint(tmp_path: Path) -> None:
    old = {name: value for name, value in SUMMARY.items() if not name.startswith("dataset")}
    del old["eval_split"], old["num_eval_samples"]
    evals = [{**eval_line(300, 0.78, "valid"), "num_samples": 9}]
    evals += [{**eval_line(300, 0.78, "test"), "num_samples": 5000}]
    path = write_run(tmp_path / "a", old, evals=evals)
    checkpoint = path / "checkpoints" / "step-00000300"
    checkpoint.mkdir(parents=True)
    (checkpoint.parent / "latest").write_text("step-00000300\n")
    content = {"facts": {"dataset": SUMMARY["dataset"]}}
    (checkpoint / "manifest.json").write_text(json.dumps({"content": content}))
    new = {**TORCHREC, "dataset_name": ""}
    document = write_report([path, write_run(tmp_path / "b", new)], tmp_path / "out")
    assert document["runs"][0]["differs_from_baseline"] == []


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (None, "AUC on test, mean of 3 labels"),  # not recorded by earlier versions
        ((1.0, 1.0, 1.0), "AUC on test, mean of 3 labels"),
        ((1.0, 0.5, 1.0), "AUC on test, weighted mean of 3 labels"),
        ((0.5, 0.0, 0.5), "AUC on test, mean of 2 labels"),
        ((0.0, 1.0, 0.0), "AUC on test, label like"),
    ],
)
def test_the_card_of_several_labels_says_what_the_auc_is(
    tmp_path: Path, weights: tuple[float, ...] | None, text: str
) -> None:
    labels = ("click", "like", "follow")
    summary = {**SUMMARY, "auc_by_label": dict.fromkeys(labels, 0.7)}
    if weights is not None:
        summary["label_weights"] = dict(zip(labels, weights, strict=True))
    runs = read_runs([write_whole_run(tmp_path / "a", summary)])
    page = report_page(runs, None, None, None, title="T", made_at=MADE_AT)
    assert page.tiles[0].text == text


@pytest.mark.parametrize("quality", [{"valid": []}, {"valid": {"auc": "high"}}])
def test_a_quality_that_is_none_is_refused(tmp_path: Path, quality: dict[str, Any]) -> None:
    path = write_run(tmp_path / "a", {**SUMMARY, "quality": quality})
    with pytest.raises(ValueError, match="summary.json quality: expected numbers by name on valid"):
        read_runs([path])
