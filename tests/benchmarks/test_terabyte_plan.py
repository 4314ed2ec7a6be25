"""The extrapolation to Criteo 1TB: popularity, its fit, the plans that are compared."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import terabyte_plan
from benchmarks.terabyte_plan import (
    TABLE_ROWS,
    build_demands,
    fit_exponent,
    predict_setting,
    read_exponents,
    setting_document,
    spread_tables,
    zipf_groups,
)
from hotrec.cost_model.blocks import Block
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import World
from hotrec.cost_model.demand import expected_distinct
from hotrec.cost_model.profile import write_profile
from hotrec.types import Feature, Schema, Table, Tier

COSTS = "dgx_h100_infiniband"


@pytest.mark.parametrize("exponent", [0.0, 0.8, 1.0, 1.3])
@pytest.mark.parametrize("num_rows", [1, 100, 50_000])
def test_groups_are_zipfs_law(num_rows: int, exponent: float) -> None:
    rows, probs = zipf_groups(num_rows, exponent)
    ranks = np.arange(1, num_rows + 1, dtype=np.float64)
    exact = ranks**-exponent / (ranks**-exponent).sum()
    assert rows.sum() == num_rows
    assert float(rows @ probs) == pytest.approx(1.0)
    assert probs[0] == pytest.approx(exact[0], rel=1e-4)
    # coverage of the hottest rows, at each group's end
    ends = np.cumsum(rows).astype(np.int64)
    assert np.cumsum(rows * probs) == pytest.approx(np.cumsum(exact)[ends - 1], abs=1e-4)


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.4])
def test_the_fit_finds_the_exponent_of_drawn_lookups(exponent: float) -> None:
    ranks = np.arange(1, 20_001, dtype=np.float64)
    probs = ranks**-exponent / (ranks**-exponent).sum()
    drawn = np.random.default_rng(3).choice(ranks.size, size=30_000, p=probs)
    found = fit_exponent(ranks.size, drawn.size, np.unique(drawn).size)
    assert found == pytest.approx(exponent, abs=0.02)


def test_demands_count_the_distinct_rows_of_a_batch() -> None:
    world, batch = World(8, 8), 4096
    exponents = [1.1] * len(TABLE_ROWS)
    demand = build_demands(exponents, world, batch, 128)[6]
    ranks = np.arange(1, TABLE_ROWS[6] + 1, dtype=np.float64)
    probs = ranks**-1.1 / (ranks**-1.1).sum()
    _, cold, _ = expected_distinct(demand)
    assert cold == pytest.approx((1 - (1 - probs) ** batch).sum(), rel=2e-3)


def test_tables_are_spread_evenly() -> None:
    demands = build_demands([1.0] * len(TABLE_ROWS), World(8, 8), 64, 128)
    shardings = spread_tables(demands, World(8, 8), Tier.DEVICE)
    owners = [shardings[demand.name].ranks[0] for demand in demands]
    assert sorted(np.bincount(owners)) == [3, 3, 3, 3, 3, 3, 4, 4]
    largest = [o for o, rows in zip(owners, TABLE_ROWS, strict=True) if rows == max(TABLE_ROWS)]
    assert len(set(largest)) == 5


def test_a_setting_is_predicted_for_every_plan() -> None:
    setting = predict_setting(BUILTIN[COSTS], [1.1] * len(TABLE_ROWS), 8, 2048)
    document = setting_document(setting)
    plans = document["plans"]
    assert list(plans) == [
        *("table_wise", "row_wise", "uvm_cache", "all_cold", "two_levels", "hot_cold")
    ]
    assert plans["hot_cold"]["step_s"] <= plans["all_cold"]["step_s"]
    # a partial sum of every bag from every rank, instead of one vector
    exchanges = [plans[p]["sent_bytes"]["rows_exchange"] for p in ("table_wise", "row_wise")]
    assert exchanges[1] == pytest.approx(8 * exchanges[0])
    assert plans["uvm_cache"]["host_bytes"] > 0 == plans["table_wise"]["host_bytes"]
    # 40 M rows of 128 floats with Adagrad's sum lie on one rank
    assert plans["table_wise"]["device_bytes"] >= 40e6 * 1024
    assert plans["row_wise"]["device_bytes"] == pytest.approx(sum(TABLE_ROWS) * 1024 / 8, rel=0.01)


def write_counted(path: Path, num_tables: int) -> dict[str, tuple[int, int]]:
    """A profile of tables C1, C2, ...; lookups and distinct rows of each."""
    names = [f"C{i + 1}" for i in range(num_tables)]
    rng = np.random.default_rng(0)
    rows = {name: rng.integers(0, 500, 800).astype(np.int32) for name in names}
    schema = Schema(
        dense=(),
        features=tuple(Feature(name, name) for name in names),
        tables=tuple(Table(name, 500) for name in names),
    )
    write_profile([Block(800, rows, {})], schema, path, dataset_hash="d")
    return {name: (800, np.unique(values).size) for name, values in rows.items()}


def test_exponents_come_from_a_profile_of_criteo(tmp_path: Path) -> None:
    counted = write_counted(tmp_path / "profile", 26)
    expected = [
        fit_exponent(num_rows, *counted[f"C{i + 1}"]) for i, num_rows in enumerate(TABLE_ROWS)
    ]
    assert list(read_exponents(tmp_path / "profile")) == expected
    assert len(set(expected)) > 10
    write_counted(tmp_path / "other", 25)
    with pytest.raises(ValueError, match=r"expected the tables C1\.\.C26"):
        read_exponents(tmp_path / "other")


def test_the_page_is_written_with_its_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terabyte_plan, "SETTINGS", ((8, 1024),))
    page = tmp_path / "terabyte.md"
    assert terabyte_plan.main(["--zipf", "1.2", "--page", str(page)]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed["exponents"] == [1.2] * len(TABLE_ROWS)
    text = page.read_text()
    (document,) = printed["settings"]
    for plan in document["plans"].values():
        assert f"{plan['samples_per_s']:,.0f} /s" in text
    assert "one exponent of 1.2 for all" in text
    assert (tmp_path / "terabyte.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("words", [["--zipf", "3"], ["--zipf", "1", "--profile", "p"]])
def test_impossible_options_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        terabyte_plan.parse(words)
