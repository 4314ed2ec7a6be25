"""``hotrec prepare``: a raw log, or a synthetic one, becomes a dataset or extends one."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from hotrec.artifact import Artifact
from hotrec.cli.watched import watched_ranks
from hotrec.config.roots import Config
from hotrec.data.chunks import SPLITS, Dataset
from hotrec.data.generation import growth_of
from hotrec.data.prepare import prepare
from hotrec.data.synthetic import write_synthetic
from hotrec.runtime.ranks import same_verdict

logger = logging.getLogger(__name__)


def run(config: Config, run_dir: Path) -> dict[str, Any]:
    """Write or extend paths.dataset; several ranks share the files of the log."""
    output = Path(config.paths.dataset)
    start_s = time.perf_counter()
    # Ranks exchange objects and files, no tensors, so gloo is enough on any machine.
    with watched_ranks(run_dir, device="cpu", timeout_s=config.trainer.timeout_s) as ranks:
        artifact = _write(config, output, is_first=ranks.is_first)
        elapsed_s = time.perf_counter() - start_s
        return _figures(artifact, output, elapsed_s, ranks.world_size)


def _write(config: Config, output: Path, *, is_first: bool) -> Artifact | None:
    if config.data.source is not None:
        return prepare(config.data.source, output, append=config.append)
    spec = config.data.synthetic
    assert spec is not None  # the configuration is validated
    return same_verdict(lambda: write_synthetic(spec, output) if is_first else None)


def _figures(
    artifact: Artifact | None, output: Path, elapsed_s: float, world_size: int
) -> dict[str, Any]:
    if artifact is None:  # rank 0 has it
        return {}
    dataset = Dataset.open(output)
    num_samples = {split: dataset.num_samples(split) for split in SPLITS}
    total = sum(num_samples.values())
    logger.info("%s: %d samples in %.1f s", output, total, elapsed_s)
    growth = growth_of(dataset)
    for table, grown in growth.items():
        words = [f"{num} {name.replace('_', ' ')}" for name, num in grown.items()]
        logger.info("table %s: %s", table, ", ".join(words))
    return {
        "command": "prepare",
        "dataset": output,
        "content_hash": artifact.content_hash,
        "num_samples": num_samples,
        "num_features": len(dataset.schema.features),
        "num_dense": len(dataset.schema.dense),
        "num_rows": {table.name: table.num_rows for table in dataset.schema.tables},
        "num_skipped": artifact.content["source"].get("num_skipped", 0),
        **({"growth": growth} if growth else {}),
        "samples_per_s": total / elapsed_s,
        "elapsed_s": elapsed_s,
        "world_size": world_size,
    }
