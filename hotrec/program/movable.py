"""Batches of any class, for pipelines that only move those of TorchRec's."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torchrec.streamable import Pipelineable


class Movable(Pipelineable):
    """A batch with which TorchRec's pipelines begin; after the move they have the batch itself."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def to(self, device: torch.device, non_blocking: bool = False) -> Any:
        """The batch on another device.

        Raises:
            ValueError: If its own method returns none.
        """
        moved = self._batch.to(device, non_blocking=non_blocking)
        if moved is None:
            raise _unlike(self._batch, "to(...) returned None")
        Pipelineable.register(type(moved))
        return moved

    def record_stream(self, stream: torch.Stream) -> None:
        self._batch.record_stream(stream)


def check_movable(batch: Any) -> None:
    """Raise a ValueError if a batch has not the methods with which every pipeline moves it."""
    missing = [name for name in ("to", "record_stream") if not hasattr(batch, name)]
    if missing:
        raise _unlike(batch, f"no {missing[0]}()")
    try:
        signature(batch.to).bind(torch.device("cpu"), non_blocking=True)
    except TypeError as error:
        raise _unlike(batch, f"to{signature(batch.to)}: {error}") from None


def _unlike(batch: Any, found: str) -> ValueError:
    return ValueError(
        f"batch {type(batch).__name__}: expected to(device, non_blocking=...), which returns the "
        f"batch on that device, and record_stream(stream), got {found}. Write both, as for "
        "torchrec.streamable.Pipelineable."
    )
