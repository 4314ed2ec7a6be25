"""Costs on disk, what is said of costs from elsewhere, the built-in sets, and intervals."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import (
    KERNELS,
    LOADER_PARTS,
    NARROWEST_INTERVAL,
    REQUIRED,
    UNKNOWN_INTERVAL,
    CollectiveCurve,
    Costs,
    CostsError,
    Line,
    World,
    ratio_interval,
)
from hotrec.cost_model.step import MOVEMENTS
from hotrec.cost_model.store import check_host, find_costs, fit_to_world, read_costs, write_costs

HOST = {"device": "cpu", "processor": "A", "num_cores": 2, "packages": {"torch": "2.13.0"}}
MEASURED = replace(
    BUILTIN["cpu_1gbit"],
    name="here",
    origin="measured",
    host=HOST,
    curves=(CollectiveCurve("all_reduce", World(4, 2), (1e3, 1e6), (1e-4, 1e-2), (0.1, 0.2)),),
    corrections={"route": 1.25},
    facts={"points": {"route": [[1.0, 2.0]]}},
    loader={name: Line(1e-3, 2e-6) for name in LOADER_PARTS},
    doubts=("are old", "are odd"),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "costs"
    artifact = write_costs(MEASURED, path)
    assert artifact.kind == "costs"
    assert artifact.content == {"name": "here", "origin": "measured", "device": "cpu"}
    assert read_costs(path) == MEASURED
    assert find_costs(str(path)) == MEASURED
    changed = replace(MEASURED, name="again")
    write_costs(changed, path)
    assert read_costs(path).name == "again"


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("inter.bytes_per_s", math.nan, "inter bytes_per_s: .*nan"),
        ("kernels.pool", None, "kernels: .*pool"),
        ("kernels.fly", {}, "kernels: .*'fly'"),
        ("overhead_s", True, "overhead_s: .*True"),
        ("ratio_interval", [1.1, 1.2], "ratio_interval"),
        ("device", "tpu", "device: .*tpu"),
        ("curves.0.sent_bytes", [2.0, 1.0], "sizes"),
    ],
)
def test_impossible_costs_are_refused(key: str, value: Any, said: str) -> None:
    document = json.loads(json.dumps(MEASURED.to_json()))
    *path, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    owner = reduce(getitem, path, document)
    owner[last] = asdict(Line()) if value == {} else value
    if value is None:
        del owner[last]
    with pytest.raises(CostsError, match=said):
        Costs.from_json(document)


@pytest.mark.parametrize(
    ("costs", "host", "notes"),
    [
        (MEASURED, HOST, []),
        (MEASURED, {**HOST, "num_cores": 64}, ["num_cores 2 there, 64 here"]),
        (MEASURED, {**HOST, "device": "cuda"}, ["cpu", "cuda"]),
        (BUILTIN["cpu_1gbit"], HOST, ["built-in"]),
    ],
)
def test_costs_from_elsewhere_say_so(costs: Costs, host: Any, notes: list[str]) -> None:
    note = check_host(costs, host)
    assert (note is None) == (not notes)
    assert all(part in (note or "") for part in notes)


def test_costs_of_one_host_get_a_link_for_two() -> None:
    alone = replace(MEASURED, inter=None, ratio_interval=(0.9, 2.0))
    costs, [note] = fit_to_world(alone, World(4, 2), 512)
    assert costs.inter is not None
    assert "assumed" in costs.inter.source
    assert "assumed" in note
    assert costs.ratio_interval == (UNKNOWN_INTERVAL[0], 2.0)
    assert costs.collective("all_to_all", World(4, 2)).per_byte_s > 0
    assert fit_to_world(alone, World(2, 2), 512) == (alone, [])
    assert fit_to_world(MEASURED, World(4, 2), 512) == (MEASURED, [])


def curve(*points: tuple[float, float]) -> CollectiveCurve:
    sizes, seconds = zip(*points, strict=True)
    return CollectiveCurve("all_to_all", World(2, 1), sizes, seconds, (0.0,) * len(points))


def test_a_curve_is_exact_at_measured_sizes_and_between_them() -> None:
    shaped = curve((1e3, 2e-4), (1e5, 2e-4), (1e6, 8e-3), (4e6, 32e-3))
    asked = {**dict(zip(shaped.sent_bytes, shaped.seconds, strict=True)), 2.5e6: 20e-3, 10.0: 2e-4}
    asked[8e6] = 64e-3  # beyond the largest the last two go on: 8 ns a byte
    for size, seconds in asked.items():
        assert shaped.seconds_at(size) == pytest.approx(seconds)


@pytest.mark.parametrize("name", BUILTIN)
def test_every_set_is_possible_and_every_number_has_a_source(name: str) -> None:
    costs = BUILTIN[name]
    assert Costs.from_json(costs.to_json()) == costs
    links = [link for link in (costs.intra, costs.inter) if link]
    assert not {one.source for one in (*costs.kernels.values(), *links)} & {"", "measured"}
    on_cpu = {*REQUIRED, *MOVEMENTS, "order_row", "order_id"} - {"fetch_mapped"}
    assert set(costs.kernels) == (set(KERNELS) if costs.device == "cuda" else on_cpu)


def test_the_interval_holds_nine_of_ten_further_cases() -> None:
    """Too few cases have none, and a biased fit has one on one side."""
    assert ratio_interval([[1.0], [1.0]]) == UNKNOWN_INTERVAL
    assert ratio_interval([[1.3]] * 5) == (NARROWEST_INTERVAL[0], pytest.approx(1.3))
    rng = np.random.default_rng(1)
    held = []
    for _ in range(400):
        bias = np.exp(rng.normal(0.05, 0.15, 9))
        ratios = [[b * np.exp(rng.normal(0, 0.03)) for _ in range(3)] for b in bias[:8]]
        low, high = ratio_interval(ratios)
        held.append(low <= bias[8] * np.exp(rng.normal(0, 0.03)) <= high)
    assert 0.86 <= np.mean(held) <= 0.96
