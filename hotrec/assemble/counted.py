"""The lookups of a dataset's rows, counted once and kept beside it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hotrec.artifact import Artifact, ArtifactError, check_made_from
from hotrec.cost_model.blocks import Block
from hotrec.cost_model.histogram import merge_histograms
from hotrec.cost_model.profile import Profile, landmarks, read_profile, write_profile
from hotrec.cost_model.reuse import LogReuse
from hotrec.data.chunks import Dataset, Jagged
from hotrec.runtime.progress import Progress

logger = logging.getLogger(__name__)

# Drift is detected at this share of the rows, if their held-out share of lookups is less than this
# multiple of that in training. The ranking of few popular rows is hardly random.
DRIFT_AT, DRIFT_RATIO = 0.01, 0.9
# Maximum share of a table's held-out lookups of rows without a lookup in training.
UNSEEN_FRAC = 0.5


def profile_path(dataset: str | Path) -> Path:
    """Where the profile of a dataset is."""
    return Path(f"{dataset}-profile")


def read_counts(dataset: Dataset) -> tuple[Profile, Artifact]:
    """The profile of a dataset, counted now unless `hotrec prepare` has done it; on one process.

    Raises:
        ArtifactError: If the profile or the dataset is damaged.
        ValueError: If a row lies outside its table.
    """
    path = profile_path(dataset.artifact.path)
    if path.exists():
        profile, artifact = read_profile(path)
        with suppress(ArtifactError):  # of a dataset that was here before
            check_made_from(artifact, dataset.artifact)
            return profile, artifact
        del profile, artifact  # until here it could not be replaced
    splits = {name: dataset.num_samples(name) for name in ("train", "valid")}
    with Progress("count", sum(splits.values()), unit="samples") as bar:
        profile, artifact = write_profile(
            _blocks_of(dataset, "train", bar),
            dataset.schema,
            path,
            dataset_hash=dataset.artifact.content_hash,
            num_samples=splits["train"],
            heldout_blocks=_blocks_of(dataset, "valid", bar) if splits["valid"] else None,
            num_heldout_samples=splits["valid"],
            reuse=LogReuse(dataset.schema, splits["train"]),
        )
    _warn_of_drift(profile, artifact.content)
    return profile, artifact


def _blocks_of(dataset: Dataset, split: str, bar: Progress) -> Iterator[Block]:
    """The chunks of a split as the cost model reads them."""
    for index in range(len(dataset.chunks(split))):
        chunk = dataset.block(split, index)
        rows: dict[str, Any] = {}
        lengths: dict[str, Any] = {}
        for name, ids in chunk.features.items():
            if isinstance(ids, Jagged):
                rows[name] = ids.values[ids.offsets[0] : ids.offsets[-1]]
                lengths[name] = ids.offsets[1:] - ids.offsets[:-1]
            else:
                rows[name] = ids
        yield Block(num_samples=len(chunk), rows=rows, lengths=lengths)
        bar.update(len(chunk))


def _warn_of_drift(profile: Profile, content: Mapping[str, Any]) -> None:
    """Warn if rows that are popular in training serve far fewer of the held-out lookups.

    Tables with new held-out values, such as a weekday that training did not have, are excluded:
    their rows are not evidence of drift.
    """
    if not profile.heldout:
        return
    unseen = {
        name: table["heldout_unseen_frac"]
        for name, table in content["tables"].items()
        if (table["heldout_unseen_frac"] or 0.0) > UNSEEN_FRAC
    }
    for name, frac in unseen.items():
        logger.warning(
            "table %s: %.1f%% of the held-out lookups have values unseen in training",
            *(name, 100 * frac),
        )
    known = [h for name, h in profile.build_histograms().items() if name not in unseen]
    points = landmarks(merge_histograms(known)) if known else []
    point = next((point for point in points if point["rows_frac"] == DRIFT_AT), None)
    if point is None or (point["heldout"] or 0.0) >= DRIFT_RATIO * point["train"]:
        return
    logger.warning(
        "popularity drift: the most-read %.3g%% of the rows serve %.1f%% of the lookups in "
        "training, and %.1f%% in the held-out part. Train in order of time with a hot set "
        "that follows the data (order=time placement.adapt_every_steps=100), or append newer data",
        *(100 * DRIFT_AT, 100 * point["train"], 100 * point["heldout"]),
    )
