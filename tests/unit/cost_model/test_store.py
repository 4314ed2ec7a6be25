"""Costs on disk, and what is said of costs from elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hotrec.artifact import ArtifactError
from hotrec.cost_model.builtin import BUILTIN
from hotrec.cost_model.costs import CollectiveCurve, Costs, CostsError, Line, Link, World
from hotrec.cost_model.store import COSTS_JSON, check_host, find_costs, read_costs, write_costs

HOST = {"device": "cpu", "processor": "A", "num_cores": 2, "packages": {"torch": "2.13.0"}}
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
    with pytest.raises(ArtifactError, match="it was edited"):
        read_costs(path)


@pytest.mark.parametrize(
    ("level", "rate"), [("intra", 0.0), ("intra", -1.0), ("inter", 0.0), ("inter", float("nan"))]
)
def test_a_link_that_carries_nothing_is_refused(level: str, rate: float) -> None:
    document = MEASURED.to_json()
    document[level]["bytes_per_s"] = rate
    with pytest.raises(CostsError, match=f"link {level} bytes_per_s: expected above 0, got"):
        Costs.from_json(document)
    with pytest.raises(CostsError, match="expected above 0"):
        replace(MEASURED, **{level: Link(1e-6, rate)})


def test_a_document_without_a_kernel_is_refused() -> None:
    document = json.loads(json.dumps(MEASURED.to_json()))
    del document["kernels"]["pool"]
    with pytest.raises(CostsError, match="got none for pool"):
        Costs.from_json(document)


def test_costs_of_before_look_ahead_was_measured_can_be_read() -> None:
    document = MEASURED.to_json()
    del document["look_ahead"]
    assert Costs.from_json(document) == MEASURED
    measured = replace(MEASURED, look_ahead=Line(1e-3, 0.0, 1e-9))
    assert Costs.from_json(json.loads(json.dumps(measured.to_json()))) == measured


def test_costs_of_this_machine_need_no_note() -> None:
    assert check_host(MEASURED, dict(HOST)) is None


def test_costs_from_elsewhere_say_so() -> None:
    note = check_host(MEASURED, {**HOST, "processor": "B", "num_cores": 64})
    assert note is not None
    assert "measured on another host" in note
    assert "processor 'A' there, 'B' here" in note
    assert "num_cores 2 there, 64 here" in note
    assert "packages" not in note
    other_device = check_host(MEASURED, {**HOST, "device": "cuda"})
    assert other_device is not None
    assert "for the device cpu, this is for cuda" in other_device
    built_in = check_host(BUILTIN["cpu_1gbit"], HOST)
    assert built_in is not None
    assert "are built-in, not measured on this machine" in built_in
