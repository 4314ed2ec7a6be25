"""Rows behind device slots against the same rows without: no bit may differ."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hotrec.data.batch import Batch
from hotrec.embedding.cached_rows import RowMover
from hotrec.embedding.tables import gather_tables
from hotrec.runtime.ranks import Ranks
from hotrec.train.checkpoint import Checkpoints, Position, load_checkpoint, save_checkpoint
from hotrec.train.pipelines import Pipeline, make_pipeline
from hotrec.types import (
    HotExchange,
    OptimizerKind,
    PipelineKind,
    PipelineSpec,
    RowFetch,
    Tier,
    WireType,
)
from tests.distributed.parity_cases import Case, build_hot_cold, rank_batch
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import sample
from tests.helpers.tiny import TinyLoader

KINDS = [OptimizerKind.sgd, OptimizerKind.adagrad, OptimizerKind.rowwise_adagrad]
TORCH_NAMES = {WireType.fp16: "float16", WireType.bf16: "bfloat16"}
# Steps of training with a drained pipeline after each, then as many of evaluation.
SEGMENTS = (5, 4)


def make_cache_cases(num_cases: int, seed: int) -> list[Case]:
    """Every optimizer with every depth and size of the cache, from the least to all rows."""
    rng = np.random.default_rng(seed)
    return [
        Case(
            seed=int(rng.integers(1 << 30)),
            partition=("all_cold", "random", "one_row")[int(rng.integers(3))],
            optimizer=KINDS[index % 3],
            is_weighted=bool(rng.integers(2)),
            is_uniform_dim=bool(rng.integers(2)),
            exchange=HotExchange.auto,
            route_in_loader=bool(rng.integers(2)),
            tier=Tier.CACHED,
            batches=("drawn", "drawn", "same_rows", "no_ids")[int(rng.integers(4))],
            placement=("row_wise", "row_wise", "table_wise")[int(rng.integers(3))],
            pipeline="look_ahead",
            depth=(1, 2, 3, 4, 0)[index % 5],
            micro_batches=bool(rng.integers(2)),
            cache_load_frac=(0.02, 0.02, 0.6, 1.0)[index % 4],
            popular_frac=(0.0, 0.5)[int(rng.integers(2))],
            window=(0, 1, 3, 8)[index // 2 % 4],
            row_fetch=(RowFetch.staged, RowFetch.mapped)[index // 3 % 2],
        )
        for index in range(num_cases)
    ]


def batches_of(case: Case, begin: int, end: int) -> Iterator[Batch]:
    """Batches whose rows drift: the popular ones of a step are others some steps later."""
    sizes: dict[str, int] = {}
    for table in case.tables:
        for feature in table.features:
            sizes[feature] = min(sizes.get(feature, table.num_rows), table.num_rows)
    for step in range(begin, end):
        batch = rank_batch(case, step, dist.get_rank(), dist.get_world_size())
        ids = batch.sparse.values().split(batch.sparse.length_per_key())
        for feature, of_feature in zip(batch.sparse.keys(), ids, strict=True):
            of_feature.add_(step * (sizes[feature] // 7)).remainder_(sizes[feature])
        yield batch


def spec_of(case: Case) -> PipelineSpec:
    return PipelineSpec(
        PipelineKind.look_ahead,
        depth=case.depth,
        window=case.window,
        micro_batches=case.micro_batches,
    )


def run_training(case: Case) -> list[Any]:
    """Losses, and tables with their optimizer state after each segment; logits of evaluation."""
    model, optimizer, _ = build_hot_cold(case)
    device = torch.device("cpu")

    pipeline = make_pipeline(spec_of(case), model, optimizer, device, hot_exchange=case.exchange)
    found: list[Any] = []
    step = 0
    try:
        for num_steps in SEGMENTS:
            found += run_steps(pipeline, batches_of(case, step, step + num_steps), num_steps)
            step += num_steps
            found.append(gather_tables(model))
            found.append(states_of(model))
            model.eval()
            with torch.no_grad():
                found += run_steps(pipeline, batches_of(case, step, step + 2), 2)
            model.train()
            pipeline.drain()
    finally:
        pipeline.close()
    return found


def run_steps(pipeline: Pipeline, batches: Iterator[Batch], num_steps: int) -> list[torch.Tensor]:
    pipeline.start()
    outputs = []
    for at in range(num_steps):
        if at == 2:
            pipeline.drain()  # batches stay held
        outputs += pipeline.progress(batches)[:2]
    pipeline.drain()
    return outputs


def states_of(model: Any) -> dict[str, torch.Tensor]:
    """This rank's optimizer state of its cold rows."""
    return {
        f"{name} {key} {at}": shard.tensor.clone()
        for name, state in model.fused_optimizer.state_dict()["state"].items()
        for key, value in state.items()
        for at, shard in enumerate(value.local_shards())
    }


def run_with_least(case: Case) -> list[Any]:
    """The training, with as many more slots than the case's as errors say it needs."""
    while True:
        try:
            return run_training(case)
        except ValueError as error:
            said = re.search(r"expected at least (\d+) slots .* got (\d+)\.", str(error))
            if said is None:
                raise
            factor = int(said[1]) / int(said[2])
        frac = min(1.0, case.cache_load_frac * factor)
        assert frac > case.cache_load_frac, case
        case = replace(case, cache_load_frac=frac)


def differs(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() != other.keys() or any(differs(one[key], other[key]) for key in one)
    return not torch.equal(one, other)


def check_cases(cases: list[Case]) -> list[str]:
    """The cases in which the cache changes a bit on this rank."""
    torch.set_num_threads(1)
    wrong = []
    for case in cases:
        expected = run_training(replace(case, tier=Tier.DEVICE))
        found = run_with_least(case)
        at = [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if differs(a, b)]
        wrong += [f"{case}: results {at}"] if at else []
    return wrong


@pytest.mark.parametrize("row_type", [WireType.fp16, WireType.bf16])
def test_rows_in_half_precision_resume_bit_for_bit_and_are_loaded_by_any_placement(
    one_rank: Ranks, tmp_path: Path, row_type: WireType
) -> None:
    plain = replace(
        make_cache_cases(3, 0)[2], partition="one_row", placement="row_wise", batches="drawn",
        cache_load_frac=0.7, tier=Tier.DEVICE, depth=1, popular_frac=0.3,
    )  # fmt: skip
    case = replace(plain, tier=Tier.CACHED, window=3, row_type=row_type)
    losses, saved, path = train_from(case, tmp_path, None)
    resumed_losses, resumed, _ = train_from(case, tmp_path, path)
    assert not differs(losses, resumed_losses)
    assert not differs(saved["at the end"], resumed["at the end"])
    assert not differs(saved["first"], resumed["first"])
    _, in_fp32, _ = train_from(plain, tmp_path, path)
    assert not differs(saved["first"], in_fp32["first"])
    exact_losses, exact, path_of_fp32 = train_from(plain, tmp_path / "fp32", None)
    assert differs(losses, exact_losses)
    torch.testing.assert_close(losses, exact_losses, rtol=0, atol=0.01)
    _, from_fp32, _ = train_from(case, tmp_path, path_of_fp32)
    for name, table in from_fp32["first"].items():
        nearest = exact["first"][name].to(getattr(torch, TORCH_NAMES[row_type])).float()
        is_hot = table == exact["first"][name]  # replicas are fp32
        assert (is_hot | (table == nearest)).all()


def train_from(
    case: Case, folder: Path, path: Path | None
) -> tuple[torch.Tensor, dict[str, dict[str, torch.Tensor]], Path]:
    """Trains four steps and saves, or loads; then four more. Their losses, and the tables."""
    model, optimizer, _ = build_hot_cold(case)
    if path is not None:
        load_checkpoint(path, model=model, optimizer=optimizer, facts={})
    device = torch.device("cpu")
    pipeline = make_pipeline(spec_of(case), model, optimizer, device)
    if path is None:
        run_steps(pipeline, batches_of(case, 0, 4), 4)
        checkpoints = Checkpoints(folder, facts={})
        path = save_checkpoint(
            checkpoints, Position(4, 4), model, optimizer, TinyLoader(num_batches=1)
        )
    tables = {"first": gather_tables(model)}
    losses = torch.stack(run_steps(pipeline, batches_of(case, 4, 8), 4)[::2])
    tables["at the end"] = gather_tables(model)
    pipeline.close()
    return losses, tables, path


@pytest.mark.parametrize(("window", "num_steps"), [(0, 1), (3, 2)])
def test_steps_are_computed_while_rows_of_later_ones_are_moved(
    one_rank: Ranks, monkeypatch: pytest.MonkeyPatch, window: int, num_steps: int
) -> None:
    """They return before the rows have arrived, which with a window are moved a step earlier."""
    case = replace(
        make_cache_cases(1, 0)[0], partition="all_cold", placement="row_wise", depth=1,
        micro_batches=False, batches="drawn", cache_load_frac=1.0, popular_frac=0.0,
    )  # fmt: skip
    model, optimizer, _ = build_hot_cold(case)
    device, gather = torch.device("cpu"), RowMover.gather
    is_fetching, may_fetch = threading.Event(), threading.Event()

    def gather_later(*given: Any) -> list[torch.Tensor | None]:
        is_fetching.set()
        assert may_fetch.wait(20)
        return gather(*given)

    spec = PipelineSpec(PipelineKind.look_ahead, window=window)
    pipeline = make_pipeline(spec, model, optimizer, device)
    pipeline.start()
    batches = batches_of(case, 0, 8)
    pipeline.progress(batches)
    pipeline.drain()
    monkeypatch.setattr(RowMover, "gather", gather_later)
    for _ in range(num_steps):
        pipeline.progress(batches)
    assert is_fetching.wait(20)
    assert not may_fetch.is_set()
    may_fetch.set()
    pipeline.progress(batches)
    pipeline.drain()
    pipeline.close()


@pytest.mark.parametrize(
    ("world_size", "num_cases", "seed"),
    [*((1, 20, seed) for seed in sample(range(6), 0, 2)), (2, 8, 20), (3, 6, 30)],
)
def test_slots_change_no_bit(world_size: int, num_cases: int, seed: int) -> None:
    # In processes of their own, since the threads of a process group outlive its pipelines.
    cases = make_cache_cases(num_cases, seed)
    for wrong in run_ranks(check_cases, world_size, timeout_s=240, cases=cases):
        assert wrong == []
