from __future__ import annotations

from itertools import islice

import pytest
import torch
from torch import nn

from hotrec.data.batch import Batch
from hotrec.runtime.ranks import Ranks
from hotrec.train.pipelines import make_pipeline
from hotrec.types import PipelineKind, PipelineSpec
from tests.helpers.tiny import TinyLoader, TinyModel, build_tiny


def losses_in_segments(kind: str, lengths: list[int]) -> list[float]:
    model, optimizer = build_tiny()
    pipeline = make_pipeline(
        PipelineSpec(PipelineKind[kind]), model, optimizer, torch.device("cpu")
    )
    source = iter(TinyLoader(num_batches=sum(lengths)))
    losses = []
    for length in lengths:
        batches = islice(source, length)
        pipeline.start()
        losses += [float(pipeline.progress(batches)[0]) for _ in range(length)]
    return losses


def test_pipelines_and_segments_do_not_change_the_losses(one_rank: Ranks) -> None:
    expected = losses_in_segments("base", [9])
    assert len(set(expected)) == 9
    for kind in ("base", "sparse_dist"):
        for lengths in ([9], [1, 1, 2, 5], [3, 6]):
            assert losses_in_segments(kind, lengths) == expected, (kind, lengths)


@pytest.mark.parametrize("kind", ["base", "sparse_dist"])
def test_end_of_data_is_a_clear_error(kind: str, one_rank: Ranks) -> None:
    model, optimizer = build_tiny()
    pipeline = make_pipeline(
        PipelineSpec(PipelineKind[kind]), model, optimizer, torch.device("cpu")
    )
    batches = iter(TinyLoader(num_batches=2))
    pipeline.start()
    for _ in range(2):
        pipeline.progress(batches)
    with pytest.raises(RuntimeError, match="expected another batch, got the end of the data"):
        pipeline.progress(batches)


def test_pipeline_with_batches_in_it_is_not_started_again(one_rank: Ranks) -> None:
    model, optimizer = build_tiny()
    pipeline = make_pipeline(
        PipelineSpec(PipelineKind.sparse_dist), model, optimizer, torch.device("cpu")
    )
    pipeline.progress(iter(TinyLoader(num_batches=5)))
    with pytest.raises(RuntimeError, match="expected an empty pipeline, got 2 batches"):
        pipeline.start()


def test_module_that_is_not_pipelined_is_an_error(
    one_rank: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TinyModel, "forward", _forward_with_changed_ids)
    model, optimizer = build_tiny()
    pipeline = make_pipeline(
        PipelineSpec(PipelineKind.sparse_dist), model, optimizer, torch.device("cpu")
    )
    with pytest.raises(RuntimeError, match=r"expected 2 of 2 .* got 1; not pipelined: \[.*rows'\]"):
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


def test_unknown_kind_is_refused() -> None:
    auto = PipelineSpec(PipelineKind.auto)
    with pytest.raises(ValueError, match="expected one of .* got auto"):
        make_pipeline(auto, nn.Linear(1, 1), None, torch.device("cpu"))  # type: ignore[arg-type]
