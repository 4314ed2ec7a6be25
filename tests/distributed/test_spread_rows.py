"""Rows that are spread over their owners: state dicts of their own order."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hotrec.data.batch import Batch
from hotrec.embedding.canonical import canonical_parts, gather_tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.program.parallel import parallelize
from hotrec.types import OptimizerKind, Partition, Placement
from tests.helpers.ranks import run_ranks

NUM_ROWS = {"a": 40, "b": 7}


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


def _placed(spread: str, num_rows: Mapping[str, int] = NUM_ROWS) -> Placement:
    return Placement.alike(Partition(num_rows, {"a": np.array([3, 30])})).spread(spread)


# The model that writes a state dict, or reads one: hot rows, or "off", and the rows of its tables.
SIDES = {
    "spread": (_placed("ab"), NUM_ROWS),
    "ordered": (_placed(""), NUM_ROWS),
    "plain": ("off", NUM_ROWS),
    "longer": (_placed("ab", {"a": 41, "b": 7}), {"a": 41, "b": 7}),
}
# Writer, reader, and what happens on one rank, which stores rows in order, and on several.
LOADS = {
    ("spread", "spread"): ("Missing key", "loaded"),
    ("spread", "ordered"): ("Missing key", "Missing key"),
    ("spread", "plain"): ("Missing key", "Missing key"),
    ("spread", "longer"): ("Missing key", "Size mismatch"),
    ("ordered", "spread"): ("loaded", "Missing key"),
    ("plain", "spread"): ("Missing key", "Missing key"),
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


def _state(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save_sides(folder: Path) -> None:
    for side in SIDES:
        model, optimizer, _ = _make(side)
        dcp.save(_state(model, optimizer), checkpoint_id=folder / side)


def load_sides(folder: Path) -> list[str]:
    """What happens in each of ``LOADS``, in their order."""
    found = []
    for writer, reader in LOADS:
        model, optimizer, expected = _make(reader)
        state = _state(model, optimizer)
        for part in canonical_parts(model).parts:
            part.value.zero_()
        try:
            dcp.load(state, checkpoint_id=folder / writer)
        except CheckpointException as error:
            found.append(str(error))
            continue
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        values = gather_tables(model)
        wrong = [name for name, table in expected.items() if not torch.equal(values[name], table)]
        found.append(f"wrong rows of {wrong}" if wrong else "loaded")
    return found


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_state_dict_is_only_read_in_its_own_order(world_size: int, tmp_path: Path) -> None:
    run_ranks(save_sides, 2, timeout_s=120, folder=tmp_path)
    for found in run_ranks(load_sides, world_size, timeout_s=120, folder=tmp_path):
        for (pair, wanted), happened in zip(LOADS.items(), found, strict=True):
            assert wanted[world_size > 1] in happened, pair


def load_in_another_order() -> None:
    names = {"spread": "spread_weight", "ordered": "weight"}
    for writer, reader in permutations(names, 2):
        for saved, target in zip(_make(writer)[:2], _make(reader)[:2], strict=True):
            key = "rows.dim8.embeddings.a."
            said = rf"expected {key}{names[reader]}, got {key}{names[writer]}\. |not found"
            with pytest.raises(ValueError, match=said):
                target.load_state_dict(saved.state_dict())


def test_another_order_is_refused_without_a_checkpoint_between() -> None:
    run_ranks(load_in_another_order, 2)
