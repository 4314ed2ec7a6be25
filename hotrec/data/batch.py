"""The batch that a loader hands to the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass(frozen=True)
class BatchItems:
    """The items of a batch's samples, for losses and metrics that compare items.

    Args:
        ids: Int64 (B,), the row of each sample's item; ``NO_GROUP`` of ``hotrec.data.groups``
            without one.
        log_q: Float32 (B,), the log of the probability with which the item is a candidate.
        is_candidate: Bool (B,), whether other samples are compared with the item.
        seen: Int64 (B, S), the items that each sample's ranking leaves out, padded with
            ``NO_GROUP``; None for none. They stay on the host.
    """

    ids: torch.Tensor
    log_q: torch.Tensor
    is_candidate: torch.Tensor
    seen: torch.Tensor | None = None

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> BatchItems:
        """The same with a function applied to each tensor but ``seen``."""
        return BatchItems(move(self.ids), move(self.log_q), move(self.is_candidate), self.seen)


@dataclass
class Batch(Pipelineable):
    """One rank's share of a global batch.

    Args:
        dense: Float32 (B, N).
        sparse: The ids of the features, jagged (F, B), or their routed form of ``hotrec.routing``
            if the loader routes them.
        labels: Float32 (B,), 0 or 1; (B, L) with several labels.
        weights: Float32 (B,), a sample's weight, 1 without weights, and 0 for padding. A rank
            without samples in the last step of an epoch holds one padding sample with empty bags,
            which updates nothing.
        num_global_samples: Samples of this step over all ranks. The loss is
            ``W / num_global_samples * sum(weights * loss)``, so that the mean of the ranks'
            gradients is the gradient of the mean loss, also when ranks hold unequal shares.
        is_all_hot: Whether it is known that every id of this step is a hot row on every rank, so
            that no cold rows are exchanged.
        groups: Int64 (B,), the group of each sample, see ``hotrec.data.groups``; None without. It
            stays on the host.
        work: The work of this rank's samples, see ``hotrec.data.tokens``; None if not counted.
        items: The items of the samples, see ``hotrec.data.items``; None without.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    weights: torch.Tensor
    num_global_samples: int
    is_all_hot: bool = False
    groups: torch.Tensor | None = None
    work: int | None = None
    items: BatchItems | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self._map(lambda values: values.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels.record_stream(stream)
        self.weights.record_stream(stream)
        if self.items is not None:
            self.items.ids.record_stream(stream)
            self.items.log_q.record_stream(stream)
            self.items.is_candidate.record_stream(stream)

    def pin_memory(self) -> Batch:
        return self._map(lambda values: values.pin_memory())

    def _map(self, move: Callable[[Any], Any]) -> Batch:
        return replace(
            self,
            dense=move(self.dense),
            sparse=move(self.sparse),
            labels=move(self.labels),
            weights=move(self.weights),
            items=None if self.items is None else self.items.map(move),
        )
