"""Evaluate on held-out data over all ranks, exactly: every prediction takes part, once.

Predictions are gathered on rank 0 and measured there together (8 bytes per sample), so AUC is not
an average of the ranks' AUCs nor a histogram's. The model is put in evaluation mode, in which the
pipeline neither clears gradients nor updates; it must be drained, or the batches that it holds
would be evaluated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sized
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist

from hotrec import watchdog
from hotrec.batch import Batch
from hotrec.distributed import (
    all_gather_object,
    broadcast_object,
    rank,
    same_verdict,
    world_size,
)
from hotrec.train.metrics import Quality, measure_quality
from hotrec.train.pipeline import Pipeline
from hotrec.train.watch import sigterm_held_back


def evaluate(pipeline: Pipeline, batches: Iterable[Batch], *, step: int | None = None) -> Quality:
    """Measure the model on this rank's share of a split together with all other ranks.

    Args:
        pipeline: drained; it is drained again on return.
        batches: as many on every rank; padding samples (weight 0) are left out.
        step: updates made so far, for the watchdog's messages.

    Returns:
        The quality over all ranks, the same on every rank.

    Raises:
        ValueError: if the split is empty or the ranks have different numbers of batches.
        RankError: on the other ranks, if one rank's loader fails to start.
    """
    watchdog.enter(watchdog.MAIN, watchdog.EVALUATION, step)
    model = pipeline.model
    was_training = model.training
    devices = [pipeline.device] if pipeline.device.type == "cuda" else []
    model.eval()
    try:
        # Starting a loader draws a random number; training goes on as if it had not.
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            predictions = _predict(pipeline, same_verdict(lambda: _start(batches)), step)
    finally:
        model.train(was_training)
    gathered = _gather_on_first(predictions)
    # The first rank sorts all predictions; the others wait, however long it takes.
    watchdog.enter(watchdog.MAIN, watchdog.METRICS, step)
    quality = same_verdict(lambda: None if gathered is None else _measure(gathered))
    return broadcast_object(quality)  # type: ignore[return-value]


def _start(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Start the loader; ranks with unequal numbers of batches would wait for one another."""
    nums = all_gather_object(_count(batches))
    if len(set(nums)) > 1:
        raise ValueError(
            f"evaluation: expected as many batches on every rank, got {nums}. "
            "Pad the ranks that have fewer."
        )
    with sigterm_held_back():
        return iter(batches)


def _count(batches: Iterable[Batch]) -> int | None:
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:  # a DataLoader over a stream has a length by type only
        return None


def _predict(pipeline: Pipeline, iterator: Iterator[Batch], step: int | None) -> torch.Tensor:
    """Logits and labels of this rank, float32 (S, 2) on the host, padding left out."""
    weights: deque[torch.Tensor] = deque()  # of the batches that the pipeline holds

    def remember_weights() -> Iterator[Batch]:
        for batch in iterator:
            weights.append(batch.weights)
            yield batch

    pipeline.start()
    remembered = remember_weights()
    first = next(remembered, None)
    if first is None:
        return torch.empty(0, 2)
    batches = chain([first], remembered)
    # On the device until all are there: a copy of each would make the host wait for its batch.
    pairs, are_samples = [], []
    while weights:  # one for every batch that is handed out and not yet computed
        watchdog.enter(watchdog.MAIN, watchdog.EVALUATION, step)
        _, logits, labels = pipeline.progress(batches)
        pairs.append(torch.stack([logits.float(), labels.float()], dim=1))
        are_samples.append(weights.popleft() > 0)
    return torch.cat(pairs).cpu()[torch.cat(are_samples).cpu()]


def _gather_on_first(predictions: torch.Tensor) -> np.ndarray | None:
    """All ranks' predictions on rank 0, None elsewhere."""
    if world_size() == 1:
        return predictions.numpy()
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    sizes = all_gather_object(len(predictions))
    padded = torch.zeros(max(sizes), 2, device=device)
    padded[: len(predictions)] = predictions.to(device)
    parts = [torch.empty_like(padded) for _ in sizes] if rank() == 0 else None
    dist.gather(padded, parts, dst=0)
    if parts is None:
        return None
    return np.concatenate(
        [part[:size].cpu().numpy() for part, size in zip(parts, sizes, strict=True)]
    )


def _measure(predictions: np.ndarray) -> Quality:
    return measure_quality(predictions[:, 0], predictions[:, 1])
