"""Tables that are pooled where they live, and table-wise ones: routing, both forms, conversion."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from hotrec.embedding.collection import HotColdEmbeddingBagCollection
from hotrec.embedding.convert import use_hot_cold
from hotrec.runtime.traffic import find_distinct_rows
from hotrec.types import (
    Exchange,
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
    some_features,
    some_tables,
)

POOLED = TablePlacement(Exchange.POOLED, Sharding.TABLE_WISE)
TABLE_WISE = TablePlacement(sharding=Sharding.TABLE_WISE)
HOT_U = Partition(NUM_ROWS, {"u": np.array([4, 0])})
PLACEMENTS = {
    "one": Placement(HOT_U, {"t": POOLED, "u": TablePlacement(), "v": TABLE_WISE}),
    # "a" is read from a pooled table and from one whose rows are exchanged, the other way round.
    "other": Placement(HOT_U, {"t": TABLE_WISE, "u": TABLE_WISE, "v": POOLED}),
    "all": Placement(Partition(NUM_ROWS), dict.fromkeys(NUM_ROWS, POOLED)),
}


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
