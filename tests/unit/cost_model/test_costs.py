"""Costs on disk, what is said of costs from elsewhere, the built-in sets, and intervals."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrec.artifact import ArtifactError
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
    interval_text,
    ratio_interval,
)
from hotrec.cost_model.look_ahead import MOVEMENTS
from hotrec.cost_model.store import (
    COSTS_JSON,
    check_host,
    find_costs,
    fit_to_world,
    read_costs,
    write_costs,
)

HOST = {"device": "cpu", "processor": "A", "num_cores": 2, "packages": {"torch": "2.13.0"}}
LOADER = {name: Line(1e-3, 2e-6) for name in LOADER_PARTS}
MEASURED = replace(
    BUILTIN["cpu_1gbit"],
    name="here",
    origin="measured",
    host=HOST,
    curves=(CollectiveCurve("all_reduce", World(4, 2), (1e3, 1e6), (1e-4, 1e-2), (0.1, 0.2)),),
    corrections={"route": 1.25},
    facts={"points": {"route": [[1.0, 2.0]]}},
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


def test_built_in_sets_are_found_by_name() -> None:
    for name, costs in BUILTIN.items():
        assert find_costs(name) is costs
        with pytest.raises(CostsError, match="expected a directory to write to, got the built-in"):
            write_costs(costs, Path(name))


def test_no_costs_at_all(tmp_path: Path) -> None:
    with pytest.raises(CostsError, match="one of .*'cpu_1gbit'.*Calibrate on the machines"):
        find_costs(str(tmp_path / "none"))
    with pytest.raises(ArtifactError, match="expected the manifest of a costs"):
        read_costs(tmp_path)


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs"
    write_costs(MEASURED, path)
    text = (path / COSTS_JSON).read_text()
    (path / COSTS_JSON).write_text(text.replace("1.25", "9.25"))
    with pytest.raises(ArtifactError, match="it was changed"):
        read_costs(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("intra.bytes_per_s", 0.0, "link intra bytes_per_s: expected above 0, got 0.0"),
        ("inter.bytes_per_s", float("nan"), "link inter bytes_per_s: expected above 0, got nan"),
        ("kernels.pool", None, "kernels: expected .*, got none for pool"),
        ("kernels.fly", {}, r"kernels: expected some of .*, got \['fly'\]"),
        ("kernels.pool.per_item_s", -1, "kernel pool per_item_s: expected a number of at least 0"),
        ("overhead_s", True, "overhead_s: expected a number of at least 0, got True"),
        ("overlap", 1.5, "overlap: expected 0..1, got 1.5"),
        ("ratio_interval", [1.1, 1.2], "ratio_interval: expected 0 < low <= 1 <= high, got"),
        ("ratio_interval", [0.9], "ratio_interval: expected 0 < low <= 1 <= high, got"),
        ("device", "tpu", "device: expected cpu or cuda, got tpu"),
        ("host_bytes", 0, "host_bytes: expected above 0, got 0"),
        ("corrections.coffee", 1.0, r"corrections: expected stages of .*, got \['coffee'\]"),
        ("curves.0.kind", "gather", "curve gather: expected one of .*, got gather"),
        ("curves.0.sent_bytes", [2.0, 1.0], "expected at least two increasing sizes"),
        ("curves.0.seconds", [1.0, 0.0], "expected times above 0, got"),
        ("curves", None, "expected the document of `hotrec calibrate`"),
    ],
)
def test_impossible_costs_are_refused(key: str, value: Any, message: str) -> None:
    document = json.loads(json.dumps(MEASURED.to_json()))
    *path, last = [int(part) if part.isdigit() else part for part in key.split(".")]
    owner = reduce(getitem, path, document)
    owner[last] = value
    if value is None:
        del owner[last]
    elif value == {}:
        owner[last] = asdict(Line())
    with pytest.raises(CostsError, match=message):
        Costs.from_json(document)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("look_ahead", Line(1e-3, 0.0, 1e-9)),
        ("ratio_interval", (0.9, 1.2)),
        ("doubts", ("a",)),
        ("loader", LOADER),
    ],
)
def test_costs_of_earlier_versions_can_be_read(key: str, value: Any) -> None:
    document = MEASURED.to_json()
    del document[key]
    assert Costs.from_json(document) == MEASURED
    measured = replace(MEASURED, **{key: value})
    assert Costs.from_json(json.loads(json.dumps(measured.to_json()))) == measured


def test_a_predicted_step_has_an_interval() -> None:
    assert replace(MEASURED, ratio_interval=(0.9, 1.2)).interval_s(0.5) == (0.45, 0.6)


@pytest.mark.parametrize(
    ("costs", "host", "notes"),
    [
        (MEASURED, HOST, None),
        (
            MEASURED,
            {**HOST, "processor": "B", "num_cores": 64},
            ["on another host", "processor 'A' there, 'B' here", "num_cores 2 there, 64 here"],
        ),
        (MEASURED, {**HOST, "device": "cuda"}, ["for the device cpu, this is for cuda"]),
        (BUILTIN["cpu_1gbit"], HOST, ["are built-in, not measured on this machine"]),
    ],
)
def test_costs_from_elsewhere_say_so(costs: Costs, host: Any, notes: list[str] | None) -> None:
    note = check_host(costs, host)
    assert (note is None) == (notes is None)
    assert all(part in (note or "") for part in notes or ())
    assert "packages" not in (note or "")


def test_costs_of_one_host_get_a_link_for_two() -> None:
    alone = replace(MEASURED, inter=None, ratio_interval=(0.9, 2.0))
    costs, [note] = fit_to_world(alone, World(4, 2), 512)
    assert costs.inter is not None
    assert costs.inter.bytes_per_s == 0.94 * 1e9 / 8
    assert costs.inter.source == "assumed, of cpu_1gbit"
    assert costs.ratio_interval == (UNKNOWN_INTERVAL[0], 2.0)
    assert "link between hosts is assumed" in note
    assert costs.collective("all_to_all", World(4, 2)).per_byte_s > 0
    assert fit_to_world(alone, World(2, 2), 512) == (alone, [])
    assert fit_to_world(MEASURED, World(4, 2), 512) == (MEASURED, [])
    for builtin in BUILTIN.values():
        assert fit_to_world(builtin, World(16, 8), 512)[0].inter is not None


@pytest.mark.parametrize(
    ("world", "batch_size", "differences"),
    [
        (World(2, 2), 2048, None),
        (World(2, 1), 2048, "ranks_per_host 1 from 2"),
        (World(4, 2), 512, "num_ranks 4 from 2, batch_size 512 from 2048"),
    ],
)
def test_extrapolation_is_said(world: World, batch_size: int, differences: str | None) -> None:
    facts = {"num_ranks": 2, "ranks_per_host": 2, "batch_size": 2048}
    _, notes = fit_to_world(replace(MEASURED, facts=facts), world, batch_size)
    assert notes == ([f"extrapolated: {differences}"] if differences else [])


def curve(*points: tuple[float, float]) -> CollectiveCurve:
    sizes, seconds = zip(*points, strict=True)
    return CollectiveCurve("all_to_all", World(2, 1), sizes, seconds, (0.0,) * len(points))


def test_a_curve_is_exact_at_measured_sizes_and_between_them() -> None:
    shaped = curve((1e3, 2e-4), (1e5, 2e-4), (1e6, 8e-3), (4e6, 32e-3))
    asked = {**dict(zip(shaped.sent_bytes, shaped.seconds, strict=True)), 2.5e6: 20e-3, 10.0: 2e-4}
    asked[8e6] = 64e-3  # beyond the largest the last two go on: 8 ns a byte
    for size, seconds in asked.items():
        assert shaped.line_at(size).seconds(num_bytes=size) == pytest.approx(seconds)


def test_a_curve_on_rails_is_of_all_rails_at_once() -> None:
    rails = replace(curve((1e3, 1e-3), (1e6, 5e-3)), num_rails=4)
    costs = replace(BUILTIN["dgx_a100"], curves=(rails,))
    found = costs.on_rails("all_to_all", World(8, 4), 1e6)
    assert found.seconds(num_bytes=1e6) == pytest.approx(5e-3)
    by_link = BUILTIN["dgx_a100"].on_rails
    for kind, world in (("all_reduce", World(8, 4)), ("all_to_all", World(16, 8))):
        assert costs.on_rails(kind, world, 1e6) == by_link(kind, world)
    # Two hosts of one rank have the link for themselves.
    alone = World(2, 1)
    assert costs.collective("all_to_all", alone, 1e6) == BUILTIN["dgx_a100"].collective(
        "all_to_all", alone
    )
    document = costs.to_json()
    assert Costs.from_json(document) == costs
    del document["curves"][0]["num_rails"]
    assert Costs.from_json(document).curves == (replace(rails, num_rails=1),)


def test_a_disturbed_small_message_does_not_count() -> None:
    disturbed = curve((1e3, 5e-3), (1e4, 1e-4), (1e6, 1e-2))
    assert disturbed.line_at(1e4).fixed_s == pytest.approx(1e-4)
    assert disturbed.line_at(5e5).seconds(num_bytes=5e5) < 1e-2


def test_costs_in_doubt_are_not_trusted() -> None:
    assert (MEASURED.is_trusted, MEASURED.caveat) == (True, None)
    doubted = replace(MEASURED, doubts=("are old", "are odd"))
    assert not doubted.is_trusted
    assert "the costs are old and are odd: calibrate again" in (doubted.caveat or "")


@given(st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=6), st.floats(1.0, 1e8))
def test_no_line_has_a_negative_part(seconds: list[float], size: float) -> None:
    measured = curve(*((10.0 ** (3 + n), s) for n, s in enumerate(seconds)))
    found = measured.line_at(size)
    assert found.fixed_s > 0
    assert found.per_byte_s >= 0
    assert min(measured.line().fixed_s, measured.line().per_byte_s) >= 0


SETS = sorted(BUILTIN)


@pytest.mark.parametrize("name", SETS)
def test_every_set_is_possible_and_every_number_has_a_source(name: str) -> None:
    costs = BUILTIN[name]
    assert costs.name == name
    assert costs.origin == "built-in"
    for kernel, line in costs.kernels.items():
        assert line.source not in ("", "measured"), kernel
        assert line.seconds(1e6, 2.56e8) > 0, kernel
    for link in (costs.intra, costs.inter):
        assert link is None or link.source not in ("", "measured")
    assert {"memory", "overhead_s", "overlap"} <= set(costs.facts)
    assert Costs.from_json(costs.to_json()) == costs
    on_cpu = {*REQUIRED, *MOVEMENTS, "order_row", "order_id"} - {"fetch_mapped"}
    assert set(costs.kernels) == (set(KERNELS) if costs.device == "cuda" else on_cpu)
    assert (costs.device_bytes > 0) == (costs.device == "cuda")


@pytest.mark.parametrize("name", [n for n in SETS if BUILTIN[n].device == "cuda"])
def test_nearer_memory_is_faster(name: str) -> None:
    kernel = BUILTIN[name].kernels

    def of_rows(which: str) -> float:
        return kernel[which].seconds(1e6, 2.56e8)

    for prefix in ("read", "pooled"):
        assert of_rows(f"{prefix}_device") < of_rows(f"{prefix}_hit") < of_rows(f"{prefix}_miss")
        assert of_rows(f"{prefix}_device") < of_rows(f"{prefix}_host")
    for prefix in ("update", "pooled_update"):
        assert of_rows(f"{prefix}_device") <= of_rows(f"{prefix}_hit") < of_rows(f"{prefix}_host")


def test_links_are_of_the_published_order() -> None:
    h100, a100 = BUILTIN["dgx_h100_infiniband"], BUILTIN["dgx_a100"]
    assert h100.inter
    assert a100.inter
    assert a100.inter.bytes_per_s < h100.inter.bytes_per_s <= 8 * 50e9
    assert a100.intra.bytes_per_s < h100.intra.bytes_per_s <= 450e9
    cpu = BUILTIN["cpu_1gbit"]
    assert cpu.inter
    assert cpu.inter.bytes_per_s < 125e6
    # All ranks of a host share its adapters: a rank of eight gets an eighth.
    alone = h100.collective("all_to_all", World(2, 1)).per_byte_s
    shared = h100.collective("all_to_all", World(16, 8)).per_byte_s
    assert shared > 4 * alone


def test_the_interval_holds_nine_of_ten_further_cases() -> None:
    rng = np.random.default_rng(1)
    held = []
    for _ in range(400):
        bias = np.exp(rng.normal(0.05, 0.15, 9))
        ratios = [[b * np.exp(rng.normal(0, 0.03)) for _ in range(3)] for b in bias[:8]]
        low, high = ratio_interval(ratios)
        held.append(low <= bias[8] * np.exp(rng.normal(0, 0.03)) <= high)
    assert 0.86 <= np.mean(held) <= 0.96


def test_noise_of_repeats_widens_the_interval() -> None:
    calm = ratio_interval([[1.0, 1.0]] * 4)
    noisy = ratio_interval([[0.8, 1.25]] * 4)
    assert calm == NARROWEST_INTERVAL
    assert noisy[0] < 0.9
    assert noisy[1] > 1.1


def test_more_cases_narrow_the_interval() -> None:
    few, many = (ratio_interval([[0.9], [1.0], [1.1]] * n) for n in (1, 4))
    assert few[0] < many[0] < 1 < many[1] < few[1]


def test_a_biased_fit_has_an_interval_on_one_side() -> None:
    low, high = ratio_interval([[1.3]] * 5)
    assert (low, high) == (NARROWEST_INTERVAL[0], pytest.approx(1.3))
    assert interval_text((low, high)) == "-5% to +30%"


def test_too_few_cases_have_no_interval() -> None:
    assert ratio_interval([[1.0], [1.0]]) == UNKNOWN_INTERVAL
