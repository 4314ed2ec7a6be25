"""State dicts of split models: of the shares of their ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hotrec.data.batch import Batch
from hotrec.embedding.canonical import canonical_parts, gather_tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.program.parallel import parallelize
from hotrec.types import OptimizerKind, Partition, Placement
from tests.helpers.ranks import run_ranks

NUM_ROWS = {"a": 40, "b": 8}


class Model(nn.Module):
    """A model of tables whose values are all different."""

    def __init__(self, num_rows: Mapping[str, int] = NUM_ROWS) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=8, feature_names=[f"f{name}"]
            )
            for name, rows in num_rows.items()
        ]
        self.bags = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        for bag in self.bags.embedding_bags.values():
            bag.weight.data = torch.arange(bag.weight.numel()).view_as(bag.weight).float()
        self.out = nn.Linear(16, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.out(self.bags(batch.sparse).values()).mean()


def _placed(num_rows: Mapping[str, int] = NUM_ROWS) -> Placement:
    return Placement.alike(Partition(num_rows, {"a": np.array([3, 30])}))


SIDES = {
    "split": (_placed(), NUM_ROWS),
    "plain": ("off", NUM_ROWS),
    "longer": (_placed({"a": 42, "b": 8}), {"a": 42, "b": 8}),
}


def _make(side: str) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """The model, its optimizer and its tables, which are those of the model that was given."""
    hot, num_rows = SIDES[side]
    given = Model(num_rows)
    expected = {name: bag.weight.clone() for name, bag in given.bags.embedding_bags.items()}
    model, optimizer = parallelize(
        given, hot, device="cpu", pipeline="sparse_dist",
        embedding_optimizer=OptimizerSpec(OptimizerKind.rowwise_adagrad, learning_rate=0.1),
        dense_optimizer=partial(torch.optim.SGD, lr=0.1),
    )  # fmt: skip
    found = gather_tables(model)
    assert all(torch.equal(found[name], table) for name, table in expected.items())
    return model, optimizer, expected


def save(folder: Path) -> None:
    model, optimizer, _ = _make("split")
    torch.save((model.state_dict(), optimizer.state_dict()), folder / f"{dist.get_rank()}.pt")


def load(folder: Path, side: str, shift: int) -> list[str]:
    """Load what another rank has saved; what happened to the model, and to the optimizer."""
    model, optimizer, expected = _make(side)
    saved = torch.load(folder / f"{(dist.get_rank() + shift) % 2}.pt", weights_only=False)
    for part in canonical_parts(model).parts:
        part.value.zero_()
    found = []
    for target, state in zip((model, optimizer), saved, strict=True):
        try:
            target.load_state_dict(state)
        except (RuntimeError, ValueError, KeyError) as error:
            found.append(str(error))
    if not found:
        tables = gather_tables(model)
        assert all(torch.equal(tables[name], table) for name, table in expected.items())
    return found


@pytest.mark.parametrize(
    ("world_size", "side", "shift"),
    [(2, "split", 0), (2, "split", 1), (3, "split", 0), (1, "split", 0), (2, "longer", 0)],
)
def test_only_the_same_share_is_read(
    world_size: int, side: str, shift: int, tmp_path: Path
) -> None:
    run_ranks(save, 2, timeout_s=120, folder=tmp_path)
    is_same = (world_size, side, shift) == (2, "split", 0)
    for found in run_ranks(load, world_size, folder=tmp_path, side=side, shift=shift):
        assert bool(found) != is_same
        assert is_same or "rows.dim8.embeddings" in found[0], found
