"""TorchRec's train pipelines, started anew for every bounded run of batches.

``sparse_dist`` exchanges the ids of the next batch while the current one computes; for that
TorchRec rewrites the forward of each sharded module whose input it can trace to the batch by
attribute access alone. What it cannot trace it leaves out with no more than a log line, so it is
checked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.types import ShardedModule

from hotrec.batch import Batch
from hotrec.train.dense import dense_parameters
from hotrec.train.marks import MarkedOptimizer, mark_lookups
from hotrec.train.pipeline_base import Output, Pipeline


class TorchRecPipeline(Pipeline):
    """One of TorchRec's pipelines; arguments as for ``make_pipeline``."""

    def __init__(
        self,
        kind: str,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        grad_clip_norm: float | None = None,
    ) -> None:
        super().__init__(kind, model, device)
        self._is_checked = False
        self._pipeline: TrainPipelineBase[Batch, Output] | TrainPipelineSparseDist[Batch, Output]
        clipped = list(dense_parameters(model).values()) if grad_clip_norm is not None else []
        marked: Any = MarkedOptimizer(optimizer, clipped, grad_clip_norm)
        if kind == "prefetch" and device.type == "cpu":
            raise ValueError(
                "pipeline prefetch: expected a CUDA device, whose caches it fills, got cpu. Use "
                "pipeline=sparse_dist."
            )
        if kind == "sparse_dist":
            self._pipeline = TrainPipelineSparseDist(model, marked, device)
        elif kind == "prefetch":
            self._pipeline = PrefetchTrainPipelineSparseDist(model, marked, device)
        else:
            self._pipeline = TrainPipelineBase(model, marked, device)
        mark_lookups(model)

    def start(self) -> None:
        if isinstance(self._pipeline, TrainPipelineBase):
            # It never asks another iterator by itself once one has ended.
            self._pipeline.reset()
        elif self._pipeline.batches:
            raise RuntimeError(
                f"pipeline {self.kind}: expected it drained, got {len(self._pipeline.batches)} "
                "batches in it. Progress until the iterator's last batch is computed."
            )

    def progress(self, batches: Iterator[Batch]) -> Output:
        try:
            output = self._pipeline.progress(batches)
        except StopIteration:
            raise self._no_batch() from None
        if not self._is_checked:
            self._check_all_pipelined()
            self._is_checked = True
        return output

    def settle(self) -> None:
        """TorchRec's pipelines have no thread; what they gave to the process group is its own."""

    def close(self) -> None:
        """There is nothing to end."""

    def _check_all_pipelined(self) -> None:
        if self.kind == "base":
            return
        # The one private attribute of TorchRec that hotrec reads; there is no public one.
        pipelined = {id(module) for module in self._pipeline._pipelined_modules}
        sharded = _sharded_modules(self.model)
        missing = [name for name, module in sharded.items() if id(module) not in pipelined]
        if missing:
            raise RuntimeError(
                f"pipeline {self.kind}: expected {len(sharded)} of {len(sharded)} sharded modules "
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
