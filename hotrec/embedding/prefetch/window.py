"""A batch on its way through the pipeline: what it reads, from whom, and what has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.hot_reduce import HotPlan
from hotrec.embedding.prefetch.lane import Pending
from hotrec.embedding.prefetch.layout import Asked
from hotrec.embedding.prefetch.messages import ByClass, Counts
from hotrec.routing.features import RoutedFeatures, RoutedGroup

# Lag of a row that no batch in sight has read before.
LONG_AGO = 255


@dataclass
class Conversation:
    """The cold rows of one batch as both sides of the exchange know them, by group.

    Args:
        asked: what this rank asks of the owners.
        num_to: rows asked of each rank.
        num_from: rows that each rank asks of this one.
        positions: int64 (R,), the rows that are asked of this rank, in rank order.
        by_lag: the asked rows, in the order of their owners, by how many batches before this one
            any rank read the row last: class 0 is one batch before, the last class ``depth`` + 1 or
            more.
        by_lag_here: likewise the rows that are asked of this rank.
        by_need: the asked rows, the urgent ones, which some rank reads in the next batch too, as
            class 0 and the others as class 1; None as long as there is no next batch.
        by_need_here: likewise.
    """

    asked: list[Asked]
    num_to: Counts
    num_from: Counts
    positions: list[torch.Tensor]
    by_lag: ByClass | None = None
    by_lag_here: ByClass | None = None
    by_need: ByClass | None = None
    by_need_here: ByClass | None = None


@dataclass
class AheadBatch:
    """One batch of this rank.

    Args:
        number: counted over all batches, the same on all ranks.
        features: what the model is given, as it came.
        routed: of each collection.
        groups: of each embedding dimension of each collection.
        will_update: the model is in training mode.
        is_all_hot: no rank's batch reads a cold row; known before anything is exchanged.
        rows: float (U, D) of each group, hot rows first; filled while the batch waits.
        conversation: None where no cold rows are exchanged.
        hot_counts: touched hot rows, [rank][group with hot rows].
        hot_plan: how their gradients will travel; None without any, and in evaluation.
        first_rows: done when all rows but those with a lag of 1 are there.
        all_rows: done when all rows are there.
    """

    number: int
    features: Any
    routed: list[RoutedFeatures]
    groups: list[RoutedGroup]
    will_update: bool
    is_all_hot: bool
    rows: list[torch.Tensor]
    conversation: Conversation | None = None
    hot_counts: Counts = field(default_factory=list)
    hot_plan: HotPlan | None = None
    first_rows: Pending[None] | None = None
    all_rows: Pending[None] | None = None


def num_hot_rows(rows: KeyedJaggedTensor, num_hot_keys: int) -> int:
    """Distinct hot rows of a routed group."""
    return sum(rows.length_per_key()[:num_hot_keys])


@dataclass(frozen=True)
class Gradients:
    """What backward leaves for the exchange.

    Args:
        rows: float (U, D) of each group, of the rank's share of the loss.
        learning_rates: of the owned rows of each group, in the step that made the gradients.
        num_updates: steps made before.
    """

    rows: Sequence[torch.Tensor]
    learning_rates: Sequence[float]
    num_updates: int
