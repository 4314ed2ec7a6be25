"""Rows that are spread over their owners have state dicts of their own order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.data.batch import Batch
from hotrec.embedding.canonical import canonical_parts
from hotrec.embedding.tables import gather_tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.program import choice
from hotrec.program.count import profile
from hotrec.program.parallel import parallelize
from hotrec.train import tensor_files
from hotrec.train.checkpoint import Checkpoints, Position, save_checkpoint
from hotrec.types import OptimizerKind, Partition, Placement
from tests.exact.case import Case
from tests.exact.training import Training
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import TinyLoader

CASE = Case(hosts="000", seed=3, partition="half", optimizer="adagrad", is_spread=True)


def save_case(folder: Path) -> None:
    training = Training(CASE)
    given = training.model, training.optimizer, TinyLoader(num_batches=1)
    save_checkpoint(Checkpoints(folder, facts={}), Position(1, 1), *given)


def fail_on_one_rank(folder: Path) -> str:
    """Save while the first write of rank 1 fails; what this rank raises."""
    torch.set_num_threads(1)

    def fail(*_: object) -> None:
        raise OSError("no space left")

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(tensor_files, "_CHUNK_BYTES", 200))
        stack.enter_context(mock.patch.object(tensor_files, "MAX_FILE_BYTES", 300))
        if dist.get_rank() == 1:
            stack.enter_context(mock.patch.object(tensor_files, "save_file", fail))
        with pytest.raises(Exception, match=r"no space left|rank 1") as raised:
            save_case(folder)
    # The ranks are still in step.
    save_case(folder)
    return str(raised.value)


def test_a_rank_that_cannot_write_does_not_block_the_others(tmp_path: Path) -> None:
    found = run_ranks(fail_on_one_rank, 3, timeout_s=60, folder=tmp_path)
    assert "no space left" in found[1]


NUM_ROWS = {"a": 40, "b": 7}


def _model(num_rows: Mapping[str, int] = NUM_ROWS) -> _Model:
    """A model whose values are all different."""
    tables = [
        EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=8, feature_names=[f"f{name}"]
        )
        for name, rows in num_rows.items()
    ]
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    for bag in bags.embedding_bags.values():
        bag.weight.data = torch.arange(bag.weight.numel()).view_as(bag.weight).float()
    return _Model(bags)


def _parallelize(model: _Model, hot: Any, **given: Any) -> tuple[Any, Any]:
    return parallelize(
        model, hot, device="cpu",
        embedding_optimizer=OptimizerSpec(OptimizerKind.rowwise_adagrad, learning_rate=0.1),
        dense_optimizer=partial(torch.optim.SGD, lr=0.1), **given,
    )  # fmt: skip


def _placed(spread: str, num_rows: Mapping[str, int] = NUM_ROWS) -> Placement:
    return Placement.alike(Partition(num_rows, {"a": np.array([3, 30])})).spread(spread)


def keep_given_weights() -> list[str]:
    """The tables that have other weights than their module had before it was sharded."""
    model = _model()
    expected = {name: bag.weight.clone() for name, bag in model.bags.embedding_bags.items()}
    model, _ = _parallelize(model, _placed("ab"), pipeline="sparse_dist")
    found = gather_tables(model)
    return [name for name, table in expected.items() if not torch.equal(found[name], table)]


class _Model(nn.Module):
    def __init__(self, bags: EmbeddingBagCollection) -> None:
        super().__init__()
        self.bags, self.out = bags, nn.Linear(16, 1)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.out(self.bags(batch.sparse).values()).mean()


def test_spread_rows_keep_the_weights_of_an_initialized_model() -> None:
    for wrong in run_ranks(keep_given_weights, 3, timeout_s=60):
        assert wrong == []


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


def _make(side: str) -> tuple[Any, Any, dict[str, Any]]:
    hot, num_rows = SIDES[side]
    model, optimizer = _parallelize(_model(num_rows), hot, pipeline="sparse_dist")
    return model, optimizer, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save_sides(folder: Path) -> None:
    for side in SIDES:
        dcp.save(_make(side)[2], checkpoint_id=folder / side)


def load_sides(folder: Path) -> list[str]:
    """What happens in each of ``LOADS``, in their order."""
    found = []
    for writer, reader in LOADS:
        model, optimizer, state = _make(reader)
        expected = gather_tables(model)
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


def load_in_another_order() -> list[str]:
    """What ``load_state_dict`` raises without a checkpoint between the models."""
    found = []
    for writer, reader in permutations(("spread", "ordered"), 2):
        saved, of_saved, _ = _make(writer)
        model, optimizer, _ = _make(reader)
        for target, state in ((model, saved.state_dict()), (optimizer, of_saved.state_dict())):
            with pytest.raises(ValueError, match="expected|not found") as raised:
                target.load_state_dict(state)
            found.append(str(raised.value))
    # A program that reads parameters finds none under TorchRec's name.
    names = dict(_make("spread")[0].named_parameters())
    assert "bags.rows.dim8.embeddings.a.spread_weight" in names
    assert "bags.rows.dim8.embeddings.a.weight" not in names
    return found


def test_a_state_dict_of_another_order_is_refused() -> None:
    for found in run_ranks(load_in_another_order, 2, timeout_s=60):
        to_ordered, _, to_spread, _ = found
        key = "rows.dim8.embeddings.a."
        assert f"expected {key}weight, got {key}spread_weight. " in to_ordered
        assert f"expected {key}spread_weight, got {key}weight. " in to_spread


def profile_popular() -> list[str]:
    """The warnings of ``parallelize`` where only the first rows of tables are read."""
    warnings = []
    with mock.patch.object(choice.logger, "warning", lambda text, *v: warnings.append(text % v)):
        rng = np.random.default_rng(3)
        ids = torch.from_numpy(rng.integers(0, 5, 200))
        lengths, nothing = torch.ones(200, dtype=torch.long), torch.zeros(100)
        features = KeyedJaggedTensor.from_lengths_sync(["fa", "fb"], ids, lengths)
        counted = profile([Batch(nothing, features, nothing, nothing, 300)], _model())
        for spread_rows in (False, True):
            _parallelize(
                _model(), counted, spread_rows=spread_rows, may_decline=False, hot_budget_mib=0
            )
    return warnings


def test_uneven_owners_are_reported_once() -> None:
    first, *others = run_ranks(profile_popular, 3, timeout_s=60)
    [warning] = first
    assert re.match(r"by the profile, one rank serves 2\.\d times .* 1\.\d\d times if", warning)
    assert "spread_rows=True" in warning
    assert others == [[], []]
