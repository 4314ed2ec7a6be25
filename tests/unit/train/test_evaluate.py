from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hotrec.data.batch import Batch
from hotrec.runtime.ranks import Ranks
from hotrec.train.evaluate import evaluate, measure_quality
from hotrec.train.pipelines import Pipeline, make_pipeline
from tests.helpers.tiny import TinyLoader, build_tiny, tiny_batch


def start(kind: str, **kwargs: float) -> Pipeline:
    model, optimizer = build_tiny(**kwargs)
    return make_pipeline(kind, model, optimizer, torch.device("cpu"))


def state_copy(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in pipeline.model.named_parameters()}


@pytest.mark.parametrize("kind", ["base", "sparse_dist"])
def test_quality_is_that_of_all_samples_but_padding(kind: str, one_rank: Ranks) -> None:
    batches = [tiny_batch(seed, 6, num_padding=seed % 3) for seed in range(5)]
    model, _ = build_tiny()
    with torch.no_grad():
        outputs = [model.eval()(batch)[1] for batch in batches]
    keep = np.concatenate([batch.weights.numpy() > 0 for batch in batches])
    logits = np.concatenate([output[1].numpy() for output in outputs])[keep]
    labels = np.concatenate([output[2].numpy() for output in outputs])[keep]
    assert keep.sum() == 26
    quality = evaluate(start(kind), batches)
    assert quality == measure_quality(logits, labels)
    assert quality.num_samples == 26


@pytest.mark.parametrize("kind", ["base", "sparse_dist"])
def test_training_goes_on_as_if_nothing_was_evaluated(kind: str, one_rank: Ranks) -> None:
    """Neither weights, nor training mode, nor random numbers, nor train batches are touched."""
    losses: dict[bool, list[float]] = {}
    for evaluates in (False, True):
        pipeline = start(kind, dropout=0.3)
        source = iter(TinyLoader(num_batches=6))
        torch.manual_seed(5)
        losses[evaluates] = []
        for _ in range(3):
            batches = iter([next(source), next(source)])
            pipeline.start()
            losses[evaluates] += [float(pipeline.progress(batches)[0]) for _ in range(2)]
            if evaluates:
                before = state_copy(pipeline)
                evaluate(pipeline, TinyLoader(num_batches=3, seed=7))
                assert pipeline.model.training
                for name, value in pipeline.model.named_parameters():
                    torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert losses[True] == losses[False]


def test_evaluation_has_no_dropout(one_rank: Ranks) -> None:
    loader = [tiny_batch(1, 8), tiny_batch(2, 8)]
    assert evaluate(start("base", dropout=0.9), loader) == evaluate(start("base"), loader)


def test_model_that_was_not_training_stays_so(one_rank: Ranks) -> None:
    pipeline = start("sparse_dist")
    pipeline.model.eval()
    evaluate(pipeline, [tiny_batch(1, 8)])
    assert not pipeline.model.training


def test_empty_split_is_an_error(one_rank: Ranks) -> None:
    with pytest.raises(ValueError, match="at least one"):
        evaluate(start("sparse_dist"), [])


def test_failing_loader_leaves_the_model_in_training_mode(one_rank: Ranks) -> None:
    def failing() -> Iterator[Batch]:
        yield tiny_batch(1, 8)
        raise OSError("chunk 3 is gone")

    pipeline = start("base")
    with pytest.raises(OSError, match="chunk 3 is gone"):
        evaluate(pipeline, failing())
    assert pipeline.model.training
