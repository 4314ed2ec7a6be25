"""What follows from a trial, and the record of past ones."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hotrec.planner.trial import Trial, ratio_interval, read_trial, trial_file, write_trial

LABELS = {name: f"plan {name}" for name in "abc"}


@pytest.mark.parametrize(("num_others", "num_rounds"), [(0, 6), (3, 3)])
def test_the_interval_of_a_ratio_holds_it_as_often_as_it_says(
    num_others: int, num_rounds: int
) -> None:
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        both = rng.lognormal(0, 0.3, num_rounds)  # what disturbs the machine disturbs all
        noise = both * rng.lognormal(0, 0.05, (2 + num_others, num_rounds))
        low, high = ratio_interval(noise[0], 1.1 * noise[1], *noise[2:])
        held += low <= 1.1 <= high
        assert high / low < 1.5
    assert 0.85 < held / 400 < 0.95


@pytest.mark.parametrize(
    ("block_s", "still_open", "is_decided"),
    [
        ({"a": [1.0], "b": [1.4], "c": [1.6]}, ["a", "b"], False),
        ({"a": [1.0, 1.0, 1.0], "b": [1.1, 1.1, 1.1], "c": [3.5]}, ["a"], True),
        ({"a": [1.0, 1.3, 1.0], "b": [1.1, 1.0, 1.2]}, ["a", "b"], False),
        ({"a": [2.0] * 6, "b": [2.01] * 6}, ["a", "b"], True),  # as fast, as far as it matters
    ],
)
def test_what_a_trial_knows(
    block_s: dict[str, list[float]], still_open: list[str], is_decided: bool
) -> None:
    trial = Trial(block_s, 5.0)
    assert (trial.open_candidates, trial.is_decided) == (still_open, is_decided)
    assert trial.chosen == "a"
    of_b = trial.why(LABELS).partition("; plan b ")[2].partition(";")[0]
    assert any(word in of_b for word in ("noise", "noisy")) is ("b" in still_open)
    assert "left out" in trial.why(LABELS) or "c" not in block_s or len(block_s["a"]) == 1


def test_noise_decides_nothing() -> None:
    """The first candidate is the one with the least prediction."""
    noisy = Trial({"b": [1.0, 3.0, 1.0], "a": [1.2, 1.0, 1.9], "c": [9.0, 8.0, 9.0]}, 5.0)
    assert noisy.open_candidates[0] == "a"
    assert noisy.chosen == "b"
    assert "too noisy to tell" in noisy.why(LABELS)
    quiet = Trial({"b": [1.0, 1.04, 1.0], "a": [0.9, 0.9, 0.91]}, 5.0)
    assert quiet.chosen == "a"


def test_what_did_not_take_turns_claims_nothing(tmp_path: Path) -> None:
    trial = Trial({"a": [1.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0]}, 5.0, took_turns=False)
    assert "no claim of speed" in trial.why(LABELS)
    assert "slower" not in trial.why(LABELS)
    file = trial_file(tmp_path, {"batch": 1})
    assert read_trial(file, LABELS) is None
    write_trial(trial, file)
    assert read_trial(file, LABELS) == replace(trial, is_recorded=True)
    assert trial_file(tmp_path, {"batch": 2}) != file
    # What left before the rounds was slower in its time, which others may have been, too.
    assert Trial({"a": [1.0, 4.0, 4.0], "c": [1.6]}, 5.0).chosen == "a"


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"block_s": {"a": []}, "seconds": 1}', None]
    + ['{"block_s": {"a": [1.0], "gone": [2.0]}, "seconds": 1}']
    + [json.dumps({"block_s": {"a": [step]}, "seconds": 1}) for step in (-1, "x", math.nan)],
)
def test_a_damaged_record_is_not_believed(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is what has no end."""
    file = trial_file(tmp_path, {})
    if content is None:
        file.symlink_to("/dev/zero")
    else:
        file.write_text(content)
    with caplog.at_level(logging.WARNING):
        assert read_trial(file, LABELS) is None
    assert f"{file}: expected the record of a trial" in caplog.text
