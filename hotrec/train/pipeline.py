"""TorchRec's train pipelines, started anew for every bounded run of batches.

``sparse_dist`` exchanges the ids of the next batch while the current one computes; for that
TorchRec rewrites the forward of each sharded module whose input it can trace to the batch by
attribute access alone. What it cannot trace it leaves out with no more than a log line, so it is
checked here.

A pipeline holds batches ahead of the update. It is drained, so that weights and loader agree, when
the iterator it was started with has ended and every batch of it has been computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardedModule

from hotrec.batch import Batch
from hotrec.train.marks import MarkedOptimizer, mark_lookups

PIPELINES = ("base", "sparse_dist")

# What the model returns beside the loss to differentiate: loss (), logits (B,), labels (B,).
Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Pipeline:
    """One of TorchRec's pipelines and the model in it.

    While ``model`` is in training mode ``progress`` makes an update; in evaluation mode it only
    computes. The model's forward is TorchRec's to change, so evaluation goes through here as well.
    """

    def __init__(
        self,
        kind: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> None:
        self.kind = kind
        self.model = model
        self.device = device
        self._is_checked = False
        self._pipeline: TrainPipelineBase[Batch, Output] | TrainPipelineSparseDist[Batch, Output]
        marked: Any = MarkedOptimizer(optimizer)
        if kind == "sparse_dist":
            self._pipeline = TrainPipelineSparseDist(model, marked, device)
        elif kind == "base":
            self._pipeline = TrainPipelineBase(model, marked, device)
        else:
            raise ValueError(f"pipeline: expected one of {PIPELINES}, got {kind!r}.")
        mark_lookups(model)

    def start(self) -> None:
        """Get ready for a new iterator.

        Raises:
            RuntimeError: if batches of the last one have not been computed.
        """
        if isinstance(self._pipeline, TrainPipelineBase):
            # It never asks another iterator by itself once one has ended.
            self._pipeline.reset()
        elif self._pipeline.batches:
            raise RuntimeError(
                f"pipeline sparse_dist: expected it drained, got {len(self._pipeline.batches)} "
                "batches in it. Progress until the iterator's last batch is computed."
            )

    def progress(self, batches: Iterator[Batch]) -> Output:
        """Compute the next batch of ``batches``; one update if the model is in training mode.

        Returns:
            Loss (), logits (B,) and labels (B,), detached.

        Raises:
            RuntimeError: if ``batches`` has ended, or a sharded module is not pipelined.
        """
        try:
            output = self._pipeline.progress(batches)
        except StopIteration:
            # A StopIteration that escapes would silently end whatever loop stands above.
            raise RuntimeError(
                f"pipeline {self.kind}: expected another batch, got the end of the data. "
                "Ask for as many steps as the loader has."
            ) from None
        if not self._is_checked:
            self._check_all_pipelined()
            self._is_checked = True
        return output

    def _check_all_pipelined(self) -> None:
        if self.kind != "sparse_dist":
            return
        # The one private attribute of TorchRec that hotrec reads; there is no public one.
        pipelined = {id(module) for module in self._pipeline._pipelined_modules}
        sharded = _sharded_modules(self.model)
        missing = [name for name, module in sharded.items() if id(module) not in pipelined]
        if missing:
            raise RuntimeError(
                f"pipeline sparse_dist: expected {len(sharded)} of {len(sharded)} sharded modules "
                f"pipelined, got {len(sharded) - len(missing)}; not pipelined: {missing}. Pass the "
                "batch's attributes to them unmodified, or use the base pipeline."
            )


def _sharded_modules(model: nn.Module) -> dict[str, ShardedModule[Any, Any, Any, Any]]:
    """The outermost sharded modules by name; what they hold inside is theirs to call."""
    found: dict[str, ShardedModule[Any, Any, Any, Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, ShardedModule) and not any(
            name.startswith(f"{outer}.") for outer in found
        ):
            found[name] = module
    return found


def make_pipeline(
    kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> Pipeline:
    """Put a sharded model and its optimizer into a pipeline.

    Args:
        kind: "sparse_dist" (ids of the next batch travel while the current one computes) or
            "base" (only the copy to the device is ahead).

    Raises:
        ValueError: if the kind is unknown.
    """
    return Pipeline(kind, model, optimizer, device)
