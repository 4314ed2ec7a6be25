"""TorchRec's semi-synchronous pipeline, for reference: fast, and of another model's losses.

It looks up the rows of batch t + 1 before the update of batch t, so that they travel during the
backward of t. Every forward therefore reads rows that are one update old.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torchrec.distributed.train_pipeline.pipeline_context import EmbeddingTrainPipelineContext
from torchrec.distributed.train_pipeline.runtime_forwards import EmbeddingPipelinedForward
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSemiSync
from torchrec.distributed.train_pipeline.utils import _start_embedding_lookup
from torchrec.distributed.types import LazyNoWait, ShardedModule, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedTensor

from hotrec.data.batch import Batch
from hotrec.planning.torchrec_plan import plan_document
from hotrec.train.pipelines import MarkedOptimizer, Output, Pipeline, mark_lookups
from hotrec.types import ColdTier


class _ReplicaOptimizer(MarkedOptimizer):
    """Updates replicated tables between the lookup of a batch and its backward.

    Autograd refuses a backward through a tensor that was written to since; but the gradient of a
    lookup depends on no value of the table, so the write is hidden from it. TorchRec's own answer
    is to have no replicated tables in this pipeline, which its planner's choice and the hand-tuned
    plan have.

    Args:
        optimizer: that does the work.
        model: its sharded modules hold the tables.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        super().__init__(optimizer)
        self._tables = tuple(
            parameter
            for module in model.modules()
            if isinstance(module, ShardedModule)
            for parameter in module.parameters()
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The pipeline looks whether they have parameters of sharded modules, and warns."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    def step(self) -> None:
        with torch.autograd._unsafe_preserve_version_counter(self._tables):
            super().step()


class _CpuForward(EmbeddingPipelinedForward):
    """Takes the rows looked up before, cut off from the graph; without CUDA's streams."""

    def __call__(self, *inputs: Any, **kwargs: Any) -> LazyNoWait[KeyedTensor]:
        self._context.module_contexts.pop(self._name)
        embeddings = self._context.embedding_a2a_requests.pop(self._name).wait()
        tensor = embeddings.values()
        detached = tensor.detach().requires_grad_()
        embeddings._values = detached
        self._context.embedding_tensors.append([tensor])
        self._context.embedding_features.append([list(embeddings.keys())])
        self._context.detached_embedding_tensors.append([detached])
        return LazyNoWait(embeddings)


class _CpuSemiSync(TrainPipelineSemiSync[Batch, Output]):
    """TorchRec's pipeline without CUDA's streams; the order of work is the same."""

    _pipelined_forward_type = _CpuForward

    def _mlp_forward(
        self, batch: Batch, context: EmbeddingTrainPipelineContext
    ) -> tuple[torch.Tensor, Output]:
        out: tuple[torch.Tensor, Output] = self._model_fwd(batch)
        return out

    def start_embedding_lookup(
        self, batch: Batch | None, context: EmbeddingTrainPipelineContext
    ) -> None:
        if batch is None:
            return
        for module in self._pipelined_modules:
            _start_embedding_lookup(module, context, None, None, self._stream_context)


def refuse_caches(plan: ShardingPlan) -> None:
    """Refuse a plan with device caches, whoever chose them.

    FBGEMM notes in forward in which slot of the cache a row is, and updates that slot in backward.
    Here the lookup of batch t + 1 comes in between and may evict the row: backward would update
    another row's slot. Its prefetch mode looks again, but this pipeline does not use it.

    Args:
        plan: the same on every rank, so that all reach the same verdict.

    Raises:
        ValueError: if a table is cached.
    """
    cached = [
        name
        for tables in plan_document(plan).values()
        for name, facts in tables.items()
        if facts["compute_kernel"] == ColdTier.fused_uvm_caching.value
    ]
    if cached:
        raise ValueError(
            f"pipeline semi_sync: expected no table behind a device cache, whose slots the next "
            f"lookup may give to other rows before the update, got {len(cached)}: {cached}. Take "
            "the tier fused or fused_uvm, or the pipeline sparse_dist or prefetch."
        )


class SemiSyncPipeline(Pipeline):
    """A model in ``TrainPipelineSemiSync``, stale from its first batch on.

    Gradients of dense layers are used at once, TorchRec's default (``stash_gradients`` would delay
    them as well).

    Args:
        model: sharded by one of TorchRec's plans.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> None:
        super().__init__("semi_sync", model, device)
        marked: Any = _ReplicaOptimizer(optimizer, model)
        kind = _CpuSemiSync if device.type == "cpu" else TrainPipelineSemiSync
        self._pipeline: TrainPipelineSemiSync[Batch, Output] = kind(
            model, marked, device, start_batch=0
        )
        mark_lookups(model)

    def start(self) -> None:
        """Get ready for a new iterator.

        Raises:
            RuntimeError: if batches of the last one have not been computed.
        """
        if self._pipeline.batches:
            raise RuntimeError(
                f"pipeline semi_sync: expected it drained, got {len(self._pipeline.batches)} "
                "batches in it. Progress until the iterator's last batch is computed."
            )

    def progress(self, batches: Iterator[Batch]) -> Output:
        """Compute the next batch of ``batches`` and update; loss (), logits (B,), labels (B,).

        Raises:
            RuntimeError: if ``batches`` has ended.
        """
        try:
            return self._pipeline.progress(batches)
        except StopIteration:
            raise self._no_batch() from None

    def drain(self) -> None:
        """Nothing to do: what is under way is the process group's, whose barrier waits for it."""

    def close(self) -> None:
        """Nothing to do: it has no thread of its own."""
