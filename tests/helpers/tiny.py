"""A small TorchRec model with tables of all three kinds, and a loader in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.data.batch import Batch

DIM = 4
NUM_ROWS = {"table_wise": 30, "row_wise": 21, "data_parallel": 10}
NUM_DENSE = 3


class TinyModel(nn.Module):
    """DLRM over a table-wise and a data-parallel table, plus a row-wise sequence table."""

    def __init__(self, *, num_over: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        bags = [
            EmbeddingBagConfig(
                name=name, num_embeddings=NUM_ROWS[name], embedding_dim=DIM, feature_names=[name]
            )
            for name in ("table_wise", "data_parallel")
        ]
        self.dlrm = DLRM(EmbeddingBagCollection(bags), NUM_DENSE, [8, DIM], [num_over, 1])
        self.rows = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name="row_wise",
                    num_embeddings=NUM_ROWS["row_wise"],
                    embedding_dim=DIM,
                    feature_names=["row_wise"],
                )
            ]
        )
        self.dropout = nn.Dropout(dropout)
        self.world_size = dist.get_world_size()

    def forward(
        self, batch: Batch
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        rows_BD = self.rows(batch.sparse)["row_wise"].values()  # one id per sample
        logits = self.dlrm(batch.dense, batch.sparse).squeeze(-1) + self.dropout(rows_BD).sum(1)
        losses = nn.functional.binary_cross_entropy_with_logits(
            logits, batch.labels, reduction="none"
        )
        loss = (losses * batch.weights).sum() * self.world_size / batch.num_global_samples
        return loss, (loss.detach(), logits.detach(), batch.labels)


def build_tiny(
    *, optimizer: type[torch.optim.Optimizer] = torch.optim.Adagrad, lr: float = 0.1, **kwargs: Any
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The sharded model and its optimizer, the same whatever ran before."""
    with torch.random.fork_rng():
        torch.manual_seed(0)  # sharding draws the weights of the tables anew
        return _build(optimizer, lr, TinyModel(**kwargs))


def _build(
    optimizer: type[torch.optim.Optimizer], lr: float, model: TinyModel
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    bags = model.dlrm.sparse_arch.embedding_bag_collection
    sharded = [bags.embedding_bags["table_wise"].weight, model.rows.embeddings["row_wise"].weight]
    apply_optimizer_in_backward(optimizer, sharded, {"lr": lr})
    world_size = dist.get_world_size()
    plan = ShardingPlan(
        {
            "dlrm.sparse_arch.embedding_bag_collection": construct_module_sharding_plan(
                bags,
                {
                    "table_wise": table_wise(rank=world_size - 1),
                    "data_parallel": data_parallel(),
                },
                local_size=world_size,
                world_size=world_size,
                device_type="cpu",
            ),
            "rows": construct_module_sharding_plan(
                model.rows,
                {"row_wise": row_wise()},
                local_size=world_size,
                world_size=world_size,
                device_type="cpu",
            ),
        }
    )
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=[EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()],
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())),
        lambda parameters: optimizer(parameters, lr=lr),
    )
    return dmp, CombinedOptimizer([dmp.fused_optimizer, dense])


def tiny_batch(
    seed: int, batch_size: int, *, num_padding: int = 0, num_global_samples: int | None = None
) -> Batch:
    """A random batch; labels depend on the ids, the last ``num_padding`` samples are padding."""
    rng = torch.Generator().manual_seed(seed)
    ids = {
        name: torch.randint(0, num_rows, (batch_size,), generator=rng)
        for name, num_rows in NUM_ROWS.items()
    }
    lengths = torch.ones(len(ids) * batch_size, dtype=torch.int64)
    weights = torch.ones(batch_size)
    weights[batch_size - num_padding :] = 0.0
    return Batch(
        dense=torch.rand(batch_size, NUM_DENSE, generator=rng),
        sparse=KeyedJaggedTensor(
            keys=list(ids), values=torch.cat(list(ids.values())), lengths=lengths
        ),
        labels=((ids["table_wise"] + ids["row_wise"]) % 2).float() * weights,
        weights=weights,
        num_global_samples=(
            batch_size * dist.get_world_size() if num_global_samples is None else num_global_samples
        ),
    )


@dataclass(frozen=True)
class TinySplit:
    """The same batches whenever it is iterated, as evaluation wants them."""

    num_batches: int
    seed: int

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(TinyLoader(num_batches=self.num_batches, seed=self.seed))


class TinyLoader:
    """Batches that follow from seed, rank and position; counts what was taken."""

    def __init__(self, *, num_batches: int, batch_size: int = 8, seed: int = 0) -> None:
        self.num_batches = num_batches
        self.batch_size = batch_size
        self.seed = seed
        self.position = 0

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Batch]:
        # As torch's DataLoader does when it starts; a resumed run must not be misled by it.
        torch.empty((), dtype=torch.int64).random_()
        return self._batches()

    def _batches(self) -> Iterator[Batch]:
        while self.position < self.num_batches:
            self.position += 1
            yield self.batch(self.position - 1)

    def batch(self, index: int) -> Batch:
        seed = (self.seed * 1000 + index) * dist.get_world_size() + dist.get_rank()
        return tiny_batch(seed, self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]
