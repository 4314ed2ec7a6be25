"""What-if sweeps: what is read, which machine is cheapest, what the page says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hydra.types import RunMode
from omegaconf import OmegaConf

from hotrec.cli.sweep import Sweep, write_what_if_page
from hotrec.report.what_if import find_cheapest, read_predictions, what_if_text, write_what_if
from tests.unit.report.golden import check_golden, check_html
from tests.unit.report.predictions import prediction

Document = dict[str, Any]


def document(num_ranks: int) -> Document:
    return prediction(num_ranks=num_ranks, ranks_per_host=min(8, num_ranks))


def write_job(folder: Path, made: Document | None, point: Document | None = None) -> None:
    folder.mkdir(parents=True)
    for file, content in (("prediction.json", made), ("point.json", point)):
        if content is not None:
            (folder / file).write_text(json.dumps(content))


def point_file(ranks: int, budget: int = 64, **changes: Any) -> Document:
    return {
        "overrides": {"plan.world_size": str(ranks), "placement.hot_budget_mib": str(budget)},
        "num_ranks": ranks,
        "ranks_per_host": 8 if ranks > 8 else None,
        "batch_size": 2048,
        "min_samples_per_s": 400000.0,
        **changes,
    }


def test_golden_page(tmp_path: Path) -> None:
    """Ranks 2 to 16, two budgets; 2 ranks do not fit, the last job failed."""
    sweep = tmp_path / "sweep"
    jobs = [(ranks, budget) for ranks in (2, 4, 8, 16) for budget in (64, 256)]
    for number, (ranks, budget) in enumerate(jobs, start=5):
        made: Document | None = None if number == 12 else document(ranks)
        if ranks == 2:
            made = {"infeasible": f"hot rows need {budget} MiB, 48 fit."}
        write_job(sweep / str(number), made, point_file(ranks, budget))
    points = read_predictions(sweep)
    assert [p["name"] for p in points] == ["5", "6", "7", "8", "9", "10", "11", "12"]
    check_golden("what_if_none.md", what_if_text(points, 1e6))
    for _ in range(2):  # a second time over the first
        page = write_what_if(points, sweep, 350_000)
    assert {p.suffix for p in sweep.glob("what*")} == {".html", ".json"}
    check_golden("what_if.json", (sweep / "what_if.json").read_text())
    check_golden("what_if.md", what_if_text(points, 350_000))
    check_html(page.read_text(), what_if_text(points, 350_000))


def test_a_job_needs_one_of_its_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected directories with prediction.json, got none"):
        read_predictions(tmp_path)
    write_job(tmp_path / "0", {"infeasible": "too little memory"})
    assert "fastest of 1 reaches 0 /s." in what_if_text(read_predictions(tmp_path))
    write_job(tmp_path / "1", document(16) | {"batch_size": 512})
    _, point = read_predictions(tmp_path)
    assert (point["num_ranks"], point["num_hosts"], point["batch_size"]) == (16, 2, 512)


def test_what_was_predicted_for_a_machine_that_is_not_there_says_so(tmp_path: Path) -> None:
    costs = {"name": "dgx", "origin": "built-in", "note": None}
    write_job(tmp_path / "0", document(16) | {"costs": costs})
    points = read_predictions(tmp_path)
    assert "the built-in costs dgx, never run on such a machine" in what_if_text(points)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "expected .*JSON"),
        ("[1]", "expected .*JSON"),
        ('{"plans": {"a": {}}, "chosen": "a"}', ".* got none of world, batch_size"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "0").mkdir()
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


def hydra_config(sweep: Path, mode: str = "MULTIRUN") -> Any:
    words = ["plan.world_size=4", "+placement.hot_budget_mib=64"]
    return OmegaConf.create(
        {
            "plan": {"world_size": 4, "ranks_per_host": 2, "min_samples_per_s": 1000.0},
            "trainer": {"batch_size": 256},
            "hydra": {
                "mode": RunMode[mode],
                "overrides": {"task": words},
                "sweep": {"dir": str(sweep)},
                "runtime": {"output_dir": str(sweep / "0")},
            },
        }
    )


@pytest.mark.parametrize(
    ("process", "mode", "is_sweep"),
    [("plan", "MULTIRUN", True), ("prepare", "MULTIRUN", False), ("plan", "RUN", False)],
)
def test_the_callback_notes_each_job_of_a_sweep_and_writes_the_page(
    process: str,
    mode: str,
    is_sweep: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = hydra_config(tmp_path, mode)
    write_job(tmp_path / "0", {"infeasible": "no"})
    Sweep(process).on_job_start(config=config, task_function=lambda _: None)
    Sweep(process).on_multirun_end(config=config, config_name="config")
    assert {path.name for path in tmp_path.rglob("*.*")} - {"prediction.json"} == (
        {"point.json", "what_if.html", "what_if.json"} if is_sweep else set()
    )
    if is_sweep:
        found = json.loads((tmp_path / "what_if.json").read_text())
        (point,) = found["points"]
        assert point["overrides"] == {"plan.world_size": "4", "placement.hot_budget_mib": "64"}
        assert (point["num_ranks"], point["num_hosts"], point["batch_size"]) == (4, 2, 256)
        assert found["min_samples_per_s"] == 1000.0
        assert "reaches 1,000 /s" in " ".join(capsys.readouterr().err.split())


def test_an_error_of_the_callback_ends_the_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        Sweep("plan").on_multirun_end(config=hydra_config(tmp_path), config_name="config")
    assert caught.value.code == 1
    assert "error: what-if" in capsys.readouterr().err


def test_jobs_with_different_required_rates_are_refused(tmp_path: Path) -> None:
    write_job(tmp_path / "0", document(2), point_file(2))
    write_job(tmp_path / "1", document(4), point_file(4, min_samples_per_s=7.0))
    with pytest.raises(ValueError, match=r"expected one value .* got \[400000.0, 7.0\]"):
        write_what_if_page(tmp_path)
