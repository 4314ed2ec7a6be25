"""Plans that took turns: what is said of them, and when nothing is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hotrec.report.compared import Comparison, Ratio
from hotrec.report.read import read_runs
from hotrec.report.runs import make_report
from hotrec.report.verdict import choose_baseline, verdicts
from tests.unit.report.predictions import prediction
from tests.unit.report.runs import SUMMARY, TORCHREC, write_run

COLD = {**SUMMARY, "name": "cost", "placement": "cost", "hot_rows": 0, "hot_rows_frac": 0.0}
COLD |= {"sent_bytes": {"all_to_all": 2.2e6, "all_reduce": 0.5e6}, "sent_bytes_total": 2.7e6}
HOT = {**COLD, "placement": "coverage", "hot_rows": 1650, "hot_rows_frac": 0.039}
HOT |= {"sent_bytes": {"all_to_all": 1.7e6, "all_reduce": 0.9e6}, "sent_bytes_total": 2.6e6}
STEPS_MS = {"cold": 36.0, "planner": 45.0, "hot": 38.0}


def write_all(folder: Path, spread: float = 1.05, doubts: tuple[str, ...] = (),
              chosen: dict[str, Any] | None = None, **steps_ms: float) -> list[Path]:  # fmt: skip
    """The runs, and compare.json beside them."""
    step_ms = {**STEPS_MS, **steps_ms}
    summaries = {"cold": {**COLD, **(chosen or {})}, "planner": TORCHREC, "hot": HOT}
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
        ({"hot": 30.0}, "20% less (16% to 24%)", "Hot rows pay here: .* 12% to 21% less"),
        ({"hot": 40.0}, "20% less", "do not pay here: .* 6% to 17% longer"),
        ({"hot": 36.0}, "20% less", "change little here: .*-5% to .5%"),
        ({"planner": 30.0}, "20% more (14% to 26%)", ""),
        ({"planner": 36.0}, "as fast within the noise (-5%", ""),
    ],
)
def test_it_says_whether_plans_pay(
    tmp_path: Path, steps_ms: dict[str, float], against: str, of_hot: str
) -> None:
    first, second = said(tmp_path, write_all(tmp_path, **steps_ms))
    assert against in first
    for figure in ("36.0 ms", "2.70 MB instead of 15.0 MB"):
        assert figure in first
    assert re.search(of_hot, second)
    for figure in ("1,650 rows (3.9%)", "80.0% of the lookups", "500 kB", "400 kB"):
        assert figure in second


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
    (only,) = said(tmp_path, paths)
    assert only.startswith("Inconclusive: ")
    # As `hotrec run` leaves it.
    (tmp_path / "made.json").write_text("{}")
    paths[2] = paths[2].rename(tmp_path / "counterpart")
    written = (tmp_path / "compare.json").read_text().replace('/hot"', '/counterpart"')
    (tmp_path / "compare.json").write_text(written)
    (only,) = said(tmp_path, paths)
    assert f"run.from={stage}" in only
    page = make_report(paths, compared=tmp_path).text()
    assert "less than without" not in page


def test_two_plans_of_torchrec_are_not_told_apart(tmp_path: Path) -> None:
    """What hotrec chose is TorchRec's, too: hot rows are beside it."""
    paths = write_all(tmp_path, chosen={"placement": "torchrec hand_tuned"}, cold=20.0)
    first, second = said(tmp_path, paths)
    assert "ms" not in first
    assert "16% less" in second
    chosen, against = said(tmp_path, paths[1:])
    assert "ms" not in chosen
    assert "16% less" in against


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


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", '{"plans": {"a": 1}, "doubts": []}'])
def test_what_compare_did_not_write_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "compare.json").write_text(text)
    with pytest.raises(ValueError, match=r"compare\.json.*: expected .*got"):
        Comparison.read(tmp_path)


@pytest.mark.parametrize(
    ("ratio", "size", "is_less", "is_more"),
    [
        (Ratio(0.8, 0.75, 0.86), "14% to 25%", True, False),
        (Ratio(0.95, 0.9, 1.01), None, False, False),
        (Ratio(1.05, 0.99, 1.1), None, False, False),
        (Ratio(1.2, 1.1, 1.3), "10% to 30%", False, True),
        (Ratio(0.9, 0.899, 0.901), "10%", True, False),
    ],
)
def test_an_interval_is_read_as_a_whole(
    ratio: Ratio, size: str | None, is_less: bool, is_more: bool
) -> None:
    assert (ratio.is_less, ratio.is_more) == (is_less, is_more)
    assert size is None or ratio.size == size
