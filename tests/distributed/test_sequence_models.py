"""HSTU, SASRec and a model of one's own over sequences, by pipeline and plan: as one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingConfig

from hotrec.assemble.constraints import torchrec_constraints
from hotrec.assemble.job import architecture_of
from hotrec.assemble.machine import make_machine
from hotrec.assemble.model import ModelSpec
from hotrec.assemble.trainable import assemble
from hotrec.config.data import ColumnKind, ColumnSpec, Encoding, TableSpec
from hotrec.config.groups import HstuConfig, ModelConfig, OwnModelConfig, SasrecConfig
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader
from hotrec.data.prepare import prepare
from hotrec.data.tokens import ByTokens, SampleWork
from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.embedding.tables import gather_tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.zoo import make_checked_layers
from hotrec.planner.plan import TorchrecTables
from hotrec.planner.propose import unpredicted
from hotrec.planner.request import GivenTables, PlanRequest
from hotrec.train.checkpoint import Checkpoints, Position, load_checkpoint, save_checkpoint
from hotrec.train.dense_sync import dense_parameters
from hotrec.types import (
    ColdTier,
    OptimizerKind,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    Schema,
    TablePlacement,
    Tier,
    TorchrecPlan,
)
from tests.distributed.setups import mean_over_ranks
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import on_ranks
from tests.unit.data.logs import delimited_spec

CPU = torch.device("cpu")
GLOBAL_BATCH, NUM_STEPS, SEGMENT, LR = 12, 4, 2, 0.1
NUM_SAMPLES = GLOBAL_BATCH * NUM_STEPS
NUM_ROWS = {"videos": 20, "actions": 4, "users": 7, "tags": 5}
WORK = SampleWork(1, {"seen": 3}, {"seen": 1})
CACHE_LOAD = 0.5
LABEL_WEIGHTS = {"label": 1.0, "like": 0.5}
HOT = Placement.alike(Partition(NUM_ROWS, {"videos": np.array([2, 0, 5]), "users": np.arange(7)}))
# The samples read low rows most.
STALE = Placement.alike(Partition(NUM_ROWS, {"videos": np.arange(15, 20)}))
CACHED = Placement(
    HOT.partition, dict.fromkeys(NUM_ROWS, TablePlacement(tier=Tier.CACHED, cache_load_frac=0.95))
)
SIZES: dict[str, Any] = {"embedding_dim": 8, "over_layer_sizes": [6, 1], "max_length": 4}
ROLES: dict[str, Any] = {
    "history": {"seen": "video"},
    "side": ["seen_actions"],
    "context": ["user"],
}
MODELS: dict[str, ModelConfig] = {
    "hstu": HstuConfig(**SIZES, **ROLES, attention_dim=4, linear_dim=6),
    "sasrec": SasrecConfig(**SIZES, **ROLES, num_layers=1),
    "own": OwnModelConfig(embedding_dim=8, _target_=f"{__name__}.Decayed"),
}


@dataclass(frozen=True)
class Way:
    """A way to train a model."""

    model: str
    pipeline: PipelineSpec
    placed: Placement | TorchrecPlan
    device: torch.device = CPU
    tier: ColdTier = ColdTier.auto  # of TorchRec's plans
    is_routed_by_loader: bool = False
    by_tokens: bool = False

    @property
    def is_adaptive(self) -> bool:
        return self.placed is STALE


def way(model: str, kind: str, placed: Any = HOT, **keys: Any) -> Way:
    return Way(model, PipelineSpec(PipelineKind[kind], **keys), placed)


WAYS = [
    *(way(model, kind) for model in MODELS for kind in ("look_ahead", "sparse_dist", "base")),
    way("hstu", "look_ahead", micro_batches=True),
    way("own", "look_ahead", micro_batches=True, depth=4),
    way("sasrec", "look_ahead", Placement.alike(Partition(NUM_ROWS))),
    way("hstu", "look_ahead", CACHED),
    way("hstu", "look_ahead", STALE),
    way("own", "sparse_dist", STALE),
    way("hstu", "sparse_dist", TorchrecPlan.planner),
    way("sasrec", "base", TorchrecPlan.table_wise),
]
# Also trained a second time, and saved and resumed.
AGAIN = [of for of in WAYS if of.placed is not HOT or of.pipeline.micro_batches]


class Decayed(nn.Module):
    """Sums the rows of each feature, later ones with less weight."""

    reads_sequences = True

    def __init__(
        self, dense: list[str], features: list[str], embedding_dim: int, labels: list[str]
    ) -> None:
        super().__init__()
        self.features = features
        num_inputs = len(dense) + len(features) * embedding_dim
        self.top = nn.Linear(num_inputs, len(labels))

    def forward(self, dense: torch.Tensor, columns: Mapping[str, Any]) -> torch.Tensor:
        sums = [self.summed(*columns[name]) for name in self.features]
        return self.top(torch.cat((dense, *sums), dim=1))

    def summed(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        begins = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
        places = torch.arange(rows.shape[0], device=rows.device) - begins
        weighted = rows / (1.0 + places[:, None])
        return torch.segment_reduce(weighted, "sum", lengths=lengths.long(), initial=0.0)


@dataclass
class Sample:
    """What a line of the log has."""

    labels: list[int]
    price: float
    ids: dict[str, list[int]]


def draw_samples() -> list[Sample]:
    """Histories of no id, of fewer than are read, and of more; with repeated ids."""
    rng = np.random.default_rng(4)

    def ids(table: str, size: int) -> list[int]:
        return [int(row) for row in rng.random(size) ** 2 * NUM_ROWS[table]]

    samples = []
    for _ in range(NUM_SAMPLES):
        length = int(rng.integers(7))
        samples.append(
            Sample(
                rng.integers(2, size=2).tolist(),
                round(float(rng.random()), 3),
                {
                    "video": ids("videos", 1),
                    "seen": ids("videos", length),
                    "seen_actions": ids("actions", length),
                    "user": ids("users", 1),
                    "tags": ids("tags", int(rng.integers(3))),
                },
            )
        )
    return samples


def prepare_log(folder: Path) -> Path:
    samples = draw_samples()
    columns = {
        "label": ColumnSpec(ColumnKind.label, source="click"),
        "like": ColumnSpec(ColumnKind.label),
        "price": ColumnSpec(ColumnKind.dense),
        "video": ColumnSpec(ColumnKind.categorical, table="videos"),
        "seen": ColumnSpec(ColumnKind.categorical_list, table="videos"),
        "seen_actions": ColumnSpec(ColumnKind.categorical_list, table="actions"),
        "user": ColumnSpec(ColumnKind.categorical, table="users"),
        "tags": ColumnSpec(ColumnKind.categorical_list),
    }
    lines = ["click,like,price,video,seen,seen_actions,user,tags"]
    for sample in samples:
        lists = [" ".join(map(str, ids)) for ids in sample.ids.values()]
        lines.append(",".join(map(str, (*sample.labels, sample.price, *lists))))
    (folder / "log.csv").write_text("\n".join([*lines, ""]))
    tables = {name: TableSpec(Encoding.rows, num_rows=rows) for name, rows in NUM_ROWS.items()}
    spec = delimited_spec([folder / "log.csv"], columns=columns, tables=tables)
    return prepare(spec, folder / "dataset").path


def spec_of(model: str, schema: Schema) -> ModelSpec:
    rows = OptimizerSpec(OptimizerKind.rowwise_adagrad, learning_rate=LR)
    layers = OptimizerSpec(OptimizerKind.sgd, learning_rate=LR)
    shape = architecture_of(MODELS[model], schema)
    return ModelSpec(schema, shape, rows, layers, seed=1, label_weights=LABEL_WEIGHTS)


class Plain(nn.Module):
    """The layers on tables of one process, which see the whole global batch."""

    def __init__(self, spec: ModelSpec, tables: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.shape = spec.architecture
        self.layers = make_checked_layers(self.shape, seed=1)
        self.tables = nn.ParameterDict({name: rows.clone() for name, rows in tables.items()})

    def forward(self, samples: list[Sample]) -> torch.Tensor:
        """Logits (B, 2)."""
        columns = {}
        for name, table in self.shape.features:
            ids = [sample.ids[name] for sample in samples]
            rows = F.embedding(torch.tensor(sum(ids, [])).long(), self.tables[table])
            columns[name] = rows, torch.tensor([len(of_sample) for of_sample in ids])
        prices = torch.tensor([[sample.price] for sample in samples])
        return self.layers(prices, columns)


def train_plain(
    spec: ModelSpec, tables: Mapping[str, torch.Tensor]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = Plain(spec, tables)
    layers = torch.optim.SGD(model.layers.parameters(), lr=LR)
    sums = {name: torch.zeros(len(rows)) for name, rows in model.tables.items()}
    losses, samples = [], draw_samples()
    for begin in range(0, NUM_SAMPLES, GLOBAL_BATCH):
        batch = samples[begin : begin + GLOBAL_BATCH]
        labels = torch.tensor([[float(label) for label in sample.labels] for sample in batch])
        each = F.binary_cross_entropy_with_logits(model(batch), labels, reduction="none")
        loss = (each * torch.tensor(list(LABEL_WEIGHTS.values()))).sum(1).mean()
        model.zero_grad()
        loss.backward()
        layers.step()
        with torch.no_grad():
            for name, rows in model.tables.items():
                assert rows.grad is not None
                sums[name] += rows.grad.square().mean(1)
                rows -= LR * rows.grad / (sums[name].sqrt() + spec.embedding.eps)[:, None]
        losses.append(float(loss.detach()))
    weights = {f"layers.{name}": p.detach() for name, p in model.layers.named_parameters()}
    return losses, {name: rows.detach() for name, rows in model.tables.items()} | weights


@dataclass
class Found:
    """What a training gave on this rank."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    before: dict[str, torch.Tensor]  # the rows
    num_moved: int = 0


def train(
    dataset: Dataset, of: Way, *, saved: Path | None = None, resumed: Path | None = None
) -> Found:
    """Train in segments, and save after the first or resume from there."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch_size = GLOBAL_BATCH // world_size
    machine = make_machine(
        world_size=world_size,
        ranks_per_host=world_size,
        device=of.device.type,
        batch_size=batch_size,
    )
    if isinstance(of.placed, Placement):
        placed, tables = of.placed, GivenTables(of.placed)
    else:
        placed, tables = None, TorchrecTables(of.placed, of.tier, CACHE_LOAD)
    request = PlanRequest(tables, of.pipeline, is_routed_by_loader=of.is_routed_by_loader)
    plan = unpredicted(request, machine)
    made = assemble(spec_of(of.model, dataset.schema), plan, placed, machine, of.device)
    hot_set = AdaptiveHotSet(made.model, made.optimizer) if of.is_adaptive else None
    found = Found([], {}, gather_tables(made.model))
    loader = make_loader(
        dataset.artifact.path,
        "train",
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        shuffle=False,
        epochs=1,
        transform=made.route,
        pin_memory=of.device.type == "cuda",
        assign=ByTokens(dataset.schema.feature_names, WORK) if of.by_tokens else None,
    )
    first, last = 0, NUM_STEPS if saved is None else SEGMENT
    if resumed is not None:
        own: dict[str, Any] = {"model": made.model, "optimizer": made.optimizer, "loader": loader}
        first = load_checkpoint(resumed, facts={}, hot_set=hot_set, **own).step
    pipeline, source = made.pipeline(), iter(loader)
    for _ in range(first, last, SEGMENT):
        batches = islice(source, SEGMENT)
        pipeline.start()
        for _ in range(SEGMENT):
            found.losses.append(mean_over_ranks(pipeline.progress(batches)[0]))
        pipeline.flush()
        if hot_set is not None:
            found.num_moved += hot_set.adapt().num_moved
    made.check_replicas()
    if saved is not None:
        position = Position(last, last * GLOBAL_BATCH)
        checkpoints = Checkpoints(saved, facts={})
        save_checkpoint(checkpoints, position, made.model, made.optimizer, loader, hot_set)
    layers = {
        name[name.index("layers.") :]: parameter.detach().cpu().clone()
        for name, parameter in dense_parameters(made.model).items()
    }
    found.weights = gather_tables(made.model) | layers
    pipeline.close()
    return found


def differences(found: Found, expected: tuple[list[float], dict[str, torch.Tensor]]) -> str:
    """What is not as expected, or nothing."""
    losses, weights = expected
    assert found.weights.keys() == weights.keys()
    worst = max(float((found.weights[name] - weights[name]).abs().max()) for name in weights)
    if found.losses != pytest.approx(losses[-len(found.losses) :], abs=1e-5) or worst > 1e-5:
        return f"{found.losses} for {losses}, weights {worst}"
    return ""


def is_same(one: Found, other: Found) -> bool:
    """Bit for bit."""
    pairs = zip(one.weights.values(), other.weights.values(), strict=True)
    return one.losses == other.losses and all(torch.equal(*pair) for pair in pairs)


def check_ways(dataset_path: Path, folder: Path) -> list[str]:
    dataset, failures = Dataset.open(dataset_path), []
    for number, of in enumerate(on_ranks(WAYS, dist.get_world_size())):
        found = train(dataset, of)
        expected = train_plain(spec_of(of.model, dataset.schema), found.before)
        failures.append(differences(found, expected))
        moved = [not torch.equal(found.weights[name], found.before[name]) for name in found.before]
        assert all(moved)
        assert (found.num_moved > 0) == of.is_adaptive
        if of in AGAIN:
            if not is_same(found, train(dataset, of)):
                failures.append(f"{of}: another result in a second run")
            path = folder / f"{dist.get_world_size()}-{number}"
            train(dataset, of, saved=path)
            resumed = train(dataset, of, resumed=path / f"step-{SEGMENT:08d}")
            if resumed.losses != found.losses[SEGMENT:]:
                failures.append(f"{of}: another result after a checkpoint")
    return [failure for failure in failures if failure]


def check_saved_by_others(dataset_path: Path, folder: Path) -> list[str]:
    """Resumes on three ranks what two have saved."""
    dataset, failures = Dataset.open(dataset_path), []
    for number, of in enumerate(on_ranks(WAYS, 2)):
        if of in AGAIN:
            found = train(dataset, of, resumed=folder / f"2-{number}" / f"step-{SEGMENT:08d}")
            expected = train_plain(spec_of(of.model, dataset.schema), found.before)
            failures.append(differences(found, expected))
    return [failure for failure in failures if failure]


def test_sequence_models_train_as_in_one_process(tmp_path: Path) -> None:
    folders: dict[str, Any] = {"dataset_path": prepare_log(tmp_path), "folder": tmp_path}
    for world_size in (1, 2, 3):
        for failures in run_ranks(check_ways, world_size, timeout_s=240, **folders):
            assert not failures, "\n".join(failures)
    for failures in run_ranks(check_saved_by_others, 3, timeout_s=240, **folders):
        assert not failures, "\n".join(failures)


def test_data_parallel_sequences_of_torchrec_are_refused_on_cpu() -> None:
    tables = [EmbeddingConfig(name="a", num_embeddings=4, embedding_dim=4, feature_names=["a"])]
    with pytest.raises(ValueError, match=r"^placement\.plan: .* got hand_tuned"):
        torchrec_constraints(tables, TorchrecPlan.hand_tuned, batch_size=8, may_replicate=False)
