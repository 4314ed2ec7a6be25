"""Every model, by pipeline and plan, with clipped, bf16 and compiled layers: as one process."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.assemble.job import architecture_of
from hotrec.assemble.machine import make_machine
from hotrec.assemble.model import ModelSpec
from hotrec.assemble.order import by_owner
from hotrec.assemble.trainable import assemble
from hotrec.config import groups
from hotrec.config.data import ColumnKind, ColumnSpec, Encoding, TableSpec
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader
from hotrec.data.prepare import prepare
from hotrec.data.tokens import ByTokens, SampleWork
from hotrec.embedding.adapt import AdaptiveHotSet
from hotrec.embedding.canonical import gather_tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.dense import set_up_dense_layers
from hotrec.models.zoo import build_architecture
from hotrec.planner.plan import TorchrecTables
from hotrec.planner.propose import unpredicted
from hotrec.planner.request import GivenTables, PlanRequest
from hotrec.train.checkpoint import Checkpoints, Position, load_checkpoint, save_checkpoint
from hotrec.train.dense_sync import dense_parameters
from hotrec.types import (
    OptimizerKind,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    Precision,
    Schema,
    TablePlacement,
    Tier,
    TorchrecPlan,
    TorchrecTier,
)
from tests.distributed.setups import mean_over_ranks
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import on_ranks, only_whole
from tests.unit.data.logs import delimited_spec

CPU = torch.device("cpu")
GLOBAL_BATCH, NUM_STEPS, SEGMENT, LR, PLACES = 12, 4, 2, 0.1, 3
NUM_SAMPLES = GLOBAL_BATCH * NUM_STEPS
NUM_ROWS = {"videos": 20, "actions": 4, "users": 7, "tags": 5}
WORK = SampleWork(1, {"seen": 3}, {"seen": 1})
CACHE_LOAD, CLIP = 0.5, 0.3
LABEL_WEIGHTS = {"label": 1.0, "like": 0.5}
HOT = Placement.alike(Partition(NUM_ROWS, {"videos": np.array([2, 0, 5]), "users": np.arange(7)}))
# The samples read low rows most.
STALE = Placement.alike(Partition(NUM_ROWS, {"videos": np.arange(15, 20)}))
CACHED = Placement(
    HOT.partition, dict.fromkeys(NUM_ROWS, TablePlacement(tier=Tier.CACHED, cache_load_frac=0.95))
)
OVER: dict[str, Any] = {"embedding_dim": 8, "over_layer_sizes": [6, 1]}
LAYERED: dict[str, Any] = {**OVER, "dense_layer_sizes": [5, 8]}
SIZES: dict[str, Any] = {**OVER, "max_length": 4}
ROLES: dict[str, Any] = {
    "history": {"seen": "video"}, "side": ["seen_actions"], "context": ["user"],
}  # fmt: skip
MODELS: dict[str, groups.ModelConfig] = {
    "dlrm": groups.DlrmConfig(**LAYERED),
    "dcnv2": groups.Dcnv2Config(**LAYERED, cross_num_layers=2, cross_low_rank_dim=3),
    "deepfm": groups.DeepFmConfig(**LAYERED, deep_layer_sizes=[6, 5]),
    "mmoe": groups.MmoeConfig(**LAYERED, num_experts=3, expert_layer_sizes=[6, 5]),
    "din": groups.DinConfig(**LAYERED, attention={"last": "video"}, attention_layer_sizes=[6]),
    "hstu": groups.HstuConfig(**SIZES, **ROLES, attention_dim=4, linear_dim=6),
    "sasrec": groups.SasrecConfig(**SIZES, **ROLES, num_layers=1),
    "own": groups.OwnModelConfig(embedding_dim=8, _target_=f"{__name__}.Decayed"),
}


@dataclass(frozen=True)
class Way:
    """A way to train a model."""

    model: str
    pipeline: PipelineSpec
    placed: Placement | TorchrecPlan
    device: torch.device = CPU
    tier: TorchrecTier = TorchrecTier.fused  # of TorchRec's plans
    is_routed_by_loader: bool = False
    by_tokens: bool = False
    by_owner: bool = False
    clip: float | None = None
    precision: Precision = Precision.fp32
    is_compiled: bool = False

    @property
    def is_adaptive(self) -> bool:
        return self.placed is STALE

    def spec(self, schema: Schema) -> ModelSpec:
        return replace(
            spec_of(self.model, schema), grad_clip_norm=self.clip, precision=self.precision,
            is_compiled=self.is_compiled,
        )  # fmt: skip


def way(model: str, kind: str, placed: Any = HOT, **keys: Any) -> Way:
    return Way(model, PipelineSpec(PipelineKind[kind], **keys), placed)


PIPELINES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("look_ahead", {}),
    ("sparse_dist", {}),
    ("look_ahead", {"micro_batches": True}),
    ("base", {}),
)
WAYS = [
    *(way(model, kind, **keys) for model, (kind, keys) in product(MODELS, PIPELINES)),
    way("sasrec", "look_ahead", Placement.alike(Partition(NUM_ROWS))),
    way("hstu", "look_ahead", CACHED),
    way("own", "sparse_dist", STALE),
    way("hstu", "look_ahead", STALE),
    way("hstu", "sparse_dist", TorchrecPlan.planner),
    way("sasrec", "base", TorchrecPlan.table_wise),
    way("din", "sparse_dist", TorchrecPlan.table_wise),
    way("dlrm", "sparse_dist", TorchrecPlan.hand_tuned),
]
# Of every model and pipeline some are clipped, in bf16 or both.
PRECISIONS = (*[Precision.fp32] * 4, Precision.bf16)
WAYS = [
    replace(of, clip=(None, None, CLIP)[at % 3], precision=PRECISIONS[at % 5])
    for at, of in enumerate(WAYS)
]
ORDERS = [
    replace(way("hstu", "look_ahead"), by_tokens=True),
    replace(way("dlrm", "sparse_dist"), by_owner=True),
]


class Decayed(nn.Module):
    """Sums the rows of each feature, later ones with less weight."""

    reads_sequences = True

    def __init__(
        self, dense: list[str], features: list[str], embedding_dim: int, labels: list[str]
    ) -> None:
        super().__init__()
        self.features = features
        self.top = nn.Linear(len(dense) + len(features) * embedding_dim, len(labels))

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

    def of_feature(self, name: str) -> list[int]:
        """``last_2`` is the second id from the end of what was seen."""
        column, _, place = name.partition("last_")
        return self.ids[column] if column else self.ids["seen"][::-1][int(place) - 1 : int(place)]


def draw_samples() -> list[Sample]:
    """Histories of no id, of fewer than are read, and of more; with repeated ids."""
    rng = np.random.default_rng(4)

    def ids(table: str, size: int) -> list[int]:
        return [int(row) for row in rng.random(size) ** 2 * NUM_ROWS[table]]

    samples = []
    for _ in range(NUM_SAMPLES):
        length = int(rng.integers(7))
        found = {
            "video": ids("videos", 1),
            "seen": ids("videos", length),
            "seen_actions": ids("actions", length),
            "user": ids("users", 1),
            "tags": ids("tags", int(rng.integers(3))),
        }
        price = round(float(rng.random()), 3)
        samples.append(Sample(rng.integers(2, size=2).tolist(), price, found))
    return samples


def prepare_log(folder: Path) -> Path:
    kinds = ColumnKind
    columns = {
        "label": ColumnSpec(kinds.label, source="click"),
        "like": ColumnSpec(kinds.label),
        "price": ColumnSpec(kinds.dense),
        "video": ColumnSpec(kinds.categorical, table="videos"),
        "seen": ColumnSpec(kinds.categorical_list, table="videos"),
        "last": ColumnSpec(kinds.sequence, source="seen", table="videos", max_length=PLACES),
        "seen_actions": ColumnSpec(kinds.categorical_list, table="actions"),
        "user": ColumnSpec(kinds.categorical, table="users"),
        "tags": ColumnSpec(kinds.categorical_list),
    }
    lines = ["click,like,price,video,seen,seen_actions,user,tags"]
    for sample in draw_samples():
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


Trained = tuple[list[float], dict[str, torch.Tensor]]


def train_plain(spec: ModelSpec, tables: Mapping[str, torch.Tensor]) -> Trained:
    """The model on TorchRec's unsharded tables in this process, on whole global batches."""
    shape, tables_of = spec.architecture, list(spec.tables)
    made: Any = EmbeddingCollection if shape.reads_sequences else EmbeddingBagCollection
    collection = made(tables=tables_of)
    model = build_architecture(shape, collection, spec.seed, CPU)
    set_up_dense_layers(model, CPU, spec.precision, is_compiled=False)
    held = getattr(collection, "embeddings", None) or collection.embedding_bags
    rows = {name: held[name].weight for name in tables}
    for name, weight in rows.items():
        weight.data.copy_(tables[name])
    of_rows = {id(weight) for weight in rows.values()}
    layers = {n: p for n, p in model.named_parameters() if id(p) not in of_rows}
    optimizer = torch.optim.SGD(layers.values(), lr=LR)
    sums = {name: torch.zeros(len(weight)) for name, weight in rows.items()}
    losses, samples = [], draw_samples()
    names = [name for table in tables_of for name in table.feature_names]
    for begin in range(0, NUM_SAMPLES, GLOBAL_BATCH):
        batch = samples[begin : begin + GLOBAL_BATCH]
        ids = [sample.of_feature(name) for name in names for sample in batch]
        lengths = torch.tensor([len(one) for one in ids])
        sparse = KeyedJaggedTensor(names, torch.tensor(sum(ids, [])).long(), lengths=lengths)
        labels = torch.tensor([[float(label) for label in sample.labels] for sample in batch])
        prices = torch.tensor([[sample.price] for sample in batch])
        logits = model(prices, sparse).float()
        each = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        loss = (each * torch.tensor(list(LABEL_WEIGHTS.values()))).sum(1).mean()
        model.zero_grad()
        loss.backward()
        if spec.grad_clip_norm is not None:
            nn.utils.clip_grad_norm_(layers.values(), spec.grad_clip_norm)
        optimizer.step()
        with torch.no_grad():
            for name, weight in rows.items():
                assert weight.grad is not None
                sums[name] += weight.grad.square().mean(1)
                weight -= LR * weight.grad / (sums[name].sqrt() + spec.embedding.eps)[:, None]
        losses.append(float(loss.detach()))
    return losses, {name: weight.detach() for name, weight in (rows | layers).items()}


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
        world_size=world_size, ranks_per_host=world_size, device=of.device.type,
        batch_size=batch_size,
    )  # fmt: skip
    if isinstance(of.placed, Placement):
        placed, tables = of.placed, GivenTables(of.placed)
    else:
        placed, tables = None, TorchrecTables(of.placed, of.tier, CACHE_LOAD)
    request = PlanRequest(tables, of.pipeline, is_routed_by_loader=of.is_routed_by_loader)
    plan = unpredicted(request, machine)
    made = assemble(of.spec(dataset.schema), plan, placed, machine, of.device)
    hot_set = AdaptiveHotSet(made.model, made.optimizer) if of.is_adaptive else None
    found = Found([], {}, gather_tables(made.model))
    assign = ByTokens(dataset.schema.feature_names, WORK) if of.by_tokens else None
    if of.by_owner and placed is not None:
        assign = by_owner(dataset.schema, placed, made.sharding)
    loader = make_loader(
        dataset.artifact.path, "train", batch_size=batch_size, rank=rank, world_size=world_size,
        shuffle=False, epochs=1, transform=made.route, pin_memory=of.device.type == "cuda",
        assign=assign,
    )  # fmt: skip
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
        re.sub(r"^.*module\.model\.", "", name): parameter.detach().cpu().clone()
        for name, parameter in dense_parameters(made.model).items()
    }
    found.weights = gather_tables(made.model) | layers
    pipeline.close()
    return found


def differences(found: Found, expected: Trained, *, is_rounded: bool = False) -> str:
    """What is not as expected, or nothing."""
    losses, weights = expected
    assert found.weights.keys() == weights.keys(), (sorted(found.weights), sorted(weights))
    of_losses, of_weights = (5e-3, 2e-2) if is_rounded else (1e-5, 1e-5)
    worst = max(float((found.weights[name] - weights[name]).abs().max()) for name in weights)
    is_near = found.losses == pytest.approx(losses[-len(found.losses) :], abs=of_losses)
    return "" if is_near and worst <= of_weights else f"{found.losses} for {losses}, {worst}"


def check_ways(dataset_path: Path, ways: list[Way]) -> list[str]:
    dataset, failures = Dataset.open(dataset_path), []
    for of in ways:
        found = train(dataset, of)
        expected = train_plain(of.spec(dataset.schema), found.before)
        said = differences(found, expected, is_rounded=of.precision is Precision.bf16)
        if of.clip is not None:  # it does something
            without = train_plain(replace(of, clip=None).spec(dataset.schema), found.before)
            assert without[0][-1] != expected[0][-1], of
        assert (found.num_moved > 0) == of.is_adaptive
        if of.by_tokens or of.by_owner:  # a run that stops goes on bit for bit
            path = dataset_path.parent / f"{of.model}-{dist.get_world_size()}"
            train(dataset, of, saved=path)
            resumed = train(dataset, of, resumed=path / f"step-{SEGMENT:08d}")
            assert resumed.losses == found.losses[SEGMENT:], of
        failures += [f"{of}: {said}"] * bool(said)
    return failures


@pytest.mark.parametrize("world_size", [2, 3])
def test_models_train_as_in_one_process(world_size: int, tmp_path: Path) -> None:
    path = prepare_log(tmp_path)
    ways = [*on_ranks(WAYS, world_size), *ORDERS]
    for failures in run_ranks(check_ways, world_size, timeout_s=280, dataset_path=path, ways=ways):
        assert not failures, "\n".join(failures)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on CPU")
@pytest.mark.parametrize(
    ("model", "kind"),
    [("dlrm", PIPELINES[1]), *only_whole(("dcnv2", PIPELINES[2]))],
)
def test_compiled_layers_train_as_eager_ones(
    model: str, kind: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Or each rank starts processes to compile in, which import torch first.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    ways = [replace(way(model, kind[0], **kind[1]), is_compiled=True, clip=CLIP)]
    path = prepare_log(tmp_path)
    for failures in run_ranks(check_ways, 2, timeout_s=280, dataset_path=path, ways=ways):
        assert not failures, "\n".join(failures)
