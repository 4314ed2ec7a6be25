"""What-if sweeps: what is read, which machine is cheapest, what the page says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from hotrec.cli.what_if import WhatIf, write_page
from hotrec.report.what_if import (
    find_cheapest,
    read_predictions,
    what_if_text,
    write_what_if,
)
from tests.unit.report.golden import assert_self_contained, check_golden, visible_text
from tests.unit.report.predictions import prediction


def document(num_ranks: int, *, ranks_per_host: int = 8, batch: int = 2048) -> dict[str, Any]:
    made = prediction(num_ranks=num_ranks, ranks_per_host=min(ranks_per_host, num_ranks))
    return made | {"batch_size": batch}


def write_job(
    sweep: Path, name: str, made: dict[str, Any] | None, point: dict[str, Any] | None
) -> None:
    (sweep / name).mkdir(parents=True)
    for file, content in (("prediction.json", made), ("point.json", point)):
        if content is not None:
            (sweep / name / file).write_text(json.dumps(content))


def point_file(ranks: int, budget: int = 64, **changes: Any) -> dict[str, Any]:
    return {
        "overrides": {"plan.world_size": str(ranks), "placement.hot_budget_mib": str(budget)},
        "num_ranks": ranks,
        "ranks_per_host": 8 if ranks > 8 else None,
        "batch_size": 2048,
        "min_samples_per_s": 400000.0,
        **changes,
    }


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Ranks 2 to 16, two budgets; 2 ranks do not fit, the last job failed."""
    path = tmp_path / "sweep"
    for number, (ranks, budget) in enumerate(
        [(r, b) for r in (2, 4, 8, 16) for b in (64, 256)], start=5
    ):
        made: dict[str, Any] | None = document(ranks)
        if ranks == 2:
            made = {"infeasible": f"hot rows need {budget} MiB, 48 fit."}
        if number == 12:
            made = None
        write_job(path, str(number), made, point_file(ranks, budget))
    return path


def test_golden_page(sweep: Path) -> None:
    points = read_predictions(sweep)
    assert [p["name"] for p in points] == ["5", "6", "7", "8", "9", "10", "11", "12"]
    assert points[2]["samples_per_s"] == pytest.approx(4 * 2048 / 0.0455)
    check_golden("what_if_none.txt", what_if_text(points, 1e6))
    for _ in range(2):  # a second time over the first
        html = write_what_if(points, sweep, 350_000).read_text()
    assert {p.suffix for p in sweep.glob("what*")} == {".html", ".json"}
    check_golden("what_if.json", (sweep / "what_if.json").read_text())
    text = what_if_text(points, 350_000)
    check_golden("what_if.txt", text)
    assert_self_contained(html)
    cells = {cell.strip("| ") for line in text.splitlines()[1:] for cell in line.split(" | ")}
    visible = visible_text(html)
    assert [c for c in cells if "---" not in c and c.strip("# ") not in visible] == []


def test_a_document_names_its_own_machine(tmp_path: Path) -> None:
    write_job(tmp_path, "0", document(16, batch=512), None)
    (point,) = read_predictions(tmp_path)
    assert (point["num_ranks"], point["num_hosts"], point["batch_size"]) == (16, 2, 512)


def test_an_infeasible_point_without_its_machine_is_shown(tmp_path: Path) -> None:
    write_job(tmp_path, "0", {"infeasible": "too little memory"}, None)
    assert "fastest of 1 reaches 0 /s." in what_if_text(read_predictions(tmp_path))


def test_an_empty_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected directories with prediction.json, got none"):
        read_predictions(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected .*JSON"),
        ("[1]", "expected .*JSON"),
        ('{"plans": {"a": {}}, "chosen": "a"}', ".* got none of world, batch_size"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    write_job(tmp_path, "0", document(2), None)
    (tmp_path / "0" / "prediction.json").write_text(text)
    with pytest.raises(ValueError, match=f"0/prediction.json: {message}"):
        read_predictions(tmp_path)


# Name, ranks, hosts and rate of points that fit.
MACHINES = [
    ("fast", 8, 1, 900.0),
    ("spread", 4, 2, 500.0),
    ("dense", 4, 1, 400.0),
    ("denser batch", 4, 1, 450.0),
    ("small", 2, 1, 100.0),
]


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        (None, "small"),  # whatever fits, so the fewest ranks
        (100.0, "small"),  # just enough is enough
        (100.1, "denser batch"),  # fewer hosts before more samples, of equals the fastest
        (450.0, "denser batch"),
        (460.0, "spread"),  # fewer ranks before fewer hosts
        (501.0, "fast"),
        (901.0, None),
    ],
)
def test_the_cheapest_machine(wanted: float | None, name: str | None) -> None:
    keys = ("name", "num_ranks", "num_hosts", "samples_per_s")
    points = [dict(zip(keys, values, strict=True), fits=True) for values in MACHINES]
    points.append({"name": "broken", "fits": False, "num_ranks": 1})
    for order in (points, points[::-1]):
        cheapest = find_cheapest(order, wanted)
        assert (None if cheapest is None else cheapest["name"]) == name


def hydra_config(sweep: Path, mode: str, job: str = "0") -> Any:
    words = ["plan.world_size=4", "+placement.hot_budget_mib=64"]
    return OmegaConf.create(
        {
            "plan": {"world_size": 4, "ranks_per_host": 2, "min_samples_per_s": 1000.0},
            "trainer": {"batch_size": 256},
            "hydra": {
                "mode": RunMode[mode],
                "overrides": {"task": words},
                "sweep": {"dir": str(sweep)},
                "runtime": {"output_dir": str(sweep / job)},
            },
        }
    )


def test_the_callback_notes_each_job_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hotrec plan"])
    config = hydra_config(tmp_path, "MULTIRUN")
    write_job(tmp_path, "0", {"infeasible": "no"}, None)
    WhatIf().on_job_start(config=config, task_function=lambda _: None)
    (point,) = read_predictions(tmp_path)
    assert point["overrides"] == {"plan.world_size": "4", "placement.hot_budget_mib": "64"}
    assert (point["num_ranks"], point["num_hosts"], point["batch_size"]) == (4, 2, 256)
    WhatIf().on_multirun_end(config=config, config_name="config")
    assert json.loads((tmp_path / "what_if.json").read_text())["min_samples_per_s"] == 1000.0
    printed = capsys.readouterr()
    assert "reaches 1,000 /s" in " ".join(printed.err.split())
    assert printed.out == ""


@pytest.mark.parametrize(
    ("process", "mode"), [("hotrec train", "MULTIRUN"), ("hotrec plan", "RUN")]
)
def test_the_callback_leaves_everything_else_alone(
    process: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [process])
    config = hydra_config(tmp_path, mode)
    write_job(tmp_path, "0", document(2), None)
    WhatIf().on_job_start(config=config, task_function=lambda _: None)
    WhatIf().on_multirun_end(config=config, config_name="config")
    assert [path.name for path in tmp_path.rglob("*.*")] == ["prediction.json"]


def test_an_error_of_the_callback_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hotrec plan"])
    with pytest.raises(SystemExit) as caught:
        WhatIf().on_multirun_end(config=hydra_config(tmp_path, "MULTIRUN"), config_name="config")
    assert caught.value.code == 1
    assert "error: what-if" in capsys.readouterr().err


def test_jobs_with_different_required_rates_are_refused(tmp_path: Path) -> None:
    write_job(tmp_path, "0", document(2), point_file(2))
    write_job(tmp_path, "1", document(4), point_file(4, min_samples_per_s=7.0))
    with pytest.raises(ValueError, match=r"expected one value .* got \[400000.0, 7.0\]"):
        write_page(tmp_path)
