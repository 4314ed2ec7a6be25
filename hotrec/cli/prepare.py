"""``hotrec prepare``: turns a log into a dataset, or extends one, and counts its lookups."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from hotrec.assemble.counted import read_counts
from hotrec.cli.launch import environment_rank
from hotrec.cli.made import dataset_inputs, record_dataset
from hotrec.cli.watched import watched_ranks
from hotrec.config.roots import Config
from hotrec.data.chunks import SPLITS, Dataset
from hotrec.data.generation import generations_of, growth_of
from hotrec.data.kept import kept_directory, kept_generations, prune_generations
from hotrec.data.prepare import prepare
from hotrec.data.synthetic import write_synthetic
from hotrec.data.unknown import unknown_ids_of
from hotrec.lock import LockedError
from hotrec.runtime.ranks import same_verdict

logger = logging.getLogger(__name__)
MOSTLY_UNKNOWN_FRAC = 0.5


def run(config: Config, run_dir: Path) -> dict[str, Any]:
    """Write or extend paths.dataset, or prune its generations, and count its lookups."""
    output = Path(config.paths.dataset)
    start_s = time.perf_counter()
    is_written = config.prune is None or bool(config.append)
    digest = dataset_inputs(config) if is_written and environment_rank() == 0 else None
    # Ranks exchange objects and files, no tensors, so gloo is enough on any machine.
    with watched_ranks(run_dir, device="cpu", timeout_s=config.trainer.timeout_s) as ranks:
        if is_written:
            _write(config, output, is_first=ranks.is_first)
        figures = same_verdict(lambda: _describe(config, output) if ranks.is_first else None)
        if figures is None:  # rank 0 has them
            return {}
        elapsed_s = time.perf_counter() - start_s
        total = sum(figures["num_samples"].values())
        logger.info("%s: %d samples in %.1f s", output, total, elapsed_s)
    record_dataset(config, digest, figures)
    # The other ranks have ended: they need not wait.
    return {
        **figures,
        **_count(Dataset.open(output)),
        "samples_per_s": total / elapsed_s,
        "elapsed_s": elapsed_s,
        "world_size": ranks.world_size,
    }


def _count(dataset: Dataset) -> dict[str, Any]:
    """Figures of the dataset's profile."""
    start_s = time.perf_counter()
    _, artifact = read_counts(dataset)
    tables = artifact.content["tables"].values()
    num_lookups = sum(table["num_lookups"] for table in tables)
    count_s = time.perf_counter() - start_s
    logger.info("%s: %d lookups counted in %.1f s", artifact.path, num_lookups, count_s)
    return {
        "profile": artifact.path,
        "num_lookups": num_lookups,
        "num_distinct": sum(table["num_distinct"] for table in tables),
        "landmarks": artifact.content["landmarks"],
        "count_s": count_s,
    }


def _write(config: Config, output: Path, *, is_first: bool) -> None:
    overwrite = config.overwrite
    if config.data.source is not None:
        prepare(config.data.source, output, append=config.append, overwrite=overwrite)
        return
    spec = config.data.synthetic
    assert spec is not None  # the configuration is validated
    same_verdict(lambda: write_synthetic(spec, output, overwrite=overwrite) if is_first else None)


def _describe(config: Config, output: Path) -> dict[str, Any]:
    """The figures of the dataset, after pruning it; the lines that the terminal shows."""
    dataset = Dataset.open(output)
    figures = figures_of(dataset)
    for table, grown in growth_of(dataset).items():
        words = [f"{num} {name.replace('_', ' ')}" for name, num in grown.items()]
        logger.info("table %s: %s", table, ", ".join(words))
    for split, unknown in unknown_ids_of(dataset).items():
        text = unknown.text(split)
        if text is not None:
            is_most = max(unknown.fracs.values()) >= MOSTLY_UNKNOWN_FRAC
            logger.log(logging.WARNING if is_most else logging.INFO, "%s", text)
    return {**figures, **_prune(config, output)}


def _prune(config: Config, output: Path) -> dict[str, Any]:
    if config.prune is None:
        return {}
    try:
        pruned, freed_bytes = prune_generations(output, config.prune)
    except LockedError as error:
        if not config.append:
            raise
        # The dataset has been extended, so a second try would be refused.
        logger.warning("prune: nothing was removed: %s", error)
        pruned, freed_bytes = [], 0
    kept = kept_generations(output)
    logger.info(
        "prune: removed %d generations (%d bytes), kept %d in %s",
        *(len(pruned), freed_bytes, len(kept), kept_directory(output)),
    )
    return {"pruned": pruned, "freed_bytes": freed_bytes, "kept": kept}


def figures_of(dataset: Dataset) -> dict[str, Any]:
    """Figures of the dataset in the JSON line of ``prepare``."""
    artifact = dataset.artifact
    growth = growth_of(dataset)
    return {
        "command": "prepare",
        "dataset": artifact.path,
        "content_hash": artifact.content_hash,
        "generation": len(generations_of(dataset)),
        "num_samples": {split: dataset.num_samples(split) for split in SPLITS},
        "num_features": len(dataset.schema.features),
        "num_dense": len(dataset.schema.dense),
        "num_rows": {table.name: table.num_rows for table in dataset.schema.tables},
        "num_skipped": artifact.content["source"].get("num_skipped", 0),
        "unknown_ids": {
            split: unknown.to_json() for split, unknown in unknown_ids_of(dataset).items()
        },
        **({"growth": growth} if growth else {}),
    }
