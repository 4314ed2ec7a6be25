"""The batch that a loader hands to the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable


@dataclass
class Batch(Pipelineable):
    """One rank's share of a global batch.

    Args:
        dense: float32 (B, N).
        sparse: the features' ids, jagged (F, B); or, when the loader routed them, the routed form
            that ``hotrec.routing`` makes, which the hot/cold collection takes just as well.
        labels: float32 (B,), 0 or 1.
        weights: float32 (B,), 1 for a sample, 0 for padding. A rank without samples in the last
            step of an epoch holds one padding sample with empty bags, which updates nothing.
        num_global_samples: samples of this step over all ranks. The loss is
            ``W / num_global_samples * sum(weights * loss)``, so that the mean of the ranks'
            gradients is the gradient of the mean loss, also when ranks hold unequal shares.
        is_all_hot: every id of this step is a hot row, on every rank, so that no cold row has to
            travel. False says nothing.
    """

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor
    weights: torch.Tensor
    num_global_samples: int
    is_all_hot: bool = False

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            dense=self.dense.to(device, non_blocking=non_blocking),
            sparse=self.sparse.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            weights=self.weights.to(device, non_blocking=non_blocking),
            num_global_samples=self.num_global_samples,
            is_all_hot=self.is_all_hot,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        self.dense.record_stream(stream)
        self.sparse.record_stream(stream)
        self.labels.record_stream(stream)
        self.weights.record_stream(stream)

    def pin_memory(self) -> Batch:
        return Batch(
            dense=self.dense.pin_memory(),
            sparse=self.sparse.pin_memory(),
            labels=self.labels.pin_memory(),
            weights=self.weights.pin_memory(),
            num_global_samples=self.num_global_samples,
            is_all_hot=self.is_all_hot,
        )
