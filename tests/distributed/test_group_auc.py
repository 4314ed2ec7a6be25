"""GAUC over ranks: groups whose samples lie on several, and ranks without any sample."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotrec.cli.store import build_config, compose_config, read_config
from hotrec.config.data import SyntheticSpec
from hotrec.config.roots import Config, EvaluateConfig
from hotrec.data.synthetic import write_synthetic
from hotrec.runs.evaluate import evaluate_run
from hotrec.runs.train import run_training
from hotrec.runtime.ranks import Ranks, all_gather_object
from hotrec.train.evaluate import evaluate
from hotrec.train.pipelines import make_pipeline
from hotrec.types import PipelineKind, PipelineSpec
from tests.distributed.setups import this_rank
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import build_tiny, tiny_batch
from tests.unit.train.test_group_auc import by_groups


def evaluate_spread_groups() -> None:
    """Rank 1 has fewer samples, and the last rank none but padding."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    rng = torch.Generator().manual_seed(rank)
    batches = [
        replace(
            tiny_batch(10 * rank + seed, 9, num_padding=num),
            groups=torch.randint(-1, 4, (9,), generator=rng),
        )
        for seed, num in enumerate([9, 9] if rank == last > 0 else [0, 4 * rank])
    ]
    model, optimizer = build_tiny()
    with torch.no_grad():
        outputs = [(*model.eval()(batch)[1][1:], batch) for batch in batches]
    mine = [
        [of[batch.weights > 0] for of in (logits, labels, batch.groups)]
        for logits, labels, batch in outputs
    ]
    parts = [part for of_rank in all_gather_object(mine) for part in of_rank]
    logits, labels, groups = (torch.cat(of).numpy() for of in zip(*parts, strict=True))
    expected = by_groups(logits, labels == 1, groups)
    spec = PipelineSpec(PipelineKind.sparse_dist)
    quality = evaluate(make_pipeline(spec, model, optimizer, torch.device("cpu")), batches)
    assert quality.further["gauc"] == pytest.approx(expected.gauc, rel=1e-12)
    assert quality.further["gauc_samples_frac"] == pytest.approx(expected.samples_frac, rel=1e-12)
    assert quality.num_samples == len(logits)
    assert len(set(all_gather_object(quality.further["gauc"]))) == 1


@pytest.mark.parametrize("world_size", [1, 3])
def test_groups_spread_over_ranks_are_measured_whole(world_size: int) -> None:
    run_ranks(evaluate_spread_groups, world_size=world_size)


def evaluate_trained(run: Path) -> set[tuple[Any, ...]]:
    trained, found = read_config(run / "config.yaml", Config), set()
    for batch_size in (4, 5, 7, 64, 1):
        config = EvaluateConfig(split="valid", num_workers=0, batch_size=batch_size)
        quality = evaluate_run(config, trained, run, this_rank()).quality
        gauc = [quality.further[name] for name in ("gauc", "gauc_samples_frac")]
        found.add((quality.num_samples, quality.auc, *gauc))
    return found


def test_any_number_of_ranks_evaluates_a_run_alike(tmp_path: Path, one_rank: Ranks) -> None:
    """Rank 2 has no sample in the last of nine steps, and many samples are equal: exact ties."""
    spec = SyntheticSpec([6, 3], num_dense=0, num_train=300, num_valid=98, num_test=0)
    write_synthetic(spec, tmp_path / "dataset")
    words = [
        *("data=synthetic", f"paths.dataset={tmp_path}/dataset", "placement=torchrec"),
        *("model.embedding_dim=4", "model.over_layer_sizes=[64,1]"),
        *("trainer.batch_size=32", "trainer.eval_batch_size=4", "trainer.num_workers=0"),
        *("trainer.eval_group_by=c0", "trainer.eval_splits=[valid]", "trainer.best_by=gauc"),
        *("trainer.eval_every_steps=3", "trainer.early_stop_patience=2"),
    ]
    run = tmp_path / "run"
    run.mkdir()
    config = build_config(compose_config("config", words))
    summary = run_training(config, run, one_rank).summary
    lines = map(json.loads, (run / "eval.jsonl").read_text().splitlines())
    gaucs = {line["step"]: line["gauc"] for line in lines}
    assert summary["best_gauc"] == summary["gauc"] == max(gaucs.values()) != summary["auc"]
    assert gaucs[summary["best_step"]] == summary["gauc"]
    assert summary["gauc_samples_frac"] > 0.5
    expected = {(98, *(summary[name] for name in ("auc", "gauc", "gauc_samples_frac")))}
    for world_size in (1, 3):
        assert run_ranks(evaluate_trained, world_size, run=run) == [expected] * world_size
