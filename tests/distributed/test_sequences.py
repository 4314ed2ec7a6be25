"""DIN over a sequence, by pipeline and plan, against one process with padding and a mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hotrec.assemble.constraints import hot_cold_constraints, torchrec_constraints
from hotrec.assemble.job import architecture_of
from hotrec.config.data import ColumnKind, ColumnSpec, Encoding, TableSpec
from hotrec.config.groups import DinConfig
from hotrec.data.chunks import Dataset
from hotrec.data.loader import make_loader
from hotrec.data.prepare import prepare
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.fused import fused_params
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.sharding import HotColdSharder
from hotrec.embedding.tables import gather_tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.models.plain import Attention
from hotrec.models.task import ClickTask
from hotrec.models.zoo import build_architecture, make_checked_layers
from hotrec.train.dense_sync import dense_parameters
from hotrec.train.pipelines import make_pipeline
from hotrec.types import OptimizerKind, Partition, PipelineKind, PipelineSpec, TorchrecPlan
from tests.distributed.setups import mean_over_ranks, shard_task
from tests.helpers.ranks import run_ranks
from tests.unit.data.logs import HEADER, delimited_spec

CPU, META = torch.device("cpu"), torch.device("meta")
DIM, PLACES, GLOBAL_BATCH, NUM_SAMPLES, LR = 4, 3, 12, 48, 0.5
NUM_ROWS = {"videos": 20, "users": 7}
HOT = Partition(NUM_ROWS, {"videos": np.array([2, 0, 5]), "users": np.arange(7)})
MODEL = DinConfig(
    embedding_dim=DIM,
    dense_layer_sizes=[5, DIM],
    over_layer_sizes=[6, 1],
    attention={"history": "item"},
    attention_layer_sizes=[6],
)
CASES = [
    *((pipeline, HOT) for pipeline in ("look_ahead", "sparse_dist", "base")),
    ("look_ahead", Partition(NUM_ROWS)),
    ("sparse_dist", TorchrecPlan.table_wise),
]
Sample = tuple[int, float, int, int, list[int]]


def draw_samples() -> list[Sample]:
    """Click, price, user, item and the items before it: none, fewer than places, or more."""
    rng = np.random.default_rng(4)

    def ids(rows: int, size: int) -> list[int]:
        return [int(row) for row in rng.random(size) ** 2 * rows]

    return [
        (
            int(rng.integers(2)),
            round(float(rng.random()), 3),
            *ids(7, 1),
            *ids(20, 1),
            ids(20, int(rng.integers(PLACES + 3))),
        )
        for _ in range(NUM_SAMPLES)
    ]


def prepare_log(folder: Path) -> Path:
    lines = [
        f"{click},{price},{user},{item},{' '.join(map(str, history))}\n"
        for click, price, user, item, history in draw_samples()
    ]
    (folder / "log.csv").write_text(HEADER + "".join(lines))
    columns = {
        "label": ColumnSpec(ColumnKind.label, source="click"),
        "price": ColumnSpec(ColumnKind.dense),
        "item": ColumnSpec(ColumnKind.categorical, table="videos"),
        "user": ColumnSpec(ColumnKind.categorical, table="users"),
        "history": ColumnSpec(ColumnKind.sequence, table="videos", max_length=PLACES),
    }
    tables = {name: TableSpec(Encoding.rows, num_rows=rows) for name, rows in NUM_ROWS.items()}
    spec = delimited_spec([folder / "log.csv"], columns=columns, tables=tables)
    return prepare(spec, folder / "dataset").path


class Padded(nn.Module):
    """The same layers on sequences of row 0 where there is no id, which a mask leaves out."""

    def __init__(self, layers: Any, tables: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.layers = layers
        self.tables = nn.ParameterDict({name: rows.clone() for name, rows in tables.items()})

    def forward(self, samples: list[Sample]) -> torch.Tensor:
        """Logits (B,)."""
        _, prices, users, items, histories = zip(*samples, strict=True)
        kept = [history[-PLACES:] for history in histories]
        ids_BP = torch.tensor([[*ids, *[0] * (PLACES - len(ids))] for ids in kept])
        lengths_B1 = torch.tensor([[len(ids)] for ids in kept])
        is_id_BP1 = (torch.arange(PLACES) < lengths_B1).unsqueeze(2)
        item_BD = F.embedding(torch.tensor(items), self.tables["videos"])
        user_BD = F.embedding(torch.tensor(users), self.tables["users"])
        keys_BPD = F.embedding(ids_BP, self.tables["videos"])
        query_BPD = item_BD.unsqueeze(1).expand_as(keys_BPD)
        parts = [query_BPD, keys_BPD, query_BPD - keys_BPD, query_BPD * keys_BPD]
        weights_BP1 = self.layers.interaction.weights[0](torch.cat(parts, 2))
        sum_BD = (keys_BPD * weights_BP1 * is_id_BP1).sum(1)
        bottom_BD = self.layers.bottom(torch.tensor(prices).unsqueeze(1))
        vectors = (bottom_BD, item_BD, user_BD, sum_BD)
        return self.layers.top(torch.cat(vectors, dim=1)).squeeze(1)


def train_padded(
    dataset: Dataset, tables: dict[str, torch.Tensor]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    shape = architecture_of(MODEL, dataset.schema)
    layers = make_checked_layers(shape, seed=1)
    assert isinstance(layers.interaction, Attention)
    model = Padded(layers, tables)
    optimizer, losses, samples = torch.optim.SGD(model.parameters(), lr=LR), [], draw_samples()
    for begin in range(0, NUM_SAMPLES, GLOBAL_BATCH):
        batch = samples[begin : begin + GLOBAL_BATCH]
        labels = torch.tensor([float(click) for click, *_ in batch])
        loss = F.binary_cross_entropy_with_logits(model(batch), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    layer_weights = {f"layers.{name}": p.detach() for name, p in layers.named_parameters()}
    return losses, {name: rows.detach() for name, rows in model.tables.items()} | layer_weights


def train_sharded(
    dataset: Dataset, pipeline: str, plan: Partition | TorchrecPlan
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Losses, weights, and the rows before the first step."""
    schema, rank, world_size = dataset.schema, dist.get_rank(), dist.get_world_size()
    tables = [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_rows,
            embedding_dim=DIM,
            feature_names=[feature.name for feature in schema.features_of(table.name)],
        )
        for table in schema.tables
    ]
    spec = OptimizerSpec(OptimizerKind.sgd, learning_rate=LR)
    embeddings: Any
    if isinstance(plan, Partition):
        embeddings = HotColdEmbeddingBagCollection(tables, plan, device=META)
        constraints, sharder = hot_cold_constraints(tables, plan), HotColdSharder(spec)
    else:
        embeddings = EmbeddingBagCollection(tables=tables, device=META)
        constraints = torchrec_constraints(tables, plan, batch_size=GLOBAL_BATCH)
        sharder = EmbeddingBagCollectionSharder(fused_params(spec))
    model = build_architecture(architecture_of(MODEL, schema), embeddings, 1, CPU)
    is_ahead = pipeline == "look_ahead"
    task = ClickTask(model, world_size)
    sharded = shard_task(task, sharder, constraints, data_parallel=not is_ahead, seed=1)
    optimizer = make_optimizer(sharded, spec, spec)
    before = gather_tables(sharded)
    made = make_pipeline(PipelineSpec(PipelineKind[pipeline]), sharded, optimizer, CPU)
    batches = iter(
        make_loader(
            dataset.artifact.path,
            "train",
            batch_size=GLOBAL_BATCH // world_size,
            rank=rank,
            world_size=world_size,
            shuffle=False,
            epochs=1,
        )
    )
    made.start()
    losses = []
    for _ in range(NUM_SAMPLES // GLOBAL_BATCH):
        loss, *_ = made.progress(batches)
        losses.append(mean_over_ranks(loss))
    made.flush()
    layers = {
        name[name.index("layers.") :]: parameter.detach().clone()
        for name, parameter in dense_parameters(sharded).items()
        if "layers." in name
    }
    found = gather_tables(sharded) | layers
    made.close()
    return losses, found, before


def check_cases(dataset_path: Path) -> list[str]:
    dataset = Dataset.open(dataset_path)
    failures = []
    for pipeline, plan in CASES:
        losses, weights, before = train_sharded(dataset, pipeline, plan)
        expected, plain = train_padded(dataset, before)
        assert weights.keys() == plain.keys()
        worst = max(float((weights[name] - plain[name]).abs().max()) for name in plain)
        if losses != pytest.approx(expected, abs=1e-5) or worst > 1e-5:
            failures.append(f"{pipeline} {plan}: {losses} for {expected}, weights {worst}")
        moved = [not torch.equal(plain[name], before[name]) for name in before]
        assert all(moved)
    return failures


@pytest.mark.parametrize("world_size", [1, 2])
def test_din_equals_a_padded_and_masked_model(world_size: int, tmp_path: Path) -> None:
    dataset_path = prepare_log(tmp_path)
    for failures in run_ranks(check_cases, world_size, timeout_s=240, dataset_path=dataset_path):
        assert not failures, "\n".join(failures)
