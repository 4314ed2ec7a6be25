"""A batch on its way through the pipeline: what it reads, from whom, and what has arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from hotrec.embedding.ahead.lane import Pending
from hotrec.embedding.ahead.layout import Asked
from hotrec.embedding.ahead.messages import Counts
from hotrec.embedding.hot_reduce import HotPlan
from hotrec.routing import RoutedFeatures, RoutedGroup

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
        lags: uint8 (U,), of the asked rows, in the order of their owners: how many batches before
            this one the row was read last, by any rank; at most LONG_AGO.
        lags_here: uint8 (R,), the same of the rows that are asked of this rank.
        urgent: bool (U,), of the asked rows: some rank reads the row in the next batch; None as
            long as there is none.
        urgent_here: bool (R,), likewise.
    """

    asked: list[Asked]
    num_to: Counts
    num_from: Counts
    positions: list[torch.Tensor]
    lags: list[torch.Tensor]
    lags_here: list[torch.Tensor]
    urgent: list[torch.Tensor] | None = None
    urgent_here: list[torch.Tensor] | None = None


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
    return int(rows.lengths()[:num_hot_keys].sum())


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
