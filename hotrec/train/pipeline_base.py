"""What every train pipeline is: a model, an optimizer, and the order in which a step is made.

A pipeline holds batches ahead of the update. It is drained, so that weights and loader agree, when
the iterator it was started with has ended and every batch of it has been computed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import nn

from hotrec.batch import Batch

# What the model returns beside the loss to differentiate: loss (), logits (B,), labels (B,).
Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Pipeline(ABC):
    """A model and its optimizer, and the order in which a step is made.

    While ``model`` is in training mode ``progress`` makes an update; in evaluation mode it only
    computes. The model's forward is the pipeline's to change, so evaluation goes through here too.

    Args:
        kind: its name.
        model: sharded.
        device: of the model.
    """

    def __init__(self, kind: str, model: nn.Module, device: torch.device) -> None:
        self.kind = kind
        self.model = model
        self.device = device

    @abstractmethod
    def start(self) -> None:
        """Get ready for a new iterator.

        Raises:
            RuntimeError: if batches of the last one have not been computed.
        """

    @abstractmethod
    def progress(self, batches: Iterator[Batch]) -> Output:
        """Compute the next batch of ``batches``; one update if the model is in training mode.

        Returns:
            Loss (), logits (B,) and labels (B,), detached.

        Raises:
            RuntimeError: if ``batches`` has ended, or the model does not fit the pipeline.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait until no thread is at work and every update made so far is in the weights.

        To be called before weights are read. Batches that are held stay held.
        """

    @abstractmethod
    def close(self) -> None:
        """End the pipeline's threads, if any, and give the model its own forward back."""

    def _no_batch(self) -> RuntimeError:
        # A StopIteration that escapes would silently end whatever loop stands above.
        return RuntimeError(
            f"pipeline {self.kind}: expected another batch, got the end of the data. "
            "Ask for as many steps as the loader has."
        )
