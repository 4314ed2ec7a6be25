"""Routing: ids of a batch -> the distinct hot slots and cold rows it reads, and how to pool them.

Runs in loader workers or on the device, on whole tensors, never in a loop over samples. The
distinct rows become a ``KeyedJaggedTensor`` of stride 1 (one "sample" per rank, whose bag of a
table is the set of rows the batch reads), which makes TorchRec's ``EmbeddingCollection`` exchange
each row once however often the batch reads it. Pooling then happens locally, over these rows. Ids
of tables that a placement leaves to TorchRec's pooled exchange are checked and passed on.
"""

from hotrec.routing.checks import select_features
from hotrec.routing.features import (
    Column,
    RoutedFeatures,
    RoutedGroup,
    hot_name,
    hot_rows,
)
from hotrec.routing.group import COLD, GroupRouter
from hotrec.routing.pooled import PooledRouter
from hotrec.routing.router import Router
from hotrec.routing.split import samples_reading, select_samples

__all__ = [
    "COLD",
    "Column",
    "GroupRouter",
    "PooledRouter",
    "RoutedFeatures",
    "RoutedGroup",
    "Router",
    "hot_name",
    "hot_rows",
    "samples_reading",
    "select_features",
    "select_samples",
]
