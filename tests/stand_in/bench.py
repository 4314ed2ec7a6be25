"""What a rank with the stand-in does for ``test_bench.py``."""

from __future__ import annotations

import torch

from hotrec.bench.cases import build_runner
from hotrec.bench.job import make_cases, subject_of
from hotrec.bench.samples import ZipfTables
from hotrec.cli.store import build_config, compose_config
from hotrec.config.roots import BenchCase, BenchRouting
from hotrec.runtime.ranks import Ranks
from tests.stand_in.log import recording
from tests.stand_in.steps import figures

NUM_STEPS = 4


def pageable_copies() -> dict[str, dict[str, int]]:
    """Copies from pageable memory in steps of each case, with routing in the loader and outside."""
    device, found = torch.device("cuda", torch.cuda.current_device()), {}
    ranks = Ranks(0, 1, 0, 1, device)
    config = build_config(compose_config("bench", ["bench=smoke"]))
    bench = config.bench
    bench.cases = [*BenchCase.__members__, "look_ahead"]
    samples = ZipfTables(bench.table_rows, exponent=1.05, num_dense=4, seed=0)
    subject = subject_of(config, samples.schema)
    for bench.routing in BenchRouting:
        for case in make_cases(bench, samples.count(1000), 1, device.type):
            batches = samples.batches(NUM_STEPS + 4, batch_size=64, rank=0, world_size=1)
            runner = build_runner(subject, case, batches, ranks, samples)
            with recording() as log:
                for _ in range(NUM_STEPS - 1):
                    runner.step()
                runner.drain()
            runner.pipeline.close()
            found[f"{case.name}, routing {bench.routing.value}"] = figures(log.entries).pageable
    return found
