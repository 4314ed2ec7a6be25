"""Plans that took turns: what is said of them, and when nothing is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hotrec.report.compared import Comparison
from hotrec.report.read import read_runs
from hotrec.report.runs import make_report
from hotrec.report.verdict import choose_baseline, verdicts
from tests.unit.report.predictions import prediction
from tests.unit.report.runs import SUMMARY, TORCHREC, write_run

COLD = {**SUMMARY, "name": "cost", "placement": "cost", "hot_rows": 0, "hot_rows_frac": 0.0}
COLD |= {"sent_bytes": {"all_to_all": 2.2e6, "all_reduce": 0.5e6}, "sent_bytes_total": 2.7e6}
HOT = {**COLD, "placement": "coverage", "hot_rows": 1650, "hot_rows_frac": 0.039}
HOT |= {"sent_bytes": {"all_to_all": 1.7e6, "all_reduce": 0.6e6, "all_gather": 0.3e6}}
HOT |= {"sent_bytes_total": 2.6e6}
STEPS_MS = {"cold": 36.0, "planner": 45.0, "hot": 38.0}


def write_all(folder: Path, spread: float = 1.05, doubts: tuple[str, ...] = (),
              **steps_ms: float) -> list[Path]:  # fmt: skip
    """The runs, and compare.json beside them."""
    step_ms = {**STEPS_MS, **steps_ms}
    summaries = {"cold": COLD, "planner": TORCHREC, "hot": HOT}
    paths = {name: write_run(folder / name, summary) for name, summary in summaries.items()}
    plans = {
        str(path): {
            "step_s": step_ms[name] / 1e3,
            "ratios": {
                str(paths[other]): [middle, middle / spread, middle * spread]
                for other, middle in ((o, step_ms[name] / step_ms[o]) for o in paths)
            },
            "replicated_frac": 0.8 if name == "hot" else 0.0,
            "owned_fracs": [0.1, 0.1] if name == "hot" else [0.2, 0.8],
        }
        for name, path in paths.items()
    }
    document = {"seconds": 20.0, "doubts": doubts, "plans": plans}
    (folder / "compare.json").write_text(json.dumps(document))
    return [*paths.values()]


def said(folder: Path, paths: list[Path]) -> list[str]:
    runs = read_runs(paths)
    return verdicts(runs, choose_baseline(runs), Comparison.read(folder))


@pytest.mark.parametrize(
    ("steps_ms", "against", "of_hot"),
    [
        ({"hot": 30.0}, "20% less (16% to 24%)", "12% to 21% less"),
        ({"hot": 40.0}, "20% less", "6% to 17% longer"),
        ({"hot": 36.0}, "20% less", "-5% to .5%"),
        ({"planner": 30.0}, "20% more (14% to 26%)", ""),
        # The middle is less, the whole interval is not.
        ({"planner": 37.0}, "within the noise (-7%", ""),
        ({"planner": 35.0}, "within the noise (-2%", ""),
    ],
)
def test_it_says_whether_plans_pay(
    tmp_path: Path, steps_ms: dict[str, float], against: str, of_hot: str
) -> None:
    first, second = said(tmp_path, write_all(tmp_path, **steps_ms))
    assert [f for f in (against, "36.0 ms", "2.70 MB instead of 15.0 MB") if f not in first] == []
    assert re.search(of_hot, second)
    figures = ("1,650 rows (3.9%)", "80.0% of the lookups", "500 kB", "400 kB")
    assert [figure for figure in figures if figure not in second] == []


@pytest.mark.parametrize(
    ("settings", "stage"),
    [
        ({"doubts": ("They were measured beside other work.",)}, "compare"),
        ({"doubts": ("The costs are no good: calibrate again.",)}, "calibrate"),
        ({"spread": 1.3}, "compare"),
    ],
)
def test_nothing_is_claimed_where_nothing_follows(
    tmp_path: Path, settings: dict[str, Any], stage: str
) -> None:
    paths = write_all(tmp_path, **settings)
    # As `hotrec run` leaves it.
    (tmp_path / "made.json").write_text("{}")
    paths[2] = paths[2].rename(tmp_path / "counterpart")
    written = (tmp_path / "compare.json").read_text().replace('/hot"', '/counterpart"')
    (tmp_path / "compare.json").write_text(written)
    (only,) = said(tmp_path, paths)
    assert only.startswith("Inconclusive: ")
    assert f"run.from={stage}" in only
    assert "less than without" not in make_report(paths, compared=tmp_path).text()


def test_the_best_of_torchrecs_in_the_trial_is_said(tmp_path: Path) -> None:
    """Not only what is easiest to beat."""
    paths = write_all(tmp_path)
    plans = {
        "hot_cold base": {"step_s": 0.02, "slower": [1.0, 1.0]},
        "torchrec planner": {"step_s": 0.025, "slower": [1.2, 1.3]},
        "torchrec hand_tuned": {"step_s": 0.021, "slower": [1.01, 1.11]},
    }
    document = prediction() | {"chosen": "hot_cold base"}
    document["plans"] |= {"hot_cold base": {**document["plans"]["hot_cold"], "hot_rows": 0}}
    for took_turns in (True, False):
        document["trial"] = {"plans": plans, "took_turns": took_turns}
        (paths[0] / "prediction.json").write_text(json.dumps(document))
        last = said(tmp_path, paths)[-1]
        figures = ("hand-tuned", "21.0 ms", "20.0 ms (1% to 11% longer)", "14.5 MB")
        assert [figure in last for figure in figures] == [took_turns] * 4


def test_the_headline_is_that_of_the_chosen_plan(tmp_path: Path) -> None:
    """Of the first run, also where that is the baseline."""
    paths = write_all(tmp_path)
    for runs, step, ratio in ((paths, "36.0 ms", "-24% to -16%"), (paths[1:], "45.0 ms", "+13%")):
        first = make_report(runs, compared=tmp_path).values["tiles"][0]
        assert (first.figure, ratio in first.note) == (step, True)


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"plans": {"a": 1}, "doubts": []}'])
def test_what_compare_did_not_write_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "compare.json").write_text(text)
    with pytest.raises(ValueError, match=r"compare\.json.*: expected .*got"):
        Comparison.read(tmp_path)
