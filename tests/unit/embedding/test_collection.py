"""The collection before and after sharding on one rank, against TorchRec's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hotrec.embedding.canonical import gather_tables
from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import use_hot_cold
from hotrec.embedding.initialize import initial_rows, initialize_embeddings
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.ranks import Ranks
from hotrec.types import Exchange, OptimizerKind, Partition, Placement, TablePlacement
from tests.unit.embedding.setups import (
    MEAN,
    NUM_ROWS,
    PARTITIONS,
    SGD,
    SUM,
    Model,
    bag,
    shard_here,
    some_features,
    some_tables,
    split_model,
)

MIXED = PARTITIONS["mixed"]


def gradients(collection: HotColdEmbeddingBagCollection) -> dict[str, torch.Tensor]:
    """Gradient of each unsplit table from its two halves; cold slots of hot rows must get none."""
    found = {}
    for dim, group in collection.router.groups.items():
        embeddings: Any = collection.rows[f"dim{dim}"].embeddings
        for table in group.tables:
            hot = torch.from_numpy(collection.partition.hot(table))
            total = torch.zeros(NUM_ROWS[table], dim)
            if table in group.cold_tables:
                total += embeddings[table].weight.grad
                assert not total[hot].any()
            if table in group.hot_tables:
                total[hot] += embeddings[f"{table}_hot"].weight.grad
            found[table] = total
    return found


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("partition", list(PARTITIONS))
def test_unsharded_equals_embedding_bag_collection(partition: str, is_weighted: bool) -> None:
    # Unsharded, TorchRec has no weighted mean.
    tables = some_tables(SUM if is_weighted else MEAN)
    plain = EmbeddingBagCollection(tables=tables, is_weighted=is_weighted)
    collection = use_hot_cold(plain, PARTITIONS[partition])
    assert isinstance(collection, HotColdEmbeddingBagCollection)
    features = some_features(is_weighted=is_weighted)
    expected, routed_input = plain(features), collection.router(features)
    for found in (collection(features), collection(routed_input)):
        assert found.keys() == expected.keys()
        assert found.length_per_key() == expected.length_per_key()
        torch.testing.assert_close(found.values(), expected.values(), rtol=1e-6, atol=1e-6)
    grad = torch.randn(expected.values().shape, generator=torch.Generator().manual_seed(1))
    expected.values().backward(grad)
    collection(features).values().backward(grad)
    for table, found_grad in gradients(collection).items():
        weight: Any = plain.embedding_bags[table].weight
        torch.testing.assert_close(found_grad, weight.grad, rtol=1e-6, atol=1e-6)


def test_features_routed_for_another_partition_are_refused() -> None:
    """Else rows would be mixed up without a word: the numbers of hot rows are the same."""
    collection = HotColdEmbeddingBagCollection(some_tables(), MIXED)
    partition = Partition(NUM_ROWS, {"t": np.array([1, 2, 3]), "u": np.arange(5)})
    other = HotColdEmbeddingBagCollection(some_tables(), partition)
    with pytest.raises(ValueError, match="expected"):
        collection(other.router(some_features()))


def test_ids_of_pooled_tables_are_checked() -> None:
    placement = Placement(Partition(NUM_ROWS), dict.fromkeys(NUM_ROWS, POOLED))
    router, features = (
        HotColdEmbeddingBagCollection(some_tables(), placement).router,
        some_features(),
    )
    for row in (5, -1):  # "u" has 5 rows
        features.values()[int(features.offset_per_key()[2])] = row
        with pytest.raises(ValueError, match=rf"^table u feature c: .*got {row}\."):
            router(features)


@pytest.mark.parametrize(
    ("tables", "num_rows", "message"),
    [
        ([bag("t", 5, ["a"])], {"t": 6}, "^partition table t: .*6"),
        ([bag("t", 5, ["a"])], {"u": 5}, "^partition table t: .*None"),
        ([bag("t", 5, ["a"], data_type=DataType.FP16)], {"t": 5}, "^table t data_type: .*FP16"),
        ([bag("t", 5, ["a"]), bag("t_hot", 5, ["b"])], {"t": 5, "t_hot": 5}, r"^table t_hot: "),
    ],
)
def test_tables_that_cannot_be_split_are_refused(
    tables: list[EmbeddingBagConfig], num_rows: dict[str, int], message: str
) -> None:
    hot = {"t": np.array([1])} if "t" in num_rows else {}
    with pytest.raises(ValueError, match=message):
        HotColdEmbeddingBagCollection(tables, Partition(num_rows, hot))


@pytest.mark.parametrize("where", ["root", "embeddings"])
def test_sharding_keeps_weights_wherever_the_collection_stands(one_rank: Ranks, where: str) -> None:
    """And each parameter belongs to one optimizer."""
    plain = EmbeddingBagCollection(tables=some_tables())
    start = {name: module.weight.detach().clone() for name, module in plain.embedding_bags.items()}
    collection = use_hot_cold(plain, MIXED)
    model = collection if where == "root" else Model(collection, where)
    expected = model(some_features())
    sharded = shard_here(model, MIXED)
    found = sharded(some_features())
    if where == "root":
        expected, found = expected.values(), found.values()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for table, weight in gather_tables(sharded).items():
        assert torch.equal(weight, start[table])

    initialize_embeddings(sharded, seed=3)
    for config in some_tables():
        rows = torch.arange(config.num_embeddings)
        expected = initial_rows(3, config.name, rows, config.embedding_dim, config.num_embeddings)
        assert torch.equal(gather_tables(sharded)[config.name], expected), config.name
    optimizer = make_optimizer(sharded, SGD, SGD)
    names = [name.split(".", 1)[1] for name in optimizer.params]
    assert sorted(names) == sorted(sharded.state_dict())


POOLED = TablePlacement(Exchange.POOLED)
HOT_BUT_T = Partition(NUM_ROWS, {"u": np.arange(5), "v": np.arange(9)})
T_POOLED = Placement(HOT_BUT_T, dict.fromkeys(NUM_ROWS, TablePlacement()) | {"t": POOLED})


def test_adam_of_pooled_tables_on_cpu_is_refused_before_training(one_rank: Ranks) -> None:
    adam = OptimizerSpec(OptimizerKind.adam, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"^optimizer\.kind: .*adam"):
        shard_here(split_model(T_POOLED), T_POOLED, adam)
    for allowed in (MIXED, PARTITIONS["all_cold"]):
        assert shard_here(split_model(allowed), allowed, adam) is not None
