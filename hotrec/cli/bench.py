"""``hotrec bench``: hot/cold against TorchRec's own plans on unsplit tables, in one run."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import warnings
from pathlib import Path
from typing import Any

from hotrec.bench.benchmark import measure
from hotrec.bench.figures import reference_case
from hotrec.bench.job import make_benchmark
from hotrec.bench.page import render_page, result_text
from hotrec.cli.watched import watched_ranks
from hotrec.config.roots import BenchRootConfig
from hotrec.runtime.run_dir import CONFIG_FILE

logger = logging.getLogger(__name__)

RESULT, PAGE = "bench.json", "bench.md"


def run(config: BenchRootConfig, run_dir: Path) -> dict[str, Any]:
    """Measure the configured cases; the figures of bench.json.

    Raises:
        RuntimeError: On every rank, after the results are written, if losses of two cases differ.
    """
    warnings.filterwarnings("ignore", module="torch|torchrec|fbgemm_gpu")
    with watched_ranks(run_dir, device=config.bench.device.name) as ranks:
        document = measure(make_benchmark(config, ranks), ranks)
        if ranks.is_first:
            _write(config, document, run_dir)
    if document["losses_apart"]:
        tolerance = config.bench.loss_tolerance
        apart = {
            name: document["cases"][name]["largest_loss_difference"]
            for name in document["losses_apart"]
        }
        raise RuntimeError(
            f"bench losses: expected all cases within {tolerance} of "
            f"{reference_case(document['cases'])}, got {apart}. The cases do not train the same "
            f"model; do not use these results."
        )
    return document


def _write(config: BenchRootConfig, document: dict[str, Any], run_dir: Path) -> None:
    print(result_text(document["cases"]), file=sys.stderr)
    (run_dir / RESULT).write_text(json.dumps(document, indent=2) + "\n")
    page = render_page(
        document,
        command=" ".join(["hotrec bench", *map(shlex.quote, sys.argv[1:])]),
        configuration=(run_dir / CONFIG_FILE).read_text(),
    )
    (run_dir / PAGE).write_text(page)
    if config.bench.page is not None:
        target = Path(config.bench.page)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page)
    logger.info("page: %s", config.bench.page or run_dir / PAGE)
