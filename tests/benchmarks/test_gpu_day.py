"""Parts of the GPU day: its records, its stages' processes, its predictions of memory, its ids."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from benchmarks.gpu_day import curve, tbe, tiers, whole
from benchmarks.gpu_day.__main__ import (
    REPOSITORY,
    Stage,
    main,
    pack,
    parse,
    run_stage,
)
from benchmarks.gpu_day.record import (
    BROKEN,
    DoesNotFitError,
    NotHereError,
    Parts,
    Record,
    Summary,
    Table,
    render,
)
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.planner.plan import Plan, TorchrecTables
from hotrec.types import OptimizerKind, TorchrecTier

CPU = torch.device("cpu")
FACTS = {"is_rehearsal": True, "code": "c1"}


def summarize(parts: Parts) -> Summary:
    rows = [[name, part["status"]] for name, part in parts.items()]
    return Summary(f"{len(parts)} parts.", [Table("Parts", ["part", "how"], rows)])


def open_record(path: Path, **facts: Any) -> Record:
    return Record(path, {**FACTS, **facts}, {"gpu": None}, summarize)


def fail() -> dict[str, Any]:
    raise RuntimeError("no kernel image is available")


def does_not_fit() -> dict[str, Any]:
    raise DoesNotFitError("needs 103 GB of 80 GB")


def test_a_failed_part_is_recorded_and_made_again(tmp_path: Path) -> None:
    path = tmp_path / "1_x.json"
    record = open_record(path)
    record.part("good", lambda: {"figure": 1})
    record.part("large", does_not_fit)
    record.part("bad", fail)
    record.part("last", lambda: {"figure": 2})
    assert not record.finish()
    document = json.loads(path.read_text())
    assert document["status"] == "failed"
    assert document["verdict"] == "4 parts."
    assert document["parts"]["bad"]["error"] == "RuntimeError: no kernel image is available"
    page = render("Stage 1", document, "last words")
    for text in ("no figure counts", "1 part(s) failed: bad", "| good ", "needs 103 GB of",
                 "no kernel image is available", "last words"):  # fmt: skip
        assert text in page, text
    again = open_record(path)
    assert set(again.parts) == {"good", "large", "last"}
    again.part("good", fail)  # kept, so not called
    again.part("bad", lambda: {})
    assert again.finish()
    assert json.loads(path.read_text())["parts"]["good"]["figure"] == 1


def not_here() -> dict[str, Any]:
    raise NotHereError("no CUDA runtime")


@pytest.mark.parametrize(("is_rehearsal", "status"), [(True, "not here"), (False, "failed")])
def test_only_a_rehearsal_may_lack_something(
    tmp_path: Path, is_rehearsal: bool, status: str
) -> None:
    record = open_record(tmp_path / "1_x.json", is_rehearsal=is_rehearsal)
    record.part("pinned", not_here)
    assert record.parts["pinned"] == {
        "status": status, "error": "no CUDA runtime", "elapsed_s": mock.ANY,
    }  # fmt: skip
    assert record.finish() is is_rehearsal


def test_what_broke_the_device_is_not_repeated_by_the_next_process(tmp_path: Path) -> None:
    def open_broken(*, keeps_failed: bool) -> Record:
        return Record(
            tmp_path / "1_x.json", FACTS, {}, summarize, is_broken=lambda: True,
            keeps_failed=keeps_failed,
        )  # fmt: skip

    # As FBGEMM's mapped memory does when it is freed on a broken device.
    program = """
import os, sys
from pathlib import Path
from benchmarks.gpu_day.record import Record, Summary
class Mapped:
    def __del__(self):
        os.abort()
def fail():
    mapped = Mapped()
    raise RuntimeError("an illegal memory access")
facts = {"is_rehearsal": True, "code": "c1"}
record = Record(Path(sys.argv[1]), facts, {}, lambda parts: Summary("", []), is_broken=lambda: True)
held = Mapped()
record.part("bad", fail)
"""
    path = str(tmp_path / "1_x.json")
    done = subprocess.run([sys.executable, "-c", program, path], cwd=REPOSITORY)
    assert done.returncode == BROKEN
    record = open_broken(keeps_failed=True)
    record.part("bad", lambda: {})  # kept, so not called
    record.part("good", lambda: {})
    assert {name: part["status"] for name, part in record.parts.items()} == {
        "bad": "failed", "good": "ok",
    }  # fmt: skip
    assert not record.finish()
    # Started again by hand it is made again.
    assert set(open_record(tmp_path / "1_x.json").parts) == {"good"}


DYING = """
import os, signal, sys
from pathlib import Path
from benchmarks.gpu_day.record import Record, Summary
keeps = "--keep-failed" in sys.argv
facts = {"is_rehearsal": False, "code": None}
record = Record(Path(sys.argv[1]), facts, {}, lambda parts: Summary("", []), keeps_failed=keeps)
if "WITHOUT_PARTS" not in os.environ:
    record.part("dies", lambda: os.kill(os.getpid(), signal.SIGKILL))
    record.part("good", lambda: {})
    sys.exit(0 if record.finish() else 1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("has_parts", [True, False])
def test_a_stage_whose_process_is_killed_goes_on_with_the_next_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_parts: bool
) -> None:
    # A module of the stages' namespace package.
    package = tmp_path / "benchmarks" / "gpu_day"
    package.mkdir(parents=True)
    (package / "dying.py").write_text(DYING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY}")
    if not has_parts:
        monkeypatch.setenv("WITHOUT_PARTS", "1")
    options = parse(["--out", str(tmp_path / "out"), "--stages", "1"])
    options.out.mkdir()
    document = run_stage(Stage(7, "dying", "Stage 7: dies"), options)
    assert document["status"] == "failed"
    parts = {name: part["status"] for name, part in document["parts"].items()}
    assert parts == ({"dies": "failed", "good": "ok"} if has_parts else {})


def test_a_call_goes_on_where_an_archive_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, archive = tmp_path / "first", tmp_path / "second", tmp_path / "day.tar.gz"
    first.mkdir()
    document = {"facts": {"is_rehearsal": False, "code": "c1"}, "status": "ok", "verdict": "v"}
    (first / "0_facts.json").write_text(json.dumps({**document, "elapsed_s": 1.0}))
    (first / "0_facts.png").write_bytes(b"picture")
    pack(first, archive)
    words = ["--stages", "0", "--out", str(second), "--archive", str(archive)]
    assert main([*words, "--from", str(archive)]) == 0
    assert (second / "0_facts.png").read_bytes() == b"picture"
    assert "kept, of code c1" in capsys.readouterr().err
    assert main([*words, "--from", str(archive)]) == 1
    assert (
        f"expected a file, and {second} without documents, got 0_facts" in capsys.readouterr().err
    )


def test_a_stage_whose_process_dies_is_recorded_with_the_end_of_its_log(tmp_path: Path) -> None:
    options = parse(["--out", str(tmp_path), "--stages", "1"])
    document = run_stage(Stage(7, "not_there", "Stage 7: none"), options)
    assert document["status"] == "failed"
    assert "No module named benchmarks.gpu_day.not_there" in document["log_tail"]
    assert "No module named" in (tmp_path / "7_not_there.md").read_text()


def tables(kind: OptimizerKind, tier: str, **kwargs: Any) -> tbe.Tables:
    return tbe.Tables(10, 6_700_000, 128, OptimizerSpec(kind, 0.1), tier, **kwargs)


def test_memory_is_predicted_by_tier_and_optimizer() -> None:
    rows, weights = 67_000_000, 4 * 128 * 67_000_000
    work = tables(OptimizerKind.sgd, tbe.UVM).memory(1000)[0]
    assert work == 1000 * (2 * 512 + 96)
    assert tables(OptimizerKind.sgd, tbe.DEVICE).memory(1000) == (weights + work, 0)
    assert tables(OptimizerKind.adam, tbe.DEVICE).memory(1000) == (3 * weights + work, 0)
    # Adam's moments stay with the rows; a row-wise sum is on the device.
    assert tables(OptimizerKind.adam, tbe.UVM).memory(1000) == (work, 3 * weights)
    assert tables(OptimizerKind.rowwise_adagrad, tbe.UVM).memory(1000) == (
        4 * rows + work, weights,
    )  # fmt: skip
    device, host = tables(OptimizerKind.sgd, tbe.UVM_CACHE, cache_frac=0.1).memory(1000)
    assert host == weights
    assert device == pytest.approx(0.1 * rows * (512 + 16) + 4 * rows + work, rel=1e-3)


def test_zipf_ids_are_skewed_scattered_and_different_by_table() -> None:
    ids = tbe.ZipfIds(1000, 1.05, CPU, seed=1).draw(2, 20000).view(2, -1)
    counts = [np.bincount(table.numpy(), minlength=1000) for table in ids]
    first, second = (int(count.argmax()) for count in counts)
    assert first != second
    share = 1 / sum(k**-1.05 for k in range(1, 1001))
    assert counts[0].max() / 20000 == pytest.approx(share, rel=0.1)
    assert all(count.argsort()[-10:].std() > 100 for count in counts)


def test_cases_of_a_budget_cost_the_same_gpu_memory() -> None:
    dim, table_rows = 128, [10_000, 50_000, 3]
    num_bytes = 4 * dim * sum(table_rows)
    budget = num_bytes / 5
    counts = {f"C{i}": np.arange(1, rows + 1) for i, rows in enumerate(table_rows, start=1)}
    cases = {case.name: case.plan for case in whole.make_cases(budget, dim, counts, 64, "cuda")}

    def cost(plan: Plan) -> float:
        if isinstance(plan.tables, TorchrecTables):
            is_cached = plan.tables.tier is TorchrecTier.fused_uvm_caching
            return plan.tables.cache_load_frac * num_bytes if is_cached else 0.0
        [frac] = {table.cache_load_frac for table in plan.tables.tables.values()}
        return frac * whole.slot_bytes(dim) * sum(table_rows) + (
            plan.num_hot * whole.hot_row_bytes(dim)
        )

    assert cost(cases.pop("UVM")) == cost(cases.pop(whole.TARGET)) == 0
    assert len(cases) == whole.NUM_HOST_CASES - 1
    for name, plan in cases.items():
        assert cost(plan) == pytest.approx(budget, rel=1e-2), name


def test_every_case_takes_the_same_host_memory() -> None:
    """It is pinned once: with a third of the rows the moments of Adam fit in as well."""
    sizes = tiers.Sizes(13_400_000, 104_857, 128, 30, 90)
    needs = {kind: sizes.tables(kind, tiers.Place(tbe.UVM)).memory(1)[1] for kind, _ in tiers.CASES}
    assert set(needs) == {OptimizerKind.sgd, OptimizerKind.rowwise_adagrad, OptimizerKind.adam}
    assert max(needs.values()) == 10 * 13_400_000 * 512
    assert min(needs.values()) > 0.99 * max(needs.values())


def test_distinct_rows_of_the_ids_of_all_tables() -> None:
    ids = torch.tensor([[1, 0, 1]] + [[2, 2, 2]] * (tiers.NUM_TABLES - 1)).view(-1)
    found = tiers.find_distinct(ids, 3)
    assert found.rows_U[:3].tolist() == [0, 1, 5]
    assert found.rows_U[found.of_ids_K][:4].tolist() == [1, 0, 1, 5]
    assert found.starts_U[:3].tolist() == [0, 1, 3]
    assert sorted(found.ids_K[1:3].tolist()) == [0, 2]
    assert found.longest == 3


def test_slots_are_compared_with_the_best_cache_of_as_many_bytes() -> None:
    def step(seconds: float) -> dict[str, Any]:
        laps = {"device": {"p10_s": seconds, "p50_s": seconds, "p90_s": seconds}}
        laps["host"] = laps["device"]
        stream = dict.fromkeys(("step", "forward", "backward"), laps)
        return {
            "status": "ok", "fresh": stream, "replayed": stream, "num_distinct": 5,
            "predicted_device_bytes": 1, "peak_device_bytes": 2,
            "moved": {"fetched": 7.0, "conflicts": 2.0}, "bus": {},
        }  # fmt: skip

    parts = {
        "sgd: device memory": step(1.0), "sgd: UVM cache 10%": step(6.0),
        "sgd: UVM cache 10%, prefetch": step(3.0), "sgd: slots 10%": step(1.5),
        "sgd: mapped slots 10%": step(2.0), "sgd: slots 10%, unique on the device": step(6.0),
        "adam: device memory": {"status": "does not fit", "error": "needs 69 GB of 60 GB"},
        "adam: slots 10%": step(2.0),
    }  # fmt: skip
    summary = tiers.summarize(parts)
    verdict = summary.verdict
    assert ", slots 10% 1.5 (2.00 times as fast as UVM cache 10%)" in verdict
    assert "mapped slots 10% 2.0 (1.50 times as fast as UVM cache 10%)" in verdict
    assert "unique on the device 6.0 (0.50 times as fast as UVM cache 10%);" in verdict
    # Without anything to compare with, the time itself.
    assert verdict.endswith("adam: slots 10% 2.00 s.")
    assert [table.title for table in summary.tables] == ["sgd", "adam"]
    assert summary.tables[0].rows[1][7] == "7 (2)"
    assert summary.tables[1].rows[0][:2] == ["device memory", "does not fit"]


def test_a_loss_that_is_no_number_parts_the_curves() -> None:
    parts = {
        name: {"status": "ok", "losses": [0.5, last], "batch_size": 8}
        for name, last in (("GPU", 0.25), ("CPU", 0.2500001))
    }
    summary = curve.summarize(parts)
    assert summary.is_ok
    assert "2 steps on the GPU and the CPU differ by at most 1.0e-07, in step 2" in summary.verdict
    parts["GPU"]["losses"] = [0.5, float("nan")]
    assert not curve.summarize(parts).is_ok
