"""Evaluate on held-out data over all ranks, exactly: every prediction counts once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hotrec.data.auc import measure_auc
from hotrec.data.batch import Batch
from hotrec.data.groups import NO_GROUP
from hotrec.models.task import ClickTask
from hotrec.runtime import watchdog
from hotrec.runtime.gathered_rows import gather_rows, gather_sizes
from hotrec.runtime.progress import Progress
from hotrec.runtime.ranks import all_gather_object, broadcast_object, rank, same_verdict, world_size
from hotrec.train.group_auc import measure_group_auc
from hotrec.train.pipelines import Pipeline
from hotrec.train.ranking import Ranking, find_places, measure_ranking
from hotrec.train.signals import signals_held_back

Floats = npt.NDArray[np.floating[Any]]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Quality:
    """How well logits predict clicks.

    Args:
        auc: chance that a click scores above a non-click; None unless both occur.
        log_loss: mean cross entropy in nats.
        normalized_entropy: log loss over that of always predicting the click rate of the same
            samples; below 1 is better than that. None unless clicks and non-clicks occur.
        num_samples: the number of samples; with weights, of those whose weight is above 0.
        by_label: with several labels, the quality of each. The log loss is then the weighted sum
            that is trained, the normalised entropy its ratio to that of predicting the rates, and
            the AUC the weighted mean.
        further: figures that are measured only on request, by key: those of GAUC and of ranking.
    """

    auc: float | None
    log_loss: float
    normalized_entropy: float | None
    num_samples: int
    by_label: Mapping[str, Quality] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The figures; ``by_label`` only with several labels."""
        document = {name: getattr(self, name) for name in (*QUALITIES, "num_samples")}
        document |= self.further
        if self.by_label:
            document["by_label"] = {name: of.to_json() for name, of in self.by_label.items()}
        return document


@dataclass(frozen=True)
class Ranked:
    """The places of the items of samples.

    Args:
        places: int64 (S,), see ``find_places``; those of samples of label 0 are not used.
        ks: lengths of the lists.
    """

    places: Rows
    ks: tuple[int, ...]


# The figures of every quality.
QUALITIES = tuple(
    item.name for item in fields(Quality) if item.name not in ("num_samples", "by_label", "further")
)


def measure_all(
    logits: Floats,
    labels: Floats,
    weights: Floats | None = None,
    label_weights: Mapping[str, float] | None = None,
    groups: Rows | None = None,
    ranked: Ranked | None = None,
) -> Quality:
    """Measure the quality of all predictions of a split, of one label or several.

    Args:
        logits: (S,), or (S, L) with several labels.
        labels: (S,) or (S, L).
        weights: (S,), weights of the samples; None or all 1 without.
        label_weights: Weight of each of several labels in the loss; None for one label.
        groups: (S,), see ``measure_quality``.
        ranked: see ``measure_quality``; only with one label.

    Raises:
        ValueError: as ``measure_quality``.
    """
    if weights is not None:
        is_used = weights > 0
        logits, labels, weights = logits[is_used], labels[is_used], weights[is_used]
        groups = None if groups is None else groups[is_used]
        if ranked is not None:
            ranked = replace(ranked, places=ranked.places[is_used])
        if (weights == 1).all():
            weights = None
    if not label_weights or logits.size == 0:
        return measure_quality(logits, labels, weights, groups, ranked)
    of = {
        name: measure_quality(logits[:, label], labels[:, label], weights, groups)
        for label, name in enumerate(label_weights)
    }
    loss = sum(label_weights[name] * found.log_loss for name, found in of.items())
    auc = _mean_of_labels({name: found.auc for name, found in of.items()}, label_weights)
    has_all = auc is not None
    entropy = sum(
        label_weights[name] * found.log_loss / found.normalized_entropy
        for name, found in of.items()
        if found.normalized_entropy
    )
    return Quality(
        auc=auc,
        log_loss=loss,
        normalized_entropy=loss / entropy if has_all else None,
        num_samples=len(logits),
        by_label=of,
        further={
            key: _mean_of_labels(
                {name: found.further[key] for name, found in of.items()}, label_weights
            )
            for key in next(iter(of.values())).further
        },
    )


def _mean_of_labels(
    values: Mapping[str, float | None], label_weights: Mapping[str, float]
) -> float | None:
    """The weighted mean; None if a label has no value, or all weights are 0."""
    known = [label_weights[name] * value for name, value in values.items() if value is not None]
    total = sum(label_weights.values())
    return sum(known) / total if len(known) == len(values) and total > 0 else None


def measure_quality(
    logits: Floats,
    labels: Floats,
    weights: Floats | None = None,
    groups: Rows | None = None,
    ranked: Ranked | None = None,
) -> Quality:
    """Measure the quality of all predictions of one label.

    Args:
        logits: (S,), log odds of a click, finite.
        labels: (S,), 0 or 1.
        weights: (S,), above 0; all means are weighted by them. None for none.
        groups: (S,), int64, the groups of ``measure_group_auc``; None measures no GAUC.
        ranked: the places of the samples' items; None measures no ranking.

    Raises:
        ValueError: if there is no sample, a logit is not finite, or a label is neither 0 nor 1.
    """
    if logits.shape != labels.shape or logits.ndim != 1 or logits.size == 0:
        raise ValueError(
            f"evaluation: expected as many labels as logits and at least one, got shapes "
            f"{logits.shape} and {labels.shape}. Check that the split has samples."
        )
    if not np.isfinite(logits).all():
        raise ValueError(
            f"evaluation: expected finite logits, got {np.count_nonzero(~np.isfinite(logits))} of "
            f"{logits.size} not finite. The model has diverged; lower the learning rate."
        )
    is_click = labels == 1
    wrong = labels[~is_click & (labels != 0)]
    if wrong.size:
        raise ValueError(f"evaluation: expected labels 0 or 1, got {wrong[0]}.")
    log_loss = measure_log_loss(logits, labels, weights)
    rate = float(is_click.mean() if weights is None else np.average(is_click, weights=weights))
    has_both = 0.0 < rate < 1.0
    further: dict[str, Any] = {}
    if groups is not None:
        grouped = measure_group_auc(logits, is_click, groups, weights)
        further = {"gauc": grouped.gauc, "gauc_samples_frac": grouped.samples_frac}
    if ranked is not None:
        of_clicks = None if weights is None else weights[is_click]
        further |= measure_ranking(ranked.places[is_click], ranked.ks, of_clicks)
    base_entropy = -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)) if has_both else 0.0
    return Quality(
        auc=measure_auc(logits, is_click, weights) if has_both else None,
        log_loss=log_loss,
        normalized_entropy=float(log_loss / base_entropy) if has_both else None,
        num_samples=int(logits.size),
        further=further,
    )


def measure_log_loss(logits: Floats, labels: Floats, weights: Floats | None = None) -> float:
    """Mean of log(1 + exp(z)) - y z, which does not overflow for large logits."""
    z = logits.astype(np.float64)
    losses = np.logaddexp(0.0, z) - labels.astype(np.float64) * z
    # Keeps the plain mean's rounding without weights; np.average rounds differently.
    return float(np.mean(losses) if weights is None else np.average(losses, weights=weights))


def evaluate(
    pipeline: Pipeline,
    batches: Iterable[Batch],
    *,
    step: int | None = None,
    ranking: Ranking | None = None,
) -> Quality:
    """Measure the model on this rank's share of a split together with all other ranks.

    Args:
        pipeline: empty; it is empty again on return.
        batches: the same number on every rank; padding samples (weight 0) are ignored.
        step: updates made so far, for the watchdog's messages.
        ranking: the items to rank, for a model of user and item vectors; None for none.

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
        # Starting a loader draws a random number, which must not affect training.
        with (
            torch.random.fork_rng(devices=devices),
            torch.no_grad(),
            Progress("evaluate", _count(batches), unit="batches", is_shown=rank() == 0) as bar,
        ):
            found = _predict(pipeline, same_verdict(lambda: _start(batches)), step, bar)
            if ranking is not None:
                found["places"] = _rank_items(pipeline, ranking, found, step)
    finally:
        model.train(was_training)
    of_host = {name: part.cpu().numpy() for name, part in found.items() if name in _GATHERED}
    parts = _gather_on_first(of_host)
    # The first rank sorts all predictions; the others wait without a time limit.
    watchdog.enter(watchdog.MAIN, watchdog.METRICS, step)
    label_weights = next((m.label_weights for m in model.modules() if isinstance(m, ClickTask)), {})

    def measure() -> Quality | None:
        if parts is None:
            return None
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        places = whole.pop("places", None)
        ranked = None if places is None or ranking is None else Ranked(places, ranking.ks)
        return measure_all(**whole, label_weights=label_weights, ranked=ranked)

    return broadcast_object(same_verdict(measure))  # type: ignore[return-value]


def _count(batches: Iterable[Batch]) -> int | None:
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:  # a DataLoader over a stream has a length by type only
        return None


def _start(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Start the loader; ranks with unequal numbers of batches would wait for each other."""
    nums = all_gather_object(_count(batches))
    if len(set(nums)) > 1:
        raise ValueError(
            f"evaluation: expected the same number of batches on every rank, got {nums}. Pad the "
            "shorter ones."
        )
    with signals_held_back():
        return iter(batches)


# What rank 0 measures: logits and labels, float32 (S,) or (S, L), weights (S,), and if measured,
# groups and places, int64 (S,).
_GATHERED = ("logits", "labels", "weights", "groups", "places")


def _predict(
    pipeline: Pipeline, iterator: Iterator[Batch], step: int | None, bar: Progress
) -> dict[str, torch.Tensor]:
    """The predictions of this rank, without padding: those of ``_GATHERED`` but for the places.

    Also, if batches have items, these, int64 (S,), those that are left out, int64 (S, N), and of a
    model that has them the vectors of user and item, (S, 2, D), on the device.
    """
    # What batches have besides the model's output, of those in the pipeline.
    held: deque[dict[str, torch.Tensor]] = deque()

    def remember() -> Iterator[Batch]:
        for batch in iterator:
            ids = None if batch.items is None else batch.items.ids
            seen = None if batch.items is None else batch.items.seen
            parts = {
                "weights": batch.weights,
                "groups": batch.groups,
                "items": ids,
                "seen": seen,
            }
            held.append({name: of.clone() for name, of in parts.items() if of is not None})
            yield batch

    pipeline.start()
    remembered = remember()
    first = next(remembered, None)
    if first is None:
        return dict.fromkeys(("logits", "labels", "weights"), torch.empty(0))
    batches = chain([first], remembered)
    # On the device until all are computed: a copy of each to the host would wait for its batch.
    # Labels and weights are cloned, since views would keep the memory of the whole batch.
    parts: list[dict[str, torch.Tensor]] = []
    while held:  # one for every batch that is not computed yet
        watchdog.enter(watchdog.MAIN, watchdog.EVALUATION, step)
        _, logits_B, labels_B, *vectors_B2D = pipeline.progress(batches)
        part = {"logits": logits_B.float(), "labels": labels_B.float().clone(), **held.popleft()}
        if "items" in part and vectors_B2D:
            part["vectors"] = vectors_B2D[0]
        parts.append(part)
        bar.update()
    width = max(part["seen"].size(1) for part in parts) if "seen" in parts[0] else 0
    for part in parts:
        if "seen" in part:
            missing = width - part["seen"].size(1)
            part["seen"] = F.pad(part["seen"], (0, missing), value=NO_GROUP)
    found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    is_sample = found["weights"] > 0
    return {name: part[is_sample.to(part.device)] for name, part in found.items()}


def _rank_items(
    pipeline: Pipeline, ranking: Ranking, found: Mapping[str, torch.Tensor], step: int | None
) -> torch.Tensor:
    """The places of the items of this rank's positive samples, int64 (S,); collective."""
    iterator = same_verdict(lambda: _start(ranking.catalogue))
    with Progress("items", _count(ranking.catalogue), unit="batches", is_shown=rank() == 0) as bar:
        catalogue = _predict(pipeline, iterator, step, bar)
    watchdog.enter(watchdog.MAIN, watchdog.METRICS, step)
    if "vectors" not in catalogue:
        raise ValueError(
            "trainer.eval_ranking: expected a model of user and item vectors, got one without. "
            "Choose model=two_tower, or hstu or sasrec with model.loss=sampled_softmax."
        )
    vectors, device = catalogue["vectors"], pipeline.device
    is_item = catalogue["items"].to(device) != NO_GROUP
    ids_m, items_mD = catalogue["items"].to(device)[is_item], vectors[is_item, 1]
    sizes = gather_sizes(ids_m.numel(), device)
    ids_M = gather_rows(ids_m.unsqueeze(1), sizes).squeeze(1)
    items_MD = gather_rows(items_mD, sizes)
    ids_M, order = ids_M.sort()
    places_S = torch.zeros(len(found["logits"]), dtype=torch.int64, device=device)
    if "vectors" in found:
        targets_S = found["items"].to(device)
        is_ranked = (found["labels"].to(device) == 1) & (targets_S != NO_GROUP)
        users_PD, targets_P = found["vectors"][is_ranked, 0], targets_S[is_ranked]
        items_MD = items_MD[order]
        seen_PN = found["seen"].to(device)[is_ranked] if "seen" in found else None
        places_S[is_ranked] = same_verdict(
            lambda: find_places(users_PD, targets_P, items_MD, ids_M, seen_PN)
        )
    return places_S


def _gather_on_first(
    predictions: dict[str, np.ndarray],
) -> list[dict[str, np.ndarray]] | None:
    """All ranks' predictions on rank 0, None elsewhere."""
    if world_size() == 1:
        return [predictions]
    parts: list[Any] | None = [None] * world_size() if rank() == 0 else None
    dist.gather_object(predictions, parts, dst=0)
    return parts
