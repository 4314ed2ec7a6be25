from __future__ import annotations

import pytest
import torch

from hotrec.data.batch import Batch
from hotrec.runtime.ranks import Ranks
from hotrec.train.pipelines import make_pipeline
from hotrec.types import PipelineKind, PipelineSpec
from tests.helpers.tiny import TinyLoader, TinyModel, build_tiny


def test_end_of_data_is_a_clear_error(one_rank: Ranks) -> None:
    model, optimizer = build_tiny()
    pipeline = make_pipeline(
        PipelineSpec(PipelineKind.sparse_dist), model, optimizer, torch.device("cpu")
    )
    batches = iter(TinyLoader(num_batches=2))
    pipeline.start()
    for _ in range(2):
        pipeline.progress(batches)
    with pytest.raises(RuntimeError, match="end of the data"):
        pipeline.progress(batches)


def test_pipeline_with_batches_in_it_is_not_started_again(one_rank: Ranks) -> None:
    model, optimizer = build_tiny()
    pipeline = make_pipeline(
        PipelineSpec(PipelineKind.sparse_dist), model, optimizer, torch.device("cpu")
    )
    pipeline.progress(iter(TinyLoader(num_batches=5)))
    with pytest.raises(RuntimeError, match="got 2 batches"):
        pipeline.start()


def test_module_that_is_not_pipelined_is_an_error(
    one_rank: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TinyModel, "forward", _forward_with_changed_ids)
    model, optimizer = build_tiny()
    pipeline = make_pipeline(
        PipelineSpec(PipelineKind.sparse_dist), model, optimizer, torch.device("cpu")
    )
    with pytest.raises(RuntimeError, match=r"rows'\]"):
        pipeline.progress(iter(TinyLoader(num_batches=3)))
    base = make_pipeline(PipelineSpec(PipelineKind.base), *build_tiny(), torch.device("cpu"))
    base.progress(iter(TinyLoader(num_batches=3)))


def _forward_with_changed_ids(
    self: TinyModel, batch: Batch
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    changed = batch.sparse.permute([2, 1, 0])
    rows_BD = self.rows(changed)["row_wise"].values()
    logits = self.dlrm(batch.dense, batch.sparse).squeeze(-1) + rows_BD.sum(1)
    return logits.sum(), (logits.sum().detach(), logits.detach(), batch.labels)
