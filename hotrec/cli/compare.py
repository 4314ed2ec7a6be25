"""``hotrec compare``: interleave training with the plans of several runs, and compare speed."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hotrec.assemble.job import chosen_device
from hotrec.cli.store import read_config
from hotrec.cli.watched import watched_ranks
from hotrec.config.roots import CompareConfig, Config
from hotrec.report.compared import COMPARED_JSON, Comparison
from hotrec.report.read import read_runs
from hotrec.report.render import write_files
from hotrec.report.verdict import choose_baseline, verdicts
from hotrec.runs.compare import compare_runs
from hotrec.runtime.ranks import same_verdict
from hotrec.runtime.run_dir import CONFIG_FILE, PLAN_JSON, find_run


def run(config: CompareConfig, run_dir: Path) -> dict[str, Any]:
    """Compare the plans of the runs as recorded, and write ``compare.json`` into the directory."""
    start_s = time.perf_counter()
    device = chosen_device(config.device)
    with watched_ranks(run_dir, device=device) as ranks:

        def find() -> dict[Path, Config]:
            found = [find_run(path, holding=PLAN_JSON, key="runs") for path in config.runs]
            if len(set(found)) < 2:
                raise ValueError(
                    f"runs: expected at least two runs, got {[str(path) for path in found]}. Add "
                    "another."
                )
            return {path: read_config(path / CONFIG_FILE, Config) for path in found}

        runs = same_verdict(find)
        document = compare_runs(runs, ranks, seconds=config.seconds)
    verdict: list[str] = []
    if ranks.is_first:
        write_files(run_dir, {COMPARED_JSON: json.dumps(document, indent=2) + "\n"})
        read = read_runs(runs)
        verdict = verdicts(read, choose_baseline(read), Comparison.read(run_dir))
    return {
        "command": "compare",
        "compared": run_dir / COMPARED_JSON,
        "runs": [*runs],
        "verdict": verdict,
        **document,
        "world_size": ranks.world_size,
        "elapsed_s": time.perf_counter() - start_s,
    }
