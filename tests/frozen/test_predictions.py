"""The plans of 42 situations, and their predicted steps within 1e-6.

The cells are like those of ``benchmarks/choice_grid.py``, with data that is made in seconds: skews
x one-hot or bags x batches x networks, machines with GPUs of which some have too little memory, and
placements that are given. Costs are fixed: built-in ones, or ``costs/`` (measured for
``benchmarks/results/prediction_look_ahead`` and ``prediction``, with lines for slots and the loader
that calibration has measured since). A commit that changes the record (HOTREC_UPDATE_GOLDEN=1)
says why, and by how much the steps of the chosen plans moved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hotrec.artifact import commit_artifact, scratch_directory
from hotrec.cli import plan, prepare
from hotrec.cli.store import build_config, compose_config
from hotrec.config.data import OutlineSpec, OutlineTableSpec
from tests.frozen.record import FROZEN, is_updated
from tests.helpers.samples import sample

RECORD = FROZEN / "predictions.json"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
EXPONENTS = (0.8, 1.05, 1.2)
BATCH_SIZES = (512, 2048, 8192)
# Network -> ranks and ranks of a host.
NETWORKS = {"loopback": (2, 2), "1gbit": (4, 1), "100mbit": (2, 1)}
ONE_HOT_ROWS = (200_000, 20_000, 1460, 50)
BAGS = (
    *("data.synthetic.num_rows=[20000,5000,1000,50]", "data.synthetic.mean_lengths=[12]"),
    *("data.synthetic.num_dense=0", "data.synthetic.num_train=8192"),
    *("data.synthetic.num_valid=1024", "data.synthetic.rows_per_chunk=4096"),
    *("data.synthetic.num_periods=4", "data.synthetic.drift_frac=0.1"),
)
# Two sizes of rows, and of the dense layers.
MODELS = {
    "onehot": ("model.embedding_dim=64", "model.dense_layer_sizes=[128,64]"),
    "bags": ("model.embedding_dim=16", "model.dense_layer_sizes=[16]"),
}
CPU = ("plan.device=cpu", "planner.host_gib=16")
CUDA = ("plan.device=cuda", "planner.host_gib=64", "trainer.batch_size=4096")
# A replay of the slots takes as long as there are lookups.
FEW = ("trainer.batch_size=256", "trainer.eval_batch_size=256")
NO_DECLINE = "placement.may_decline=false"


def all_cells() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Every cell by name: its dataset, and the words of its command."""
    cells = {
        f"zipf{exponent}-{shape}_b{batch_size}_{network}": (
            f"zipf{exponent}-{shape}",
            (
                *CPU,
                *("planner.costs=measured", f"paths.costs=costs/{network}"),
                f"trainer.batch_size={batch_size}",
                f"plan.world_size={NETWORKS[network][0]}",
                f"plan.ranks_per_host={NETWORKS[network][1]}",
            ),
        )
        for (i, exponent), (j, shape), (k, batch_size), (m, network) in product(
            enumerate(EXPONENTS),
            enumerate(("onehot", "bags")),
            enumerate(BATCH_SIZES),
            enumerate(NETWORKS),
        )
        if (i + j + k + m) % 2 == 0
    }
    bags, one_hot = "zipf1.05-bags", "zipf1.05-onehot"
    a_gbit = ("planner.costs=cpu_1gbit", "plan.world_size=2", "plan.ranks_per_host=1")
    small = "planner.hbm_gib=0.05"
    a_host = ("planner.costs=dgx_h100_infiniband", "plan.world_size=8")
    own = {
        "gpu_one_host": (one_hot, *CUDA, *a_host),
        "gpu_two_hosts": (one_hot, *CUDA, *a_host, "plan.ranks_per_host=4"),
        "gpu_a100_bags": (bags, *CUDA, "planner.costs=dgx_a100", "plan.world_size=8"),
        "gpu_hot_rows": (bags, *CUDA, *a_host, NO_DECLINE, "placement.hot_budget_mib=1"),
        "gpu_small_device": (one_hot, *CUDA, *a_host, small, NO_DECLINE),
        "gpu_one_rank": (one_hot, *CUDA, "planner.costs=one_gpu_pcie", "plan.world_size=1", small),
        "gpu_slots": (
            *(one_hot, *CUDA, *a_host, *FEW, "pipeline=look_ahead"),
            *("placement=all_cold", "placement.cold_tier=cached"),
        ),
        "gpu_slots_bf16": (
            *(one_hot, *CUDA, *a_host, *FEW, "pipeline=look_ahead", "placement=coverage"),
            *("placement.cold_tier=cached", "placement.cold_rows=bf16"),
            *("placement.row_fetch=staged", "placement.cache_load_frac=0.2"),
        ),
        "gpu_prefetch": (
            *(one_hot, *CUDA, *a_host, "placement=torchrec", "pipeline=prefetch"),
            "placement.tier=fused_uvm_caching",
        ),
        "cpu_slots": (
            *(bags, *CPU, *a_gbit, *FEW, "pipeline=look_ahead"),
            *("placement=all_cold", "placement.cold_tier=cached", "placement.cache_load_frac=0.4"),
        ),
        "cpu_no_decline": (one_hot, *CPU, *a_gbit, NO_DECLINE, "pipeline=sparse_dist"),
        "cpu_no_pooling": (bags, *CPU, *a_gbit, NO_DECLINE, "placement.may_pool=false"),
        "cpu_override": (bags, *CPU, *a_gbit, "+placement.overrides.t0=0.01", "pipeline=base"),
        "cpu_coverage_bf16": (
            *(one_hot, *CPU, *a_gbit, "placement=coverage", "pipeline=look_ahead"),
            *("pipeline.wire=bf16", "pipeline.depth=0"),
        ),
        "cpu_torchrec": (one_hot, *CPU, *a_gbit, "placement=torchrec"),
    }
    return cells | {name: (words[0], words[1:]) for name, words in own.items()}


CELLS = all_cells()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the costs and the bags are; the one-hot datasets are outlines."""
    folder = tmp_path_factory.mktemp("predictions")
    with chdir(folder):
        for file in (FROZEN / "costs").glob("*.json"):
            document = json.loads(file.read_text())
            with scratch_directory(Path("costs", file.stem), kind="costs") as scratch:
                (scratch / "costs.json").write_text(file.read_text())
                content = {name: document[name] for name in ("name", "origin", "device")}
                commit_artifact(scratch, Path("costs", file.stem), kind="costs", content=content)
        for exponent in EXPONENTS:
            config = configuration(f"zipf{exponent}-bags", ())
            prepare.run(config, folder)
        yield folder


def configuration(data: str, words: tuple[str, ...]) -> Any:
    """The configuration of a command, with a dataset by its name."""
    skew, _, shape = data.removeprefix("zipf").partition("-")
    drawn = [*BAGS, f"data.synthetic.zipf_exponent={skew}"] if shape == "bags" else []
    given = ("data=synthetic", f"dataset_name={data}", *MODELS[shape], *drawn, *words)
    config = build_config(compose_config("config", given))
    if shape == "bags":
        return config
    tables = {
        f"t{number}": OutlineTableSpec(num_rows, float(skew))
        for number, num_rows in enumerate(ONE_HOT_ROWS)
    }
    outline = OutlineSpec("a test", num_train=500_000, num_dense=13, tables=tables)
    return replace(config, data=replace(config.data, outline=outline))


def predict(name: str, folder: Path) -> dict[str, Any]:
    """The plan that ``hotrec plan`` chooses for a cell, and its step."""
    data, words = CELLS[name]
    run_dir = folder / "runs" / name
    run_dir.mkdir(parents=True)
    plan.run(configuration(data, words), run_dir)
    document = json.loads((run_dir / "prediction.json").read_text())
    chosen = document["chosen"]
    return {"chosen": chosen, "step_s": document["plans"][chosen]["step_s"]}


def test_plans_are_the_recorded_ones(folder: Path) -> None:
    names = list(CELLS) if is_updated() else sample(list(CELLS), 0, 3)
    found = {name: predict(name, folder) for name in names}
    if is_updated():
        lines = (f" {json.dumps(name)}: {json.dumps(cell)}" for name, cell in found.items())
        RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    recorded = json.loads(RECORD.read_text())
    assert list(recorded) == list(CELLS)
    for name, cell in found.items():
        assert cell["chosen"] == recorded[name]["chosen"], name
        assert cell["step_s"] == pytest.approx(recorded[name]["step_s"], rel=1e-6), name
