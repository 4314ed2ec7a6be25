"""Every model, by pipeline and plan, with clipped, bf16 and compiled layers: as one process."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
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
from hotrec.assemble.trainable import assemble
from hotrec.config import groups
from hotrec.config.data import ColumnKind, ColumnSpec, Encoding, TableSpec
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader
from hotrec.data.prepare import prepare
from hotrec.embedding.canonical import gather_tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.dense import set_up_dense_layers
from hotrec.models.zoo import build_architecture
from hotrec.planner.propose import unpredicted
from hotrec.planner.request import GivenTables, PlanRequest
from hotrec.train.dense_sync import dense_parameters
from hotrec.types import (
    OptimizerKind,
    Partition,
    PipelineKind,
    PipelineSpec,
    Placement,
    Precision,
    Schema,
)
from tests.distributed.setups import mean_over_ranks
from tests.exact.reference import EPS, RATE, update_rows
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import on_ranks, only_whole
from tests.unit.data.logs import delimited_spec

CPU = torch.device("cpu")
GLOBAL_BATCH, NUM_STEPS, PLACES, CLIP = 12, 4, 3, 0.3
NUM_SAMPLES = GLOBAL_BATCH * NUM_STEPS
NUM_ROWS = {"videos": 20, "actions": 4, "users": 7, "tags": 5}
LABEL_WEIGHTS = {"label": 1.0, "like": 0.5}
HOT = Placement.alike(Partition(NUM_ROWS, {"videos": np.array([2, 0, 5]), "users": np.arange(7)}))
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
    clip: float | None = None
    precision: Precision = Precision.fp32
    is_compiled: bool = False


PIPELINES = (
    PipelineSpec(PipelineKind.look_ahead),
    PipelineSpec(PipelineKind.sparse_dist),
    PipelineSpec(PipelineKind.look_ahead, micro_batches=True),
    PipelineSpec(PipelineKind.base),
)
# Of every model and pipeline some are clipped, in bf16 or both.
PRECISIONS = (*[Precision.fp32] * 4, Precision.bf16)
WAYS = [
    Way(model, pipeline, (None, None, CLIP)[at % 3], PRECISIONS[at % 5])
    for at, (model, pipeline) in enumerate(product(MODELS, PIPELINES))
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


def spec_of(way: Way, schema: Schema) -> ModelSpec:
    rows = OptimizerSpec(OptimizerKind.rowwise_adagrad, learning_rate=RATE, eps=EPS)
    layers = OptimizerSpec(OptimizerKind.sgd, learning_rate=RATE)
    shape = architecture_of(MODELS[way.model], schema)
    return ModelSpec(
        schema, shape, rows, layers, seed=1, label_weights=LABEL_WEIGHTS, grad_clip_norm=way.clip,
        precision=way.precision, is_compiled=way.is_compiled,
    )  # fmt: skip


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
    optimizer = torch.optim.SGD(layers.values(), lr=RATE)
    states: dict[str, dict[str, torch.Tensor]] = {name: {} for name in rows}
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
                every = torch.arange(len(weight))
                update_rows("rowwise_adagrad", weight, states[name], every, 0, RATE)
        losses.append(float(loss.detach()))
    return losses, {name: weight.detach() for name, weight in (rows | layers).items()}


def train(dataset: Dataset, way: Way) -> tuple[Trained, dict[str, torch.Tensor]]:
    """Losses, weights at the end, and the rows before."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    batch_size = GLOBAL_BATCH // world_size
    machine = make_machine(
        world_size=world_size, ranks_per_host=world_size, device="cpu", batch_size=batch_size
    )
    plan = unpredicted(PlanRequest(GivenTables(HOT), way.pipeline), machine)
    made = assemble(spec_of(way, dataset.schema), plan, HOT, machine, CPU)
    before = gather_tables(made.model)
    loader = make_loader(
        dataset.artifact.path, "train", batch_size=batch_size, rank=rank, world_size=world_size,
        shuffle=False, epochs=1, transform=made.route, pin_memory=False,
    )  # fmt: skip
    pipeline, batches = made.pipeline(), iter(loader)
    pipeline.start()
    losses = [mean_over_ranks(pipeline.progress(batches)[0]) for _ in range(NUM_STEPS)]
    pipeline.flush()
    made.check_replicas()
    layers = {
        re.sub(r"^.*module\.model\.", "", name): parameter.detach().cpu().clone()
        for name, parameter in dense_parameters(made.model).items()
    }
    weights = gather_tables(made.model) | layers
    pipeline.close()
    return (losses, weights), before


def check_ways(dataset_path: Path, ways: list[Way]) -> list[str]:
    dataset, failures = Dataset.open(dataset_path), []
    for way in ways:
        (losses, weights), before = train(dataset, way)
        expected_losses, expected = train_plain(spec_of(way, dataset.schema), before)
        assert weights.keys() == expected.keys(), (sorted(weights), sorted(expected))
        limits = (5e-3, 2e-2) if way.precision is Precision.bf16 else (1e-5, 1e-5)
        worst = max(float((weights[name] - expected[name]).abs().max()) for name in weights)
        if losses != pytest.approx(expected_losses, abs=limits[0]) or worst > limits[1]:
            failures.append(f"{way}: {losses} for {expected_losses}, {worst}")
        if way.clip is not None:  # it does something
            without = train_plain(spec_of(replace(way, clip=None), dataset.schema), before)
            assert without[0][-1] != expected_losses[-1], way
    return failures


@pytest.mark.parametrize("world_size", [2, 3])
def test_models_train_as_in_one_process(world_size: int, tmp_path: Path) -> None:
    path = prepare_log(tmp_path)
    ways = on_ranks(WAYS, world_size)
    for failures in run_ranks(check_ways, world_size, timeout_s=280, dataset_path=path, ways=ways):
        assert not failures, "\n".join(failures)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on CPU")
@pytest.mark.parametrize("way", [WAYS[1], *only_whole(WAYS[6])], ids=lambda way: way.model)
def test_compiled_layers_train_as_eager_ones(
    way: Way, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Or each rank starts processes to compile in, which import torch first.
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    ways = [replace(way, is_compiled=True, clip=CLIP, precision=Precision.fp32)]
    path = prepare_log(tmp_path)
    for failures in run_ranks(check_ways, 2, timeout_s=280, dataset_path=path, ways=ways):
        assert not failures, "\n".join(failures)
