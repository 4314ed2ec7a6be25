"""Unpooled tables on real ranks: every pipeline trains the unsplit model, and no depth a bit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from hotrec.assemble.constraints import placement_constraints
from hotrec.data.batch import Batch
from hotrec.embedding.canonical import canonical_parts
from hotrec.embedding.collection import HotColdEmbeddingCollection, SequenceLayout
from hotrec.embedding.convert import check_replicas
from hotrec.embedding.initialize import initial_rows
from hotrec.embedding.late import LateLinear
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.packed import PackedJaggedTensor, PackedLayout
from hotrec.embedding.sharding import HotColdSequenceSharder
from hotrec.embedding.tables import gather_tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.task import ClickTask
from hotrec.runtime.hosts import RANKS_PER_HOST
from hotrec.train.pipelines import make_pipeline
from hotrec.types import (
    Levels,
    OptimizerKind,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    Tier,
)
from tests.distributed.setups import mean_over_ranks, shard_task
from tests.helpers.ranks import run_ranks
from tests.helpers.reference import PlainRowWiseAdagrad, mean_loss

NUM_DENSE, NUM_CONTENT, NUM_STEPS, SEED, TOLERANCE = 3, 6, 4, 5, 1e-5
ROWS = {"item": 200, "artist": 9, "user": 30}
DIMS = {"item": 4, "artist": 8, "user": 4}
# The candidate is an item too; tables are read in another order than the features are given.
FEATURES = {"item": ["history", "candidate"], "artist": ["by"], "user": ["who"]}
LIMITS = {"who": 30, "by": 9, "history": 200, "candidate": 200}
SPEC = OptimizerSpec(OptimizerKind.rowwise_adagrad, learning_rate=0.3, eps=1e-3)
PARTITIONS = {
    "all_cold": Partition(ROWS),
    "mixed": Partition(ROWS, {"item": np.array([7, 0, 3, 1]), "artist": np.arange(9)}),
    "all_hot": Partition(ROWS, {name: np.arange(rows) for name, rows in ROWS.items()}),
}


def configs(names: list[str]) -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(
            name=name,
            num_embeddings=ROWS[name],
            embedding_dim=DIMS[name],
            feature_names=FEATURES[name],
        )
        for name in names
    ]


class Unsplit(nn.Module):
    """The reference: TorchRec's collections, which have one dimension each."""

    def __init__(self) -> None:
        super().__init__()
        self.by_dim = nn.ModuleList(
            [
                EmbeddingCollection(configs(["item", "user"])),
                EmbeddingCollection(configs(["artist"])),
            ]
        )
        with torch.no_grad():
            for name, weight in self.weights().items():
                rows = torch.arange(ROWS[name])
                weight.copy_(initial_rows(SEED, name, rows, DIMS[name], ROWS[name]))

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            name: table.weight
            for collection in self.by_dim
            for name, table in collection.embeddings.items()  # type: ignore[union-attr, operator]
        }

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        found: dict[str, JaggedTensor] = {}
        for collection in self.by_dim:
            found |= collection(features)
        return found


class Reader(nn.Module):
    """Sums the rows of each sequence, each weighted by its position, so that the order matters.

    And what a layer makes of an item and its artist, which it takes packed or not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.content = LateLinear([DIMS["item"], DIMS["artist"]], NUM_CONTENT)

    def forward(self, dense: torch.Tensor, found: Any) -> torch.Tensor:
        lengths = found["history"].lengths().long()
        content = torch.tanh(self.content([found["history"], found["by"]]))
        parts = [dense, decayed(content, lengths)]
        for name in LIMITS:
            of_feature = found[name]
            if isinstance(of_feature, PackedJaggedTensor):
                of_feature = of_feature.materialize()
            parts.append(decayed(of_feature.values(), of_feature.lengths().long()))
        return torch.cat(parts, dim=1)


def decayed(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    begins = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    weighted = rows / (1.0 + (torch.arange(rows.shape[0]) - begins)[:, None])
    return torch.segment_reduce(weighted, "sum", lengths=lengths, initial=0.0)


class SequenceModel(nn.Module):
    def __init__(self, sequences: nn.Module) -> None:
        super().__init__()
        self.sequences = sequences
        self.reader = Reader()
        width = sum(DIMS[name] * len(FEATURES[name]) for name in ROWS)
        self.hidden, self.out = nn.Linear(NUM_DENSE + NUM_CONTENT + width, 8), nn.Linear(8, 1)
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for parameter in self.layers():
                parameter.uniform_(-0.5, 0.5, generator=generator)

    def layers(self) -> list[nn.Parameter]:
        layers = (self.reader, self.hidden, self.out)
        return [parameter for layer in layers for parameter in layer.parameters()]

    def forward(self, dense: torch.Tensor, sparse: Any) -> torch.Tensor:
        joined = self.reader(dense, self.sequences(sparse))
        return self.out(torch.tanh(self.hidden(joined)))


@dataclass(frozen=True)
class Case:
    """One way to train; ``depth`` and what follows are those of look-ahead."""

    partition: str
    pipeline: str
    depth: int = 1
    micro_batches: bool = False
    tier: Tier = Tier.DEVICE
    levels: Levels = Levels.one
    layout: type[SequenceLayout] = SequenceLayout


def make_global(step: int, world_size: int) -> tuple[list[int], list[Batch], int]:
    """The batch of each rank; ranks have unequal shares, and sequences may be empty."""
    rng = np.random.default_rng((9, step))
    shares = [int(rng.integers(1, 7)) for _ in range(world_size)]
    total, batches = sum(shares), []
    for share in shares:
        ids, lengths = [np.empty(0, np.int64)], []
        of_history = rng.integers(0, 6, share)
        for name, limit in LIMITS.items():
            for sample in range(share):
                length = int(of_history[sample]) if name in ("history", "by") else 1
                lengths.append(length)
                # Few rows: a sample reads one several times, and the next batch again.
                ids.append((rng.random(length) ** 3 * limit).astype(np.int64))
        if step == 2:  # a step in which no sequence has an id
            ids, lengths = [np.empty(0, np.int64)], [0] * len(lengths)
        batches.append(
            Batch(
                torch.from_numpy(rng.standard_normal((share, NUM_DENSE)).astype(np.float32)),
                KeyedJaggedTensor(
                    list(LIMITS),
                    torch.from_numpy(np.concatenate(ids)),
                    lengths=torch.tensor(lengths, dtype=torch.int32),
                ),
                torch.from_numpy(rng.integers(0, 2, share).astype(np.float32)),
                torch.ones(share),
                total,
            )
        )
    return shares, batches, total


def run_reference(world_size: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of the unsplit model; the batches of the ranks one after the other."""
    tables = Unsplit()
    model = SequenceModel(tables)
    optimizers: list[torch.optim.Optimizer] = [
        PlainRowWiseAdagrad(list(tables.parameters()), lr=SPEC.learning_rate, eps=SPEC.eps),
        torch.optim.SGD(model.layers(), lr=0.1),
    ]
    losses = []
    for step in range(NUM_STEPS):
        shares, batches, total = make_global(step, world_size)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=False)
        parts = [
            mean_loss(model(batch.dense, batch.sparse), batch.labels) * share / total
            for share, batch in zip(shares, batches, strict=True)
        ]
        loss = torch.stack(parts).sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: weight.detach() for name, weight in tables.weights().items()}


def build(case: Case) -> tuple[Any, Any]:
    partition = PARTITIONS[case.partition]
    placement = Placement.alike(partition)
    if case.tier is not Tier.DEVICE:
        placement = Placement.alike(partition, case.tier, 0.6)
    collection = HotColdEmbeddingCollection(
        configs(list(ROWS)), placement, device=torch.device("meta"), layout=case.layout
    )
    task = ClickTask(SequenceModel(collection), dist.get_world_size())
    model = shard_task(
        task,
        HotColdSequenceSharder(SPEC, levels=case.levels),
        placement_constraints(placement),
        data_parallel=case.pipeline != "look_ahead",
        seed=SEED,
    )
    dense = OptimizerSpec(OptimizerKind.sgd, learning_rate=0.1)
    return model, make_optimizer(model, SPEC, dense)


def train(case: Case) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, optimizer = build(case)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batches = [make_global(step, world_size)[1][rank] for step in range(NUM_STEPS)]
    spec = PipelineSpec(
        PipelineKind[case.pipeline], depth=case.depth, window=0, micro_batches=case.micro_batches
    )
    losses = []
    with make_pipeline(spec, model, optimizer, torch.device("cpu")) as pipeline:
        pipeline.start()
        iterator = iter(batches)
        for _ in batches:
            losses.append(mean_over_ranks(pipeline.progress(iterator)[0]))
        pipeline.drain()
    check_replicas(model)
    return losses, gather_tables(model)


CASES = [
    Case(partition, *how)
    for partition in PARTITIONS
    for how in (("base",), ("sparse_dist",), ("look_ahead", 1), ("look_ahead", 3, True))
]


class Comparison:
    """Cases against the unsplit model on these ranks; ``found`` is what differs."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._losses, self._weights = run_reference(dist.get_world_size())
        self.found: list[str] = []

    def run(self, case: Case) -> dict[str, torch.Tensor]:
        losses, weights = train(case)
        if not np.allclose(losses, self._losses, rtol=0, atol=TOLERANCE):
            self.found.append(f"{case}: losses {losses}, expected {self._losses}")
        assert weights.keys() == self._weights.keys()
        for name, weight in weights.items():
            worst = float((weight - self._weights[name]).abs().max())
            if not worst <= TOLERANCE:
                self.found.append(f"{case}: table {name} differs by {worst}")
        return weights


def train_all() -> list[str]:
    """What differs from the unsplit model, or between depths."""
    unsplit = Comparison()
    for case in CASES:
        unsplit.run(case)
    for partition, tier in (
        ("mixed", Tier.DEVICE),
        ("all_cold", Tier.DEVICE),
        ("mixed", Tier.CACHED),
    ):
        case = Case(partition, "look_ahead", depth=0, tier=tier)
        plain = unsplit.run(case)
        # In slots, which hold the rows of few batches, not as far ahead.
        for depth in (0, 1, 3) if tier is Tier.DEVICE else (0, 1):
            ahead = unsplit.run(replace(case, depth=depth))
            unsplit.found += [
                f"{case}: {name} at depth {depth}"
                for name, weight in plain.items()
                if not torch.equal(weight, ahead[name])
            ]
    return unsplit.found


def train_packed() -> list[str]:
    """What differs from the unsplit model, in a repetition, or at another depth of look-ahead."""
    unsplit = Comparison()
    expected: dict[str, dict[str, torch.Tensor]] = {}
    for case in CASES * 2:
        found = unsplit.run(replace(case, layout=PackedLayout))
        before = expected.setdefault(repr(replace(case, depth=1)), found)
        unsplit.found += [
            f"{case}: {name} of another run"
            for name, weight in before.items()
            if not torch.equal(weight, found[name])
        ]
    for tier in (Tier.DEVICE, Tier.CACHED):
        case = Case("mixed", "look_ahead", tier=tier, layout=PackedLayout)
        before = unsplit.run(replace(case, depth=0))
        found = unsplit.run(case)
        unsplit.found += [
            f"{case}: {name} at depth 1"
            for name, weight in before.items()
            if not torch.equal(weight, found[name])
        ]
    return unsplit.found


def train_in_two_levels() -> list[str]:
    unsplit = Comparison()
    for partition in ("all_cold", "mixed"):
        for how in (("sparse_dist",), ("look_ahead", 1)):
            unsplit.run(Case(partition, *how, levels=Levels.two))
    return unsplit.found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_pipeline_trains_the_unsplit_model_and_depth_changes_no_bit(world_size: int) -> None:
    for failures in run_ranks(train_all, world_size, timeout_s=280):
        assert not failures, "\n".join(failures)


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_pipeline_trains_the_unsplit_model_with_packed_output(world_size: int) -> None:
    for failures in run_ranks(train_packed, world_size, timeout_s=280):
        assert not failures, "\n".join(failures)


def test_rows_of_sequences_cross_the_network_once_per_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANKS_PER_HOST, "2")
    for failures in run_ranks(train_in_two_levels, 4, timeout_s=280):
        assert not failures, "\n".join(failures)


def names_of_tensors() -> list[str]:
    model, optimizer = build(Case("mixed", "base"))
    return sorted({part.name for part in canonical_parts(model, optimizer).parts if part.table})


def test_checkpoints_have_the_names_of_the_unsplit_model() -> None:
    tables = [f"model.sequences.embeddings.{name}.weight" for name in sorted(ROWS)]
    expected = sorted([*tables, *(f"{name}/momentum1" for name in tables)])
    for found in run_ranks(names_of_tensors, 2, timeout_s=120):
        assert found == expected
