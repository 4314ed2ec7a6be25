"""Programs with pooled and unpooled tables: one look-ahead, checkpoints, adaptive hot rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

import hotrec
from hotrec.embedding.tables import sharded_collections
from hotrec.types import (
    Exchange,
    Partition,
    Placement,
    Sharding,
    TablePlacement,
    TorchrecPlan,
)
from tests.distributed.test_program import DENSE, EMBEDDING, mean_over_ranks
from tests.distributed.test_program_forms import (
    NUM_STEPS,
    ROWS,
    Batch,
    Model,
    make_batch,
    reference,
)
from tests.helpers.ranks import run_ranks
from tests.unit.planner.situations import torchrec_plan

CPU = torch.device("cpu")
ALL_ROWS = {**ROWS, "seen": 40, "shop": 90}
PARTITION = Partition(ALL_ROWS, {name: np.arange(7) for name in ("user", "item", "seen")})


def unpooled(name: str, feature: str, dim: int = 8) -> EmbeddingConfig:
    return EmbeddingConfig(
        name=name, num_embeddings=ALL_ROWS[name], embedding_dim=dim, feature_names=[feature]
    )


class Decayed(nn.Module):
    """Sums the rows of each sequence, later ones with less weight."""

    def forward(self, sequences: Any) -> torch.Tensor:
        rows, lengths = sequences.values(), sequences.lengths()
        begins = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        places = torch.arange(rows.shape[0], device=rows.device) - begins
        weighted = rows / (1.0 + places[:, None])
        return torch.segment_reduce(weighted, "sum", lengths=lengths, initial=0.0)


class Both(Model):
    """The same features are read pooled and unpooled."""

    def __init__(self) -> None:
        super().__init__(keys=("user", "item", "seen", "shop"))
        self.sequences = EmbeddingCollection([unpooled("seen", "item"), unpooled("shop", "user")])
        self.decayed = Decayed()

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        found = self.bags(batch.ids)
        sequences = self.sequences(batch.ids)
        sums = [self.decayed(sequences[name]) for name in ("item", "user")]
        return [found["user"], found["item"], *sums]


class Alone(Both):
    """Without bags."""

    def __init__(self) -> None:
        super().__init__()
        del self.bags
        self.hidden = nn.Linear(2 + 8 * 2, 8)

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        sequences = self.sequences(batch.ids)
        return [self.decayed(sequences[name]) for name in ("item", "user")]


class PackedHere(Alone):
    """Sequences are packed, if they are hotrec's."""

    def __init__(self) -> None:
        super().__init__()
        hotrec.use_packed_jagged_tensor(self.sequences)
        self.late = hotrec.LateLinear([8], 8)
        with torch.no_grad():
            for parameter in self.late.parameters():
                parameter.uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(3))
        self.kinds: set[type] = set()

    def pooled(self, batch: Batch) -> list[torch.Tensor]:
        sequences = self.sequences(batch.ids)
        self.kinds |= {type(sequences[name]) for name in ("item", "user")}
        late = JaggedTensor(self.late([sequences["item"]]), lengths=sequences["item"].lengths())
        user = sequences["user"]
        if isinstance(user, hotrec.PackedJaggedTensor):
            user = user.materialize()
        return [self.decayed(late), self.decayed(user)]


def trained(
    make: type[Both],
    hot: Any,
    pipeline: str = "auto",
    *,
    directory: Path | None = None,
    first: int = 0,
    adapt_every: int = 0,
    device: torch.device = CPU,
) -> tuple[list[float], Any]:
    """Train from step ``first`` on, and save a checkpoint if there is none."""
    model, optimizer = hotrec.parallelize(
        make(),
        hot,
        embedding_optimizer=EMBEDDING,
        dense_optimizer=DENSE,
        pipeline=pipeline,
        batch_size=64,
        device=device,
    )
    hot_set = hotrec.AdaptiveHotSet(model, optimizer) if adapt_every else None
    if directory is not None and first:
        assert hotrec.load_checkpoint(directory, model, optimizer) == (first, {})
    rank, size = dist.get_rank(), dist.get_world_size()
    last = NUM_STEPS if directory is None or first else 2
    losses = []
    given: Any = {"hot_set": hot_set, "adapt_every": adapt_every} if hot_set else {}
    with hotrec.Pipeline(model, optimizer, device, **given) as steps:
        data = iter([make_batch(step, rank, size) for step in range(first, last)])
        for _ in range(first, last):
            losses.append(mean_over_ranks(steps.progress(data)[0]))
        if directory is not None and not first:
            steps.drain()
            hotrec.save_checkpoint(directory, model, optimizer, last)
    return losses, model


def check(losses: list[float], model: Any, expected: Any, first: int = 0) -> None:
    np.testing.assert_allclose(losses, expected[0][first : first + len(losses)], rtol=1e-5)
    if first + len(losses) < NUM_STEPS:
        return
    gathered = hotrec.gather_tables(model)
    for key, value in expected[1].items():
        if key.split(".")[-2] in ALL_ROWS:
            found = gathered[key.split(".")[-2]]
            np.testing.assert_allclose(found, value, atol=1e-5, err_msg=key)


def train_all(directory: Path, first: int) -> None:
    torch.set_num_threads(1)
    for make in (Both, Alone):
        expected = reference(make, make_batch)
        hot = PARTITION
        if make is Alone:
            names = ("seen", "shop")
            hot = Partition({n: ALL_ROWS[n] for n in names}, {"seen": np.arange(7)})
        for pipeline in ("look_ahead", "sparse_dist", "base"):
            losses, model = trained(make, hot, pipeline)
            kinds = [type(found).__name__ for _, found in sharded_collections(model)]
            assert kinds[-1] == "ShardedHotColdEmbeddingCollection"
            assert len(kinds) == (2 if make is Both else 1)
            check(losses, model, expected)
        losses, model = trained(make, hot, "look_ahead", directory=directory / make.__name__,
                                first=first)  # fmt: skip
        check(losses, model, expected, first)
    # The batches read low rows most.
    stale = Partition(ALL_ROWS, {"seen": np.arange(30, 37), "user": np.arange(60, 70)})
    losses, model = trained(Both, stale, "look_ahead", adapt_every=2)
    hot = {
        table: collection.partition.hot(table)
        for _, collection in sharded_collections(model)
        for group in collection.router.groups.values()
        for table in group.hot_tables
    }
    assert min(hot["seen"]) < 30
    assert min(hot["user"]) < 60
    check(losses, model, reference(Both, make_batch))
    rank, size = dist.get_rank(), dist.get_world_size()
    counted = hotrec.profile([make_batch(step, rank, size) for step in range(NUM_STEPS)], Both())
    assert counted.num_rows == ALL_ROWS
    assert set(counted.reuse) == set(ALL_ROWS)
    losses, model = trained(Both, counted)
    check(losses, model, reference(Both, make_batch))


def train_packed() -> None:
    torch.set_num_threads(1)
    names = ("seen", "shop")
    hot = Partition({n: ALL_ROWS[n] for n in names}, {"seen": np.arange(7)})
    expected = reference(PackedHere, make_batch)
    for pipeline in ("look_ahead", "sparse_dist", "base"):
        losses, model = trained(PackedHere, hot, pipeline)
        check(losses, model, expected)
        [found] = [part for part in model.modules() if isinstance(part, PackedHere)]
        assert found.kinds - {torch.fx.Proxy} == {hotrec.PackedJaggedTensor}, pipeline
    # TorchRec's collections stay expanded.
    if dist.get_world_size() == 1:
        losses, _ = trained(PackedHere, "off")
        np.testing.assert_allclose(losses, expected[0], rtol=1e-5)


def test_packed_sequences_train_as_unsplit() -> None:
    run_ranks(train_packed, 1, timeout_s=120)
    run_ranks(train_packed, 2, timeout_s=120)


def test_bags_and_sequences_train_as_unsplit_and_resume_on_other_ranks(tmp_path: Path) -> None:
    run_ranks(train_all, 2, timeout_s=280, directory=tmp_path, first=0)
    run_ranks(train_all, 3, timeout_s=280, directory=tmp_path, first=2)


def train_plans() -> None:
    """By the plans that ``parallelize`` may choose beside hot and cold rows."""
    torch.set_num_threads(1)
    for make in (Both, Alone):
        expected = reference(make, make_batch)
        for plan in TorchrecPlan:
            choice = hotrec.Choice(torchrec_plan(plan), "asked")
            losses, model = trained(make, choice)
            assert not list(sharded_collections(model))
            check(losses, model, expected)
    # Bags as TorchRec exchanges them beside sequences, which have no such exchange.
    tables = dict.fromkeys(ALL_ROWS, TablePlacement())
    tables["item"] = TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE)
    hot = Placement(Partition(ALL_ROWS, {"seen": np.arange(7)}), tables)
    for pipeline in ("look_ahead", "sparse_dist"):
        losses, model = trained(Both, hot, pipeline)
        check(losses, model, reference(Both, make_batch))


def test_plans_without_hot_rows_train_as_unsplit() -> None:
    run_ranks(train_plans, 2, timeout_s=280)


def test_a_table_of_bags_and_of_sequences_is_refused(one_rank: Any) -> None:
    class Twice(Both):
        def __init__(self) -> None:
            super().__init__()
            self.sequences = EmbeddingCollection([unpooled("item", "item")])

    with pytest.raises(ValueError, match=r"^tables \['item'\]: expected each name once"):
        hotrec.parallelize(Twice(), PARTITION, embedding_optimizer=EMBEDDING, dense_optimizer=DENSE)


def test_replicated_sequences_are_refused_on_a_cpu(one_rank: Any) -> None:
    """TorchRec returns wrong rows of them there."""
    model = Alone()
    sharding = ParameterConstraints(
        sharding_types=[ShardingType.DATA_PARALLEL.value],
        compute_kernels=[EmbeddingComputeKernel.DENSE.value],
    )
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints={"seen": sharding},
    )
    plan = planner.plan(model, [EmbeddingCollectionSharder()])
    with pytest.raises(ValueError, match=r"^table seen plan: .* on CPU, .* got data_parallel\."):
        hotrec.parallelize(
            model, "off", plan=plan, embedding_optimizer=EMBEDDING, dense_optimizer=DENSE
        )
