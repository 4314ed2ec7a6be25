"""Plans that took turns: what is said of them, and when nothing is."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hotrec.report.compared import Comparison, Ratio
from hotrec.report.read import read_runs
from hotrec.report.render import Table
from hotrec.report.runs import make_report
from hotrec.report.verdict import choose_baseline, verdicts
from tests.unit.report.predictions import prediction
from tests.unit.report.runs import SUMMARY, TORCHREC, write_run

MADE_AT = datetime(2026, 11, 24, 12, 0, tzinfo=UTC)
COLD = {
    **SUMMARY,
    "name": "cost",
    "placement": "cost",
    "hot_rows": 0,
    "hot_rows_frac": 0.0,
    "sent_bytes": {"all_to_all": 2.2e6, "all_reduce": 0.5e6},
    "sent_bytes_total": 2.7e6,
}
HOT = {
    **COLD,
    "placement": "coverage",
    "hot_rows": 1650,
    "hot_rows_frac": 0.039,
    "sent_bytes": {"all_to_all": 1.7e6, "all_reduce": 0.9e6},
    "sent_bytes_total": 2.6e6,
}
PLANNER = {**TORCHREC, "name": "torchrec", "sent_bytes_total": 11.2e6}
STEPS_MS = {"cold": 36.0, "planner": 45.0, "hot": 38.0}
SPREAD = 1.05


def write_all(
    folder: Path,
    steps_ms: dict[str, float] | None = None,
    spread: float = SPREAD,
    doubts: tuple[str, ...] = (),
    chosen: dict[str, Any] | None = None,
) -> list[Path]:
    """The runs, and compare.json beside them."""
    steps_ms = {**STEPS_MS, **(steps_ms or {})}
    summaries = {"cold": {**COLD, **(chosen or {})}, "planner": PLANNER, "hot": HOT}
    paths = {name: write_run(folder / name, summary) for name, summary in summaries.items()}

    def ratios(name: str) -> dict[str, list[float]]:
        middles = {other: steps_ms[name] / steps_ms[other] for other in paths}
        return {str(paths[o]): [m, m / spread, m * spread] for o, m in middles.items()}

    plans = {
        str(path): {
            "step_s": steps_ms[name] / 1e3,
            "ratios": ratios(name),
            "replicated_frac": 0.8 if name == "hot" else 0.0,
            "owned_fracs": [0.1, 0.1] if name == "hot" else [0.2, 0.8],
        }
        for name, path in paths.items()
    }
    document = {"seconds": 20.0, "doubts": doubts, "plans": plans}
    (folder / "compare.json").write_text(json.dumps(document))
    return [*paths.values()]


def said(folder: Path, **settings: Any) -> list[str]:
    runs = read_runs(write_all(folder, **settings))
    return verdicts(runs, choose_baseline(runs), Comparison.read(folder))


THEY = "they take 500 kB from the all-to-all and add 400 kB to the all-reduce of each rank and step"
ROWS = (
    "with the 1,650 rows (3.9%) that serve 80.0% of the lookups copied to every rank, a step takes"
)


@pytest.mark.parametrize(
    ("hot_ms", "text"),
    [
        (30.0, f"Hot rows pay here: {ROWS} 12% to 21% less than without; {THEY}."),
        (40.0, f"Hot rows do not pay here: {ROWS} 6% to 17% longer than without; {THEY}. See "),
        (36.0, f"Hot rows change little here: {ROWS} as long as without (-5% to +5%); {THEY}. Se"),
    ],
)
def test_it_says_whether_hot_rows_pay(tmp_path: Path, hot_ms: float, text: str) -> None:
    first, second = said(tmp_path, steps_ms={"hot": hot_ms})
    assert first == (
        "Chosen: hotrec, no hot rows. A step takes 36.0 ms, with TorchRec's planner 45.0 ms: 20% "
        "less (16% to 24%). It sends 2.70 MB instead of 11.2 MB."
    )
    assert second.startswith(text)


@pytest.mark.parametrize(
    ("planner_ms", "text"),
    [(30.0, "20% more (14% to 26%)."), (36.0, "as fast within the noise (-5%")],
)
def test_a_planner_that_is_faster_is_called_so(
    tmp_path: Path, planner_ms: float, text: str
) -> None:
    assert text in said(tmp_path, steps_ms={"planner": planner_ms})[0]


@pytest.mark.parametrize(
    ("settings", "why", "stage"),
    [
        ({"doubts": ("They were measured beside other work.",)}, "they were measured", "compare"),
        ({"doubts": ("The costs are no good: calibrate again.",)}, "the costs are", "calibrate"),
        ({"spread": 1.3}, "their blocks of steps disagree (-38% to +4%).", "compare"),
    ],
)
def test_nothing_is_claimed_where_nothing_follows(
    tmp_path: Path, settings: dict[str, Any], why: str, stage: str
) -> None:
    (only,) = said(tmp_path, **settings)
    assert only.startswith(f"Inconclusive: {why}")
    assert only.endswith("Repeat the command on a quiet machine.")
    # As `hotrec run` leaves it.
    (tmp_path / "made.json").write_text("{}")
    (tmp_path / "hot").rename(tmp_path / "counterpart")
    written = (tmp_path / "compare.json").read_text().replace('/hot"', '/counterpart"')
    (tmp_path / "compare.json").write_text(written)
    paths = [tmp_path / name for name in ("cold", "planner", "counterpart")]
    runs = read_runs(paths)
    (only,) = verdicts(runs, choose_baseline(runs), Comparison.read(tmp_path))
    assert only.endswith(f"on a quiet machine, with run.from={stage}.")
    page = make_report(paths, compared=tmp_path, made_at=MADE_AT).text()
    assert "less than without" not in page


def test_two_plans_of_torchrec_are_not_told_apart(tmp_path: Path) -> None:
    """What hotrec chose is TorchRec's, too: hot rows are beside it."""
    chosen = {"placement": "torchrec hand_tuned", "name": "cost"}
    first, second = said(tmp_path, chosen=chosen, steps_ms={"cold": 20.0})
    assert first == (
        "TorchRec's hand-tuned plan was chosen. It and TorchRec's planner are both TorchRec's own "
        "plans: no speed comparison."
    )
    assert second.startswith(
        "hotrec, 1,650 hot rows. A step takes 38.0 ms, with TorchRec's planner 45.0 ms: 16% less"
    )


def test_the_planner_may_be_what_was_chosen(tmp_path: Path) -> None:
    _, planner, hot = write_all(tmp_path, steps_ms={"hot": 60.0})
    runs = read_runs([planner, hot])
    chosen, against = verdicts(runs, choose_baseline(runs), Comparison.read(tmp_path))
    assert chosen == "Chosen: TorchRec's planner."
    assert against.startswith("hotrec, 1,650 hot rows. A step takes 60.0 ms, with TorchRec's")
    assert "33% more (27% to 40%)" in against


def test_the_best_of_torchrecs_in_the_trial_is_said(tmp_path: Path) -> None:
    """Not only what is easiest to beat."""
    paths = write_all(tmp_path)
    plans = {
        "hot_cold base": {"step_s": 0.02, "slower": [1.0, 1.0]},
        "torchrec planner": {"step_s": 0.025, "slower": [1.2, 1.3]},
        "torchrec hand_tuned": {"step_s": 0.021, "slower": [1.01, 1.11]},
    }
    trial = {"plans": plans, "took_turns": True}
    document = prediction() | {"chosen": "hot_cold base", "trial": trial}
    document["plans"] |= {"hot_cold base": {**document["plans"]["hot_cold"], "hot_rows": 0}}
    (paths[0] / "prediction.json").write_text(json.dumps(document))
    runs = read_runs(paths)
    *_, last = verdicts(runs, choose_baseline(runs), Comparison.read(tmp_path))
    assert last == (
        "TorchRec's hand-tuned plan, the best of TorchRec's in the trial before the run, took 21.0 "
        "ms per step where the chosen plan took 20.0 ms (1% to 11% longer), and is predicted to "
        "send 14.5 MB."
    )
    document["trial"]["took_turns"] = False
    (paths[0] / "prediction.json").write_text(json.dumps(document))
    assert "trial" not in " ".join(verdicts(runs, choose_baseline(runs), Comparison.read(tmp_path)))


def test_the_page_begins_with_the_plans(tmp_path: Path) -> None:
    report = make_report(write_all(tmp_path), compared=tmp_path, made_at=MADE_AT)
    titles = [title for title, blocks in report.page.sections.items() if blocks]
    assert titles[0] == "Plans"
    table = report.page.sections["Plans"][0]
    assert isinstance(table, Table)
    rows = [[cell if isinstance(cell, str) else cell.text for cell in row] for row in table.rows]
    assert rows[0][:5] == ["hotrec, no hot rows", "36.0 ms", "-24% to -16%", "0.7812", "2.70 MB"]
    assert rows[0][5:] == ["0", "50.0%", "1.60x"]
    assert rows[1][1:3] == ["45.0 ms", ""]
    assert rows[2][4:] == ["2.60 MB", "1,650", "90.0%", "1.00x"]
    step, _, owner, auc = report.page.tiles
    assert step.note == "-24% to -16% vs. TorchRec's planner; less is better"
    assert (owner.figure, owner.note) == ("1.60x", "1.60x with TorchRec's planner; less is better")
    assert auc.text == "AUC on test"
    assert "step_p50_s" not in json.dumps(report.document["runs"][0]["relative_to_baseline"])


def test_a_comparison_of_other_runs_says_nothing(tmp_path: Path) -> None:
    write_all(tmp_path / "a")
    other = [write_run(tmp_path / "b", COLD), write_run(tmp_path / "c", PLANNER)]
    report = make_report(other, compared=tmp_path / "a", made_at=MADE_AT)
    assert report.document["verdict"] == []


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"plans": {"a": 1}, "doubts": []}'])
def test_what_compare_did_not_write_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "compare.json").write_text(text)
    with pytest.raises(ValueError, match=r"compare\.json.*: expected .*got"):
        Comparison.read(tmp_path)


def test_an_interval_is_written_from_its_lesser_end() -> None:
    assert Ratio(0.8, 0.75, 0.86).size == "14% to 25%"
    for ratio, is_less, is_more in (
        (Ratio(0.8, 0.75, 0.86), True, False),
        (Ratio(0.95, 0.9, 1.01), False, False),
        (Ratio(1.05, 0.99, 1.1), False, False),
        (Ratio(1.2, 1.1, 1.3), False, True),
    ):
        assert (ratio.is_less, ratio.is_more) == (is_less, is_more)
    assert Ratio(1.2, 1.1, 1.3).size == "10% to 30%"
    assert Ratio(0.9, 0.899, 0.901).size == "10%"
    assert math.isclose(Ratio(1.0, 0.9, 1.1).low, 0.9)
