"""What order.assign refuses, and which tables have owners."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from hotrec.assemble.job import order_of
from hotrec.assemble.order import TrainingOrder, check_assign, check_order, choose_assign
from hotrec.data.chunks import Dataset
from hotrec.data.tokens import ByTokens, SampleWork
from hotrec.types import Exchange, Partition, Placement, TablePlacement
from tests.unit.assemble.configs import config_of
from tests.unit.data.logs import ONE_HOT_SCHEMA, SCHEMA, write_dataset

NUM_ROWS = {"t_a": 10, "t_b": 1000}
POOLED = TablePlacement(Exchange.POOLED)


def order(*words: str) -> TrainingOrder:
    return order_of(config_of(*words))


def placement_of(num_hot: tuple[int, int], **tables: TablePlacement) -> Placement:
    hot = {t: np.arange(n, dtype=np.int64) for t, n in zip(NUM_ROWS, num_hot, strict=True)}
    default = dict.fromkeys(NUM_ROWS, TablePlacement())
    return Placement(Partition(NUM_ROWS, hot, policy="by hand"), default | tables)


@pytest.mark.parametrize(
    ("placement", "found"),
    [
        (None, "TorchRec's own plan"),
        (placement_of((10, 1000)), "by hand: none"),
        (placement_of((0, 0), t_a=POOLED, t_b=POOLED), "by hand: none"),
    ],
    ids=["torchrec", "all_hot", "pooled"],
)
def test_placements_whose_rows_have_no_owner_are_refused(
    placement: Placement | None, found: str
) -> None:
    by_owner = order("order.assign=by_owner")
    with pytest.raises(ValueError, match=rf"order\.assign: .*{found}"):
        check_assign(by_owner, placement)
    check_assign(order(), placement)


def test_by_tokens_takes_any_plan_but_needs_lengths(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    by_tokens, work = order("order.assign=by_tokens"), SampleWork(1, {"bag": 2})
    for placement in (None, placement_of((0, 0)), placement_of((10, 1000))):
        check_assign(by_tokens, placement)
        with caplog.at_level(logging.INFO):
            found = choose_assign(by_tokens, SCHEMA, placement, work)
        assert found == ByTokens(("a", "b", "bag"), work)
    assert "order.assign=by_tokens" in caplog.text
    for name, schema in (("bags", SCHEMA), ("ids", ONE_HOT_SCHEMA)):
        write_dataset(tmp_path / name, {"train": 9}, schema=schema)
    check_order(by_tokens, Dataset.open(tmp_path / "bags"))
    check_order(order(), Dataset.open(tmp_path / "ids"))
    with pytest.raises(ValueError, match=r"order\.assign: .*by_tokens"):
        check_order(by_tokens, Dataset.open(tmp_path / "ids"))
