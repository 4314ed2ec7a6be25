"""``hotrec profile``: count the lookups of every row of a dataset, and draw their coverage."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hotrec.config.roots import Config, ProfileConfig
from hotrec.cost_model.blocks import Block
from hotrec.cost_model.histogram import merge_histograms
from hotrec.cost_model.profile import Profile, Sampling, landmarks, write_profile
from hotrec.cost_model.reuse import LogReuse
from hotrec.data.chunks import Dataset, Jagged
from hotrec.report.pictures import plot_coverage
from hotrec.runtime.progress import Progress

logger = logging.getLogger(__name__)

COVERAGE_PICTURE = "coverage.png"
# Drift is detected at this share of the rows, if their held-out share of lookups is less than this
# multiple of that in training. The ranking of few popular rows is hardly random.
DRIFT_AT, DRIFT_RATIO = 0.01, 0.9
# Maximum share of a table's held-out lookups of rows without a lookup in training.
UNSEEN_FRAC = 0.5


def run(config: Config, run_dir: Path) -> dict[str, Any]:
    """Write paths.profile, and the coverage picture into the run directory."""
    dataset = Dataset.open(config.paths.dataset, config.paths.verify)
    output = Path(config.paths.profile)
    start_s = time.perf_counter()
    holds_out_validation = config.profile.heldout_frac == 0 and dataset.num_samples("valid") > 0
    num_heldout = dataset.num_samples("valid") if holds_out_validation else None
    num_samples = dataset.num_samples("train") + (num_heldout or 0)
    with Progress("profile", num_samples, unit="samples") as bar:
        profile, artifact = write_profile(
            blocks_of(dataset, "train", bar),
            dataset.schema,
            output,
            dataset_hash=dataset.artifact.content_hash,
            num_samples=dataset.num_samples("train"),
            heldout_frac=config.profile.heldout_frac,
            heldout_blocks=blocks_of(dataset, "valid", bar) if holds_out_validation else None,
            num_heldout_samples=num_heldout,
            sampling=sampling_of(config.profile),
            reuse=LogReuse(dataset.schema, dataset.num_samples("train"), seed=config.profile.seed),
        )
    elapsed_s = time.perf_counter() - start_s
    picture = run_dir / COVERAGE_PICTURE
    plot_coverage(output, picture)
    content = artifact.content
    num_lookups = sum(table["num_lookups"] for table in content["tables"].values())
    logger.info("%s: %d lookups counted in %.1f s", output, num_lookups, elapsed_s)
    _warn_of_drift(profile, content)
    return {
        "command": "profile",
        "profile": output,
        "content_hash": artifact.content_hash,
        "picture": picture,
        "num_samples": profile.num_samples,
        "num_heldout_samples": profile.num_heldout_samples,
        "num_lookups": num_lookups,
        "num_distinct": sum(table["num_distinct"] for table in content["tables"].values()),
        "num_rows": sum(profile.num_rows.values()),
        "landmarks": content["landmarks"],
        "lookups_per_s": num_lookups / elapsed_s,
        "elapsed_s": elapsed_s,
    }


def _warn_of_drift(profile: Profile, content: Mapping[str, Any]) -> None:
    """Warn if rows that are popular in training serve far fewer of the held-out lookups.

    Tables with new held-out values, such as a weekday that training did not have, are excluded:
    their rows are not evidence of drift.
    """
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
    train, heldout = _shares(content["landmarks"])
    if unseen and _drifts(train, heldout):
        others = [h for name, h in profile.build_histograms().items() if name not in unseen]
        if not others:
            return
        train, heldout = _shares(landmarks(merge_histograms(others), profile.sampling))
    if _drifts(train, heldout):
        logger.warning(
            "popularity drift: the most-read %.3g%% of the rows serve %.1f%% of the lookups in "
            "training, and %.1f%% in the held-out part. Train in order of time with a hot set "
            "that follows the data (order=time placement.adapt_every_steps=100), or profile "
            "newer data",
            *(100 * DRIFT_AT, 100 * train, 100 * (heldout or 0.0)),
        )


def _shares(points: list[dict[str, Any]]) -> tuple[float, float | None]:
    point = next(point for point in points if point["rows_frac"] == DRIFT_AT)
    return point["train"], point["heldout"]


def _drifts(train: float, heldout: float | None) -> bool:
    return heldout is not None and heldout < DRIFT_RATIO * train


def sampling_of(profile: ProfileConfig) -> Sampling:
    """What is counted, as configured."""
    return Sampling(
        profile.sample_frac,
        profile.seed,
        profile.min_count,
        half_life=profile.half_life_samples,
    )


def blocks_of(dataset: Dataset, split: str, bar: Progress | None = None) -> Iterator[Block]:
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
        if bar is not None:
            bar.update(len(chunk))
