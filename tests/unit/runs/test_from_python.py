"""hotrec as a library: a configuration of dataclasses and a plan, without Hydra."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys
from pathlib import Path
import numpy as np
from hotrec.config.groups import (
    CostPlacement, DlrmConfig, FractionPlacement, RowwiseAdagradConfig, TorchrecPlacement
)
from hotrec.config.roots import Config, PathsConfig, PlannerConfig, TrainerConfig
from hotrec.cost_model.blocks import Block
from hotrec.cost_model.profile import write_profile
from hotrec.data.chunks import Dataset
from hotrec.assemble.job import plan_job
from hotrec.assemble.machine import make_machine
from hotrec.assemble.planning import make_proposal
import hotrec.bench.benchmark, hotrec.calibrate.measure, hotrec.runs.train
from tests.unit.data.logs import ONE_HOT_SCHEMA, write_dataset

folder = Path(sys.argv[1])
samples = write_dataset(folder / "dataset", {"train": 90}, schema=ONE_HOT_SCHEMA)["train"]
dataset = Dataset.open(folder / "dataset")
write_profile(
    [Block(num_samples=90, rows=dict(samples.features), lengths={})],
    dataset.schema, folder / "profile",
    dataset_hash=dataset.artifact.content_hash, num_samples=90,
)
placements = {
    "cost": CostPlacement(),
    "fraction": FractionPlacement(hot_frac=0.1),
    "torchrec": TorchrecPlacement(),
}
made = {}
for name, placement in placements.items():
    config = Config(
        dataset_name="tiny",
        model=DlrmConfig(embedding_dim=8, dense_layer_sizes=[8, 8], over_layer_sizes=[4, 1]),
        placement=placement,
        optimizer=RowwiseAdagradConfig(learning_rate=0.05),
        paths=PathsConfig(str(folder / "dataset"), str(folder / "profile"), str(folder / name)),
        planner=PlannerConfig(costs="cpu_1gbit"),
        trainer=TrainerConfig(batch_size=16),
    )
    job = plan_job(config, dataset.schema)
    machine = make_machine(world_size=2, ranks_per_host=2, device="cpu", batch_size=16)
    plan = make_proposal(job, dataset, machine).settle(folder / name)
    made[name] = {
        "hot": None if plan.partition is None else plan.partition.total_hot,
        "step_s": plan.predicted["step_s"],
        "costs": plan.prediction["costs"]["name"],
    }
assert not {"hydra", "omegaconf"} & set(sys.modules)
json.dump(made, sys.stdout)
"""


def test_plans_are_made_from_dataclasses_without_hydra(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    plans = json.loads(done.stdout)
    for plan in plans.values():
        assert plan["costs"] == "cpu_1gbit"
        assert plan["step_s"] > 0
    assert 0 < plans["fraction"]["hot"] <= 101  # a tenth of the 1,010 rows, if they were looked up
