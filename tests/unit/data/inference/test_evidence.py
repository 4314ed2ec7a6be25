"""What makes one ask whether a column is known before the click, and what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from hotrec.data import sample as sampling
from hotrec.data.inference.evidence import suspicion_of
from hotrec.data.inference.spec import infer
from hotrec.data.sample import read_sample
from tests.unit.data.inference.logs import CLICKS, ITEMS, NUM, PRICES, USERS, look

SAMPLE = Path(__file__).parents[4] / "samples/kuairand_pure/log_standard_val_test.tsv.zst"
RNG = np.random.default_rng(3)
BOUGHT = CLICKS & (RNG.random(NUM) < 0.1)


@pytest.mark.parametrize(
    ("values", "are_ids", "expected"),
    [
        (np.where(CLICKS, RNG.exponential(30, NUM), 0), False, "alone: AUC 1.00"),
        (np.where(CLICKS, 0, PRICES), False, "alone: AUC 1.00"),
        (1 - CLICKS.astype(np.int64), True, "alone: AUC 1.00"),
        (pa.array(np.arange(NUM), mask=~CLICKS), True, "alone: AUC 1.00"),
        (pa.array([[1, 2] if hit else [] for hit in CLICKS]), True, "alone: AUC 1.00"),
        (pa.array(np.arange(NUM), pa.timestamp("s"), mask=~CLICKS), True, "alone: AUC 1.00"),
        (BOUGHT.astype(np.int64), True, f"alone: all of {BOUGHT.sum()} rows with '1' are 1"),
        (np.where(BOUGHT, PRICES, 0), False, f"alone: all of {BOUGHT.sum()} rows above 0 are 1"),
        (pa.array(["paid"] * NUM, mask=~BOUGHT), True, f"alone: all of {BOUGHT.sum()} rows"),
        (USERS, True, ""),
        (ITEMS, True, ""),
        (PRICES, False, ""),
        (np.arange(NUM), True, ""),
        (pa.array([f"s{place}" for place in range(NUM)]), True, ""),
    ],
)  # fmt: skip
def test_leaks(values: Any, are_ids: bool, expected: str) -> None:
    found = suspicion_of(look("x", values), are_ids, [CLICKS])
    assert found.startswith(expected)
    assert bool(found) == bool(expected)


def test_the_other_class_is_told_where_clicks_are_more() -> None:
    shut = ~CLICKS & (USERS < 50)
    assert not suspicion_of(look("x", (CLICKS & (USERS < 50)).astype(int)), True, [~shut | CLICKS])
    mostly = CLICKS | (RNG.random(NUM) < 0.6)
    skipped = (~mostly & (ITEMS % 2 == 0)).astype(np.int64)
    assert suspicion_of(look("x", skipped), True, [mostly]).endswith("rows with '1' are 0")


@pytest.mark.slow
def test_real_logs_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """KuaiRand's log, of which two columns are known after the click."""
    monkeypatch.setattr(sampling, "MAX_TEXT_BYTES", 2 << 20)
    monkeypatch.setattr(sampling, "_BLOCK_BYTES", 1 << 19)
    found = infer(read_sample(str(SAMPLE)), ["is_click"])
    asked = {remark.partition(":")[0] for remark in found.remarks if "before the click" in remark}
    assert asked == {"long_view", "play_time_ms"}
