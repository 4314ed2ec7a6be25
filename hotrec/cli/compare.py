"""``hotrec compare``: interleave training with the plans of runs, or given ones, in one run."""

from __future__ import annotations

import json
import shlex
import sys
import time
import warnings
from pathlib import Path
from typing import Any

from hotrec.assemble.job import chosen_device
from hotrec.bench.benchmark import measure
from hotrec.bench.figures import reference_case
from hotrec.bench.job import make_benchmark
from hotrec.bench.page import render_page, result_text
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

PAGE = "compare.md"


def run(config: CompareConfig, run_dir: Path) -> dict[str, Any]:
    """Compare the plans of the runs as recorded, or those given, and write ``compare.json``.

    Raises:
        RuntimeError: On every rank, after the results are written, if losses of two plans differ.
    """
    if config.plans.is_chosen:
        return _measure(config, run_dir)
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


def _measure(config: CompareConfig, run_dir: Path) -> dict[str, Any]:
    """Measure hot/cold against TorchRec's own plans on unsplit tables; the figures."""
    warnings.filterwarnings("ignore", module="torch|torchrec|fbgemm_gpu")
    with watched_ranks(run_dir, device=config.device.name) as ranks:
        document = measure(make_benchmark(config, ranks), ranks)
        if ranks.is_first:
            print(result_text(document["cases"]), file=sys.stderr)
            page = render_page(
                document,
                command=shlex.join(["hotrec", "compare", *sys.argv[1:]]),
                configuration=(run_dir / CONFIG_FILE).read_text(),
            )
            text = json.dumps(document, indent=2) + "\n"
            write_files(run_dir, {COMPARED_JSON: text, PAGE: page})
            if config.plans.page is not None:
                target = Path(config.plans.page)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(page)
    if document["losses_apart"]:
        cases = document["cases"]
        apart = {name: cases[name]["largest_loss_difference"] for name in document["losses_apart"]}
        raise RuntimeError(
            f"plans losses: expected all cases within {config.plans.loss_tolerance} of "
            f"{reference_case(cases)}, got {apart}. The cases do not train the same model; do not "
            "use these results."
        )
    return document
