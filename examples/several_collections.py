"""A model of one's own: two collections, weighted bags, a batch type; for python or torchrun."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import hotrec

B, NUM_BATCHES, WIDTH = 256, 40, 32 + 16 + 16


@dataclass
class Visits(Pipelineable):
    """What one rank learns from in a step: who visits, tags with weights, and the outcome."""

    ids: KeyedJaggedTensor  # user, seen
    weighted: KeyedJaggedTensor  # tag, with a weight for each
    labels: torch.Tensor  # float (B,)

    def to(self, device: torch.device, non_blocking: bool = False) -> "Visits":
        return Visits(*(part.to(device, non_blocking=non_blocking) for part in vars(self).values()))

    def record_stream(self, stream: torch.Stream) -> None:
        for part in vars(self).values():
            part.record_stream(stream)


class VisitModel(nn.Module):
    """(visits) -> (loss, loss), which is all that a pipeline asks of a model."""

    def __init__(self) -> None:
        super().__init__()
        user = EmbeddingBagConfig(
            name="user", num_embeddings=100_000, embedding_dim=32, feature_names=["user"]
        )
        shop = EmbeddingBagConfig(
            name="shop",
            num_embeddings=20_000,
            embedding_dim=16,
            feature_names=["seen"],
            pooling=PoolingType.MEAN,
        )
        tag = EmbeddingBagConfig(
            name="tag", num_embeddings=5_000, embedding_dim=16, feature_names=["tag"]
        )
        self.bags = EmbeddingBagCollection([user, shop])
        self.tags = EmbeddingBagCollection([tag], is_weighted=True)
        self.over = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, visits: Visits) -> tuple[torch.Tensor, torch.Tensor]:
        found, tags = self.bags(visits.ids), self.tags(visits.weighted)
        pooled = torch.cat([found["user"], found["seen"], tags["tag"]], dim=1)
        logits = self.over(pooled).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, visits.labels)
        return loss, loss.detach()


def visits(seed: int) -> Iterator[Visits]:
    """Bags of up to four ids, low ids often; users below 100 come back."""
    rng = np.random.default_rng(seed)
    for _ in range(NUM_BATCHES):
        lengths = [np.ones(B, np.int64), *rng.integers(0, 5, (2, B))]
        users, seen, tags = (
            (rng.random(n.sum()) ** 6 * rows).astype(np.int64)
            for n, rows in zip(lengths, (100_000, 20_000, 5_000), strict=True)
        )
        yield Visits(
            KeyedJaggedTensor(
                ["user", "seen"],
                torch.from_numpy(np.concatenate([users, seen])),
                lengths=torch.from_numpy(np.concatenate(lengths[:2])),
            ),
            KeyedJaggedTensor(
                ["tag"],
                torch.from_numpy(tags),
                torch.from_numpy(rng.random(tags.size, np.float32)),
                lengths=torch.from_numpy(lengths[2]),
            ),
            torch.from_numpy((users < 100).astype(np.float32)),
        )


def main() -> None:
    """Count, parallelize, train; parallelize joins the process group of torchrun, if any."""
    torch.manual_seed(0)
    model = VisitModel()
    hot = hotrec.profile(visits(seed=1), model)
    model, optimizer = hotrec.parallelize(
        model,
        hot,
        embedding_optimizer=partial(RowWiseAdagrad, lr=0.1),
        dense_optimizer=partial(torch.optim.Adagrad, lr=0.05),
    )
    pipeline = hotrec.Pipeline(model, optimizer)
    rank = torch.distributed.get_rank()
    batches, losses = visits(seed=2 + rank), []
    while True:
        try:
            losses.append(float(pipeline.progress(batches)))
        except StopIteration:
            break
    pipeline.close()
    if rank == 0:
        choice = hotrec.choice_of(model)
        print(f"{choice.name}, {choice.num_hot} hot rows: {choice.why}")
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps")


if __name__ == "__main__":
    main()
