"""Runs of `hotrec train` one after the other on the same ranks, without a start for each.

    torchrun ... -m benchmarks.choice_runs RUNS

RUNS is a JSON file of [run directory, overrides of the configuration] by run. Each run starts as in
a new process, except that memory freed by earlier runs is reused. A run with an invalid
configuration writes the reason to its directory, and the next one starts.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

from hotrec.assemble.job import chosen_device
from hotrec.cli.store import build_config, compose_config
from hotrec.runs.train import run_training
from hotrec.runtime.ranks import barrier, process_group

ERROR = "error.txt"


def train_all(file: Path) -> None:
    """Train every run of the file on the ranks of torchrun; collective."""
    runs = [(Path(place), words) for place, words in json.loads(file.read_text())]
    configs = [build_config(compose_config("config", words)) for _, words in runs]
    trainer = configs[0].trainer
    device = chosen_device(trainer.device)
    with process_group(device=device, timeout_s=trainer.timeout_s) as ranks:
        for (run_dir, _), config in zip(runs, configs, strict=True):
            try:
                run_training(config, run_dir, ranks)
            except ValueError as error:  # the same on every rank
                if ranks.is_first:
                    (run_dir / ERROR).write_text(f"{error}\n")
            gc.collect()  # ends the loader's workers
            barrier()


if __name__ == "__main__":
    train_all(Path(sys.argv[1]))
