"""The embedding dimensions of a model's collections, as the exchange sees them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.flat import table_begins
from hotrec.embedding.prefetch.exchange import Group
from hotrec.embedding.prefetch.layout import ColdLayout
from hotrec.embedding.prefetch.stores import OwnedRows
from hotrec.embedding.prefetch.window import num_hot_rows
from hotrec.embedding.sharding import ShardedHotColdEmbeddingBagCollection
from hotrec.runtime.ranks import all_gather_object


def find_groups(
    collections: Sequence[ShardedHotColdEmbeddingBagCollection], device: torch.device
) -> list[Group]:
    """The groups of all collections in order; a collective."""
    groups = []
    for collection in collections:
        routers = collection.router.groups.values()
        for rows, router in zip(collection.sharded_rows(), routers, strict=True):
            owned = OwnedRows(rows)
            layout = None
            if router.cold_tables:
                layout = ColdLayout(
                    router.cold_tables,
                    collection.partition.num_rows,
                    all_gather_object(owned.shards),
                    device,
                )
            begins = table_begins(rows.hot.num_rows_T).to(device) if rows.hot else None
            groups.append(Group(rows.dim, len(router.hot_tables), begins, rows.hot, layout, owned))
    return groups


def hot_slots(group: Group, rows: KeyedJaggedTensor) -> torch.Tensor:
    """The hot slots of a routed group in its replica, int64, distinct, in the order of the rows."""
    assert group.hot_begins_T is not None
    lengths_T = rows.lengths()[: group.num_hot_keys].long()
    num_hot = num_hot_rows(rows, group.num_hot_keys)
    begins_U = torch.repeat_interleave(group.hot_begins_T, lengths_T, output_size=num_hot)
    return rows.values()[:num_hot] + begins_U
