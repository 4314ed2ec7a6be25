"""The lengths that the benchmark of balance by tokens draws, and its page."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import token_balance
from benchmarks.yambda_like import MAX_EVENTS
from tests.unit.data.logs import write_dataset


def test_lengths_are_those_of_the_reference() -> None:
    rng = np.random.default_rng(0)
    of_users = token_balance.draw_events(rng, 100_000, by_size=False)
    assert np.median(of_users) == pytest.approx(2695, rel=0.02)
    assert of_users.mean() == pytest.approx(4763, rel=0.02)
    # In proportion to the number: the mean of the squares over the mean.
    by_size = token_balance.draw_events(rng, 100_000, by_size=True)
    squares = (of_users.astype(np.float64) ** 2).mean()
    assert by_size.mean() == pytest.approx(squares / of_users.mean(), rel=0.02)
    assert by_size.max() <= MAX_EVENTS
    # DLRMv4 has 2,663 events a sample in the mean, and 9 other tokens.
    assert token_balance.draw_by_user(rng, 50_000).mean() == pytest.approx(2672, rel=0.05)
    assert token_balance.take_pools(np.array([0, 10**6])).tolist() == [9, 4095]


def test_the_page_has_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    words = ["--ranks", "2", "8", "--batch-sizes", "16", "--num-batches", "3"]
    token_balance.main([*words, "--page", str(page)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(of["kind"], of["num_ranks"]) for of in found] == [
        (kind, ranks) for kind in token_balance.KINDS for ranks in (2, 8)
    ]
    for of in found:
        assert 1 <= of["balanced"] < of["equal"] <= of["worst_equal"]
        assert of["saved_frac"] == pytest.approx(1 - of["balanced"] / of["equal"])
    assert page.read_text().count("\n| ") == 3 * (2 + 2)


def test_owners_save_bytes_at_the_same_work(tmp_path: Path) -> None:
    write_dataset(tmp_path / "d", {"train": 4096})
    found = token_balance.count_rows(tmp_path / "d", "bag", 2)
    assert len(found) == 4 * len(token_balance.CASES)
    for as_read, by_owner, by_tokens, by_both in zip(*[iter(found)] * 4, strict=True):
        assert as_read["bytes_frac"] == 1
        assert by_both["busiest"] == by_tokens["busiest"] < as_read["busiest"]
        assert by_owner["bytes_frac"] < by_both["bytes_frac"] < min(1, by_tokens["bytes_frac"])
