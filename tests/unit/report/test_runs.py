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
from hotrec.report import plot_coverage, write_report
from hotrec.report.read import read_runs
from hotrec.report.runs import report_page
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
    assert document["runs"][1]["relative_to_baseline"]["step_p50_s"] == pytest.approx(2.0)


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


@pytest.mark.parametrize(
    ("step_s", "said"),
    [
        (0.150, r"is 2\d% to 2\d% slower than planner \(TorchRec's plan\): 150 ms a step"),
        (0.120, r"is as fast as planner \(TorchRec's plan\), within the noise: 120 ms a step"),
        (0.090, r"is 2\d% to 2\d% faster than planner \(TorchRec's plan\): 90.0 ms a step"),
    ],
)
def test_a_difference_is_named_where_it_is_one(tmp_path: Path, step_s: float, said: str) -> None:
    ours = {**SUMMARY, **COMPARED, "pipeline": "look_ahead", "step_p50_s": step_s}
    theirs = {**TORCHREC, "pipeline": "sparse_dist", "step_p50_s": 0.1205}
    other = [
        line | {"step_p50_s": 0.1205 * n} for line, n in zip(lines(1), NOISE[::-1], strict=True)
    ]
    runs = read_runs(
        [
            write_run(tmp_path / "a", ours, lines(step_s)),
            write_run(tmp_path / "b", theirs, other),
        ]
    )
    first, second = verdicts(runs, runs[1])
    assert re.match(re.escape(f"{runs[0].name} (look_ahead) ") + said, first)
    assert "predicted 100 ms (-20.0%); planner takes 120 ms." in first
    assert ("A longer trial (plan.trial_s)" in first) == ("slower" in first)
    assert second == "planner (sparse_dist): 120 ms a step."


@pytest.mark.parametrize(
    ("memory", "is_said"),
    [({"measured_host_bytes": 4e6}, True), ({"measured_host_bytes": 4e9}, False), ({}, False)],
)
def test_small_tables_are_named(tmp_path: Path, memory: dict[str, Any], is_said: bool) -> None:
    paths = [
        write_run(tmp_path / "a", SUMMARY, lines(0.3)),
        write_run(tmp_path / "b", {**TORCHREC, **memory}, lines(0.2)),
    ]
    runs = read_runs(paths)
    assert ("The tables are small (4.00 MB on the fullest rank)" in verdicts(runs, runs[1])[0]) == (
        is_said
    )


def test_what_was_not_measured_is_not_judged(tmp_path: Path) -> None:
    runs = read_runs(
        [
            write_run(tmp_path / "a", SUMMARY, lines(0.1)[:3]),
            write_run(tmp_path / "b", TORCHREC, lines(0.1)),
            write_run(tmp_path / "c", {"name": "bare"}),
        ]
    )
    short, _ = verdicts(runs, runs[1])
    assert "too few lines of metrics with equal batches to compare it with planner" in short


@pytest.mark.parametrize("shards", ["{}", '{"t0": "row_wise"}'])
def test_one_plan_is_neither_faster_nor_slower_than_itself(tmp_path: Path, shards: str) -> None:
    paths = [
        write_run(tmp_path / "a", {**TORCHREC, "name": "cost"}, lines(0.1)),
        write_run(tmp_path / "b", TORCHREC, lines(0.2)),
    ]
    for path, text in zip(paths, ("{}", shards), strict=True):
        (Path(path) / "plan.json").write_text(text)
    runs = read_runs(paths)
    first, _ = verdicts(runs, runs[1])
    assert ("trained the same plan as" in first) == (shards == "{}")
    assert ("faster" in first) == (shards != "{}")
