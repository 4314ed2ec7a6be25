"""Tables that are pooled where they live, and table-wise ones: routing, both forms, conversion."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import use_hot_cold
from hotrec.embedding.initialize import initial_rows, initialize_embeddings
from hotrec.embedding.optimizers import make_optimizer
from hotrec.embedding.tables import gather_tables
from hotrec.embedding.update_rules import OptimizerSpec
from hotrec.runtime.ranks import Ranks
from hotrec.runtime.traffic import find_distinct_rows
from hotrec.train.dense_sync import count_dense_values
from hotrec.types import (
    Exchange,
    OptimizerKind,
    Partition,
    Placement,
    Sharding,
    TablePlacement,
)
from tests.unit.embedding.setups import (
    MEAN,
    NUM_ROWS,
    SUM,
    Model,
    shard_here,
    some_features,
    some_tables,
    split_model,
)

SPEC = OptimizerSpec(OptimizerKind.adagrad, learning_rate=0.2, eps=1e-3)
POOLED = TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE)
TABLE_WISE = TablePlacement(sharding=Sharding.TABLE_WISE)
HOT_U = Partition(NUM_ROWS, {"u": np.array([4, 0])})
PLACEMENTS = {
    "one": Placement(HOT_U, {"t": POOLED, "u": TablePlacement(), "v": TABLE_WISE}),
    # "a" is read from a pooled table and from one whose rows are exchanged, the other way round.
    "other": Placement(HOT_U, {"t": TABLE_WISE, "u": TABLE_WISE, "v": POOLED}),
    "all": Placement(Partition(NUM_ROWS), dict.fromkeys(NUM_ROWS, POOLED)),
}


def sharded(placement: Placement, **kwargs: Any) -> Any:
    return shard_here(split_model(placement, **kwargs), placement, SPEC)


@pytest.mark.parametrize("is_routed", [False, True])
@pytest.mark.parametrize("pooling", [SUM, MEAN])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_unsharded_equals_torchrecs(name: str, pooling: PoolingType, is_routed: bool) -> None:
    plain = EmbeddingBagCollection(some_tables(pooling))
    features = some_features()
    expected = plain(features)
    expected.values().square().sum().backward()
    model = Model(plain)
    use_hot_cold(model, PLACEMENTS[name])
    collection = model.collection
    found = collection(collection.router(features) if is_routed else features)
    assert found.keys() == expected.keys()
    assert found.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(found.values(), expected.values(), rtol=0, atol=1e-6)
    found.values().square().sum().backward()
    for table in collection.router.pooled.tables:
        grad = collection.pooled.embedding_bags[table].weight.grad
        torch.testing.assert_close(grad, plain.embedding_bags[table].weight.grad)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_sharded_equals_unsharded(
    one_rank: Ranks, name: str, is_empty: bool, is_weighted: bool
) -> None:
    placement = PLACEMENTS[name]
    features = some_features(is_weighted=is_weighted, is_empty=is_empty)
    model = sharded(placement, is_weighted=is_weighted)
    initialize_embeddings(model, seed=3)
    plain = HotColdEmbeddingBagCollection(
        some_tables(), Partition(NUM_ROWS), is_weighted=is_weighted
    )
    tables = gather_tables(model)
    assert set(tables) == set(NUM_ROWS)
    with torch.no_grad():
        for rows in plain.rows.values():
            for table, embedding in rows.embeddings.items():
                expected = initial_rows(
                    3, table, torch.arange(NUM_ROWS[table]), embedding.embedding_dim,
                    NUM_ROWS[table],
                )  # fmt: skip
                assert torch.equal(tables[table], expected)
                embedding.weight.copy_(expected)
    found = model.module.collection(features)
    assert found.keys() == plain(features).keys()
    torch.testing.assert_close(found.values(), plain(features).values(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_rates_optimizers_and_dense_values(one_rank: Ranks, name: str) -> None:
    model = sharded(PLACEMENTS[name])
    initialize_embeddings(model, seed=3)
    optimizer = make_optimizer(model, SPEC, SPEC)
    assert {key.split(".", 1)[1] for key in optimizer.params} == set(model.state_dict())
    assert count_dense_values(model) == 21
    layer = model.module.out.weight
    for rate, moves in ((0.0, False), (0.2, True)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        before = {**gather_tables(model), "layer": layer.detach().clone()}
        optimizer.zero_grad()
        # Rates reach fused kernels in zero_grad and step, before the pass that they are for.
        optimizer.step()
        model(some_features()).square().sum().backward()
        optimizer.step()
        after = {**gather_tables(model), "layer": layer.detach()}
        assert {not torch.equal(after[t], before[t]) for t in before} == {moves}


def test_routing_counts_and_travels() -> None:
    features = some_features()
    tables = {"a": [("t", 4), ("v", 4)], "b": [("t", 4)], "c": [("u", 8)]}
    all_rows = HotColdEmbeddingBagCollection(some_tables(), Partition(NUM_ROWS)).router

    def sizes(rows: dict[int, torch.Tensor]) -> dict[int, int]:
        assert all(rows_U.unique().numel() == rows_U.numel() for rows_U in rows.values())
        return {dim: rows_U.numel() for dim, rows_U in rows.items()}

    expected = sizes(all_rows.find_distinct(all_rows(features)))
    found = find_distinct_rows(features, {k: v[0] for k, v in tables.items()})
    assert expected[8] == found[8].numel()
    fingerprints = {all_rows.fingerprint}
    for placement in PLACEMENTS.values():
        router = pickle.loads(
            pickle.dumps(HotColdEmbeddingBagCollection(some_tables(), placement).router)
        )
        routed = router(features)
        assert sizes(router.find_distinct(routed)) == expected
        assert routed.num_lookups == all_rows(features).num_lookups
        assert routed.stride() == 6
        moved = pickle.loads(pickle.dumps(routed)).to(torch.device("cpu"))
        assert torch.equal(moved.pooled.values(), routed.pooled.values())
        assert moved.pooled.keys() == [column.name for column in router.pooled.columns]
        assert moved.pooled.stride() == 6
        fingerprints.add(router.fingerprint)
    assert len(fingerprints) == 1 + len(PLACEMENTS)


def test_ids_of_pooled_tables_are_checked() -> None:
    router = HotColdEmbeddingBagCollection(some_tables(), PLACEMENTS["all"]).router
    features = some_features()
    of_c = int(features.offset_per_key()[2])
    features.values()[of_c] = 5  # "u" has 5 rows
    with pytest.raises(ValueError, match=r"^table u feature c: expected rows in 0\.\.4, got 5\."):
        router(features)
    features.values()[of_c] = -1
    with pytest.raises(ValueError, match=r"got -1\."):
        router(features)


def test_weights_of_means_carry_the_length() -> None:
    collection = HotColdEmbeddingBagCollection(some_tables(), PLACEMENTS["all"], is_weighted=True)
    assert collection.pooled is not None
    assert {c.pooling for c in collection.pooled.embedding_bag_configs()} == {SUM}
    features = some_features(is_weighted=True)
    pooled = collection.router(features).pooled
    given, routed = features.to_dict(), pooled.to_dict()
    for column in collection.router.pooled.columns:  # type: ignore[union-attr]
        lengths = given[column.feature].lengths()
        divisor = torch.repeat_interleave(lengths, lengths) if column.is_mean else 1
        expected = given[column.feature].weights() / divisor
        assert torch.equal(routed[column.name].weights(), expected)
    with pytest.raises(ValueError, match=r"^features weights: expected per-sample weights since"):
        collection.router(some_features())
    features.weights().requires_grad_(True)
    with pytest.raises(ValueError, match="without a gradient"):
        collection.router(features)
